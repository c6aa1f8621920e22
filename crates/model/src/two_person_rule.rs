//! Two-person rule: approval of sensitive orders by a second admin.
//!
//! Sensitive orders are bulk orders beyond the limits, the waiver of a stage of a retirement, the cancellation of a
//! retirement with a wipe, a new budget, the pause of a loop for all providers, a new credential, a certificate for a
//! cluster, and a revocation that leaves fewer than two admins. If the policy requires it, such an order is not carried
//! out when it is given first. It waits until another admin approves it. Then the requester gives the very same order
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

use crate::humanize::absolute_time;
use crate::plain_text::fold_name;
use crate::time::{Span, Timestamp, after};

/// The rule as the policy has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TwoPersonRule {
    /// Whether sensitive orders need approval.
    pub required: bool,
    /// How long a request waits for approval, and how long an approval is valid.
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
}

/// The call that waives a stage of a retirement.
pub const WAIVE_RPC: &str = "shepherd.fleet.v1.Machines/WaiveStage";
/// The call that cancels a retirement.
pub const CANCEL_RETIRE_RPC: &str = "shepherd.fleet.v1.Machines/CancelRetire";

impl SensitiveOrder {
    /// The kind of an order for one machine, by its call and by whether a wipe of that machine is pending; `None` if the
    /// rule does not cover it.
    #[must_use]
    pub fn from_rpc(rpc: &str, wipe_is_pending: bool) -> Option<Self> {
        match rpc {
            WAIVE_RPC => Some(Self::Waive),
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

/// A person who wants to approve an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approver {
    /// The person, as they are compared with the requester.
    pub principal: Principal,
    /// When their credential was created; `None` for a person who writes to the database directly.
    pub credential_created_at: Option<Timestamp>,
}

/// How long a new credential approves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingTime {
    /// The time from its creation.
    pub length: Span,
    /// When the rule was switched on. A credential of that moment does not wait. `None`: an earlier release switched it
    /// on, and every credential waits.
    pub rule_since: Option<Timestamp>,
}

/// How long a new credential approves nothing, unless the policy has another time. Within a day, an admin who did not
/// expect it sees it in the audit, whenever they work.
pub const DEFAULT_WAITING_TIME: Span = Span::hours(24);

impl WaitingTime {
    /// The waiting time of the policy. Where the rule is off there is none: an approval is worth nothing there.
    #[must_use]
    pub fn of_policy(rule: TwoPersonRule, length: Span, rule_since: Option<Timestamp>) -> Self {
        Self { length: if rule.required { length } else { Span::default() }, rule_since }
    }

    /// When the waiting time of a credential ends; `None` if it has none.
    fn end_for(self, created_at: Timestamp) -> Option<Timestamp> {
        let waits = self.rule_since.is_none_or(|since| created_at > since);
        waits.then(|| after(created_at, self.length.0))
    }

    /// Whether a credential that was created then has waited. When the clock was wrong as the rule was switched on, the
    /// rule begins later than now, and exempts none: every later credential would count as one of that moment.
    #[must_use]
    pub fn is_over(self, created_at: Timestamp, now: Timestamp) -> bool {
        self.at(now).end_for(created_at).is_none_or(|end| end <= now)
    }

