//! Random interleavings of everything that the engine does, and what must hold whatever happened.
//!
//! Several shepherds claim, end, drop and lose work, write facts, re-arm, reap and sweep on a few
//! machines at once, from a printed seed. The rows are then read by plain SQL that shares nothing with
//! the engine; only the schedule is compared with the model, which is a pure function.

use std::time::Duration;

use anyhow::ensure;
use chrono::TimeDelta;
use model::backoff::BackoffPolicy;
use model::ids::{IntentId, MachineId};
use model::needs_human::Obstacle;
use model::policy::Policy;
use model::power_order::PowerOrderKind;
use model::process::{Lane, Process};
use model::provider_status::ProviderStatus;
use model::schedule::next_due;
use model::time::{Span, Timestamp};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::claim::Claimed;
use shepherd_bmdb::engine::fact_change::power::PowerChange;
use shepherd_bmdb::engine::fact_change::retirement::RetirementChange;
use shepherd_bmdb::engine::fact_change::{FactChange, NewAgent, NewHeartbeat, ProviderDetails};
use shepherd_bmdb::engine::session::Session;
use shepherd_bmdb::engine::work::Work;
use tokio::task::JoinSet;
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, Shepherd, hold};

const MACHINES: i64 = 24;
const SHEPHERDS: usize = 3;
const WORKERS: usize = 6;
const OPERATIONS: usize = 30;
const ROUNDS: usize = 4;
const INTERVAL: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invariants_hold_over_random_interleavings() -> TestResult {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let kit = Kit::new("invariants").await?;
    let machines = kit.provided(MACHINES, "rack").await?;
    sqlx::query(
        "INSERT INTO fleet_listening VALUES (1, now() - INTERVAL '1 day', now() + INTERVAL '10 days')",
    )
    .execute(&kit.pool)
    .await?;
    let mut shepherds = Vec::new();
    for number in 0..SHEPHERDS {
        let shepherd = Shepherd::start(&kit, &format!("shepherd-{number}"), INTERVAL).await?;
        shepherds.push(shepherd.patient().await?);
    }
    for round in 0..ROUNDS {
        let mut workers = JoinSet::new();
        for number in 0..WORKERS {
            let shepherd = &shepherds[number % SHEPHERDS];
            let worker = Worker {
                random: StdRng::seed_from_u64(
                    seed.wrapping_add((round * WORKERS + number) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15),
                ),
                sessions: shepherd.sessions.clone(),
                bmdb: shepherd.bmdb.clone(),
                pool: kit.pool.clone(),
                machines: machines.clone(),
                mine: Vec::new(),
            };
            workers.spawn(worker.run());
        }
        while let Some(done) = workers.join_next().await {
            let mismatches = done??;
            assert!(
                mismatches == 0,
                "the sweeper found {mismatches} lanes that contradicted their facts (seed {seed})"
            );
        }
        for shepherd in &shepherds {
            shepherd.sessions.wait_until_drained().await;
        }
        check_rows(&kit, seed).await?;
        check_schedule(&kit, seed).await?;
        // Longer than any session, backoff or silence limit: work that did not end counts as lost now.
        kit.database.advance(Duration::from_mins(11)).await?;
        kit.bmdb.reap().await?;
        check_rows(&kit, seed).await?;
    }
    assert!(kit.sweep().await? == 0, "mismatches after all rounds (seed {seed})");
    check_schedule(&kit, seed).await?;
    for event in ["Started", "Finished", "Failed", "Cancelled", "PutOff", "Expired"] {
        let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM history WHERE event = $1")
            .bind(event)
            .fetch_one(&kit.pool)
            .await?;
        assert!(seen > 0, "no {event} in the whole run: it tried too little (seed {seed})");
    }
    for shepherd in shepherds {
        shepherd.stop().await?;
    }
    Ok(())
}

struct Worker {
    random: StdRng,
    sessions: shepherd_bmdb::engine::session::Sessions,
    bmdb: shepherd_bmdb::connection::Bmdb,
    pool: sqlx::PgPool,
    machines: Vec<MachineId>,
    mine: Vec<Session>,
}

