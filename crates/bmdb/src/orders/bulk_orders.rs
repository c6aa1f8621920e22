//! Bulk orders: one order about every machine that a selector selects, or that the order names.
//!
//! The head of such an order is a transaction of its own. It finds the machines, asks
//! [`model::order_limits::check_order_limits`], and writes a line into the audit that names them; from then on
//! the order is about these machines and no others. One order about each machine follows, in a transaction of its own
//! with a line of its own, as if an operator had given it there. So nothing holds many machines locked, and a rejection
//! on one machine keeps no other from the order.
//!
//! Each of these orders has a key made of the whole order's key and the machine's id. A client that did not receive the
//! end, because a server died in the middle, gives the whole order again with the same key: the head's line names the
//! chosen machines, those that have the order are passed over, and the rest get it. A selector that selects other
//! machines by then changes nothing about that.
//!
//! The number of machines is right only if all of them are found, so the search for them has no pages. It looks at a bounded
//! number of machines, and the order is rejected if there are more.
//!
//! A dry run that would be accepted is a dry run on each machine too, so that its outcomes are those of the order. It
//! cannot continue where it ended, so it decides on no machine if there are more than `MAX_DRY_RUN_MACHINES`.

use std::sync::Arc;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, read_clock};
use crate::engine::policy::read_policy_in_tx;
use crate::fleet::listing::{Filter, list_machines, list_machines_by_id};
use crate::machine::lookup::machine_id;
use crate::orders::approval::{append_approver, require_second_approval};
use crate::orders::audit::{find_by_idempotency_key, record_audit};
use crate::orders::machine_order::MachineOrder;
use crate::orders::order::{Order, OrderEffect, OrderOutcome, OutcomeKind, request_digest};
use model::access::AccessScope;
use model::machine_view::MachineName;
use model::order_limits::{
    BulkOrder, MAX_MACHINES, check_order_limits, exceeds_limits, format_machine_count,
    reject_unfinished_search,
};
use model::rpc_name::SUBMIT_BULK_ORDER_RPC;
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "choosing the machines of an order";
/// Most machines that a dry run decides on, each in a transaction of its own. They must be done before a call times out.
const MAX_DRY_RUN_MACHINES: usize = 1_000;
/// Most machines that an admin reads by their names before approving an order that names them.
const MAX_DESCRIBED_NAMES: usize = 20;
/// The lease whose row is locked while bulk orders are counted.
const BUDGET_NAME: &str = "orders";

/// Machines that a bulk order names.
#[derive(Clone, Debug)]
pub struct NamedMachines {
    /// The machines, each once.
    pub machines: Vec<Uuid>,
    /// Whether the order must give their number, because nothing undoes it.
    pub must_be_counted: bool,
}

/// The machines that a bulk order is about.
#[derive(Clone, Debug)]
pub struct MachineSelection {
    /// Selects the machines by their properties.
    pub filter: Filter,
    /// The machines that the order names, in place of the selector; `None` for those of the selector.
    pub named: Option<NamedMachines>,
    /// Restricts them to the machines that the actor may reach.
    pub scope: AccessScope,
    /// How many machines the actor expects; `None` if not given.
    pub expected: Option<usize>,
    /// Whether the actor overrides the limits.
    pub beyond_limits: bool,
    /// Whether the actor is an admin, who alone may override the limits.
    pub is_admin: bool,
    /// How many machines a selector may look at: [`model::order_limits::MAX_EXAMINED_MACHINES`], less in tests.
    pub max_examined: usize,
}

/// The outcome of an order on one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineOutcome {
    /// Names of the machine.
    pub name: MachineName,
    /// What the order did there, with its message. Nothing was decided in a dry run of an order that would be rejected
    /// or is about too many machines.
    pub outcome: OrderOutcome,
    /// Whether the order was rejected there.
    pub rejected: bool,
}

/// The result of a bulk order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BulkOrderResult {
    /// One outcome for each machine.
    pub outcomes: Vec<MachineOutcome>,
    /// Whether the order was given before.
    pub replayed: bool,
    /// Id of the head's line in the audit.
    pub audit_id: Uuid,
    /// Why the order would be rejected; only in a dry run.
    pub rejection: Option<String>,
    /// Why nothing was decided on the machines, as a sentence; only in a dry run that would be accepted.
    pub undecided_reason: Option<String>,
}

/// The head of a bulk order.
struct BulkOrderHead {
    machines: Vec<MachineName>,
    replayed: bool,
    audit_id: Uuid,
    rejection: Option<String>,
}

