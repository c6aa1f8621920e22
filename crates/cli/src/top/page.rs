//! Sections of the overview as tables: the same rows for a terminal and for a file.

use std::fmt::Write as _;
use std::time::Duration;

use crate::output::table::format_table;
use crate::output::zone::current_zone;
use crate::top::fleet_summary::{FleetSummary, LoopStats, PhaseSummary};
use model::humanize::{humanize_duration, relative_time};
use model::phase::Phase;
use model::time::{Timestamp, between};

/// Characters of the longest bar.
const MAX_BAR_CHARS: u32 = 24;

/// Subject of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panel {
    /// What needs an operator's attention.
    Attention,
    /// Number of machines by phase.
    Phases,
    /// Throughput and backlog of the loops.
    Loops,
    /// The longest running work items.
    Work,
}

/// A section of the page.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// What the section is about.
    pub panel: Panel,
    /// Title above the section.
    pub title: String,
    /// Titles above its columns.
    pub headers: Vec<&'static str>,
    /// Rows, the most important first.
    pub rows: Vec<SectionRow>,
}

/// One row of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionRow {
    /// One text for each column.
    pub cells: Vec<String>,
    /// Whether the row needs attention.
    pub is_alert: bool,
}

/// The fleet in one line.
#[must_use]
pub fn page_heading(view: &FleetSummary) -> String {
    let there = || view.phases.iter().filter(|line| line.phase != Phase::Retired.as_str());
    let machines: i64 = there().map(|line| line.machines).sum();
    let well =
        |line: &&PhaseSummary| line.phase == Phase::Ready.as_str() || line.phase == Phase::Installed.as_str();
    let ready: i64 = there().filter(well).map(|line| line.machines).sum();
    let least = if there().any(|line| line.at_least) { "at least " } else { "" };
    let noun = if machines == 1 { "machine" } else { "machines" };
    let at = current_zone().format_time(view.at);
    format!("{least}{machines} {noun}, {ready} of them healthy; {at}")
}

/// The sections that have rows.
#[must_use]
pub fn page_sections(view: &FleetSummary) -> Vec<Section> {
    let parts = [attention_section(view), phases_section(view), loops_section(view), work_section(view)];
    parts.into_iter().filter(|part| !part.rows.is_empty()).collect()
}

/// The whole page as text.
#[must_use]
pub fn render_text(view: &FleetSummary, width: Option<usize>) -> String {
    let mut text = format!("{}\n", page_heading(view));
    for part in page_sections(view) {
        let rows: Vec<Vec<String>> = part.rows.into_iter().map(|row| row.cells).collect();
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}\n{}", part.title, format_table(&part.headers, &rows, width));
    }
    if let Some(refused) = &view.not_permitted {
        let _ = writeln!(text, "\nnot shown: {refused}");
    }
    text
}

fn attention_section(view: &FleetSummary) -> Section {
    let row = |what: String, of: String, since: Option<Timestamp>, why: String| SectionRow {
        cells: vec![
            what,
            of,
            since.map_or_else(dash, |since| humanize_duration(between(since, view.at))),
            why,
        ],
        is_alert: true,
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
        figures.summary.pauses.iter().map(|pause| {
            let of = pause.provider.clone().unwrap_or_else(|| "all".to_owned());
            let until = pause
                .until
                .map_or_else(String::new, |until| format!(", ends {}", relative_time(until, view.at)));
            let why = format!("{}{until}: {}", pause.paused_by, pause.reason);
            row(format!("{} paused", figures.summary.name), of, Some(pause.since), why)
        })
    });
    Section {
        panel: Panel::Attention,
        title: "Needs attention".to_owned(),
        headers: vec!["WHAT", "OF", "FOR", "WHY"],
        rows: brakes.chain(held).chain(failed).chain(pauses).collect(),
    }
}

fn phases_section(view: &FleetSummary) -> Section {
    let most = view.phases.iter().map(|line| line.machines).max().unwrap_or(0);
    let row = |line: &PhaseSummary| {
        let late = line.over_deadline.unwrap_or(0) > 0;
        SectionRow {
            cells: vec![
                line.phase.clone(),
                format!("{}{}", line.machines, if line.at_least { "+" } else { "" }),
                line.oldest_seconds.map_or_else(dash, format_seconds),
                line.over_deadline.map_or_else(dash, |late| late.to_string()),
                format_bar(line.machines, most),
            ],
            is_alert: late
                || line.phase == Phase::NeedsHuman.as_str()
                || line.phase == Phase::Quarantined.as_str(),
        }
    };
    let counted = view
        .counted_at
        .map_or_else(String::new, |at| format!(" (oldest and late as of {})", relative_time(at, view.at)));
    Section {
        panel: Panel::Phases,
        title: format!("Machines by phase{counted}"),
        headers: vec!["PHASE", "MACHINES", "OLDEST", "LATE", ""],
        rows: view.phases.iter().map(row).collect(),
    }
}

