//! The replacement of a cluster's authority after a theft of its key: its steps and its state.
//!
//! Nothing that the stolen authority signs may lead to the new one, because the thief can sign as much. So the shepherd
//! makes the new authority, and machines get it by orders over their callback connections, which no authority of a
//! cluster signs. The shepherd's plan ([`plan::authority_theft`](crate::cluster::plan::authority_theft)) takes the
//! steps in this order, each of them only after every member of etcd has taken the one before:
//!
//! | step | what a member does | what it accepts from another member |
//! | --- | --- | --- |
//! | accept | its etcd restarts, and accepts certificates of both authorities | old |
//! | show | it shows a certificate of the new one | old and new |
//! | reject | its etcd restarts, and rejects those of the old one | new |
//! | close | its curator is stopped | new |
//! | install | it puts the new key into etcd, and trusts the new one alone | new |
//! | follow | every other machine trusts the new one alone | – |
//!
//! # Why so many
//!
//! A member that restarts without the old authority at once is cut off from those that have not restarted. With two
//! restarts, any two members that are one step apart accept each other, and the quorum stays. The key reaches etcd only
//! after the last etcd has restarted: until then the thief can read what is in etcd. It has been sealed in the database
//! since before the first step.
//!
//! Curators are stopped before the key reaches etcd, all of them. A curator follows the record of the authorities in its own
//! etcd, some moments later. In these moments it would serve a thief as an owner: a snapshot with the new key, or another
//! owner's key that would stay. A curator that starts has read the record before it serves.
//!
//! # Once
//!
//! The step is stored, and so is the authority. What a machine has done is what it reports. So a shepherd that takes
//! over sends what is missing. An order that is repeated changes nothing.

use std::fmt;

use proto::agent::v1 as wire;
use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// A step of the replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuthorityStep {
    /// Members of etcd accept certificates of the new authority, too.
    Accept,
    /// They show certificates of it.
    Show,
    /// They reject certificates of the former one.
    Reject,
    /// Their curators are stopped.
    Close,
    /// The cluster's records have the new authority, and the control plane trusts it alone.
    Install,
    /// All other nodes trust it alone.
    Follow,
}

impl AuthorityStep {
    /// All steps, in their order.
    pub const ALL: [Self; 6] =
        [Self::Accept, Self::Show, Self::Reject, Self::Close, Self::Install, Self::Follow];

    /// The number in the database.
    #[must_use]
    pub const fn number(self) -> i16 {
        match self {
            Self::Accept => 1,
            Self::Show => 2,
            Self::Reject => 3,
            Self::Close => 4,
            Self::Install => 5,
            Self::Follow => 6,
        }
    }

    /// The step with this number; `None` if this release does not know it.
    #[must_use]
    pub fn from_number(number: i16) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.number() == number)
    }

    /// The step after this one; `None` after the last.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        match self {
            Self::Accept => Some(Self::Show),
            Self::Show => Some(Self::Reject),
            Self::Reject => Some(Self::Close),
            Self::Close => Some(Self::Install),
            Self::Install => Some(Self::Follow),
            Self::Follow => None,
        }
    }

    /// Whether curators are stopped in this step. One that serves then may be the thief's.
    #[must_use]
    pub const fn stops_curators(self) -> bool {
        matches!(self, Self::Close | Self::Install)
    }

    /// The step as orders and reports have it.
    #[must_use]
    pub const fn to_wire(self) -> wire::AuthorityStep {
        match self {
            Self::Accept => wire::AuthorityStep::Accept,
            Self::Show => wire::AuthorityStep::Show,
            Self::Reject => wire::AuthorityStep::Reject,
            Self::Close => wire::AuthorityStep::Close,
            Self::Install => wire::AuthorityStep::Install,
            Self::Follow => wire::AuthorityStep::Follow,
        }
    }

    /// The step of an order or a report; `None` if it has none, or one that this release does not know.
    #[must_use]
    pub fn from_wire(step: i32) -> Option<Self> {
        let step = wire::AuthorityStep::try_from(step).ok()?;
        Self::ALL.into_iter().find(|one| one.to_wire() == step)
    }

    /// The name that `cluster describe` and the API show as the stage of the replacement.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accepting",
            Self::Show => "showing",
            Self::Reject => "rejecting",
            Self::Close => "closing",
            Self::Install => "installing",
            Self::Follow => "following",
        }
    }
}

impl fmt::Display for AuthorityStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The new authority, and the step that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TheftStage {
    /// Certificate of the new authority (DER).
    pub certificate: Vec<u8>,
    /// The step that is under way.
    pub step: AuthorityStep,
    /// When the step began. An order that was sent before does not count.
    pub since: Timestamp,
}

/// An order to replace the authority after a theft that is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityTheft {
    /// Name of the operator who ordered it.
    pub ordered_by: String,
    /// `None` until the shepherd has made the new authority.
    pub stage: Option<TheftStage>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_has_the_name_and_the_number_that_are_stored_and_sent() {
        for step in AuthorityStep::ALL {
            assert_eq!(AuthorityStep::from_number(step.number()), Some(step));
            assert_eq!(AuthorityStep::from_wire(step.to_wire().into()), Some(step));
            assert_eq!(i32::from(step.to_wire()), i32::from(step.number()));
        }
        let order: Vec<AuthorityStep> =
            std::iter::successors(Some(AuthorityStep::Accept), |step| step.next()).collect();
        assert_eq!(order, AuthorityStep::ALL);
        assert!(order.is_sorted());
        let stopped: Vec<AuthorityStep> = order.into_iter().filter(|step| step.stops_curators()).collect();
        assert_eq!(stopped, [AuthorityStep::Close, AuthorityStep::Install]);
        for unknown in [0, 7, 99] {
            assert_eq!(AuthorityStep::from_number(unknown), None);
            assert_eq!(AuthorityStep::from_wire(i32::from(unknown)), None);
        }
    }
}
