//! The sweeper: recomputes every machine's schedule and repairs mismatches.
//!
//! It reads the fleet page by page. The schedule is written with every change of a fact, so there should be nothing to
//! repair: a difference under the same rules and policy is a defect of ours and is counted by a metric that must
//! be 0. Legitimate differences are a changed policy or newer rules, and phases of machines whose time passed without a
//! write.

use std::collections::{BTreeSet, HashMap};

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::engine::facts::MachineSnapshot;
use crate::engine::schedule::{DueRow, is_outdated, lock_due_rows, read_due_rows, reschedule_machine};
use model::ids::MachineId;
use model::policy::Policy;
use model::schedule::next_due;
use model::schedule_mismatch::describe_mismatch;

/// The result of sweeping a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Machines examined in the page.
    pub machines: usize,
    /// Machines whose schedule was rewritten.
    pub repaired: usize,
    /// Lanes that contradicted their facts although rules and policy were the same.
    pub mismatches: usize,
    /// Machines whose schedule a newer release wrote, which are left to it.
    pub newer_rules: usize,
    /// The last machine of the page; `None` if no page follows.
    pub continue_after: Option<MachineId>,
}

impl Bmdb {
    /// Examines `page` machines after `after`, and repairs what differs.
    pub async fn sweep_page(&self, after: MachineId, page: i64) -> Result<Swept, BmdbError> {
        self.read_policy().await?;
        let snapshots = self.read_snapshot_page(after, page).await?;
        let mut swept = Swept { machines: snapshots.len(), ..Swept::default() };
        if i64::try_from(snapshots.len()).unwrap_or(i64::MAX) >= page {
            swept.continue_after = snapshots.last().map(|snapshot| snapshot.facts.machine);
        }
        let rows = self.read_page_due_rows(&snapshots).await?;
        let (version, policy) = self.policy();
        for snapshot in snapshots {
            let machine = snapshot.facts.machine;
            if rows.get(&machine).is_some_and(Vec::is_empty) {
                swept.newer_rules += 1;
                continue;
            }
            let wrong = rows.get(&machine).is_none_or(|rows| {
                rows.iter().any(|row| is_outdated(&snapshot.facts, row, &policy, version, snapshot.now))
            });
            if !wrong {
                continue;
            }
            match self.repair_schedule(machine).await {
                Ok(mismatches) => {
                    swept.repaired += 1;
                    swept.mismatches += mismatches;
                }
                Err(BmdbError::NewerRules { .. }) => swept.newer_rules += 1,
                Err(BmdbError::NoSuchMachine(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(swept)
    }

    /// Machines of a page whose stored schedule contradicts the facts that were read, under the same policy and rules.
    /// Facts and schedule were read one after the other: a machine that changed in between may be among them.
    pub(crate) async fn find_contradicted_machines(
        &self,
        snapshots: &[MachineSnapshot],
        policy: &Policy,
        version: i64,
    ) -> Result<BTreeSet<MachineId>, BmdbError> {
        let rows = self.read_page_due_rows(snapshots).await?;
        let contradicts = |snapshot: &&MachineSnapshot| {
            let of_machine = rows.get(&snapshot.facts.machine).into_iter().flatten();
            of_machine.into_iter().any(|row| {
                let due = next_due(&snapshot.facts, row.lane, policy, snapshot.now);
                describe_mismatch(&row.stored_decision(), &due, version).is_some()
            })
        };
        Ok(snapshots.iter().filter(contradicts).map(|snapshot| snapshot.facts.machine).collect())
    }

    async fn read_page_due_rows(
        &self,
        snapshots: &[MachineSnapshot],
    ) -> Result<HashMap<MachineId, Vec<DueRow>>, BmdbError> {
        let ids: Vec<uuid::Uuid> = snapshots.iter().map(|snapshot| snapshot.facts.machine.0).collect();
        let found = self
            .statement_with("reading a page of the schedule", ids, |pool, ids| {
                Box::pin(read_due_rows(pool, ids))
            })
            .await?;
        let mut rows: HashMap<MachineId, Vec<DueRow>> = HashMap::new();
        for row in found {
            let of_machine = rows.entry(MachineId(row.machine_id)).or_default();
            match row.into_due_row() {
                Ok(row) => of_machine.push(row),
                // A newer release's row is not ours to evaluate: it is left out on both sides.
                Err(BmdbError::NewerRules { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(rows)
    }

    /// Locks one machine, reads it again and writes its schedule. Returns how many lanes contradicted their facts.
    pub async fn repair_schedule(&self, machine: MachineId) -> Result<usize, BmdbError> {
        self.transact_with("repairing a schedule", self.clone(), move |tx, bmdb| {
            Box::pin(async move {
                let rows = lock_due_rows(tx, machine).await?;
                let result = reschedule_machine(bmdb, tx, machine, &rows).await?;
                for lane in &result.mismatched {
                    tracing::error!(%machine, %lane, "the schedule contradicted the facts; repaired");
                }
                Ok(result.mismatched.len())
            })
        })
        .await
    }
}
