//! Issues of the two-person rule: too few admins, new ones who approve too soon, and its end at the database.

use std::time::Duration;

use crate::admins::MIN_ADMINS;
use crate::issues::inputs::IssueInputs;
use crate::issues::{Issue, IssueKind};
use crate::time::{Span, between};

/// Fewest people who should be admins: with two, the loss of one token leaves nobody who can approve.
const ENOUGH_ADMINS: usize = 3;
/// How long the end of the rule is reported.
const OFF_NOTICE: Duration = Duration::from_hours(30 * 24);
/// Shortest time within which somebody may notice a new admin in the audit.
const MIN_WAITING_TIME: Span = Span::hours(1);
const SUBJECT: &str = "the two-person rule";

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    found.extend(few_admins(evidence));
    found.extend(short_waiting_time(evidence));
    found.extend(switched_off(evidence));
    found
}

/// Issue: the rule is on with few admins, or is off because there are too few.
fn few_admins(evidence: &IssueInputs) -> Option<Issue> {
    let rule = &evidence.two_person_rule;
    let message = match &rule.requested_by {
        _ if evidence.policy.two_person_rule.required => {
            if rule.admins >= ENOUGH_ADMINS {
                return None;
            }
            let effect = if rule.admins < MIN_ADMINS {
                "no order that needs a second person can be approved"
            } else {
                "when one of them has no token, no order of the other can be approved"
            };
            format!("it is on, and people who are admins: {}; {effect}", rule.admins)
        }
        Some(by) => format!(
            "it is off, although the {by} switch it on: it needs {MIN_ADMINS} admins with different names, and people who \
             are admins now: {}",
            rule.admins
        ),
        None => return None,
    };
    let mut remedy = format!(
        "create tokens for {ENOUGH_ADMINS} people: `shepherdctl tokens create NAME --role admin --reason TEXT`"
    );
    if !evidence.policy.two_person_rule.required {
        remedy.push_str(", then start a shepherd with --require_second_admin true again");
    }
    Some(Issue::new(IssueKind::FewAdmins, SUBJECT.to_owned(), message, None, remedy))
}

/// Issue: the rule is on, and an admin who was created just now approves orders almost at once.
fn short_waiting_time(evidence: &IssueInputs) -> Option<Issue> {
    let (required, time) = (evidence.policy.two_person_rule.required, evidence.policy.approver_waiting_time);
    if !required || time >= MIN_WAITING_TIME {
        return None;
    }
    Some(Issue::new(
        IssueKind::ShortWaitingTime,
        SUBJECT.to_owned(),
        format!(
            "a new admin approves orders {time} after their creation, before anybody can notice them in the audit: one \
             careless approval makes two people of a stolen token"
        ),
        None,
        format!("start a shepherd with --approver_waiting_time 1d, or {MIN_WAITING_TIME} at least"),
    ))
}

/// Issue: a person at the database switched the rule off lately, also if it is on again.
fn switched_off(evidence: &IssueInputs) -> Option<Issue> {
    let off = evidence.two_person_rule.last_off.as_ref()?;
    if between(off.at, evidence.at) >= OFF_NOTICE {
        return None;
    }
    let now = if evidence.policy.two_person_rule.required { "it is on again" } else { "it is off" };
    Some(Issue::new(
        IssueKind::TwoPersonRuleOff,
        SUBJECT.to_owned(),
        format!("{} switched it off on a host that reaches the database: {}; {now}", off.by, off.reason),
        Some(off.at),
        "read the audit for what was ordered meanwhile; start a shepherd with --require_second_admin true to switch it on \
         again"
            .to_owned(),
    ))
}
