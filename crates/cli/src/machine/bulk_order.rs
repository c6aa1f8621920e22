//! Bulk orders: one order for many machines, named or selected by filters, with confirmation of their number.
//!
//! A filter is easily wrong. So the machines are listed first, and the operator types their number, or gives it with
//! `--yes-count`. The order contains that number, and is rejected if another number of machines matches by then. Machines that are
//! named need no number, unless nothing undoes the order: the response to the dry run says so. Where such an order
//! would change nothing, nobody types a number, and the order contains it, too: the API requires it in every state of the
//! machines.

use std::fmt::Write as _;

use clap::Args;

use crate::client::decode::decode_machine_name;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::{CommandEnd, ExitCode, exit_code};
use crate::machine::selection::MachineFilters;
use crate::object::document::format_message;
use crate::order::confirmation::{
    RequiredConfirmation, check_answer, format_confirmed_outcome, is_interactive, read_answer,
};
use crate::order::expiry::encode_timestamp;
use crate::order::idempotency_key::{command_with_flags, stdin_note};
use crate::order::outcome::{OrderReply as _, decode_machine_outcome};
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::{preview_order, send_order};
use crate::output::{Format, print_stderr};
use bmdb::orders::machine_order::MachineOrder;
use bmdb::orders::order::{Expiry, OrderOutcome, OutcomeKind};
use model::machine_view::MachineName;
use model::order_limits::format_machine_count;
use model::order_rules::{ConfirmationKind, may_need_confirmation};
use model::power_order::PowerOrderKind;
use proto::fleet::v1;
use proto::fleet::v1::bulk_orders_client::BulkOrdersClient;
use proto::fleet::v1::submit_bulk_order_request::Operation;

/// The selection of a bulk order: filters in place of names, and what confirms the number of machines.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Many machines")]
pub struct BulkSelection {
    /// Filters that select the machines of the order.
    #[command(flatten)]
    pub(crate) filters: MachineFilters,
    /// Expected number of machines; if it is another number, nothing is done [default: prompt on the terminal]
    #[arg(long = "yes-count", value_name = "N")]
    pub yes_count: Option<u32>,
    /// Exceed the limits of the policy, or select all machines with an empty selector; admins only
    #[arg(long = "beyond-limits")]
    pub beyond_limits: bool,
}

impl BulkSelection {
    /// Whether the flags are those of an order about many machines, also if one is named.
    #[must_use]
    pub fn is_about_many(&self) -> bool {
        self.yes_count.is_some() || self.beyond_limits
    }

    /// Whether filters select machines.
    #[must_use]
    pub fn has_filters(&self) -> bool {
        self.filters.is_given()
    }
}

/// A bulk order, as a command line requests it.
pub(crate) struct BulkOrderRequest<'a> {
    /// Names of the machines; empty if filters select them.
    pub(crate) names: &'a [String],
    /// The filters, and what confirms the number of machines.
    pub(crate) selection: &'a BulkSelection,
    /// The order about each machine.
    pub(crate) each: &'a MachineOrder,
    /// The reason; `None` for an order that needs none.
    pub(crate) reason: Option<&'a str>,
}

/// Outcome of a bulk order on one machine.
struct BulkOutcome {
    name: MachineName,
    outcome: OrderOutcome,
    rejected: bool,
}

/// What a bulk order would do.
struct BulkPreview {
    /// The outcome on each machine. Nothing was decided if there is a rejection or a reason for that.
    outcomes: Vec<BulkOutcome>,
    /// Why the order would be rejected; `None` if it would be accepted.
    rejection: Option<String>,
    /// Why nothing was decided on the machines; `None` if it was.
    undecided_reason: Option<String>,
    /// What a person types before the order is given, because nothing undoes it.
    confirmation: Option<v1::OrderConfirmation>,
    /// The exit code that the order would have.
    exit: ExitCode,
    /// The response to the dry run, as programs get it.
    response: v1::SubmitBulkOrderResponse,
}

