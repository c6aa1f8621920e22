//! Is the control plane known to be lost? The check before a restore, and before new certificates for etcd's members.
//!
//! A cluster may be restored from a snapshot only if its control plane is known not to work. Silence is evidence only
//! for the time in which a shepherd queried. A cluster that no shepherd polled for a while may be healthy, and so may
//! one whose curators were queried once by a shepherd that has just started. An operator who knows more bypasses the
//! check with a flag of the order.
//!
//! The same is true of an order that gives members new certificates, except that nothing bypasses the check: members
//! that work renew their certificates by themselves, and without a shepherd nobody carries the order out.
//!
//! The curators of a full etcd fall silent although nothing is lost, because none can be elected. A restore is rejected then and
//! not delayed: the curators of a cluster that is being restored are not queried, so nothing would end the delay.
//!
//! Nodes refuse what a former authority of their cluster signs, so a cluster is not restored from a snapshot in which such a
//! one signs, and nothing bypasses that ([`is_present_authority`]).
//!
//! The records of a snapshot are those of curators, and none are objects of Kubernetes, which are in the same etcd. Without
//! an image of that etcd, the operator confirms that the objects are lost ([`check_restore_confirmation`]).

use std::time::Duration;

use prost::Message as _;
use proto::curator::v1 as wire;

use crate::cluster::disruption::OBSERVATION_TTL;
use crate::cluster::etcd_space::FULL_ETCD;
use crate::cluster::quorum::majority;
use crate::humanize::relative_time;
use crate::time::{Span, Timestamp, between};

/// How far an epoch may exceed the highest known epoch before it is rejected.
pub const MAX_EPOCH_LEAD: u64 = 1_000;

/// Observations of a cluster's control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ControlPlaneEvidence {
    /// Whether the cluster was ever founded.
    pub founded: bool,
    /// When a shepherd last polled its curators; `None` if none ever did.
    pub polled_at: Option<Timestamp>,
    /// When its curators last answered.
    pub answered_at: Option<Timestamp>,
    /// Start of the present series of polls without an answer; `None` if there is none.
    pub unreachable_since: Option<Timestamp>,
    /// Voting members of etcd, and how many of them the last answer reported as reached.
    pub votes: Option<(usize, usize)>,
    /// Since when its etcd has been full, by the last answer of its curators.
    pub etcd_full_since: Option<Timestamp>,
}

/// Why a cluster is not restored: a code for programs, and a text that continues a sentence after the cluster's name.
pub type RestoreObjection = (&'static str, String);

/// Whether the authority of a snapshot, by the SHA-256 of its certificate, signed the newest statement of the cluster, as
/// it is stored.
///
/// Earlier releases stored no authority with their snapshots, and replaced none. Without a statement nothing is known, and
/// the shepherd reports a damaged one elsewhere.
#[must_use]
pub fn is_present_authority(authority: Option<&[u8]>, statement: &[u8]) -> bool {
    let Ok(signed) = wire::SignedStatement::decode(statement) else { return true };
    let Ok(stated) = wire::Statement::decode(signed.statement.as_slice()) else { return true };
    match (authority, stated.authorities.first()) {
        (Some(_), Some(signer)) => has_authority(authority, signer),
        (None, Some(_)) => signed.successors.is_empty(),
        (_, None) => true,
    }
}

/// Whether a snapshot with the authority of this digest has the authority of this certificate.
#[must_use]
pub fn has_authority(authority: Option<&[u8]>, certificate: &[u8]) -> bool {
    let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
    authority.is_some_and(|authority| digest.as_ref() == authority)
}

/// Why the control plane of a cluster does not count as lost.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NotLost {
    NeverFounded,
    /// A majority of the members answers.
    Answers {
        voters: usize,
        reached: usize,
    },
    /// No shepherd polled it lately. The text is since when, as a part of a sentence.
    NotPolled(String),
    /// It has not been silent for longer.
    SilentFor(Duration),
}

impl NotLost {
    const fn code(&self) -> &'static str {
        match self {
            Self::NeverFounded => "NOT_FOUNDED",
            Self::Answers { .. } => "QUORUM_ANSWERS",
            Self::NotPolled(_) => "NOT_OBSERVED",
            Self::SilentFor(_) => "SILENCE_TOO_SHORT",
        }
    }
}

