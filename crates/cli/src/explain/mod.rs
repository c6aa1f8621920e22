//! `explain`: what an issue, a phase or a term means, from the documentation.
//!
//! The program contains the documentation (`pages`), so that a message can refer to it by a command that every operator
//! can run, and not by a file that only the source has. [`topic`][] finds what a name means, and [`markdown`][] makes text
//! of it. Nothing here contacts a fleet.

use clap::Args;
use serde_json::{Value, json};

use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::explain::markdown::render_page;
use crate::explain::topic::{Topic, TopicKind, find_similar, find_topics, list_topics};
use crate::output::Output;
use model::text_layout::format_labelled;

pub mod markdown;
mod pages;
pub mod topic;

pub(crate) const EXPLAIN_EXAMPLES: &str = "\
Examples:
  shepherdctl explain NeedsHuman                what a phase means, and what ends it
  shepherdctl explain silent-agent              what an issue means, and what to do
  shepherdctl explain idempotency-key
  shepherdctl explain                           what can be explained";

/// Arguments of `explain`: the topic.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Issue, phase, term or page of the documentation; omit it to list them
    #[arg(value_name = "TOPIC")]
    pub topic: Vec<String>,
}

/// Runs `explain`: prints every topic of the name, or the names of all topics.
pub(crate) fn explain_topic(
    args: &ExplainArgs,
    output: &Output,
    width: Option<usize>,
) -> Result<String, CliError> {
    let name = args.topic.join(" ");
    if name.trim().is_empty() {
        let topics = list_topics();
        return match output {
            Output::Table | Output::Wide => Ok(format_names(&topics, width)),
            Output::Name => Ok(join_lines(topics.iter().map(|(_, name)| *name))),
            _ => {
                let topics = topics.iter().map(|(kind, name)| json!({ "kind": kind.as_str(), "name": name }));
                output.convert_json(&json!({ "topics": topics.collect::<Vec<_>>() }))
            }
        };
    }
    let topics = find_topics(&name);
    if topics.is_empty() {
        return Err(CliError::Ended { exit: ExitCode::NotFound, message: unknown_topic(&name) });
    }
    match output {
        Output::Table | Output::Wide => {
            let texts = topics.iter().map(|topic| render_page(&topic.markdown, width));
            Ok(texts.collect::<Vec<_>>().join("\n"))
        }
        Output::Name => Ok(join_lines(topics.iter().map(|topic| topic.name.as_str()))),
        _ => {
            let topics: Vec<Value> = topics.iter().map(topic_json).collect();
            output.convert_json(&json!({ "topics": topics }))
        }
    }
}

fn topic_json(topic: &Topic) -> Value {
    json!({ "kind": topic.kind.as_str(), "name": topic.name, "markdown": topic.markdown })
}

fn join_lines<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    lines.flat_map(|line| [line, "\n"]).collect()
}

fn format_names(topics: &[(TopicKind, &str)], width: Option<usize>) -> String {
    let groups = [
        ("Issues", TopicKind::Issue),
        ("Phases", TopicKind::Phase),
        ("Terms", TopicKind::Term),
        ("Pages", TopicKind::Page),
    ];
    let lines = groups.map(|(label, group)| {
        let names = topics.iter().filter(|(kind, _)| *kind == group).map(|(_, name)| *name);
        (label.to_owned(), names.collect::<Vec<_>>().join(", "))
    });
    format_labelled(0, &lines, width)
}

fn unknown_topic(name: &str) -> String {
    let similar = find_similar(name);
    let nearest = if similar.is_empty() {
        "`shepherdctl explain` lists what can be explained".to_owned()
    } else {
        format!("the nearest are: {}", similar.join(", "))
    };
    format!(
        "there is no issue, phase or term {name:?}; {nearest}; to explain the state of a machine, run: shepherdctl why M"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explain(words: &[&str], output: &str) -> Result<String, CliError> {
        let args = ExplainArgs { topic: words.iter().map(|word| (*word).to_owned()).collect() };
        explain_topic(&args, &Output::parse(output).unwrap(), Some(80))
    }

    #[test]
    fn topic_is_printed_in_each_output() {
        let text = explain(&["idempotency", "key"], "table").unwrap();
        assert!(text.starts_with("idempotency key\n\nThe name that an actor gives an order"), "{text}");
        // Code is not wrapped: half a command does something else.
        let mut prose = text.lines().filter(|line| !line.starts_with("    "));
        assert!(prose.all(|line| line.chars().count() <= 80), "{text}");
        let text = explain(&["needs-human"], "table").unwrap();
        assert!(text.contains("What to do.") && text.contains("\nNeedsHuman\n"), "{text}");
        assert_eq!(explain(&["needs-human"], "name").unwrap(), "needs-human\nNeedsHuman\n");
        let path = "jsonpath={.topics[*].kind}";
        assert_eq!(explain(&["needs-human"], path).unwrap(), "issue phase");
    }

    #[test]
    fn names_are_listed_without_a_topic() {
        let text = explain(&[], "table").unwrap();
        assert!(text.contains("Issues  address-conflict,") && text.contains("Ready"), "{text}");
        assert!(explain(&[], "name").unwrap().lines().any(|line| line == "Ready"));
        assert!(explain(&[], "json").unwrap().contains("\"name\": \"Ready\""));
    }

    #[test]
    fn unknown_topic_is_not_found_and_its_nearest_are_named() {
        for (name, expected) in
            [("brak", "the nearest are: brake;"), ("xyzzy", "`shepherdctl explain` lists")]
        {
            let error = explain(&[name], "table").unwrap_err();
            assert_eq!(error.exit_code(), ExitCode::NotFound, "{name}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
