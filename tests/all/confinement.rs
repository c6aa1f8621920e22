//! Confinement: the programs close their own processes, and what a role server starts has no more rights than it needs.
//! Real processes, as a user that is not root wherever that matters.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::model::role_declaration::privileges::{Capability, Privileges};
use shepherd::roleserver::child::cgroup::Cgroup;
use shepherd::roleserver::child::confinement::{Confinement, DEFAULT_CAPABILITIES};
use shepherd::roleserver::child::launch::{LaunchOrder, SUBCOMMAND, read_record};
use shepherd::roleserver::child::spec::{ChildSpec, ResourceLimits, User};

use crate::harness::aloud::TestResult;
use crate::harness::{skip, source};

/// A user without a name. Its processes have no rights.
const STRANGER: u32 = 65_533;
const PATIENCE: Duration = Duration::from_mins(1);
const NET_ADMIN: u64 = 1 << 12;
/// Lets the command behind it write core files, and open as many files as the hard limit permits.
const WITH_HIGH_LIMITS: &str =
    "ulimit -S -c \"$(ulimit -H -c)\"; ulimit -S -n \"$(ulimit -H -n)\"; exec \"$0\" \"$@\"";
const CORE_FILES: &str = "Max core file size";
const OPEN_FILES: &str = "Max open files";

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A directory that the stranger may enter and write to, with programs that it may run.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Result<Self> {
        let place = Self(tempfile::tempdir()?);
        fs::set_permissions(place.0.path(), fs::Permissions::from_mode(0o755))?;
        if is_root() {
            chown(place.0.path(), Some(STRANGER), Some(STRANGER))?;
        }
        Ok(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program of this build, where the stranger finds it: the build folder may be closed to it.
    fn program(&self, built: &str) -> Result<PathBuf> {
        let name = Path::new(built).file_name().context(built.to_owned())?;
        let path = self.0.path().join(name);
        if fs::hard_link(built, &path).is_err() {
            fs::copy(built, &path)?;
        }
        Ok(path)
    }

    /// A command of the stranger, or of this user if it is not root.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        if is_root() {
            command.uid(STRANGER).gid(STRANGER);
        }
        command.current_dir(self.0.path()).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// As [`Self::command`], of a process that may write core files, and with a secret in its environment.
    fn open_command(&self, program: &Path) -> Command {
        let mut command = self.command(Path::new("sh"));
        command.args(["-c", WITH_HIGH_LIMITS]).arg(program).env("TOKEN", "secret");
        command
    }

    /// Whether the stranger can open a file of a process below `/proc`.
    fn can_open(&self, pid: u32, file: &str) -> Result<bool> {
        let mut command = self.command(Path::new("sh"));
        Ok(command.args(["-c", ": <\"$0\""]).arg(format!("/proc/{pid}/{file}")).status()?.success())
    }

    /// Whether the stranger can read the environment of a process.
    fn can_read_environment(&self, pid: u32) -> Result<bool> {
        let output = self
            .command(Path::new("cat"))
            .arg(format!("/proc/{pid}/environ"))
            .stdout(Stdio::piped())
            .output()?;
        Ok(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("TOKEN=secret"))
    }
}

/// A process that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < end, "{what}: not within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A soft and a hard limit of a process, from its `/proc/PID/limits`.
fn parse_limits(text: &str, name: &str) -> Result<(String, String)> {
    let values = text.lines().find_map(|line| line.strip_prefix(name)).context(name.to_owned())?;
    let mut words = values.split_whitespace().map(str::to_owned);
    words.next().zip(words.next()).context(values.to_owned())
}

/// The soft and the hard limit of core files of a process.
fn core_limits(pid: &str) -> Result<(String, String)> {
    parse_limits(&fs::read_to_string(format!("/proc/{pid}/limits"))?, CORE_FILES)
}

