//! The program etcd of this host: where it is, which version it is, and which flags that version takes.
//!
//! etcd 3.4 to 3.7 are supported. They take the same flags but for one, which 3.7 knows by another name only. So the
//! program is asked for its version before it is started.
//!
//! # What decides
//!
//! [`flags_of`] decides by the version alone, and [`running_flags`] by what runs already; both are pure. A name that
//! changes on the command line changes the digest of what runs, and another digest restarts a process. Hence:
//!
//! * Up to 3.6 the older name is used, although 3.6 knows both: an update of the role server restarts no etcd.
//! * An etcd that runs is adopted by either name, and its program is not asked. Somebody who replaces the program restarts
//!   nothing by that either. The new one runs from the next start on.
//!
//! # When the program is asked
//!
//! Before each start of etcd, and never otherwise. That is once in the life of a machine, as a rule. A cache of the answer
//! would save some milliseconds, and would be wrong where the program is a script in front of another file.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

/// How long the program may take to print its version.
pub const VERSION_DEADLINE: Duration = Duration::from_secs(10);
/// As much as is read of what it prints.
const VERSION_BYTES: u64 = 4096;
/// As much of that as a sentence quotes.
const QUOTED_CHARACTERS: usize = 120;
/// The oldest version that knows the flag which a peer with several addresses needs.
const OLDEST: Version = Version { major: 3, minor: 4, patch: 16 };
/// The first version that does not know it by its experimental name.
const NO_EXPERIMENTAL_FLAGS: Version = Version { major: 3, minor: 7, patch: 0 };

/// A version of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 3.
    pub major: u64,
    /// Of a minor release, which may change flags.
    pub minor: u64,
    /// Of a patch release.
    pub patch: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The names of flags that differ from version to version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    /// As 3.4 to 3.6 know them.
    Experimental,
    /// As 3.6 and later know them.
    Stable,
}

impl Flags {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Experimental, Self::Stable];

    /// The flag by which a member does not compare the address of a peer with those in the peer's certificate.
    #[must_use]
    pub const fn skip_client_san_verification(self) -> &'static str {
        match self {
            Self::Experimental => "--experimental-peer-skip-client-san-verification",
            Self::Stable => "--peer-skip-client-san-verification",
        }
    }
}

/// Why etcd cannot be started. Each is a sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The file does not exist.
    #[error(
        "there is no program {}: install etcd, 3.4.16 or later, where the role server finds it",
        .0.display()
    )]
    Missing(PathBuf),
    /// The file exists and is not executed.
    #[error("{} cannot be started ({source}): install etcd, 3.4.16 or later, in its place", program.display())]
    NotStarted {
        /// The program.
        program: PathBuf,
        /// Why the kernel refused it.
        source: io::Error,
    },
    /// It printed no version in time, and was killed.
    #[error(
        "{} --version did not end within {} s and was killed: find out what it waits for, or install etcd, 3.4.16 or \
         later, in its place",
        program.display(), within.as_secs_f64()
    )]
    Hangs {
        /// The program.
        program: PathBuf,
        /// The deadline.
        within: Duration,
    },
    /// It printed something else, or failed.
    #[error(
        "{} --version printed no version of etcd ({status}, {printed:?}): install etcd, 3.4.16 or later, in its place",
        program.display()
    )]
    NoVersion {
        /// The program.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// The beginning of what it printed.
        printed: String,
    },
    /// It lacks a flag.
    #[error("{} is etcd {version}, which is too old: install 3.4.16 or later", program.display())]
    TooOld {
        /// The program.
        program: PathBuf,
        /// Its version.
        version: Version,
    },
}

/// The program etcd of this host: the first of that name where programs are looked for.
#[must_use]
pub fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join("etcd"));
    let mut found = found.filter(|file| file.is_absolute() && file.is_file());
    found.next().unwrap_or_else(|| PathBuf::from("/usr/bin/etcd"))
}

/// The flags for a version; none where no flags would do. A version after the last one that is supported gets the flags
/// of that one.
#[must_use]
pub fn flags_of(version: Version) -> Option<Flags> {
    if version < OLDEST {
        None
    } else if version < NO_EXPERIMENTAL_FLAGS {
        Some(Flags::Experimental)
    } else {
        Some(Flags::Stable)
    }
}

