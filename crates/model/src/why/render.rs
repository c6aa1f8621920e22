//! An explanation as text.

use std::fmt::Write as _;
use std::time::Duration;

use crate::humanize::{absolute_time, humanize_duration, relative_and_absolute_time};
use crate::text_layout::format_labelled;
use crate::time::{Span, between};
use crate::why::Explanation;

/// Formats the explanation for people, in lines of at most `width` columns.
#[must_use]
pub fn render_explanation(why: &Explanation, width: Option<usize>) -> String {
    let now = why.at;
    let short = why.name.short_name();
    let id = why.name.machine.to_string();
    let mut text = if short == id { format!("{id}\n") } else { format!("{short}  {id}\n") };
    let _ = match why.since {
        Some(since) if since <= now => {
            write!(
                text,
                "{} for {}, since {}\n\n",
                why.phase,
                humanize_duration(between(since, now)),
                absolute_time(since)
            )
        }
        _ => write!(text, "{}\n\n", why.phase),
    };
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
    for note in &why.notes {
        add("note", note.clone());
    }
    add("decided at", why.decided_at.clone());
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
