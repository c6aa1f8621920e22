//! Executing an order: its transaction, run again beside a duplicate, and the audit line of a rejection.
//!
//! An order that was rejected because of what it found is recorded as well, in a transaction of its own and without its
//! key: a corrected order may be given under the same one.

use std::sync::Arc;

use futures::future::BoxFuture;
use sqlx::PgConnection;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::orders::approval::record_approval_request;
use crate::orders::audit::{NewAuditRecord, insert_audit_record};
use crate::orders::order::Order;
use model::ids::MachineId;

/// How often an order is tried when the same one is given at the same time.
const MAX_ATTEMPTS: usize = 3;

impl Bmdb {
    /// Runs a transaction that carries out an order. Runs it again when the same order was given at the same time: the
    /// retry finds the other one's result.
    pub(crate) async fn run_order_transaction<T, F>(
        &self,
        what: &'static str,
        body: F,
    ) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        for _ in 0..MAX_ATTEMPTS {
            let carried = self.transact(what, body.clone()).await;
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
        let (line, must) = (Arc::new(line), wanted.is_some());
        let noted = self.transact("writing the audit", move |tx| {
            let (line, wanted) = (line.clone(), wanted.clone());
            Box::pin(async move {
                if let Some(wanted) = &wanted {
                    record_approval_request(tx, &line.order, wanted).await?;
                }
                insert_audit_record(tx, &line, None, None).await.map(drop)
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
