//! Bulk orders: one order for all machines of a filter, with confirmation of their number.
//!
//! A filter is easily wrong. So the machines are listed first, and the operator types their number, or gives it with
//! `--confirm_count`. The order contains that number, and is rejected if another number of machines matches by then.

use std::fmt::Write as _;
use std::io::{BufRead as _, IsTerminal as _, Write as _};

use clap::Args;
use serde::Serialize;

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::{CommandEnd, ExitCode, exit_code};
use crate::machine::selection::MachineFilters;
use crate::order::expiry::encode_timestamp;
use crate::order::outcome::{OrderReply as _, OutcomeFields, decode_machine_outcome};
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order;
use crate::output::{Format, format_json, print_stderr};
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::Expiry;
use model::machine_view::MachineName;
use model::order_limits::format_machine_count;
use model::power_order::PowerOrderKind;
use proto::fleet::v1;
use proto::fleet::v1::bulk_orders_client::BulkOrdersClient;
use proto::fleet::v1::submit_bulk_order_request::Operation;

/// Groups of flags, any of which selects many machines instead of one.
pub const BULK_GROUPS: [&str; 2] = ["MachineFilters", "BulkSelection"];

/// The selection of a bulk order: filters in place of one machine.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Instead of one machine")]
pub struct BulkSelection {
    /// Filters that select the machines of the order.
    #[command(flatten)]
    filters: MachineFilters,
    /// Expected number of machines; if another number matches, nothing is done [default: prompt on the terminal]
    #[arg(long = "confirm_count", value_name = "N")]
    pub confirm_count: Option<u32>,
    /// Exceed the limits of the policy, or select all machines without a filter; admins only
    #[arg(long = "override_limits")]
    pub beyond_limits: bool,
}

/// Outcome of a bulk order on one machine.
#[derive(Serialize)]
struct BulkOutcome {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    outcome: OutcomeFields,
    rejected: bool,
}

#[derive(Serialize)]
struct BulkOutput {
    machines: Vec<BulkOutcome>,
}

/// The machines that a bulk order would change.
struct BulkPreview {
    names: Vec<MachineName>,
    /// Why the order would be rejected; `None` if it would be accepted.
    rejection: Option<String>,
    /// The exit code that the order would have.
    exit: ExitCode,
}

/// Gives one order for all machines of a filter.
pub async fn give_bulk_order(
    context: &CommandContext,
    selection: &BulkSelection,
    each: MachineOrder,
    reason: Option<&str>,
) -> Result<String, CliError> {
    if context.order_flags.dry_run {
        let preview = preview_bulk_order(&context.client, selection, &each, reason).await?;
        context.exit_record.record(preview.exit);
        return render_dry_run(context, preview);
    }
    let expected = if let Some(expected) = selection.confirm_count {
        expected
    } else {
        let BulkPreview { names, rejection, .. } =
            preview_bulk_order(&context.client, selection, &each, reason).await?;
        if let Some(message) = rejection {
            return Err(CliError::Ended { exit: exit_code(CommandEnd::Rejected), message });
        }
        if names.is_empty() && context.format == Format::Table {
            context.exit_record.record(ExitCode::NotFound);
            return Ok("no machine matches; nothing was changed\n".to_owned());
        }
        if names.is_empty() { 0 } else { confirm_machine_count(&names)? }
    };
    let lines = send_bulk_order(context, selection, &each, reason, expected).await?;
    if context.format == Format::Json {
        return format_json(&BulkOutput { machines: lines });
    }
    let mut text = String::new();
    for line in &lines {
        let _ = writeln!(text, "{} {}", line.name.short_name(), line.outcome.message());
    }
    let refused = lines.iter().filter(|line| line.rejected).count();
    let changed = lines.iter().filter(|line| line.outcome.is_changed()).count();
    let _ = write!(text, "{}: {changed} changed", format_machine_count(lines.len()));
    if refused > 0 {
        let _ = write!(text, ", {refused} refused");
    }
    text.push('\n');
    Ok(text)
}

/// Output of a dry run: the machines, and whether the order would be accepted.
fn render_dry_run(context: &CommandContext, listed: BulkPreview) -> Result<String, CliError> {
    let BulkPreview { names, rejection, .. } = listed;
    let answer = serde_json::json!({ "machines": names, "rejection": rejection });
    let given = rejection
        .map_or_else(|| "the order would be given".to_owned(), |message| format!("refused: {message}"));
    let sentence = format!("this is about {}; {given}", format_machine_count(names.len()));
    let outcome = context.format_outcome(answer, &sentence)?;
    if context.format == Format::Json {
        return Ok(outcome);
    }
    let mut text = String::new();
    for name in &names {
        let _ = writeln!(text, "{}", name.short_name());
    }
    text.push_str(&outcome);
    Ok(text)
}

