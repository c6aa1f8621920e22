//! The attempts of an attacker: how often each was made, and what became of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::harness::aloud::aloud;

/// What became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The other end refused it.
    Refused,
    /// The other end answered, as it answers this caller in its own right.
    Answered,
    /// Another node took it for an order of its leader.
    Believed,
}

impl Attempt {
    const ALL: [(Self, &str); 3] =
        [(Self::Refused, "refused"), (Self::Answered, "answered"), (Self::Believed, "believed")];
}

/// The attempts of one test, by their names: who tries it, a colon, and what.
#[derive(Debug, Default)]
pub(super) struct Attempts(BTreeMap<String, [u32; Attempt::ALL.len()]>);

impl Attempts {
    pub(super) fn record(&mut self, name: impl Into<String>, outcome: Attempt) {
        self.record_many(name, outcome, 1);
    }

    pub(super) fn record_many(&mut self, name: impl Into<String>, outcome: Attempt, count: u32) {
        self.0.entry(name.into()).or_default()[outcome as usize] += count;
    }

    pub(super) fn count(&self, outcome: Attempt) -> u32 {
        self.0.values().map(|counts| counts[outcome as usize]).sum()
    }

    /// Prints the count of each attempt.
    pub(super) fn print(&self, what: &str) {
        let mut lines: BTreeMap<(&str, usize), Vec<String>> = BTreeMap::new();
        for (name, counts) in &self.0 {
            let (group, attempt) = name.split_once(": ").unwrap_or((name.as_str(), "each"));
            for (outcome, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                lines.entry((group, outcome)).or_default().push(format!("{attempt} {count}"));
            }
        }
        let mut text = format!("{what}, {} kinds of attempts:", self.0.len());
        for (outcome, name) in Attempt::ALL {
            // Writing to a string does not fail.
            let _ = write!(text, " {name} {}", self.count(outcome));
        }
        for ((group, outcome), attempts) in &lines {
            let _ = write!(text, "\n   {group}, {}: {}", Attempt::ALL[*outcome].1, attempts.join(", "));
        }
        aloud(&text);
    }
}
