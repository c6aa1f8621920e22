//! `shepherdctl` as a person drives it: the real program against machines that the engine put where
//! they are.
//!
//! Transcripts are golden. What differs from run to run (ids, moments, host names) is masked, spans
//! are not: the database's clock is moved by the test, and a second of the host's does not show.

use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use shepherd::bmdb::change::{FactChange, HostKeySource, NewAgent, NewHardwareReport, NewHeartbeat, ProviderDetails};
use shepherd::bmdb::claim::{Claimed, Claimer};
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::intent::{Permission, Step};
use shepherd::bmdb::session::Sessions;
use shepherd::bmdb::work::{Decision, Work};
use shepherd::model::backoff::Backoff;
use shepherd::model::facts::{Hold, HoldScope};
use shepherd::model::host_key::HostKey;
use shepherd::model::ids::{MachineId, ProcessId};
use shepherd::model::policy::Disturbance;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::time::{Span, after};
use tokio_util::sync::CancellationToken;

use crate::harness::mode::Mode;
use crate::harness::postgres::TestDatabase;

/// A database with machines, and the program that asks about them.
struct Site {
    database: TestDatabase,
    bmdb: Bmdb,
}

impl Site {
    async fn create(name: &str) -> anyhow::Result<Self> {
        let database = TestDatabase::create(name).await?;
        let bmdb = database.bmdb().await?;
        Ok(Self { database, bmdb })
    }

    async fn advance(&self, by: Duration) -> anyhow::Result<()> {
        self.database.advance(by).await
    }

    async fn change(&self, machine: MachineId, changes: Vec<FactChange>) -> anyhow::Result<()> {
        self.bmdb
            .change_machine(machine, move |_| Decision { changes: changes.clone(), ..Decision::default() })
            .await?;
        Ok(())
    }

    /// A machine that `provider` calls `id`, running at 192.0.2.7.
    async fn machine(&self, provider: &str, id: &str) -> anyhow::Result<MachineId> {
        let machine = MachineId::generate();
        self.bmdb.create_machine(machine, provided(provider, id)).await?;
        Ok(machine)
    }

    /// Somebody listens for heartbeats, and has for an hour.
    async fn listen(&self) -> anyhow::Result<()> {
        sqlx::query(
            "INSERT INTO fleet_listening (shard, since, last_commit) VALUES (0, clock_timestamp() - interval '1 h', \
             clock_timestamp()) ON CONFLICT (shard) DO UPDATE SET last_commit = EXCLUDED.last_commit",
        )
        .execute(&self.database.pool().await?)
        .await?;
        Ok(())
    }

    /// A session of an `initializer` or such, kept by nobody for the length of a test.
    async fn sessions(&self, component: &str) -> anyhow::Result<Worker> {
        let (sessions, keeper) = Sessions::new(self.bmdb.clone(), ProcessId::generate(), Duration::from_hours(10));
        let stop = CancellationToken::new();
        let kept = tokio::spawn(keeper.keep(stop.clone()));
        let session = sessions.start(component, serde_json::json!({})).await?;
        Ok(Worker { sessions, session, stop, kept })
    }

    /// What the program says: exit code, standard output and standard error, masked.
    fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        transcript(&program(Some(self.database.url()), arguments)?)
    }

    fn json(&self, arguments: &[&str]) -> anyhow::Result<serde_json::Value> {
        let output = program(Some(self.database.url()), &[arguments, &["-o", "json"]].concat())?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

struct Worker {
    sessions: Sessions,
    session: shepherd::bmdb::session::Session,
    stop: CancellationToken,
    kept: tokio::task::JoinHandle<()>,
}

impl Worker {
    async fn claim(&self, process: Process) -> anyhow::Result<Work> {
        let mut claimer = Claimer::new(self.sessions.clone(), process, vec!["sim".to_owned()]);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            claimer.rearm_timers().await?;
            match claimer.claim(std::slice::from_ref(&self.session)).await? {
                Claimed::Work(mut work) => return work.pop().context("a claim of nothing"),
                Claimed::Contended | Claimed::Empty => {
                    ensure!(tokio::time::Instant::now() < deadline, "{process} is not due");
                }
            }
        }
    }

    async fn end(self) -> anyhow::Result<()> {
        self.sessions.close(&self.session, "the test is over").await?;
        self.stop.cancel();
        self.kept.await?;
        Ok(())
    }
}

