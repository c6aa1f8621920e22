//! What whoever holds the lease of roll-outs reads and writes of them.
//!
//! Every write checks the lease in its own transaction. What concerns a machine is written under that machine's lock, is
//! decided again there as far as a person may have said no since, and is told in its history.

use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::intent::count_budget;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{lock, tell};
use crate::model::disturb::{Circumstances, may_disturb};
use crate::model::ids::MachineId;
use crate::model::phase::{Phase, phase_of};
use crate::model::policy::Disturbance;
use crate::model::release::Report;
use crate::model::roll_out::{Member, Node, RollOut, State};
use crate::model::time::Timestamp;

/// Kind and name of the named lease.
pub const LEASE: (&str, &str) = ("roll-out", "all");
const READING: &str = "reading a roll-out";
const ASKING: &str = "asking a machine to become a release";

/// A roll-out with everything that decides about it.
#[derive(Clone, Debug)]
pub struct Found {
    /// It.
    pub roll_out: RollOut,
    /// Its machines.
    pub members: Vec<Member>,
    /// How many more machines may be disturbed now.
    pub may_begin: usize,
    /// How long each may take, in seconds.
    pub deadline_seconds: i64,
    /// The release's name.
    pub release: String,
    /// The database's clock.
    pub now: Timestamp,
}

impl Bmdb {
    /// Roll-outs that have not ended, oldest first.
    pub async fn active_roll_outs(&self) -> Result<Vec<String>, BmdbError> {
        self.statement("looking for roll-outs", |connection| {
            Box::pin(async move {
                sqlx::query_file_scalar!("sql/roll_out/list_active.sql").fetch_all(connection).await
            })
        })
        .await
    }