impl Worker {
    /// Runs this worker's steps; returns how many mismatches its sweeps found.
    async fn run(mut self) -> anyhow::Result<usize> {
        let mut mismatches = 0;
        for _ in 0..OPERATIONS {
            match self.random.random_range(0..20) {
                0..=9 => self.work().await?,
                10..=13 => tolerate(self.write_a_fact().await)?,
                14 => tolerate(self.bmdb.reap().await.map(drop))?,
                15 => {
                    let claimer = shepherd_bmdb::engine::claim::Claimer::new(
                        self.sessions.clone(),
                        Process::Recovery,
                        vec!["rack".into()],
                    );
                    tolerate(claimer.rearm_timers().await.map(drop))?;
                }
                16 => match self.bmdb.sweep_page(MachineId(Uuid::nil()), 100).await {
                    Ok(swept) => mismatches += swept.mismatches,
                    other => tolerate(other.map(drop))?,
                },
                17 => self.kill_a_session().await?,
                18 => self.heartbeat_beside_the_schedule().await?,
                _ => {
                    let machine = self.some_machine();
                    tolerate(self.bmdb.read_machine_snapshot(machine).await.map(drop))?;
                }
            }
        }
        // Work that did not end is left to the reaper, as after a crash.
        Ok(mismatches)
    }

    fn some_machine(&mut self) -> MachineId {
        *self.machines.choose(&mut self.random).unwrap_or(&MachineId(Uuid::nil()))
    }

    async fn work(&mut self) -> anyhow::Result<()> {
        self.mine.retain(|session| !session.lost().is_cancelled());
        while self.mine.len() < 3 {
            match self.sessions.start("test", serde_json::json!({})).await {
                Ok(session) => self.mine.push(session),
                Err(error) => return tolerate(Err(error)),
            }
        }
        let process = *Process::ALL.choose(&mut self.random).unwrap_or(&Process::Update);
        let mut claimer =
            shepherd_bmdb::engine::claim::Claimer::new(self.sessions.clone(), process, vec!["rack".into()]);
        let count = self.random.random_range(1..=3);
        match claimer.claim(&self.mine[..count]).await {
            Ok(Claimed::Work(work)) => {
                for item in work {
                    self.end(item).await?;
                }
            }
            Ok(Claimed::Contended | Claimed::Empty | Claimed::FullScanDeferred(_)) => {}
            Err(error) => tolerate(Err(error))?,
        }
        Ok(())
    }

    async fn end(&mut self, work: Work) -> anyhow::Result<()> {
        let now = match self.bmdb.read_machine_snapshot(work.machine()).await {
            Ok(snapshot) => snapshot.now,
            Err(error) => return tolerate(Err(error)),
        };
        let changes = self.changes(&work);
        let backoff = BackoffPolicy { initial: Span::seconds(1), maximum: Span::seconds(3), exponent: 1.5 };
        let ended = match self.random.random_range(0..12) {
            0..=4 => work.finish(changes, "done").await,
            5..=6 => work.fail(Vec::new(), "no route", Some(backoff)).await,
            7 => work.cancel("not now").await,
            8 => {
                work.postpone(
                    Vec::new(),
                    now + TimeDelta::milliseconds(self.random.random_range(0..2_000)),
                    "later",
                )
                .await
            }
            9 => {
                drop(work);
                Ok(())
            }
            10 => {
                self.overdue(work.session()).await?;
                work.finish(changes, "too late").await
            }
            // Given up in the middle: whatever the transaction does, it does whole.
            _ => {
                let limit = Duration::from_micros(self.random.random_range(0..3_000));
                tokio::time::timeout(limit, work.finish(changes, "perhaps")).await.unwrap_or(Ok(()))
            }
        };
        tolerate(ended)
    }

