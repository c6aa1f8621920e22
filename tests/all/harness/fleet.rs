//! A fleet as an operator runs it: a simulator process, shepherd processes, and a BMDB of its own.
//!
//! Every process is a child of the test: killed by its own id when its handle is dropped, and by its watcher when the
//! test process ends ([`child`][crate::harness::child]). Their output goes to files. If a condition never holds, the
//! error contains the ends of these files.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Parser;
use russh::keys::{HashAlg, load_secret_key};
use serde_json::Value;
use shepherd::model::program_mark::ROLE_SERVER_MARK;
use shepherd::simulator::fault_command::{self, FaultArgs};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tempfile::TempDir;

use crate::harness::aloud::aloud;
pub(crate) use crate::harness::child::Program;
use crate::harness::child::guarded;
use crate::harness::port::reserved;
use crate::harness::postgres::TestDatabase;

/// Longest time for anything that an idle host does in some seconds.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);
/// Every machine is known and Ready, and nothing is under way at the only provider.
pub(crate) const ALL_READY: &str = "SELECT count(*) > 0 AND count(*) = (SELECT count(*) FROM machine)
        AND NOT EXISTS (SELECT 1 FROM intent WHERE settled_at IS NULL)
        AND (SELECT machines FROM provider_state) = count(*)
     FROM machine_due WHERE lane = 'access' AND phase_index = 'Ready'";
/// Lines of each process's log that are shown with a failure.
const MAX_SHOWN_LINES: usize = 15;

#[derive(Parser)]
struct FaultLine {
    #[command(flatten)]
    fault: FaultArgs,
}

/// Changes to the usual start of a shepherd.
#[derive(Clone, Debug, Default)]
pub(crate) struct Otherwise {
    /// Another program than this release's.
    pub(crate) program: Option<PathBuf>,
    /// The name of the database dialect in that program, if it has another name.
    pub(crate) dialect: Option<&'static str>,
    /// Flags that have another name there: the present name, and that one.
    pub(crate) renamed_flags: Vec<(&'static str, &'static str)>,
    /// Further environment variables.
    pub(crate) environment: Vec<(&'static str, OsString)>,
}

/// A simulator and a database. [`Fleet::shepherd`] starts shepherds on them.
#[derive(Clone)]
pub(crate) struct Fleet {
    simulator: Arc<Program>,
    /// URL of the simulator's provider API.
    pub(crate) url: String,
    /// The connections of the test itself.
    pub(crate) pool: PgPool,
    /// The database of the BMDB.
    pub(crate) database: Arc<TestDatabase>,
    /// The URL by which shepherds connect to it: another address if a network or a server of the test is in between.
    pub(crate) bmdb_url: String,
    directory: Arc<TempDir>,
    logs: Arc<Mutex<Vec<PathBuf>>>,
}

impl Fleet {
    /// Starts a simulator with these flags.
    pub(crate) async fn start(test_name: &str, flags: &[&str]) -> Result<Self> {
        Self::start_at(test_name, flags, |database| Ok(database.url().to_owned())).await
    }

    /// The same with the BMDB at another URL than that of the test's database.
    pub(crate) async fn start_at(
        test_name: &str,
        flags: &[&str],
        place: impl FnOnce(&TestDatabase) -> Result<String>,
    ) -> Result<Self> {
        Self::start_with(test_name, flags, &[], place).await
    }

    /// The same with further environment variables of the simulator, in which the nodes of its machines run.
    pub(crate) async fn start_with(
        test_name: &str,
        flags: &[&str],
        environment: &[(&str, OsString)],
        place: impl FnOnce(&TestDatabase) -> Result<String>,
    ) -> Result<Self> {
        // An error means that another test has installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let database = TestDatabase::create(test_name).await?;
        let bmdb_url = place(&database)?;
        let pool = looking(&bmdb_url).await?;
        let directory = tempfile::tempdir()?;
        let log = directory.path().join("simulator.log");
        let mut command = guarded(env!("CARGO_BIN_EXE_shepherd"));
        command.args(["simulator", "--listen_address", "127.0.0.1:0", "--state_path"]);
        command.arg(directory.path().join("fleet.json")).args(flags).stdout(Stdio::piped());
        command.envs(environment.iter().map(|(name, value)| (*name, value)));
        let mut simulator = Program::spawn_logged(&mut command, &log)?;
        let stdout = simulator.child().stdout.take().context("its output is piped")?;
        let line = tokio::task::spawn_blocking(move || BufReader::new(stdout).lines().next()).await?;
        let line = line.context("the simulator ended")??;
        let url = line.strip_prefix("listening on ").context(line.clone())?.to_owned();
        Ok(Self {
            simulator: Arc::new(simulator),
            url,
            pool,
            database: Arc::new(database),
            bmdb_url,
            directory: Arc::new(directory),
            logs: Arc::new(Mutex::new(vec![log])),
        })
    }

    /// The same machines with a BMDB at another address, or with a new connection to the same one.
    pub(crate) async fn with_bmdb(&self, url: String) -> Result<Self> {
        Ok(Self { pool: looking(&url).await?, bmdb_url: url, ..self.clone() })
    }

