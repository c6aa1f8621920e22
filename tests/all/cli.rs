//! `shepherdctl` as an operator uses it: the real program against machines with states that the engine has set.
//!
//! Transcripts are golden. What differs from run to run (ids, times, host names) is masked. Durations are not: the test
//! moves the database's clock, and a second of the host's clock does not show.

mod input;
mod lists;
mod routine;
mod why;

use std::fmt::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use prost::Message as _;
use shepherd::bmdb::connection::Bmdb;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::claim::{Claimed, Claimer};
use shepherd::bmdb::engine::fact_change::{
    FactChange, HostKeySource, NewAgent, NewHardwareReport, NewHeartbeat, ProviderDetails,
};
use shepherd::bmdb::engine::session::{Session, Sessions};
use shepherd::bmdb::engine::work::Work;
use shepherd::bmdb::fleet::provider::NewMachine;
use shepherd::model::backoff::BackoffFact;
use shepherd::model::host_key::HostKey;
use shepherd::model::ids::{MachineId, ProcessId};
use shepherd::model::needs_human::Obstacle;
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::proto::hardware::v1::{HardwareReport, Memory};
use tokio_util::sync::CancellationToken;

use crate::harness::aloud::TestResult;
use crate::harness::dialect;
use crate::harness::postgres::TestDatabase;