    /// The waiting time by the clock of now.
    fn at(self, now: Timestamp) -> Self {
        Self { rule_since: self.rule_since.filter(|since| *since <= now), ..self }
    }
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

/// Whether this person may approve the request now. The error is a reason for programs and a sentence.
pub fn check_approver(
    approval: &PendingApproval,
    approver: &Approver,
    waiting: WaitingTime,
    now: Timestamp,
) -> Result<(), (&'static str, String)> {
    if is_same_person(&approval.requester, &approver.principal) {
        return Err((
            "SAME_PERSON",
            format!(
                "{} requested it, and somebody else has to approve it: another admin, with a credential and a name of \
                 their own",
                approval.requester.name
            ),
        ));
    }
    if approval.is_used {
        return Err(("USED", "it was approved before, and carried out".to_owned()));
    }
    if approval.expires_at <= now {
        let output = "it has expired; its requester has to give the order again, which makes a new request";
        return Err(("EXPIRED", output.to_owned()));
    }
    if !approval.requester_is_valid {
        let text =
            format!("the credential of {}, who requested it, is revoked or expired", approval.requester.name);
        return Err(("ASKER_GONE", text));
    }
    match approver.credential_created_at {
        None => Ok(()),
        Some(created_at) => check_credential_age(approval, created_at, waiting, now),
    }
}

/// Whether a credential that was created then may approve the request now.
fn check_credential_age(
    approval: &PendingApproval,
    created_at: Timestamp,
    waiting: WaitingTime,
    now: Timestamp,
) -> Result<(), (&'static str, String)> {
    if created_at >= approval.requested_at {
        let text =
            "it was requested before this credential existed; an admin with an older one has to approve it";
        return Err(("NEWER_THAN_REQUEST", text.to_owned()));
    }
    match waiting.at(now).end_for(created_at).filter(|end| now < *end) {
        None => Ok(()),
        Some(end) => Err((
            "TOO_NEW",
            format!(
                "this credential is new, and approves orders from {} on; an admin with an older one has to approve it",
                absolute_time(end)
            ),
        )),
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

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn principal(name: &str, credential: Option<u128>) -> Principal {
        Principal { name: name.to_owned(), credential: credential.map(Uuid::from_u128) }
    }

    fn pending_approval() -> PendingApproval {
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
            ("too late, another order", on, false, Some((approved, false)), 60, ApprovalDecision::OrderChanged),
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
    fn only_another_principal_approves_a_pending_request() {
        let old = |principal| Approver { principal, credential_created_at: Some(at(-100_000)) };
        let (lee, kim) = (old(principal("lee", Some(2))), old(principal("kim", Some(3))));
        let waiting = WaitingTime { length: DEFAULT_WAITING_TIME, rule_since: None };
        let approved = PendingApproval { approved_by: Some("max".to_owned()), ..pending_approval() };
        for (name, approval, approver, now, expected) in [
            ("another", pending_approval(), &lee, 0, None),
            ("once more", approved.clone(), &lee, 0, None),
            ("oneself", pending_approval(), &kim, 0, Some("SAME_PERSON")),
            ("oneself, too late", pending_approval(), &kim, 60, Some("SAME_PERSON")),
            ("too late", pending_approval(), &lee, 60, Some("EXPIRED")),
            ("carried out", PendingApproval { is_used: true, ..approved }, &lee, 0, Some("USED")),
            (
                "the requester is gone",
                PendingApproval { requester_is_valid: false, ..pending_approval() },
                &lee,
                0,
                Some("ASKER_GONE"),
            ),
        ] {
            let refused = check_approver(&approval, approver, waiting, at(now)).err();
            assert_eq!(refused.as_ref().map(|(reason, _)| *reason), expected, "{name}: {refused:?}");
        }
    }

    #[test]
    fn new_credential_approves_nothing_for_a_while_and_nothing_older_than_itself() {
        let hour = Span::hours(1);
        for (name, created, rule_since, now, expected) in [
            ("old", Some(-3_700), None, 0, None),
            ("older than the rule", Some(-3_700), Some(-4_000), 0, None),
            ("at the end of its time", Some(-3_600), None, 0, None),
            ("a second before", Some(-3_599), None, 0, Some("TOO_NEW")),
            ("later", Some(-3_599), None, 1, None),
            ("when the rule began", Some(-100), Some(-90), 0, None),
            ("at that moment", Some(-90), Some(-90), 0, None),
            ("after the rule began", Some(-89), Some(-90), 0, Some("TOO_NEW")),
            ("after the request", Some(-59), None, 0, Some("NEWER_THAN_REQUEST")),
            ("with the request", Some(-60), None, 0, Some("NEWER_THAN_REQUEST")),
            ("after the request, before the rule", Some(-59), Some(-10), 0, Some("NEWER_THAN_REQUEST")),
            ("the clock was wrong when the rule began", Some(-100), Some(10), 0, Some("TOO_NEW")),
            ("the clock was wrong, and it is old", Some(-3_600), Some(10), 0, None),
            ("without a credential", None, None, 0, None),
        ] {
            let approver = Approver {
                principal: principal("lee", Some(2).filter(|_| created.is_some())),
                credential_created_at: created.map(at),
            };
            let waiting = WaitingTime { length: hour, rule_since: rule_since.map(at) };
            let is_over = created.is_none_or(|created| waiting.is_over(at(created), at(now)));
            assert!(is_over || expected.is_some(), "{name}");
            assert!(!is_over || expected != Some("TOO_NEW"), "{name}");
            let refused = check_approver(&pending_approval(), &approver, waiting, at(now)).err();
            assert_eq!(refused.as_ref().map(|(reason, _)| *reason), expected, "{name}: {refused:?}");
        }
    }

    #[test]
    fn no_credential_waits_where_the_rule_is_off() {
        let length = Span::hours(1);
        for (required, expected) in [(false, at(0)), (true, at(3_600))] {
            let rule = TwoPersonRule { required, ..TwoPersonRule::default() };
            assert_eq!(WaitingTime::of_policy(rule, length, None).end_for(at(0)), Some(expected));
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
    fn order_that_ends_a_wipe_needs_approval_by_either_call() {
        for (rpc, wipe_is_pending, expected) in [
            (WAIVE_RPC, true, Some(SensitiveOrder::Waive)),
            (WAIVE_RPC, false, Some(SensitiveOrder::Waive)),
            (CANCEL_RETIRE_RPC, true, Some(SensitiveOrder::CancelWipe)),
            (CANCEL_RETIRE_RPC, false, None),
            ("shepherd.fleet.v1.Machines/Retire", true, None),
        ] {
            assert_eq!(SensitiveOrder::from_rpc(rpc, wipe_is_pending), expected, "{rpc} {wipe_is_pending}");
        }
    }
}
