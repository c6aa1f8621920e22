//! Orders about one machine: as data, decided on a snapshot, and executed under the machine's lock.
//!
//! [`crate::orders::machine_decision`] decides their outcome. The same order can be given for one machine and for many
//! ([`crate::orders::bulk_orders`]).

use std::sync::Arc;

use sqlx::PgConnection;

use crate::cluster::selectors::list_cluster_selectors;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::change_machine::Decision;
use crate::engine::fact_change::{FactChange, apply_fact_change};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::{lock_due_rows, read_machine_version, record_event, reschedule_machine};
use crate::machine::host_key::read_host_keys;
use crate::machine::traits::read_labels;
use crate::orders::approval::{append_approver, require_second_approval};
use crate::orders::credential::find_by_id;
use crate::orders::machine_decision::{
    allow_host_key, audit_state, hold_machine, label_machine, prioritize_machine, quarantine_machine,
    release_machine, retry_machine,
};
use crate::orders::order::{
    EXPIRY_PASSED, Expiry, Order, OrderEffect, OrderOutcome, OrderRejection, OrderResult, format_attribution,
};
use crate::orders::power_order::{cancel_power_order, order_switch};
use crate::orders::retirement::{cancel_retirement, retire_machine};
use model::access::{AccessRole, AccessScope};
use model::cluster::label_rights::check_label_change;
use model::facts::{HoldScope, Retirement};
use model::host_key::PinnedHostKey;
use model::humanize::absolute_time;
use model::ids::MachineId;
use model::label::Labels;
use model::policy::Policy;
use model::power_order::PowerOrderKind;
use model::priority::PriorityLevel;
use model::rpc_name::{
    CANCEL_POWER_RPC, CANCEL_RETIRE_RPC, HOLD_RPC, LABEL_RPC, POWER_RPC, PRIORITIZE_RPC, QUARANTINE_RPC,
    REBOOT_RPC, RELEASE_RPC, RETIRE_RPC, RETRY_RPC,
};
use model::time::Timestamp;
use model::two_person_rule::SensitiveOrder;

const OPERATION: &str = "carrying out an order";

/// What an order about a machine is decided on.
#[derive(Clone, Debug)]
pub struct OrderContext {
    /// Facts, clock and policy version.
    pub snapshot: MachineSnapshot,
    /// Its host keys; `None` before the first connection.
    pub host_keys: Option<PinnedHostKey>,
    /// Its labels as they are stored.
    pub labels: Labels,
    /// The policy at the version of the snapshot.
    pub policy: Arc<Policy>,
}

/// An order about a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineOrder {
    /// Put a hold on the machine.
    Hold {
        /// Which kinds of work it stops.
        scope: HoldScope,
        /// When it ends by itself; `None` is never.
        until: Option<Expiry>,
    },
    /// End its hold, or its quarantine.
    Release {
        /// Whether to end its quarantine instead of its hold.
        quarantine: bool,
    },
    /// Try again at once what failed.
    Retry,
    /// Quarantine it by order of an operator.
    Quarantine,
    /// Retire it: release it to its provider.
    Retire {
        /// Whether to wipe it first.
        wipe: bool,
        /// Whether its cluster keeps its authority when the machine leaves it.
        keep_authority: bool,
    },
    /// Cancel its retirement, as an order about many machines. One that cancels a wipe is an order about one machine.
    CancelRetire,
    /// Reboot it, or switch its power.
    Power(PowerOrderKind),
    /// Cancel its power order.
    CancelPower,
    /// Put its work before or behind that of others.
    Prioritize {
        /// Whether before, behind, or as usual.
        level: PriorityLevel,
        /// When that ends by itself; `None` is never.
        until: Option<Expiry>,
    },
    /// Set and remove labels.
    Label {
        /// Labels to add or replace.
        set: Labels,
        /// Keys of labels to remove.
        remove: Vec<String>,
    },
}

