//! Orders that are the same for one machine and for many: what is ordered, as data.
//!
//! [`crate::bmdb::action`] decides what becomes of it on one machine; [`crate::bmdb::audit`] carries it out there,
//! and [`crate::bmdb::selection`] on each machine that a filter means.

use crate::bmdb::action::{self, Done, Until, by};
use crate::bmdb::audit::Known;
use crate::bmdb::error::BmdbError;
use crate::bmdb::power_order;
use crate::bmdb::retirement;
use crate::bmdb::work::Decision;
use crate::model::facts::HoldScope;
use crate::model::label::Labels;
use crate::model::power_order::Switch;
use crate::model::priority::Level;

/// What is ordered of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Each {
    /// A hold.
    Hold {
        /// What it stops.
        scope: HoldScope,
        /// When it ends by itself.
        until: Option<Until>,
    },
    /// The end of its hold, or of its quarantine.
    Release {
        /// Of its quarantine.
        quarantine: bool,
    },
    /// Another try at once.
    Retry,
    /// A quarantine by hand.
    Quarantine,
    /// A way out.
    Retire {
        /// Whether it is to be wiped first.
        wipe: bool,
    },
    /// A reboot, or other power.
    Power(Switch),
    /// Another place among the others.
    Prioritize {
        /// Which.
        level: Level,
        /// When that ends by itself.
        until: Option<Until>,
    },
    /// Other labels.
    Label {
        /// Labels it gets.
        set: Labels,
        /// Keys of labels it loses.
        remove: Vec<String>,
    },
}

impl Each {
    /// The call that orders this of one machine, as the audit names it.
    #[must_use]
    pub const fn rpc(&self) -> &'static str {
        match self {
            Self::Hold { .. } => "shepherd.fleet.v1.Machines/Hold",
            Self::Release { .. } => "shepherd.fleet.v1.Machines/Release",
            Self::Retry => "shepherd.fleet.v1.Machines/Retry",
            Self::Quarantine => "shepherd.fleet.v1.Machines/Quarantine",
            Self::Retire { .. } => "shepherd.fleet.v1.Machines/Retire",
            Self::Power(Switch::Reboot) => "shepherd.fleet.v1.Machines/Reboot",
            Self::Power(_) => "shepherd.fleet.v1.Machines/Power",
            Self::Prioritize { .. } => "shepherd.fleet.v1.Machines/Prioritize",
            Self::Label { .. } => "shepherd.fleet.v1.Machines/Label",
        }
    }

    /// What becomes of it on a machine, by order of `who`.
    pub fn decide(
        &self,
        known: &Known,
        who: &str,
        reason: Option<&str>,
    ) -> Result<Decision<Done>, BmdbError> {
        let facts = &known.snapshot.facts;
        Ok(match self {
            Self::Hold { scope, until } => {
                action::hold(&known.snapshot, *scope, reason.unwrap_or_default(), who, *until)
            }
            Self::Release { quarantine } => action::release(facts, *quarantine, &by(who, reason)),
            Self::Retry => action::retry(facts, &by(who, reason)),
            Self::Quarantine => action::quarantine(facts, &by(who, reason)),
            Self::Retire { wipe } => {
                retirement::retire(&known.snapshot, *wipe, reason.unwrap_or_default(), who)
                    .map_err(|(reason, said)| BmdbError::OrderRefused { reason, said })?
            }
            Self::Power(switch) => {
                power_order::switch(&known.snapshot, *switch, reason.unwrap_or_default(), who)
                    .map_err(|(reason, said)| BmdbError::OrderRefused { reason, said })?
            }
            Self::Prioritize { level, until } => {
                action::prioritize(&known.snapshot, *level, reason.unwrap_or_default(), who, *until)
            }
            Self::Label { set, remove } => action::label(&known.labels, set, remove, &by(who, reason))
                .map_err(|said| BmdbError::OrderRefused { reason: "LABELS", said })?,
        })
    }
}
