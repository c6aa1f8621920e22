//! How far a fleet is: a bar on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::model::phase::Phase;
use crate::service::demo::say;
use crate::service::failure::Failure;

/// How often a line is printed where there is no terminal, if anything changed.
const LINE: Duration = Duration::from_secs(1);

/// A bar on a terminal, lines elsewhere.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    last: BTreeMap<String, i64>,
    printed: Option<Instant>,
}

impl Progress {
    /// Nothing shown yet.
    pub(super) fn new() -> Self {
        let bar = std::io::stdout().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("  {bar:40.green} {pos:>4}/{len} Ready  {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, last: BTreeMap::new(), printed: None }
    }

    /// Shows how many machines of `fleet` are in which phase.
    pub(super) fn show(&mut self, phases: &BTreeMap<String, i64>, fleet: i64) -> Result<(), Failure> {
        let ready = phases.get(Phase::Ready.as_str()).copied().unwrap_or(0);
        let others = Phase::ALL
            .iter()
            .filter(|phase| **phase != Phase::Ready)
            .filter_map(|phase| phases.get(phase.as_str()).map(|count| format!("{phase} {count}")))
            .collect::<Vec<_>>()
            .join(", ");
        if let Some(bar) = &self.bar {
            bar.set_length(fleet.unsigned_abs());
            bar.set_position(ready.unsigned_abs());
            bar.set_message(others);
            return Ok(());
        }
        let due = self.printed.is_none_or(|at| at.elapsed() >= LINE);
        if due && *phases != self.last {
            self.printed = Some(Instant::now());
            self.last.clone_from(phases);
            let others = if others.is_empty() { String::new() } else { format!(", {others}") };
            say(&format!("  Ready {ready}{others}"))?;
        }
        Ok(())
    }

    /// Makes room for what is said next.
    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