/// Lists the machines of a bulk order without changing anything. With `--confirm_count`, the preview has a rejection
/// if another number of machines matches.
async fn preview_bulk_order(
    client: &FleetClient,
    selection: &BulkSelection,
    each: &MachineOrder,
    reason: Option<&str>,
) -> Result<BulkPreview, CliError> {
    let order =
        v1::Order { reason: reason_or_placeholder(reason).to_owned(), dry_run: true, ..v1::Order::default() };
    let request = bulk_request(selection, each, order, selection.confirm_count);
    let result = BulkOrdersClient::new(client.channel()).submit(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let exit = response.exit_code();
    let names = response.outcomes.into_iter().map(|outcome| decode_machine_name(outcome.name));
    Ok(BulkPreview { names: names.collect::<Result<_, _>>()?, rejection: response.rejection, exit })
}

async fn send_bulk_order(
    context: &CommandContext,
    selection: &BulkSelection,
    each: &MachineOrder,
    reason: Option<&str>,
    expected: u32,
) -> Result<Vec<BulkOutcome>, CliError> {
    let give = async |service, order| {
        BulkOrdersClient::new(service).submit(bulk_request(selection, each, order, Some(expected))).await
    };
    let response = send_order(context, reason_or_placeholder(reason), give).await?;
    let line = |one: v1::MachineOrderOutcome| {
        let done = decode_machine_outcome(one.outcome, one.changed, one.message);
        Ok(BulkOutcome { name: decode_machine_name(one.name)?, outcome: done.into(), rejected: one.rejected })
    };
    response.outcomes.into_iter().map(line).collect()
}

fn bulk_request(
    selection: &BulkSelection,
    each: &MachineOrder,
    order: v1::Order,
    expected: Option<u32>,
) -> v1::SubmitBulkOrderRequest {
    v1::SubmitBulkOrderRequest {
        filter: Some(selection.filters.to_proto()),
        order: Some(order),
        expected_machines: expected.map(|count| i32::try_from(count).unwrap_or(i32::MAX)),
        override_limits: selection.beyond_limits,
        operation: Some(encode_operation(each)),
    }
}

fn encode_operation(each: &MachineOrder) -> Operation {
    match each {
        MachineOrder::Hold { scope, until } => Operation::Hold(v1::HoldOperation {
            scope: scope.as_str().to_owned(),
            expiry: until.map(|until| match until {
                Expiry::After(span) => v1::hold_operation::Expiry::ExpiresAfter(span.to_string()),
                Expiry::At(moment) => v1::hold_operation::Expiry::ExpiresAt(encode_timestamp(moment)),
            }),
        }),
        MachineOrder::Release { quarantine } => {
            Operation::Release(v1::ReleaseOperation { quarantine: *quarantine })
        }
        MachineOrder::Retry => Operation::Retry(v1::RetryOperation {}),
        MachineOrder::Quarantine => Operation::Quarantine(v1::QuarantineOperation {}),
        MachineOrder::Retire { wipe, keep_authority } => {
            Operation::Retire(v1::RetireOperation { wipe: *wipe, keep_authority: *keep_authority })
        }
        MachineOrder::Power(PowerOrderKind::Reboot) => Operation::Reboot(v1::RebootOperation {}),
        MachineOrder::Power(switch) => {
            Operation::Power(v1::PowerOperation { action: switch.as_str().to_owned() })
        }
        MachineOrder::Prioritize { level, until } => Operation::Prioritize(v1::PrioritizeOperation {
            level: level.as_str().to_owned(),
            expiry: until.map(|until| match until {
                Expiry::After(span) => v1::prioritize_operation::Expiry::ExpiresAfter(span.to_string()),
                Expiry::At(moment) => v1::prioritize_operation::Expiry::ExpiresAt(encode_timestamp(moment)),
            }),
        }),
        MachineOrder::Label { set, remove } => {
            Operation::Label(v1::LabelOperation { set: set.clone(), remove: remove.clone() })
        }
    }
}

/// Lists the machines on standard error, and reads their number from the terminal.
fn confirm_machine_count(listed: &[MachineName]) -> Result<u32, CliError> {
    for name in listed {
        print_stderr(&format!("  {}", name.short_name()));
    }
    let machines = format_machine_count(listed.len());
    if !(std::io::stdin().is_terminal() && std::io::stderr().is_terminal()) {
        return Err(CliError::Invalid(format!(
            "the filters match {machines}, and nothing was ordered; if these are the right ones, give \
             --confirm_count {}",
            listed.len()
        )));
    }
    // Without a terminal nothing is read, and the number does not match.
    let _ = write!(std::io::stderr().lock(), "The filters match {machines}. Type their number to continue: ");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    line.trim()
        .parse()
        .map_err(|_| CliError::Invalid(format!("{:?} is not a number; nothing was ordered", line.trim())))
}
