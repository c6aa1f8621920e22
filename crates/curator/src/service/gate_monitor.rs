//! What the gate of a curator has done: its connections, and those that it turned away.
//!
//! A curator serves no metrics, and does not know the shepherd. Its role server prints these numbers with its own, and
//! reports to the shepherd that connections are turned away. So the role server owns the monitor, which lasts longer
//! than one run of the curator.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use transport::gate::GateEvent;
use transport::gate::table::CloseReason;

/// The reason for a connection that the operating system did not give.
const NOT_ACCEPTED: &str = "accept";

/// The numbers of a curator's gate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GateNumbers {
    /// Places for connections, which follow from the limit of open files. Zero before a curator has run.
    pub places: usize,
    /// Connections on which a certificate of the cluster was accepted.
    pub proven: usize,
    /// Connections without such a certificate.
    pub unproven: usize,
    /// Connections that were closed or not accepted, by reason.
    pub closed: BTreeMap<&'static str, u64>,
    /// Calls of the service Registration that were rejected because their key made too many.
    pub rejected_calls: u64,
    /// When a connection was last turned away: closed for a newer one, refused, or not accepted.
    pub turned_away_at: Option<Instant>,
}

/// The gate of a curator as others see it; cheap to clone, and clones share it.
#[derive(Clone, Debug, Default)]
pub struct GateMonitor(Arc<Mutex<GateNumbers>>);

impl GateMonitor {
    /// The numbers at this moment.
    #[must_use]
    pub fn numbers(&self) -> GateNumbers {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records that a gate with so many places opens. All reasons begin with zero.
    pub(super) fn open(&self, places: usize) {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.places = places;
        for reason in CloseReason::ALL.map(CloseReason::as_str).into_iter().chain([NOT_ACCEPTED]) {
            numbers.closed.entry(reason).or_default();
        }
    }

    /// Counts a call that was rejected because its key made too many.
    pub(super) fn count_rejected_call(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).rejected_calls += 1;
    }

    /// Records an event. Returns whether a connection was turned away.
    pub(super) fn record(&self, event: GateEvent, now: Instant) -> bool {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (reason, turned_away) = match event {
            GateEvent::Counts(counts) => {
                (numbers.proven, numbers.unproven) = (counts.proven, counts.unproven);
                return false;
            }
            GateEvent::Closed(closed) => (closed.reason.as_str(), closed.reason != CloseReason::TimedOut),
            GateEvent::AcceptFailed => (NOT_ACCEPTED, true),
        };
        *numbers.closed.entry(reason).or_default() += 1;
        if turned_away {
            numbers.turned_away_at = Some(now);
        }
        turned_away
    }
}

#[cfg(test)]
mod tests {
    use transport::gate::table::GateCounts;

    use super::*;

    #[test]
    fn numbers_follow_the_events_of_the_gate() {
        let (monitor, now) = (GateMonitor::default(), Instant::now());
        assert_eq!(monitor.numbers(), GateNumbers::default());
        monitor.open(384);
        let counts = GateCounts { handshakes: 1, unproven: 2, proven: 3 };
        assert!(!monitor.record(GateEvent::Counts(counts), now));
        let numbers = monitor.numbers();
        assert_eq!((numbers.places, numbers.unproven, numbers.proven), (384, 2, 3));
        assert_eq!((numbers.closed.len(), numbers.closed.values().sum::<u64>()), (4, 0), "{numbers:?}");
        assert_eq!(numbers.turned_away_at, None);
        assert!(monitor.record(GateEvent::AcceptFailed, now));
        // A curator that begins again keeps the numbers.
        monitor.open(64);
        let numbers = monitor.numbers();
        assert_eq!((numbers.places, numbers.closed.get(NOT_ACCEPTED)), (64, Some(&1)));
        assert_eq!((numbers.turned_away_at, numbers.rejected_calls), (Some(now), 0));
        monitor.count_rejected_call();
        assert_eq!(monitor.numbers().rejected_calls, 1);
    }
}
