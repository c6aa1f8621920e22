//! `hold`, `release`: stop work on machines, and let it continue.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::MachineTargets;
use crate::one_of::one_of;
use crate::order::expiry::{encode_timestamp, parse_until};
use crate::order::reason::require_why_reason;
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
  shepherdctl hold - --reason 'a bad batch' --until 1d <batch.txt

Filters list their machines first. Confirm the number on the terminal or with --yes-count. Machines that are
named need no number; if one name fits no machine, or several, nothing is ordered.";

pub(crate) const RELEASE_EXAMPLES: &str = "\
Examples:
  shepherdctl release sim-0007 --reason 'the disk is changed'
  shepherdctl release sim-0007 --quarantine
  shepherdctl release --label row=7 --yes-count 24 --reason 'the row is rewired'";

/// Arguments of `hold`: the machines, the scope, the reason and the end.
#[derive(Debug, Args)]
pub struct HoldArgs {
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Scope of the hold: everything, power (no reboot, no power action), or recovery
    #[arg(
        long,
        value_name = "SCOPE",
        default_value = "everything",
        value_parser = one_of(HoldScope::ALL.map(HoldScope::as_str))
    )]
    pub scope: String,
    /// Automatic end: a duration (2h) or a time (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Arguments of `release`: the machines, and whether their quarantine ends.
#[derive(Debug, Args)]
pub struct ReleaseArgs {
    /// End its quarantine instead; it comes back if provider and BMDB still disagree
    #[arg(long)]
    pub quarantine: bool,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
}

/// Runs `hold M…`: puts a hold on machines.
pub async fn hold_machines(context: &CommandContext, arguments: &HoldArgs) -> Result<String, CliError> {
    let until = match arguments.until.as_deref() {
        None => None,
        Some(text) => Some(parse_until(text)?),
    };
    let scope = HoldScope::ALL.into_iter().find(|scope| scope.as_str() == arguments.scope);
    let scope = scope.unwrap_or(HoldScope::Everything);
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::Hold { scope, until },
        reason: Some(require_why_reason(&arguments.reason)?),
        is_confirmed: false,
    };
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::hold_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::hold_request::Expiry::ExpiresAt(encode_timestamp(moment)),
    });
    let give = async |service, machine, order| {
        let scope = scope.as_str().to_owned();
        let request = v1::HoldRequest { machine, order: Some(order), scope, expiry: until.clone() };
        MachinesClient::new(service).hold(request).await
    };
    give_machine_order(context, request, give).await
}

/// Runs `release M…`: removes holds from machines.
pub async fn release_machines(context: &CommandContext, arguments: &ReleaseArgs) -> Result<String, CliError> {
    let quarantine = arguments.quarantine;
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::Release { quarantine },
        reason: arguments.reason.as_deref(),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        let request = v1::ReleaseRequest { machine, order: Some(order), quarantine };
        MachinesClient::new(service).release(request).await
    };
    give_machine_order(context, request, give).await
}
