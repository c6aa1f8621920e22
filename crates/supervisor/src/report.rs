//! A snapshot of the supervision tree, printed as a tree.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::state::RunnableState;

/// The state of one runnable in a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportEntry {
    /// The names from the root down, separated by dots.
    pub path: Arc<str>,
    /// The number of its ancestors; 0 for the root.
    pub depth: usize,
    /// Its state at the time of the report.
    pub state: RunnableState,
    /// The time since the last change of state.
    pub state_age: Duration,
    /// How often it was started since its parent was.
    pub start_count: u64,
    /// The time until its restart; `None` unless it died and waits for its back-off.
    pub restart_in: Option<Duration>,
    /// The path of a descendant that has not returned; the restart waits for it. `None` if it waits for none.
    pub waits_for: Option<Arc<str>>,
    /// The error of its last failure; `None` if it has not failed.
    pub last_failure: Option<Arc<str>>,
}

impl ReportEntry {
    /// The last name in its path.
    #[must_use]
    pub fn name(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or(&self.path)
    }
}

/// All runnables, each after its parent, siblings sorted by name.
///
/// As text: a tree, with a line for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeReport {
    /// The entries, in the order of the printed tree.
    pub entries: Vec<ReportEntry>,
}

impl TreeReport {
    /// The entry with this path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&ReportEntry> {
        self.entries.iter().find(|entry| &*entry.path == path)
    }

    /// The state of the runnable with this path.
    #[must_use]
    pub fn state_of(&self, path: &str) -> Option<RunnableState> {
        self.get(path).map(|entry| entry.state)
    }

    /// Whether all runnables are healthy or done.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.entries.iter().all(|entry| matches!(entry.state, RunnableState::Healthy | RunnableState::Done))
    }
}

impl fmt::Display for TreeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let drawn: Vec<_> = draw_branches(&self.entries);
        // Names of runnables are ASCII, and a line of the tree takes a column per character.
        let widest = drawn.iter().map(|text| text.chars().count()).max().unwrap_or(0);
        for (entry, drawn) in self.entries.iter().zip(&drawn) {
            write!(
                f,
                "{drawn:widest$}  {:9}  {:>8}",
                entry.state.as_str(),
                format_duration(entry.state_age)
            )?;
            let mut more = Vec::new();
            if entry.start_count > 1 {
                more.push(format!("started {} times", entry.start_count));
            }
            if let Some(delay) = entry.restart_in {
                more.push(format!("starts again in {}", format_duration(delay)));
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

/// Each entry's name, behind the lines of the tree that lead to it.
fn draw_branches(entries: &[ReportEntry]) -> Vec<String> {
    let mut drawn = Vec::with_capacity(entries.len());
    // For each depth, whether another sibling follows, filled from the last entry up.
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

fn format_duration(duration: Duration) -> String {
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

    fn entry(path: &str, state: RunnableState, seconds: u64) -> ReportEntry {
        ReportEntry {
            path: path.into(),
            depth: path.matches('.').count(),
            state,
            state_age: Duration::from_secs(seconds),
            start_count: 1,
            restart_in: None,
            waits_for: None,
            last_failure: None,
        }
    }

    #[test]
    fn report_is_drawn_as_a_tree() {
        let mut report = TreeReport {
            entries: vec![
                entry("root", RunnableState::Healthy, 200_000),
                entry("root.callback", RunnableState::Healthy, 90),
                entry("root.control-plane", RunnableState::Dead, 3),
                entry("root.control-plane.curator", RunnableState::Cancelled, 2),
                entry("root.control-plane.etcd", RunnableState::New, 0),
                entry("root.control-plane.etcd.log", RunnableState::Healthy, 8000),
                entry("root.services", RunnableState::Done, 130),
            ],
        };
        assert!(!report.is_healthy());
        report.entries[2].waits_for = Some("root.control-plane.etcd".into());
        report.entries[2].last_failure = Some("etcd ended\n(signal 9)".into());
        report.entries[4].start_count = 3;
        report.entries[4].restart_in = Some(Duration::from_millis(750));
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
        assert_eq!(report.state_of("root.services"), Some(RunnableState::Done));
        assert_eq!(report.state_of("root.kitchen"), None);
    }
}