fn check_lost(evidence: &ControlPlaneEvidence, now: Timestamp) -> Result<(), NotLost> {
    let fresh = |at: Option<Timestamp>| at.filter(|at| between(*at, now) <= OBSERVATION_TTL);
    if !evidence.founded {
        return Err(NotLost::NeverFounded);
    }
    if fresh(evidence.answered_at).is_some()
        && let Some((voters, reached)) = evidence.votes
    {
        return if reached < majority(voters) { Ok(()) } else { Err(NotLost::Answers { voters, reached }) };
    }
    if fresh(evidence.polled_at).is_none() {
        return Err(NotLost::NotPolled(match evidence.polled_at {
            Some(at) => format!("a shepherd last looked at it {}", relative_time(at, now)),
            None => "no shepherd ever looked at it".to_owned(),
        }));
    }
    let silent = evidence.unreachable_since.map_or(Duration::ZERO, |since| between(since, now));
    if silent < OBSERVATION_TTL {
        return Err(NotLost::SilentFor(Duration::from_secs(silent.as_secs())));
    }
    Ok(())
}

/// Checks that the control plane is lost, as far as anyone can know; the error is why nothing is done.
pub fn check_restore_allowed(
    evidence: &ControlPlaneEvidence,
    now: Timestamp,
) -> Result<(), RestoreObjection> {
    let bypass = "To restore it anyway, give --bypass-quorum";
    let why = match (check_lost(evidence, now), evidence.etcd_full_since) {
        (Err(why), _) => why,
        (Ok(()), None) => return Ok(()),
        (Ok(()), Some(since)) => {
            let text = format!(
                "is not restored: its etcd {FULL_ETCD}, as its curators first reported {}, and nothing is lost by \
                 that; run: shepherdctl explain cluster-etcd-full. {bypass}",
                relative_time(since, now)
            );
            return Err(("ETCD_FULL", text));
        }
    };
    let text = match &why {
        NotLost::NeverFounded => "cannot be restored: it was never founded".to_owned(),
        NotLost::Answers { voters, reached } => format!(
            "is not restored: {reached} of the {voters} members of its control plane answered within a minute, and \
             all changes since its snapshot would be lost. Lost members are replaced without a restore. \
             {bypass}"
        ),
        NotLost::NotPolled(since) => format!(
            "is not restored: {since}, so it is not known whether its control plane works. Make sure that a \
             shepherd runs with the component cluster. {bypass}"
        ),
        NotLost::SilentFor(silent) => format!(
            "is not restored yet: its curators have not answered for {}, and its control plane counts as lost \
             only after a minute of that. {bypass}",
            Span(*silent)
        ),
    };
    Err((why.code(), text))
}

/// The words that an operator types to restore a cluster that has Kubernetes.
#[must_use]
pub fn restore_confirmation(name: &str) -> String {
    format!("the Kubernetes objects of {name} are lost")
}

/// Rejects a typed text that is not the [`restore_confirmation`]; the error lists what is lost. `taken_at` is the time of
/// the snapshot. A cluster that loses no objects loses only later changes, and needs no words.
pub fn check_restore_confirmation(
    loses_objects: bool,
    name: &str,
    taken_at: Timestamp,
    now: Timestamp,
    typed: &str,
) -> Result<(), RestoreObjection> {
    let words = restore_confirmation(name);
    if !loses_objects || typed.trim() == words {
        return Ok(());
    }
    let text = format!(
        "is not restored: the records of its curators would come back, and none of its Kubernetes objects. These would be \
         lost: all workloads, and with them every pod; all Services, ConfigMaps, Secrets, service accounts, access rules and \
         custom resources; which volume belongs to which claim; and what was changed in the cluster since the snapshot was \
         taken, {}. Confirm that with the words \"{words}\" (--confirm). Nothing was changed",
        relative_time(taken_at, now)
    );
    Err(("CONFIRMATION_REQUIRED", text))
}

