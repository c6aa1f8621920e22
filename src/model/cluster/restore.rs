//! May a cluster be brought back from a snapshot? Only when its control plane is known not to work.
//!
//! Silence counts as evidence for the time in which somebody asked. A cluster that no shepherd looked at for a while may be
//! as well as ever, and so may one whose curators were asked once by a shepherd that has just begun. Whoever knows better
//! than we says so with the order.

use std::time::Duration;

use crate::model::cluster::disturb::FRESH;
use crate::model::cluster::quorum::majority;
use crate::model::telling::relative;
use crate::model::time::{Span, Timestamp, between};

/// How far an epoch may be beyond the highest that is known of, to be believed.
pub const EPOCHS_AHEAD: u64 = 1_000;

/// What is known of a cluster's control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Whether it was ever founded.
    pub founded: bool,
    /// When a shepherd last looked.
    pub looked_at: Option<Timestamp>,
    /// When its curators last answered.
    pub seen_at: Option<Timestamp>,
    /// Since when they have been asked without a pause, and not answered.
    pub away_since: Option<Timestamp>,
    /// Members of etcd that vote, and how many of them were reached when the curators last answered.
    pub votes: Option<(usize, usize)>,
}

/// Why a cluster is not brought back: a name for programs, and what people are told after the cluster's name.
pub type Objection = (&'static str, String);

/// Whether its control plane is lost, as far as anybody can know; if not, why nothing is done.
pub fn may_be_restored(evidence: &Evidence, now: Timestamp) -> Result<(), Objection> {
    let fresh = |at: Option<Timestamp>| at.filter(|at| between(*at, now) <= FRESH);
    let bypass = "If it is to be restored all the same, say so with --bypass_quorum";
    if !evidence.founded {
        return Err(("NOT_FOUNDED", "cannot be restored: it was never founded".to_owned()));
    }
    if fresh(evidence.seen_at).is_some()
        && let Some((voters, reached)) = evidence.votes
    {
        if reached < majority(voters) {
            return Ok(());
        }
        let said = format!(
            "is not restored: {reached} of the {voters} members of its control plane answered within a minute, and \
             whatever was changed since its snapshot would be lost. Members that are lost are replaced without that. \
             {bypass}"
        );
        return Err(("QUORUM_ANSWERS", said));
    }
    if fresh(evidence.looked_at).is_none() {
        let since = match evidence.looked_at {
            Some(at) => format!("a shepherd last looked at it {}", relative(at, now)),
            None => "no shepherd ever looked at it".to_owned(),
        };
        let said = format!(
            "is not restored: {since}, so that nobody knows whether its control plane works. See that a shepherd runs \
             with the loop cluster. {bypass}"
        );
        return Err(("NOBODY_LOOKED", said));
    }
    let silent = evidence.away_since.map_or(Duration::ZERO, |since| between(since, now));
    if silent < FRESH {
        let said = format!(
            "is not restored yet: its curators have been asked in vain for {}, and after a minute of that its control \
             plane counts as lost. {bypass}",
            Span(Duration::from_secs(silent.as_secs()))
        );
        return Err(("SILENT_TOO_SHORTLY", said));
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

    fn evidence(seen: Option<i64>, away: Option<i64>, votes: Option<(usize, usize)>) -> Evidence {
        Evidence {
            founded: true,
            looked_at: Some(at(NOW - 3)),
            seen_at: seen.map(at),
            away_since: away.map(at),
            votes,
        }
    }

    #[test]
    fn control_plane_is_lost_when_it_says_so_or_was_asked_in_vain_for_a_minute() {
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
                Evidence { away_since: Some(at(NOW - 59)), ..gone.clone() },
                Err("SILENT_TOO_SHORTLY"),
            ),
            (
                "it had no majority, and says nothing now",
                evidence(Some(NOW - 61), Some(NOW - 59), Some((3, 1))),
                Err("SILENT_TOO_SHORTLY"),
            ),
            ("nobody ever looked", Evidence { looked_at: None, ..gone.clone() }, Err("NOBODY_LOOKED")),
            (
                "nobody looks any more",
                Evidence { looked_at: Some(at(NOW - 61)), ..gone.clone() },
                Err("NOBODY_LOOKED"),
            ),
            (
                "nor when it was well",
                Evidence { looked_at: Some(at(NOW - 99)), seen_at: Some(at(NOW - 99)), ..well },
                Err("NOBODY_LOOKED"),
            ),
            ("it was restored just now", evidence(None, None, None), Err("SILENT_TOO_SHORTLY")),
            ("and its curators are away again", evidence(None, Some(NOW - 60), None), Ok(())),
            ("never founded", Evidence { founded: false, ..gone }, Err("NOT_FOUNDED")),
        ] {
            let decided = may_be_restored(&evidence, at(NOW));
            assert_eq!(
                decided.as_ref().map_err(|(reason, _)| *reason),
                expected.as_ref().map(|()| &()).map_err(|reason| *reason),
                "{what}"
            );
            let said = decided.err().map(|(_, said)| said).unwrap_or_default();
            assert!(
                said.is_empty() || said.contains("--bypass_quorum") || said.contains("never founded"),
                "{said}"
            );
        }
    }
}
