//! The last lines of something, in memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use chrono::{DateTime, SecondsFormat, Utc};

/// Most lines that are kept.
const LINES: usize = 50;
/// Most characters of one.
const LONGEST: usize = 300;

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<String>,
    gone: u64,
}

/// Its last lines; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Ring(Arc<Mutex<Kept>>);

impl Ring {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a line of now.
    pub fn say(&self, what: &str) {
        let at = DateTime::<Utc>::from(SystemTime::now()).to_rfc3339_opts(SecondsFormat::Micros, true);
        let line: String = format!("{at}  INFO {what}").chars().take(LONGEST).collect();
        let mut kept = self.kept();
        kept.lines.push_back(line);
        if kept.lines.len() > LINES {
            kept.lines.pop_front();
            kept.gone += 1;
        }
    }

    /// The lines from that place on, counted from the first one ever, and the place behind them.
    #[must_use]
    pub fn from(&self, place: u64) -> (Vec<String>, u64) {
        let kept = self.kept();
        let skipped = usize::try_from(place.saturating_sub(kept.gone)).unwrap_or(usize::MAX);
        let lines = kept.lines.iter().skip(skipped).cloned().collect();
        let end = kept.gone + u64::try_from(kept.lines.len()).unwrap_or_default();
        (lines, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_kept_and_told_from_a_place_on() {
        let ring = Ring::default();
        for number in 0..60 {
            ring.say(&format!("line {number}"));
        }
        let (lines, end) = ring.from(0);
        assert_eq!((lines.len(), end), (LINES, 60));
        assert!(lines[0].ends_with("INFO line 10"), "{lines:?}");
        assert_eq!(ring.from(end), (Vec::new(), 60));
        ring.say("one more");
        assert!(ring.from(end).0[0].ends_with("one more"));
    }
}
