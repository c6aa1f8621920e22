//! Audit log and idempotent execution of orders, with dry run.
//!
//! An actor chooses an idempotency key for each order. A client that did not receive the answer gives the same order
//! again with the same key and receives the first answer: the line of the audit is looked up before anything is locked.
//! Of two that come at once neither finds a line. The index then rejects the second one's line, its transaction is
//! rolled back, and its retry finds the first.
//!
//! A dry run is no second implementation: it does everything and undoes it, so it reports what an order would do at
//! that moment.
//!
//! An order that was rejected because of what it found is recorded as well, in a transaction of its own and without its
//! key: a corrected order may be given under the same one.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::{Executor as _, PgConnection};
use uuid::Uuid;

use crate::action::{OrderOutcome, allow_host_key, audit_state};
use crate::approval::{append_approver, record_approval_request, require_second_approval};
use crate::connection::{Bmdb, DbContext as _};
use crate::error::BmdbError;
use crate::fact_change::apply_fact_change;
use crate::facts::{MachineSnapshot, read_snapshot};
use crate::inspect::read_host_keys;
use crate::machine_order::MachineOrder;
use crate::policy::policy_at_version;
use crate::schedule::{lock_due_rows, record_event, reschedule_machine};
use crate::work::Decision;
use model::host_key::PinnedHostKey;
use model::ids::MachineId;
use model::label::Labels;
use model::time::Timestamp;
use model::two_person_rule::SensitiveOrder;

const SAVEPOINT: &str = include_str!("../../../sql/dry_run/savepoint.sql");
const ROLL_BACK_TO_SAVEPOINT: &str = include_str!("../../../sql/dry_run/roll_back.sql");
const OPERATION: &str = "carrying out an order";
/// How often an order is tried when the same one is given at the same time.
const MAX_ATTEMPTS: usize = 3;

/// The person or program that gives an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// The name that people and the audit use.
    pub name: String,
    /// The credential they authenticated with; `None` for a client that writes to the BMDB directly.
    pub credential: Option<Uuid>,
}

/// An order with everything that makes it repeatable and traceable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Who gives the order.
    pub actor: Actor,
    /// The RPC it came by, as `shepherd.fleet.v1.Machines/Hold`.
    pub rpc: String,
    /// What it is about, for people.
    pub target: String,
    /// The actor's reason, for history and the audit.
    pub reason: String,
    /// Its name among the orders of its actor; `None` if it cannot be repeated safely.
    pub idempotency_key: Option<String>,
    /// Whether to undo everything and only report what would happen.
    pub dry_run: bool,
    /// The version that the machine must still have; `None` for any.
    pub expected_version: Option<i64>,
    /// Digest that distinguishes it from another order with the same key.
    pub request_digest: [u8; 32],
}

/// The result of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderResult {
    /// Whether anything changed, and the message for people.
    pub outcome: OrderOutcome,
    /// Whether the order was carried out before and this is its first result.
    pub replayed: bool,
    /// Id of its line in the audit.
    pub audit_id: Uuid,
    /// State of the order's target before it; `None` if it has none.
    pub before: Option<Value>,
    /// State of the order's target after it; `None` if it has none.
    pub after: Option<Value>,
}

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

/// Digest of an encoded request, which distinguishes it from every other one.
#[must_use]
pub fn request_digest(data: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, data);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    bytes
}

/// What an order about a machine is decided on.
#[derive(Clone, Debug)]
pub struct OrderContext {
    /// Facts, clock and policy version.
    pub snapshot: MachineSnapshot,
    /// Its host keys; `None` before the first connection.
    pub host_keys: Option<PinnedHostKey>,
    /// Its labels as they are stored.
    pub labels: Labels,
}

/// Decides what an order changes on a machine.
type DecideFn = dyn Fn(&OrderContext) -> Result<Decision<OrderOutcome>, BmdbError> + Send + Sync;

impl Bmdb {
    /// Carries out an order about one machine, with its line in the audit.
    pub async fn execute_on_machine<F>(
        &self,
        order: Order,
        machine: MachineId,
        decide: F,
    ) -> Result<OrderResult, BmdbError>
    where
        F: Fn(&MachineSnapshot) -> Decision<OrderOutcome> + Send + Sync + 'static,
    {
        self.execute_order(order, machine, Arc::new(move |known| Ok(decide(&known.snapshot)))).await
    }

