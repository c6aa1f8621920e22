//! Replacement of a cluster's authority, as an operator orders it.
//!
//! The curators replace the authority stage by stage, and report how far they are. The holder of the cluster's lease
//! calls them until they begin, and ends the order when they report that the replacement has ended.
//!
//! # One order, one replacement
//!
//! The digest of the authority that is replaced is stored before the curators are called. A shepherd may die after any
//! step, and its successor may come after the replacement has ended: if another authority signs then, the order is
//! carried out. So nothing is called twice that would replace the successor, too.
//!
//! An order after a theft (`compromised`) is carried out in another way, because the stolen key could sign its own
//! successor: [`authority_theft`](super::authority_theft).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::humanize::{absolute_time, humanize_duration};
use crate::process::UnknownName;
use crate::time::{Timestamp, between};

/// How long no curator may answer before a replacement counts as stopped. An election takes seconds, and so does the restart
/// of the only member of etcd.
pub const SILENCE_LIMIT: Duration = Duration::from_mins(2);

/// How often the authority of a cluster can be replaced by choice. After that, the way from the first authority that a
/// shepherd or a node trusts to the one that signs is too long to be followed. After a theft, it begins at the new authority.
pub const MAX_REPLACEMENTS: usize = 2048;

/// From so many replacements on, an issue announces that end. With one each week, it comes 11 months later.
pub const ANNOUNCED_REPLACEMENTS: usize = 2000;

/// Why the authority of a cluster is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationKind {
    /// By choice: the present authority signs who succeeds it.
    Planned,
    /// After a theft of its key: nothing that it signs counts.
    Compromised,
}

impl RotationKind {
    /// All kinds of a replacement.
    pub const ALL: [Self; 2] = [Self::Planned, Self::Compromised];

    /// The name used in the database and in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Compromised => "compromised",
        }
    }
}

impl fmt::Display for RotationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RotationKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "kind of replacement",
            name: name.to_owned(),
            known: "planned, compromised",
        })
    }
}

/// An order to replace the authority that is not carried out yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityRotationOrder {
    /// Why the authority is replaced.
    pub kind: RotationKind,
    /// When an operator ordered it.
    pub ordered_at: Timestamp,
    /// Name of that operator.
    pub ordered_by: String,
    /// SHA-256 of the certificate of the authority that a planned order replaces; `None` until the order is begun.
    pub replaces: Option<Vec<u8>>,
}

/// A node that the replacement waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityWait {
    /// ID of the node. After a theft, the name of its machine.
    pub node: String,
    /// What the node lacks, as a sentence about it without a full stop.
    pub reason: String,
}

/// How far a replacement is, as the curators report it. It is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityProgress {
    /// `trusted`, `signing` or `dropping`; `unknown` if the curators are of a later release. After a theft, the name of an
    /// [`AuthorityStep`](super::authority_theft::AuthorityStep).
    pub stage: String,
    /// When the stage began, by the clock of the leading curator.
    pub since: Option<Timestamp>,
    /// The nodes that the stage waits for, ordered by ID.
    pub waits_for: Vec<AuthorityWait>,
}

/// What the curators report of a cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ObservedAuthority {
    /// SHA-256 of the certificate of the authority that signs; `None` if they report none.
    pub signer: Option<Vec<u8>>,
    /// The replacement that is under way, also one that nobody ordered.
    pub progress: Option<AuthorityProgress>,
}

/// What has to be done for an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RotationPlan {
    /// Nothing is ordered that is carried out here.
    Idle,
    /// The curators replace the authority; what they wait for is in their report.
    Follow,
    /// The order is not begun, for this reason.
    Wait(String),
    /// Store the digest of the authority that the order replaces.
    RecordReplaced(Vec<u8>),
    /// Call the curators to begin, with the digest of the authority that the order replaces.
    Begin(Vec<u8>),
    /// The order is carried out: end it.
    End,
}

/// Plans what has to be done for an order.
#[must_use]
pub fn plan_rotation(order: Option<&AuthorityRotationOrder>, observed: &ObservedAuthority) -> RotationPlan {
    let Some(order) = order.filter(|order| order.kind == RotationKind::Planned) else {
        return RotationPlan::Idle;
    };
    let by = &order.ordered_by;
    let Some(signer) = &observed.signer else {
        return RotationPlan::Wait(format!(
            "its authority is not replaced yet, as {by} ordered: its curators do not report which authority signs"
        ));
    };
    match (&order.replaces, &observed.progress) {
        (None, Some(_)) => RotationPlan::Wait(format!(
            "its authority is being replaced already; the replacement that {by} ordered begins after that"
        )),
        (None, None) => RotationPlan::RecordReplaced(signer.clone()),
        (Some(_), Some(_)) => RotationPlan::Follow,
        (Some(replaced), None) if replaced == signer => RotationPlan::Begin(signer.clone()),
        (Some(_), None) => RotationPlan::End,
    }
}

