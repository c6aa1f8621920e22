//! `shepherd demo`: a fleet in a box, to see the main job done.
//!
//! The real service on a real PostgreSQL, against simulated machines that are a
//! process of their own behind real protocols. Nothing in the service knows
//! that it is a demo; only the limits are short, so that a person can watch.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{IsTerminal, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::signal::unix::Signal;
use tokio::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::model::phase::Phase;
use crate::model::time::Span;
use crate::service::configuration::ConfigurationFile;
use crate::service::failure::Failure;
use crate::service::flags;
use crate::service::healing::Healing;
use crate::service::logging;
use crate::service::plan::plan;
use crate::service::run::{OpenDatabase, Running, database_failure, open_database, signals, start};
use crate::service::scratch::Scratch;

/// How the demo is run.
#[expect(clippy::doc_markdown, reason = "the documentation of each is its help text, which shows no marks")]
#[derive(Clone, Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DemoFlags {
    /// How many machines there are, 1 to 2000.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=2000))]
    pub machines: u32,
    /// What goes wrong unasked.
    #[arg(long, value_enum, value_name = "PROFILE", default_value = "none")]
    pub faults: FaultProfile,
    /// Where all chance of the simulated machines comes from: the same number, the same fleet.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Stop when every machine is Ready, with exit code 0; or at the deadline, with exit code 1 and
    /// what the rest waits for.
    #[arg(long)]
    pub until_ready: bool,
    /// When every machine must be Ready, with --until_ready.
    #[arg(long, value_name = "SPAN", default_value = "5m")]
    pub deadline: Span,
    /// Keep machines and database in DIR and go on with them next time. [default: new ones each time]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Begin with new machines, whatever --dir holds.
    #[arg(long)]
    pub fresh: bool,
}

/// What goes wrong unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FaultProfile {
    /// Nothing.
    None,
    /// Agents die, boots are slow, the provider stumbles.
    Mild,
    /// Machines hang and die, power fails.
    Harsh,
}

/// What a kept demo has in its directory.
const KEPT: [&str; 7] = [
    "simulator.json",
    "simulator.json.calls.jsonl",
    "simulator.log",
    "bmdb",
    "ssh_key",
    "secrets.key",
    "agent_address",
];
/// How often progress is looked at.
const LOOK: Duration = Duration::from_millis(250);
/// How often a line is printed where there is no terminal, if anything changed.
const LINE: Duration = Duration::from_secs(1);
/// Machines whose waiting is explained at the end.
const EXPLAINED: i64 = 20;

/// Where the simulated fleet is kept.
enum FleetDirectory {
    /// Goes with us.
    Scratch(Scratch),
    /// Stays.
    Kept(PathBuf),
}

impl FleetDirectory {
    fn kept(&self) -> Option<&Path> {
        match self {
            Self::Scratch(_) => None,
            Self::Kept(path) => Some(path),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Scratch(scratch) => scratch.path(),
            Self::Kept(path) => path,
        }
    }
}

/// Runs the demo.
pub async fn run(demo: DemoFlags) -> Result<(), Failure> {
    logging::start(flags::LogFormat::Text, "off");
    let (mut terminate, mut interrupt) = signals()?;
    say(&format!("{} simulated machines, a private PostgreSQL and the whole service:", demo.machines))?;
    say("  starting the simulator and PostgreSQL …")?;
    let directory = fleet_directory(&demo)?;
    let me = std::env::current_exe()
        .map_err(|error| Failure::failed(format!("cannot find this program's own file: {error}")))?;
    let (mut simulator, hold, url) = start_simulator(&me, &demo, directory.path()).await?;
    let simulator_died = || {
        let said = tail(&directory.path().join("simulator.log"));
        Failure::failed(format!("the simulator ended by itself; it said:\n{said}"))
    };
    let mut starting = std::pin::pin!(with_simulator(&me, &url, directory.kept()));
    let mut stopped = false;
    let started = tokio::select! {
        started = &mut starting => started,
        _ = simulator.wait() => Err(simulator_died()),
        () = asked_to_stop(&mut terminate, &mut interrupt) => {
            say("  stopping as soon as everything has started …")?;
            stopped = true;
            tokio::select! {
                started = &mut starting => started,
                () = asked_to_stop(&mut terminate, &mut interrupt) => Err(Failure::failed("stopped in the middle of the start")),
            }
        }
    };
    let outcome = match started {
        Ok((database, running)) => {
            let watched = tokio::select! {
                biased;
                () = std::future::ready(()), if stopped => interrupted(&demo),
                () = asked_to_stop(&mut terminate, &mut interrupt) => interrupted(&demo),
                _ = simulator.wait() => Err(simulator_died()),
                watched = watch(&demo, &me, &url, &database) => watched,
            };
            let ended = stop(database, running).await;
            watched.and(ended)
        }
        Err(failure) => Err(failure),
    };
    end_simulator(&mut simulator).await;
    drop(hold);
    outcome
}

