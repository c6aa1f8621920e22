//! `retire`, `retire cancel`, `retire waive`: retire (decommission) machines.

use clap::{Args, Subcommand};

use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::bulk_order::{BULK_GROUPS, BulkSelection, give_bulk_order};
use crate::machine::outcome::format_response;
use crate::order::reason::{reason_or_placeholder, require_why_reason};
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use bmdb::orders::machine_order::MachineOrder;
use model::process::UnknownName;
use model::retirement::RetirementStage;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const RETIRE_EXAMPLES: &str = "\
Examples:
  shepherdctl retire sim-0007 --reason 'its lease ends'
  shepherdctl retire --label row=7 --reason 'the row is sold' --dry_run
  shepherdctl retire sim-0007 --reason 'its lease ends' --wait --timeout 2h
  shepherdctl retire sim-0007 --keep_authority --reason 'its disks are shredded'
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'
  shepherdctl retire waive sim-0007 release --confirm 'sim/sim-0007 is not known to be given back' --reason 'the provider is gone'

A member of the control plane of a cluster has the key of the cluster's authority on its disk.
So the authority is replaced after the machine has left, and etcd of the other members restarts
twice. Until the replacement has ended, the disk opens etcd of the cluster. If somebody has the
disk, that is not enough: move what runs in the cluster to another one, and delete this one.";

const RETIRE_CANCEL_EXAMPLES: &str = "\
Example:
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'";

const RETIRE_WAIVE_EXAMPLES: &str = "\
Examples:
  shepherdctl retire waive sim-0007 wipe --confirm 'sim/sim-0007 is not wiped' --reason 'its disks are shredded'
  shepherdctl retire waive sim-0007 release --confirm 'sim/sim-0007 is not known to be given back' --reason 'the provider is gone'";

/// Arguments of `retire`: the machines to release to their providers, or a subcommand.
#[derive(Debug, Args)]
pub struct RetireArgs {
    /// What to do with a retirement that was begun
    #[command(subcommand)]
    pub command: Option<RetireCommand>,
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; omit it to select by filters
    #[arg(value_name = "M", required_unless_present_any = BULK_GROUPS, conflicts_with_all = BULK_GROUPS)]
    pub machine: Option<String>,
    /// Wipe the machine first (not supported by any agent or provider of this release)
    #[arg(long)]
    pub wipe: bool,
    /// Keep the authority of its cluster, because the disk of the machine is destroyed or wiped by other means
    #[arg(long = "keep_authority", alias = "keep-authority")]
    pub keep_authority: bool,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// Filters that select many machines instead of one.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// Subcommands of `retire`, about retirements that have begun.
#[derive(Debug, Subcommand)]
pub enum RetireCommand {
    /// Cancel a retirement; possible until the provider has received the order
    #[command(after_help = RETIRE_CANCEL_EXAMPLES)]
    Cancel(CancelRetire),
    /// Skip the current stage of a retirement, if it cannot be completed
    #[command(after_help = RETIRE_WAIVE_EXAMPLES)]
    Waive(WaiveStage),
}

/// Arguments of `retire cancel`: the machine of the retirement to cancel.
#[derive(Debug, Args)]
pub struct CancelRetire {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Arguments of `retire waive`: the stage to skip, and the confirmation.
#[derive(Debug, Args)]
pub struct WaiveStage {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// The stage: wipe or release
    #[arg(value_name = "STAGE")]
    pub stage: String,
    /// Words that confirm what remains undone; without this flag, the error shows the exact words
    #[arg(long = "confirm", value_name = "WORDS", default_value = "")]
    pub confirm: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Runs `retire` or one of its subcommands.
pub async fn run_retire_command(
    context: &CommandContext,
    arguments: &RetireArgs,
) -> Result<String, CliError> {
    match &arguments.command {
        Some(RetireCommand::Cancel(cancel)) => cancel_retirement(context, cancel).await,
        Some(RetireCommand::Waive(waive)) => waive_stage(context, waive).await,
        None => retire_machine(context, arguments).await,
    }
}

/// Runs `retire M`: orders the retirement of a machine.
async fn retire_machine(context: &CommandContext, arguments: &RetireArgs) -> Result<String, CliError> {
    let reason = require_why_reason(arguments.reason.as_deref().unwrap_or_default())?;
    let (wipe, keep_authority) = (arguments.wipe, arguments.keep_authority);
    let Some(machine) = arguments.machine.as_deref() else {
        let retire = MachineOrder::Retire { wipe, keep_authority };
        return give_bulk_order(context, &arguments.selection, retire, Some(reason)).await;
    };
    let give = async |service, order| {
        let request =
            v1::RetireRequest { machine: machine.to_owned(), order: Some(order), wipe, keep_authority };
        MachinesClient::new(service).retire(request).await
    };
    format_response(context, send_order(context, reason, give).await?)
}

/// Runs `retire cancel M`: cancels the retirement of a machine.
async fn cancel_retirement(context: &CommandContext, arguments: &CancelRetire) -> Result<String, CliError> {
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    let give = async |service, order| {
        let request = v1::CancelRetireRequest { machine: arguments.machine.clone(), order: Some(order) };
        MachinesClient::new(service).cancel_retire(request).await
    };
    format_response(context, send_order(context, reason, give).await?)
}

/// Runs `retire waive M STAGE`: skips a stage of the retirement.
async fn waive_stage(context: &CommandContext, arguments: &WaiveStage) -> Result<String, CliError> {
    let reason = require_why_reason(&arguments.reason)?;
    let stage: RetirementStage =
        arguments.stage.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let give = async |service, order| {
        let request = v1::WaiveStageRequest {
            machine: arguments.machine.clone(),
            order: Some(order),
            stage: stage.as_str().to_owned(),
            confirmation: arguments.confirm.clone(),
        };
        MachinesClient::new(service).waive_stage(request).await
    };
    format_response(context, send_order(context, reason, give).await?)
}