    /// Carries out an order that may be rejected because of what it finds, with a reason for programs and a sentence
    /// for people.
    pub async fn try_execute_on_machine<F>(
        &self,
        order: Order,
        machine: MachineId,
        decide: F,
    ) -> Result<OrderResult, BmdbError>
    where
        F: Fn(&MachineSnapshot) -> Result<Decision<OrderOutcome>, (&'static str, String)>
            + Send
            + Sync
            + 'static,
    {
        let decide = move |known: &OrderContext| {
            decide(&known.snapshot)
                .map_err(|(reason, text)| BmdbError::OrderRejected { reason, message: text })
        };
        self.execute_order(order, machine, Arc::new(decide)).await
    }

    /// Carries out the order to pin the refused host key with that fingerprint, on behalf of `by`. `name` is what
    /// people call the machine.
    pub async fn allow_host_key(
        &self,
        order: Order,
        machine: MachineId,
        (name, fingerprint, by): (String, String, String),
    ) -> Result<OrderResult, BmdbError> {
        let decide = move |known: &OrderContext| {
            allow_host_key(&known.snapshot.facts, known.host_keys.as_ref(), &name, &fingerprint, &by)
                .map_err(|reason| BmdbError::OrderRejected { reason: "NO_SUCH_KEY", message: reason })
        };
        self.execute_order(order, machine, Arc::new(decide)).await
    }

    /// Carries out, on one machine, an order that can also be given for many.
    pub async fn execute_machine_order(
        &self,
        order: Order,
        machine: MachineId,
        each: MachineOrder,
        who: String,
    ) -> Result<OrderResult, BmdbError> {
        let reason = Some(order.reason.clone()).filter(|reason| !reason.is_empty());
        self.execute_order(order, machine, Arc::new(move |known| each.decide(known, &who, reason.as_deref())))
            .await
    }

    async fn execute_order(
        &self,
        order: Order,
        machine: MachineId,
        decide: Arc<DecideFn>,
    ) -> Result<OrderResult, BmdbError> {
        let (bmdb, order) = (self.clone(), Arc::new(order));
        let given = order.clone();
        let carried = self
            .run_order_transaction(OPERATION, move |tx| {
                let (bmdb, order, decide) = (bmdb.clone(), order.clone(), decide.clone());
                Box::pin(async move { execute_order_in_tx(&bmdb, tx, &order, machine, &*decide).await })
            })
            .await;
        self.audit_rejection(carried, &given, Some(machine)).await
    }

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

async fn execute_order_in_tx(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    machine: MachineId,
    decide: &DecideFn,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let rows = lock_due_rows(tx, machine).await?;
    let found = read_machine_version(tx, machine).await?;
    if let Some(expected) = order.expected_version.filter(|expected| *expected != found) {
        return Err(BmdbError::VersionMismatch { machine: order.target.clone(), found, expected });
    }
    let known = OrderContext {
        snapshot: read_snapshot(tx, machine).await?,
        host_keys: read_host_keys(tx, machine).await?,
        labels: read_labels(tx, machine).await?,
    };
    let mut decision = decide(&known)?;
    if let Some(grave) = SensitiveOrder::from_rpc(&order.rpc).filter(|_| !decision.changes.is_empty()) {
        let policy = policy_at_version(bmdb, tx, known.snapshot.policy_version).await?;
        let by = require_second_approval(tx, order, grave, policy.two_person_rule, &[]).await?;
        decision.output.message = append_approver(decision.output.message, by.as_deref());
    }
    let before = audit_state(&known.snapshot.facts, known.host_keys.as_ref(), &known.labels);
    let mut after = before.clone();
    begin_dry_run(tx, order).await?;
    if !decision.changes.is_empty() || !decision.events.is_empty() {
        for change in &decision.changes {
            apply_fact_change(tx, machine, change).await?;
        }
        let rescheduled = reschedule_machine(bmdb, tx, machine, &rows).await?;
        if read_machine_version(tx, machine).await? == found {
            // The schedule is unchanged, but the order's target is not: clients that read it before must see a new
            // version.
            sqlx::query_file!("../../sql/schedule/increment_version.sql", machine.0)
                .execute(&mut *tx)
                .await
                .context(OPERATION)?;
        }
        let (keys, labels) = (read_host_keys(tx, machine).await?, read_labels(tx, machine).await?);
        after = audit_state(&rescheduled.snapshot.facts, keys.as_ref(), &labels);
        for (event, detail) in &decision.events {
            record_event(tx, machine, event, detail).await?;
        }
    }
    roll_back_dry_run(tx, order).await?;
    record_audit(tx, order, Some(machine), decision.output, Some(before), Some(after)).await
}

/// Reads a machine's labels; empty if it has none.
pub async fn read_labels(tx: &mut PgConnection, machine: MachineId) -> Result<Labels, BmdbError> {
    let stored = sqlx::query_file_scalar!("../../sql/facts/read_labels.sql", machine.0)
        .fetch_optional(tx)
        .await
        .context("reading a machine's labels")?;
    Ok(parse_labels(stored))
}

/// Decodes labels as they are stored. Anything else was not written by us and is ignored.
#[must_use]
pub fn parse_labels(stored: Option<Value>) -> Labels {
    stored.and_then(|stored| serde_json::from_value(stored).ok()).unwrap_or_default()
}

/// Sets the savepoint before anything an order changes, so that a dry run can undo it.
pub(crate) async fn begin_dry_run(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(SAVEPOINT)).await.context(OPERATION)?;
    }
    Ok(())
}