impl MachineOrder {
    /// The RPC that gives this order about one machine, as the audit names it.
    #[must_use]
    pub const fn rpc(&self) -> &'static str {
        match self {
            Self::Hold { .. } => HOLD_RPC,
            Self::Release { .. } => RELEASE_RPC,
            Self::Retry => RETRY_RPC,
            Self::Quarantine => QUARANTINE_RPC,
            Self::Retire { .. } => RETIRE_RPC,
            Self::CancelRetire => CANCEL_RETIRE_RPC,
            Self::CancelPower => CANCEL_POWER_RPC,
            Self::Power(PowerOrderKind::Reboot) => REBOOT_RPC,
            Self::Power(_) => POWER_RPC,
            Self::Prioritize { .. } => PRIORITIZE_RPC,
            Self::Label { .. } => LABEL_RPC,
        }
    }

    /// What the order does, for the admin who approves it for many machines.
    #[must_use]
    pub fn describe(&self) -> String {
        let end =
            |until: Option<Expiry>| until.map_or_else(String::new, |end| format!(" {}", end.describe()));
        match self {
            Self::Hold { scope, until } => format!("hold on {}{}", scope.as_str(), end(*until)),
            Self::Release { quarantine: true } => "end of the quarantine".to_owned(),
            Self::Release { quarantine: false } => "end of the hold".to_owned(),
            Self::Retry => "retry".to_owned(),
            Self::Quarantine => "quarantine".to_owned(),
            Self::Retire { wipe, keep_authority } => {
                let wiped = if *wipe { "with a wipe" } else { "without a wipe" };
                let kept = if *keep_authority { ", their clusters keep their authorities" } else { "" };
                format!("retirement {wiped}{kept}")
            }
            Self::CancelRetire => "end of the retirement".to_owned(),
            Self::Power(kind) => format!("power order {kind}"),
            Self::CancelPower => "end of the power order".to_owned(),
            Self::Prioritize { level, until } => format!("priority {level}{}", end(*until)),
            Self::Label { set, remove } => {
                let set = set.iter().map(|(key, value)| format!("+{key}={value}"));
                let changes: Vec<String> = set.chain(remove.iter().map(|key| format!("-{key}"))).collect();
                format!("labels {}", changes.join(" "))
            }
        }
    }

    /// Checks that the order is not over at `now`; the error is why it is. It would be rejected on every machine.
    pub(crate) fn check_expiry(&self, now: Timestamp) -> Result<(), OrderRejection> {
        let until = match self {
            Self::Hold { until, .. } => *until,
            Self::Prioritize { level, until } if *level != PriorityLevel::Normal => *until,
            _ => None,
        };
        match until.map(|until| until.resolve(now)).filter(|until| *until <= now) {
            None => Ok(()),
            Some(over) => Err((
                EXPIRY_PASSED,
                format!("no machine gets the order: {} is over; nothing was changed", absolute_time(over)),
            )),
        }
    }

    /// Decides what the order changes on a machine, on behalf of `who`.
    pub fn decide(
        &self,
        known: &OrderContext,
        who: &str,
        reason: Option<&str>,
    ) -> Result<Decision<OrderOutcome>, BmdbError> {
        let facts = &known.snapshot.facts;
        Ok(match self {
            Self::Hold { scope, until } => {
                hold_machine(&known.snapshot, *scope, reason.unwrap_or_default(), who, *until)
                    .map_err(|(reason, text)| order_rejected(reason, text))?
            }
            Self::Release { quarantine } => {
                release_machine(facts, *quarantine, &format_attribution(who, reason))
            }
            Self::Retry => retry_machine(&known.snapshot, &known.policy, &format_attribution(who, reason)),
            Self::Quarantine => quarantine_machine(facts, &format_attribution(who, reason)),
            Self::Retire { wipe, keep_authority } => {
                let how = (*wipe, *keep_authority);
                retire_machine(&known.snapshot, how, reason.unwrap_or_default(), who)
                    .map_err(|(reason, text)| order_rejected(reason, text))?
            }
            Self::CancelRetire => {
                if facts.retirement.as_ref().is_some_and(Retirement::is_wipe_pending) {
                    let text = "will be wiped before it is given back; an admin cancels that in an order about this \
                                machine alone. Nothing was changed";
                    return Err(order_rejected("WIPE_PENDING", text));
                }
                // Without a pending wipe, each role that gives orders may cancel it.
                cancel_retirement(&known.snapshot, &format_attribution(who, reason), AccessRole::Operator)
                    .map_err(|(reason, text)| order_rejected(reason, text))?
            }
            Self::Power(switch) => order_switch(&known.snapshot, *switch, reason.unwrap_or_default(), who)
                .map_err(|(reason, text)| order_rejected(reason, text))?,
            Self::CancelPower => cancel_power_order(facts, &format_attribution(who, reason))
                .map_err(|(reason, text)| order_rejected(reason, text))?,
            Self::Prioritize { level, until } => {
                prioritize_machine(&known.snapshot, *level, reason.unwrap_or_default(), who, *until)
                    .map_err(|(reason, text)| order_rejected(reason, text))?
            }
            Self::Label { set, remove } => {
                label_machine(&known.labels, set, remove, &format_attribution(who, reason))
                    .map_err(|error| order_rejected("LABELS", error))?
            }
        })
    }
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
        self.execute_decision(order, machine, Box::new(move |known| Ok(decide(&known.snapshot)))).await
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
            decide(&known.snapshot).map_err(|(reason, text)| order_rejected(reason, text))
        };
        self.execute_decision(order, machine, Box::new(decide)).await
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
                .map_err(|reason| order_rejected("NO_SUCH_KEY", reason))
        };
        self.execute_decision(order, machine, Box::new(decide)).await
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
        self.execute_decision(
            order,
            machine,
            Box::new(move |known| each.decide(known, &who, reason.as_deref())),
        )
        .await
    }

    async fn execute_decision(
        &self,
        order: Order,
        machine: MachineId,
        decide: Box<DecideFn>,
    ) -> Result<OrderResult, BmdbError> {
        let arguments = (self.clone(), machine, decide);
        self.execute_order(OPERATION, order, Some(machine), arguments, |tx, order, arguments| {
            let (bmdb, machine, decide) = arguments;
            Box::pin(execute_decision_in_tx(bmdb, tx, order, *machine, &**decide))
        })
        .await
    }
}

