//! Restore check: is the control plane known to be lost?
//!
//! A cluster may be restored from a snapshot only if its control plane is known not to work. Silence is evidence only
//! for the time in which a shepherd queried. A cluster that no shepherd polled for a while may be healthy, and so may
//! one whose curators were queried once by a shepherd that has just started. An operator who knows more bypasses the
//! check with a flag of the order.

use std::time::Duration;

use crate::cluster::disruption::OBSERVATION_TTL;
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
}

/// Why a cluster is not restored: a code for programs, and a text that continues a sentence after the cluster's name.
pub type RestoreObjection = (&'static str, String);

/// Checks that the control plane is lost, as far as anyone can know; the error is why nothing is done.
pub fn check_restore_allowed(
    evidence: &ControlPlaneEvidence,
    now: Timestamp,
) -> Result<(), RestoreObjection> {
    let fresh = |at: Option<Timestamp>| at.filter(|at| between(*at, now) <= OBSERVATION_TTL);
    let bypass = "To restore it anyway, give --bypass_quorum";
    if !evidence.founded {
        return Err(("NOT_FOUNDED", "cannot be restored: it was never founded".to_owned()));
    }
    if fresh(evidence.answered_at).is_some()
        && let Some((voters, reached)) = evidence.votes
    {
        if reached < majority(voters) {
            return Ok(());
        }
        let text = format!(
            "is not restored: {reached} of the {voters} members of its control plane answered within a minute, and \
             all changes since its snapshot would be lost. Lost members are replaced without a restore. \
             {bypass}"
        );
        return Err(("QUORUM_ANSWERS", text));
    }
    if fresh(evidence.polled_at).is_none() {
        let since = match evidence.polled_at {
            Some(at) => format!("a shepherd last looked at it {}", relative_time(at, now)),
            None => "no shepherd ever looked at it".to_owned(),
        };
        let text = format!(
            "is not restored: {since}, so it is not known whether its control plane works. Make sure that a \
             shepherd runs with the component cluster. {bypass}"
        );
        return Err(("NOBODY_LOOKED", text));
    }
    let silent = evidence.unreachable_since.map_or(Duration::ZERO, |since| between(since, now));
    if silent < OBSERVATION_TTL {
        let text = format!(
            "is not restored yet: its curators have not answered for {}, and its control plane counts as lost \
             only after a minute of that. {bypass}",
            Span(Duration::from_secs(silent.as_secs()))
        );
        return Err(("SILENT_TOO_SHORTLY", text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(seconds, 0).unwrap()
    }

    const NOW: i64 = 10_000;

    fn evidence(seen: Option<i64>, away: Option<i64>, votes: Option<(usize, usize)>) -> ControlPlaneEvidence {
        ControlPlaneEvidence {
            founded: true,
            polled_at: Some(at(NOW - 3)),
            answered_at: seen.map(at),
            unreachable_since: away.map(at),
            votes,
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
                Err("SILENT_TOO_SHORTLY"),
            ),
            (
                "it had no majority, and says nothing now",
                evidence(Some(NOW - 61), Some(NOW - 59), Some((3, 1))),
                Err("SILENT_TOO_SHORTLY"),
            ),
            (
                "nobody ever looked",
                ControlPlaneEvidence { polled_at: None, ..gone.clone() },
                Err("NOBODY_LOOKED"),
            ),
            (
                "nobody looks any more",
                ControlPlaneEvidence { polled_at: Some(at(NOW - 61)), ..gone.clone() },
                Err("NOBODY_LOOKED"),
            ),
            (
                "nor when it was well",
                ControlPlaneEvidence {
                    polled_at: Some(at(NOW - 99)),
                    answered_at: Some(at(NOW - 99)),
                    ..well
                },
                Err("NOBODY_LOOKED"),
            ),
            ("it was restored just now", evidence(None, None, None), Err("SILENT_TOO_SHORTLY")),
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
                text.is_empty() || text.contains("--bypass_quorum") || text.contains("never founded"),
                "{text}"
            );
        }
    }
}
