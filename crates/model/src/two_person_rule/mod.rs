//! Two-person rule: approval of sensitive orders by a second admin.
//!
//! Sensitive orders are bulk orders beyond the limits, the waiver of a stage of a retirement, the cancellation of a
//! retirement with a wipe, a new budget, the pause of a loop for all providers, a new credential, a certificate for a
//! cluster, a revocation that leaves fewer than two admins, the declaration of a service with privileges, an
//! add-on of a cluster, and the replacement of the signing keys that a machine has pinned. If the policy requires it, such
//! an order is not carried out when it is given first. It waits until another admin approves it. Then the requester gives the very same order
//! again, under the same idempotency key, and it is carried out, once. The approval is for that order and no other: a
//! digest of its whole content, with the machines of a bulk order, must be the same. So nobody can act in the name of
//! another, and the audit log has both people.
//!
//! # Who is a second person
//!
//! A thief of one admin's token must not become two people with it. So a new credential needs approval too, and it
//! approves nothing for a while ([`WaitingTime`]): there is time to notice it, also if one careless approval let it in.
//! What was requested before it existed, it never approves. The admins who exist when the rule is switched on do not
//! wait, because nobody else could approve anything until then.
//!
//! A certificate for a cluster gives rights past the API, as a credential does within it, and needs approval too.
//!
//! A person who writes to the database directly is outside the rule where it is about credentials: with that access
//! they can write any row.
//!
//! # What the rule can distinguish, and what it cannot
//!
//! The approver must have another credential than the requester, and another name, whatever its spelling. A person who
//! writes to the database directly has no credential. They are known by a name alone, that of their own environment:
//! `kim@workstation` counts as the same person as `kim` and `kim@anywhere`. But with that access they can write any
//! name, and the policy. A person who has two credentials under two names counts as two people here. The rule protects
//! people from mistakes, and limits what one stolen token can do. It does not stop the owner of the database.
//!
//! A dry run changes nothing, and needs no approval.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::plain_text::fold_name;
use crate::rpc_name::{ALLOW_SIGNING_KEYS_RPC, CANCEL_RETIRE_RPC, WAIVE_RPC};
use crate::time::{Span, Timestamp};

mod approver;

pub use approver::{Approver, DEFAULT_WAITING_TIME, WaitingTime, check_approver};

/// The rule as the policy has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TwoPersonRule {
    /// Whether sensitive orders need approval.
    pub required: bool,
    /// How long a request waits for approval, and how long an approval is valid.
    // As `second_person`, a name in stored policies that earlier releases read.
    #[serde(rename = "good_for")]
    pub approval_ttl: Span,
}

impl Default for TwoPersonRule {
    fn default() -> Self {
        Self { required: false, approval_ttl: Span::hours(1) }
    }
}

/// A kind of order that the rule covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SensitiveOrder {
    /// A bulk order that exceeds the limits.
    BeyondLimits,
    /// The waiver of a stage of a retirement.
    Waive,
    /// The cancellation of a retirement that would wipe the machine. Without the wipe it can be ordered again by one
    /// person, which is a waiver in two orders.
    CancelWipe,
    /// A new value of a budget.
    SetBudget,
    /// The pause of a loop for the machines of all providers.
    PauseForAll,
    /// A new credential: a token or a pinned certificate.
    CreateCredential,
    /// A person's certificate for the curators or for the API servers of a cluster.
    IssueCertificate,
    /// A revocation that leaves fewer than two admins.
    RevokeAdmin,
    /// A declaration with a service that runs as root, runs a program of the node, or requests privileges.
    DeclarePrivileged,
    /// An add-on of a cluster: objects that are applied with all rights there.
    SetAddOns,
    /// The replacement of the signing keys that a machine has pinned.
    AllowSigningKeys,
}

impl SensitiveOrder {
    /// The kind of an order for one machine, by its call and by whether a wipe of that machine is pending; `None` if the
    /// rule does not cover it.
    #[must_use]
    pub fn from_rpc(rpc: &str, wipe_is_pending: bool) -> Option<Self> {
        match rpc {
            WAIVE_RPC => Some(Self::Waive),
            ALLOW_SIGNING_KEYS_RPC => Some(Self::AllowSigningKeys),
            CANCEL_RETIRE_RPC if wipe_is_pending => Some(Self::CancelWipe),
            _ => None,
        }
    }

    /// Name of the kind, for the beginning of a sentence.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::BeyondLimits => "an order beyond the limits",
            Self::Waive => "leaving out a stage of a retirement",
            Self::CancelWipe => "cancelling a retirement with a wipe",
            Self::SetBudget => "setting a budget",
            Self::PauseForAll => "pausing a loop for all machines",
            Self::CreateCredential => "creating a credential",
            Self::IssueCertificate => "issuing a certificate for a cluster",
            Self::RevokeAdmin => "leaving fewer than two admins",
            Self::DeclarePrivileged => "declaring a service with privileges",
            Self::SetAddOns => "setting an add-on of a cluster",
            Self::AllowSigningKeys => "replacing the signing keys of a machine",
        }
    }
}

