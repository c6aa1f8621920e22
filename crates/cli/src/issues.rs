//! `issues`, `get issues`: list problems of the fleet, most urgent first.
//!
//! [`model::issues`] derives the issues. The API streams them in chunks, and this module fetches and prints them.

use std::fmt::Write as _;

use clap::Args;

use crate::client::decode::{decode_machine_name, decode_timestamp, missing_field, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::next_chunk;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::one_of::one_of;
use crate::output::table::terminal_width;
use model::humanize::humanize_duration;
use model::issues::{Issue, IssueKind, Severity};
use model::text_layout::format_labelled;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::issues_client::IssuesClient;

pub(crate) const ISSUES_EXAMPLES: &str = "\
Examples:
  shepherdctl issues --fail-on critical
  shepherdctl issues -o json | jq -r '.issues[] | select(.severity == \"critical\") | .subject'";

/// Arguments of `issues`: what makes the command fail.
#[derive(Debug, Default, Args)]
pub struct IssuesArgs {
    /// Exit with 1 if there is an issue of this severity, or of a higher one: critical, warning or notice
    #[arg(
        long = "fail-on",
        value_name = "SEVERITY",
        value_parser = one_of(SEVERITIES.map(Severity::as_str)),
        hide_possible_values = true
    )]
    pub fail_on: Option<String>,
}

/// All severities, the most urgent one first.
const SEVERITIES: [Severity; 3] = [Severity::Critical, Severity::Warning, Severity::Notice];

const COLUMNS: [Column; 5] = [
    Column::always("SEVERITY"),
    Column::always("ISSUE"),
    Column::always("ABOUT"),
    Column::always("SINCE"),
    Column::always("EVIDENCE"),
];

/// Lists the current issues, and returns the exit code for them.
pub(crate) async fn list_issues(
    client: &FleetClient,
    args: &IssuesArgs,
) -> Result<(ObjectList, ExitCode), CliError> {
    let request = v1::ListIssuesRequest {};
    let mut pieces =
        IssuesClient::new(client.channel()).list(request).await.map_err(status_to_error)?.into_inner();
    let (mut read_at, mut messages) = (None, Vec::new());
    while let Some(piece) = next_chunk(&mut pieces, client).await? {
        read_at = read_at.or(piece.read_at);
        messages.extend(piece.issues);
    }
    let now = require_timestamp(read_at, "its read time")?;
    let (mut issues, mut objects) = (Vec::new(), Vec::new());
    for message in messages {
        let document = ObjectDocument::of_message(&message);
        let issue = decode_issue(message)?;
        objects.push(ListedObject {
            names: issue_names(&issue),
            rows: vec![issue_row(&issue, now)],
            document,
        });
        issues.push(issue);
    }
    let response = v1::ListIssuesResponse { read_at, issues: Vec::new() };
    let list = ObjectList::of_response(ObjectKind::Issue, &response, &COLUMNS, objects);
    let exit = issues_exit_code(args.fail_on.as_deref(), &issues);
    Ok((ObjectList { appendix: format_remedies(&issues), ..list }, exit))
}

/// An issue is named after its kind and its subject, or after one of them.
fn issue_names(issue: &Issue) -> ObjectNames {
    ObjectNames {
        name: format!("{}/{}", issue.id, issue.subject),
        others: vec![issue.id.to_owned(), issue.subject.clone()],
        id: None,
    }
}

/// The exit code for these issues, if issues of the severity `fail_on` and of higher ones are failures.
fn issues_exit_code(fail_on: Option<&str>, issues: &[Issue]) -> ExitCode {
    let named = |severity: &Severity| fail_on.is_some_and(|name| severity.as_str() == name);
    let limit = SEVERITIES.into_iter().find(named);
    // The most urgent severity is the least one.
    let fails = limit.is_some_and(|limit| issues.iter().any(|issue| issue.severity <= limit));
    if fails { ExitCode::Failed } else { ExitCode::Done }
}

fn decode_issue(issue: v1::Issue) -> Result<Issue, CliError> {
    let id = IssueKind::ALL.into_iter().map(IssueKind::id).find(|id| *id == issue.id);
    let severity = SEVERITIES.into_iter().find(|severity| severity.as_str() == issue.severity);
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

/// What to do about each kind of these issues; empty without issues.
fn format_remedies(issues: &[Issue]) -> String {
    if issues.is_empty() {
        return String::new();
    }
    let mut text = "What to do:\n".to_owned();
    let mut messages: Vec<&str> = Vec::new();
    for issue in issues {
        // Issues of one kind differ only by the name in a command, so each kind is explained once.
        if messages.contains(&issue.id) {
            continue;
        }
        messages.push(issue.id);
        let remedy = format!("{} (more: shepherdctl explain {})", issue.remedy, issue.id);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn issue(severity: Severity) -> Issue {
        Issue {
            id: "brake",
            severity,
            subject: "rack".to_owned(),
            machines: Vec::new(),
            message: "it is engaged".to_owned(),
            since: None,
            remedy: "look".to_owned(),
            page: "docs/issues/brake.md".to_owned(),
        }
    }

    #[test]
    fn issue_of_that_severity_or_a_higher_one_is_a_failure() {
        for (fail_on, found, expected) in [
            (None, &[Severity::Critical][..], ExitCode::Done),
            (Some("critical"), &[], ExitCode::Done),
            (Some("critical"), &[Severity::Warning, Severity::Notice], ExitCode::Done),
            (Some("critical"), &[Severity::Notice, Severity::Critical], ExitCode::Failed),
            (Some("warning"), &[Severity::Notice], ExitCode::Done),
            (Some("warning"), &[Severity::Critical], ExitCode::Failed),
            (Some("notice"), &[Severity::Notice], ExitCode::Failed),
        ] {
            let issues: Vec<Issue> = found.iter().copied().map(issue).collect();
            assert_eq!(issues_exit_code(fail_on, &issues), expected, "{fail_on:?}: {found:?}");
        }
    }
}
