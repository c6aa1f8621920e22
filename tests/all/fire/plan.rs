//! Forecasts: `shepherdctl plan` lists the work that will begin. Then time passes over real loops, and history must
//! show the same machines, processes and times.
//!
//! The loops are the service's own, on a database with a clock that is frozen until the test moves it from one due time to
//! the next. The machines are a simulator's, reached over its provider API and SSH. The test itself sends the reports
//! of agents, because they count by the database's clock: an agent reports a second after it was installed on its
//! machine, and then regularly. The test reads the times to move to from the schedule in the database and never from
//! the plan.
//!
//! Each fleet is random, by a seed that a failure prints and that `SHEPHERD_PLAN_SEED` selects.

mod fleet;

use std::collections::{BTreeMap, HashMap};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use chrono::TimeDelta;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shepherd::bmdb::engine::fact_change::NewHeartbeat;
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat as Report};
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::agent_file::{AgentFile, AgentTrust};
use shepherd::manager::control_loop::ControlLoop as _;
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::initializer::Initializer;
use shepherd::manager::limiter::Limiter;
use shepherd::manager::machine_access::MachineAccess;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_set::ProviderSet;
use shepherd::manager::recoverer::Recoverer;
use shepherd::manager::recovery_brakes::RecoveryBrakes;
use shepherd::manager::updater::Updater;
use shepherd::model::ids::MachineId;
use shepherd::model::process::Process;
use shepherd::model::time::{Span, Timestamp};
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::session::SshSettings;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::fleet::random_policy;
use crate::bmdb_kit::{Kit, PATIENCE, Shepherd};
use crate::fire::{Form, counted};
use crate::harness::aloud::TestResult;
use crate::simulator::Running;

/// Longer than any session.
const FOR_EVER: Duration = Duration::from_hours(1000);

/// A work item that has begun, or will begin.
type Begun = (MachineId, String, Timestamp);

/// A random fleet with loops that are not started yet.
struct Site {
    kit: Kit,
    simulator: Running,
    directory: TempDir,
    random: ChaCha8Rng,
    begin: Timestamp,
    horizon: Span,
    /// Machines with an agent that continues to report, with its key and boot id.
    speaking: BTreeMap<MachineId, Agent>,
    /// When the current agent of a machine was installed, as far as the test has observed.
    started: BTreeMap<MachineId, Timestamp>,
    /// First reports that are pending.
    to_report: BTreeMap<MachineId, Timestamp>,
    sequence: i64,
}

#[derive(Clone)]
struct Agent {
    public_key: [u8; 32],
    boot_id: String,
}

/// From now on the clock of this database is frozen at the time that a test sets.
const FREEZE: &str = "
    CREATE SEQUENCE shim.stands_at;
    SELECT setval('shim.stands_at', 1900000000000000);
    CREATE OR REPLACE FUNCTION shim.now() RETURNS timestamptz LANGUAGE sql STABLE AS $$
        SELECT 'epoch'::timestamptz
             + pg_catalog.pg_sequence_last_value('shim.stands_at'::regclass) * interval '1 microsecond' $$;
    CREATE OR REPLACE FUNCTION shim.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS $$
        SELECT 'epoch'::timestamptz
             + pg_catalog.pg_sequence_last_value('shim.stands_at'::regclass) * interval '1 microsecond' $$";

impl Site {
    async fn new(seed: u64) -> Result<Self> {
        let kit = Kit::new(&format!("plan_{seed}")).await?;
        sqlx::raw_sql(FREEZE).execute(&kit.pool).await?;
        let begin = Timestamp::from_timestamp(1_900_000_000, 0).context("a moment")?;
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let policy = random_policy(&mut random);
        kit.bmdb.change_policy("test", move |stored| policy.clone_into(stored)).await?;
        // A callback server has listened for a while, and continues.
        sqlx::query("INSERT INTO fleet_listening (shard, since, last_commit) VALUES (99, $1, $2)")
            .bind(begin - TimeDelta::minutes(random.random_range(0..60)))
            .bind(begin + TimeDelta::days(30))
            .execute(&kit.pool)
            .await?;
        let directory = tempfile::tempdir()?;
        let flags = ["--machine_count", "8", "--boot_seconds", "0", "--persistent_agent_percent", "0"];
        let simulator = Running::start(directory.path(), &flags).await?;
        let horizon = Span::minutes(random.random_range(20..60));
        let mut site = Self {
            kit,
            simulator,
            directory,
            random,
            begin,
            horizon,
            speaking: BTreeMap::new(),
            started: BTreeMap::new(),
            to_report: BTreeMap::new(),
            sequence: 1000,
        };
        site.furnish().await?;
        site.kit.sweep().await?;
        site.look_for_new_agents(false).await?;
        Ok(site)
    }