    /// Starts a shepherd named `name`, which listens for agents at `endpoints[0]` and sends them all endpoints. Its SSH
    /// key has the same name, by which the simulator's journal distinguishes shepherds.
    pub(crate) fn shepherd(&self, name: &str, endpoints: &[String], flags: &[&str]) -> Result<Program> {
        self.shepherd_otherwise(Otherwise::default(), name, endpoints, flags)
    }

    /// The fingerprint of the SSH key of the shepherd that was started as `name`.
    pub(crate) fn ssh_key(&self, name: &str) -> Result<String> {
        let key = load_secret_key(self.directory.path().join(format!("{name}.ssh_key")), None)?;
        Ok(key.public_key().fingerprint(HashAlg::Sha256).to_string())
    }

    /// The same, for a shepherd that aborts or freezes at one of the fail points of `src/manager/failpoint.rs`.
    pub(crate) fn shepherd_dying_at(
        &self,
        place: &str,
        name: &str,
        endpoints: &[String],
        flags: &[&str],
    ) -> Result<Program> {
        let environment = vec![("SHEPHERD_FAILPOINT", place.into())];
        self.shepherd_otherwise(Otherwise { environment, ..Otherwise::default() }, name, endpoints, flags)
    }

    /// The same, started in another way.
    pub(crate) fn shepherd_otherwise(
        &self,
        otherwise: Otherwise,
        name: &str,
        endpoints: &[String],
        flags: &[&str],
    ) -> Result<Program> {
        let provider = ["--provider", "simulated", "--simulated_url", &self.url];
        self.shepherd_of(otherwise, name, endpoints, &[provider.as_slice(), flags].concat())
    }

    /// The same, with the machines in a device list instead of from the simulator's API.
    pub(crate) fn shepherd_of_list(
        &self,
        name: &str,
        endpoints: &[String],
        list: &Path,
        flags: &[&str],
    ) -> Result<Program> {
        let url = format!("file://{}", list.display());
        // As small as that of simulated machines. Other machines get no program without the mark of a role server.
        let agent = self.directory.path().join(format!("{name}.agent"));
        std::fs::write(&agent, [std::fs::read("/bin/sh")?.as_slice(), &ROLE_SERVER_MARK].concat())?;
        // A shepherd refuses a program that others can change, as a umask of 002 makes it.
        std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o644))?;
        let agent = format!("--agent_executable_path={}", agent.display());
        let provider = ["--provider", "static", "--static_device_list_url", &url, &agent];
        self.shepherd_of(Otherwise::default(), name, endpoints, &[provider.as_slice(), flags].concat())
    }

    fn shepherd_of(
        &self,
        otherwise: Otherwise,
        name: &str,
        endpoints: &[String],
        flags: &[&str],
    ) -> Result<Program> {
        let log = self.log_of(name);
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).push(log.clone());
        let program = otherwise.program.unwrap_or_else(|| env!("CARGO_BIN_EXE_shepherd").into());
        let dialect = otherwise.dialect.unwrap_or(self.database.dialect().as_str());
        let mut command = self.command(program, dialect, name, endpoints, flags, &otherwise.renamed_flags)?;
        command.envs(otherwise.environment);
        Program::spawn_logged(&mut command, &log)
    }

    /// A shepherd that is not started yet. The caller decides where its standard error goes.
    pub(crate) fn unheard_shepherd(
        &self,
        name: &str,
        endpoints: &[String],
        flags: &[&str],
    ) -> Result<Command> {
        let provider = ["--provider", "simulated", "--simulated_url", &self.url];
        let program = env!("CARGO_BIN_EXE_shepherd").into();
        let dialect = self.database.dialect().as_str();
        self.command(program, dialect, name, endpoints, &[provider.as_slice(), flags].concat(), &[])
    }

    fn command(
        &self,
        program: PathBuf,
        dialect: &str,
        name: &str,
        endpoints: &[String],
        flags: &[&str],
        renamed_flags: &[(&str, &str)],
    ) -> Result<Command> {
        let mut command = guarded(program);
        // In the environment, as an operator sets a password.
        command.env("SHEPHERD_BMDB_URL", &self.bmdb_url).args(["--provider_name", "sim"]);
        command.args(["--bmdb_dialect", dialect]);
        command.arg("--agent_listen_address").arg(endpoints.first().context("an endpoint")?);
        for endpoint in endpoints {
            command.arg("--agent_endpoint").arg(endpoint);
        }
        // Simulated machines accept any program and run none of it. This one is small.
        command.args(["--agent_executable_path", "/bin/sh"]);
        command.arg("--ssh_key_path").arg(self.directory.path().join(format!("{name}.ssh_key")));
        command.arg("--secrets_key_path").arg(self.directory.path().join("secrets.key"));
        command.args(BRISK.iter().chain(flags).map(|flag| rename_flag(flag, renamed_flags)));
        command.stdout(Stdio::null());
        Ok(command)
    }

    /// The process of the simulator, in which the role servers of its machines run.
    pub(crate) fn simulator_pid(&self) -> u32 {
        self.simulator.pid()
    }

    /// The directory with the simulator's and the shepherds' files.
    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The same directory, which stays until the last handle is dropped.
    pub(crate) fn shared_directory(&self) -> Arc<TempDir> {
        self.directory.clone()
    }

    pub(crate) fn log_of(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.log"))
    }

    /// The log of the shepherd named `name` so far.
    pub(crate) fn read_log(&self, name: &str) -> Result<String> {
        Ok(std::fs::read_to_string(self.log_of(name))?)
    }

    /// Injects a fault into a machine, or into `provider`.
    pub(crate) async fn strike(&self, machine: &str, fault: &str) -> Result<()> {
        let line = FaultLine::try_parse_from(["fault", "--url", &self.url, machine, fault])?;
        fault_command::send_fault(&line.fault).await?;
        Ok(())
    }

    /// The true state of every machine.
    pub(crate) async fn truth(&self) -> Result<Vec<Value>> {
        let client = reqwest::Client::builder().no_proxy().build()?;
        let answer: Value = client.get(format!("{}/v1/fleet", self.url)).send().await?.json().await?;
        Ok(answer["machines"].as_array().context("a fleet has machines")?.clone())
    }

    /// Every complete line of the simulator's journal of calls. A reader may see the first half of a line that spans
    /// two pages of the file.
    pub(crate) fn journal(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.directory.path().join("fleet.json.calls.jsonl"))?;
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Waits until a statement returns true.
    pub(crate) async fn until(&self, what: &str, condition: &'static str) -> Result<()> {
        self.until_within(what, condition, PATIENCE).await
    }

    /// The same with another deadline.
    pub(crate) async fn until_within(
        &self,
        what: &str,
        condition: &'static str,
        patience: Duration,
    ) -> Result<()> {
        let deadline = Instant::now() + patience;
        while !self.holds(condition).await? {
            if Instant::now() > deadline {
                aloud(&format!("waited in vain until {what}"));
                bail!("waited in vain until {what}\n{}", self.explain().await?);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Whether a statement returns true now.
    pub(crate) async fn holds(&self, condition: &'static str) -> Result<bool> {
        Ok(sqlx::query_scalar(condition).fetch_one(&self.pool).await?)
    }

    /// The state of the BMDB and the logs, for a person who investigates a failure.
    pub(crate) async fn explain(&self) -> Result<String> {
        let machines: Vec<String> = sqlx::query_scalar(
            "SELECT d.phase_index || ': ' || d.reason || COALESCE(' (' || b.cause || ')', '') || ' × ' || count(*)
             FROM machine_due d LEFT JOIN work_backoff b USING (machine_id, process)
             WHERE d.lane = 'access' GROUP BY d.phase_index, d.reason, b.cause ORDER BY count(*) DESC LIMIT 20",
        )
        .fetch_all(&self.pool)
        .await?;
        let mut text = format!("machines:\n  {}\n", machines.join("\n  "));
        aloud(&text);
        for log in self.logs.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let message = std::fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = message.lines().collect();
            let end = lines[lines.len().saturating_sub(MAX_SHOWN_LINES)..].join("\n");
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}:\n{end}", log.display());
        }
        Ok(text)
    }
}