/// A database with machines, and the program that queries it.
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
            .change_machine(machine, move |_| Decision {
                changes: changes.clone(),
                events: Vec::new(),
                output: (),
            })
            .await?;
        Ok(())
    }

    /// Adds a machine with the provider's id `id`, at the address 192.0.2.7.
    async fn machine(&self, provider: &str, id: &str) -> anyhow::Result<MachineId> {
        let provisioner = self.sessions("provisioner").await?;
        let lease = self.bmdb.acquire_named_lease(&provisioner.session, "provisioner", provider).await?;
        let lease = lease.context("somebody else is the provisioner")?;
        let new = NewMachine {
            provider_id: id.to_owned(),
            details: details(),
            changes: Vec::new(),
            detail: format!("{provider} lists {id}"),
        };
        let machine = self.bmdb.record_machine(&lease, None, &new).await?;
        self.bmdb.release_named_lease(&lease).await?;
        provisioner.end().await?;
        Ok(machine)
    }

    /// A callback server listens for heartbeats, and has done so for an hour.
    async fn listen(&self) -> anyhow::Result<()> {
        sqlx::query(
            "INSERT INTO fleet_listening (shard, since, last_commit) VALUES (0, clock_timestamp() - interval '1 h', \
             clock_timestamp()) ON CONFLICT (shard) DO UPDATE SET last_commit = EXCLUDED.last_commit",
        )
        .execute(&self.database.pool().await?)
        .await?;
        Ok(())
    }

    /// Opens a session of an `initializer` or a similar component, which nothing renews during a test.
    async fn sessions(&self, component: &str) -> anyhow::Result<Worker> {
        let (sessions, keeper) =
            Sessions::new(self.bmdb.clone(), ProcessId::generate(), Duration::from_hours(10));
        let stop = CancellationToken::new();
        let kept = tokio::spawn(keeper.run(&stop)?);
        let session = sessions.start(component, serde_json::json!({})).await?;
        Ok(Worker { sessions, session, stop, kept })
    }

    /// Runs the program: exit code, standard output and standard error, masked.
    fn ask(&self, arguments: &[&str]) -> anyhow::Result<String> {
        transcript(&self.program(arguments)?.output()?)
    }

    /// The same on an endless line and with single spaces: for output with host names, which differ in length.
    fn ask_wide(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = transcript(&self.program(arguments)?.env("COLUMNS", "2000").output()?)?;
        let squeezed = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        Ok(squeezed.collect::<Vec<_>>().join("\n"))
    }

    fn program(&self, arguments: &[&str]) -> anyhow::Result<Command> {
        let mut command = command(Some(self.database.url()), arguments);
        command.env("SHEPHERD_BMDB_DIALECT", dialect::of_this_run()?.as_str());
        Ok(command)
    }

    fn json(&self, arguments: &[&str]) -> anyhow::Result<serde_json::Value> {
        let output = self.program(&[arguments, &["-o", "json"]].concat())?.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

struct Worker {
    sessions: Sessions,
    session: Session,
    stop: CancellationToken,
    kept: tokio::task::JoinHandle<()>,
}

impl Worker {
    async fn claim(&self, process: Process, provider: &str) -> anyhow::Result<Work> {
        let mut claimer = Claimer::new(self.sessions.clone(), process, vec![provider.to_owned()]);
        let deadline = tokio::time::Instant::now() + Duration::from_mins(5);
        loop {
            claimer.rearm_timers().await?;
            match claimer.claim(std::slice::from_ref(&self.session)).await? {
                Claimed::Work(mut work) => return work.pop().context("a claim of nothing"),
                Claimed::Contended | Claimed::Empty | Claimed::FullScanDeferred(_) => {
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

fn command(url: Option<&str>, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shepherdctl"));
    command.args(arguments).stdin(Stdio::null()).env_clear().env("USER", "kim").env("COLUMNS", "110");
    if let Some(url) = url {
        command.env("SHEPHERD_BMDB_URL", url);
    }
    command
}

/// The exit code (unless 0), then the output, with masks for everything that differs from run to run.
fn transcript(output: &Output) -> anyhow::Result<String> {
    let mut text = String::new();
    if !output.status.success() {
        writeln!(text, "exit code {}", output.status.code().context("killed")?)?;
    }
    text.push_str(std::str::from_utf8(&output.stdout)?);
    if !output.stderr.is_empty() {
        text.push_str("standard error:\n");
        text.push_str(std::str::from_utf8(&output.stderr)?);
    }
    Ok(text)
}

/// Compares with the golden text of this name in `golden/cli`.
fn golden(name: &str, text: &str) {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("golden/cli");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.add_filter(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "[uuid]");
    settings.add_filter(r"(?m)^[0-9a-f]{8} ", "[short]  ");
    settings
        .add_filter(&format!(r"(initializer|recoverer|updater) {} \d+ ", escaped(&host)), "$1 [host] [pid] ");
    settings.add_filter(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?", "[moment]");
    settings.add_filter(r"pid \d+", "pid [pid]");
    settings.add_filter(&format!("@{}", escaped(&host)), "@[host]");
    settings.add_filter(&format!("on {}", escaped(&host)), "on [host]");
    settings.add_filter(r"src/([a-z_/]+\.rs):\d+", "src/$1:[line]");
    settings.add_filter(r"/tmp/[^ :]*", "[socket]");
    settings.add_filter(r"tests/all/([a-z_/]+\.rs):\d+", "tests/all/$1:[line]");
    // On a slow host seconds are added to these minutes, or a digit to the seconds. In a column they take the place
    // of spaces, which are put back when they are masked.
    settings.add_filter(r"(\d+m)\d\ds( ago)?(  )", "$1$2   $3");
    settings.add_filter(r"(\d+m)\d\ds", "$1");
    settings.add_filter(r"\b\d\ds(  )", "[s] $1");
    settings.add_filter(r"\b(\d+s ago|just now)", "moments ago");
    // The history of some tests has times that stay the same.
    settings.add_filter(r"(?m)^\d+d\d+h ", "[age] ");
    settings.add_filter(r"\b\d+s\b", "[s]");
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// As [`golden`], for a plan: it also masks until when routine is folded.
fn golden_plan(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"last (\d{4}-\d\d-\d\d )?\d\d:\d\d,", "last [time],");
    settings.bind(|| golden(name, text));
}

fn escaped(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\{c}") }).collect()
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

/// The changes of a machine with an agent that was installed and has reported.
fn healthy() -> Vec<FactChange> {
    vec![agent(), beat("boot-1", 1000)]
}

/// A failure of `process` as the engine would record it now, without jitter.
async fn fail(site: &Site, machine: MachineId, process: Process, cause: &str) -> anyhow::Result<()> {
    let (_, policy) = site.bmdb.policy();
    let cause = cause.to_owned();
    site.bmdb
        .change_machine(machine, move |snapshot| {
            let previous = snapshot.facts.backoffs.get(&process);
            let backoff = policy.backoff_of(process);
            let fact = BackoffFact::after_failure(previous, &backoff, cause.clone(), snapshot.now, 0.5);
            Decision { changes: vec![FactChange::Backoff(process, fact)], events: Vec::new(), output: () }
        })
        .await?;
    Ok(())
}

#[tokio::test]
async fn description_holds_every_fact_even_of_a_newer_schema() -> TestResult {
    let site = Site::create("cli_describe").await?;
    site.listen().await?;
    let machine = site.machine("sim", "sim-0007").await?;
    let report = HardwareReport {
        manufacturer: "Example".into(),
        product: "S1".into(),
        serial_number: "X-7".into(),
        memory: Some(Memory { installed_bytes: 64 << 30, usable_ratio: 0.98 }),
        warnings: vec!["no DMI".into()],
        ..HardwareReport::default()
    };
    let hardware = NewHardwareReport {
        incarnation: "agent-1".into(),
        report: report.encode_to_vec(),
        manufacturer: Some("Example".into()),
        product: Some("S1".into()),
        serial_number: Some("X-7".into()),
        memory_bytes: 64 << 30,
        cpu_threads: 32,
    };
    let changes = vec![agent(), beat("boot-1", 1000), pinned(&key(1)), FactChange::HardwareReport(hardware)];
    site.change(machine, changes).await?;
    fail(&site, machine, Process::Update, "the provider does not answer").await?;
    sqlx::raw_sql(
        "CREATE TABLE public.machine_moon_phase (machine_id UUID PRIMARY KEY, phase TEXT, raw BYTEA, \"odd name\" INT8);
         CREATE TABLE public.machine_pair (machine_id UUID, lane TEXT, PRIMARY KEY (machine_id, lane));
         INSERT INTO public.machine_moon_phase SELECT machine_id, 'waxing', '\\x0102', 7 FROM machine",
    )
    .execute(&site.database.pool().await?)
    .await?;
    golden("describe", &site.ask(&["describe", "machine", "sim-0007"])?);
    Ok(())
}

#[tokio::test]
async fn plan_lists_what_comes_before_it_happens() -> TestResult {
    let site = Site::create("cli_plan").await?;
    site.listen().await?;
    golden("plan_of_nothing", &site.ask(&["plan"])?);
    site.machine("sim", "sim-0007").await?;
    golden_plan("plan", &site.ask(&["plan", "--machine", "sim-0007"])?);
    golden("plan_all", &site.ask(&["plan", "--machine", "sim-0007", "--all"])?);
    golden("plan_limited", &site.ask(&["plan", "--all", "--limit", "1", "--process", "Update"])?);
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("new.toml");
    let shown = file.to_str().context("a path of text")?;
    std::fs::write(&file, "recoverer_loop_parallelism = 4\nupdate_interval_stable = \"45m\"\n")?;
    golden("plan_diff", &site.ask(&["plan", "--diff", shown])?);
    std::fs::write(&file, "recoverer_loop_parallelism = 4\n")?;
    golden("plan_diff_of_nothing", &site.ask(&["plan", "--diff", shown])?);
    std::fs::write(&file, "recovery_silence_timeout = \"soon\"\n")?;
    golden("plan_wrong_configuration", &site.ask(&["plan", "--diff", shown])?);
    site.ask(&["hold", "sim-0007", "--reason", "new disks"])?;
    golden(
        "plan_of_a_held_machine",
        &site.ask(&["plan", "--machine", "sim-0007", "--process", "AgentStart"])?,
    );
    Ok(())
}

#[tokio::test]
async fn what_is_wrong_is_listed_with_what_to_do() -> TestResult {
    let site = Site::create("cli_issues").await?;
    let machine = site.machine("sim", "sim-0007").await?;
    let call =
        FactChange::NeedsHuman { obstacle: Obstacle::LoginRefused, reason: "it lets nobody in".into() };
    site.change(machine, vec![call]).await?;
    // So long that a second more or less on a busy host does not make a column wider.
    site.advance(Duration::from_hours(72)).await?;
    golden("issues", &site.ask(&["issues"])?);
    golden("yaml_issues", &site.ask(&["issues", "-o", "yaml"])?);
    Ok(())
}