    /// Digest of the release that a machine was asked to become and did, as its agent says; lower-case hexadecimal.
    pub async fn updated_to(&self, machine: MachineId) -> Result<Option<String>, BmdbError> {
        let digest = self
            .statement("looking which release a machine was updated to", move |connection| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/roll_out/read_updated_release.sql", machine.0)
                        .fetch_optional(connection)
                        .await
                })
            })
            .await?;
        Ok(digest.map(hex::encode))
    }

    /// One of them; none when it has ended.
    pub async fn found_roll_out(&self, id: &str) -> Result<Option<Found>, BmdbError> {
        self.read_policy().await?;
        let (id, bmdb) = (id.to_owned(), self.clone());
        self.transact(READING, move |tx| {
            let (id, bmdb) = (id.clone(), bmdb.clone());
            Box::pin(async move {
                let row = sqlx::query_file!("sql/roll_out/list.sql", Some(id.as_str()) as Option<&str>)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(READING)?;
                let Some(row) = row.filter(|row| row.ended.is_none()) else { return Ok(None) };
                let count = |count: i64| usize::try_from(count).unwrap_or(1);
                let seconds = u64::try_from(row.deadline_seconds).unwrap_or_default();
                let sha256 =
                    row.sha256.try_into().map_err(|_| BmdbError::Corrupt("a release's digest".to_owned()))?;
                let roll_out = RollOut {
                    sha256,
                    parallelism: count(row.parallelism),
                    deadline: std::time::Duration::from_secs(seconds),
                    paused: row.paused,
                };
                let rows = sqlx::query_file!("sql/roll_out/list_machines.sql", id)
                    .fetch_all(&mut *tx)
                    .await
                    .doing(READING)?;
                let now = crate::bmdb::inspect::now(tx).await?;
                let odd =
                    |error: &dyn std::fmt::Display| BmdbError::Corrupt(format!("roll-out {id}: {error}"));
                let mut members = Vec::with_capacity(rows.len());
                for row in rows {
                    let report = row.reported.zip(row.running).zip(row.reported_at).and_then(
                        |((generation, sha256), at)| {
                            let report =
                                Report { generation, sha256: sha256.try_into().ok()?, error: row.error };
                            Some((report, at))
                        },
                    );
                    let held = row.held_by.zip(row.held_for).map(|(by, why)| format!("{by} holds it: {why}"));
                    let quarantined = row.quarantined.map(|why| format!("it is quarantined: {why}"));
                    let phase: Phase = row.phase.parse().map_err(|error| odd(&error))?;
                    let control_plane = row.part.as_deref() == Some("control-plane");
                    let node =
                        row.cluster.filter(|_| row.founded && row.leaving.is_none()).map(|cluster| Node {
                            cluster,
                            control_plane,
                            healthy: row.health.as_deref() == Some("healthy"),
                            seen_at: row.seen_at,
                            all_reached: row.voters.is_some() && row.voters == row.voters_reached,
                        });
                    members.push(Member {
                        machine: MachineId(row.machine_id),
                        name: row.provider_id.unwrap_or_else(|| row.machine_id.to_string()),
                        state: row.state.parse::<State>().map_err(|error| odd(&error))?,
                        generation: row.generation,
                        changed_at: row.changed_at,
                        report,
                        phase,
                        stop: held.or(quarantined),
                        leaves: row.retiring || matches!(phase, Phase::Retiring | Phase::Retired),
                        node,
                    });
                }
                let (_, policy) = bmdb.policy();
                let budget = policy.budgets.get(&Disturbance::RestartAgent).copied();
                let may_begin = match budget {
                    None => usize::MAX,
                    Some(budget) => {
                        let window = budget.window.float_milliseconds();
                        let kind = Disturbance::RestartAgent.as_str();
                        let used = sqlx::query_file!("sql/intent/count_budget_use.sql", kind, window)
                            .fetch_one(&mut *tx)
                            .await
                            .doing(READING)?;
                        usize::try_from(i64::from(budget.count) - used.count).unwrap_or_default()
                    }
                };
                let found = Found {
                    roll_out,
                    members,
                    may_begin,
                    deadline_seconds: row.deadline_seconds,
                    release: row.release,
                    now,
                };
                Ok(Some(found))
            })
        })
        .await
    }

    /// Asks a machine to become the release, unless somebody has said no since.
    pub async fn order_release(
        &self,
        lease: &NamedLease,
        (id, found): (&str, &Found),
        machine: MachineId,
    ) -> Result<(), BmdbError> {
        let (bmdb, lease, id) = (self.clone(), lease.clone(), id.to_owned());
        let (sha256, deadline) = (found.roll_out.sha256, found.deadline_seconds);
        let detail = format!("{} ({}), in the update {id}", found.release, hex::encode(&sha256[..8]));
        self.transact(ASKING, move |tx| {
            let (bmdb, lease, id, detail) = (bmdb.clone(), lease.clone(), id.clone(), detail.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                let snapshot = read(tx, machine).await?;
                let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
                let (facts, kind) = (&snapshot.facts, Disturbance::RestartAgent);
                let window = policy.budgets.get(&kind).map(|budget| budget.window).unwrap_or_default();
                let now = snapshot.now;
                // What its cluster has against it was asked for the plan; a machine in recovery has more.
                let counted = count_budget(tx, machine, kind.as_str(), window, None).await?;
                let circumstances = Circumstances { cluster: None, ..counted };
                let held = facts.hold.as_ref().is_some_and(|hold| hold.holds_at(now));
                let well = matches!(phase, Phase::Ready | Phase::Installed);
                if held || !well || may_disturb(facts, kind, &circumstances, &policy, now, now).is_err() {
                    return Ok(());
                }
                let known = sqlx::query_file!("sql/roll_out/lock.sql", id)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(ASKING)?;
                if known.is_none_or(|known| known.ended.is_some() || known.paused.is_some()) {
                    return Ok(());
                }
                let generation =
                    sqlx::query_file_scalar!("sql/roll_out/next_order_generation.sql", machine.0)
                        .fetch_one(&mut *tx)
                        .await
                        .doing(ASKING)?;
                let ordered =
                    sqlx::query_file_scalar!("sql/roll_out/mark_ordered.sql", id, machine.0, generation)
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(ASKING)?;
                if ordered.is_none() {
                    return Ok(());
                }
                sqlx::query_file!(
                    "sql/roll_out/upsert_order.sql",
                    machine.0,
                    generation,
                    sha256.as_slice(),
                    deadline
                )
                .execute(&mut *tx)
                .await
                .doing(ASKING)?;
                let provider =
                    facts.provided.as_ref().map(|provided| provided.provider.as_str()).unwrap_or_default();
                sqlx::query_file!(
                    "sql/roll_out/insert_resolved_intent.sql",
                    Uuid::now_v7(),
                    Disturbance::RestartAgent.as_str(),
                    provider,
                    machine.0,
                    lease.session.0,
                    lease.fence,
                    detail
                )
                .execute(&mut *tx)
                .await
                .doing(ASKING)?;
                tell(tx, machine, "ReleaseOrdered", &detail).await
            })
        })
        .await
    }

    /// Writes down that a machine is through.
    pub async fn conclude_release(
        &self,
        lease: &NamedLease,
        id: &str,
        (machine, state): (MachineId, State),
        said: &str,
    ) -> Result<(), BmdbError> {
        const WHAT: &str = "writing down how a release ended on a machine";
        let (lease, id, said) = (lease.clone(), id.to_owned(), said.to_owned());
        self.transact(WHAT, move |tx| {
            let (lease, id, said) = (lease.clone(), id.clone(), said.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                let changed = sqlx::query_file_scalar!(
                    "sql/roll_out/record_result.sql",
                    id,
                    machine.0,
                    state.as_str(),
                    said
                )
                .fetch_optional(&mut *tx)
                .await
                .doing(WHAT)?;
                if matches!(state, State::Failed | State::Skipped) {
                    // Should it be heard again, nobody waits for it by then.
                    sqlx::query_file!("sql/roll_out/withdraw_order.sql", id, machine.0)
                        .execute(&mut *tx)
                        .await
                        .doing(WHAT)?;
                }
                let event = match state {
                    State::Done => "ReleaseRuns",
                    State::Failed => "ReleaseFailed",
                    State::Waiting | State::Ordered | State::Skipped => return Ok(()),
                };
                match changed {
                    Some(_) => tell(tx, machine, event, &format!("{said} (update {id})")).await,
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Lets a roll-out stand still, or ends it where nothing is left to do.
    pub async fn stand_still_or_finish(
        &self,
        lease: &NamedLease,
        id: &str,
        paused: Option<&str>,
    ) -> Result<(), BmdbError> {
        const WHAT: &str = "ending a pass over a roll-out";
        let (lease, id, paused) = (lease.clone(), id.to_owned(), paused.map(str::to_owned));
        self.transact(WHAT, move |tx| {
            let (lease, id, paused) = (lease.clone(), id.clone(), paused.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let known = sqlx::query_file!("sql/roll_out/lock.sql", id)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(WHAT)?;
                if known.is_none_or(|known| known.ended.is_some()) {
                    return Ok(());
                }
                if paused.is_some() {
                    sqlx::query_file!("sql/roll_out/set_paused.sql", id, paused.as_deref())
                        .execute(tx)
                        .await
                        .doing(WHAT)?;
                    return Ok(());
                }
                sqlx::query_file!("sql/roll_out/end.sql", id, "finished")
                    .execute(&mut *tx)
                    .await
                    .doing(WHAT)?;
                sqlx::query_file!("sql/roll_out/end_machines.sql", id).execute(tx).await.doing(WHAT)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down what machines wait for.
    pub async fn said_of_roll_out(
        &self,
        lease: &NamedLease,
        id: &str,
        waits: Vec<(MachineId, String)>,
    ) -> Result<(), BmdbError> {
        const WHAT: &str = "writing down what a roll-out waits for";
        let (lease, id) = (lease.clone(), id.to_owned());
        let (machines, said): (Vec<Uuid>, Vec<String>) =
            waits.into_iter().map(|(machine, said)| (machine.0, said)).unzip();
        self.transact(WHAT, move |tx| {
            let (lease, id, machines, said) = (lease.clone(), id.clone(), machines.clone(), said.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/roll_out/set_wait_reason.sql", id, &machines, &said)
                    .execute(tx)
                    .await
                    .doing(WHAT)?;
                Ok(())
            })
        })
        .await
    }
}
