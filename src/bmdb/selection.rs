//! One order about many machines: all that a filter means.
//!
//! The head of such an order is a transaction of its own. It finds the machines, asks
//! [`crate::model::order_limits::admit`], and writes a line into the audit that holds them by name; from then on
//! the order is about those and no others. What follows is one order about each of them, in a transaction of its
//! own with a line of its own, as if somebody had given it there: so nothing holds many machines locked, and
//! what is refused on one machine keeps no other from it.
//!
//! Each of these orders has a key made of the whole order's and the machine's id. Whoever did not hear the end,
//! because a server died in the middle, gives the whole order again with the same key: the head's line says
//! which machines were chosen, those that have it are passed over, and the rest get it. A filter that means
//! other machines by then changes nothing about that.

use std::sync::Arc;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::approval::{gate, with_approval};
use crate::bmdb::audit::{Order, given_before, request_digest, write_down};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::each::Each;
use crate::bmdb::error::BmdbError;
use crate::bmdb::find::id_of;
use crate::bmdb::listing::{Filter, lines, machines};
use crate::model::access::Scope;
use crate::model::machine_view::MachineName;
use crate::model::order_limits::{Asked, MOST, admit, count, goes_beyond};
use crate::model::phase::Phase;
use crate::model::second_person::Grave;

/// The call that gives such an order, as the audit names it.
pub const RPC: &str = "shepherd.fleet.v1.Orders/Give";
const WHAT: &str = "choosing the machines of an order";
/// The lease whose row is locked while such orders are counted.
const BUDGET: &str = "orders";

/// Which machines an order is to be about.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Those that this means.
    pub filter: Filter,
    /// Of those that this reaches.
    pub scope: Scope,
    /// How many are expected.
    pub expected: Option<usize>,
    /// Whether it may go beyond the limits.
    pub beyond_limits: bool,
    /// Whether whoever orders may say so.
    pub admin: bool,
}

/// What became of an order on one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Which.
    pub name: MachineName,
    /// What became of it.
    pub done: Done,
    /// Whether it was refused there.
    pub refused: bool,
}

/// What became of an order about many machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// A line a machine.
    pub outcomes: Vec<Outcome>,
    /// Whether it was given before.
    pub repeated: bool,
    /// The line of its head in the audit.
    pub audit: Uuid,
    /// Of a dry run: why it would be refused.
    pub refusal: Option<String>,
}

/// The head of such an order.
struct Head {
    chosen: Vec<MachineName>,
    repeated: bool,
    audit: Uuid,
    refusal: Option<String>,
}

impl Bmdb {
    /// Gives an order about every machine that is selected, on behalf of `who`.
    pub async fn order_many(
        &self,
        order: Order,
        selection: Selection,
        each: Each,
        who: String,
    ) -> Result<Given, BmdbError> {
        self.read_policy().await?;
        let (bmdb, selection, given) = (self.clone(), Arc::new(selection), order.clone());
        let wanted = order.clone();
        let head = self
            .ordered(WHAT, move |tx| {
                let (bmdb, order, selection) = (bmdb.clone(), wanted.clone(), selection.clone());
                Box::pin(async move { choose(&bmdb, tx, &order, &selection).await })
            })
            .await;
        let head = self.note_refusal(head, &given, None).await?;
        let mut outcomes = Vec::with_capacity(head.chosen.len());
        for name in head.chosen {
            if order.dry_run {
                let done = Done { changed: false, said: "is meant".to_owned() };
                outcomes.push(Outcome { name, done, refused: false });
                continue;
            }
            let one = of_one(&order, &name, &each);
            let carried = self.order_each(one, id_of(&name), each.clone(), who.clone()).await;
            outcomes.push(outcome(name, carried.map(|carried| carried.done))?);
        }
        Ok(Given { outcomes, repeated: head.repeated, audit: head.audit, refusal: head.refusal })
    }
}

/// The part of an order that is about one machine.
fn of_one(order: &Order, name: &MachineName, each: &Each) -> Order {
    let mut said = order.request.to_vec();
    said.extend(name.machine.as_bytes());
    Order {
        rpc: each.rpc().to_owned(),
        target: name.short(),
        idempotency_key: order.idempotency_key.as_ref().map(|key| format!("{key}/{}", name.machine)),
        request: request_digest(&said),
        ..order.clone()
    }
}

/// What is refused for what it found on one machine is told; what failed, fails the whole, and is given again.
fn outcome(name: MachineName, carried: Result<Done, BmdbError>) -> Result<Outcome, BmdbError> {
    match carried {
        Ok(done) => Ok(Outcome { name, done, refused: false }),
        Err(
            error @ (BmdbError::NewerRules { .. }
            | BmdbError::NoSuchMachine(_)
            | BmdbError::KeyOfAnotherOrder { .. }
            | BmdbError::OrderRefused { .. }),
        ) => {
            let done = Done { changed: false, said: format!("was left as it is: {error}") };
            Ok(Outcome { name, done, refused: true })
        }
        Err(error) => Err(error),
    }
}

