//! What a whole shepherd holds in memory, with a fleet of simulated machines.
//!
//! A short form, in which no clock is looked at, is among the tests (`tests/all/small_memory.rs`). What the role
//! server holds on a machine is looked at by `make e2e-ssh`.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sqlx::PgPool;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use crate::Plan;
use crate::agents::{allow_files, memory};
use crate::report::{Report, Target, progress};
use crate::server::Server;

/// The tests' scripts, by which a child ends with us, however we end.
const GUARDED: &str = include_str!("../../crates/testkit/src/guarded.sh");
const WATCHER: &str = include_str!("../../crates/testkit/src/watcher.sh");
/// Size of the agent's program in the uploads, in KiB.
const PROGRAM: u16 = 8 << 10;
/// Longest time until every machine is Ready.
const PATIENCE: Duration = Duration::from_mins(15);

/// A child and our hold on it.
struct Program {
    child: Child,
    _hold: ChildStdin,
}

impl Program {
    fn start(arguments: &[String], environment: &[(&str, String)]) -> Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARDED, "bench-guarded", WATCHER, env!("CARGO_BIN_EXE_shepherd")]);
        command.args(arguments).envs(environment.iter().cloned()).env("RUST_LOG", "error");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let hold = child.stdin.take().context("no hold on it")?;
        Ok(Self { child, _hold: hold })
    }

    /// Asks it to end, and waits for it.
    async fn end(mut self) -> Result<()> {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        }
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await.context("it does not end")??;
        ensure!(status.success(), "it ended with {status}");
        Ok(())
    }
}

/// A simulator and a shepherd on a database of their own.
struct Site {
    simulator: Program,
    shepherd: Program,
    began: Instant,
    pool: PgPool,
    _directory: tempfile::TempDir,
}

