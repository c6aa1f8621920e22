//! Progress output of a demo: a bar on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::model::phase::Phase;
use crate::service::failure::ExitFailure;

/// Minimum time between two lines without a terminal, and only after a change.
const PRINT_INTERVAL: Duration = Duration::from_secs(1);

/// A bar on a terminal, lines elsewhere.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    last: BTreeMap<String, i64>,
    printed_at: Option<Instant>,
}

impl Progress {
    /// A progress display that shows nothing yet.
    pub(super) fn new() -> Self {
        let bar = std::io::stdout().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("  {bar:40.green} {pos:>4}/{len} Ready  {msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, last: BTreeMap::new(), printed_at: None }
    }

    /// Shows the number of machines per phase, of `fleet` in all.
    pub(super) fn show(&mut self, phases: &BTreeMap<String, i64>, fleet: i64) -> Result<(), ExitFailure> {
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
        let due = self.printed_at.is_none_or(|at| at.elapsed() >= PRINT_INTERVAL);
        if due && *phases != self.last {
            self.printed_at = Some(Instant::now());
            self.last.clone_from(phases);
            let others = if others.is_empty() { String::new() } else { format!(", {others}") };
            print_line(&format!("  Ready {ready}{others}"))?;
        }
        Ok(())
    }

    /// Clears the bar, so that other output can follow.
    pub(super) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints one line. Fails if nobody reads it.
pub(super) fn print_line(line: &str) -> Result<(), ExitFailure> {
    writeln!(std::io::stdout(), "{line}")
        .map_err(|error| ExitFailure::failed(format!("cannot write to standard output: {error}")))
}