/// Undoes what a dry run changed since [`begin_dry_run`].
pub(crate) async fn roll_back_dry_run(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(ROLL_BACK_TO_SAVEPOINT)).await.context(OPERATION)?;
    }
    Ok(())
}

/// The version of a machine's schedule.
pub async fn read_machine_version(tx: &mut PgConnection, machine: MachineId) -> Result<i64, BmdbError> {
    sqlx::query_file_scalar!("../../sql/inspect/read_machine_version.sql", machine.0)
        .fetch_optional(tx)
        .await
        .context("reading a machine's version")?
        .ok_or_else(|| BmdbError::NoSuchMachine(machine.to_string()))
}

/// The result of this order if it was carried out before under the same key; `None` if it was not, or is a dry run.
pub(crate) async fn find_by_idempotency_key(
    tx: &mut PgConnection,
    order: &Order,
) -> Result<Option<OrderResult>, BmdbError> {
    let Some(key) = order.idempotency_key.as_ref().filter(|_| !order.dry_run) else { return Ok(None) };
    let found = sqlx::query_file!("../../sql/audit/find_by_idempotency_key.sql", order.actor.name, key)
        .fetch_optional(tx)
        .await
        .context("looking for an order in the audit")?;
    let Some(row) = found else { return Ok(None) };
    if row.request != order.request_digest {
        return Err(BmdbError::IdempotencyKeyReused { key: key.clone() });
    }
    Ok(Some(OrderResult {
        outcome: OrderOutcome { changed: row.outcome == "changed", message: row.message },
        replayed: true,
        audit_id: row.audit_id,
        before: row.before,
        after: row.after,
    }))
}

/// A line to write into the audit, without the state of its target.
struct NewAuditRecord {
    order: Order,
    machine: Option<MachineId>,
    outcome: &'static str,
    message: String,
}

/// Writes the audit line of an order that was carried out.
pub(crate) async fn record_audit(
    tx: &mut PgConnection,
    order: &Order,
    machine: Option<MachineId>,
    done: OrderOutcome,
    before: Option<Value>,
    after: Option<Value>,
) -> Result<OrderResult, BmdbError> {
    let outcome = if done.changed { "changed" } else { "unchanged" };
    let line = NewAuditRecord { order: order.clone(), machine, outcome, message: done.message.clone() };
    let audit = insert_audit_record(tx, &line, before.as_ref(), after.as_ref()).await?;
    Ok(OrderResult { outcome: done, replayed: false, audit_id: audit, before, after })
}

async fn insert_audit_record(
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
