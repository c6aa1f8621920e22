//! Report that the curator of this node turns connections away.
//!
//! Shepherds record this of their own listeners in their sessions. A curator has none, so its role server reports a
//! finding with the heartbeats of the machine.

use std::time::{Duration, Instant};

use curator::service::gate_monitor::{GateMonitor, GateNumbers};
use model::host_finding::{HostFinding, HostFindingKind};

use crate::cluster::local_curator::CURATOR_PORT;
use crate::host_findings::HostFindings;

/// The source of the finding of this file.
const SOURCE: &str = "curator-gate";
/// How long the finding stays after the last connection: as long as the issue of a shepherd's listener.
const NOTICE: Duration = Duration::from_mins(15);

/// Sets or withdraws the finding.
pub fn update_finding(gate: &GateMonitor, findings: &HostFindings) {
    findings.set(SOURCE, assess_gate(&gate.numbers(), Instant::now()).into_iter().collect());
}

/// The finding, if the gate turned a connection away lately. Its message stays the same as long as it is reported,
/// because each change of it is written to the database.
fn assess_gate(numbers: &GateNumbers, now: Instant) -> Option<HostFinding> {
    let at = numbers.turned_away_at?;
    (now.saturating_duration_since(at) < NOTICE).then(|| HostFinding {
        kind: HostFindingKind::ConnectionsTurnedAway,
        message: format!(
            "its curator (port {CURATOR_PORT}) had more connections than its {} places, and closed or refused some in \
             the last {} minutes",
            numbers.places,
            NOTICE.as_secs() / 60
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_stays_for_a_while_after_the_last_connection() {
        let at = Instant::now();
        let numbers = |turned_away_at| GateNumbers { places: 384, turned_away_at, ..GateNumbers::default() };
        for (turned_away_at, after, expected) in [
            (None, Duration::ZERO, false),
            (Some(at), Duration::ZERO, true),
            (Some(at), Duration::from_secs(899), true),
            (Some(at), Duration::from_mins(15), false),
        ] {
            let found = assess_gate(&numbers(turned_away_at), at + after);
            assert_eq!(found.is_some(), expected, "{turned_away_at:?} {after:?}");
            assert!(found.is_none_or(|found| {
                found.kind == HostFindingKind::ConnectionsTurnedAway
                    && found.message
                        == "its curator (port 7835) had more connections than its 384 places, and closed or refused some in \
                            the last 15 minutes"
            }));
        }
        let findings = HostFindings::default();
        update_finding(&GateMonitor::default(), &findings);
        assert!(findings.collect().is_empty());
    }
}
