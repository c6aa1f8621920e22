//! Forecasts: `shepherdctl plan` lists the work that will begin. Then time passes over real loops, and history must
//! show the same machines, processes and times.
//!
//! The loops are the service's own, on a database whose clock is frozen until the test moves it from one due time to
//! the next. The machines are a simulator's, reached over its provider API and SSH. The test itself sends the reports
//! of agents, because they count by the database's clock: an agent reports a second after it was installed on its
//! machine, and then regularly. The test reads the times to move to from the schedule in the database and never from
//! the plan.
//!
//! Each fleet is random, by a seed that a failure prints and that `SHEPHERD_PLAN_SEED` selects.

use std::collections::{BTreeMap, HashMap};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use chrono::TimeDelta;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use shepherd::bmdb::engine::fact_change::{FactChange, NewAgent, NewHeartbeat, ProviderDetails};
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::fleet::provider::NewMachine;
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat as Report};
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::control_loop::ControlLoop;
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::initializer::Initializer;
use shepherd::manager::limiter::Limiter;
use shepherd::manager::machine_access::{AgentFile, MachineAccess};
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::manager::provider_set::ProviderSet;
use shepherd::manager::recoverer::Recoverer;
use shepherd::manager::recovery_brakes::RecoveryBrakes;
use shepherd::manager::updater::Updater;
use shepherd::model::backoff::BackoffFact;
use shepherd::model::facts::{Hold, HoldScope, Postponement, Recovery, RecoveryAction};
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::policy::{Budget, DisruptionKind, Policy};
use shepherd::model::process::Process;
use shepherd::model::provider_status::ProviderStatus;
use shepherd::model::time::{Span, Timestamp};
use shepherd::providers::provider::Provider as _;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::session::SshSettings;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

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
    /// Machines whose agent continues to report, with its key and boot id.
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

    /// Adds machines in random states.
    async fn furnish(&mut self) -> Result<()> {
        let count = self.random.random_range(2..=8);
        let shepherd = Shepherd::start(&self.kit, "provisioner", FOR_EVER).await?;
        let session = shepherd.session().await?;
        let lease =
            self.kit.bmdb.acquire_named_lease(&session, "provisioner", "sim").await?.context("taken")?;
        let mut machines = Vec::new();
        for number in 0..count {
            // The provider has lost one in ten.
            let there = self.random.random_range(0..10) != 0;
            let (provider_id, details) = if there {
                let made = self.simulator.machine().await?;
                let found = self.simulator.provider()?.find_machine(&made.id).await?.context("just made")?;
                let details = ProviderDetails {
                    reservation: None,
                    address: found.address,
                    ssh_port: found.ssh_port,
                    ssh_user: found.ssh_user,
                    location: found.location,
                    status: found.status,
                };
                (found.id, details)
            } else {
                let details = ProviderDetails {
                    reservation: None,
                    address: None,
                    ssh_port: None,
                    ssh_user: None,
                    location: None,
                    status: ProviderStatus::Missing,
                };
                (format!("lost-{number}"), details)
            };
            let new = NewMachine { provider_id, details, changes: Vec::new(), detail: "made".to_owned() };
            let machine = self.kit.bmdb.record_machine(&lease, None, &new).await?;
            machines.push((machine, there));
        }
        self.kit.bmdb.release_named_lease(&lease).await?;
        shepherd.sessions.close(&session, "done").await?;
        shepherd.stop().await?;
        for (machine, there) in machines {
            self.befall(machine, there).await?;
        }
        Ok(())
    }

    /// Puts a machine into a random state.
    async fn befall(&mut self, machine: MachineId, there: bool) -> Result<()> {
        if self.random.random_range(0..4) != 0 {
            let (looked_at, unchanged) = (self.before(40), self.random.random());
            sqlx::query("UPDATE machine_provided SET looked_at = $2, unchanged = $3 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(looked_at)
                .bind::<bool>(unchanged)
                .execute(&self.kit.pool)
                .await?;
        }
        if there && self.random.random_range(0..4) != 0 {
            self.take_over(machine).await?;
        }
        let mut changes = Vec::new();
        if self.random.random_range(0..4) == 0 {
            let scope = HoldScope::ALL[self.random.random_range(0..3)];
            let until = self.random.random::<bool>().then(|| self.later(40));
            changes.push(FactChange::HoldSet(Hold {
                scope,
                reason: "disks".into(),
                by: "kim".into(),
                until,
            }));
        }
        for process in Process::ALL {
            if self.random.random_range(0..6) == 0 {
                changes.push(FactChange::Backoff(
                    process,
                    BackoffFact {
                        failures: self.random.random_range(1..3),
                        last_interval: Duration::from_mins(5),
                        until: self.later(20),
                        cause: "no route to host".into(),
                    },
                ));
            }
            if self.random.random_range(0..8) == 0 {
                let wait = Postponement {
                    until: self.later(20),
                    reason: "the budget is used up".into(),
                    decided_at: "here".into(),
                };
                changes.push(FactChange::Postponed(process, wait));
            }
        }
        match self.random.random_range(0..12) {
            0 => changes.push(FactChange::Quarantined("the lists differ".into())),
            1 => changes.push(FactChange::NeedsHuman {
                obstacle: Obstacle::LadderExhausted,
                reason: "nothing helped".into(),
            }),
            _ => {}
        }
        self.kit.change(machine, changes).await?;
        // Its agent reported a fence that this database never issued.
        if self.random.random_range(0..8) == 0 {
            sqlx::query(
                "INSERT INTO history (machine_id, at, event, fence, detail)
                 VALUES ($1, $2, 'NewerFence', 1000, 'reported')",
            )
            .bind(machine.0)
            .bind(self.before(90))
            .execute(&self.kit.pool)
            .await?;
        }
        if self.random.random_range(0..8) == 0 {
            sqlx::query("UPDATE machine_due SET losses = 1, not_before = $2 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(self.later(5))
                .execute(&self.kit.pool)
                .await?;
        }
        Ok(())
    }

    /// Its agent was started once, and reports, has fallen silent, or is being recovered.
    async fn take_over(&mut self, machine: MachineId) -> Result<()> {
        let agent = Agent { public_key: key_of(machine), boot_id: format!("boot of {machine}") };
        let started = FactChange::AgentStarted(NewAgent {
            public_key: agent.public_key.to_vec(),
            boot_id: Some(agent.boot_id.clone()),
            version: "1".into(),
            supervision: "systemd".into(),
            fence: 0,
        });
        let beat = FactChange::Heartbeat(beat(&agent.boot_id, 1));
        let (_, policy) = self.kit.bmdb.policy();
        let interval = i64::try_from(policy.heartbeat_interval.0.as_secs())?;
        let second = |seconds: i64| self.begin - TimeDelta::seconds(seconds);
        // How many seconds ago its agent was installed and last reported, and whether it still reports.
        let (start, received, speaks) = match self.random.random_range(0..8) {
            // Silent for some time, noticed or not.
            0..=3 => (7200, Some(self.random.random_range(3 * interval + 1..2400)), false),
            // Has never reported.
            4 => (self.random.random_range(3 * interval + 1..2400), None, false),
            // Installed a moment ago.
            5 => (self.random.random_range(0..interval), None, true),
            _ => (7200, Some(self.random.random_range(0..interval)), true),
        };
        let (start, last_contact) = (second(start), received.map(second));
        let mut changes = vec![started];
        changes.extend(last_contact.map(|_| beat));
        let silent = last_contact.is_some() && !speaks;
        if silent && self.random.random() {
            changes.push(FactChange::Recovery(self.ladder(&policy, &agent)));
        }
        self.kit.change(machine, changes).await?;
        sqlx::query("UPDATE machine_agent_started SET started_at = $2 WHERE machine_id = $1")
            .bind(machine.0)
            .bind(start)
            .execute(&self.kit.pool)
            .await?;
        if let Some(last_contact) = last_contact {
            sqlx::query("UPDATE machine_agent_heartbeat SET at = $2 WHERE machine_id = $1")
                .bind(machine.0)
                .bind(last_contact)
                .execute(&self.kit.pool)
                .await?;
        }
        match (speaks, last_contact) {
            (true, Some(_)) => drop(self.speaking.insert(machine, agent)),
            (true, None) => drop(self.to_report.insert(machine, self.begin + TimeDelta::seconds(1))),
            _ => {}
        }
        Ok(())
    }

    /// A ladder of which some steps were taken.
    fn ladder(&mut self, policy: &Policy, agent: &Agent) -> Recovery {
        let rung = self.random.random_range(0..policy.ladder.len());
        let what = policy.ladder[rung];
        let at = self.before(10);
        let acted = self.random.random::<bool>().then(|| RecoveryAction {
            step: what.step,
            acted_at: at,
            deadline: at + what.deadline.0,
            boot_id_before: Some(agent.boot_id.clone()),
        });
        Recovery {
            started_at: at,
            rung,
            attempts: if acted.is_some() { self.random.random_range(1..=what.tries) } else { 0 },
            next_check_at: acted.as_ref().map_or(at, |acted| acted.deadline.min(self.later(2))),
            last_action: acted,
            note: "somebody tried".into(),
            obstacle: None,
        }
    }

    fn before(&mut self, minutes: i64) -> Timestamp {
        self.begin - TimeDelta::seconds(self.random.random_range(1..minutes * 60))
    }

    fn later(&mut self, minutes: i64) -> Timestamp {
        self.begin + TimeDelta::seconds(self.random.random_range(1..minutes * 60))
    }

    /// The work items that `shepherdctl plan` forecasts.
    fn fetch_planned_begins(&self) -> Result<Vec<Begun>> {
        let answer = self.ask(&["plan", "--horizon", &self.horizon.to_string(), "-o", "json"])?;
        let answer: serde_json::Value = serde_json::from_str(&answer)?;
        ensure!(answer["truncated"] == false, "it was too much");
        let mut rows = Vec::new();
        for row in answer["rows"].as_array().context("no rows")? {
            let machine = row["machine"].as_str().context("no machine")?.parse()?;
            let process = row["process"].as_str().context("no process")?.to_owned();
            rows.push((machine, process, row["at"].as_str().context("no moment")?.parse()?));
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
            agent_file: AgentFile::new("/bin/sh".into()),
            agent_path: "/root/roleserver".into(),
            // Nothing listens there: the test itself reports for the agents.
            endpoints: vec!["127.0.0.1:9".to_owned()],
            ca_certificates: Box::new(Vec::new),
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

/// A key that no other machine has.
fn key_of(machine: MachineId) -> [u8; 32] {
    let mut key = [7; 32];
    key[..16].copy_from_slice(machine.0.as_bytes());
    key
}

/// A policy in which much happens within an hour.
fn random_policy(random: &mut ChaCha8Rng) -> Policy {
    let mut policy = Policy::default();
    let mut minutes = |from: u64, to: u64| Span::minutes(random.random_range(from..=to));
    policy.heartbeat_interval = minutes(1, 3);
    policy.recovery_silence_timeout = minutes(10, 20);
    policy.recovery_first_heartbeat_timeout = minutes(10, 40);
    policy.update_interval_stable = minutes(10, 30);
    policy.update_interval_unstable = minutes(4, 8);
    policy.recovery_brake.window = minutes(3, 10);
    for rung in &mut policy.ladder {
        rung.deadline = minutes(1, 15);
    }
    policy.recovery_brake.at_least = random.random_range(2..8);
    for step in DisruptionKind::ALL {
        let window = Span::minutes(random.random_range(2..10));
        policy.budgets.insert(step, Budget { count: random.random_range(1..5), window });
    }
    policy
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
            Some((machine, _, _)) => site.ask(&["timeline", &machine.to_string(), "--limit", "1000"])?,
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
