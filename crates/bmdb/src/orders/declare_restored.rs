//! Declaring this database a restored backup: raising fences and ending what the backup held.
//!
//! A backup does not contain what was done after it was taken, but the machines do: each stores the highest fence it
//! has seen and rejects a lower one. A restored database issues fences that were used before, and its machines reject
//! them. That is right until an operator declares that this database is the one that counts from now on: two copies of
//! one database would otherwise both command the fleet.
//!
//! The declaration cancels power orders, orders about signing keys, and retirements that had not reached a provider. It
//! raises every fence beyond what can have been claimed since, ends the sessions, work and steps under way that the backup contains, and forgets
//! how long it had listened.
//!
//! Every part may be repeated: after an interruption the operator declares it again.

use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::change_machine::Decision;
use crate::engine::fact_change::FactChange;
use crate::engine::fact_change::power::PowerChange;
use crate::engine::fact_change::retirement::RetirementChange;
use crate::orders::audit::record_audit;
use crate::orders::order::{Order, OrderEffect};
use model::event_name::{POWER_ORDER_CANCELLED, RETIREMENT_CANCELLED};
use model::ids::MachineId;
use model::unknown_fence::FENCE_LIFT;

/// Machines in one transaction.
const PAGE_SIZE: i64 = 500;

/// A process that still works on the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSession {
    /// The component its session was started for.
    pub component: String,
    /// Name of its host; `None` if it did not report one.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<String>,
}

/// What a declaration ended and raised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestoreSummary {
    /// Machines whose fences were raised.
    pub machines: usize,
    /// Sessions that were open in the backup.
    pub sessions: usize,
    /// Work items that the backup contained.
    pub work: usize,
    /// Steps that were under way, whose outcome is unknown.
    pub steps: usize,
}

impl Bmdb {
    /// Sessions that are alive now, ten at most.
    pub async fn list_live_sessions(&self) -> Result<Vec<LiveSession>, BmdbError> {
        let rows = self
            .statement("looking who works", |pool| {
                Box::pin(
                    sqlx::query_file!("../../sql/declare_restored/list_live_sessions.sql").fetch_all(pool),
                )
            })
            .await?;
        let live = rows.into_iter();
        Ok(live.map(|row| LiveSession { component: row.component, host: row.host, pid: row.pid }).collect())
    }

    /// Declares this database restored: see the module. The caller has made sure that no session is alive.
    pub async fn declare_restored(&self, order: Order, detail: &str) -> Result<RestoreSummary, BmdbError> {
        // This comes first. Otherwise, if the rest is cut off, a shepherd that is started then would release machines
        // that the backup has as retiring.
        self.cancel_pending_orders(detail).await?;
        let mut restored = self
            .transact_with("ending what the backup holds", order, move |tx, order| {
                Box::pin(async move {
                    // If the rest is cut off, the operator who continues sees that it was begun.
                    let effect = OrderEffect::changed("is declared to be a restored backup", None, None);
                    record_audit(tx, order, None, effect).await?;
                    let what = "ending what the backup holds";
                    // The processes of the sessions in the backup have exited, or have newer state than the
                    // backup.
                    let sessions = sqlx::query!(
                        "UPDATE session SET closed_at = clock_timestamp(),
                             close_reason = 'the database was restored from a backup'
                         WHERE closed_at IS NULL RETURNING session_id"
                    )
                    .fetch_all(&mut *tx)
                    .await;
                    // Creations stay open: the provider is queried for what it made under them.
                    let steps = sqlx::query!(
                        "UPDATE intent SET settled_at = clock_timestamp(),
                             outcome = 'unknown: the database was restored from a backup'
                         WHERE settled_at IS NULL AND kind <> 'create' RETURNING intent_id"
                    )
                    .fetch_all(&mut *tx)
                    .await;
                    let (sessions, steps) = (sessions.context(what)?.len(), steps.context(what)?.len());
                    sqlx::query!("UPDATE named_lease SET fence = fence + $1 RETURNING name", FENCE_LIFT)
                        .fetch_all(&mut *tx)
                        .await
                        .context(what)?;
                    // A roll-out may have ended since the backup, or be bad, so an operator reviews it first.
                    sqlx::query!(
                        "UPDATE roll_out SET paused = 'the database was restored from a backup'
                         WHERE ended_at IS NULL AND paused IS NULL"
                    )
                    .execute(&mut *tx)
                    .await
                    .context(what)?;
                    // An upgrade may have ended or been rolled back since the backup, so an operator reviews
                    // it first.
                    sqlx::query!(
                        "UPDATE cluster_upgrade SET paused = 'the database was restored from a backup'
                         WHERE ended_at IS NULL AND paused IS NULL"
                    )
                    .execute(&mut *tx)
                    .await
                    .context(what)?;
                    // The rotations may have been carried out since the backup.
                    sqlx::query!("UPDATE cluster_kubernetes SET rotate = '[]' WHERE rotate <> '[]'")
                        .execute(&mut *tx)
                        .await
                        .context(what)?;
                    sqlx::query!("UPDATE release_order SET withdrawn = TRUE WHERE NOT withdrawn")
                        .execute(&mut *tx)
                        .await
                        .context(what)?;
                    // The machines may have got these keys since, and lost them again.
                    sqlx::query!("DELETE FROM machine_key_replacement RETURNING machine_id")
                        .fetch_all(&mut *tx)
                        .await
                        .context(what)?;
                    // The records of listening in the backup are of another time.
                    sqlx::query!("DELETE FROM fleet_listening RETURNING shard")
                        .fetch_all(tx)
                        .await
                        .context(what)?;
                    Ok(RestoreSummary { sessions, steps, ..RestoreSummary::default() })
                })
            })
            .await?;
        loop {
            let freed = self.reap().await?;
            restored.work += freed.work;
            if freed.work + freed.leases == 0 {
                break;
            }
        }
        let mut after = MachineId(Uuid::nil());
        loop {
            let page = self.raise_fence_page(after, detail.to_owned()).await?;
            restored.machines += page.len();
            let Some(last) = page.last() else { break };
            after = *last;
        }
        self.retry_fence_rejections(detail).await?;
        Ok(restored)
    }

