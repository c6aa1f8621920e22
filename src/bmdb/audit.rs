//! Orders carried out once, and written down in the transaction that carries them out.
//!
//! An order has a key of its actor's choice. Whoever did not hear the answer gives the same order again
//! with the same key, and hears what was said the first time: the line of the audit is found before
//! anything is locked. Two that come at once both look in vain; the second one's line is then refused by
//! the index, its transaction is rolled back, and done anew it finds the first.
//!
//! A dry run is no second implementation: it does everything and undoes it, so what it says is what an
//! order would do at that moment.
//!
//! An order that was refused for what it found is written down as well, in a transaction of its own and
//! without its key: corrected, it may be given again under the same one.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;
use sqlx::{Executor as _, PgConnection};
use uuid::Uuid;

use crate::bmdb::action::{Done, allow_host_key, ordered_about};
use crate::bmdb::approval::{ask, gate, with_approval};
use crate::bmdb::change::apply;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::each::Each;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::inspect::host_keys;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{lock, reschedule, tell};
use crate::bmdb::work::Decision;
use crate::model::host_key::PinnedHostKey;
use crate::model::ids::MachineId;
use crate::model::label::Labels;
use crate::model::second_person::Grave;
use crate::model::time::Timestamp;

const SAVEPOINT: &str = include_str!("../../sql/dry_run/savepoint.sql");
const UNDO: &str = include_str!("../../sql/dry_run/roll_back.sql");
const WHAT: &str = "carrying out an order";
/// How often an order is begun anew because the same one was given at once.
const TRIES: usize = 3;

/// Who orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    /// As people and the audit know them.
    pub name: String,
    /// The credential they came with; `None` for whoever writes to the BMDB directly.
    pub credential: Option<Uuid>,
}

/// An order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Who gives it.
    pub actor: Actor,
    /// Which, as `shepherd.fleet.v1.Machines/Hold`.
    pub rpc: String,
    /// About what, for people.
    pub target: String,
    /// Why.
    pub reason: String,
    /// Its name among those of its actor.
    pub idempotency_key: Option<String>,
    /// Whether to change nothing.
    pub dry_run: bool,
    /// The version that the machine must still have.
    pub expected_version: Option<i64>,
    /// What tells it from another order with the same key.
    pub request: [u8; 32],
}

/// What became of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct Carried {
    /// The answer.
    pub done: Done,
    /// Whether that was given before, and nothing was done now.
    pub repeated: bool,
    /// Its line in the audit.
    pub audit: Uuid,
    /// What it was about, before.
    pub before: Option<Value>,
    /// And after.
    pub after: Option<Value>,
}

/// A line of the audit.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "columns of the table, described where it is made")]
pub struct AuditLine {
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
    pub said: String,
    pub before: Option<Value>,
    pub after: Option<Value>,
}

/// What tells one order from another: the digest of how it was said.
#[must_use]
pub fn request_digest(said: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, said);
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    bytes
}

/// What an order about a machine is decided on.
#[derive(Clone, Debug)]
pub struct Known {
    /// Its facts.
    pub snapshot: Snapshot,
    /// Its host keys, once one was seen.
    pub keys: Option<PinnedHostKey>,
    /// Its labels.
    pub labels: Labels,
}

/// What an order makes of a machine.
type Decide = dyn Fn(&Known) -> Result<Decision<Done>, BmdbError> + Send + Sync;

impl Bmdb {
    /// Carries out an order about one machine, with its line in the audit.
    pub async fn order_machine<F>(
        &self,
        order: Order,
        machine: MachineId,
        decide: F,
    ) -> Result<Carried, BmdbError>
    where
        F: Fn(&Snapshot) -> Decision<Done> + Send + Sync + 'static,
    {
        self.order(order, machine, Arc::new(move |known| Ok(decide(&known.snapshot)))).await
    }

