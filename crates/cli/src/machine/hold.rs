//! `hold`, `release`: stop work on machines, and let it go on.

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::expiry::{encode_timestamp, parse_until};
use crate::order::reason::{reason_or_placeholder, require_why_reason};
use crate::order::retry::send_order;
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::Expiry;
use model::facts::HoldScope;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const HOLD_EXAMPLES: &str = "\
Examples:
  shepherdctl hold sim-0007 --reason 'changing a disk' --until 2h
  shepherdctl hold sim-0007 --reason 'its console is in use' --scope power
  shepherdctl hold --label row=7 --reason 'the row is rewired' --until 4h

An order for many machines lists them first. Confirm their number on the terminal or with --confirm_count.";

pub(crate) const RELEASE_EXAMPLES: &str = "\
Examples:
  shepherdctl release sim-0007 --reason 'the disk is changed'
  shepherdctl release sim-0007 --quarantine
  shepherdctl release --label row=7 --confirm_count 24 --reason 'the row is rewired'";

/// Arguments of `hold`: the machines, the scope, the reason and the end.
#[derive(Debug, Args)]
pub struct HoldArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Scope of the hold: everything, power (no reboot, no power action), or recovery
    #[arg(
        long,
        value_name = "SCOPE",
        default_value = "everything",
        value_parser = PossibleValuesParser::new(HoldScope::ALL.map(HoldScope::as_str))
    )]
    pub scope: String,
    /// Automatic end: a duration (2h) or a time (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Arguments of `release`: the machines, and whether their quarantine ends.
#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// End its quarantine instead; it comes back if provider and BMDB still disagree
    #[arg(long)]
    pub quarantine: bool,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Runs `hold M`: puts a hold on a machine.
pub async fn hold_machine(context: &CommandContext, arguments: &HoldArgs) -> Result<String, CliError> {
    let until = match arguments.until.as_deref() {
        None => None,
        Some(text) => Some(parse_until(text)?),
    };
    let scope = HoldScope::ALL.into_iter().find(|scope| scope.as_str() == arguments.scope);
    let scope = scope.unwrap_or(HoldScope::Everything);
    require_why_reason(&arguments.reason)?;
    let Some(machine) = arguments.machine.as_deref() else {
        let each = MachineOrder::Hold { scope, until };
        return give_bulk_order(context, &arguments.selection, each, Some(&arguments.reason)).await;
    };
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::hold_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::hold_request::Expiry::ExpiresAt(encode_timestamp(moment)),
    });
    let give = async |service, order| {
        let request = v1::HoldRequest {
            machine: machine.to_owned(),
            order: Some(order),
            scope: scope.as_str().to_owned(),
            expiry: until.clone(),
        };
        MachinesClient::new(service).hold(request).await
    };
    format_response(context, send_order(context, &arguments.reason, give).await?)
}

/// Runs `release M`: removes a hold from a machine.
pub async fn release_machine(context: &CommandContext, arguments: &ReleaseArgs) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return give_bulk_order(
            context,
            &arguments.selection,
            MachineOrder::Release { quarantine: arguments.quarantine },
            reason,
        )
        .await;
    };
    let give = async |service, order| {
        let request = v1::ReleaseRequest {
            machine: machine.to_owned(),
            order: Some(order),
            quarantine: arguments.quarantine,
        };
        MachinesClient::new(service).release(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(context, send_order(context, reason, give).await?)
}
