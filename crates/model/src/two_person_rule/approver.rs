//! The person who approves an order: somebody else than its requester, with a credential that has waited.

use crate::humanize::absolute_time;
use crate::time::{Span, Timestamp, after};
use crate::two_person_rule::{PendingApproval, Principal, TwoPersonRule, is_same_person};

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
        return Err(("REQUESTER_GONE", text));
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

#[cfg(test)]
mod tests {
    use super::*;

    use crate::two_person_rule::tests::{at, pending_approval, principal};

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
                Some("REQUESTER_GONE"),
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
}