impl Bmdb {
    /// Carries out an order on every selected machine, on behalf of `who`.
    pub async fn execute_bulk_order(
        &self,
        order: Order,
        selection: MachineSelection,
        each: MachineOrder,
        who: String,
    ) -> Result<BulkOrderResult, BmdbError> {
        self.read_policy().await?;
        let (order, arguments) = (Arc::new(order), (selection, each.clone()));
        let head = self
            .run_order_transaction(OPERATION, &order, arguments, |tx, order, (selection, each)| {
                Box::pin(choose_machines(tx, order, selection, each))
            })
            .await;
        let head = self.audit_rejection(head, &order, None).await?;
        let undecided_reason = if order.dry_run && head.rejection.is_none() {
            explain_undecided(head.machines.len())
        } else {
            None
        };
        let mut outcomes = Vec::with_capacity(head.machines.len());
        for name in head.machines {
            if head.rejection.is_some() || undecided_reason.is_some() {
                let message = "is selected; nothing was decided on it".to_owned();
                let done = OrderOutcome { kind: OutcomeKind::NoEffect, message };
                outcomes.push(MachineOutcome { name, outcome: done, rejected: false });
                continue;
            }
            let one = order_for_machine(&order, &name, &each);
            let carried = self.execute_machine_order(one, machine_id(&name), each.clone(), who.clone()).await;
            outcomes.push(machine_outcome(name, carried.map(|carried| carried.outcome))?);
        }
        Ok(BulkOrderResult {
            outcomes,
            replayed: head.replayed,
            audit_id: head.audit_id,
            rejection: head.rejection,
            undecided_reason,
        })
    }
}

/// Why a dry run decides on none of so many machines; `None` if it decides on each.
fn explain_undecided(machines: usize) -> Option<String> {
    (machines > MAX_DRY_RUN_MACHINES).then(|| {
        format!(
            "a dry run decides on at most {MAX_DRY_RUN_MACHINES} machines, so the effect on these {machines} is not \
             known"
        )
    })
}

/// The part of a bulk order that is about one machine.
fn order_for_machine(order: &Order, name: &MachineName, each: &MachineOrder) -> Order {
    let mut bytes = order.request_digest.to_vec();
    bytes.extend(name.machine.as_bytes());
    Order {
        rpc: each.rpc().to_owned(),
        target: name.short_name(),
        idempotency_key: order.idempotency_key.as_ref().map(|key| format!("{key}/{}", name.machine)),
        request_digest: request_digest(&bytes),
        ..order.clone()
    }
}

/// An order that is rejected on one machine is an outcome of that machine. Any other error fails the whole bulk order,
/// which can be given again.
fn machine_outcome(
    name: MachineName,
    carried: Result<OrderOutcome, BmdbError>,
) -> Result<MachineOutcome, BmdbError> {
    match carried {
        Ok(done) => Ok(MachineOutcome { name, outcome: done, rejected: false }),
        Err(
            error @ (BmdbError::NewerRules { .. }
            | BmdbError::NoSuchMachine(_)
            | BmdbError::IdempotencyKeyReused { .. }
            | BmdbError::OrderRejected { .. }),
        ) => {
            let message = format!("was left as it is: {error}");
            let done = OrderOutcome { kind: OutcomeKind::NoEffect, message };
            Ok(MachineOutcome { name, outcome: done, rejected: true })
        }
        Err(error) => Err(error),
    }
}