/// Why another replacement of the authority of cluster `name` cannot be ordered now, as a sentence; `None` if it can.
///
/// An order after a theft takes the place of everything but another one of its kind.
#[must_use]
pub fn rotation_objection(
    name: &str,
    kind: RotationKind,
    order: Option<&AuthorityRotationOrder>,
    progress: Option<&AuthorityProgress>,
) -> Option<String> {
    let ordered_after_theft = order.is_some_and(|order| order.kind == RotationKind::Compromised);
    if kind == RotationKind::Compromised && !ordered_after_theft {
        return None;
    }
    let running = match (progress, order) {
        (Some(progress), _) => {
            let since = progress.since.map(|since| format!(" since {}", absolute_time(since)));
            let since = since.unwrap_or_default();
            let nodes: Vec<&str> = progress.waits_for.iter().map(|wait| wait.node.as_str()).collect();
            let waits =
                if nodes.is_empty() { String::new() } else { format!(", waits for {}", nodes.join(", ")) };
            format!("is being replaced (stage {}{since}{waits})", progress.stage)
        }
        (None, Some(order)) => {
            let at = absolute_time(order.ordered_at);
            format!("already has a replacement, which {} ordered at {at}", order.ordered_by)
        }
        (None, None) => return None,
    };
    Some(format!(
        "the authority of the cluster {name} {running}: wait until that has ended; watch it with: shepherdctl \
         cluster describe {name}"
    ))
}

/// Why the replacement of a cluster's authority does not go on, as a part of a sentence; `None` if there is no replacement,
/// or if its curators answer.
///
/// `unreachable_since`: since when no curator answers. Every step is written to etcd, so a cluster without a quorum makes
/// none. After a theft, the members of etcd follow orders of the shepherd, which need no quorum.
#[must_use]
pub fn stopped_replacement(
    order: Option<&AuthorityRotationOrder>,
    progress: Option<&AuthorityProgress>,
    unreachable_since: Option<Timestamp>,
    now: Timestamp,
) -> Option<String> {
    let silence = between(unreachable_since?, now);
    if silence < SILENCE_LIMIT || order.is_some_and(|order| order.kind == RotationKind::Compromised) {
        return None;
    }
    let stopped = match (progress, order) {
        (Some(progress), _) => {
            format!("the replacement of its authority does not go on (stage {})", progress.stage)
        }
        (None, Some(order)) => {
            format!("the replacement of its authority that {} ordered does not begin", order.ordered_by)
        }
        (None, None) => return None,
    };
    let lasts = humanize_duration(silence);
    Some(format!("{stopped}: no curator of it has answered for {lasts}, so its etcd may have no quorum"))
}

/// What a person does about a [`stopped_replacement`] of the cluster `name`, as a part of a sentence.
#[must_use]
pub fn stopped_replacement_remedy(name: &str) -> String {
    format!(
        "bring back machines of its control plane until most of them run, and the replacement goes on by itself; if they \
         are lost, restore the cluster with: shepherdctl cluster restore {name}"
    )
}

/// The words that an operator types to order a replacement after a theft.
#[must_use]
pub fn compromised_confirmation(name: &str) -> String {
    format!("the authority of {name} is compromised")
}

