//! Roll-out view for the API and `shepherdctl`.

use std::collections::BTreeMap;

use crate::time::Timestamp;

/// A roll-out, as people see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOutView {
    /// Identifier of the roll-out.
    pub id: String,
    /// Name of the release.
    pub release: String,
    /// Digest of the release, 64 hexadecimal digits.
    pub sha256: String,
    /// The selector of its machines.
    pub selector: String,
    /// Most machines that may have the order at a time.
    pub parallelism: u32,
    /// How long each machine may take, in seconds.
    pub deadline_seconds: u32,
    /// When it was ordered.
    pub created_at: Timestamp,
    /// The operator who ordered it.
    pub created_by: String,
    /// Why, in the operator's words.
    pub reason: String,
    /// Why it is paused; `None` when it is not.
    pub pause_reason: Option<String>,
    /// When it ended; `None` while it runs.
    pub ended_at: Option<Timestamp>,
    /// How it ended: `finished` or `aborted`.
    pub outcome: Option<String>,
    /// How many of its machines are in each state.
    pub counts: BTreeMap<String, u32>,
    /// Its machines; empty in a list of roll-outs.
    pub machines: Vec<RollOutMachineView>,
}

/// A machine of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOutMachineView {
    /// UUID of the machine.
    pub machine: String,
    /// The provider's name for the machine.
    pub name: String,
    /// Its state: `waiting`, `ordered`, `done`, `failed` or `skipped`.
    pub state: String,
    /// What it waits for, or how it ended.
    pub message: Option<String>,
    /// When it entered that state.
    pub state_since: Timestamp,
}

impl RollOutView {
    /// Its stage in one word: `rolling`, `paused`, `finished` or `aborted`.
    #[must_use]
    pub fn stage(&self) -> &str {
        match (&self.outcome, &self.pause_reason) {
            (Some(ended), _) => ended,
            (None, Some(_)) => "paused",
            (None, None) => "rolling",
        }
    }

    /// How many machines are in each state, as `done 3, waiting 5`.
    #[must_use]
    pub fn format_counts(&self) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(state, count)| format!("{state} {count}")).collect();
        counts.join(", ")
    }
}

/// A machine's state in its roll-out, as a sentence for `why`.
#[must_use]
pub fn roll_out_note(
    id: &str,
    release: &str,
    state: &str,
    paused: Option<&str>,
    text: Option<&str>,
) -> String {
    let part = match state {
        "waiting" => "is to run",
        "ordered" => "was ordered to run",
        "failed" => "failed to run",
        _ => "runs",
    };
    let text = text.map(|text| format!("; {text}")).unwrap_or_default();
    let paused = paused.map(|why| format!("; the roll-out is paused: {why}")).unwrap_or_default();
    format!("it {part} the release {release} (update {id}){text}{paused}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_is_a_sentence() {
        for (state, paused, text, expected) in [
            ("waiting", None, None, "it is to run the release 1.4 (update a1)"),
            (
                "ordered",
                None,
                Some("it fetches it"),
                "it was ordered to run the release 1.4 (update a1); it fetches it",
            ),
            (
                "waiting",
                Some("m1: no"),
                None,
                "it is to run the release 1.4 (update a1); the roll-out is paused: m1: no",
            ),
            ("done", None, None, "it runs the release 1.4 (update a1)"),
        ] {
            assert_eq!(roll_out_note("a1", "1.4", state, paused, text), expected);
        }
    }
}
