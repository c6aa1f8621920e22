//! Declaring that this database is a restored backup.
//!
//! A backup does not know what was done after it was taken, and the machines do:
//! each keeps the highest fence it was shown and refuses a lower one. A restored
//! database hands out fences that were used before, and its machines refuse it,
//! which is right as long as nobody has said that this database is the one that
//! counts from now on. Two copies of one database would otherwise both command
//! the fleet.
//!
//! Saying so cancels retirements that had not come to a provider and orders about
//! power, lifts every fence beyond what can have been claimed since, ends what the
//! backup holds of sessions, work and steps under way, and forgets how long it had
//! listened.
//! Every part may be repeated: whoever is interrupted says it again.

use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Order, write_down};
use crate::bmdb::change::FactChange;
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::power_order::PowerChange;
use crate::bmdb::retirement::RetirementChange;
use crate::bmdb::work::Decision;
use crate::model::ids::MachineId;
use crate::model::newer_fence::LIFT;

/// Machines in one transaction.
const PAGE: i64 = 500;

/// A process that still works on the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveSession {
    /// What it is part of.
    pub component: String,
    /// Where it runs.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<String>,
}

/// What a restoration ended and lifted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Machines whose fences were lifted.
    pub machines: usize,
    /// Sessions that the backup held open.
    pub sessions: usize,
    /// Work items that the backup held.
    pub work: usize,
    /// Steps that were under way, whose outcome is unknown.
    pub steps: usize,
}

impl Bmdb {
    /// Sessions that are alive now, ten at the most.
    pub async fn live_sessions(&self) -> Result<Vec<LiveSession>, BmdbError> {
        let rows = self
            .statement("looking who works", |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/declare_restored/list_live_sessions.sql").fetch_all(pool).await
                })
            })
            .await?;
        let live = rows.into_iter();
        Ok(live.map(|row| LiveSession { component: row.component, host: row.host, pid: row.pid }).collect())
    }

    /// Declares this database restored: see the module. The caller has made sure that nobody works.
    pub async fn declare_restored(&self, order: Order, detail: &str) -> Result<Restored, BmdbError> {
        // First of all: should the rest be cut off, nobody whom the backup has on the way out is given back by
        // whoever is started then.
        self.forget_orders(detail).await?;
        let mut restored = self
            .transact("ending what the backup holds", move |tx| {
                let order = order.clone();
                Box::pin(async move {
                    // Should the rest be cut off, whoever goes on sees that it was begun.
                    let done = Done { changed: true, said: "is declared to be a restored backup".into() };
                    write_down(tx, &order, None, done, None, None).await?;
                    let what = "ending what the backup holds";
                    let sessions = sqlx::query_file!("sql/declare_restored/close_sessions.sql")
                        .fetch_all(&mut *tx)
                        .await;
                    let steps = sqlx::query_file!("sql/declare_restored/resolve_intents.sql")
                        .fetch_all(&mut *tx)
                        .await;
                    let (sessions, steps) = (sessions.doing(what)?.len(), steps.doing(what)?.len());
                    sqlx::query_file!("sql/declare_restored/raise_lease_fences.sql", LIFT)
                        .fetch_all(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/declare_restored/pause_roll_outs.sql")
                        .execute(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/declare_restored/pause_upgrades.sql")
                        .execute(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/declare_restored/clear_rotations.sql")
                        .execute(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/declare_restored/withdraw_release_orders.sql")
                        .execute(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/declare_restored/delete_listening.sql")
                        .fetch_all(tx)
                        .await
                        .doing(what)?;
                    Ok(Restored { sessions, steps, ..Restored::default() })
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
            let page = self.lift_page(after, detail.to_owned()).await?;
            restored.machines += page.len();
            let Some(last) = page.last() else { break };
            after = *last;
        }
        self.take_back_refused(detail).await?;
        Ok(restored)
    }

    /// Who was on the way out when the backup was taken, or to be switched, may have been told to stay, or have been
    /// switched, since: nothing is done because of an order that may have been taken back or carried out.
    async fn forget_orders(&self, detail: &str) -> Result<(), BmdbError> {
        let ordered = self
            .statement("listing machines of which something is ordered", |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/declare_restored/list_pending_orders.sql")
                        .fetch_all(pool)
                        .await
                })
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
                    .then_some((FactChange::Retirement(RetirementChange::Cleared), "RetirementCancelled"));
                let switched = snapshot
                    .facts
                    .power_order
                    .is_some()
                    .then_some((FactChange::Power(PowerChange::Ended), "PowerOrderCancelled"));
                let (changes, events): (Vec<_>, Vec<_>) = leaving.into_iter().chain(switched).unzip();
                let events = events.into_iter().map(|event| (event.to_owned(), detail.clone())).collect();
                Decision { changes, events, answer: () }
            })
            .await?;
        }
        Ok(())
    }

    /// What they refused was the old fences: they are tried again with those that were lifted.
    async fn take_back_refused(&self, detail: &str) -> Result<(), BmdbError> {
        let refused = self
            .statement("listing machines that refused us", |pool| {
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/declare_restored/list_fence_rejections.sql")
                        .fetch_all(pool)
                        .await
                })
            })
            .await?;
        for machine in refused {
            let detail = detail.to_owned();
            self.change_machine(MachineId(machine), move |snapshot| {
                let facts = &snapshot.facts;
                let mut changes = vec![FactChange::NeedsHumanCleared, FactChange::RecoveryCleared];
                changes.extend(facts.backoffs.keys().copied().map(FactChange::BackoffCleared));
                changes.extend(facts.postponements.keys().copied().map(FactChange::PostponementCleared));
                Decision { changes, events: vec![("Retried".to_owned(), detail.clone())], answer: () }
            })
            .await?;
        }
        Ok(())
    }

    async fn lift_page(&self, after: MachineId, detail: String) -> Result<Vec<MachineId>, BmdbError> {
        let what = "lifting fences";
        self.transact(what, move |tx| {
            let detail = detail.clone();
            Box::pin(async move {
                let page: Vec<Uuid> =
                    sqlx::query_file_scalar!("sql/declare_restored/list_page.sql", after.0, PAGE)
                        .fetch_all(&mut *tx)
                        .await
                        .doing(what)?;
                sqlx::query_file!("sql/declare_restored/lock_page.sql", &page)
                    .fetch_all(&mut *tx)
                    .await
                    .doing(what)?;
                sqlx::query_file!("sql/declare_restored/raise_work_fences.sql", &page, LIFT)
                    .fetch_all(&mut *tx)
                    .await
                    .doing(what)?;
                sqlx::query_file!("sql/declare_restored/insert_history.sql", &page, detail)
                    .execute(tx)
                    .await
                    .doing(what)?;
                Ok(page.into_iter().map(MachineId).collect())
            })
        })
        .await
    }
}
