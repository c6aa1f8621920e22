//! Two people for what one alone should not do: which orders need another admin, and who that may be.
//!
//! Some orders reach further than the rest: about many machines beyond the limits, leaving out a stage of a
//! retirement for good, a budget, a loop that stands still for everybody. Where the policy says so, such an order is
//! not carried out when it is given first. It is asked for, and another admin approves it; then whoever asked gives
//! the very same order again, under the same idempotency key, and it is carried out, once. What is approved is that
//! order and no other: a digest of all that it says, of the machines it means where it is about many, must be the
//! same. So nobody acts through another's hands, and the audit has both.
//!
//! # What this tells apart, and what it cannot
//!
//! Whoever approves must come with another credential than whoever asked, and under another name, however
//! it is written. Who writes to the database directly has no credential, and is known by a name alone, that of their
//! own environment: `kim@workstation` is taken for `kim` and for `kim@anywhere`. Whoever may write there can write any
//! name, and the policy. A person who was given two credentials under two names is two people here. This
//! keeps people from mistakes, and one stolen token from everything; it does not keep out whoever owns the database.
//!
//! A dry run changes nothing, and needs nobody.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::model::time::{Span, Timestamp};

/// Whether some orders need another admin, as the policy says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SecondPerson {
    /// Whether they do.
    pub required: bool,
    /// How long something stays asked for, and how long an approval is good for.
    pub good_for: Span,
}

impl Default for SecondPerson {
    fn default() -> Self {
        Self { required: false, good_for: Span::hours(1) }
    }
}

/// An order that reaches far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grave {
    /// About many machines, beyond the limits.
    BeyondLimits,
    /// Leaving out a stage of a retirement.
    Waive,
    /// Setting a budget.
    SetBudget,
    /// Pausing a loop for the machines of all providers.
    PauseForAll,
}

/// The call that leaves out a stage of a retirement.
pub const WAIVE: &str = "shepherd.fleet.v1.Machines/Waive";

impl Grave {
    /// What an order about one machine is, by its call.
    #[must_use]
    pub fn of_machine(rpc: &str) -> Option<Self> {
        (rpc == WAIVE).then_some(Self::Waive)
    }

    /// What it is, as the beginning of a sentence.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::BeyondLimits => "an order beyond the limits",
            Self::Waive => "leaving out a stage of a retirement",
            Self::SetBudget => "setting a budget",
            Self::PauseForAll => "pausing a loop for all machines",
        }
    }
}

/// Somebody, as far as they can be told from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// What they are called.
    pub name: String,
    /// What they came with; `None` for whoever writes to the database directly.
    pub credential: Option<Uuid>,
}

/// Whether two may be the same person.
#[must_use]
pub fn same(one: &Person, other: &Person) -> bool {
    let both = one.credential.zip(other.credential);
    let bare = |person: &Person| {
        let name = person.name.trim();
        let name = if both.is_none() { name.split('@').next().unwrap_or(name) } else { name };
        name.to_lowercase()
    };
    both.is_some_and(|(one, other)| one == other) || bare(one) == bare(other)
}

/// What was asked for, as far as decisions go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Who asked.
    pub by: Person,
    /// Whether their credential is still good.
    pub good: bool,
    /// Until when it is asked for, or approved.
    pub expires_at: Timestamp,
    /// Who approved it, if somebody did.
    pub approved_by: Option<String>,
    /// Whether it was carried out.
    pub used: bool,
}

/// What becomes of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is carried out: nobody else is needed.
    Free,
    /// It is carried out, because this person approved it.
    Approved(String),
    /// Another admin has to be asked, or was.
    Ask,
    /// It is another order than what was asked for under its key.
    Changed,
    /// It was carried out under its key.
    Used,
    /// The credential of whoever asked is over.
    AskerGone,
}

/// What becomes of an order of that kind, given what was asked for under its key, whether that was the very same
/// order, and the moment.
#[must_use]
pub fn decide(policy: SecondPerson, dry_run: bool, asked: Option<(&Asked, bool)>, now: Timestamp) -> Verdict {
    if !policy.required || dry_run {
        return Verdict::Free;
    }
    let Some((asked, the_same)) = asked else { return Verdict::Ask };
    if asked.used {
        return Verdict::Used;
    }
    if asked.expires_at <= now {
        return Verdict::Ask;
    }
    if !the_same {
        return Verdict::Changed;
    }
    match &asked.approved_by {
        None => Verdict::Ask,
        Some(_) if !asked.good => Verdict::AskerGone,
        Some(by) => Verdict::Approved(by.clone()),
    }
}

/// Whether this person may approve that now; if not, a reason for programs and a sentence.
pub fn may_approve(asked: &Asked, approver: &Person, now: Timestamp) -> Result<(), (&'static str, String)> {
    if same(&asked.by, approver) {
        return Err((
            "SAME_PERSON",
            format!(
                "{} asked for it, and somebody else has to approve it: another admin, with a credential and a name of \
                 their own",
                asked.by.name
            ),
        ));
    }
    if asked.used {
        return Err(("USED", "it was approved before, and carried out".to_owned()));
    }
    if asked.expires_at <= now {
        let said = "it is over; whoever asked has to give the order again, and asks anew by that";
        return Err(("EXPIRED", said.to_owned()));
    }
    if !asked.good {
        let said = format!("the credential of {}, who asked for it, is revoked or over", asked.by.name);
        return Err(("ASKER_GONE", said));
    }
    Ok(())
}