fn loops_section(view: &FleetSummary) -> Section {
    let row = |figures: &LoopStats| {
        let LoopStats { summary: line, under_way, waiting, waiting_seconds, throughput: pace } = figures;
        let of_pace = |take: fn(&bmdb::fleet::statistics::ProcessThroughput) -> f64| {
            pace.as_ref().map_or_else(dash, |pace| format_rate(take(pace)))
        };
        let more = if view.more_work { "+" } else { "" };
        let idle = line.workers == 0;
        SectionRow {
            cells: vec![
                line.name.clone(),
                line.workers.to_string(),
                pace.as_ref().map_or_else(dash, |_| format!("{under_way}{more}")),
                waiting.map_or_else(dash, |waiting| waiting.to_string()),
                waiting_seconds.filter(|_| *waiting != Some(0)).map_or_else(dash, format_seconds),
                of_pace(|pace| pace.finished),
                of_pace(|pace| pace.failed),
                of_pace(|pace| pace.postponed),
                of_pace(|pace| pace.lost),
                pace.as_ref().and_then(|pace| pace.mean_seconds).map_or_else(dash, format_mean),
            ],
            is_alert: idle || !line.pauses.is_empty() || pace.as_ref().is_some_and(|pace| pace.lost > 0.0),
        }
    };
    Section {
        panel: Panel::Loops,
        title: "Loops (done, failed, put off and lost within a minute)".to_owned(),
        headers: vec![
            "LOOP", "WORKERS", "BUSY", "WAITING", "OLDEST", "DONE", "FAILED", "PUT OFF", "LOST", "TAKES",
        ],
        rows: view.loops.iter().map(row).collect(),
    }
}

fn work_section(view: &FleetSummary) -> Section {
    let rows = view.work.iter().map(|item| {
        let who = &item.work;
        let lost = who.session_closed_at.is_some() || who.session_deadline.is_some_and(|at| at <= view.at);
        SectionRow {
            cells: vec![
                item.name.machine.to_string()[..8].to_owned(),
                if item.name.provider_id.is_some() { item.name.short_name() } else { dash() },
                who.process.clone(),
                humanize_duration(between(who.since, view.at)),
                who.component.clone().unwrap_or_else(dash),
                who.host.clone().unwrap_or_else(dash),
                if lost { "lost".to_owned() } else { "works".to_owned() },
            ],
            is_alert: lost,
        }
    });
    Section {
        panel: Panel::Work,
        title: "Under way, longest first".to_owned(),
        headers: vec!["MACHINE", "NAME", "PROCESS", "FOR", "LOOP", "HOST", "SESSION"],
        rows: rows.collect(),
    }
}

fn dash() -> String {
    "-".to_owned()
}

/// A bar whose length is `part` in proportion to `most`; at least one character if `part` is positive.
fn format_bar(part: i64, most: i64) -> String {
    if part <= 0 || most <= 0 {
        return String::new();
    }
    let length = (i128::from(part) * i128::from(MAX_BAR_CHARS) / i128::from(most)).max(1);
    "█".repeat(usize::try_from(length).unwrap_or(1))
}

fn format_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| dash(), humanize_duration)
}

/// A mean duration in seconds: below ten seconds with hundredths.
fn format_mean(taken: f64) -> String {
    if taken < 10.0 { format!("{taken:.2}s") } else { format_seconds(taken) }
}

/// A rate per minute: below ten with tenths.
fn format_rate(in_a_minute: f64) -> String {
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
    fn bar_length_is_proportional() {
        for (part, most, length) in
            [(0, 0, 0), (0, 9, 0), (1, 1000, 1), (500, 1000, 12), (7, 7, 24), (-1, 7, 0)]
        {
            assert_eq!(format_bar(part, most).chars().count(), length, "{part} of {most}");
        }
    }

    #[test]
    fn numbers_are_short() {
        for (text, expected) in [
            (format_rate(0.0), "0"),
            (format_rate(3.0), "3"),
            (format_rate(3.25), "3.2"),
            (format_rate(1234.5), "1234"),
            (format_mean(0.123), "0.12s"),
            (format_mean(75.0), "1m15s"),
            (format_seconds(-1.0), "-"),
            (format_seconds(f64::NAN), "-"),
        ] {
            assert_eq!(text, expected);
        }
    }
}