/// Connections that only read: a statement cannot fail because of concurrent changes.
async fn looking(url: &str) -> Result<PgPool> {
    let options: PgConnectOptions = url.parse()?;
    let options = options.options([("default_transaction_isolation", "read committed")]);
    Ok(PgPoolOptions::new().max_connections(4).connect_with(options).await?)
}

/// The flag `--NAME` or `--NAME=VALUE` with the name that another release has for it.
fn rename_flag(flag: &str, renamed_flags: &[(&str, &str)]) -> String {
    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
    let renamed = renamed_flags.iter().find(|(here, _)| name.strip_prefix("--") == Some(*here));
    let name = renamed.map_or_else(|| name.to_owned(), |(_, there)| format!("--{there}"));
    value.map_or_else(|| name.clone(), |value| format!("{name}={value}"))
}

/// Flags of a shepherd with short intervals. Later flags take precedence. It keeps its sessions on a host that stops
/// for some seconds: one that is lost right before the shepherd ends would stay open.
const BRISK: [&str; 16] = [
    "--session_interval=15s",
    "--provisioner_max_machines=0",
    "--provisioner_reconciler_rate=500ms,1",
    "--provisioner_device_creation_rate=5ms,50",
    "--initializer_loop_parallelism=8",
    "--initializer_db_query_rate=10ms,20",
    "--recoverer_loop_parallelism=4",
    "--recoverer_db_query_rate=10ms,20",
    "--updater_loop_parallelism=2",
    "--updater_db_query_rate=10ms,20",
    "--update_interval_unstable=1s",
    "--agent_start_backoff_initial=1s",
    "--agent_start_backoff_maximum=5s",
    "--heartbeat_interval=5s",
    "--outward_call_timeout=3s",
    "--shutdown_grace=10s",
];

/// `127.0.0.1:PORT`, a port that only the shepherds use that are configured to listen there.
pub(crate) fn endpoint() -> Result<String> {
    Ok(reserved()?.to_string())
}
