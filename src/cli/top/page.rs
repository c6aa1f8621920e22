//! The parts of a page, as rows of text: the same for a terminal and for a file.

use std::fmt::Write as _;
use std::time::Duration;

use crate::cli::output::table;
use crate::cli::top::reader::{LoopFigures, PhaseLine, View};
use crate::model::phase::Phase;
use crate::model::telling::{absolute, relative, rough};
use crate::model::time::{Timestamp, between};

/// Characters of the longest bar.
const BAR: u32 = 24;

/// What a part tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panel {
    /// What somebody should look at.
    Attention,
    /// Machines by phase.
    Phases,
    /// How the loops get on.
    Loops,
    /// What is under way for longest.
    Work,
}

/// A part of a page.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Which.
    pub panel: Panel,
    /// What stands over it.
    pub title: String,
    /// Over its columns.
    pub headers: Vec<&'static str>,
    /// Its rows, the most telling first.
    pub rows: Vec<Row>,
}

/// A row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its columns.
    pub cells: Vec<String>,
    /// Whether somebody should look at it.
    pub alarming: bool,
}

/// The fleet in a line.
#[must_use]
pub fn heading(view: &View) -> String {
    let there = || view.phases.iter().filter(|line| line.phase != Phase::Retired.as_str());
    let machines: i64 = there().map(|line| line.machines).sum();
    let well =
        |line: &&PhaseLine| line.phase == Phase::Ready.as_str() || line.phase == Phase::Installed.as_str();
    let ready: i64 = there().filter(well).map(|line| line.machines).sum();
    let least = if there().any(|line| line.at_least) { "at least " } else { "" };
    let noun = if machines == 1 { "machine" } else { "machines" };
    format!("{least}{machines} {noun}, {ready} of them well; {}", absolute(view.at))
}

/// The parts that there is something to tell in.
#[must_use]
pub fn parts(view: &View) -> Vec<Part> {
    let parts = [attention(view), phases(view), loops(view), work(view)];
    parts.into_iter().filter(|part| !part.rows.is_empty()).collect()
}

/// A whole page as text.
#[must_use]
pub fn plain(view: &View, width: Option<usize>) -> String {
    let mut text = format!("{}\n", heading(view));
    for part in parts(view) {
        let rows: Vec<Vec<String>> = part.rows.into_iter().map(|row| row.cells).collect();
        // A string takes whatever is written.
        let _ = write!(text, "\n{}\n{}", part.title, table(&part.headers, &rows, width));
    }
    if let Some(refused) = &view.refused {
        let _ = writeln!(text, "\nnot shown: {refused}");
    }
    text
}

fn attention(view: &View) -> Part {
    let row = |what: String, of: String, since: Option<Timestamp>, why: String| Row {
        cells: vec![what, of, since.map_or_else(dash, |since| rough(between(since, view.at))), why],
        alarming: true,
    };
    let all = |scope: &str| if scope == "*" { "all".to_owned() } else { scope.to_owned() };
    let brakes = view.brakes.iter().map(|brake| {
        row(format!("{} brake", brake.kind), all(&brake.scope), Some(brake.engaged_at), brake.reason.clone())
    });
    let held = view.providers.iter().filter_map(|line| {
        let why = line.brake.clone()?;
        Some(row("creation brake".to_owned(), line.provider.clone(), line.brake_since, why))
    });
    let failed = view.providers.iter().filter_map(|line| {
        let why = line.error.clone()?;
        Some(row("provider fails".to_owned(), line.provider.clone(), line.error_at, why))
    });
    let pauses = view.loops.iter().flat_map(|figures| {
        figures.line.pauses.iter().map(|pause| {
            let of = pause.provider.clone().unwrap_or_else(|| "all".to_owned());
            let until =
                pause.until.map_or_else(String::new, |until| format!(", ends {}", relative(until, view.at)));
            let why = format!("{}{until}: {}", pause.by, pause.reason);
            row(format!("{} paused", figures.line.of), of, Some(pause.since), why)
        })
    });
    Part {
        panel: Panel::Attention,
        title: "To look at".to_owned(),
        headers: vec!["WHAT", "OF", "FOR", "WHY"],
        rows: brakes.chain(held).chain(failed).chain(pauses).collect(),
    }
}