    fn changes(&mut self, work: &Work) -> Vec<FactChange> {
        match work.process() {
            Process::AgentStart => vec![FactChange::AgentStarted(NewAgent {
                public_key: vec![7; 32],
                boot_id: None,
                version: "1".into(),
                supervision: "systemd".into(),
                fence: work.fence(),
            })],
            Process::Recovery => vec![FactChange::AgentCleared],
            Process::Update => vec![FactChange::ProviderPolled {
                details: ProviderDetails {
                    reservation: None,
                    address: self.random.random_bool(0.8).then(|| "192.0.2.9".into()),
                    ssh_port: None,
                    ssh_user: None,
                    location: None,
                    status: ProviderStatus::Running,
                },
                unchanged: self.random.random_bool(0.5),
            }],
            Process::Retirement => vec![FactChange::Retirement(RetirementChange::Cleared)],
            Process::Power => vec![FactChange::Power(PowerChange::Ended)],
        }
    }

    async fn write_a_fact(&mut self) -> Result<(), BmdbError> {
        let change = match self.random.random_range(0..13) {
            0 => hold("disk swap"),
            1..=2 => FactChange::HoldCleared,
            3 => FactChange::Quarantined("two of them".into()),
            4..=5 => FactChange::QuarantineCleared,
            6 => FactChange::NeedsHuman { obstacle: Obstacle::LadderExhausted, reason: "dead".into() },
            7 => FactChange::NeedsHumanCleared,
            8 => FactChange::Retirement(RetirementChange::Requested {
                reason: "old".into(),
                by: "kim".into(),
                wipe: self.random.random_bool(0.3),
            }),
            9 => FactChange::Retirement(RetirementChange::Cleared),
            10 => FactChange::Power(PowerChange::Ordered {
                switch: PowerOrderKind::ALL[self.random.random_range(0..4)],
                reason: "a new kernel".into(),
                by: "kim".into(),
            }),
            11 => FactChange::Power(PowerChange::Started(IntentId::generate())),
            _ => FactChange::Heartbeat(NewHeartbeat {
                boot_id: "b".into(),
                incarnation: "i".into(),
                sequence: 1,
                version: "1".into(),
            }),
        };
        let machine = self.some_machine();
        self.bmdb
            .change_machine(machine, move |_| shepherd_bmdb::engine::change_machine::Decision {
                changes: vec![change.clone()],
                events: vec![("Reported".into(), "by the test".into())],
                output: (),
            })
            .await
    }

    /// As group commit does: the heartbeat's row alone, of a machine that is far from silent.
    async fn heartbeat_beside_the_schedule(&mut self) -> anyhow::Result<()> {
        let done = sqlx::query(
            "UPDATE machine_agent_heartbeat SET at = clock_timestamp()
             WHERE machine_id = $1 AND at > clock_timestamp() - INTERVAL '5 minutes'",
        )
        .bind(self.some_machine().0)
        .execute(&self.pool)
        .await;
        match done {
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("40001") => Ok(()),
            other => {
                other?;
                Ok(())
            }
        }
    }

    async fn kill_a_session(&mut self) -> anyhow::Result<()> {
        if let Some(session) = self.mine.choose(&mut self.random).cloned() {
            self.overdue(&session).await?;
        }
        Ok(())
    }

    async fn overdue(&self, session: &Session) -> anyhow::Result<()> {
        let done = sqlx::query(
            "UPDATE session SET deadline = clock_timestamp() - INTERVAL '1 second' WHERE session_id = $1",
        )
        .bind(session.id().0)
        .execute(&self.pool)
        .await;
        match done {
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("40001") => Ok(()),
            other => {
                other?;
                Ok(())
            }
        }
    }
}

