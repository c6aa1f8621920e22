//! `issues`: list problems of the fleet, most urgent first.
//!
//! [`model::issues`] derives the issues. This module fetches and prints them.

use std::fmt::Write as _;

use serde::Serialize;

use crate::api_streams;
use crate::error::CliError;
use crate::fleet_client::FleetClient;
use crate::get::format_json;
use crate::output::{Format, format_table, terminal_width};
use model::humanize::humanize_duration;
use model::issues::Issue;
use model::text_layout::format_labelled;
use model::time::{Timestamp, between};

#[derive(Serialize)]
struct IssuesOutput {
    at: Timestamp,
    /// Current issues, most urgent first.
    issues: Vec<Issue>,
}

/// Runs `issues`: fetches and prints the issues.
pub async fn show_issues(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (at, issues) = api_streams::fetch_issues(client).await?;
    match format {
        Format::Json => format_json(&IssuesOutput { at, issues }),
        Format::Table => Ok(render_issues(&issues, at)),
    }
}

fn render_issues(issues: &[Issue], now: Timestamp) -> String {
    if issues.is_empty() {
        return "no issues\n".to_owned();
    }
    let rows: Vec<Vec<String>> = issues.iter().map(|issue| issue_row(issue, now)).collect();
    let mut text =
        format_table(&["SEVERITY", "ISSUE", "ABOUT", "SINCE", "EVIDENCE"], &rows, terminal_width());
    text.push_str("\nWhat to do:\n");
    let mut messages: Vec<&str> = Vec::new();
    for issue in issues {
        // Issues of one kind differ only by the name in a command, so each kind is explained once.
        if messages.contains(&issue.id) {
            continue;
        }
        messages.push(issue.id);
        let remedy = format!("{} (more in {})", issue.remedy, issue.page);
        text.push_str(&format_labelled(2, &[(issue.id.to_owned(), remedy)], terminal_width()));
    }
    let more = issues.len() - messages.len();
    if more > 0 {
        let _ = writeln!(text, "\nof the {more} others of these kinds `-o json` says what to do");
    }
    text
}

fn issue_row(issue: &Issue, now: Timestamp) -> Vec<String> {
    vec![
        issue.severity.as_str().to_owned(),
        issue.id.to_owned(),
        issue.subject.clone(),
        issue.since.map_or_else(|| "-".to_owned(), |since| humanize_duration(between(since, now))),
        issue.message.clone(),
    ]
}
