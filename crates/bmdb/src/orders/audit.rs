//! Audit log, idempotency keys and dry runs of orders.
//!
//! An actor chooses an idempotency key for each order. A client that did not receive the answer gives the same order
//! again with the same key and receives the first answer: the line of the audit is looked up before anything is locked.
//! Of two that come at once neither finds a line. The index then rejects the second one's line, its transaction is
//! rolled back, and its retry finds the first.
//!
//! A dry run is no second implementation: it does everything and undoes it, so it reports what an order would do at
//! that moment.

use serde_json::Value;
use sqlx::{Executor as _, PgConnection};
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::orders::order::{Order, OrderEffect, OrderOutcome, OrderResult, OutcomeKind};
use model::ids::MachineId;
use model::time::Timestamp;

const SAVEPOINT: &str = include_str!("../../../../sql/dry_run/savepoint.sql");
const ROLL_BACK_TO_SAVEPOINT: &str = include_str!("../../../../sql/dry_run/roll_back.sql");
const OPERATION: &str = "carrying out an order";

/// A line of the audit.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "columns of the table, described where it is made")]
pub struct AuditRecord {
    pub audit_id: Uuid,
    pub at: Timestamp,
    pub actor: String,
    pub credential_id: Option<Uuid>,
    pub rpc: String,
    pub target: String,
    pub reason: String,
    pub idempotency_key: Option<String>,
    pub dry_run: bool,
    pub outcome: String,
    pub message: String,
    pub before: Option<Value>,
    pub after: Option<Value>,
}

/// Sets the savepoint before anything an order changes, so that a dry run can undo it.
pub(super) async fn begin_dry_run(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(SAVEPOINT)).await.context(OPERATION)?;
    }
    Ok(())
}

/// Rolls back a dry run: undoes what it changed since [`begin_dry_run`].
pub(super) async fn end_dry_run(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(ROLL_BACK_TO_SAVEPOINT)).await.context(OPERATION)?;
    }
    Ok(())
}

/// The result of this order if it was carried out before under the same key; `None` if it was not, or is a dry run.
pub(crate) async fn find_by_idempotency_key(
    tx: &mut PgConnection,
    order: &Order,
) -> Result<Option<OrderResult>, BmdbError> {
    let Some(key) = order.idempotency_key.as_ref().filter(|_| !order.dry_run) else { return Ok(None) };
    let found = sqlx::query!(
        "SELECT audit_id, request, outcome, message, before, after
         FROM audit
         WHERE actor = $1 AND idempotency_key = $2 AND NOT dry_run",
        order.actor.name,
        key
    )
    .fetch_optional(tx)
    .await
    .context("looking for an order in the audit")?;
    let Some(row) = found else { return Ok(None) };
    if row.request != order.request_digest {
        return Err(BmdbError::IdempotencyKeyReused { key: key.clone() });
    }
    Ok(Some(OrderResult {
        outcome: OrderOutcome {
            kind: OutcomeKind::from_audit_name(&row.outcome).unwrap_or_default(),
            message: row.message,
        },
        replayed: true,
        audit_id: row.audit_id,
        before: row.before,
        after: row.after,
    }))
}

/// A line to write into the audit, without the state of its target.
pub(super) struct NewAuditRecord {
    pub(super) order: Order,
    pub(super) machine: Option<MachineId>,
    pub(super) outcome: &'static str,
    pub(super) message: String,
}

/// Writes the audit line of an order that was carried out.
pub(crate) async fn record_audit(
    tx: &mut PgConnection,
    order: &Order,
    machine: Option<MachineId>,
    effect: OrderEffect,
) -> Result<OrderResult, BmdbError> {
    let OrderEffect { outcome, before, after } = effect;
    let line = NewAuditRecord {
        order: order.clone(),
        machine,
        outcome: outcome.kind.audit_name(),
        message: outcome.message.clone(),
    };
    let audit_id = insert_audit_record(tx, &line, before.as_ref(), after.as_ref()).await?;
    Ok(OrderResult { outcome, replayed: false, audit_id, before, after })
}

pub(super) async fn insert_audit_record(
    tx: &mut PgConnection,
    line: &NewAuditRecord,
    before: Option<&Value>,
    after: Option<&Value>,
) -> Result<Uuid, BmdbError> {
    let (audit, order) = (Uuid::now_v7(), &line.order);
    let written = sqlx::query_file!(
        "../../sql/audit/insert.sql",
        audit,
        order.actor.name,
        order.actor.credential,
        order.rpc,
        order.target,
        line.machine.map(|machine| machine.0),
        order.reason,
        order.idempotency_key.as_deref(),
        order.request_digest.as_slice(),
        order.dry_run,
        line.outcome,
        line.message,
        before,
        after,
    )
    .fetch_optional(tx)
    .await
    .context("writing the audit")?;
    written.map(|_| audit).ok_or(BmdbError::DuplicateOrderInProgress)
}

/// Lines of the audit after the one with id `after`, newest first; of one machine or of all.
pub async fn list_audit(
    tx: &mut PgConnection,
    machine: Option<MachineId>,
    (at, audit): (Timestamp, Uuid),
    limit: i64,
) -> Result<Vec<AuditRecord>, BmdbError> {
    match machine {
        None => {
            sqlx::query_file_as!(AuditRecord, "../../sql/audit/list.sql", at, audit, limit)
                .fetch_all(tx)
                .await
        }
        Some(machine) => {
            sqlx::query_file_as!(
                AuditRecord,
                "../../sql/audit/list_of_machine.sql",
                at,
                audit,
                limit,
                machine.0
            )
            .fetch_all(tx)
            .await
        }
    }
    .context("reading the audit")
}
