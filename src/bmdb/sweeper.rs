//! The sweeper: recomputes everybody's schedule, page by page, and repairs it.
//!
//! The schedule is written with every change of a fact, so there should be
//! nothing to repair: what it finds under the same rules and policy is a defect
//! of ours and is counted as drift, a metric that must read 0. What it does
//! find rightfully is a changed policy or newer rules, and phases of machines
//! whose time passed without anybody writing.

use std::collections::{BTreeSet, HashMap};

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::schedule::{DueRow, differs, lock, reschedule, stored_rows};
use crate::model::drift::drift_of;
use crate::model::ids::MachineId;
use crate::model::policy::Policy;
use crate::model::schedule::next_due;

/// What a page of the sweep found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Machines looked at.
    pub machines: usize,
    /// Machines written anew.
    pub repaired: usize,
    /// Lanes that contradicted their facts although rules and policy were the same.
    pub drifted: usize,
    /// Machines whose schedule a newer release decided, which are left to it.
    pub newer: usize,
    /// The last machine of the page; `None` when it was the last page.
    pub continue_after: Option<MachineId>,
}

impl Bmdb {
    /// Looks at `page` machines after `after`, and repairs what differs.
    pub async fn sweep_page(&self, after: MachineId, page: i64) -> Result<Swept, BmdbError> {
        self.read_policy().await?;
        let snapshots = self.snapshot_page(after, page).await?;
        let mut swept = Swept { machines: snapshots.len(), ..Swept::default() };
        if i64::try_from(snapshots.len()).unwrap_or(i64::MAX) >= page {
            swept.continue_after = snapshots.last().map(|snapshot| snapshot.facts.machine);
        }
        let rows = self.due_rows(&snapshots).await?;
        let (version, policy) = self.policy();
        for snapshot in snapshots {
            let machine = snapshot.facts.machine;
            if rows.get(&machine).is_some_and(Vec::is_empty) {
                swept.newer += 1;
                continue;
            }
            let wrong = rows.get(&machine).is_none_or(|rows| {
                rows.iter().any(|row| differs(&snapshot.facts, row, &policy, version, snapshot.now))
            });
            if !wrong {
                continue;
            }
            match self.repair(machine).await {
                Ok(drifted) => {
                    swept.repaired += 1;
                    swept.drifted += drifted;
                }
                Err(BmdbError::NewerRules { .. }) => swept.newer += 1,
                Err(BmdbError::NoSuchMachine(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(swept)
    }

    /// Machines of a page whose stored schedule contradicts what was read of them, policy and rules being the
    /// same. Facts and schedule were read one after the other: whoever changed in between may be among them.
    pub(crate) async fn contradicted(
        &self,
        snapshots: &[Snapshot],
        policy: &Policy,
        version: i64,
    ) -> Result<BTreeSet<MachineId>, BmdbError> {
        let rows = self.due_rows(snapshots).await?;
        let contradicts = |snapshot: &&Snapshot| {
            let of_machine = rows.get(&snapshot.facts.machine).into_iter().flatten();
            of_machine.into_iter().any(|row| {
                let due = next_due(&snapshot.facts, row.lane, policy, snapshot.now);
                drift_of(&row.stored(), &due, version).is_some()
            })
        };
        Ok(snapshots.iter().filter(contradicts).map(|snapshot| snapshot.facts.machine).collect())
    }

    async fn due_rows(&self, snapshots: &[Snapshot]) -> Result<HashMap<MachineId, Vec<DueRow>>, BmdbError> {
        let ids: Vec<uuid::Uuid> = snapshots.iter().map(|snapshot| snapshot.facts.machine.0).collect();
        let found = self
            .statement("reading a page of the schedule", move |pool| {
                let ids = ids.clone();
                Box::pin(async move { stored_rows(pool, &ids).await })
            })
            .await?;
        let mut rows: HashMap<MachineId, Vec<DueRow>> = HashMap::new();
        for row in found {
            let of_machine = rows.entry(MachineId(row.machine_id)).or_default();
            match row.understood() {
                Ok(row) => of_machine.push(row),
                // A newer release's row is not ours to judge: it is left out on both sides.
                Err(BmdbError::NewerRules { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(rows)
    }

    /// Locks one machine, reads it again and writes its schedule. Returns how many lanes had
    /// drifted.
    pub async fn repair(&self, machine: MachineId) -> Result<usize, BmdbError> {
        let bmdb = self.clone();
        self.transact("repairing a schedule", move |tx| {
            let bmdb = bmdb.clone();
            Box::pin(async move {
                let rows = lock(tx, machine).await?;
                let result = reschedule(&bmdb, tx, machine, &rows).await?;
                for lane in &result.drifted {
                    tracing::error!(%machine, %lane, "the schedule contradicted the facts; repaired");
                }
                Ok(result.drifted.len())
            })
        })
        .await
    }
}
