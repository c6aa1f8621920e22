//! `retire`, `retire cancel`, `retire waive`: retire (decommission) machines.

use clap::{Args, Subcommand};

use crate::client::fleet_client::ApiChannel;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::MachineTargets;
use crate::machine::outcome::{describe_effect, format_response};
use crate::order::confirmation::{ConfirmFlag, RequiredConfirmation, require_confirmation};
use crate::order::reason::require_why_reason;
use crate::order::retry::{preview_order, send_order};
use crate::order::wait_flags::WaitFlags;
use bmdb::orders::machine_order::MachineOrder;
use model::process::UnknownName;
use model::retirement::RetirementStage;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const RETIRE_EXAMPLES: &str = "\
Examples:
  shepherdctl retire sim-0007 --reason 'its lease ends'
  shepherdctl retire --label row=7 --reason 'the row is sold' --dry-run
  shepherdctl retire sim-0007 --reason 'its lease ends' --wait --timeout 2h
  shepherdctl retire sim-0007 --keep-authority --reason 'its disks are shredded'
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'
  shepherdctl retire waive sim-0007 release --confirm 'sim/sim-0007 is not known to be given back' --reason 'the provider is gone'

Nothing undoes a retirement once the provider has the order. Type the name of the machine, or give --yes; for
several machines, type their number, or give --yes-count.

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
    /// Wipe the machine first (not supported by any agent or provider of this release)
    #[arg(long)]
    pub wipe: bool,
    /// Keep the authority of its cluster, because the disk of the machine is destroyed or wiped by other means
    #[arg(long = "keep-authority")]
    pub keep_authority: bool,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm: ConfirmFlag,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
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

/// Arguments of `retire cancel`: the machines of the retirements to cancel.
#[derive(Debug, Args)]
pub struct CancelRetire {
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// The machines of the order.
    #[command(flatten)]
    pub targets: MachineTargets,
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
    /// Words that confirm what remains undone; without this flag, the terminal or the error shows the exact words
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
        Some(RetireCommand::Cancel(cancel)) => cancel_retirements(context, cancel).await,
        Some(RetireCommand::Waive(waive)) => waive_stage(context, waive).await,
        None => retire_machines(context, arguments).await,
    }
}

/// Runs `retire M…`: orders the retirement of machines.
async fn retire_machines(context: &CommandContext, arguments: &RetireArgs) -> Result<String, CliError> {
    let (wipe, keep_authority) = (arguments.wipe, arguments.keep_authority);
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::Retire { wipe, keep_authority },
        reason: Some(require_why_reason(arguments.reason.as_deref().unwrap_or_default())?),
        is_confirmed: arguments.confirm.yes,
    };
    let give = async |service, machine, order| {
        let request = v1::RetireRequest { machine, order: Some(order), wipe, keep_authority };
        MachinesClient::new(service).retire(request).await
    };
    give_machine_order(context, request, give).await
}

/// Runs `retire cancel M…`: cancels the retirements of machines.
async fn cancel_retirements(context: &CommandContext, arguments: &CancelRetire) -> Result<String, CliError> {
    let request = MachineOrderRequest {
        names: arguments.targets.read_names()?,
        selection: &arguments.targets.selection,
        each: MachineOrder::CancelRetire,
        reason: arguments.reason.as_deref(),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        let request = v1::CancelRetireRequest { machine, order: Some(order) };
        MachinesClient::new(service).cancel_retire(request).await
    };
    give_machine_order(context, request, give).await
}

/// Runs `retire waive M STAGE`: skips a stage of the retirement. The words that confirm it are in the order itself, so
/// that the server compares them.
async fn waive_stage(context: &CommandContext, arguments: &WaiveStage) -> Result<String, CliError> {
    let reason = require_why_reason(&arguments.reason)?;
    let stage: RetirementStage =
        arguments.stage.parse().map_err(|error: UnknownName| CliError::Invalid(error.to_string()))?;
    let give = async |service: ApiChannel, order: v1::Order, confirmation: String| {
        let request = v1::WaiveStageRequest {
            machine: arguments.machine.clone(),
            order: Some(order),
            stage: stage.as_str().to_owned(),
            confirmation,
        };
        MachinesClient::new(service).waive_stage(request).await
    };
    let mut words = arguments.confirm.clone();
    if words.is_empty() && !context.order_flags.dry_run {
        let preview = async |service: ApiChannel, order: v1::Order| give(service, order, String::new()).await;
        let dry_run = preview_order(context, reason, preview).await?;
        if let Some(required) = RequiredConfirmation::decode(dry_run.confirmation.as_ref())? {
            require_confirmation(context, &describe_effect(&dry_run), &required)?;
            words = required.text;
        }
    }
    let give = async |service: ApiChannel, order: v1::Order| give(service, order, words.clone()).await;
    format_response(context, &send_order(context, reason, give).await?)
}