async fn choose(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    selection: &Selection,
) -> Result<Head, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        let chosen = named(tx, &chosen_before(carried.after.as_ref())?).await?;
        return Ok(Head { chosen, repeated: true, audit: carried.audit, refusal: None });
    }
    let page = machines(tx, &selection.filter, &selection.scope, None, MOST + 1, usize::MAX).await?;
    let lines = page.machines.into_iter().map(|listed| listed.line);
    let chosen: Vec<MachineName> =
        lines.filter(|line| is_meant(&selection.filter, &line.phase)).map(|line| line.name).collect();
    sqlx::query_file!("sql/intent/lock_budget.sql", BUDGET).fetch_one(&mut *tx).await.doing(WHAT)?;
    let within_hour = sqlx::query_file_scalar!("sql/audit/count_machines_in_last_hour.sql", RPC)
        .fetch_one(&mut *tx)
        .await
        .doing(WHAT)?;
    let found = chosen.len();
    let asked = Asked {
        found,
        // Whoever only looks need not know the number yet.
        expected: selection.expected.or(order.dry_run.then_some(found)),
        everybody: selection.filter.means_everybody(),
        beyond_limits: selection.beyond_limits,
        admin: selection.admin,
        within_hour: u64::try_from(within_hour).unwrap_or(0),
    };
    let (_, policy) = bmdb.policy();
    let refusal = admit(&asked, policy.order_limits).err();
    if let Some(refusal) = refusal.as_ref().filter(|_| !order.dry_run) {
        return Err(BmdbError::OrderRefused { reason: refusal.reason, said: refusal.said.clone() });
    }
    let ids: Vec<Uuid> = chosen.iter().map(|name| name.machine).collect();
    let by = if goes_beyond(&asked, policy.order_limits) {
        // The machines that were approved, and not others that the filter means by then.
        let mut about: Vec<Uuid> = ids.clone();
        about.sort_unstable();
        let about: Vec<u8> = about.iter().flat_map(|id| *id.as_bytes()).collect();
        let order = Order { target: meant(found, &selection.filter), ..order.clone() };
        gate(tx, &order, Grave::BeyondLimits, policy.second_person, &about).await?
    } else {
        None
    };
    let said = with_approval(format!("is given about {}", count(found)), by.as_deref());
    let done = Done { changed: found > 0, said };
    let before = json!({ "filter": told(&selection.filter), "beyond_limits": selection.beyond_limits });
    let after = json!({ "machines": ids });
    let carried = write_down(tx, order, None, done, Some(before), Some(after)).await?;
    let refusal = refusal.map(|refusal| refusal.said);
    Ok(Head { chosen, repeated: false, audit: carried.audit, refusal })
}

/// Whether a machine of this phase that a filter means is one to be ordered about: what is retired is only a record,
/// and is meant when its phase is named.
fn is_meant(filter: &Filter, phase: &str) -> bool {
    let retired = Phase::Retired.as_str();
    phase != retired || filter.phases.iter().any(|named| named.eq_ignore_ascii_case(retired))
}

/// The machines of an order that was given before.
fn chosen_before(after: Option<&Value>) -> Result<Vec<Uuid>, BmdbError> {
    let listed = after.and_then(|after| after.get("machines")).cloned().unwrap_or_default();
    serde_json::from_value(listed).map_err(|error| {
        BmdbError::Corrupt(format!("an order's line in the audit names no machines: {error}"))
    })
}

async fn named(tx: &mut PgConnection, ids: &[Uuid]) -> Result<Vec<MachineName>, BmdbError> {
    let found = lines(tx, &Filter::default(), &Scope::Everything, ids).await?;
    let mut names: Vec<MachineName> = found.into_iter().map(|listed| listed.line.name).collect();
    names.sort_by_key(|name| ids.iter().position(|id| *id == name.machine));
    Ok(names)
}

/// Which machines those are, for whoever is to approve it.
fn meant(found: usize, filter: &Filter) -> String {
    let mut told = told(filter);
    if let Value::Object(fields) = &mut told {
        fields.retain(|_, values| values.as_array().is_none_or(|values| !values.is_empty()));
    }
    if filter.means_everybody() {
        format!("{}: all there are", count(found))
    } else {
        format!("{}: {told}", count(found))
    }
}

/// A filter as the audit says it.
fn told(filter: &Filter) -> Value {
    json!({
        "phases": filter.phases,
        "providers": filter.providers,
        "locations": filter.locations,
        "tags": filter.tags,
        "manufacturers": filter.manufacturers,
        "products": filter.products,
        "labels": filter.labels.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