async fn asked_to_stop(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Somebody who only watches stops when they like; somebody who waits for a result has none.
fn interrupted(demo: &DemoFlags) -> Result<(), Failure> {
    if demo.until_ready {
        Err(Failure::failed("stopped by a signal before every machine was Ready"))
    } else {
        Ok(())
    }
}

fn say(line: &str) -> Result<(), Failure> {
    writeln!(std::io::stdout(), "{line}")
        .map_err(|error| Failure::failed(format!("cannot write to standard output: {error}")))
}

fn fleet_directory(demo: &DemoFlags) -> Result<FleetDirectory, Failure> {
    let Some(path) = demo.dir.clone() else {
        return Scratch::create("shepherd-demo").map(FleetDirectory::Scratch);
    };
    if demo.fresh {
        for name in KEPT {
            let removed = match std::fs::remove_file(path.join(name)) {
                Err(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
                    std::fs::remove_dir_all(path.join(name))
                }
                removed => removed,
            };
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Failure::failed(format!(
                        "cannot remove {name} in {}: {error}",
                        path.display()
                    )));
                }
                _ => {}
            }
        }
    }
    make(&path)?;
    Ok(FleetDirectory::Kept(path))
}

fn make(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new()
        .recursive(true)
        // Entered by the user that PostgreSQL runs as, too; keys in it have modes of their own.
        .mode(0o755)
        .create(path)
        .map_err(|error| Failure::failed(format!("cannot make the directory {}: {error}", path.display())))
}

fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

async fn start_simulator(
    me: &Path,
    demo: &DemoFlags,
    scratch: &Path,
) -> Result<(Child, ChildStdin, String), Failure> {
    let wrong = |what: &str, error: &dyn std::fmt::Display| {
        Failure::failed(format!("cannot start the simulator: {what}: {error}"))
    };
    let log =
        std::fs::File::create(scratch.join("simulator.log")).map_err(|error| wrong("its log", &error))?;
    let profile =
        demo.faults.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let mut child = Command::new(me)
        .args(["simulator", "--listen", "127.0.0.1:0", "--state"])
        .arg(scratch.join("simulator.json"))
        .args([
            "--machines",
            &demo.machines.to_string(),
            "--seed",
            &demo.seed.to_string(),
            "--faults",
            &profile,
        ])
        // Held open for as long as we live: the simulator ends with us, however we end.
        .arg("--exit_with_parent")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        // Ctrl-C reaches a terminal's whole group; the machines must outlive the service.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| wrong("its program", &error))?;
    let said = || tail(&scratch.join("simulator.log"));
    let stdout = child.stdout.take().ok_or_else(|| wrong("its output", &"is not to be had"))?;
    let mut lines = BufReader::new(stdout).lines();
    let first = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await;
    let line = match first {
        Ok(Ok(Some(line))) => line,
        Ok(Ok(None)) => return Err(wrong("it ended", &said())),
        Ok(Err(error)) => return Err(wrong("its output", &error)),
        Err(_) => return Err(wrong("it was not ready within 30 seconds", &said())),
    };
    let url = line.strip_prefix("listening on ").ok_or_else(|| wrong("it said", &line))?.to_owned();
    // Waiting for a child closes the end of the pipe that it still owns.
    let hold = child.stdin.take().ok_or_else(|| wrong("its input", &"is not to be had"))?;
    Ok((child, hold, url))
}

async fn end_simulator(simulator: &mut Child) {
    if let Some(pid) =
        simulator.id().and_then(|pid| i32::try_from(pid).ok()).and_then(rustix::process::Pid::from_raw)
    {
        // Gone already is as good.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if tokio::time::timeout(Duration::from_secs(10), simulator.wait()).await.is_err() {
        let _ = simulator.kill().await;
    }
}

/// The role server to put on the machines: the one beside this program. Simulated machines take
/// any program and run none of it, so without one this program itself serves.
fn agent_program(me: &Path) -> PathBuf {
    let beside = me.with_file_name("roleserver");
    if beside.is_file() { beside } else { me.to_path_buf() }
}