fn phases(view: &View) -> Part {
    let most = view.phases.iter().map(|line| line.machines).max().unwrap_or(0);
    let row = |line: &PhaseLine| {
        let late = line.over_deadline.unwrap_or(0) > 0;
        Row {
            cells: vec![
                line.phase.clone(),
                format!("{}{}", line.machines, if line.at_least { "+" } else { "" }),
                line.oldest_seconds.map_or_else(dash, seconds),
                line.over_deadline.map_or_else(dash, |late| late.to_string()),
                bar(line.machines, most),
            ],
            alarming: late
                || line.phase == Phase::NeedsHuman.as_str()
                || line.phase == Phase::Quarantined.as_str(),
        }
    };
    let counted = view
        .counted_at
        .map_or_else(String::new, |at| format!(" (oldest and late as of {})", relative(at, view.at)));
    Part {
        panel: Panel::Phases,
        title: format!("Machines by phase{counted}"),
        headers: vec!["PHASE", "MACHINES", "OLDEST", "LATE", ""],
        rows: view.phases.iter().map(row).collect(),
    }
}

fn loops(view: &View) -> Part {
    let row = |figures: &LoopFigures| {
        let LoopFigures { line, under_way, waiting, waiting_seconds, pace } = figures;
        let of_pace = |take: fn(&crate::bmdb::statistics::Pace) -> f64| {
            pace.as_ref().map_or_else(dash, |pace| rate(take(pace)))
        };
        let more = if view.more_work { "+" } else { "" };
        let idle = line.workers == 0;
        Row {
            cells: vec![
                line.of.clone(),
                line.workers.to_string(),
                pace.as_ref().map_or_else(dash, |_| format!("{under_way}{more}")),
                waiting.map_or_else(dash, |waiting| waiting.to_string()),
                waiting_seconds.filter(|_| *waiting != Some(0)).map_or_else(dash, seconds),
                of_pace(|pace| pace.finished),
                of_pace(|pace| pace.failed),
                of_pace(|pace| pace.put_off),
                of_pace(|pace| pace.lost),
                pace.as_ref().and_then(|pace| pace.mean_seconds).map_or_else(dash, mean),
            ],
            alarming: idle || !line.pauses.is_empty() || pace.as_ref().is_some_and(|pace| pace.lost > 0.0),
        }
    };
    Part {
        panel: Panel::Loops,
        title: "Loops (done, failed, put off and lost within a minute)".to_owned(),
        headers: vec![
            "LOOP", "WORKERS", "BUSY", "WAITING", "OLDEST", "DONE", "FAILED", "PUT OFF", "LOST", "TAKES",
        ],
        rows: view.loops.iter().map(row).collect(),
    }
}

fn work(view: &View) -> Part {
    let rows = view.work.iter().map(|item| {
        let who = &item.work;
        let lost = who.session_closed_at.is_some() || who.session_deadline.is_some_and(|at| at <= view.at);
        Row {
            cells: vec![
                item.name.machine.to_string()[..8].to_owned(),
                if item.name.provider_id.is_some() { item.name.short() } else { dash() },
                who.process.clone(),
                rough(between(who.since, view.at)),
                who.component.clone().unwrap_or_else(dash),
                who.host.clone().unwrap_or_else(dash),
                if lost { "lost".to_owned() } else { "works".to_owned() },
            ],
            alarming: lost,
        }
    });
    Part {
        panel: Panel::Work,
        title: "Under way, longest first".to_owned(),
        headers: vec!["MACHINE", "NAME", "PROCESS", "FOR", "LOOP", "HOST", "SESSION"],
        rows: rows.collect(),
    }
}

fn dash() -> String {
    "-".to_owned()
}

/// A bar as long as `part` is beside `most`; what there is any of has one character.
fn bar(part: i64, most: i64) -> String {
    if part <= 0 || most <= 0 {
        return String::new();
    }
    let length = (i128::from(part) * i128::from(BAR) / i128::from(most)).max(1);
    "█".repeat(usize::try_from(length).unwrap_or(1))
}

fn seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| dash(), rough)
}

/// How long something takes: short spans to the hundredth.
fn mean(taken: f64) -> String {
    if taken < 10.0 { format!("{taken:.2}s") } else { seconds(taken) }
}

/// So many in a minute: few to the tenth.
fn rate(in_a_minute: f64) -> String {
    if in_a_minute > 0.0 && in_a_minute < 10.0 && in_a_minute.fract() != 0.0 {
        format!("{in_a_minute:.1}")
    } else {
        format!("{in_a_minute:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_what_they_stand_for() {
        for (part, most, length) in
            [(0, 0, 0), (0, 9, 0), (1, 1000, 1), (500, 1000, 12), (7, 7, 24), (-1, 7, 0)]
        {
            assert_eq!(bar(part, most).chars().count(), length, "{part} of {most}");
        }
    }

    #[test]
    fn figures_are_short() {
        for (told, expected) in [
            (rate(0.0), "0"),
            (rate(3.0), "3"),
            (rate(3.25), "3.2"),
            (rate(1234.5), "1234"),
            (mean(0.123), "0.12s"),
            (mean(75.0), "1m15s"),
            (seconds(-1.0), "-"),
            (seconds(f64::NAN), "-"),
        ] {
            assert_eq!(told, expected);
        }
    }
}
