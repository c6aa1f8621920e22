//! The tree as people read it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::supervisor::tree::State;

/// One runnable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Names from the root down, with dots between them.
    pub path: Arc<str>,
    /// How many stand above it.
    pub depth: usize,
    /// What it is just now.
    pub state: State,
    /// For how long.
    pub since: Duration,
    /// How often it was started since its parent was.
    pub starts: u64,
    /// It starts again after so long: it died.
    pub starts_in: Option<Duration>,
    /// It has returned, and starts again when this one below it has.
    pub waits_for: Option<Arc<str>>,
    /// How it last failed.
    pub last_failure: Option<Arc<str>>,
}

impl Entry {
    /// Its own name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }
}

/// All of them, each behind the one above it, those of one parent by their names.
///
/// As text: a tree, with a line for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The runnables.
    pub entries: Vec<Entry>,
}

impl Report {
    /// The one at this path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| &*entry.path == path)
    }

    /// The state of the one at this path.
    #[must_use]
    pub fn state(&self, path: &str) -> Option<State> {
        self.get(path).map(|entry| entry.state)
    }

    /// Whether all of them are healthy or done.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.state, State::Healthy | State::Done))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let drawn: Vec<_> = branches(&self.entries);
        let widest = drawn.iter().map(|text| text.chars().count()).max().unwrap_or(0);
        for (entry, drawn) in self.entries.iter().zip(&drawn) {
            write!(f, "{drawn:widest$}  {:9}  {:>8}", entry.state.word(), ago(entry.since))?;
            let mut more = Vec::new();
            if entry.starts > 1 {
                more.push(format!("started {} times", entry.starts));
            }
            if let Some(delay) = entry.starts_in {
                more.push(format!("starts again in {}", ago(delay)));
            }
            if let Some(path) = &entry.waits_for {
                more.push(format!("starts again when {path} has returned"));
            }
            if let Some(why) = &entry.last_failure {
                more.push(format!("last failure: {}", why.replace('\n', " ")));
            }
            if !more.is_empty() {
                write!(f, "  {}", more.join("; "))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Each one's name behind the lines that lead to it.
fn branches(entries: &[Entry]) -> Vec<String> {
    let mut drawn = Vec::with_capacity(entries.len());
    // Whether a sibling of the one at that depth still comes, read from the last one up.
    let mut comes: Vec<bool> = Vec::new();
    for entry in entries.iter().rev() {
        comes.resize(entry.depth + 1, false);
        let mut text = String::new();
        for (depth, comes) in comes.iter().enumerate().skip(1) {
            text.push_str(match (depth == entry.depth, comes) {
                (true, true) => "├─ ",
                (true, false) => "└─ ",
                (false, true) => "│  ",
                (false, false) => "   ",
            });
        }
        text.push_str(entry.name());
        drawn.push(text);
        comes[entry.depth] = true;
    }
    drawn.reverse();
    drawn
}

fn ago(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{} ms", duration.as_millis()),
        1..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, state: State, seconds: u64) -> Entry {
        Entry {
            path: path.into(),
            depth: path.matches('.').count(),
            state,
            since: Duration::from_secs(seconds),
            starts: 1,
            starts_in: None,
            waits_for: None,
            last_failure: None,
        }
    }

    #[test]
    fn report_is_drawn_as_a_tree() {
        let mut report = Report {
            entries: vec![
                entry("root", State::Healthy, 200_000),
                entry("root.callback", State::Healthy, 90),
                entry("root.control-plane", State::Dead, 3),
                entry("root.control-plane.curator", State::Cancelled, 2),
                entry("root.control-plane.etcd", State::New, 0),
                entry("root.control-plane.etcd.log", State::Healthy, 8000),
                entry("root.services", State::Done, 130),
            ],
        };
        assert!(!report.is_well());
        report.entries[2].waits_for = Some("root.control-plane.etcd".into());
        report.entries[2].last_failure = Some("etcd ended\n(signal 9)".into());
        report.entries[4].starts = 3;
        report.entries[4].starts_in = Some(Duration::from_millis(750));
        let expected = "\
root              healthy         2 d
├─ callback       healthy        90 s
├─ control-plane  dead            3 s  starts again when root.control-plane.etcd has returned; last failure: etcd ended (signal 9)
│  ├─ curator     cancelled       2 s
│  └─ etcd        new            0 ms  started 3 times; starts again in 750 ms
│     └─ log      healthy         2 h
└─ services       done          2 min
";
        assert_eq!(report.to_string(), expected);
        assert_eq!(report.state("root.services"), Some(State::Done));
        assert_eq!(report.state("root.kitchen"), None);
    }
}