async fn with_simulator(
    me: &Path,
    simulator: &str,
    kept: Option<&Path>,
) -> Result<(OpenDatabase, Running), Failure> {
    let listener = agent_address(kept)?;
    let arguments: Vec<OsString> = [
        "shepherd",
        "--bmdb_max_connections=32",
        "--provider=simulated",
        "--provider_name=sim",
        "--initializer_loop_parallelism=10",
        "--recoverer_loop_parallelism=10",
        "--updater_loop_parallelism=4",
        "--initializer_db_query_rate=20ms,20",
        "--recoverer_db_query_rate=20ms,20",
        "--provisioner_reconciler_rate=2s,1",
        "--provisioner_device_creation_rate=20ms,20",
        "--provisioner_max_machines=0",
        "--heartbeat_interval=2s",
        "--recovery_first_heartbeat_timeout=20s",
        "--recovery_silence_timeout=8s",
        "--recovery_ladder=restart-agent:8s:2,reboot:20s:2,power-cycle:25s:2",
        "--recovery_brake_window=20s",
        "--recovery_brake_fraction=0.3",
        "--agent_start_backoff_initial=2s",
        "--agent_start_backoff_maximum=20s",
        "--update_interval_stable=30s",
        "--update_interval_unstable=1s",
        "--updater_db_query_rate=20ms,20",
        "--outward_limit=10s",
        "--shutdown_grace=5s",
    ]
    .iter()
    .map(OsString::from)
    .chain([
        format!("--simulated_url={simulator}").into(),
        // The machines remember whom they belong to, so the database stays where they do.
        kept.map_or_else(|| "--bmdb_eat_my_data".into(), |kept| flag("--bmdb_dir", &kept.join("bmdb"))),
        format!("--agent_listen_address={listener}").into(),
        format!("--agent_endpoint={listener}").into(),
        flag("--agent_executable_path", &agent_program(me)),
    ])
    .chain(kept.into_iter().flat_map(|kept| {
        [flag("--ssh_key_path", &kept.join("ssh_key")), flag("--secrets_key_path", &kept.join("secrets.key"))]
    }))
    .collect();
    let parsed = flags::parse_exactly(arguments)
        .map_err(|error| Failure::failed(format!("the demo's own flags: {error}")))?;
    let service = plan(parsed.service, ConfigurationFile::default())?;
    let database = open_database(&service).await?;
    match start(&service, &database).await {
        Ok(running) => Ok((database, running)),
        Err(failure) => {
            database.close().await?;
            Err(failure)
        }
    }
}

fn flag(name: &str, path: &Path) -> OsString {
    let mut argument = OsString::from(format!("{name}="));
    argument.push(path);
    argument
}

