//! A ring buffer of log lines in memory, for simulated machines.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};

/// Most lines that are stored.
const MAX_LINES: usize = 50;
/// Most characters of one line.
const MAX_LINE_CHARS: usize = 300;

#[derive(Debug, Default)]
struct RingState {
    lines: VecDeque<String>,
    dropped: u64,
}

/// The last lines of a log; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct LogRing(Arc<Mutex<RingState>>);

impl LogRing {
    fn lock_state(&self) -> MutexGuard<'_, RingState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a line with the current time.
    pub fn append_line(&self, what: &str) {
        let at = DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Micros, true);
        let line: String = format!("{at}  INFO {what}").chars().take(MAX_LINE_CHARS).collect();
        let mut kept = self.lock_state();
        kept.lines.push_back(line);
        if kept.lines.len() > MAX_LINES {
            kept.lines.pop_front();
            kept.dropped += 1;
        }
    }

    /// The lines from a position on, counted from the first line ever, and the position behind them.
    #[must_use]
    pub fn lines_from(&self, place: u64) -> (Vec<String>, u64) {
        let kept = self.lock_state();
        let skipped = usize::try_from(place.saturating_sub(kept.dropped)).unwrap_or(usize::MAX);
        let lines = kept.lines.iter().skip(skipped).cloned().collect();
        let end = kept.dropped + u64::try_from(kept.lines.len()).unwrap_or_default();
        (lines, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_stored_and_read_from_a_position() {
        let ring = LogRing::default();
        for number in 0..60 {
            ring.append_line(&format!("line {number}"));
        }
        let (lines, end) = ring.lines_from(0);
        assert_eq!((lines.len(), end), (MAX_LINES, 60));
        assert!(lines[0].ends_with("INFO line 10"), "{lines:?}");
        assert_eq!(ring.lines_from(end), (Vec::new(), 60));
        ring.append_line("one more");
        assert!(ring.lines_from(end).0[0].ends_with("one more"));
    }
}
