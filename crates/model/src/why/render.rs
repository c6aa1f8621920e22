//! An explanation as text.

use std::fmt::Write as _;
use std::time::Duration;

use crate::humanize::{absolute_time, humanize_duration, relative_and_absolute_time};
use crate::phase::Phase;
use crate::text_layout::format_labelled;
use crate::time::{Span, between};
use crate::why::Explanation;

/// How much of an explanation is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExplanationDetail {
    /// What an operator needs.
    Short,
    /// Where in the code the decision was made, too.
    Full,
}

/// Formats the explanation for people, in lines of at most `width` columns.
#[must_use]
pub fn render_explanation(why: &Explanation, width: Option<usize>, detail: ExplanationDetail) -> String {
    let now = why.at;
    let short = why.name.short_name();
    let id = why.name.machine.to_string();
    let mut text = if short == id { format!("{id}\n") } else { format!("{short}  {id}\n") };
    let _ = write!(text, "{}\n\n", format_state(why));
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut add = |label: &str, value: String| lines.push((label.to_owned(), value));
    for work in &why.work {
        add("under way", work.clone());
    }
    add("why", why.waits_for.clone());
    if let Some(obstacle) = &why.obstacle {
        add("obstacle", obstacle.clone());
    }
    if let Some(next) = format_next_work(why) {
        add("next", next);
    }
    if let Some(deadline) = &why.deadline {
        add(
            "deadline",
            format!("{}; then {}", relative_and_absolute_time(deadline.at, now), deadline.consequence),
        );
    }
    for failure in &why.failures {
        let times =
            if failure.count == 1 { "once".to_owned() } else { format!("{} times in a row", failure.count) };
        let wait = Span(Duration::from_secs(failure.next_wait_seconds));
        add("failed", format!("{} {times}; after another failure it waits about {wait}", failure.process));
        if !why.waits_for.contains(&failure.cause) {
            add("last error", failure.cause.clone());
        }
    }
    for note in recent_notes(why).into_iter().chain(why.notes.iter().cloned()) {
        add("note", note);
    }
    if detail == ExplanationDetail::Full {
        add("decided at", why.decided_at.clone());
    }
    text.push_str(&format_labelled(2, &lines, width));
    if !why.advice.is_empty() {
        text.push_str("\nWhat would help:\n");
        for advice in &why.advice {
            let _ = writeln!(text, "  {}", advice.command);
            text.push_str(&format_labelled(4, &[(String::new(), advice.when.clone())], width));
        }
    }
    text
}

/// The phase and since when. The phase of a machine that was just switched off is that of its last report.
fn format_state(why: &Explanation) -> String {
    let now = why.at;
    match (&why.power, why.since) {
        (Some(switch), _) if switch.is_off() => {
            // Its phase changes when its silence is noticed.
            let still = if why.phase == Phase::Ready.as_str() { "still " } else { "" };
            format!("{}; its phase is {still}{}", switch.describe(now), why.phase)
        }
        (_, Some(since)) if since <= now => {
            let span = humanize_duration(between(since, now));
            format!("{} for {span}, since {}", why.phase, absolute_time(since))
        }
        _ => why.phase.to_owned(),
    }
}

/// What was done to it lately.
fn recent_notes(why: &Explanation) -> Vec<String> {
    let recovery = why.recovery.as_ref().map(|recovery| recovery.describe(why.at));
    let switch = why.power.as_ref().filter(|switch| !switch.is_off()).map(|switch| {
        let since = if switch.reported { "has reported" } else { "has not reported" };
        format!("{}, and it {since} since", switch.describe(why.at))
    });
    recovery.into_iter().chain(switch).collect()
}

/// The next work, unless it is already listed as under way.
fn format_next_work(why: &Explanation) -> Option<String> {
    let Some(next) = &why.next else { return Some("nothing is scheduled".to_owned()) };
    if why.work.iter().any(|work| work.starts_with(next.process)) {
        return None;
    }
    Some(if next.at > why.at {
        // For a healthy machine this must not read as if it were about to be recovered.
        let unless = if next.timer { ", unless its agent reports before" } else { "" };
        format!("{} {}{unless}", next.process, relative_and_absolute_time(next.at, why.at))
    } else {
        format!(
            "{} as soon as a worker is free; due {}",
            next.process,
            relative_and_absolute_time(next.at, why.at)
        )
    })
}
