//! Roll-outs as people see them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::time::Timestamp;

/// A roll-out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollOutView {
    /// By what it is known.
    pub id: String,
    /// The release's name.
    pub release: String,
    /// Its digest, 64 hexadecimal digits.
    pub sha256: String,
    /// Which machines were meant.
    pub select: String,
    /// How many at a time.
    pub parallelism: u32,
    /// How long each may take, in seconds.
    pub deadline_seconds: u32,
    /// When it was ordered.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// Why.
    pub reason: String,
    /// Why it stands still.
    pub paused: Option<String>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// How: `finished` or `aborted`.
    pub ended: Option<String>,
    /// How many of its machines are in each state.
    pub counts: BTreeMap<String, u32>,
    /// Its machines, where it was asked about alone.
    pub machines: Vec<RollOutMachineView>,
}

/// A machine of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollOutMachineView {
    /// UUID.
    pub machine: String,
    /// Its provider's name for it.
    pub name: String,
    /// `waiting`, `ordered`, `done`, `failed` or `skipped`.
    pub state: String,
    /// What it waits for, or how it ended.
    pub said: Option<String>,
    /// Since when it is so far.
    pub changed_at: Timestamp,
}

impl RollOutView {
    /// In one word: `rolling`, `paused`, `finished` or `aborted`.
    #[must_use]
    pub fn stage(&self) -> &str {
        match (&self.ended, &self.paused) {
            (Some(ended), _) => ended,
            (None, Some(_)) => "paused",
            (None, None) => "rolling",
        }
    }

    /// How many machines are in each state, as `done 3, waiting 5`.
    #[must_use]
    pub fn counts(&self) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(state, count)| format!("{state} {count}")).collect();
        counts.join(", ")
    }
}

/// A machine's part in the roll-out that it is in, a sentence for `why`.
#[must_use]
pub fn note(id: &str, release: &str, state: &str, paused: Option<&str>, said: Option<&str>) -> String {
    let part = match state {
        "waiting" => "is to become",
        "ordered" => "was asked to become",
        "failed" => "failed to become",
        _ => "has become",
    };
    let said = said.map(|said| format!("; {said}")).unwrap_or_default();
    let paused = paused.map(|why| format!("; the roll-out stands still: {why}")).unwrap_or_default();
    format!("it {part} the release {release} (update {id}){said}{paused}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_is_a_sentence() {
        for (state, paused, said, expected) in [
            ("waiting", None, None, "it is to become the release 1.4 (update a1)"),
            (
                "ordered",
                None,
                Some("it fetches it"),
                "it was asked to become the release 1.4 (update a1); it fetches it",
            ),
            (
                "waiting",
                Some("m1: no"),
                None,
                "it is to become the release 1.4 (update a1); the roll-out stands still: m1: no",
            ),
            ("done", None, None, "it has become the release 1.4 (update a1)"),
        ] {
            assert_eq!(note("a1", "1.4", state, paused, said), expected);
        }
    }
}
