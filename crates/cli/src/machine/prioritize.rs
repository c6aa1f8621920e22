//! `prioritize`: scheduling priority of machines.

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::expiry::{encode_timestamp, parse_until};
use crate::order::reason::require_why_reason;
use crate::order::retry::send_order;
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
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Priority: urgent (before the others), normal (as the engine decides), or low (after the others)
    #[arg(value_name = "LEVEL", value_parser = PossibleValuesParser::new(PriorityLevel::ALL.map(PriorityLevel::as_str)))]
    pub level: String,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Automatic end: a duration (2h) or a time (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Selection of many machines, instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `prioritize M LEVEL`: sets the priority of a machine.
pub async fn prioritize_machine(context: &CommandContext, args: &PrioritizeArgs) -> Result<String, CliError> {
    let level: PriorityLevel =
        args.level.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    require_why_reason(&args.reason)?;
    let until = args.until.as_deref().map(parse_until).transpose()?;
    let Some(machine) = args.machine.as_deref() else {
        let each = MachineOrder::Prioritize { level, until };
        return give_bulk_order(context, &args.selection, each, Some(&args.reason)).await;
    };
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::prioritize_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::prioritize_request::Expiry::ExpiresAt(encode_timestamp(moment)),
    });
    let give = async |service, order| {
        let request = v1::PrioritizeRequest {
            machine: machine.to_owned(),
            order: Some(order),
            level: level.as_str().to_owned(),
            expiry: until.clone(),
        };
        MachinesClient::new(service).prioritize(request).await
    };
    format_response(context, send_order(context, &args.reason, give).await?)
}
