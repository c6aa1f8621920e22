//! Protection of a program's own process: its memory holds keys and tokens, and its environment may hold passwords.
//!
//! [`protect_process`][] is the first call of each program. It makes the process not dumpable: no core file is written,
//! and nobody but root with `CAP_SYS_PTRACE` can attach to the process or read its memory and its environment, not even
//! another process of the same user (prctl(2), proc(5)). It also lowers the limit of core files, which people see in
//! `/proc/PID/limits`.
//!
//! # What is inherited
//!
//! * `execve` makes a process dumpable again. So what a program starts is as open as usual, and a program that replaces
//!   itself by another release protects itself again when that release begins.
//! * The limit of core files is inherited by everything. Only the soft limit is lowered, so that it can be raised again
//!   without a privilege. [`restore_core_limit`][] gives it back to a program that is started, and
//!   [`restore_own_core_limit`][] to one that replaces this one.
//! * The limit of open files is inherited, too. [`file_limit`] gives the usual one to a program that is started.
//!
//! # What a process uses of its limits
//!
//! [`own_usage`] reads open files and file systems, so that a program reports a limit before it is reached.
//!
//! # What a process can still read of itself
//!
//! In `/proc/self` most files of a process that is not dumpable belong to root. The kernel lets a process follow its
//! own links nevertheless (`exe`, `cwd`, `fd/N`), and `stat`, `status`, `cgroup`, `mountinfo` and `limits` are readable
//! for everybody. Before Linux 5.14, `fdinfo` is closed to a process that is not root: nothing may need it.

pub mod file_limit;
pub mod own_usage;

use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::OnceLock;

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};

/// The limit of core files with which this process was started; unset while it is not protected.
static FORMER_CORE_LIMIT: OnceLock<Rlimit> = OnceLock::new();

/// Protects this process. If that fails, it writes a warning to standard error in the name of `program`, and the
/// program continues.
pub fn protect_process(program: &str) {
    if let Err(error) = protect() {
        // Standard error may be closed. Then the core limit in `/proc/PID/limits` is the only sign.
        let _ = writeln!(
            std::io::stderr(),
            "{program}: warning: this process could not be closed to others ({error}): its memory and environment can \
             be read by processes of its user"
        );
    }
}

fn protect() -> std::io::Result<()> {
    let former = *FORMER_CORE_LIMIT.get_or_init(|| getrlimit(Resource::Core));
    // In this order: once the limit is 0, everything is done.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: former.maximum })?;
    Ok(())
}

/// Makes a program that is started have the limit of core files with which this process was started.
pub fn restore_core_limit(command: &mut Command) -> &mut Command {
    let Some(former) = FORMER_CORE_LIMIT.get().copied() else { return command };
    // SAFETY: between `fork` and `execve` it makes one system call and allocates nothing.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Core, former)?)) }
}

/// Gives this process the limit of core files back with which it was started, for the program that replaces it. It
/// stays closed to others until then.
pub fn restore_own_core_limit() -> std::io::Result<()> {
    if let Some(former) = FORMER_CORE_LIMIT.get().copied() {
        setrlimit(Resource::Core, former)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::process::dumpable_behavior;

    fn core_limit(limits: &str) -> String {
        let line = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        line.split_whitespace().nth(4).unwrap().to_owned()
    }

    fn own_core_limit() -> String {
        core_limit(&std::fs::read_to_string("/proc/self/limits").unwrap())
    }

    fn core_limit_of(command: &mut Command) -> String {
        core_limit(&String::from_utf8(command.arg("/proc/self/limits").output().unwrap().stdout).unwrap())
    }

    /// One test, because what it changes is the whole process.
    #[test]
    fn process_is_closed_and_what_it_starts_gets_its_core_limit_back() {
        let maximum = getrlimit(Resource::Core).maximum;
        let start = Rlimit { current: Some(maximum.map_or(4096, |most| most.min(4096))), maximum };
        setrlimit(Resource::Core, start).unwrap();
        let former = own_core_limit();

        assert_eq!(
            core_limit_of(restore_core_limit(&mut Command::new("cat"))),
            former,
            "nothing to give back"
        );
        protect_process("test");
        assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
        assert_eq!(own_core_limit(), "0");
        assert_eq!(core_limit_of(&mut Command::new("cat")), "0", "it is inherited");
        assert_eq!(core_limit_of(restore_core_limit(&mut Command::new("cat"))), former);

        // A second call does not take its own work for the start.
        protect_process("test");
        assert_eq!(core_limit_of(restore_core_limit(&mut Command::new("cat"))), former);
        restore_own_core_limit().unwrap();
        assert_eq!(own_core_limit(), former);
        assert_eq!(
            dumpable_behavior().unwrap(),
            DumpableBehavior::NotDumpable,
            "it stays closed until the exec"
        );
    }
}