/// Accepts that work was lost, and passes on every other error.
fn tolerate(ended: Result<(), BmdbError>) -> anyhow::Result<()> {
    match ended {
        Ok(()) | Err(BmdbError::LeaseLost | BmdbError::SessionEnded | BmdbError::Conflict { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn check_rows(kit: &Kit, seed: u64) -> anyhow::Result<()> {
    for (what, statement) in [
        (
            "fences without exactly one start, and one end unless they are live",
            "SELECT count(*) FROM (
                 SELECT machine_id, lane, fence, count(*) FILTER (WHERE edge = 'start') AS starts,
                        count(*) FILTER (WHERE edge = 'end') AS ends
                 FROM history WHERE edge IS NOT NULL GROUP BY 1, 2, 3) h
             LEFT JOIN work w USING (machine_id, lane, fence)
             WHERE starts <> 1 OR ends <> CASE WHEN w.machine_id IS NULL THEN 1 ELSE 0 END",
        ),
        (
            "live work that history does not know",
            "SELECT count(*) FROM work w WHERE NOT EXISTS (
                 SELECT 1 FROM history h WHERE h.edge = 'start' AND (h.machine_id, h.lane, h.fence, h.process, h.session_id)
                     = (w.machine_id, w.lane, w.fence, w.process, w.session_id))",
        ),
        (
            "lanes whose fence is not the number of their starts",
            "SELECT count(*) FROM machine_due d WHERE d.fence <> (
                 SELECT count(*) FROM history h
                 WHERE h.machine_id = d.machine_id AND h.lane = d.lane AND h.edge = 'start')",
        ),
        (
            "leases without work, or work without a lease",
            "SELECT count(*) FROM (SELECT * FROM machine_due WHERE lease_session IS NOT NULL) d
             FULL JOIN work w ON (w.machine_id, w.lane, w.session_id, w.fence)
                 = (d.machine_id, d.lane, d.lease_session, d.fence)
             WHERE w.machine_id IS NULL OR d.machine_id IS NULL",
        ),
        (
            "work items that began before the one before them had ended",
            "SELECT count(*) FROM history s JOIN history e USING (machine_id, lane)
             WHERE s.edge = 'start' AND e.edge = 'end' AND e.fence = s.fence - 1 AND e.at > s.at",
        ),
        (
            "effects of a session after it was closed",
            "SELECT count(*) FROM history h JOIN session s USING (session_id)
             WHERE s.closed_at IS NOT NULL AND h.event <> 'Expired' AND h.at > s.closed_at",
        ),
        (
            "losses of sessions that were not over",
            "SELECT count(*) FROM history h JOIN session s USING (session_id)
             WHERE h.event = 'Expired' AND (s.closed_at IS NULL OR s.closed_at > h.at)",
        ),
        (
            "ends by another session than the one that began",
            "SELECT count(*) FROM history s JOIN history e USING (machine_id, lane, fence)
             WHERE s.edge = 'start' AND e.edge = 'end'
               AND (s.session_id <> e.session_id OR s.process <> e.process)",
        ),
    ] {
        let found = kit.count(statement).await?;
        ensure!(found == 0, "{found} {what} (seed {seed})");
    }
    Ok(())
}

type Row = (Uuid, String, Option<String>, i64, Option<Timestamp>, bool);

/// Called while nothing runs, so that facts and rows are of one moment.
async fn check_schedule(kit: &Kit, seed: u64) -> anyhow::Result<()> {
    let rows: Vec<Row> =
        sqlx::query_as("SELECT machine_id, lane, process, priority, ready_at, timer FROM machine_due")
            .fetch_all(&kit.pool)
            .await?;
    let snapshots = kit.bmdb.read_snapshot_page(MachineId(Uuid::nil()), 1_000).await?;
    ensure!(rows.len() == snapshots.len() * Lane::ALL.len());
    let policy = Policy::default();
    for (machine, lane, process, priority, ready_at, timer) in rows {
        let Some(snapshot) = snapshots.iter().find(|snapshot| snapshot.facts.machine.0 == machine) else {
            anyhow::bail!("no facts of {machine}");
        };
        let due = next_due(&snapshot.facts, lane.parse()?, &policy, snapshot.now);
        let context =
            || format!("{lane} of {machine} (seed {seed}): stored {process:?} {ready_at:?}, {due:?}");
        ensure!(process.as_deref() == due.process.map(Process::as_str), "process: {}", context());
        ensure!(priority == i64::from(due.priority), "priority: {}", context());
        let right = match (ready_at, due.ready_at) {
            (None, None) => true,
            (Some(stored), Some(wanted)) if timer => stored <= wanted,
            // What is due already is armed at the time of its writing and keeps its place.
            (Some(stored), Some(wanted)) if wanted <= snapshot.now => stored <= snapshot.now,
            (Some(stored), Some(wanted)) => stored == wanted,
            _ => false,
        };
        ensure!(right, "ready_at: {}", context());
    }
    Ok(())
}