async fn choose_machines(
    tx: &mut PgConnection,
    order: &Order,
    selection: &MachineSelection,
    each: &MachineOrder,
) -> Result<BulkOrderHead, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        let stored = stored_machines(carried.after.as_ref())?;
        let chosen = read_machine_names(tx, &AccessScope::Fleet, &stored).await?;
        return Ok(BulkOrderHead {
            machines: chosen,
            replayed: true,
            audit_id: carried.audit_id,
            rejection: None,
        });
    }
    let now = read_clock(tx).await.context(OPERATION)?;
    each.check_expiry(now).map_err(|(reason, text)| order_rejected(reason, text))?;
    let chosen = match &selection.named {
        Some(named) => read_machine_names(tx, &selection.scope, &named.machines).await?,
        None => select_machines(tx, selection).await?,
    };
    sqlx::query_file!("../../sql/intent/lock_budget.sql", BUDGET_NAME)
        .fetch_one(&mut *tx)
        .await
        .context(OPERATION)?;
    let within_hour =
        sqlx::query_file_scalar!("../../sql/audit/count_machines_in_last_hour.sql", SUBMIT_BULK_ORDER_RPC)
            .fetch_one(&mut *tx)
            .await
            .context(OPERATION)?;
    let found = chosen.len();
    let bulk_order = BulkOrder {
        matched: found,
        is_named: selection.named.is_some(),
        must_be_counted: selection.named.as_ref().is_none_or(|named| named.must_be_counted),
        // A dry run need not name the expected number.
        expected: selection.expected.or(order.dry_run.then_some(found)),
        matches_all: selection.named.is_none() && selection.filter.is_unrestricted(),
        overrides_limits: selection.beyond_limits,
        is_admin: selection.is_admin,
        ordered_last_hour: u64::try_from(within_hour).unwrap_or(0),
    };
    let policy = read_policy_in_tx(tx).await?;
    let refusal = check_order_limits(&bulk_order, policy.order_limits).err();
    if let Some(refusal) = refusal.as_ref().filter(|_| !order.dry_run) {
        return Err(order_rejected(refusal.reason, refusal.message.clone()));
    }
    let ids: Vec<Uuid> = chosen.iter().map(|name| name.machine).collect();
    let by = if exceeds_limits(&bulk_order, policy.order_limits) {
        // Exactly the machines that were approved, not others that are selected by then.
        let mut about: Vec<Uuid> = ids.clone();
        about.sort_unstable();
        let about: Vec<u8> = about.iter().flat_map(|id| *id.as_bytes()).collect();
        let target = format!("{}: {}", each.describe(), describe_selection(&chosen, selection));
        let order = Order { target, ..order.clone() };
        require_second_approval(tx, &order, SensitiveOrder::BeyondLimits, policy.two_person_rule, &about)
            .await?
    } else {
        None
    };
    let text = append_approver(format!("is given about {}", format_machine_count(found)), by.as_deref());
    let kind = if found > 0 { OutcomeKind::Changed } else { OutcomeKind::NoEffect };
    let outcome = OrderOutcome { kind, message: text };
    // `after` has the machines, also those that the order names.
    let selector = selection.named.is_none().then(|| selection.filter.selector.to_string());
    let before = json!({ "selector": selector, "beyond_limits": selection.beyond_limits });
    let after = json!({ "machines": ids });
    let effect = OrderEffect { outcome, before: Some(before), after: Some(after) };
    let carried = record_audit(tx, order, None, effect).await?;
    let refusal = refusal.map(|refusal| refusal.message);
    Ok(BulkOrderHead { machines: chosen, replayed: false, audit_id: carried.audit_id, rejection: refusal })
}

/// The machines that the selector selects.
async fn select_machines(
    tx: &mut PgConnection,
    selection: &MachineSelection,
) -> Result<Vec<MachineName>, BmdbError> {
    // A retired machine is only a record, so it is included only when the selector names its phase.
    let filter = Filter { omit_retired: true, ..selection.filter.clone() };
    let most = MAX_MACHINES + 1;
    let page = list_machines(tx, &filter, &selection.scope, None, most, selection.max_examined).await?;
    // The search ended before it had seen every machine, and before it had found too many.
    if page.next.is_some() && page.machines.len() < most {
        let refusal = reject_unfinished_search(selection.max_examined);
        return Err(order_rejected(refusal.reason, refusal.message));
    }
    Ok(page.machines.into_iter().map(|listed| listed.summary.name).collect())
}

/// The machines of an order that was given before.
fn stored_machines(after: Option<&Value>) -> Result<Vec<Uuid>, BmdbError> {
    let listed = after.and_then(|after| after.get("machines")).cloned().unwrap_or_default();
    serde_json::from_value(listed).map_err(|error| {
        BmdbError::Corrupt(format!("an order's line in the audit names no machines: {error}"))
    })
}

/// The names of those of these machines that are within the scope, in their order.
async fn read_machine_names(
    tx: &mut PgConnection,
    scope: &AccessScope,
    ids: &[Uuid],
) -> Result<Vec<MachineName>, BmdbError> {
    let found = list_machines_by_id(tx, &Filter::default(), scope, ids).await?;
    Ok(found.into_iter().map(|listed| listed.summary.name).collect())
}

/// A phrase that describes the selected machines to the admin who approves the order.
fn describe_selection(chosen: &[MachineName], selection: &MachineSelection) -> String {
    let filter = &selection.filter;
    let found = chosen.len();
    if selection.named.is_some() {
        let mut names: Vec<String> =
            chosen.iter().take(MAX_DESCRIBED_NAMES).map(MachineName::short_name).collect();
        if found > names.len() {
            names.push("…".to_owned());
        }
        return format!("{}: {}", format_machine_count(found), names.join(", "));
    }
    if filter.is_unrestricted() {
        format!("{}: all there are", format_machine_count(found))
    } else {
        format!("{}: {}", format_machine_count(found), filter.selector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dry_run_decides_on_no_more_machines_than_it_can() {
        assert_eq!(explain_undecided(MAX_DRY_RUN_MACHINES), None);
        let reason = explain_undecided(MAX_DRY_RUN_MACHINES + 1).unwrap();
        assert_eq!(
            reason,
            "a dry run decides on at most 1000 machines, so the effect on these 1001 is not known"
        );
    }
}
