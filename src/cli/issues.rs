//! `issues`: what is wrong, most urgent first.
//!
//! What is wrong is derived by [`crate::model::issues`]; here it is asked for and printed.

use std::fmt::Write as _;

use serde::Serialize;

use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::output::{Format, table, width};
use crate::cli::remote_outlook;
use crate::cli::source::Source;
use crate::model::issues::{Issue, issues as derive};
use crate::model::layout::labelled;
use crate::model::telling::rough;
use crate::model::time::{Timestamp, between};

#[derive(Serialize)]
struct IssuesAnswer {
    at: Timestamp,
    /// Most urgent first.
    issues: Vec<Issue>,
}

/// `issues`.
pub async fn issues(source: &Source, format: Format) -> Result<String, CliError> {
    let (at, issues) = match source {
        Source::Direct(bmdb) => {
            let evidence = bmdb.evidence().await?;
            (evidence.at, derive(&evidence))
        }
        Source::Api(remote) => remote_outlook::issues(remote).await?,
    };
    match format {
        Format::Json => json(&IssuesAnswer { at, issues }),
        Format::Table => Ok(render(&issues, at)),
    }
}

fn render(issues: &[Issue], now: Timestamp) -> String {
    if issues.is_empty() {
        return "no issues\n".to_owned();
    }
    let rows: Vec<Vec<String>> = issues.iter().map(|issue| row(issue, now)).collect();
    let mut text = table(&["SEVERITY", "ISSUE", "ABOUT", "SINCE", "EVIDENCE"], &rows, width());
    text.push_str("\nWhat to do:\n");
    let mut told: Vec<&str> = Vec::new();
    for issue in issues {
        // What differs between issues of one kind is a name in a command.
        if told.contains(&issue.id) {
            continue;
        }
        told.push(issue.id);
        let remedy = format!("{} (more in {})", issue.remedy, issue.page);
        text.push_str(&labelled(2, &[(issue.id.to_owned(), remedy)], width()));
    }
    let more = issues.len() - told.len();
    if more > 0 {
        let _ = writeln!(text, "\nof the {more} others of these kinds `-o json` says what to do");
    }
    text
}

fn row(issue: &Issue, now: Timestamp) -> Vec<String> {
    vec![
        issue.severity.as_str().to_owned(),
        issue.id.to_owned(),
        issue.about.clone(),
        issue.since.map_or_else(|| "-".to_owned(), |since| rough(between(since, now))),
        issue.evidence.clone(),
    ]
}
