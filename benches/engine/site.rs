//! A simulator and a shepherd, each a process of its own, on a database of their own: what is measured of a whole shepherd.

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context as _, Result, ensure};
use sqlx::PgPool;
use tempfile::TempDir;
use testkit::etcd_program::search_path;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use crate::agents::memory;
use crate::server::Server;

/// The tests' scripts, by which a child ends with us, however we end.
const GUARDED: &str = include_str!("../../crates/testkit/src/guarded.sh");
const WATCHER: &str = include_str!("../../crates/testkit/src/watcher.sh");
/// Size of the agent's program in the uploads, in KiB.
pub(crate) const PROGRAM_KIB: u16 = 8 << 10;
/// Longest time until every machine is Ready.
const PATIENCE: Duration = Duration::from_mins(15);

/// A child and our hold on it.
pub(crate) struct Program {
    child: Child,
    _hold: ChildStdin,
}

impl Program {
    fn start(arguments: &[String], environment: &[(&str, OsString)]) -> Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARDED, "bench-guarded", WATCHER, env!("CARGO_BIN_EXE_shepherd")]);
        command.args(arguments).envs(environment.iter().cloned()).env("RUST_LOG", "error");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let hold = child.stdin.take().context("no hold on it")?;
        Ok(Self { child, _hold: hold })
    }

    /// Its memory in KiB, by a field of its status: `VmRSS:` is the present value, `VmHWM:` the highest.
    pub(crate) fn kibibytes(&self, field: &str) -> Result<f64> {
        memory(&self.directory()?, field)
    }

    /// Forgets the highest value of its memory.
    pub(crate) fn forget_peak(&self) -> Result<()> {
        // proc(5): this resets the peak to the present value.
        Ok(fs::write(self.directory()?.join("clear_refs"), "5")?)
    }

    fn directory(&self) -> Result<PathBuf> {
        let pid = self.child.id().context("it has ended")?;
        Ok(Path::new("/proc").join(pid.to_string()))
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

/// How a site is started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SiteOptions<'o> {
    /// Number of simulated machines.
    pub(crate) machines: u32,
    /// Machines that are taken over at a time.
    pub(crate) parallelism: u32,
    /// Further flags of the simulator.
    pub(crate) simulator_flags: &'o [&'o str],
    /// Further flags of the shepherd.
    pub(crate) shepherd_flags: &'o [&'o str],
}

impl SiteOptions<'_> {
    /// A site without further flags.
    pub(crate) const fn new(machines: u32, parallelism: u32) -> Self {
        Self { machines, parallelism, simulator_flags: &[], shepherd_flags: &[] }
    }
}

/// A simulator and a shepherd on a database of their own.
pub(crate) struct Site {
    pub(crate) simulator: Program,
    pub(crate) shepherd: Program,
    pub(crate) began: Instant,
    pub(crate) pool: PgPool,
    /// The URL of the simulator's API.
    pub(crate) simulator_url: String,
    /// The URL of the database.
    pub(crate) bmdb_url: String,
    /// The state of the simulator is in the file `fleet.json` there.
    pub(crate) directory: Arc<TempDir>,
}

impl Site {
    pub(crate) async fn start(server: &Server, name: &str, options: &SiteOptions<'_>) -> Result<Self> {
        server.create_database(name).await?;
        let directory = Arc::new(tempfile::tempdir()?);
        let path = |name: &str| directory.path().join(name).display().to_string();
        // Simulated machines take any program and run none of it.
        let mut program = fs::read("/bin/sh")?;
        program.resize(usize::from(PROGRAM_KIB) * 1024, 7);
        fs::write(directory.path().join("agent"), program)?;
        let simulator =
            ["simulator", "--listen_address", "127.0.0.1:0", "--boot_seconds", "0.5", "--state_path"];
        let mut arguments: Vec<String> = simulator.map(str::to_owned).into();
        arguments.extend([path("fleet.json"), "--machine_count".to_owned(), options.machines.to_string()]);
        arguments.extend(options.simulator_flags.iter().map(|flag| (*flag).to_owned()));
        // Nodes of clusters find the same etcd as in tests.
        let path_of_nodes = search_path().or_else(|| env::var_os("PATH")).unwrap_or_default();
        let mut simulator = Program::start(&arguments, &[("PATH", path_of_nodes)])?;
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
            format!("--initializer_loop_parallelism={}", options.parallelism),
            format!("--agent_listen_address=127.0.0.1:{port}"),
            format!("--agent_endpoint=127.0.0.1:{port}"),
            format!("--agent_executable_path={}", path("agent")),
            format!("--ssh_key_path={}", path("ssh_key")),
            format!("--secrets_key_path={}", path("secrets.key")),
        ])
        .chain(options.shepherd_flags.iter().map(|flag| (*flag).to_owned()))
        .collect();
        let bmdb_url = server.url(name);
        let shepherd = Program::start(&arguments, &[("SHEPHERD_BMDB_URL", bmdb_url.clone().into())])?;
        let (began, pool) = (Instant::now(), PgPool::connect(&bmdb_url).await?);
        Ok(Self { simulator, shepherd, began, pool, simulator_url: url.to_owned(), bmdb_url, directory })
    }

    pub(crate) async fn until_ready(&self, machines: u32) -> Result<()> {
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

    pub(crate) async fn end(self) -> Result<()> {
        self.pool.close().await;
        self.shepherd.end().await?;
        self.simulator.end().await
    }
}