    /// The work items that `shepherdctl plan` forecasts.
    fn fetch_planned_begins(&self) -> Result<Vec<Begun>> {
        let answer = self.ask(&["plan", "--all", "--horizon", &self.horizon.to_string(), "-o", "json"])?;
        let answer: serde_json::Value = serde_json::from_str(&answer)?;
        ensure!(answer["head"]["truncated"] == false, "it was too much");
        let mut rows = Vec::new();
        for row in answer["rows"].as_array().context("no rows")? {
            let machine = row["name"]["machine"].as_str().context("no machine")?.parse()?;
            let process = row["process"].as_str().context("no process")?.to_owned();
            rows.push((machine, process, row["startsAt"].as_str().context("no moment")?.parse()?));
        }
        rows.sort();
        Ok(rows)
    }

    fn ask(&self, arguments: &[&str]) -> Result<String> {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
            .args(arguments)
            .env_clear()
            .env("SHEPHERD_BMDB_URL", self.kit.database.url())
            .env("SHEPHERD_BMDB_DIALECT", self.kit.database.dialect().as_str())
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The work items that history shows as begun.
    async fn happened(&self) -> Result<Vec<Begun>> {
        let rows: Vec<(Uuid, String, Timestamp)> =
            sqlx::query_as("SELECT machine_id, process, at FROM history WHERE edge = 'start' AND at >= $1")
                .bind(self.begin)
                .fetch_all(&self.kit.pool)
                .await?;
        let mut rows: Vec<Begun> =
            rows.into_iter().map(|(machine, process, at)| (MachineId(machine), process, at)).collect();
        rows.sort();
        Ok(rows)
    }

    /// Runs the real loops until the horizon.
    async fn live(&mut self) -> Result<()> {
        let shepherd = Shepherd::start(&self.kit, "loops", FOR_EVER).await?;
        let (drain, wake_ups) = (CancellationToken::new(), WakeUps::default());
        let metrics = ManagerMetrics::register(&Metrics::new());
        let providers = ProviderSet::new(vec![Arc::new(self.simulator.provider()?)]);
        let access = Arc::new(self.access()?);
        let brakes = Arc::new(RecoveryBrakes::new(shepherd.bmdb.clone()));
        let mut loops = JoinSet::new();
        let context = |name: &'static str, process| LoopContext {
            sessions: shepherd.sessions.clone(),
            wake_ups: wake_ups.clone(),
            metrics: metrics.for_loop(name, process),
            drain: drain.clone(),
            abort: CancellationToken::new(),
        };
        // One recoverer: if the budget permits one of two that are due at the same time, the older claim gets it.
        let initializer = Initializer { providers: providers.clone(), access: access.clone() };
        let recoverer = Recoverer { providers: providers.clone(), access, brakes };
        let updater = Updater { providers };
        let (name, process) = (initializer.name(), initializer.process());
        loops.spawn(run_loop(Arc::new(initializer), settings(2)?, context(name, process)));
        let (name, process) = (recoverer.name(), recoverer.process());
        loops.spawn(run_loop(Arc::new(recoverer), settings(1)?, context(name, process)));
        let (name, process) = (updater.name(), updater.process());
        loops.spawn(run_loop(Arc::new(updater), settings(2)?, context(name, process)));

        let passed = self.pass_time(&wake_ups).await;
        drain.cancel();
        while loops.join_next().await.is_some() {}
        shepherd.sessions.wait_until_drained().await;
        shepherd.stop().await?;
        passed
    }