    /// The same for an order that may be refused for what it finds, with a reason for programs and a sentence
    /// for people.
    pub async fn order_machine_or_refuse<F>(
        &self,
        order: Order,
        machine: MachineId,
        decide: F,
    ) -> Result<Carried, BmdbError>
    where
        F: Fn(&Snapshot) -> Result<Decision<Done>, (&'static str, String)> + Send + Sync + 'static,
    {
        let decide = move |known: &Known| {
            decide(&known.snapshot).map_err(|(reason, said)| BmdbError::OrderRefused { reason, said })
        };
        self.order(order, machine, Arc::new(decide)).await
    }

    /// Carries out the order to believe the host key with that fingerprint, which the machine that people call
    /// `name` was refused for, on behalf of `by`.
    pub async fn order_host_key(
        &self,
        order: Order,
        machine: MachineId,
        (name, fingerprint, by): (String, String, String),
    ) -> Result<Carried, BmdbError> {
        let decide = move |known: &Known| {
            allow_host_key(&known.snapshot.facts, known.keys.as_ref(), &name, &fingerprint, &by)
                .map_err(|said| BmdbError::OrderRefused { reason: "NO_SUCH_KEY", said })
        };
        self.order(order, machine, Arc::new(decide)).await
    }

    /// Carries out an order that may be given about many machines, about one.
    pub async fn order_each(
        &self,
        order: Order,
        machine: MachineId,
        each: Each,
        who: String,
    ) -> Result<Carried, BmdbError> {
        let reason = Some(order.reason.clone()).filter(|reason| !reason.is_empty());
        self.order(order, machine, Arc::new(move |known| each.decide(known, &who, reason.as_deref()))).await
    }

    async fn order(
        &self,
        order: Order,
        machine: MachineId,
        decide: Arc<Decide>,
    ) -> Result<Carried, BmdbError> {
        let (bmdb, order) = (self.clone(), Arc::new(order));
        let given = order.clone();
        let carried = self
            .ordered(WHAT, move |tx| {
                let (bmdb, order, decide) = (bmdb.clone(), order.clone(), decide.clone());
                Box::pin(async move { carry_out(&bmdb, tx, &order, machine, &*decide).await })
            })
            .await;
        self.note_refusal(carried, &given, Some(machine)).await
    }

    /// Runs a transaction that carries out an order, and anew when the same order was given at once: then it
    /// finds what became of that.
    pub(crate) async fn ordered<T, F>(&self, what: &'static str, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        for _ in 0..TRIES {
            let carried = self.transact(what, body.clone()).await;
            if !matches!(carried, Err(BmdbError::OrderedAtOnce)) {
                return carried;
            }
        }
        Err(BmdbError::OrderedAtOnce)
    }

    /// Writes into the audit that an order was refused for what it found, and passes on what became of it.
    pub(crate) async fn note_refusal<T>(
        &self,
        carried: Result<T, BmdbError>,
        order: &Order,
        machine: Option<MachineId>,
    ) -> Result<T, BmdbError> {
        let Err(error) = &carried else { return carried };
        if !matches!(
            error,
            BmdbError::OtherVersion { .. }
                | BmdbError::KeyOfAnotherOrder { .. }
                | BmdbError::OrderRefused { .. }
                | BmdbError::SecondPerson(_)
                | BmdbError::NoSuchCredential(_)
        ) {
            return carried;
        }
        let line = Line {
            // Of no key: what is corrected may be given under the same one.
            order: Order { idempotency_key: None, ..order.clone() },
            machine,
            outcome: "refused",
            said: error.to_string(),
        };
        let wanted = match error {
            BmdbError::SecondPerson(wanted) => Some(wanted.clone()),
            _ => None,
        };
        let (line, must) = (Arc::new(line), wanted.is_some());
        let noted = self.transact("writing the audit", move |tx| {
            let (line, wanted) = (line.clone(), wanted.clone());
            Box::pin(async move {
                if let Some(wanted) = &wanted {
                    ask(tx, &line.order, wanted).await?;
                }
                insert(tx, &line, None, None).await.map(drop)
            })
        });
        if let Err(error) = noted.await {
            // What nobody can approve was not asked for.
            if must {
                return Err(error);
            }
            tracing::warn!(%error, rpc = order.rpc, "a refused order is in no audit");
        }
        carried
    }
}

async fn carry_out(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    machine: MachineId,
    decide: &Decide,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let rows = lock(tx, machine).await?;
    let found = version(tx, machine).await?;
    if let Some(expected) = order.expected_version.filter(|expected| *expected != found) {
        return Err(BmdbError::OtherVersion { machine: order.target.clone(), found, expected });
    }
    let known = Known {
        snapshot: read(tx, machine).await?,
        keys: host_keys(tx, machine).await?,
        labels: labels(tx, machine).await?,
    };
    let mut decision = decide(&known)?;
    if let Some(grave) = Grave::of_machine(&order.rpc).filter(|_| !decision.changes.is_empty()) {
        let policy = policy_of_version(bmdb, tx, known.snapshot.policy_version).await?;
        let by = gate(tx, order, grave, policy.second_person, &[]).await?;
        decision.answer.said = with_approval(decision.answer.said, by.as_deref());
    }
    let before = ordered_about(&known.snapshot.facts, known.keys.as_ref(), &known.labels);
    let mut after = before.clone();
    begin_attempt(tx, order).await?;
    if !decision.changes.is_empty() || !decision.events.is_empty() {
        for change in &decision.changes {
            apply(tx, machine, change).await?;
        }
        let rescheduled = reschedule(bmdb, tx, machine, &rows).await?;
        if version(tx, machine).await? == found {
            // The schedule is as it was, and what was ordered about is not: whoever saw it before must hear.
            sqlx::query_file!("sql/schedule/increment_version.sql", machine.0)
                .execute(&mut *tx)
                .await
                .doing(WHAT)?;
        }
        let (keys, labels) = (host_keys(tx, machine).await?, labels(tx, machine).await?);
        after = ordered_about(&rescheduled.snapshot.facts, keys.as_ref(), &labels);
        for (event, detail) in &decision.events {
            tell(tx, machine, event, detail).await?;
        }
    }
    end_attempt(tx, order).await?;
    write_down(tx, order, Some(machine), decision.answer, Some(before), Some(after)).await
}