fn program(url: Option<&str>, arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
    command.args(arguments).stdin(Stdio::null()).env_clear().env("USER", "kim").env("COLUMNS", "110");
    let dialect = match Mode::of_this_run()? {
        Mode::SkipLocked => "skip-locked",
        Mode::Waiting => "waiting",
        Mode::Serializable => "serializable",
    };
    command.env("SHEPHERD_BMDB_DIALECT", dialect);
    if let Some(url) = url {
        command.env("SHEPHERD_BMDB_URL", url);
    }
    command.output().context("shepherdctl")
}

/// Exit code (unless 0), then what was said, with what differs from run to run masked.
fn transcript(output: &Output) -> anyhow::Result<String> {
    let mut text = String::new();
    if !output.status.success() {
        text.push_str(&format!("exit code {}\n", output.status.code().context("killed")?));
    }
    text.push_str(std::str::from_utf8(&output.stdout)?);
    if !output.stderr.is_empty() {
        text.push_str("standard error:\n");
        text.push_str(std::str::from_utf8(&output.stderr)?);
    }
    Ok(text)
}

/// Compares with the golden text beside this file.
macro_rules! golden {
    ($name:expr, $text:expr) => {{
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let mut settings = insta::Settings::clone_current();
        settings.set_snapshot_path("golden/cli");
        settings.set_prepend_module_to_snapshot(false);
        settings.set_omit_expression(true);
        settings.add_filter(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "[uuid]");
        settings.add_filter(r"(?m)^[0-9a-f]{8}  ", "[short]   ");
        settings.add_filter(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", "[moment]");
        settings.add_filter(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?( UTC|Z)?", "[moment]");
        settings.add_filter(r"pid \d+", "pid [pid]");
        settings.add_filter(&format!("@{}", escaped(&host)), "@[host]");
        settings.add_filter(&format!("on {}", escaped(&host)), "on [host]");
        settings.add_filter(r"src/([a-z_/]+\.rs):\d+", "src/$1:[line]");
        settings.add_filter(r"/tmp/[^ :]*", "[socket]");
        settings.bind(|| insta::assert_snapshot!($name, $text));
    }};
}

fn escaped(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\{c}") }).collect()
}

fn provided(provider: &str, id: &str) -> Vec<FactChange> {
    vec![FactChange::Provided { provider: provider.into(), provider_id: id.into(), details: details() }]
}

fn details() -> ProviderDetails {
    ProviderDetails {
        reservation: None,
        address: Some("192.0.2.7".into()),
        ssh_port: None,
        ssh_user: None,
        location: Some("rack 7".into()),
        status: ProviderStatus::Running,
    }
}

fn agent() -> FactChange {
    FactChange::AgentStarted(NewAgent {
        public_key: vec![7; 32],
        boot_id: Some("boot-1".into()),
        version: "0.1.0".into(),
        supervision: "systemd".into(),
        fence: 1,
    })
}

fn beat(boot: &str, sequence: i64) -> FactChange {
    FactChange::Heartbeat(NewHeartbeat {
        boot_id: boot.into(),
        incarnation: "agent-1".into(),
        sequence,
        version: "0.1.0".into(),
    })
}

fn key(byte: u8) -> HostKey {
    HostKey { algorithm: "ssh-ed25519".into(), key: vec![byte; 51] }
}

fn pinned(key: &HostKey) -> FactChange {
    FactChange::HostKeyPinned {
        algorithm: key.algorithm.clone(),
        public_key: key.key.clone(),
        source: HostKeySource::FirstUse,
    }
}

fn refused(key: &HostKey) -> FactChange {
    FactChange::HostKeyRefused { algorithm: key.algorithm.clone(), public_key: key.key.clone() }
}