    /// Moves the clock from one due time to the next.
    async fn pass_time(&mut self, wake_ups: &WakeUps) -> Result<()> {
        let end = self.begin + self.horizon.0;
        let (_, policy) = self.kit.bmdb.policy();
        loop {
            self.until_idle(wake_ups).await?;
            self.look_for_new_agents(true).await?;
            let now = self.clock().await?;
            let due: Option<Timestamp> = sqlx::query_scalar(
                "SELECT min(GREATEST(ready_at, not_before)) FROM machine_due WHERE process IS NOT NULL",
            )
            .fetch_one(&self.kit.pool)
            .await?;
            let beats = (!self.speaking.is_empty()).then(|| now + policy.heartbeat_interval.0);
            let next = due.into_iter().chain(beats).chain(self.to_report.values().copied()).min();
            let Some(next) = next.filter(|next| *next <= end) else { return Ok(()) };
            sqlx::query("SELECT setval('shim.stands_at', $1)")
                .bind(next.timestamp_micros())
                .execute(&self.kit.pool)
                .await?;
            self.report(next).await?;
        }
    }

    /// Waits until nothing is due any more and no worker is busy.
    async fn until_idle(&self, wake_ups: &WakeUps) -> Result<()> {
        let began = Instant::now();
        loop {
            for process in Process::ALL {
                wake_ups.wake(process);
            }
            let busy: i64 = sqlx::query_scalar(
                "SELECT count(*) FROM machine_due
                 WHERE lease_session IS NOT NULL
                    OR process IS NOT NULL AND ready_at <= now() AND (not_before IS NULL OR not_before <= now())",
            )
            .fetch_one(&self.kit.pool)
            .await?;
            if busy == 0 {
                return Ok(());
            }
            ensure!(began.elapsed() < PATIENCE, "still {busy} lanes are due or worked on");
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    /// Sends the report of every agent that reports. Agents that were just installed report for the first time a second
    /// later.
    async fn report(&mut self, now: Timestamp) -> Result<()> {
        let first: Vec<MachineId> =
            self.to_report.iter().filter(|(_, at)| **at <= now).map(|(machine, _)| *machine).collect();
        for machine in first {
            self.to_report.remove(&machine);
            let (public_key, boot_id): (Vec<u8>, Option<String>) =
                sqlx::query_as("SELECT public_key, boot_id FROM machine_agent_started WHERE machine_id = $1")
                    .bind(machine.0)
                    .fetch_one(&self.kit.pool)
                    .await?;
            let public_key = public_key.try_into().ok().context("a key of 32 bytes")?;
            self.speaking.insert(machine, Agent { public_key, boot_id: boot_id.context("no boot")? });
        }
        self.sequence += 1;
        let reports: Vec<Arc<Report>> = self
            .speaking
            .iter()
            .map(|(machine, agent)| {
                Arc::new(Report {
                    machine: *machine,
                    public_key: agent.public_key,
                    beat: beat(&agent.boot_id, self.sequence),
                    hardware: None,
                    installation: None,
                    cluster: None,
                    release: None,
                    access_fence: 0,
                })
            })
            .collect();
        let mut plain = self.kit.bmdb.store_heartbeat_group(1, reports.clone().into()).await?;
        for report in reports {
            let outcome = match plain.remove(&(report.machine, report.public_key)) {
                Some(plain) => HeartbeatOutcome::Stored(plain.instructions),
                None => self.kit.bmdb.store_heartbeat(report.clone()).await?,
            };
            ensure!(matches!(outcome, HeartbeatOutcome::Stored(_)), "{}: {outcome:?}", report.machine);
        }
        Ok(())
    }

    /// Agents that were installed since the last check will report, and the agents that they replaced report no more.
    async fn look_for_new_agents(&mut self, new: bool) -> Result<()> {
        let rows: Vec<(Uuid, Timestamp)> =
            sqlx::query_as("SELECT machine_id, started_at FROM machine_agent_started")
                .fetch_all(&self.kit.pool)
                .await?;
        for (machine, at) in rows {
            let machine = MachineId(machine);
            if self.started.insert(machine, at) != Some(at) && new {
                self.speaking.remove(&machine);
                self.to_report.insert(machine, at + TimeDelta::seconds(1));
            }
        }
        Ok(())
    }

    async fn clock(&self) -> Result<Timestamp> {
        Ok(sqlx::query_scalar("SELECT now()").fetch_one(&self.kit.pool).await?)
    }

    fn access(&self) -> Result<MachineAccess> {
        let key = ClientKey::load_or_create(&self.directory.path().join("ssh_key"))?;
        Ok(MachineAccess {
            ssh: SshSettings::new(key),
            passwords: HashMap::new(),
            user: "root".to_owned(),
            // Simulated machines accept any program and run none of it.
            agent_file: AgentFile::new("/bin/sh".into(), AgentTrust::Unchecked),
            agent_path: "/root/roleserver".into(),
            // Nothing listens there: the test itself reports for the agents.
            endpoints: vec!["127.0.0.1:9".to_owned()],
            ca_certificates: Box::new(Vec::new),
            signing: Arc::default(),
            bmdb_id: Uuid::from_u128(1),
        })
    }
}

fn settings(parallelism: usize) -> Result<LoopSettings> {
    Ok(LoopSettings { parallelism, limiter: Limiter::new("1ms,1000".parse()?) })
}

fn beat(boot_id: &str, sequence: i64) -> NewHeartbeat {
    let (boot_id, incarnation) = (boot_id.to_owned(), "one".to_owned());
    NewHeartbeat { boot_id, incarnation, sequence, version: "1".to_owned() }
}

/// Makes a forecast, lets time pass and compares. Returns the number of work items of each process.
async fn comes_true(seed: u64) -> Result<BTreeMap<String, usize>> {
    let mut site = Site::new(seed).await.context("preparing")?;
    let forecast = site.fetch_planned_begins()?;
    site.live().await.context("living")?;
    let happened = site.happened().await?;
    if forecast != happened {
        let only = |these: &[Begun], those: &[Begun]| {
            let lines = these.iter().filter(|row| !those.contains(row));
            let lines = lines.map(|(machine, process, at)| format!("  {at} {process} {machine}"));
            lines.collect::<Vec<_>>().join("\n")
        };
        let disputed = forecast.iter().filter(|row| !happened.contains(row));
        let disputed = disputed.chain(happened.iter().filter(|row| !forecast.contains(row)));
        let disputed = disputed.min_by_key(|(_, _, at)| *at);
        let text = match disputed {
            Some((machine, _, _)) => {
                site.ask(&["timeline", &machine.to_string(), "--all", "--limit", "1000"])?
            }
            None => "they differ in how often the same is begun at one moment".to_owned(),
        };
        anyhow::bail!(
            "fleet {seed}: {} in the forecast, {} happened\nonly in the forecast:\n{}\nonly happened:\n{}\n\
             {text}",
            forecast.len(),
            happened.len(),
            only(&forecast, &happened),
            only(&happened, &forecast)
        );
    }
    site.simulator.stop().await?;
    let mut counts = BTreeMap::new();
    for (_, process, _) in happened {
        *counts.entry(process).or_insert(0) += 1;
    }
    Ok(counts)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_planned_is_what_history_tells_afterwards() -> TestResult {
    let fleets = Form::of_this_run().pick(2, 200);
    let first = std::env::var("SHEPHERD_PLAN_SEED").ok().and_then(|number| number.parse().ok());
    let mut begun = BTreeMap::new();
    for seed in first.map_or(0..fleets, |only| only..only + 1) {
        for (process, count) in comes_true(seed).await.with_context(|| format!("fleet {seed}"))? {
            *begun.entry(process).or_insert(0) += count;
        }
    }
    // The line that `make fire` prints beside the others.
    counted("work items forecast and begun", format!("{begun:?}"))?;
    assert!(first.is_some() || begun.contains_key("Recovery"), "no machine was brought back: {begun:?}");
    Ok(())
}