/// A machine's labels.
pub async fn labels(tx: &mut PgConnection, machine: MachineId) -> Result<Labels, BmdbError> {
    let stored = sqlx::query_file_scalar!("sql/facts/read_labels.sql", machine.0)
        .fetch_optional(tx)
        .await
        .doing("reading a machine's labels")?;
    Ok(understood(stored))
}

/// Labels as they are stored. What is no label was written by nobody, and is passed over.
#[must_use]
pub fn understood(stored: Option<Value>) -> Labels {
    stored.and_then(|stored| serde_json::from_value(stored).ok()).unwrap_or_default()
}

/// Stands before whatever an order changes, so that a dry run can undo it.
pub(crate) async fn begin_attempt(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(SAVEPOINT)).await.doing(WHAT)?;
    }
    Ok(())
}

/// Undoes what a dry run changed since [`begin_attempt`].
pub(crate) async fn end_attempt(tx: &mut PgConnection, order: &Order) -> Result<(), BmdbError> {
    if order.dry_run {
        tx.execute(sqlx::raw_sql(UNDO)).await.doing(WHAT)?;
    }
    Ok(())
}

/// The version of a machine's schedule.
pub async fn version(tx: &mut PgConnection, machine: MachineId) -> Result<i64, BmdbError> {
    sqlx::query_file_scalar!("sql/inspect/read_machine_version.sql", machine.0)
        .fetch_optional(tx)
        .await
        .doing("reading a machine's version")?
        .ok_or_else(|| BmdbError::NoSuchMachine(machine.to_string()))
}

/// What was said to this order when it was given before.
pub(crate) async fn given_before(tx: &mut PgConnection, order: &Order) -> Result<Option<Carried>, BmdbError> {
    let Some(key) = order.idempotency_key.as_ref().filter(|_| !order.dry_run) else { return Ok(None) };
    let found = sqlx::query_file!("sql/audit/find_by_idempotency_key.sql", order.actor.name, key)
        .fetch_optional(tx)
        .await
        .doing("looking for an order in the audit")?;
    let Some(row) = found else { return Ok(None) };
    if row.request != order.request {
        return Err(BmdbError::KeyOfAnotherOrder { key: key.clone() });
    }
    Ok(Some(Carried {
        done: Done { changed: row.outcome == "changed", said: row.said },
        repeated: true,
        audit: row.audit_id,
        before: row.before,
        after: row.after,
    }))
}

/// What a line of the audit says, what it was about aside.
struct Line {
    order: Order,
    machine: Option<MachineId>,
    outcome: &'static str,
    said: String,
}

/// Writes the line of an order that was carried out into the audit.
pub(crate) async fn write_down(
    tx: &mut PgConnection,
    order: &Order,
    machine: Option<MachineId>,
    done: Done,
    before: Option<Value>,
    after: Option<Value>,
) -> Result<Carried, BmdbError> {
    let outcome = if done.changed { "changed" } else { "unchanged" };
    let line = Line { order: order.clone(), machine, outcome, said: done.said.clone() };
    let audit = insert(tx, &line, before.as_ref(), after.as_ref()).await?;
    Ok(Carried { done, repeated: false, audit, before, after })
}

async fn insert(
    tx: &mut PgConnection,
    line: &Line,
    before: Option<&Value>,
    after: Option<&Value>,
) -> Result<Uuid, BmdbError> {
    let (audit, order) = (Uuid::now_v7(), &line.order);
    let written = sqlx::query_file!(
        "sql/audit/insert.sql",
        audit,
        order.actor.name,
        order.actor.credential,
        order.rpc,
        order.target,
        line.machine.map(|machine| machine.0),
        order.reason,
        order.idempotency_key.as_deref(),
        order.request.as_slice(),
        order.dry_run,
        line.outcome,
        line.said,
        before,
        after,
    )
    .fetch_optional(tx)
    .await
    .doing("writing the audit")?;
    written.map(|_| audit).ok_or(BmdbError::OrderedAtOnce)
}

/// Lines of the audit, newest first, from the one after `after`; of one machine or of all.
pub async fn lines(
    tx: &mut PgConnection,
    machine: Option<MachineId>,
    (at, audit): (Timestamp, Uuid),
    limit: i64,
) -> Result<Vec<AuditLine>, BmdbError> {
    match machine {
        None => sqlx::query_file_as!(AuditLine, "sql/audit/list.sql", at, audit, limit).fetch_all(tx).await,
        Some(machine) => {
            sqlx::query_file_as!(AuditLine, "sql/audit/list_of_machine.sql", at, audit, limit, machine.0)
                .fetch_all(tx)
                .await
        }
    }
    .doing("reading the audit")
}