    /// A machine that was retiring or about to be switched when the backup was taken may have been kept, or switched,
    /// since. No order is carried out that may have been cancelled or carried out already.
    async fn cancel_pending_orders(&self, detail: &str) -> Result<(), BmdbError> {
        let ordered = self
            .statement("listing machines with pending orders", |pool| {
                Box::pin(
                    sqlx::query_file_scalar!("../../sql/declare_restored/list_pending_orders.sql")
                        .fetch_all(pool),
                )
            })
            .await?;
        for machine in ordered {
            let detail = detail.to_owned();
            self.change_machine(MachineId(machine), move |snapshot| {
                let leaving = snapshot
                    .facts
                    .retirement
                    .as_ref()
                    .is_some_and(|leaving| leaving.release.is_none() && leaving.finished_at.is_none())
                    .then_some((FactChange::Retirement(RetirementChange::Cleared), RETIREMENT_CANCELLED));
                let switched = snapshot
                    .facts
                    .power_order
                    .is_some()
                    .then_some((FactChange::Power(PowerChange::Ended), POWER_ORDER_CANCELLED));
                let (changes, events): (Vec<_>, Vec<_>) = leaving.into_iter().chain(switched).unzip();
                let events = events.into_iter().map(|event| (event.to_owned(), detail.clone())).collect();
                Decision { changes, events, output: () }
            })
            .await?;
        }
        Ok(())
    }

    /// The machines rejected the old fences: they are tried again with the raised ones.
    async fn retry_fence_rejections(&self, detail: &str) -> Result<(), BmdbError> {
        let refused = self
            .statement("listing machines that refused us", |pool| {
                // These machines had seen newer fences than this database had issued.
                Box::pin(
                    sqlx::query_scalar!(
                        "SELECT machine_id FROM machine_needs_human
                         WHERE obstacle = 'stale-fence' ORDER BY machine_id"
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        for machine in refused {
            let detail = detail.to_owned();
            self.change_machine(MachineId(machine), move |snapshot| {
                let facts = &snapshot.facts;
                let mut changes = vec![FactChange::NeedsHumanCleared, FactChange::RecoveryCleared];
                changes.extend(facts.backoffs.keys().copied().map(FactChange::BackoffCleared));
                changes.extend(facts.postponements.keys().copied().map(FactChange::PostponementCleared));
                Decision { changes, events: vec![("Retried".to_owned(), detail.clone())], output: () }
            })
            .await?;
        }
        Ok(())
    }

    async fn raise_fence_page(&self, after: MachineId, detail: String) -> Result<Vec<MachineId>, BmdbError> {
        let what = "lifting fences";
        self.transact_with(what, detail, move |tx, detail| {
            Box::pin(async move {
                let page: Vec<Uuid> = sqlx::query_scalar!(
                    "SELECT machine_id FROM machine WHERE machine_id > $1 ORDER BY machine_id LIMIT $2",
                    after.0,
                    PAGE_SIZE
                )
                .fetch_all(&mut *tx)
                .await
                .context(what)?;
                sqlx::query!(
                    "SELECT machine_id, lane FROM machine_due
                     WHERE machine_id = ANY ($1) ORDER BY machine_id, lane FOR UPDATE",
                    &page
                )
                .fetch_all(&mut *tx)
                .await
                .context(what)?;
                // The fences rise beyond anything that was claimed after the backup was taken. The pauses
                // after losses are cleared, because they are of another time too.
                sqlx::query!(
                    "UPDATE machine_due SET fence = fence + $2, losses = 0, not_before = NULL
                     WHERE machine_id = ANY ($1)
                     RETURNING machine_id",
                    &page,
                    FENCE_LIFT
                )
                .fetch_all(&mut *tx)
                .await
                .context(what)?;
                sqlx::query!(
                    "INSERT INTO history (machine_id, at, event, detail)
                     SELECT machine_id, clock_timestamp(), 'Restored', $2
                     FROM unnest($1::UUID[]) AS named (machine_id)",
                    &page,
                    detail
                )
                .execute(tx)
                .await
                .context(what)?;
                Ok(page.into_iter().map(MachineId).collect())
            })
        })
        .await
    }
}
