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
const READING: &str = "reading the audit";

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

/// Most lines that one page looks at.
pub const MAX_EXAMINED: i64 = 10_000;

/// Which lines of the audit a list has.
#[derive(Clone, Debug)]
pub struct AuditFilter {
    /// The machine that an order is about; `None` for any, and for orders about none.
    pub machine: Option<MachineId>,
    /// The actor: the whole name, or the part before `@` or a space. Empty for any.
    pub actor: String,
    /// The RPC in small letters: the whole name, the method, the service, or both. Empty for any.
    pub rpc: String,
    /// The earliest time of an order.
    pub since: Timestamp,
}

/// A page of the audit.
#[derive(Clone, Debug)]
pub struct AuditPage {
    /// The lines that match, newest first.
    pub records: Vec<AuditRecord>,
    /// Where the next page begins; `None` after the last one.
    pub next: Option<(Timestamp, Uuid)>,
}

/// At most `size` lines of the audit after the one at `after`, newest first. A page may have fewer, or none, and not be the
/// last one: it looks at [`MAX_EXAMINED`] lines.
pub async fn list_audit(
    tx: &mut PgConnection,
    filter: &AuditFilter,
    after: (Timestamp, Uuid),
    size: i64,
) -> Result<AuditPage, BmdbError> {
    let mut records = list_matching(tx, filter, after, size.saturating_add(1)).await?;
    let most = usize::try_from(size).unwrap_or(usize::MAX);
    let next = if records.len() > most {
        records.truncate(most);
        records.last().map(|line| (line.at, line.audit_id))
    } else if filter.actor.is_empty() && filter.rpc.is_empty() {
        None
    } else {
        find_last_examined(tx, filter, after).await?
    };
    Ok(AuditPage { records, next })
}

async fn list_matching(
    tx: &mut PgConnection,
    filter: &AuditFilter,
    (at, audit): (Timestamp, Uuid),
    limit: i64,
) -> Result<Vec<AuditRecord>, BmdbError> {
    match filter.machine {
        None => {
            sqlx::query_file_as!(
                AuditRecord,
                "../../sql/audit/list.sql",
                at,
                audit,
                limit,
                MAX_EXAMINED,
                filter.since,
                filter.actor,
                filter.rpc
            )
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
                MAX_EXAMINED,
                filter.since,
                filter.actor,
                filter.rpc,
                machine.0
            )
            .fetch_all(tx)
            .await
        }
    }
    .context(READING)
}

/// The place of the last line that a page looked at; `None` if it looked at all that were left.
async fn find_last_examined(
    tx: &mut PgConnection,
    filter: &AuditFilter,
    (at, audit): (Timestamp, Uuid),
) -> Result<Option<(Timestamp, Uuid)>, BmdbError> {
    let before = MAX_EXAMINED - 1;
    let found = match filter.machine {
        None => sqlx::query_file!("../../sql/audit/find_last_examined.sql", at, audit, filter.since, before)
            .fetch_optional(tx)
            .await
            .context(READING)?
            .map(|row| (row.at, row.audit_id)),
        Some(machine) => sqlx::query_file!(
            "../../sql/audit/find_last_examined_of_machine.sql",
            at,
            audit,
            filter.since,
            before,
            machine.0
        )
        .fetch_optional(tx)
        .await
        .context(READING)?
        .map(|row| (row.at, row.audit_id)),
    };
    Ok(found)
}