/// Rejects a change of labels that needs another role or scope than the actor has. A person who writes to the database
/// directly has every role.
async fn check_label_rights(
    tx: &mut PgConnection,
    order: &Order,
    present: &Labels,
    changes: &[FactChange],
) -> Result<(), BmdbError> {
    let new = changes.iter().find_map(|change| match change {
        FactChange::LabelsSet(labels) => Some(labels),
        _ => None,
    });
    let (Some(new), Some(credential)) = (new, order.actor.credential) else { return Ok(()) };
    // Without its row, it has the least role that gives orders.
    let (role, scope) = find_by_id(tx, credential)
        .await?
        .map_or((AccessRole::Operator, AccessScope::Fleet), |found| (found.role, found.scope));
    let clusters = list_cluster_selectors(tx).await?;
    check_label_change((role, &scope), present, new, &clusters)
        .map_err(|reason| order_rejected("NOT_A_DEPLOYER", reason))
}

/// The machine and what the order does there, for the admin who approves it.
fn approval_target(machine: &str, message: &str) -> String {
    format!("{machine}: it {message}")
}

async fn execute_decision_in_tx(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    order: &Order,
    machine: MachineId,
    decide: &DecideFn,
) -> Result<OrderEffect, BmdbError> {
    let rows = lock_due_rows(tx, machine).await?;
    let found = read_machine_version(tx, machine).await?;
    if let Some(expected) = order.expected_version.filter(|expected| *expected != found) {
        return Err(BmdbError::VersionMismatch { machine: order.target.clone(), found, expected });
    }
    let snapshot = read_snapshot(tx, machine).await?;
    let known = OrderContext {
        policy: policy_at_version(bmdb, tx, snapshot.policy_version).await?,
        snapshot,
        host_keys: read_host_keys(tx, machine).await?,
        labels: read_labels(tx, machine).await?,
    };
    let mut decision = decide(&known)?;
    check_label_rights(tx, order, &known.labels, &decision.changes).await?;
    let wipe_is_pending = known.snapshot.facts.retirement.as_ref().is_some_and(Retirement::is_wipe_pending);
    let sensitive = SensitiveOrder::from_rpc(&order.rpc, wipe_is_pending);
    if let Some(kind) = sensitive.filter(|_| !decision.changes.is_empty()) {
        let shown =
            Order { target: approval_target(&order.target, &decision.output.message), ..order.clone() };
        // Exactly this machine and this effect: another machine may have the name by then, or be at another stage.
        let about = [machine.0.as_bytes().as_slice(), decision.output.message.as_bytes()].concat();
        let by = require_second_approval(tx, &shown, kind, known.policy.two_person_rule, &about).await?;
        decision.output.message = append_approver(decision.output.message, by.as_deref());
    }
    let before = audit_state(&known.snapshot.facts, known.host_keys.as_ref(), &known.labels);
    let mut after = before.clone();
    if !decision.changes.is_empty() || !decision.events.is_empty() {
        for change in &decision.changes {
            apply_fact_change(tx, machine, change).await?;
        }
        let rescheduled = reschedule_machine(bmdb, tx, machine, &rows).await?;
        if read_machine_version(tx, machine).await? == found {
            // The schedule is unchanged, but the order's target is not: clients that read it before must see a new
            // version.
            sqlx::query!(
                "UPDATE machine_due SET version = version + 1 WHERE machine_id = $1 AND lane = 'access'",
                machine.0
            )
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
    Ok(OrderEffect { outcome: decision.output, before: Some(before), after: Some(after) })
}

#[cfg(test)]
mod tests {
    use super::*;

    use model::time::Span;

    #[test]
    fn approver_reads_what_is_done_to_the_machines() {
        let hour = Some(Expiry::After(Span::hours(1)));
        let set: Labels = [("rack".to_owned(), "7".to_owned())].into_iter().collect();
        for (order, expected) in [
            (MachineOrder::Retry, "retry"),
            (MachineOrder::Quarantine, "quarantine"),
            (MachineOrder::Release { quarantine: true }, "end of the quarantine"),
            (MachineOrder::Release { quarantine: false }, "end of the hold"),
            (MachineOrder::Hold { scope: HoldScope::Power, until: hour }, "hold on power for 1h"),
            (MachineOrder::Retire { wipe: false, keep_authority: false }, "retirement without a wipe"),
            (
                MachineOrder::Retire { wipe: true, keep_authority: true },
                "retirement with a wipe, their clusters keep their authorities",
            ),
            (MachineOrder::CancelRetire, "end of the retirement"),
            (MachineOrder::Power(PowerOrderKind::Reboot), "power order reboot"),
            (MachineOrder::CancelPower, "end of the power order"),
            (MachineOrder::Prioritize { level: PriorityLevel::Low, until: None }, "priority low"),
            (MachineOrder::Label { set, remove: vec!["old".to_owned()] }, "labels +rack=7 -old"),
        ] {
            assert_eq!(order.describe(), expected);
        }
    }

    #[test]
    fn order_that_is_over_is_rejected_for_all_machines() {
        let now: Timestamp = "2026-11-20T18:00:00Z".parse().unwrap();
        let hold = |until| MachineOrder::Hold { scope: HoldScope::Everything, until };
        let put = |level, until| MachineOrder::Prioritize { level, until };
        let (over, zero) = (Some(Expiry::At(now)), Some(Expiry::After(Span::seconds(0))));
        let later = Some(Expiry::After(Span::seconds(1)));
        for (order, rejected) in [
            (hold(None), false),
            (hold(later), false),
            (hold(over), true),
            (hold(zero), true),
            (put(PriorityLevel::Urgent, later), false),
            (put(PriorityLevel::Urgent, over), true),
            (put(PriorityLevel::Normal, over), false),
            (MachineOrder::Retry, false),
        ] {
            let reason = order.check_expiry(now).err().map(|(reason, _)| reason);
            assert_eq!(reason, rejected.then_some(EXPIRY_PASSED), "{order:?}");
        }
    }

    #[test]
    fn approver_reads_the_effect_on_a_machine() {
        assert_eq!(approval_target("rack-7", "is not wiped"), "rack-7: it is not wiped");
    }
}
