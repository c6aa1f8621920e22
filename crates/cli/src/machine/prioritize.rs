//! `prioritize`: scheduling priority of machines.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::BulkSelection;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::{check_machines, read_names};
use crate::order::expiry::{encode_timestamp, parse_until};
use crate::order::reason::require_why_reason;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::Expiry;
use model::priority::PriorityLevel;
use model::process::UnknownName;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const PRIORITIZE_EXAMPLES: &str = "\
Examples:
  shepherdctl prioritize sim-0007 urgent --reason 'a customer waits' --until 4h
  shepherdctl prioritize --label row=7 low --reason 'the row is spare'
  shepherdctl prioritize sim-0007 normal --reason 'the customer has it'

Due work is taken by class, with the weights of the policy (priority_weights): urgent, normal, low.
A priority that an operator sets overrides that of the engine, which is lower for machines that fail
repeatedly.";

/// Arguments of `prioritize`: the machines, the level and its end.
#[derive(Debug, Args)]
pub struct PrioritizeArgs {
    /// Machines, as for other orders, and then the priority: urgent (before the others), normal (as the engine decides),
    /// or low (after the others); - for names on standard input; omit machines to select them by filters
    #[arg(value_name = "M|LEVEL", required = true)]
    pub words: Vec<String>,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Automatic end: a duration (2h) or a time (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Filters that select many machines, and what confirms their number.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `prioritize M… LEVEL`: sets the priority of machines.
pub async fn prioritize_machines(
    context: &CommandContext,
    args: &PrioritizeArgs,
) -> Result<String, CliError> {
    let (machines, level) = split_words(&args.words)?;
    check_machines(machines, &args.selection)?;
    let reason = require_why_reason(&args.reason)?;
    let until = args.until.as_deref().map(parse_until).transpose()?;
    let request = MachineOrderRequest {
        names: read_names(machines)?,
        selection: &args.selection,
        each: MachineOrder::Prioritize { level, until },
        reason: Some(reason),
        is_confirmed: false,
    };
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::prioritize_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::prioritize_request::Expiry::ExpiresAt(encode_timestamp(moment)),
    });
    let give = async |service, machine, order| {
        let level = level.as_str().to_owned();
        let request = v1::PrioritizeRequest { machine, order: Some(order), level, expiry: until.clone() };
        MachinesClient::new(service).prioritize(request).await
    };
    give_machine_order(context, request, give).await
}

/// The machines and the level in the words of a command.
fn split_words(words: &[String]) -> Result<(&[String], PriorityLevel), CliError> {
    let (level, machines) = words
        .split_last()
        .ok_or_else(|| CliError::Invalid("give the machines, and then urgent, normal or low".to_owned()))?;
    let found = PriorityLevel::ALL.into_iter().find(|known| known.as_str().eq_ignore_ascii_case(level));
    let level = found.map_or_else(|| level.parse(), Ok);
    let level = level.map_err(|error: UnknownName| CliError::Invalid(format!("the last word: {error}")))?;
    Ok((machines, level))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_word_is_the_level_and_the_others_are_machines() {
        let split = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            split_words(&words)
                .map(|(machines, level)| (machines.len(), level))
                .map_err(|error| error.to_string())
        };
        assert_eq!(split(&["a", "urgent"]), Ok((1, PriorityLevel::Urgent)));
        assert_eq!(split(&["a", "b", "low"]), Ok((2, PriorityLevel::Low)));
        assert_eq!(split(&["a", "LOW"]), Ok((1, PriorityLevel::Low)));
        assert_eq!(split(&["normal"]), Ok((0, PriorityLevel::Normal)));
        for (words, part) in [(&["a"][..], "the last word: \"a\""), (&["a", "b"], "\"b\"")] {
            let error = split(words).unwrap_err();
            assert!(error.contains(part), "{words:?}: {error}");
        }
    }
}