/// Starts the three programs as the stranger, and waits until each has closed its process. They wait: for orders, for
/// an answer of a database that stays silent, for machines.
fn closed_programs(place: &Place, database: &TcpListener) -> Result<Vec<(&'static str, Running)>> {
    let url = format!("postgres://nobody@{}/nothing", database.local_addr()?);
    let state = place.path("fleet.json").display().to_string();
    let programs: [(&'static str, Vec<&str>); 3] = [
        (env!("CARGO_BIN_EXE_roleserver"), vec!["launch"]),
        (env!("CARGO_BIN_EXE_shepherdctl"), vec!["--bmdb-url", &url, "get", "machines"]),
        (
            env!("CARGO_BIN_EXE_shepherd"),
            vec![
                "simulator",
                "--listen_address",
                "127.0.0.1:0",
                "--machine_count",
                "1",
                "--state_path",
                &state,
            ],
        ),
    ];
    let mut closed = Vec::new();
    for (program, arguments) in programs {
        let path = place.program(program)?;
        let running = Running(place.open_command(&path).args(arguments).spawn()?);
        let pid = running.0.id();
        until(&format!("{program} has closed its process"), || {
            Ok(!place.can_read_environment(pid)? && core_limits(&pid.to_string())?.0 == "0")
        })?;
        closed.push((program, running));
    }
    Ok(closed)
}

/// Starts a program that closes nothing, and waits until it runs.
fn open_program(place: &Place) -> Result<Running> {
    let running = Running(place.open_command(Path::new("sleep")).arg("600").spawn()?);
    let command_line = format!("/proc/{}/cmdline", running.0.id());
    until("a program without protection runs", || Ok(fs::read(&command_line)?.starts_with(b"sleep\0")))?;
    Ok(running)
}

#[test]
fn environment_of_each_program_is_closed_to_other_processes_of_its_user() -> TestResult {
    let place = Place::new()?;
    // Without the protection it could be read.
    let open = open_program(&place)?;
    until("the environment of a program without protection", || place.can_read_environment(open.0.id()))?;

    let silent = TcpListener::bind("127.0.0.1:0")?;
    for (program, mut running) in closed_programs(&place, &silent)? {
        assert_eq!(running.0.try_wait()?, None, "{program} still runs");
    }
    Ok(())
}

/// Who may attach to a process with ptrace(2) may open its memory, and nobody else (`PTRACE_MODE_ATTACH_FSCREDS` in
/// proc(5)). The list of its mappings needs less.
#[test]
fn memory_of_each_program_is_closed_to_other_processes_of_its_user() -> TestResult {
    let place = Place::new()?;
    let open = open_program(&place)?;
    assert!(place.can_open(open.0.id(), "maps")?, "the mappings of a program without protection");
    // With Yama, which not every kernel has, only ancestors may attach.
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if matches!(yama.trim(), "" | "0") {
        assert!(place.can_open(open.0.id(), "mem")?, "the memory of a program without protection");
    }

    let silent = TcpListener::bind("127.0.0.1:0")?;
    for (program, mut running) in closed_programs(&place, &silent)? {
        for file in ["maps", "mem"] {
            assert!(!place.can_open(running.0.id(), file)?, "{file} of {program} is open");
        }
        assert_eq!(running.0.try_wait()?, None, "{program} still runs");
    }
    Ok(())
}

/// Ends a process as a crash does; whether it wrote a core file.
fn crash(running: &mut Running) -> Result<bool> {
    kill_process(Pid::from_child(&running.0), Signal::ABORT)?;
    let status = running.0.wait()?;
    ensure!(status.signal() == Some(Signal::ABORT.as_raw()), "it ended in another way: {status}");
    Ok(status.core_dumped())
}

#[test]
fn program_that_crashes_writes_no_core_file() -> TestResult {
    let place = Place::new()?;
    // A program without protection writes one, unless this host writes none or hands them to another program.
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    let into_directory = !pattern.trim().is_empty() && !pattern.starts_with(['|', '/']);
    if into_directory && core_limits("self")?.1 == "unlimited" {
        assert!(crash(&mut open_program(&place)?)?, "a program without protection wrote no core file");
    }

    let silent = TcpListener::bind("127.0.0.1:0")?;
    for (program, mut running) in closed_programs(&place, &silent)? {
        assert!(!crash(&mut running)?, "{program} wrote a core file");
    }
    Ok(())
}

/// What a program that was started observed of itself.
struct Observed {
    status: String,
    limits: String,
}

impl Observed {
    /// This process.
    fn of_this_process() -> Result<Self> {
        let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}"));
        Ok(Self { status: read("status")?, limits: read("limits")? })
    }

    fn limits(&self, name: &str) -> Result<(String, String)> {
        parse_limits(&self.limits, name)
    }

    fn field(&self, name: &str) -> Result<&str> {
        let line = self.status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(str::trim).context(name.to_owned())
    }

    fn capabilities(&self, set: &str) -> Result<u64> {
        Ok(u64::from_str_radix(self.field(set)?, 16)?)
    }
}

/// Lets a role server of the stranger, or of this user, start a program, which writes what it observes.
fn launch(of_stranger: bool, user: Option<User>, confinement: Option<Confinement>) -> Result<Observed> {
    let place = Place::new()?;
    let program = place.program(env!("CARGO_BIN_EXE_roleserver"))?;
    // By a link that the kernel lets only the process itself follow.
    fs::write(
        place.path("tool"),
        "#!/bin/sh\ncat /proc/self/status >status\ncat /proc/self/limits >limits\necho >done\n",
    )?;
    fs::set_permissions(place.path("tool"), fs::Permissions::from_mode(0o755))?;
    let order = LaunchOrder {
        spec: ChildSpec {
            name: "web".to_owned(),
            program: "/proc/self/cwd/tool".into(),
            arguments: Vec::new(),
            environment: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
            directory: place.0.path().to_owned(),
            user,
            groups: Vec::new(),
            confinement,
            limits: ResourceLimits::default(),
            stale_files: Vec::new(),
            survivor_prefix: None,
            stop_time: Duration::from_secs(1),
            declared: None,
        },
        group: Cgroup::default(),
        waits: false,
        record: Some(place.path("process.json")),
        log: place.path("output.log"),
    };
    fs::write(place.path("order.json"), serde_json::to_vec(&order)?)?;
    let shell = Path::new("sh");
    let mut command = if of_stranger { place.command(shell) } else { Command::new(shell) };
    let output = command
        .args(["-c", WITH_HIGH_LIMITS])
        .arg(&program)
        .arg(SUBCOMMAND)
        .stdin(fs::File::open(place.path("order.json"))?)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()?;
    let read = |name: &str| fs::read_to_string(place.path(name)).unwrap_or_default();
    let refusal = String::from_utf8_lossy(&output.stdout);
    ensure!(
        read("done") == "\n",
        "{refusal} {} {}",
        String::from_utf8_lossy(&output.stderr),
        read("output.log")
    );
    ensure!(read_record(&place.path("process.json")).is_some(), "the process is not recorded");
    Ok(Observed { status: read("status"), limits: read("limits") })
}

