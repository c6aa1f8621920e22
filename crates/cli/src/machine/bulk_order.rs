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
    /// Exceed the limits of the policy, or select all machines with an empty selector; admins only
    #[arg(long = "override_limits", alias = "beyond_limits")]
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

/// What a bulk order would do.
struct BulkPreview {
    /// The outcome on each machine. Nothing was decided if there is a rejection or a reason for that.
    outcomes: Vec<BulkOutcome>,
    /// Why the order would be rejected; `None` if it would be accepted.
    rejection: Option<String>,
    /// Why nothing was decided on the machines; `None` if it was.
    undecided_reason: Option<String>,
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
        return render_dry_run(context, &preview);
    }
    let expected = if let Some(expected) = selection.confirm_count {
        expected
    } else {
        let preview = preview_bulk_order(&context.client, selection, &each, reason).await?;
        if let Some(message) = preview.rejection.clone() {
            return Err(CliError::Ended { exit: exit_code(CommandEnd::Rejected), message });
        }
        let lines = preview_lines(&preview);
        if lines.is_empty() && context.format == Format::Table {
            context.exit_record.record(ExitCode::NotFound);
            return Ok("no machine matches; nothing was changed\n".to_owned());
        }
        if lines.is_empty() { 0 } else { confirm_machine_count(&lines)? }
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

/// Output of a dry run: the machines with their outcomes, and whether the order would be accepted.
fn render_dry_run(context: &CommandContext, preview: &BulkPreview) -> Result<String, CliError> {
    let answer = serde_json::json!({
        "machines": preview.outcomes,
        "rejection": preview.rejection,
        "undecided_reason": preview.undecided_reason,
    });
    let outcome = context.format_outcome(answer, &describe_preview(preview))?;
    if context.format == Format::Json {
        return Ok(outcome);
    }
    let mut text = String::new();
    for line in preview_lines(preview) {
        let _ = writeln!(text, "{line}");
    }
    text.push_str(&outcome);
    Ok(text)
}

/// One line for each machine: its name, and why it would be refused or without effect there.
fn preview_lines(preview: &BulkPreview) -> Vec<String> {
    let is_decided = preview.rejection.is_none() && preview.undecided_reason.is_none();
    let line = |one: &BulkOutcome| {
        let name = one.name.short_name();
        if is_decided && !one.outcome.has_effect() {
            format!("{name} {}", one.outcome.message())
        } else {
            name
        }
    };
    preview.outcomes.iter().map(line).collect()
}

/// Whether the order would be given, and on how many machines without effect, as a sentence.
fn describe_preview(preview: &BulkPreview) -> String {
    let outcomes = &preview.outcomes;
    let mut text = format!("this is about {}; ", format_machine_count(outcomes.len()));
    if let Some(message) = &preview.rejection {
        let _ = write!(text, "refused: {message}");
        return text;
    }
    text.push_str("the order would be given");
    if let Some(reason) = &preview.undecided_reason {
        let _ = write!(text, "; {reason}");
        return text;
    }
    let refused = outcomes.iter().filter(|one| one.rejected).count();
    let without_effect = outcomes.iter().filter(|one| !one.rejected && !one.outcome.has_effect()).count();
    if refused > 0 {
        let _ = write!(text, ", and refused on {}", format_machine_count(refused));
    }
    if without_effect > 0 {
        let _ = write!(text, ", and without effect on {}", format_machine_count(without_effect));
    }
    text
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
    Ok(BulkPreview {
        outcomes: response.outcomes.into_iter().map(decode_bulk_outcome).collect::<Result<_, _>>()?,
        rejection: response.rejection,
        undecided_reason: response.undecided_reason,
        exit,
    })
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
    response.outcomes.into_iter().map(decode_bulk_outcome).collect()
}

fn decode_bulk_outcome(one: v1::MachineOrderOutcome) -> Result<BulkOutcome, CliError> {
    let done = decode_machine_outcome(one.outcome, one.changed, one.message);
    Ok(BulkOutcome { name: decode_machine_name(one.name)?, outcome: done.into(), rejected: one.rejected })
}

fn bulk_request(
    selection: &BulkSelection,
    each: &MachineOrder,
    order: v1::Order,
    expected: Option<u32>,
) -> v1::SubmitBulkOrderRequest {
    v1::SubmitBulkOrderRequest {
        selector: selection.filters.selector_text(),
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
fn confirm_machine_count(listed: &[String]) -> Result<u32, CliError> {
    for line in listed {
        print_stderr(&format!("  {line}"));
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

#[cfg(test)]
mod tests {
    use super::*;
    use bmdb::orders::order::{OrderOutcome, OutcomeKind};

    fn outcome(name: &str, kind: OutcomeKind, rejected: bool) -> BulkOutcome {
        let machine = uuid::Uuid::from_u128(1);
        let (provider, provider_id) = (Some("rack".to_owned()), Some(name.to_owned()));
        let done = OrderOutcome { kind, message: format!("is {name}") };
        BulkOutcome { name: MachineName { machine, provider, provider_id }, outcome: done.into(), rejected }
    }

    #[test]
    fn preview_gives_the_reason_where_the_order_would_not_do_what_it_requests() {
        let mut preview = BulkPreview {
            outcomes: vec![
                outcome("a", OutcomeKind::Changed, false),
                outcome("b", OutcomeKind::Already, false),
                outcome("c", OutcomeKind::NoEffect, false),
                outcome("d", OutcomeKind::NoEffect, true),
            ],
            rejection: None,
            undecided_reason: None,
            exit: ExitCode::Refused,
        };
        assert_eq!(preview_lines(&preview), ["rack/a", "rack/b", "rack/c is c", "rack/d is d"]);
        let expected = "this is about 4 machines; the order would be given, and refused on 1 machine, and without \
                        effect on 1 machine";
        assert_eq!(describe_preview(&preview), expected);
        preview.undecided_reason = Some("they are too many".to_owned());
        let names = ["rack/a", "rack/b", "rack/c", "rack/d"];
        assert_eq!(preview_lines(&preview), names);
        let expected = "this is about 4 machines; the order would be given; they are too many";
        assert_eq!(describe_preview(&preview), expected);
        preview.rejection = Some("a limit".to_owned());
        assert_eq!(preview_lines(&preview), names);
        assert_eq!(describe_preview(&preview), "this is about 4 machines; refused: a limit");
    }
}
