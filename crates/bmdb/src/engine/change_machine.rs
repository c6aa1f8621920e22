//! Changing the facts of one machine in a transaction: lock, decide, write, reschedule, record.
//!
//! A decision is a pure function of a snapshot that is read under the machine's lock. It may run again after a
//! conflict. The authority says whose right the change has: an operator's order, the work on the machine, or a named
//! lease. A lease that is lost changes nothing.

#[cfg(feature = "sealing")]
use futures::future::BoxFuture;
#[cfg(feature = "sealing")]
use sqlx::PgConnection;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::engine::fact_change::{FactChange, apply_fact_change};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::named_lease::{NamedLease, lock_named_lease};
use crate::engine::schedule::{lock_due_rows, record_event, reschedule_machine};
use crate::engine::work::lease::{WorkLease, lock_due_rows_leased};
use model::ids::MachineId;

/// Changes to write and lines of history to add, decided on a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Decision<T> {
    /// Changes of facts to apply.
    pub changes: Vec<FactChange>,
    /// (event, detail) lines for the machine's history.
    pub events: Vec<(String, String)>,
    /// The value returned to the caller.
    pub output: T,
}

impl Bmdb {
    /// Changes facts of a machine outside any work, decided on a snapshot that is read under the lock.
    ///
    /// `decide` is pure: it may run again after a conflict.
    pub async fn change_machine<T, F>(&self, machine: MachineId, decide: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, WriteAuthority::Operator, machine, decide).await
    }

    /// The same under a named lease: nothing is written once the lease is lost.
    pub async fn change_machine_under_lease<T, F>(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        decide: F,
    ) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, WriteAuthority::Named(lease.clone()), machine, decide).await
    }

    /// Runs a transaction about a machine for the holder of a named lease, under the machine's lock: see
    /// [`Self::transact_under_lease`]. It does not compute the schedule again, so `body` changes no facts.
    #[cfg(feature = "sealing")]
    pub(crate) async fn transact_for_machine<A, T, F>(
        &self,
        what: &'static str,
        (lease, machine): (&NamedLease, MachineId),
        arguments: A,
        body: F,
    ) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        self.transact_under_lease(what, lease, (arguments, body), move |tx, (arguments, body)| {
            Box::pin(async move {
                lock_due_rows(tx, machine).await?;
                body(tx, arguments).await
            })
        })
        .await
    }
}

/// The right to change facts.
pub(crate) enum WriteAuthority {
    /// The right of an operator's order.
    Operator,
    /// The right of the work on the machine.
    Work(WorkLease),
    /// The right of the holder of a named lease.
    Named(NamedLease),
}

pub(crate) async fn change_machine<T, F>(
    bmdb: &Bmdb,
    under: WriteAuthority,
    machine: MachineId,
    decide: F,
) -> Result<T, BmdbError>
where
    T: Send + 'static,
    F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
{
    let arguments = (bmdb.clone(), decide, under);
    bmdb.transact_with("changing facts", arguments, move |tx, (bmdb, decide, under)| {
        Box::pin(async move {
            let rows = match under {
                WriteAuthority::Operator => lock_due_rows(tx, machine).await?,
                WriteAuthority::Work(lease) => lock_due_rows_leased(tx, *lease, machine).await?,
                WriteAuthority::Named(lease) => {
                    lock_named_lease(tx, lease).await?;
                    lock_due_rows(tx, machine).await?
                }
            };
            let decision = decide(&read_snapshot(tx, machine).await?);
            if decision.changes.is_empty() && decision.events.is_empty() {
                return Ok(decision.output);
            }
            for change in &decision.changes {
                apply_fact_change(tx, machine, change).await?;
            }
            reschedule_machine(bmdb, tx, machine, &rows).await?;
            for (event, detail) in &decision.events {
                record_event(tx, machine, event, detail).await?;
            }
            Ok(decision.output)
        })
    })
    .await
}