/// Rejects a typed text that is not the [`compromised_confirmation`]. A planned replacement needs none.
pub fn check_rotation_confirmation(kind: RotationKind, name: &str, typed: &str) -> Result<(), String> {
    let words = compromised_confirmation(name);
    if kind == RotationKind::Planned || typed.trim() == words {
        return Ok(());
    }
    Err(format!(
        "after a theft, nothing that the former authority signed counts: the etcd of each member restarts twice, \
         tickets and certificates of people end, a person has to visit each node without an agent, and every snapshot \
         until now is worthless. Confirm that with the words \"{words}\". Nothing was changed"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + second, 0).unwrap()
    }

    fn order(kind: RotationKind, replaces: Option<u8>) -> AuthorityRotationOrder {
        AuthorityRotationOrder {
            kind,
            ordered_at: at(0),
            ordered_by: "kim".to_owned(),
            replaces: replaces.map(|authority| vec![authority; 32]),
        }
    }

    fn progress(nodes: &[&str]) -> AuthorityProgress {
        let wait = |node: &&str| AuthorityWait { node: (*node).to_owned(), reason: "it is slow".to_owned() };
        AuthorityProgress {
            stage: "signing".to_owned(),
            since: Some(at(60)),
            waits_for: nodes.iter().map(wait).collect(),
        }
    }

    fn observed(signer: Option<u8>, running: bool) -> ObservedAuthority {
        ObservedAuthority {
            signer: signer.map(|authority| vec![authority; 32]),
            progress: running.then(|| progress(&[])),
        }
    }

    #[test]
    fn one_order_begins_one_replacement_and_ends_after_it() {
        use RotationKind::{Compromised, Planned};
        let waits = |text: &str| RotationPlan::Wait(text.to_owned());
        let silent = waits(
            "its authority is not replaced yet, as kim ordered: its curators do not report which authority signs",
        );
        let another = waits(
            "its authority is being replaced already; the replacement that kim ordered begins after that",
        );
        for (what, order, observed, expected) in [
            ("nothing ordered", None, observed(Some(1), false), RotationPlan::Idle),
            ("begun by somebody else", None, observed(Some(1), true), RotationPlan::Idle),
            ("a theft", Some(order(Compromised, None)), observed(Some(1), false), RotationPlan::Idle),
            ("no signer", Some(order(Planned, None)), observed(None, false), silent.clone()),
            ("no signer any more", Some(order(Planned, Some(1))), observed(None, false), silent),
            ("another one runs", Some(order(Planned, None)), observed(Some(1), true), another),
            (
                "ordered",
                Some(order(Planned, None)),
                observed(Some(1), false),
                RotationPlan::RecordReplaced(vec![1; 32]),
            ),
            (
                "recorded",
                Some(order(Planned, Some(1))),
                observed(Some(1), false),
                RotationPlan::Begin(vec![1; 32]),
            ),
            ("trusted", Some(order(Planned, Some(1))), observed(Some(1), true), RotationPlan::Follow),
            ("signing", Some(order(Planned, Some(1))), observed(Some(2), true), RotationPlan::Follow),
            ("ended", Some(order(Planned, Some(1))), observed(Some(2), false), RotationPlan::End),
        ] {
            assert_eq!(plan_rotation(order.as_ref(), &observed), expected, "{what}");
        }
    }

    #[test]
    fn replacement_that_runs_refuses_another_in_one_sentence() {
        use RotationKind::{Compromised, Planned};
        let (ordered, theft) = (order(Planned, None), order(Compromised, None));
        let running = progress(&["node-1", "node-2"]);
        for (kind, order, progress, expected) in [
            (Planned, None, None, None),
            (Planned, Some(&ordered), None, Some("already has a replacement, which kim ordered at ")),
            (Planned, Some(&theft), None, Some("already has a replacement, which kim ordered at ")),
            (Planned, Some(&ordered), Some(&running), Some("(stage signing since ")),
            (Planned, None, Some(&running), Some(", waits for node-1, node-2): wait until that has ended")),
            (Compromised, None, None, None),
            (Compromised, Some(&ordered), Some(&running), None),
            (Compromised, Some(&theft), None, Some("already has a replacement")),
        ] {
            let objection = rotation_objection("ams", kind, order, progress);
            match (&objection, expected) {
                (None, None) => {}
                (Some(text), Some(part)) => {
                    assert!(text.starts_with("the authority of the cluster ams "), "{text}");
                    assert!(text.contains(part) && !text.contains(". "), "{text}");
                }
                _ => panic!("{kind}: {objection:?}"),
            }
        }
    }

    #[test]
    fn replacement_without_a_quorum_is_explained_in_one_sentence() {
        use RotationKind::{Compromised, Planned};
        let (ordered, theft) = (order(Planned, None), order(Compromised, None));
        let running = progress(&["node-1"]);
        let goes_on = "the replacement of its authority does not go on (stage signing): no curator of it has answered for \
                       2m, so its etcd may have no quorum";
        let begins = "the replacement of its authority that kim ordered does not begin: no curator of it has answered for \
                      2m, so its etcd may have no quorum";
        for (what, order, progress, since, expected) in [
            ("nothing is replaced", None, None, Some(0), None),
            ("curators answer", Some(&ordered), Some(&running), None, None),
            ("they were elected meanwhile", Some(&ordered), Some(&running), Some(1), None),
            ("ordered", Some(&ordered), None, Some(0), Some(begins)),
            ("running", Some(&ordered), Some(&running), Some(0), Some(goes_on)),
            ("nobody ordered it", None, Some(&running), Some(0), Some(goes_on)),
            ("a theft", Some(&theft), None, Some(0), None),
            ("a theft meanwhile", Some(&theft), Some(&running), Some(0), None),
        ] {
            let stopped = stopped_replacement(order, progress, since.map(at), at(120));
            assert_eq!(stopped.as_deref(), expected, "{what}");
        }
        let remedy = stopped_replacement_remedy("ams");
        assert!(remedy.ends_with("shepherdctl cluster restore ams") && !remedy.contains(". "), "{remedy}");
    }

    #[test]
    fn theft_alone_is_confirmed_word_for_word() {
        use RotationKind::{Compromised, Planned};
        for (kind, typed, accepted) in [
            (Planned, "", true),
            (Compromised, "", false),
            (Compromised, "the authority of fra is compromised", false),
            (Compromised, " the authority of ams is compromised\n", true),
        ] {
            let checked = check_rotation_confirmation(kind, "ams", typed);
            assert_eq!(checked.is_ok(), accepted, "{kind} {typed:?}");
            assert!(
                checked.err().is_none_or(|text| text.contains("\"the authority of ams is compromised\""))
            );
        }
    }

    #[test]
    fn kind_has_the_name_that_is_stored() {
        for kind in RotationKind::ALL {
            assert_eq!(kind.to_string().parse::<RotationKind>().ok(), Some(kind));
        }
        assert!("stolen".parse::<RotationKind>().is_err());
    }
}