impl Site {
    async fn start(server: &Server, name: &str, machines: u32, parallelism: u32) -> Result<Self> {
        server.create_database(name).await?;
        let directory = tempfile::tempdir()?;
        let path = |name: &str| directory.path().join(name).display().to_string();
        // Simulated machines take any program and run none of it.
        let mut program = fs::read("/bin/sh")?;
        program.resize(usize::from(PROGRAM) * 1024, 7);
        fs::write(directory.path().join("agent"), program)?;
        let simulator =
            ["simulator", "--listen_address", "127.0.0.1:0", "--boot_seconds", "0.5", "--state_path"];
        let mut arguments: Vec<String> = simulator.map(str::to_owned).into();
        arguments.extend([path("fleet.json"), "--machine_count".to_owned(), machines.to_string()]);
        let mut simulator = Program::start(&arguments, &[])?;
        let stdout = simulator.child.stdout.take().context("its output is piped")?;
        let line = BufReader::new(stdout).lines().next_line().await?.context("the simulator ended")?;
        let url = line.strip_prefix("listening on ").context("the simulator printed something else")?;
        // Released a moment before the shepherd binds it: agents need a port number in advance.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let arguments: Vec<String> = [
            "--provider=simulated",
            "--provider_name=sim",
            "--provisioner_max_machines=0",
            "--provisioner_reconciler_rate=1s,1",
            "--provisioner_device_creation_rate=1ms,1000",
            "--initializer_db_query_rate=1ms,1000",
            "--api_listen_address=127.0.0.1:0",
            // A machine is being made for half a second, and not for a minute.
            "--update_interval_unstable=1s",
            "--updater_loop_parallelism=4",
            "--updater_db_query_rate=1ms,1000",
        ]
        .map(str::to_owned)
        .into_iter()
        .chain([
            format!("--simulated_url={url}"),
            format!("--initializer_loop_parallelism={parallelism}"),
            format!("--agent_listen_address=127.0.0.1:{port}"),
            format!("--agent_endpoint=127.0.0.1:{port}"),
            format!("--agent_executable_path={}", path("agent")),
            format!("--ssh_key_path={}", path("ssh_key")),
            format!("--secrets_key_path={}", path("secrets.key")),
        ])
        .collect();
        let shepherd = Program::start(&arguments, &[("SHEPHERD_BMDB_URL", server.url(name))])?;
        let pool = PgPool::connect(&server.url(name)).await?;
        Ok(Self { simulator, shepherd, began: Instant::now(), pool, _directory: directory })
    }

    /// What the shepherd holds, in KiB, by a field of its status.
    fn holds(&self, field: &str) -> Result<f64> {
        let pid = self.shepherd.child.id().context("the shepherd ended")?;
        memory(&Path::new("/proc").join(pid.to_string()), field)
    }

    async fn until_ready(&self, machines: u32) -> Result<()> {
        loop {
            // Before the schema is there it answers with an error, which means none.
            let text = "SELECT count(*) FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
            let ready: i64 = sqlx::query_scalar(text).fetch_one(&self.pool).await.unwrap_or(0);
            if ready == i64::from(machines) {
                return Ok(());
            }
            ensure!(self.began.elapsed() < PATIENCE, "{ready} of {machines} machines are Ready");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn end(self) -> Result<()> {
        self.pool.close().await;
        self.shepherd.end().await?;
        self.simulator.end().await
    }
}

/// What a shepherd with a steady fleet holds.
pub(crate) struct Steady {
    /// In MiB, at every second that it was looked at.
    held: Vec<f64>,
    /// Seconds until all machines were Ready.
    ready_after: f64,
}

/// Watches a shepherd with a fleet from its start to the end of the time that it is looked at.
pub(crate) async fn steady(plan: &Plan, server: &Server) -> Result<Steady> {
    let machines = plan.simulated;
    allow_files(u64::from(machines) * 8 + 1024)?;
    let lasts = plan.watched.1.as_secs();
    progress(&format!("a shepherd with {machines} simulated machines, watched for {lasts} s"))?;
    let site = Site::start(server, "memory_steady", machines, 10).await?;
    site.until_ready(machines).await?;
    let ready_after = site.began.elapsed().as_secs_f64();
    let mut held = Vec::new();
    while site.began.elapsed() < plan.watched.1 {
        if site.began.elapsed() >= plan.watched.0 {
            held.push(site.holds("VmRSS:")? / 1024.0);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    site.end().await?;
    ensure!(!held.is_empty(), "all machines were Ready only after {ready_after} s");
    Ok(Steady { held, ready_after })
}

/// Tells what a steady shepherd held, and watches another one with all its uploads at once.
pub(crate) async fn measure(
    plan: &Plan,
    server: &Server,
    steady: &Steady,
    report: &mut Report,
) -> Result<()> {
    let machines = plan.simulated;
    report.section(
        "Memory of a shepherd",
        "The whole program with a fleet of simulated machines, every one of which is taken over and \
         heartbeats. Resident memory is looked at every second from the third to the fifth minute; meanwhile the fleets \
         of the other measurements are filled, which takes processor time from it and no memory. Then \
         another shepherd takes such a fleet over with a worker for each machine, so that all uploads of a \
         program of 8 MiB run at once; what it held at most is set against as many copies of the program.",
    )?;
    report.add("machines", "", &[f64::from(machines)], Target::None)?;
    report.add("until all are Ready, ten workers", "s", &[steady.ready_after], Target::None)?;
    let what = "resident memory of a shepherd, from the third to the fifth minute";
    report.add(what, "MiB", &steady.held, Target::AtMost(150.0))?;

    progress(&format!("{machines} uploads at once"))?;
    let site = Site::start(server, "memory_uploads", machines, machines).await?;
    site.until_ready(machines).await?;
    let (ready_after, most) = (site.began.elapsed(), site.holds("VmHWM:")?);
    site.end().await?;
    report.add("until all are Ready, a worker each", "s", &[ready_after.as_secs_f64()], Target::None)?;
    report.add("most ever resident", "MiB", &[most / 1024.0], Target::None)?;
    let copies = most / (f64::from(PROGRAM) * f64::from(machines));
    let what =
        format!("most ever resident with {machines} uploads at once, against as many copies of the program");
    report.add(what, "×", &[copies], Target::AtMost(0.25))
}
