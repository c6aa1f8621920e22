//! `update ...`, `get updates`, `describe update`: roll out a release of the role server.

use std::fmt::Write as _;

use clap::{Args, Subcommand};

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::machine::selection::parse_selector;
use crate::object::document::{ObjectDocument, format_message};
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::order::reason::{reason_or_placeholder, require_audit_reason};
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use crate::output::Format;
use crate::output::table::{format_table, terminal_width};
use bmdb::fleet::roll_out::{NewRollOut, RollOutChange, order_target};
use model::humanize::{humanize_duration, relative_and_absolute_time};
use model::roll_out_view::{RollOutMachineView, RollOutView};
use model::selector::Selector;
use model::time::{Span, Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::updates_client::UpdatesClient;

pub(crate) const UPDATE_EXAMPLES: &str = "\
Examples:
  shepherdctl update -l label.row=7 --release 'roleserver 1.4' --reason 'a try' --dry-run
  shepherdctl update -l '' --release 'roleserver 1.4' --parallelism 5 --reason '1.4'

The release is an artefact (shepherdctl artefacts add). Each machine fetches it and switches to it; programs
that run beside the role server continue. A machine that then reaches no shepherd returns to its former
release automatically. The next machine gets the order when the machines before it run the release and are
healthy. The first failure pauses the update.";

const COLUMNS: [Column; 6] = [
    Column::always("NAME"),
    Column::always("STAGE"),
    Column::always("RELEASE"),
    Column::always("MACHINES"),
    Column::always("AGE"),
    Column::always("ORDERED BY"),
];

const UPDATE_PAUSE_EXAMPLES: &str = "\
Example:
  shepherdctl update pause 3f9a12bc --reason 'I inspect the row first'";

const UPDATE_RESUME_EXAMPLES: &str = "\
Example:
  shepherdctl update resume 3f9a12bc --reason 'its disk is no longer full'

Machines that failed stay as they are; another update may order them again.";

const UPDATE_ABORT_EXAMPLES: &str = "\
Example:
  shepherdctl update abort 3f9a12bc --reason 'the release is bad'";

/// Arguments of `update`: a release and its machines, or a subcommand.
#[derive(Debug, Args)]
pub struct UpdateArgs {
    /// What to do with one that was ordered
    #[command(subcommand)]
    pub command: Option<UpdateCommand>,
    /// Which machines, for example 'location=ams*,label.row=7,memory>=64GiB'; '' for every machine
    #[arg(short = 'l', long, value_name = "SELECTOR", required = true, value_parser = parse_selector)]
    pub selector: Option<Selector>,
    /// The release: an artefact's digest, the beginning of it, or its name
    #[arg(long, value_name = "RELEASE", required = true)]
    pub release: Option<String>,
    /// How many machines at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub parallelism: u32,
    /// Time limit for a machine to fetch the release, and as long again to report that it runs
    #[arg(long = "machine-deadline", value_name = "SPAN", default_value = "2m")]
    pub machine_deadline: Span,
    /// Why, for the audit and for operators who run `why`
    #[arg(long, value_name = "TEXT", required = true)]
    pub reason: Option<String>,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

/// Subcommands of `update`, about roll-outs that were ordered.
#[derive(Debug, Subcommand)]
pub enum UpdateCommand {
    /// Pause the update: send no more orders to machines until it is resumed
    #[command(after_help = UPDATE_PAUSE_EXAMPLES)]
    Pause(ChangeUpdate),
    /// Continue with the machines that have no order yet
    #[command(after_help = UPDATE_RESUME_EXAMPLES)]
    Resume(ResumeUpdate),
    /// End an update where it is
    #[command(after_help = UPDATE_ABORT_EXAMPLES)]
    Abort(ChangeUpdate),
}

/// Arguments of verbs that change an update: its id, and the reason.
#[derive(Debug, Args)]
pub struct ChangeUpdate {
    /// Id of the update, as `get updates` lists it
    #[arg(value_name = "UPDATE")]
    pub id: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Arguments of `update resume`: the update, and the reason.
#[derive(Debug, Args)]
pub struct ResumeUpdate {
    /// Id of the update, as `get updates` lists it
    #[arg(value_name = "UPDATE")]
    pub id: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Runs an `update` command and returns its output.
pub async fn run_update_command(context: &CommandContext, args: &UpdateArgs) -> Result<String, CliError> {
    match &args.command {
        None => create_update(context, args).await,
        Some(UpdateCommand::Pause(of)) => {
            let reason = require_audit_reason(&of.reason)?;
            change_update(context, (&of.id, reason), RollOutChange::Pause).await
        }
        Some(UpdateCommand::Resume(of)) => {
            let reason = reason_or_placeholder(of.reason.as_deref());
            change_update(context, (&of.id, reason), RollOutChange::Resume).await
        }
        Some(UpdateCommand::Abort(of)) => {
            let reason = require_audit_reason(&of.reason)?;
            change_update(context, (&of.id, reason), RollOutChange::Abort).await
        }
    }
}

/// All updates or, with an id, that update with its machines.
async fn fetch_updates(
    client: &FleetClient,
    id: Option<&str>,
) -> Result<(v1::ListUpdatesResponse, Timestamp), CliError> {
    let request = v1::ListUpdatesRequest { id: id.unwrap_or_default().to_owned() };
    let result = UpdatesClient::new(client.channel()).list(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    Ok((response, now))
}

fn no_such_update(id: &str) -> String {
    format!("there is no update {id:?}; run: shepherdctl get updates")
}

fn decode_update(update: v1::Update) -> Result<RollOutView, CliError> {
    Ok(RollOutView {
        id: update.id,
        release: update.release,
        sha256: update.sha256,
        selector: update.selector,
        parallelism: update.parallelism,
        deadline_seconds: update.deadline_seconds,
        created_at: require_timestamp(update.created_at, "the time when an update was ordered")?,
        created_by: update.created_by,
        reason: update.reason,
        pause_reason: update.pause_reason,
        ended_at: update.ended_at.and_then(decode_timestamp),
        outcome: update.outcome,
        counts: update.counts,
        machines: update.machines.into_iter().map(decode_machine).collect::<Result<_, _>>()?,
    })
}

fn decode_machine(machine: v1::UpdateMachine) -> Result<RollOutMachineView, CliError> {
    Ok(RollOutMachineView {
        machine: machine.machine,
        name: machine.name,
        state: machine.state,
        message: machine.message,
        state_since: require_timestamp(
            machine.state_since,
            "the time since which a machine is in its state",
        )?,
    })
}

/// Lists updates, those under way first. Named ones are fetched one by one, because only then the API returns their
/// machines.
pub(crate) async fn list_updates(client: &FleetClient, ids: &[String]) -> Result<ObjectList, CliError> {
    if ids.is_empty() {
        let (mut response, now) = fetch_updates(client, None).await?;
        let objects = std::mem::take(&mut response.updates).into_iter();
        let objects = objects.map(|update| update_object(update, now)).collect::<Result<_, _>>()?;
        return Ok(ObjectList::of_response(ObjectKind::Update, &response, &COLUMNS, objects));
    }
    let mut distinct: Vec<&String> = Vec::new();
    for id in ids {
        if !distinct.contains(&id) {
            distinct.push(id);
        }
    }
    let (mut objects, mut unresolved) = (Vec::new(), Vec::new());
    let mut last = v1::ListUpdatesResponse::default();
    for id in distinct {
        let (mut response, now) = fetch_updates(client, Some(id)).await?;
        match std::mem::take(&mut response.updates).into_iter().find(|update| update.id == *id) {
            Some(update) => objects.push(update_object(update, now)?),
            None => unresolved.push(no_such_update(id)),
        }
        last = response;
    }
    let list = ObjectList::of_response(ObjectKind::Update, &last, &COLUMNS, objects);
    Ok(ObjectList { unresolved: Some(unresolved), ..list })
}

fn update_object(message: v1::Update, now: Timestamp) -> Result<ListedObject, CliError> {
    let document = ObjectDocument::of_message(&message);
    let update = decode_update(message)?;
    let row = vec![
        update.id.clone(),
        update.stage().to_owned(),
        update.release.clone(),
        update.format_counts(),
        humanize_duration(between(update.created_at, now)),
        update.created_by.clone(),
    ];
    Ok(ListedObject { names: ObjectNames::of_name(update.id), rows: vec![row], document })
}

/// Runs `describe update`: prints an update and its machines.
pub(crate) async fn describe_update(
    client: &FleetClient,
    id: &str,
    format: Format,
) -> Result<String, CliError> {
    let (response, now) = fetch_updates(client, Some(id)).await?;
    // The API returns all updates for an empty id.
    let found = response.updates.into_iter().find(|update| update.id == id);
    let message =
        found.ok_or_else(|| CliError::Ended { exit: ExitCode::NotFound, message: no_such_update(id) })?;
    if format == Format::Json {
        return format_message(&message);
    }
    let update = decode_update(message)?;
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    line("update", &update.id);
    line("stage", update.stage());
    if let Some(why) = &update.pause_reason {
        line("paused", why);
    }
    line("release", &format!("{} ({})", update.release, update.sha256));
    if !update.selector.is_empty() {
        line("selector", &update.selector);
    }
    line("at a time", &update.parallelism.to_string());
    line("deadline", &format!("{} s", update.deadline_seconds));
    let ordered_at = relative_and_absolute_time(update.created_at, now);
    line("ordered", &format!("{ordered_at} by {}: {}", update.created_by, update.reason));
    line("machines", &update.format_counts());
    let rows: Vec<Vec<String>> = update
        .machines
        .iter()
        .map(|machine| {
            vec![
                machine.name.clone(),
                machine.state.clone(),
                humanize_duration(between(machine.state_since, now)),
                machine.message.clone().unwrap_or_default(),
            ]
        })
        .collect();
    text.push('\n');
    text.push_str(&format_table(&["MACHINE", "STATE", "FOR", "BECAUSE"], &rows, terminal_width()));
    Ok(text)
}

fn format_response(
    context: &CommandContext,
    id: &str,
    response: &v1::OrderResponse,
) -> Result<String, CliError> {
    context.format_outcome(response, &format!("{} {}", order_target(id), response.message))
}

async fn create_update(context: &CommandContext, args: &UpdateArgs) -> Result<String, CliError> {
    let reason = args.reason.as_deref().unwrap_or_default();
    require_audit_reason(reason)?;
    let deadline = std::time::Duration::from(args.machine_deadline).as_secs();
    let new = NewRollOut {
        release: args.release.clone().unwrap_or_default(),
        selector: args.selector.clone().unwrap_or_default(),
        parallelism: args.parallelism,
        deadline_seconds: u32::try_from(deadline).unwrap_or(u32::MAX),
    };
    new.check().map_err(CliError::Invalid)?;
    let give = async |service, order| {
        let request = v1::CreateUpdateRequest {
            release: new.release.clone(),
            order: Some(order),
            selector: new.selector.to_string(),
            parallelism: new.parallelism,
            deadline_seconds: new.deadline_seconds,
        };
        UpdatesClient::new(service).create(request).await
    };
    let done = send_order(context, reason, give).await?;
    format_response(context, &new.release, &done)
}

async fn change_update(
    context: &CommandContext,
    (id, reason): (&str, &str),
    change: RollOutChange,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::ChangeUpdateRequest { id: id.to_owned(), order: Some(order) };
        let mut updates = UpdatesClient::new(service);
        match change {
            RollOutChange::Pause => updates.pause(request).await,
            RollOutChange::Resume => updates.resume(request).await,
            RollOutChange::Abort => updates.abort(request).await,
        }
    };
    let done = send_order(context, reason, give).await?;
    format_response(context, id, &done)
}