fn requesting(capabilities: &[&str], new_privileges: bool) -> Result<Confinement> {
    let capabilities =
        capabilities.iter().map(|name| Ok(name.parse::<Capability>()?)).collect::<Result<_>>()?;
    Ok(Confinement(Privileges { capabilities, new_privileges, ..Privileges::default() }))
}

#[test]
fn what_a_role_server_starts_gets_its_core_limit_back() -> TestResult {
    let (_, hard) = Observed::of_this_process()?.limits(CORE_FILES)?;
    let observed = launch(false, None, None)?;
    let expected = (hard.clone(), hard);
    assert_eq!(observed.limits(CORE_FILES)?, expected, "what the role server was started with");
    assert_eq!(observed.field("NoNewPrivs")?, "0", "the role server's own programs are not confined");
    Ok(())
}

/// Programs that use `select` break with descriptors above 1,024.
#[test]
fn what_a_role_server_starts_gets_the_usual_limit_of_open_files() -> TestResult {
    let (_, hard) = Observed::of_this_process()?.limits(OPEN_FILES)?;
    let observed = launch(false, None, None)?;
    let expected = (hard.parse::<u64>()?.min(1024).to_string(), hard);
    assert_eq!(observed.limits(OPEN_FILES)?, expected, "open files of what was started");
    Ok(())
}

#[test]
fn declared_service_keeps_a_bounded_set_of_capabilities_and_gains_none() -> TestResult {
    if !skip::runs_as_root() {
        return Ok(());
    }
    let own = Observed::of_this_process()?;
    let (bounding, default) = (own.capabilities("CapBnd")?, DEFAULT_CAPABILITIES.bits());
    let stranger = Some(User { uid: STRANGER, gid: STRANGER });

    let root = launch(false, None, Some(requesting(&[], false)?))?;
    assert_eq!(root.field("NoNewPrivs")?, "1");
    for set in ["CapBnd", "CapPrm", "CapEff"] {
        assert_eq!(root.capabilities(set)?, bounding & default, "{set} of a service of root");
    }
    let user = launch(false, stranger, Some(requesting(&[], false)?))?;
    assert_eq!(user.field("Uid")?.split_whitespace().next(), Some("65533"));
    assert_eq!((user.field("NoNewPrivs")?, user.capabilities("CapBnd")?), ("1", bounding & default));
    for set in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        assert_eq!(user.capabilities(set)?, 0, "{set} of a service of another user");
    }

    let more = launch(false, None, Some(requesting(&["NET_ADMIN"], true)?))?;
    assert_eq!(more.field("NoNewPrivs")?, "0", "its declaration requests that");
    assert_eq!(more.capabilities("CapEff")?, bounding & (default | NET_ADMIN));
    let more = launch(false, stranger, Some(requesting(&["NET_ADMIN"], false)?))?;
    for set in ["CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(
            more.capabilities(set)?,
            NET_ADMIN,
            "{set} of a service of another user that requests more"
        );
    }
    Ok(())
}

/// A role server that is not root cannot read everything below `/proc/self`, because its process is closed.
#[test]
fn role_server_that_is_not_root_starts_services_and_refuses_what_it_cannot_give() -> TestResult {
    let observed = launch(true, None, Some(requesting(&[], false)?))?;
    assert_eq!(observed.field("NoNewPrivs")?, "1");
    assert_eq!(observed.capabilities("CapEff")?, 0);
    let refused = launch(true, None, Some(requesting(&["NET_ADMIN"], false)?));
    let error = refused.err().context("it was started")?.to_string();
    assert!(error.contains("requests the capabilities NET_ADMIN, which the role server"), "{error}");
    Ok(())
}

#[test]
fn every_start_of_a_process_hands_on_the_core_limit() -> TestResult {
    let mut starts = 0;
    for path in source::rust_files()? {
        let text = source::read(&path)?;
        let code = source::take_apart(text.split("#[cfg(test)]").next().unwrap_or_default()).code;
        let name = path.display().to_string();
        // The grammar of a command line is no process.
        let count = code.matches("Command::new(").count() - code.matches("clap::Command::new(").count();
        starts += count;
        let restored = code.matches("hardening::restore_").count();
        assert!(
            restored >= count,
            "{name} starts {count} programs and hands on the limit of core files {restored} times: call \
             hardening::restore_core_limit before each start"
        );
    }
    assert!(starts > 10, "only {starts} starts of processes were found");
    Ok(())
}