/// Gives one order for many machines.
pub(crate) async fn give_bulk_order(
    context: &CommandContext,
    request: &BulkOrderRequest<'_>,
) -> Result<String, CliError> {
    if context.order_flags.dry_run {
        let preview = preview_bulk_order(context, request).await?;
        context.exit_record.record(preview.exit);
        if preview.rejection.is_none() {
            require_machines(&preview.outcomes)?;
        }
        return render_dry_run(context, &preview);
    }
    let expected = if let Some(expected) = request.selection.yes_count {
        Some(expected)
    } else if !request.names.is_empty() && !may_need_confirmation(request.each.rpc()) {
        None
    } else {
        let preview = preview_bulk_order(context, request).await?;
        if let Some(message) = preview.rejection.clone() {
            return Err(CliError::Ended { exit: exit_code(CommandEnd::Rejected), message });
        }
        require_machines(&preview.outcomes)?;
        if let Some(required) = required_count(request, &preview)? {
            confirm_machine_count(context, request, &preview, &required)?;
        }
        Some(u32::try_from(preview.outcomes.len()).unwrap_or(u32::MAX))
    };
    let response = send_bulk_order(context, request, expected).await?;
    let lines = decode_bulk_outcomes(response.outcomes.clone())?;
    require_machines(&lines)?;
    if context.format == Format::Json {
        return format_message(&response);
    }
    let mut text = String::new();
    for line in &lines {
        let _ = writeln!(text, "{} {}", line.name.short_name(), line.outcome.message);
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

/// Rejects an order about no machine, in the same way in each output, and with a number or without one.
fn require_machines(outcomes: &[BulkOutcome]) -> Result<(), CliError> {
    if !outcomes.is_empty() {
        return Ok(());
    }
    Err(CliError::Ended {
        exit: ExitCode::NotFound,
        message: "no machine matches, and nothing was changed; list all with: shepherdctl get machines"
            .to_owned(),
    })
}

/// Output of a dry run: the machines with their outcomes, and whether the order would be accepted.
fn render_dry_run(context: &CommandContext, preview: &BulkPreview) -> Result<String, CliError> {
    let text = describe_preview(preview);
    let outcome = format_confirmed_outcome(context, &preview.response, &text, preview.confirmation.as_ref())?;
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
        if is_decided && !has_effect(one) { format!("{name} {}", one.outcome.message) } else { name }
    };
    preview.outcomes.iter().map(line).collect()
}

/// Whether what was requested would hold afterwards.
fn has_effect(one: &BulkOutcome) -> bool {
    one.outcome.kind != OutcomeKind::NoEffect
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
    let without_effect = outcomes.iter().filter(|one| !one.rejected && !has_effect(one)).count();
    if refused > 0 {
        let _ = write!(text, ", and refused on {}", format_machine_count(refused));
    }
    if without_effect > 0 {
        let _ = write!(text, ", and without effect on {}", format_machine_count(without_effect));
    }
    text
}

/// Lists the machines of a bulk order without changing anything. With `--yes-count`, the preview has a rejection if the
/// order is about another number of machines.
async fn preview_bulk_order(
    context: &CommandContext,
    request: &BulkOrderRequest<'_>,
) -> Result<BulkPreview, CliError> {
    let expected = request.selection.yes_count;
    let give = async |service, order| {
        BulkOrdersClient::new(service).submit(bulk_request(request, order, expected)).await
    };
    let response = preview_order(context, reason_or_placeholder(request.reason), give).await?;
    let exit = response.exit_code();
    check_named_count(request.names.len(), response.outcomes.len())?;
    Ok(BulkPreview {
        outcomes: decode_bulk_outcomes(response.outcomes.clone())?,
        rejection: response.rejection.clone(),
        undecided_reason: response.undecided_reason.clone(),
        confirmation: response.confirmation.clone(),
        exit,
        response,
    })
}

/// Refuses a preview with more machines than the order names: a server that ignores the names selects all machines.
fn check_named_count(names: usize, machines: usize) -> Result<(), CliError> {
    if names == 0 || machines <= names {
        return Ok(());
    }
    let message = format!(
        "the order names {}, and the server would give it to {machines}: it is of a release that ignores names; nothing was \
         ordered",
        format_machine_count(names)
    );
    Err(CliError::Ended { exit: ExitCode::Refused, message })
}

async fn send_bulk_order(
    context: &CommandContext,
    request: &BulkOrderRequest<'_>,
    expected: Option<u32>,
) -> Result<v1::SubmitBulkOrderResponse, CliError> {
    let give = async |service, order| {
        BulkOrdersClient::new(service).submit(bulk_request(request, order, expected)).await
    };
    send_order(context, reason_or_placeholder(request.reason), give).await
}

fn decode_bulk_outcomes(outcomes: Vec<v1::MachineOrderOutcome>) -> Result<Vec<BulkOutcome>, CliError> {
    outcomes.into_iter().map(decode_bulk_outcome).collect()
}

fn decode_bulk_outcome(one: v1::MachineOrderOutcome) -> Result<BulkOutcome, CliError> {
    let done = decode_machine_outcome(one.outcome, one.changed, one.message);
    Ok(BulkOutcome { name: decode_machine_name(one.name)?, outcome: done, rejected: one.rejected })
}

fn bulk_request(
    request: &BulkOrderRequest<'_>,
    order: v1::Order,
    expected: Option<u32>,
) -> v1::SubmitBulkOrderRequest {
    v1::SubmitBulkOrderRequest {
        selector: request.selection.filters.selector_text(),
        order: Some(order),
        expected_machines: expected.map(|count| i32::try_from(count).unwrap_or(i32::MAX)),
        beyond_limits: request.selection.beyond_limits,
        operation: Some(encode_operation(request.each)),
        names: request.names.to_vec(),
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
        MachineOrder::CancelRetire => Operation::CancelRetire(v1::CancelRetireOperation {}),
        MachineOrder::Power(PowerOrderKind::Reboot) => Operation::Reboot(v1::RebootOperation {}),
        MachineOrder::Power(switch) => {
            Operation::Power(v1::PowerOperation { action: switch.as_str().to_owned() })
        }
        MachineOrder::CancelPower => Operation::CancelPower(v1::CancelPowerOperation {}),
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

/// What confirms the number of machines; `None` if they are named and another order undoes this one.
fn required_count(
    request: &BulkOrderRequest<'_>,
    preview: &BulkPreview,
) -> Result<Option<RequiredConfirmation>, CliError> {
    let required = RequiredConfirmation::decode(preview.confirmation.as_ref())?;
    if required.is_some() || !request.names.is_empty() {
        return Ok(required);
    }
    Ok(Some(RequiredConfirmation {
        kind: ConfirmationKind::Count,
        text: preview.outcomes.len().to_string(),
        reason: String::new(),
    }))
}

/// Lists the machines on standard error, and lets a person type their number.
fn confirm_machine_count(
    context: &CommandContext,
    request: &BulkOrderRequest<'_>,
    preview: &BulkPreview,
    required: &RequiredConfirmation,
) -> Result<(), CliError> {
    for line in preview_lines(preview) {
        print_stderr(&format!("  {}", context.target_flags.qualify(&line)));
    }
    let machines = format_machine_count(preview.outcomes.len());
    let subject = if request.names.is_empty() { "the filters match" } else { "the order names" };
    let final_note = if required.reason.is_empty() {
        String::new()
    } else {
        format!(", and nothing undoes this order ({})", required.reason)
    };
    let fleet = context.client.describe_fleet();
    if !is_interactive() {
        let message = format!(
            "{subject} {machines}{final_note}, and nothing was ordered at {fleet}; if these are the right ones, give \
             --yes-count {}{}",
            required.text,
            stdin_note(&context.arguments)
        );
        let command = command_with_flags(&context.arguments, &["--yes-count", &required.text]);
        return Err(CliError::Unconfirmed { message, command });
    }
    print_stderr(&format!("At {fleet}, {subject} {machines}{final_note}."));
    let line = read_answer("Type their number to give the order: ")?;
    check_answer(line.as_deref(), required)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, kind: OutcomeKind, rejected: bool) -> BulkOutcome {
        let machine = uuid::Uuid::from_u128(1);
        let (provider, provider_id) = (Some("rack".to_owned()), Some(name.to_owned()));
        let outcome = OrderOutcome { kind, message: format!("is {name}") };
        BulkOutcome { name: MachineName { machine, provider, provider_id }, outcome, rejected }
    }

    fn preview(outcomes: Vec<BulkOutcome>) -> BulkPreview {
        BulkPreview {
            outcomes,
            rejection: None,
            undecided_reason: None,
            confirmation: None,
            exit: ExitCode::Refused,
            response: v1::SubmitBulkOrderResponse::default(),
        }
    }

    #[test]
    fn preview_gives_the_reason_where_the_order_would_not_do_what_it_requests() {
        let mut preview = preview(vec![
            outcome("a", OutcomeKind::Changed, false),
            outcome("b", OutcomeKind::Already, false),
            outcome("c", OutcomeKind::NoEffect, false),
            outcome("d", OutcomeKind::NoEffect, true),
        ]);
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

    #[test]
    fn order_about_no_machine_has_found_none() {
        let error = require_machines(&[]).unwrap_err();
        assert_eq!(error.exit_code(), ExitCode::NotFound);
        assert!(error.to_string().starts_with("no machine matches, and nothing was changed"), "{error}");
        assert!(require_machines(&[outcome("a", OutcomeKind::Already, false)]).is_ok());
    }

    #[test]
    fn order_about_names_reaches_no_more_machines_than_it_names() {
        for (names, machines, expected) in
            [(0, 9, true), (2, 2, true), (2, 1, true), (2, 0, true), (2, 3, false)]
        {
            let checked = check_named_count(names, machines);
            assert_eq!(checked.is_ok(), expected, "{names} {machines}");
            if let Err(error) = checked {
                assert_eq!(error.exit_code(), ExitCode::Refused);
                assert!(
                    error
                        .to_string()
                        .starts_with("the order names 2 machines, and the server would give it to 3")
                );
            }
        }
    }

    #[test]
    fn number_confirms_filters_always_and_names_if_nothing_undoes_the_order() {
        let (names, selection) = (["a".to_owned(), "b".to_owned()], BulkSelection::default());
        let mut preview = preview(vec![
            outcome("a", OutcomeKind::Changed, false),
            outcome("b", OutcomeKind::Changed, false),
        ]);
        let text = |names: &[String], preview: &BulkPreview| {
            let request =
                BulkOrderRequest { names, selection: &selection, each: &MachineOrder::Retry, reason: None };
            required_count(&request, preview).unwrap().map(|required| required.text)
        };
        assert_eq!(text(&names, &preview), None);
        assert_eq!(text(&[], &preview).as_deref(), Some("2"));
        preview.confirmation = Some(v1::OrderConfirmation {
            kind: v1::order_confirmation::Kind::Count.into(),
            text: "2".to_owned(),
            reason: "it is gone then".to_owned(),
        });
        assert_eq!(text(&names, &preview).as_deref(), Some("2"));
        assert_eq!(text(&[], &preview).as_deref(), Some("2"));
    }
}
