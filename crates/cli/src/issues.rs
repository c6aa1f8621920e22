//! `issues`: list problems of the fleet, most urgent first.
//!
//! [`model::issues`] derives the issues. The API streams them in chunks, and this module fetches and prints them.

use std::fmt::Write as _;

use serde::Serialize;

use crate::client::decode::{decode_machine_name, decode_timestamp, missing_field, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::next_chunk;
use crate::error::CliError;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use model::humanize::humanize_duration;
use model::issues::{Issue, IssueKind, Severity};
use model::text_layout::format_labelled;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::issues_client::IssuesClient;

pub(crate) const ISSUES_EXAMPLES: &str = "\
Example:
  shepherdctl issues -o json | jq -r '.issues[] | select(.severity == \"critical\") | .subject'";

#[derive(Serialize)]
struct IssuesOutput {
    at: Timestamp,
    /// Current issues, most urgent first.
    issues: Vec<Issue>,
}

/// Runs `issues`: fetches and prints the issues.
pub async fn show_issues(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (at, issues) = fetch_issues(client).await?;
    match format {
        Format::Json => format_json(&IssuesOutput { at, issues }),
        Format::Table => Ok(render_issues(&issues, at)),
    }
}

/// Fetches the current issues, and the moment at which they were read.
async fn fetch_issues(client: &FleetClient) -> Result<(Timestamp, Vec<Issue>), CliError> {
    let request = v1::ListIssuesRequest {};
    let mut pieces =
        IssuesClient::new(client.channel()).list(request).await.map_err(status_to_error)?.into_inner();
    let (mut now, mut issues) = (None, Vec::new());
    while let Some(piece) = next_chunk(&mut pieces, client).await? {
        now = now.or(piece.read_at);
        for issue in piece.issues {
            issues.push(decode_issue(issue)?);
        }
    }
    Ok((require_timestamp(now, "its read time")?, issues))
}

fn decode_issue(issue: v1::Issue) -> Result<Issue, CliError> {
    let id = IssueKind::ALL.into_iter().map(IssueKind::id).find(|id| *id == issue.id);
    let severities = [Severity::Critical, Severity::Warning, Severity::Notice];
    let severity = severities.into_iter().find(|severity| severity.as_str() == issue.severity);
    Ok(Issue {
        id: id.unwrap_or("(of another release)"),
        severity: severity.ok_or_else(|| missing_field("the severity of an issue"))?,
        subject: issue.subject,
        machines: issue
            .machines
            .into_iter()
            .map(|one| decode_machine_name(Some(one)))
            .collect::<Result<_, _>>()?,
        message: issue.message,
        since: issue.since.and_then(decode_timestamp),
        remedy: issue.remedy,
        page: issue.page,
    })
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
        let _ = writeln!(text, "\n{more} more issues are of these kinds; `-o json` has the remedy of each");
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