/// Where something that was asked for stands.
#[must_use]
pub fn state(approved: bool, used: bool, expires_at: Timestamp, now: Timestamp) -> &'static str {
    match (used, expires_at <= now, approved) {
        (true, ..) => "used",
        (false, true, _) => "expired",
        (false, false, true) => "approved",
        (false, false, false) => "waiting",
    }
}

/// What is said to whoever gives an order that another admin has to approve.
#[must_use]
pub fn sentence(grave: Grave, approval: Uuid, key: &str) -> String {
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

    fn person(name: &str, credential: Option<u128>) -> Person {
        Person { name: name.to_owned(), credential: credential.map(Uuid::from_u128) }
    }

    fn asked() -> Asked {
        Asked { by: person("kim", Some(1)), good: true, expires_at: at(60), approved_by: None, used: false }
    }

    #[test]
    fn people_are_told_apart_by_credential_and_name_as_far_as_they_have_them() {
        for (one, other, expected) in [
            (person("kim", Some(1)), person("lee", Some(2)), false),
            (person("kim", Some(1)), person("kim", Some(2)), true),
            (person("kim", Some(1)), person(" KIM ", Some(2)), true),
            (person("kim", Some(1)), person("lee", Some(1)), true),
            (person("kim@a", Some(1)), person("kim@b", Some(2)), false),
            (person("kim@a", None), person("kim@b", None), true),
            (person("kim@a", None), person("lee@a", None), false),
            (person("kim@a", None), person("kim", Some(1)), true),
            (person("kim@a", None), person("Kim@example.org", Some(1)), true),
            (person("kim@a", None), person("lee", Some(1)), false),
        ] {
            assert_eq!((same(&one, &other), same(&other, &one)), (expected, expected), "{one:?} {other:?}");
        }
    }

    #[test]
    fn order_is_carried_out_when_another_approved_the_very_same_in_time() {
        let on = SecondPerson { required: true, ..SecondPerson::default() };
        let approved = Asked { approved_by: Some("lee".to_owned()), ..asked() };
        let used = Asked { used: true, ..approved.clone() };
        let gone = Asked { good: false, ..approved.clone() };
        for (name, policy, dry_run, found, now, expected) in [
            ("not required", SecondPerson::default(), false, None, 0, Verdict::Free),
            ("a dry run", on, true, None, 0, Verdict::Free),
            ("the first time", on, false, None, 0, Verdict::Ask),
            ("asked for already", on, false, Some((asked(), true)), 0, Verdict::Ask),
            ("approved", on, false, Some((approved.clone(), true)), 59, Verdict::Approved("lee".to_owned())),
            ("another order", on, false, Some((approved.clone(), false)), 0, Verdict::Changed),
            ("another order, not approved", on, false, Some((asked(), false)), 0, Verdict::Changed),
            ("too late", on, false, Some((approved.clone(), true)), 60, Verdict::Ask),
            ("too late, another order", on, false, Some((approved, false)), 60, Verdict::Ask),
            ("carried out", on, false, Some((used, true)), 0, Verdict::Used),
            ("revoked meanwhile", on, false, Some((gone, true)), 0, Verdict::AskerGone),
        ] {
            let found = found.as_ref().map(|(asked, the_same)| (asked, *the_same));
            assert_eq!(decide(policy, dry_run, found, at(now)), expected, "{name}");
        }
    }

    #[test]
    fn only_another_person_approves_and_only_what_is_asked_for() {
        let (lee, kim) = (person("lee", Some(2)), person("kim", Some(3)));
        let approved = Asked { approved_by: Some("max".to_owned()), ..asked() };
        for (name, asked, approver, now, expected) in [
            ("another", asked(), &lee, 0, None),
            ("once more", approved.clone(), &lee, 0, None),
            ("oneself", asked(), &kim, 0, Some("SAME_PERSON")),
            ("oneself, too late", asked(), &kim, 60, Some("SAME_PERSON")),
            ("too late", asked(), &lee, 60, Some("EXPIRED")),
            ("carried out", Asked { used: true, ..approved }, &lee, 0, Some("USED")),
            ("who asked is gone", Asked { good: false, ..asked() }, &lee, 0, Some("ASKER_GONE")),
        ] {
            let refused = may_approve(&asked, approver, at(now)).err();
            assert_eq!(refused.as_ref().map(|(reason, _)| *reason), expected, "{name}: {refused:?}");
        }
    }

    #[test]
    fn state_is_told_in_one_word() {
        for (approved, used, now, word) in [
            (false, false, 0, "waiting"),
            (true, false, 0, "approved"),
            (false, false, 60, "expired"),
            (true, false, 60, "expired"),
            (true, true, 60, "used"),
        ] {
            assert_eq!(state(approved, used, at(60), at(now)), word);
        }
        let said = sentence(Grave::SetBudget, Uuid::nil(), "k-1");
        assert!(
            said.starts_with("setting a budget needs another admin") && said.ends_with("key k-1"),
            "{said}"
        );
        assert_eq!((Grave::of_machine(WAIVE), Grave::of_machine("other")), (Some(Grave::Waive), None));
    }
}
