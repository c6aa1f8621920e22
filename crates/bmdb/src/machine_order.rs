//! Machine orders as data, the same for one machine and for many.
//!
//! [`crate::action`] decides its outcome on one machine; [`crate::audit`] carries it out there, and
//! [`crate::bulk_orders`] on each machine that a filter selects.

use crate::action::{self, Expiry, OrderOutcome, format_attribution};
use crate::audit::OrderContext;
use crate::error::BmdbError;
use crate::power_order;
use crate::retirement;
use crate::work::Decision;
use model::facts::HoldScope;
use model::label::Labels;
use model::power_order::PowerOrderKind;
use model::priority::PriorityLevel;

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
    },
    /// Reboot it, or switch its power.
    Power(PowerOrderKind),
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
            Self::Hold { .. } => "shepherd.fleet.v1.Machines/Hold",
            Self::Release { .. } => "shepherd.fleet.v1.Machines/Release",
            Self::Retry => "shepherd.fleet.v1.Machines/Retry",
            Self::Quarantine => "shepherd.fleet.v1.Machines/Quarantine",
            Self::Retire { .. } => "shepherd.fleet.v1.Machines/Retire",
            Self::Power(PowerOrderKind::Reboot) => "shepherd.fleet.v1.Machines/Reboot",
            Self::Power(_) => "shepherd.fleet.v1.Machines/Power",
            Self::Prioritize { .. } => "shepherd.fleet.v1.Machines/Prioritize",
            Self::Label { .. } => "shepherd.fleet.v1.Machines/Label",
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
                action::hold_machine(&known.snapshot, *scope, reason.unwrap_or_default(), who, *until)
            }
            Self::Release { quarantine } => {
                action::release_machine(facts, *quarantine, &format_attribution(who, reason))
            }
            Self::Retry => action::retry_machine(facts, &format_attribution(who, reason)),
            Self::Quarantine => action::quarantine_machine(facts, &format_attribution(who, reason)),
            Self::Retire { wipe } => {
                retirement::retire_machine(&known.snapshot, *wipe, reason.unwrap_or_default(), who)
                    .map_err(|(reason, text)| BmdbError::OrderRejected { reason, message: text })?
            }
            Self::Power(switch) => {
                power_order::order_switch(&known.snapshot, *switch, reason.unwrap_or_default(), who)
                    .map_err(|(reason, text)| BmdbError::OrderRejected { reason, message: text })?
            }
            Self::Prioritize { level, until } => {
                action::prioritize_machine(&known.snapshot, *level, reason.unwrap_or_default(), who, *until)
            }
            Self::Label { set, remove } => {
                action::label_machine(&known.labels, set, remove, &format_attribution(who, reason))
                    .map_err(|error| BmdbError::OrderRejected { reason: "LABELS", message: error })?
            }
        })
    }
}