/// The flags by which an etcd runs already; none where it runs otherwise, and is to be started again.
///
/// `running` is the digest of what runs, and `digest` computes that of what the flags ask for.
#[must_use]
pub fn running_flags(running: &str, digest: impl Fn(Flags) -> String) -> Option<Flags> {
    Flags::ALL.into_iter().find(|flags| digest(*flags) == running)
}

/// Reads what `etcd --version` prints: `etcd Version: 3.7.3` and more lines. What follows the numbers, as in `3.7.0-rc.1`,
/// does not count.
#[must_use]
pub fn parse_version(printed: &str) -> Option<Version> {
    let version = printed.lines().find_map(|line| line.strip_prefix("etcd Version:"))?.trim();
    let numbers = version.split(['-', '+']).next()?;
    let mut numbers = numbers.split('.').map(|number| number.parse().ok());
    let version = Version { major: numbers.next()??, minor: numbers.next()??, patch: numbers.next()?? };
    numbers.next().is_none().then_some(version)
}

/// Asks the program for its version and gives the flags for it.
pub async fn ask_flags(program: &Path, deadline: Duration) -> Result<Flags, ProgramError> {
    let version = ask_version(program, deadline).await?;
    let flags = flags_of(version);
    tracing::info!(program = %program.display(), %version, ?flags, "the program etcd");
    flags.ok_or_else(|| ProgramError::TooOld { program: program.to_owned(), version })
}

/// Asks the program for its version.
pub async fn ask_version(program: &Path, deadline: Duration) -> Result<Version, ProgramError> {
    let named = || program.to_owned();
    let mut command = Command::new(program);
    // In a process group of its own, which ends with the deadline. Without our environment, as it will run.
    command.arg("--version").env_clear().current_dir("/").process_group(0).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ProgramError::Missing(named()),
        _ => ProgramError::NotStarted { program: named(), source },
    })?;
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let answer = async {
        let (output, errors) = tokio::join!(read_text(output), read_text(errors));
        child.wait().await.map(|status| (status, output, errors))
    };
    let answered = tokio::time::timeout(deadline, answer).await;
    let Ok(answered) = answered else {
        if let Some(group) = group {
            // Its leader is not waited for yet, so the number is nobody else's.
            let _ = kill_process_group(group, Signal::KILL);
        }
        return Err(ProgramError::Hangs { program: named(), within: deadline });
    };
    let (status, output, errors) =
        answered.map_err(|source| ProgramError::NotStarted { program: named(), source })?;
    match parse_version(&output) {
        Some(version) if status.success() => Ok(version),
        _ => {
            let printed = if output.trim().is_empty() { errors } else { output };
            let printed = printed.trim().chars().take(QUOTED_CHARACTERS).collect();
            Err(ProgramError::NoVersion { program: named(), status, printed })
        }
    }
}