/// A person, as far as they can be distinguished from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Name of the person.
    pub name: String,
    /// The credential that they used; `None` for a person who writes to the database directly.
    pub credential: Option<Uuid>,
}

/// Whether two principals may be the same person.
#[must_use]
pub fn is_same_person(one: &Principal, other: &Principal) -> bool {
    let both = one.credential.zip(other.credential);
    let bare = |person: &Principal| {
        let name = fold_name(&person.name);
        match name.split_once('@') {
            Some((user, _)) if both.is_none() => user.trim().to_owned(),
            _ => name,
        }
    };
    both.is_some_and(|(one, other)| one == other) || bare(one) == bare(other)
}

/// A request for approval, as far as decisions depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingApproval {
    /// The person who gave the order.
    pub requester: Principal,
    /// Whether the credential of the requester is still valid.
    pub requester_is_valid: bool,
    /// When the order was given.
    pub requested_at: Timestamp,
    /// When the request or its approval expires.
    pub expires_at: Timestamp,
    /// The person who approved it; `None` before that.
    pub approved_by: Option<String>,
    /// Whether the credential of that person is still valid; true before the approval.
    pub approver_is_valid: bool,
    /// Whether the order was carried out.
    pub is_used: bool,
}

/// The decision on an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApprovalDecision {
    /// Carry it out: no approval is needed.
    NotRequired,
    /// Carry it out, because this person approved it.
    Approved(String),
    /// It waits: another admin has to approve it.
    Required,
    /// It differs from the order that was requested under its key.
    OrderChanged,
    /// An order was already carried out under its key.
    AlreadyUsed,
    /// The credential of the requester is no longer valid.
    RequesterInvalid,
    /// The credential of this person, who approved it, is no longer valid.
    ApproverInvalid(String),
}

/// Decides on a sensitive order, by the request under its idempotency key, if there is one. The flag beside the request
/// is whether the order is the very same.
#[must_use]
pub fn decide_approval(
    policy: TwoPersonRule,
    dry_run: bool,
    requested: Option<(&PendingApproval, bool)>,
    now: Timestamp,
) -> ApprovalDecision {
    if !policy.required || dry_run {
        return ApprovalDecision::NotRequired;
    }
    let Some((approval, the_same)) = requested else { return ApprovalDecision::Required };
    if approval.is_used {
        return ApprovalDecision::AlreadyUsed;
    }
    // Also after its end: an admin who read the request approves it by its id, and must not approve another order by it.
    if !the_same {
        return ApprovalDecision::OrderChanged;
    }
    if approval.expires_at <= now {
        return ApprovalDecision::Required;
    }
    match &approval.approved_by {
        None => ApprovalDecision::Required,
        Some(_) if !approval.requester_is_valid => ApprovalDecision::RequesterInvalid,
        Some(by) if !approval.approver_is_valid => ApprovalDecision::ApproverInvalid(by.clone()),
        Some(by) => ApprovalDecision::Approved(by.clone()),
    }
}

/// State of a request: `waiting`, `approved`, `used` or `expired`.
#[must_use]
pub fn approval_state(approved: bool, used: bool, expires_at: Timestamp, now: Timestamp) -> &'static str {
    match (used, expires_at <= now, approved) {
        (true, ..) => "used",
        (false, true, _) => "expired",
        (false, false, true) => "approved",
        (false, false, false) => "waiting",
    }
}