/// Checks that members of the control plane may get new certificates for etcd by an order; the error is why none is
/// sent.
pub fn check_peer_renewal_allowed(
    evidence: &ControlPlaneEvidence,
    now: Timestamp,
) -> Result<(), RestoreObjection> {
    let Err(why) = check_lost(evidence, now) else { return Ok(()) };
    let text = match &why {
        NotLost::NeverFounded => {
            "has no members that could get certificates: it was never founded".to_owned()
        }
        NotLost::Answers { voters, reached } => format!(
            "needs no such order: {reached} of the {voters} members of its control plane answered within a minute, and \
             members renew their certificates by themselves"
        ),
        NotLost::NotPolled(since) => format!(
            "gets no new certificates: {since}, so it is not known whether its control plane works. Make sure that a \
             shepherd runs with the component cluster"
        ),
        NotLost::SilentFor(silent) => format!(
            "gets no new certificates yet: its curators have not answered for {}, and its control plane counts as lost \
             only after a minute of that",
            Span(*silent)
        ),
    };
    Err((why.code(), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(seconds, 0).unwrap()
    }

    fn digest(signer: &[u8]) -> Vec<u8> {
        ring::digest::digest(&ring::digest::SHA256, signer).as_ref().to_vec()
    }

    /// A statement with these authorities, the first of which signs, as it is stored.
    fn stored(authorities: &[&[u8]], successors: &[&[u8]]) -> Vec<u8> {
        let copied = |list: &[&[u8]]| list.iter().map(|one| one.to_vec()).collect();
        let stated = wire::Statement { authorities: copied(authorities), ..wire::Statement::default() };
        let signed = wire::SignedStatement {
            statement: stated.encode_to_vec(),
            successors: copied(successors),
            ..wire::SignedStatement::default()
        };
        signed.encode_to_vec()
    }

    #[test]
    fn snapshot_of_a_former_authority_is_not_restored() {
        let before = stored(&[b"a"], &[]);
        let both = stored(&[b"b", b"a"], &[b"a-b"]);
        let after = stored(&[b"b"], &[b"a-b"]);
        let (none, damaged) = (Vec::new(), vec![0xff; 9]);
        let (first, second) = (digest(b"a"), digest(b"b"));
        for (what, authority, statement, expected) in [
            ("never replaced", Some(&first), &before, true),
            ("never replaced, by an earlier release", None, &before, true),
            ("the former one, while it is trusted", Some(&first), &both, false),
            ("the former one", Some(&first), &after, false),
            ("by an earlier release, before it was replaced", None, &after, false),
            ("the one that signs", Some(&second), &both, true),
            ("the one that signs alone", Some(&second), &after, true),
            ("no statement", Some(&first), &none, true),
            ("no statement, by an earlier release", None, &none, true),
            ("damaged", Some(&first), &damaged, true),
        ] {
            assert_eq!(is_present_authority(authority.map(Vec::as_slice), statement), expected, "{what}");
        }
    }

    const NOW: i64 = 10_000;

    fn evidence(seen: Option<i64>, away: Option<i64>, votes: Option<(usize, usize)>) -> ControlPlaneEvidence {
        ControlPlaneEvidence {
            founded: true,
            polled_at: Some(at(NOW - 3)),
            answered_at: seen.map(at),
            unreachable_since: away.map(at),
            votes,
            etcd_full_since: None,
        }
    }

    #[test]
    fn loss_of_kubernetes_objects_is_confirmed_word_for_word() {
        for (has_kubernetes, typed, accepted) in [
            (false, "", true),
            (true, "", false),
            (true, "yes", false),
            (true, "the Kubernetes objects of fra are lost", false),
            (true, " the Kubernetes objects of ams are lost\n", true),
        ] {
            let checked = check_restore_confirmation(has_kubernetes, "ams", at(NOW - 7_200), at(NOW), typed);
            assert_eq!(checked.is_ok(), accepted, "{has_kubernetes} {typed:?}");
            let Err((reason, text)) = checked else { continue };
            assert_eq!(reason, "CONFIRMATION_REQUIRED");
            for part in
                ["\"the Kubernetes objects of ams are lost\"", "Secrets", "custom resources", "2h00m ago"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }

    #[test]
    fn control_plane_is_lost_without_quorum_or_after_a_minute_of_silence() {
        let well = evidence(Some(NOW - 3), None, Some((3, 3)));
        let gone = evidence(Some(NOW - 70), Some(NOW - 60), Some((3, 3)));
        for (what, evidence, expected) in [
            ("it is well", well.clone(), Err("QUORUM_ANSWERS")),
            ("just a majority", evidence(Some(NOW - 60), None, Some((3, 2))), Err("QUORUM_ANSWERS")),
            ("one of three, as it says itself", evidence(Some(NOW - 3), None, Some((3, 1))), Ok(())),
            ("one of two", evidence(Some(NOW - 3), None, Some((2, 1))), Ok(())),
            ("nobody answers", gone.clone(), Ok(())),
            (
                "since a moment",
                ControlPlaneEvidence { unreachable_since: Some(at(NOW - 59)), ..gone.clone() },
                Err("SILENCE_TOO_SHORT"),
            ),
            (
                "it had no majority, and says nothing now",
                evidence(Some(NOW - 61), Some(NOW - 59), Some((3, 1))),
                Err("SILENCE_TOO_SHORT"),
            ),
            (
                "nobody ever looked",
                ControlPlaneEvidence { polled_at: None, ..gone.clone() },
                Err("NOT_OBSERVED"),
            ),
            (
                "nobody looks any more",
                ControlPlaneEvidence { polled_at: Some(at(NOW - 61)), ..gone.clone() },
                Err("NOT_OBSERVED"),
            ),
            (
                "nor when it was well",
                ControlPlaneEvidence {
                    polled_at: Some(at(NOW - 99)),
                    answered_at: Some(at(NOW - 99)),
                    ..well
                },
                Err("NOT_OBSERVED"),
            ),
            ("it was restored just now", evidence(None, None, None), Err("SILENCE_TOO_SHORT")),
            ("and its curators are away again", evidence(None, Some(NOW - 60), None), Ok(())),
            ("never founded", ControlPlaneEvidence { founded: false, ..gone }, Err("NOT_FOUNDED")),
        ] {
            let decided = check_restore_allowed(&evidence, at(NOW));
            assert_eq!(
                decided.as_ref().map_err(|(reason, _)| *reason),
                expected.as_ref().map(|()| &()).map_err(|reason| *reason),
                "{what}"
            );
            let text = decided.err().map(|(_, text)| text).unwrap_or_default();
            assert!(
                text.is_empty() || text.contains("--bypass-quorum") || text.contains("never founded"),
                "{text}"
            );
            // Members get new certificates in just the same cases. Nothing bypasses this check.
            let renewal = check_peer_renewal_allowed(&evidence, at(NOW));
            assert_eq!(
                renewal.as_ref().map_err(|(reason, _)| *reason),
                expected.as_ref().map(|()| &()).map_err(|reason| *reason),
                "{what}"
            );
            let text = renewal.err().map(|(_, text)| text).unwrap_or_default();
            assert!(!text.contains("restore") && !text.contains("--bypass-quorum"), "{text}");
        }
    }

    #[test]
    fn full_etcd_is_not_restored_although_no_curator_answers() {
        let gone = evidence(Some(NOW - 70), Some(NOW - 60), Some((3, 3)));
        for (what, evidence, expected) in [
            ("nobody answers", gone.clone(), "ETCD_FULL"),
            ("one of three answers", evidence(Some(NOW - 3), None, Some((3, 1))), "ETCD_FULL"),
            ("it is well", evidence(Some(NOW - 3), None, Some((3, 3))), "QUORUM_ANSWERS"),
            ("never founded", ControlPlaneEvidence { founded: false, ..gone }, "NOT_FOUNDED"),
        ] {
            let full = ControlPlaneEvidence { etcd_full_since: Some(at(NOW - 80)), ..evidence };
            let (reason, text) = check_restore_allowed(&full, at(NOW)).unwrap_err();
            assert_eq!(reason, expected, "{what}: {text}");
            let names_alarm = text.contains("NOSPACE") && text.contains("--bypass-quorum");
            assert_eq!(names_alarm, expected == "ETCD_FULL", "{what}: {text}");
        }
    }
}
