//! Executing an order: its transaction, run again beside a duplicate, and the audit line of a rejection.
//!
//! What all orders have in common is here, so an order is written as the function that makes its change:
//!
//! 1. The first result of the same order is looked up, before anything is locked.
//! 2. The function of the order locks what it is about, decides, asks the two-person rule if the order needs it, and
//!    makes the change. What it did in a dry run is rolled back.
//! 3. The line of the audit is written, in the same transaction.
//!
//! An order that was rejected because of what it found is recorded as well, in a transaction of its own and without its
//! key: a corrected order may be given under the same one.

use std::sync::Arc;

use futures::future::BoxFuture;
use sqlx::PgConnection;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::orders::approval::record_approval_request;
use crate::orders::audit::{
    NewAuditRecord, begin_dry_run, end_dry_run, find_by_idempotency_key, insert_audit_record, record_audit,
};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::ids::MachineId;

/// How often an order is tried when the same one is given at the same time.
const MAX_ATTEMPTS: usize = 3;

impl Bmdb {
    /// Carries out an order, with its line in the audit. A rejection is recorded there too. `machine` is the machine
    /// that the order is about, if it is about one.
    ///
    /// `change` makes the change in the order's transaction, which may run several times. It is not called for an order
    /// that was carried out before under the same key: such an order gets its first result.
    pub(crate) async fn execute_order<A, F>(
        &self,
        what: &'static str,
        order: Order,
        machine: Option<MachineId>,
        arguments: A,
        change: F,
    ) -> Result<OrderResult, BmdbError>
    where
        A: Send + Sync + 'static,
        F: for<'c> Fn(
                &'c mut PgConnection,
                &'c Order,
                &'c A,
            ) -> BoxFuture<'c, Result<OrderEffect, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        let order = Arc::new(order);
        let carried = self.try_order(what, &order, machine, arguments, change).await;
        self.audit_rejection(carried, &order, machine).await
    }

    /// The part of [`Self::execute_order`] without the record of a rejection. The caller passes the result through
    /// [`Self::audit_rejection`].
    pub(crate) async fn try_order<A, F>(
        &self,
        what: &'static str,
        order: &Arc<Order>,
        machine: Option<MachineId>,
        arguments: A,
        change: F,
    ) -> Result<OrderResult, BmdbError>
    where
        A: Send + Sync + 'static,
        F: for<'c> Fn(
                &'c mut PgConnection,
                &'c Order,
                &'c A,
            ) -> BoxFuture<'c, Result<OrderEffect, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        let arguments = (machine, arguments, change);
        self.run_order_transaction(what, order, arguments, |tx, order, (machine, arguments, change)| {
            Box::pin(async move {
                if let Some(carried) = find_by_idempotency_key(tx, order).await? {
                    return Ok(carried);
                }
                begin_dry_run(tx, order).await?;
                let effect = change(tx, order, arguments).await?;
                end_dry_run(tx, order).await?;
                record_audit(tx, order, *machine, effect).await
            })
        })
        .await
    }

    /// Runs a transaction that carries out an order and has a result of its own. Runs it again when the same order was
    /// given at the same time: the retry finds the other one's result.
    pub(crate) async fn run_order_transaction<A, T, F>(
        &self,
        what: &'static str,
        order: &Arc<Order>,
        arguments: A,
        body: F,
    ) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c Order, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        let shared = Arc::new((arguments, body));
        for _ in 0..MAX_ATTEMPTS {
            let given = (order.clone(), shared.clone());
            let carried = self
                .transact_with(what, given, |tx, (order, shared)| {
                    let (arguments, body) = &**shared;
                    body(tx, order, arguments)
                })
                .await;
            if !matches!(carried, Err(BmdbError::DuplicateOrderInProgress)) {
                return carried;
            }
        }
        Err(BmdbError::DuplicateOrderInProgress)
    }

    /// Records in the audit that an order was rejected because of what it found, and passes the result on.
    pub(crate) async fn audit_rejection<T>(
        &self,
        carried: Result<T, BmdbError>,
        order: &Order,
        machine: Option<MachineId>,
    ) -> Result<T, BmdbError> {
        let Err(error) = &carried else { return carried };
        if !matches!(
            error,
            BmdbError::VersionMismatch { .. }
                | BmdbError::IdempotencyKeyReused { .. }
                | BmdbError::OrderRejected { .. }
                | BmdbError::ApprovalRequired(_)
                | BmdbError::NoSuchCredential(_)
        ) {
            return carried;
        }
        let line = NewAuditRecord {
            // Without a key: the corrected order may be given under the same one.
            order: Order { idempotency_key: None, ..order.clone() },
            machine,
            outcome: "refused",
            message: error.to_string(),
        };
        let wanted = match error {
            BmdbError::ApprovalRequired(wanted) => Some(wanted.clone()),
            _ => None,
        };
        let must = wanted.is_some();
        let noted = self.transact_with("writing the audit", (line, wanted), |tx, (line, wanted)| {
            Box::pin(async move {
                if let Some(wanted) = wanted {
                    record_approval_request(tx, &line.order, wanted).await?;
                }
                insert_audit_record(tx, line, None, None).await.map(drop)
            })
        });
        if let Err(error) = noted.await {
            // A request for approval that was not stored cannot be approved, so the actor must learn of the failure.
            if must {
                return Err(error);
            }
            tracing::warn!(%error, rpc = order.rpc, "a refused order is in no audit");
        }
        carried
    }
}