/// The message for an operator whose order needs the approval of another admin.
#[must_use]
pub fn approval_required_message(grave: SensitiveOrder, approval: Uuid, key: &str) -> String {
    format!(
        "{} needs another admin here, and nothing was changed: let one give `shepherdctl approve {approval} --reason …` \
         (Approvals.Approve), then give the very same order again with the idempotency key {key}",
        grave.phrase()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc_name::RETIRE_RPC;

    pub(super) fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    pub(super) fn principal(name: &str, credential: Option<u128>) -> Principal {
        Principal { name: name.to_owned(), credential: credential.map(Uuid::from_u128) }
    }

    pub(super) fn pending_approval() -> PendingApproval {
        PendingApproval {
            requester: principal("kim", Some(1)),
            requester_is_valid: true,
            requested_at: at(-60),
            expires_at: at(60),
            approved_by: None,
            approver_is_valid: true,
            is_used: false,
        }
    }

    #[test]
    fn principals_are_compared_by_credential_and_name() {
        for (one, other, expected) in [
            (principal("kim", Some(1)), principal("lee", Some(2)), false),
            (principal("kim", Some(1)), principal("kim", Some(2)), true),
            (principal("kim", Some(1)), principal(" KIM ", Some(2)), true),
            (principal("kim", Some(1)), principal("lee", Some(1)), true),
            (principal("kim", Some(1)), principal("k\u{200b}im", Some(2)), true),
            (principal("kim lee", Some(1)), principal("\u{ff2b}im\u{a0}Lee", Some(2)), true),
            (principal("kim@a", None), principal("\u{ff4b}im", Some(1)), true),
            (principal("kim@a", Some(1)), principal("kim@b", Some(2)), false),
            (principal("kim@a", None), principal("kim@b", None), true),
            (principal("kim@a", None), principal("lee@a", None), false),
            (principal("kim@a", None), principal("kim", Some(1)), true),
            (principal("kim@a", None), principal("Kim@example.org", Some(1)), true),
            (principal("kim@a", None), principal("lee", Some(1)), false),
        ] {
            assert_eq!(
                (is_same_person(&one, &other), is_same_person(&other, &one)),
                (expected, expected),
                "{one:?} {other:?}"
            );
        }
    }

    #[test]
    fn order_needs_a_timely_approval_of_the_same_order() {
        let on = TwoPersonRule { required: true, ..TwoPersonRule::default() };
        let approved = PendingApproval { approved_by: Some("lee".to_owned()), ..pending_approval() };
        let used = PendingApproval { is_used: true, ..approved.clone() };
        let gone = PendingApproval { requester_is_valid: false, ..approved.clone() };
        let distrusted = PendingApproval { approver_is_valid: false, ..approved.clone() };
        for (name, policy, dry_run, found, now, expected) in [
            ("not required", TwoPersonRule::default(), false, None, 0, ApprovalDecision::NotRequired),
            ("a dry run", on, true, None, 0, ApprovalDecision::NotRequired),
            ("the first time", on, false, None, 0, ApprovalDecision::Required),
            ("requested already", on, false, Some((pending_approval(), true)), 0, ApprovalDecision::Required),
            (
                "approved",
                on,
                false,
                Some((approved.clone(), true)),
                59,
                ApprovalDecision::Approved("lee".to_owned()),
            ),
            ("another order", on, false, Some((approved.clone(), false)), 0, ApprovalDecision::OrderChanged),
            (
                "another order, not approved",
                on,
                false,
                Some((pending_approval(), false)),
                0,
                ApprovalDecision::OrderChanged,
            ),
            ("too late", on, false, Some((approved.clone(), true)), 60, ApprovalDecision::Required),
            (
                "too late, another order",
                on,
                false,
                Some((approved, false)),
                60,
                ApprovalDecision::OrderChanged,
            ),
            (
                "too late, another order, not approved",
                on,
                false,
                Some((pending_approval(), false)),
                60,
                ApprovalDecision::OrderChanged,
            ),
            ("carried out", on, false, Some((used, true)), 0, ApprovalDecision::AlreadyUsed),
            ("revoked meanwhile", on, false, Some((gone, true)), 0, ApprovalDecision::RequesterInvalid),
            (
                "the approver was revoked",
                on,
                false,
                Some((distrusted, true)),
                0,
                ApprovalDecision::ApproverInvalid("lee".to_owned()),
            ),
        ] {
            let found = found.as_ref().map(|(approval, the_same)| (approval, *the_same));
            assert_eq!(decide_approval(policy, dry_run, found, at(now)), expected, "{name}");
        }
    }

    #[test]
    fn state_is_one_word() {
        for (approved, used, now, word) in [
            (false, false, 0, "waiting"),
            (true, false, 0, "approved"),
            (false, false, 60, "expired"),
            (true, false, 60, "expired"),
            (true, true, 60, "used"),
        ] {
            assert_eq!(approval_state(approved, used, at(60), at(now)), word);
        }
        let text = approval_required_message(SensitiveOrder::SetBudget, Uuid::nil(), "k-1");
        assert!(
            text.starts_with("setting a budget needs another admin") && text.ends_with("key k-1"),
            "{text}"
        );
    }

    #[test]
    fn order_for_one_machine_needs_approval_by_its_call() {
        for (rpc, wipe_is_pending, expected) in [
            (WAIVE_RPC, true, Some(SensitiveOrder::Waive)),
            (WAIVE_RPC, false, Some(SensitiveOrder::Waive)),
            (CANCEL_RETIRE_RPC, true, Some(SensitiveOrder::CancelWipe)),
            (CANCEL_RETIRE_RPC, false, None),
            (ALLOW_SIGNING_KEYS_RPC, false, Some(SensitiveOrder::AllowSigningKeys)),
            (RETIRE_RPC, true, None),
        ] {
            assert_eq!(SensitiveOrder::from_rpc(rpc, wipe_is_pending), expected, "{rpc} {wipe_is_pending}");
        }
    }
}