/// Where agents call: in a kept demo the address that its agents know, if it is still to be had.
fn agent_address(kept: Option<&Path>) -> Result<SocketAddr, Failure> {
    let failed = |error| Failure::failed(format!("cannot find a free port for agents: {error}"));
    let bound = |address: SocketAddr| TcpListener::bind(address).and_then(|listener| listener.local_addr());
    let file = kept.map(|kept| kept.join("agent_address"));
    let known = file.as_deref().and_then(|file| std::fs::read_to_string(file).ok());
    if let Some(address) = known.and_then(|known| bound(known.trim().parse().ok()?).ok()) {
        return Ok(address);
    }
    let address = bound(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
    if let Some(file) = file {
        std::fs::write(file, address.to_string()).map_err(failed)?;
    }
    Ok(address)
}

async fn stop(database: OpenDatabase, running: Running) -> Result<(), Failure> {
    say("\nstopping …")?;
    running.stop().await;
    let counts = database.bmdb.live_counts().await.map_err(database_failure)?;
    say(&format!("live work: {}, open sessions: {}", counts.work, counts.sessions))?;
    database.close().await?;
    if counts.work == 0 && counts.sessions == 0 {
        Ok(())
    } else {
        Err(Failure::failed("something was left behind; this is a defect of Shepherd"))
    }
}

async fn watch(demo: &DemoFlags, me: &Path, simulator: &str, database: &OpenDatabase) -> Result<(), Failure> {
    let began = Instant::now();
    let machines = i64::from(demo.machines);
    let mut progress = Progress::new(machines);
    loop {
        let phases = database.bmdb.indexed_phases().await.map_err(database_failure)?;
        progress.show(&phases)?;
        let ready = phases.get(Phase::Ready.as_str()).copied().unwrap_or(0);
        if ready >= machines {
            break;
        }
        if demo.until_ready && began.elapsed() > demo.deadline.0 {
            progress.finish();
            return Err(rest(&database.bmdb, demo, ready).await);
        }
        tokio::time::sleep(LOOK).await;
    }
    progress.finish();
    say(&format!("all {machines} machines are Ready after {:.1} s", began.elapsed().as_secs_f64()))?;
    if demo.until_ready {
        return Ok(());
    }
    commands(me, simulator, &database.url, demo.machines)?;
    let mut summary = Summary(Healing::default());
    loop {
        let seen = database.bmdb.machine_phases().await.map_err(database_failure)?;
        for line in summary.0.observe(seen, std::time::Instant::now()) {
            say(&line)?;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Says in the end what was seen, however the watching ends.
struct Summary(Healing);

impl Drop for Summary {
    fn drop(&mut self) {
        if let Some(line) = self.0.summary() {
            // Nobody to tell is no failure here.
            let _ = say(&format!("\n{line}"));
        }
    }
}

fn commands(me: &Path, simulator: &str, database: &str, machines: u32) -> Result<(), Failure> {
    let (one, other) = (format!("sim-{:04}", machines.min(7)), format!("sim-{:04}", machines.min(11)));
    let shepherd = me.display();
    let ctl = me.with_file_name("shepherdctl");
    let ctl = ctl.display();
    say(&format!(
        "
Break a machine, in another terminal, and watch it come back here:

  {shepherd} simulator fault {one} kill --url {simulator}
  {shepherd} simulator fault {other} hang --url {simulator}

Ask what Shepherd knows and does about it:

  {ctl} --bmdb_url '{database}' get machines
  {ctl} --bmdb_url '{database}' why {one}
  {ctl} --bmdb_url '{database}' timeline {one}

Ctrl-C ends the demo and removes everything it made.
"
    ))
}

async fn rest(bmdb: &Bmdb, demo: &DemoFlags, ready_before: i64) -> Failure {
    let machines = i64::from(demo.machines);
    let found = match bmdb.not_ready(EXPLAINED).await {
        Ok(found) => found,
        Err(error) => {
            return Failure::failed(format!(
                "only {ready_before} of {machines} machines were Ready after {}; cannot say why: {error}",
                demo.deadline
            ));
        }
    };
    // Where nobody waits nobody counted the others either; what was seen last must do.
    let ready = if found.waiting == 0 { ready_before } else { found.ready };
    let mut lines = vec![format!("only {ready} of {machines} machines were Ready after {}", demo.deadline)];
    let listed = i64::try_from(found.machines.len()).unwrap_or(i64::MAX);
    lines.extend(found.machines.into_iter().map(|machine| {
        let cause = machine.cause.filter(|cause| !machine.reason.contains(cause.as_str()));
        let cause = cause.map_or_else(String::new, |cause| format!("; last failure: {cause}"));
        format!("  {}: {}: {}{cause} ({})", machine.name, machine.phase, machine.reason, machine.decided_at)
    }));
    if found.waiting > listed {
        lines.push(format!("  {} more wait as well", found.waiting - listed));
    }
    let unseen = machines - ready - found.waiting;
    if unseen > 0 {
        lines.push(format!("  {unseen} more: not in the database yet; the provisioner has not come to them"));
    }
    Failure::failed(lines.join("\n"))
}

/// A bar on a terminal, lines elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
    last: BTreeMap<String, i64>,
    printed: Option<Instant>,
}

impl Progress {
    fn new(machines: i64) -> Self {
        let bar = std::io::stdout().is_terminal().then(|| {
            let bar = ProgressBar::new(machines.unsigned_abs());
            if let Ok(style) = ProgressStyle::with_template("  {bar:40.green} {pos:>4}/{len} Ready  {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, last: BTreeMap::new(), printed: None }
    }

    fn show(&mut self, phases: &BTreeMap<String, i64>) -> Result<(), Failure> {
        let ready = phases.get(Phase::Ready.as_str()).copied().unwrap_or(0);
        let others = Phase::ALL
            .iter()
            .filter(|phase| **phase != Phase::Ready)
            .filter_map(|phase| phases.get(phase.as_str()).map(|count| format!("{phase} {count}")))
            .collect::<Vec<_>>()
            .join(", ");
        if let Some(bar) = &self.bar {
            bar.set_position(ready.unsigned_abs());
            bar.set_message(others);
            return Ok(());
        }
        let due = self.printed.is_none_or(|at| at.elapsed() >= LINE);
        if due && *phases != self.last {
            self.printed = Some(Instant::now());
            self.last.clone_from(phases);
            let others = if others.is_empty() { String::new() } else { format!(", {others}") };
            say(&format!("  Ready {ready}{others}"))?;
        }
        Ok(())
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
