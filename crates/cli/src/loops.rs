//! `get loops`, `loops pause|resume`: pause control loops.

use clap::{Args, Subcommand};

use crate::client::decode::{decode_timestamp, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::one_of::one_of;
use crate::order::expiry::{encode_timestamp, parse_until};
use crate::order::reason::{reason_or_placeholder, require_why_reason};
use crate::order::retry::send_order;
use bmdb::orders::order::Expiry;
use model::humanize::{relative_and_absolute_time, relative_time};
use model::pause::{LoopKind, describe_target};
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::loops_client::LoopsClient;

const COLUMNS: [Column; 8] = [
    Column::always("NAME"),
    Column::always("WORKERS"),
    Column::always("STATE"),
    Column::always("PROVIDER"),
    Column::always("BY"),
    Column::always("SINCE"),
    Column::always("UNTIL"),
    Column::always("REASON"),
];

const LOOPS_PAUSE_EXAMPLES: &str = "\
Examples:
  shepherdctl loops pause recoverer --provider rack-a --reason 'its switch is changed' --until 2h
  shepherdctl loops pause provisioner --reason 'no more machines before the audit'

A paused loop claims no machine, and a paused provisioner makes no pass. The pause takes effect in every
shepherd within seconds, and survives a restart. `why` shows the pause for a machine that waits for it.";

const LOOPS_RESUME_EXAMPLES: &str = "\
Example:
  shepherdctl loops resume recoverer --provider rack-a --reason 'the switch is in'";

/// Subcommands of `loops`, which pause and resume loops.
#[derive(Debug, Subcommand)]
pub enum LoopsCommand {
    /// Pause a loop in every shepherd until it is resumed; work in progress continues
    #[command(after_help = LOOPS_PAUSE_EXAMPLES)]
    Pause(PauseLoop),
    /// Resume a paused loop
    #[command(after_help = LOOPS_RESUME_EXAMPLES)]
    Resume(ResumeLoop),
}

/// Arguments of `loops pause`: the loop, the provider, and the end of the pause.
#[derive(Debug, Args)]
pub struct PauseLoop {
    /// Loop to pause, for example recoverer
    #[arg(value_name = "LOOP", value_parser = one_of(LoopKind::ALL.map(LoopKind::as_str)))]
    pub name: String,
    /// Only for the machines of this provider
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Why, for operators who run `why`
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Automatic end: a duration (2h) or a time (2026-11-20T18:00:00Z)
    #[arg(long, value_name = "WHEN")]
    pub until: Option<String>,
}

/// Arguments of `loops resume`: the loop and the provider.
#[derive(Debug, Args)]
pub struct ResumeLoop {
    /// Paused loop to resume, for example recoverer
    #[arg(value_name = "LOOP", value_parser = one_of(LoopKind::ALL.map(LoopKind::as_str)))]
    pub name: String,
    /// Provider that was given when the loop was paused
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// A control loop, over all shepherds.
#[derive(Clone, Debug, PartialEq)]
pub struct LoopSummary {
    /// Name of the loop.
    pub name: String,
    /// Open sessions of its workers.
    pub workers: i64,
    /// Pauses that are in force.
    pub pauses: Vec<PauseSummary>,
}

/// A pause of a control loop.
#[derive(Clone, Debug, PartialEq)]
pub struct PauseSummary {
    /// The provider whose machines are paused; `None` pauses all.
    pub provider: Option<String>,
    /// Reason that the operator gave.
    pub reason: String,
    /// Operator who paused the loop.
    pub paused_by: String,
    /// When the pause started.
    pub since: Timestamp,
    /// When the pause ends by itself; `None` if never.
    pub until: Option<Timestamp>,
}

/// Lists the loops and their pauses.
pub(crate) async fn list_loops(client: &FleetClient) -> Result<ObjectList, CliError> {
    let result = LoopsClient::new(client.channel()).list(v1::ListLoopsRequest {}).await;
    let mut response = result.map_err(status_to_error)?.into_inner();
    let now = require_timestamp(response.read_at, "its read time")?;
    let mut objects = Vec::new();
    for one in std::mem::take(&mut response.loops) {
        let document = ObjectDocument::of_message(&one);
        let line = decode_loop(one)?;
        let rows = loop_rows(&line, now);
        objects.push(ListedObject { names: ObjectNames::of_name(line.name), rows, document });
    }
    Ok(ObjectList::of_response(ObjectKind::Loop, &response, &COLUMNS, objects))
}

fn loop_rows(line: &LoopSummary, now: Timestamp) -> Vec<Vec<String>> {
    let row =
        |rest: [String; 6]| [line.name.clone(), line.workers.to_string()].into_iter().chain(rest).collect();
    if line.pauses.is_empty() {
        let dash = || "-".to_owned();
        return vec![row(["not paused".to_owned(), dash(), dash(), dash(), dash(), dash()])];
    }
    let paused = |pause: &PauseSummary| {
        row([
            "paused".to_owned(),
            pause.provider.clone().unwrap_or_else(|| "all".to_owned()),
            pause.paused_by.clone(),
            relative_time(pause.since, now),
            pause.until.map_or_else(|| "resumed".to_owned(), |until| relative_and_absolute_time(until, now)),
            pause.reason.clone(),
        ])
    };
    line.pauses.iter().map(paused).collect()
}

/// Decodes a control loop.
pub fn decode_loop(reported: v1::Loop) -> Result<LoopSummary, CliError> {
    let pauses = reported.pauses.into_iter().map(|pause| {
        Ok(PauseSummary {
            since: require_timestamp(pause.since, "the start time of a pause")?,
            provider: pause.provider,
            reason: pause.reason,
            paused_by: pause.paused_by,
            until: pause.until.and_then(decode_timestamp),
        })
    });
    Ok(LoopSummary {
        pauses: pauses.collect::<Result<_, CliError>>()?,
        name: reported.name,
        workers: reported.workers,
    })
}

/// Checks the name of the provider, if one is given. In a request, an empty name means all providers.
fn parse_provider(named: Option<&str>) -> Result<Option<String>, CliError> {
    match named.map(str::trim) {
        Some("" | "*") => Err(CliError::Invalid(
            "--provider must name one provider; omit it for the machines of all".into(),
        )),
        named => Ok(named.map(str::to_owned)),
    }
}

/// Runs `loops pause`: pauses a loop, for all machines or those of one provider.
pub async fn pause_loop(context: &CommandContext, args: &PauseLoop) -> Result<String, CliError> {
    let of: LoopKind = parse_loop(&args.name)?;
    require_why_reason(&args.reason)?;
    let until = args.until.as_deref().map(parse_until).transpose()?;
    let provider = parse_provider(args.provider.as_deref())?;
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::pause_loop_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::pause_loop_request::Expiry::ExpiresAt(encode_timestamp(moment)),
    });
    let give = async |service, order| {
        let request = v1::PauseLoopRequest {
            name: of.as_str().to_owned(),
            order: Some(order),
            provider: provider.clone().unwrap_or_default(),
            expiry: until.clone(),
        };
        LoopsClient::new(service).pause(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, of, provider.as_deref(), &response)
}

/// Runs `loops resume`: ends a pause of a loop.
pub async fn resume_loop(context: &CommandContext, args: &ResumeLoop) -> Result<String, CliError> {
    let of: LoopKind = parse_loop(&args.name)?;
    let reason = reason_or_placeholder(args.reason.as_deref());
    let provider = parse_provider(args.provider.as_deref())?;
    let give = async |service, order| {
        let request = v1::ResumeLoopRequest {
            name: of.as_str().to_owned(),
            order: Some(order),
            provider: provider.clone().unwrap_or_default(),
        };
        LoopsClient::new(service).resume(request).await
    };
    let response = send_order(context, reason, give).await?;
    format_response(context, of, provider.as_deref(), &response)
}

fn parse_loop(name: &str) -> Result<LoopKind, CliError> {
    name.parse().map_err(|error: model::process::UnknownName| CliError::Invalid(error.to_string()))
}

fn format_response(
    context: &CommandContext,
    of: LoopKind,
    provider: Option<&str>,
    response: &v1::OrderResponse,
) -> Result<String, CliError> {
    let text = format!("{} {}", describe_target(of, provider), response.message);
    context.format_outcome(response, &text)
}