/// The beginning of what comes, up to the limit. What cannot be read counts as the end.
async fn read_text(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        let _ = from.take(VERSION_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn version(text: &str) -> Version {
        parse_version(&format!("etcd Version: {text}")).unwrap()
    }

    #[test]
    fn flags_follow_from_the_version() {
        for (text, flags) in [
            ("2.3.8", None),
            ("3.3.27", None),
            ("3.4.15", None),
            ("3.4.16", Some(Flags::Experimental)),
            ("3.4.23", Some(Flags::Experimental)),
            ("3.5.0", Some(Flags::Experimental)),
            ("3.5.21", Some(Flags::Experimental)),
            ("3.6.0", Some(Flags::Experimental)),
            ("3.6.99", Some(Flags::Experimental)),
            ("3.7.0-rc.1", Some(Flags::Stable)),
            ("3.7.3", Some(Flags::Stable)),
            ("3.10.0", Some(Flags::Stable)),
            ("4.0.0", Some(Flags::Stable)),
        ] {
            assert_eq!(flags_of(version(text)), flags, "{text}");
        }
    }

    #[test]
    fn version_is_read_and_nothing_is_guessed() {
        let debian = "etcd Version: 3.4.23\nGit SHA: Not provided (use ./build instead of go build)\nGo Version: go1.19.8\n";
        assert_eq!(parse_version(debian).unwrap().to_string(), "3.4.23");
        assert_eq!(parse_version("a warning\netcd Version: 3.7.0-rc.1+dfsg").unwrap().to_string(), "3.7.0");
        for text in ["", "etcd", "3.7.3", "etcd Version: ", "etcd Version: 3.7", "etcd Version: 3.7.3.1"] {
            assert_eq!(parse_version(text), None, "{text}");
        }
        for text in ["etcd Version: three", "etcd Version: 3.-7.3", "etcdctl version: 3.7.3"] {
            assert_eq!(parse_version(text), None, "{text}");
        }
    }

    #[test]
    fn etcd_that_runs_is_known_by_either_name() {
        let digest = |flags: Flags| flags.skip_client_san_verification().to_owned();
        for flags in Flags::ALL {
            assert_eq!(running_flags(&digest(flags), digest), Some(flags));
        }
        assert_eq!(running_flags("another", digest), None);
    }

    /// A program in a directory of its own.
    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("etcd");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        (directory, path)
    }

    async fn ask(text: &str, deadline: Duration) -> Result<Flags, String> {
        let (_directory, path) = script(text);
        // Another test may fork while this file is open for writing, and the kernel runs none that is open so.
        loop {
            match ask_flags(&path, deadline).await {
                Err(ProgramError::NotStarted { source, .. })
                    if source.kind() == io::ErrorKind::ExecutableFileBusy => {}
                answered => return answered.map_err(|error| error.to_string()),
            }
        }
    }

    #[tokio::test]
    async fn program_is_asked_and_its_failure_is_a_sentence() {
        let long = Duration::from_mins(5);
        let says = |text: &str| format!("#!/bin/sh\n[ \"$*\" = --version ] || exit 9\necho '{text}'\n");
        assert_eq!(ask(&says("etcd Version: 3.6.1"), long).await, Ok(Flags::Experimental));
        assert_eq!(ask(&says("etcd Version: 3.7.3"), long).await, Ok(Flags::Stable));
        let told = ask(&says("etcd Version: 3.3.1"), long).await.unwrap_err();
        assert!(told.ends_with("is etcd 3.3.1, which is too old: install 3.4.16 or later"), "{told}");
        let told = ask(&says("hello"), long).await.unwrap_err();
        assert!(told.contains("printed no version of etcd (exit status: 0, \"hello\"): install"), "{told}");
        let told =
            ask("#!/bin/sh\necho etcd Version: 3.7.3\necho broken >&2\nexit 3\n", long).await.unwrap_err();
        assert!(told.contains("(exit status: 3, \"etcd Version: 3.7.3\")"), "{told}");
        let told = ask("#!/bin/sh\necho broken >&2\nexit 3\n", long).await.unwrap_err();
        assert!(told.contains("(exit status: 3, \"broken\")"), "{told}");
        let told = ask("#!/nowhere/sh\n", long).await.unwrap_err();
        assert!(told.contains("there is no program"), "{told}");
        let (directory, path) = script("");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let told = ask_flags(&path, long).await.unwrap_err().to_string();
        assert!(told.contains("cannot be started (Permission denied"), "{told}");
        let told = ask_flags(&directory.path().join("no"), long).await.unwrap_err().to_string();
        assert!(told.starts_with("there is no program /") && told.contains("/no: install etcd"), "{told}");
    }

    #[tokio::test]
    async fn program_that_hangs_is_killed_with_all_that_it_started_and_one_that_floods_is_cut_off() {
        let place = tempfile::tempdir().unwrap();
        let pid = place.path().join("pid");
        let hangs =
            format!("#!/bin/sh\nsleep 600 &\necho $! > {0}.new; mv {0}.new {0}\nwait\n", pid.display());
        let told = ask(&hangs, Duration::from_secs(2)).await.unwrap_err();
        assert!(told.contains("--version did not end within 2 s and was killed"), "{told}");
        // Where the deadline came first, nothing was started yet.
        if let Ok(pid) = std::fs::read_to_string(&pid) {
            let stat = format!("/proc/{}/stat", pid.trim());
            let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
            for _ in 0..30_000 {
                if !runs() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(!runs(), "it goes on");
        }
        let floods = ask("#!/bin/sh\nwhile :; do echo no version; done\n", Duration::from_mins(5)).await;
        let told = floods.unwrap_err();
        assert!(told.contains("printed no version of etcd"), "{told}");
    }
}
