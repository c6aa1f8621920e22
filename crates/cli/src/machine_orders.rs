//! `hold`, `release`, `retry`, `allow host-key`: orders for one machine.
//!
//! Each order is decided under the machine's lock on the facts read there ([`bmdb::action`]). It writes one
//! line of history and one of the audit, with the operator and the reason. A server identifies the operator by the
//! credential. With `--bmdb_url` it is the user of the environment, because an operator with write access to the
//! database is trusted.

use serde::Serialize;

use crate::api_decode;
use crate::bulk_orders::give_bulk_order;
use crate::command::{AllowHostKey, HoldArgs as HoldArguments, ReleaseArgs, RetryArgs};
use crate::dry_run;
use crate::error::CliError;
use crate::fleet_client::FleetClient;
use crate::get::format_json;
use crate::order_retry;
use crate::output::Format;
use bmdb::action::{Expiry, OrderOutcome, parse_expiry};
use bmdb::audit::{Actor, Order, request_digest};
use bmdb::machine_order::MachineOrder;
use model::facts::HoldScope;
use model::machine_view::MachineName;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

#[derive(Serialize)]
struct OrderOutput {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    outcome: OrderOutcome,
}

pub(crate) fn format_outcome(
    name: MachineName,
    done: OrderOutcome,
    format: Format,
) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = serde_json::to_value(OrderOutput { name, outcome: done })?;
            dry_run::annotate_json(&mut answer);
            format_json(&answer)
        }
        Format::Table => {
            Ok(format!("{}\n", dry_run::annotate_text(&format!("{} {}", name.short_name(), done.message))))
        }
    }
}

/// The operator for the history: `kim@workstation`.
pub(crate) fn current_user() -> String {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let user = variable("USER")
        .or_else(|| variable("LOGNAME"))
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}

/// An order of a command that writes to the BMDB without any API ([`FleetClient::require_bmdb`]).
pub(crate) fn direct_order(rpc: &str, target: String, reason: Option<&str>) -> Order {
    Order {
        actor: Actor { name: current_user(), credential: None },
        rpc: rpc.to_owned(),
        target,
        reason: reason.unwrap_or_default().to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(&[]),
    }
}

/// The reason, or a placeholder for the audit: the API requires a reason.
pub(crate) fn reason_or_placeholder(reason: Option<&str>) -> &str {
    reason.filter(|reason| !reason.trim().is_empty()).unwrap_or("(no reason was given)")
}

/// Formats the response of the API to an order.
pub(crate) fn format_response(response: v1::OrderResponse, format: Format) -> Result<String, CliError> {
    let done = OrderOutcome { changed: response.changed, message: response.message };
    format_outcome(api_decode::decode_machine_name(response.name)?, done, format)
}

/// Parses `--until`: a duration or a time.
pub(crate) fn parse_until(text: &str) -> Result<Expiry, CliError> {
    parse_expiry(text).ok_or_else(|| {
        CliError::Invalid(format!(
            "--until {text:?} is neither a duration (2h, 30m, 1d) nor a moment (2026-11-20T18:00:00Z)"
        ))
    })
}

/// Runs `hold M`: puts a hold on a machine.
pub async fn hold_machine(
    client: &FleetClient,
    arguments: &HoldArguments,
    format: Format,
) -> Result<String, CliError> {
    let until = match arguments.until.as_deref() {
        None => None,
        Some(text) => Some(parse_until(text)?),
    };
    let scope = HoldScope::ALL.into_iter().find(|scope| scope.as_str() == arguments.scope);
    let scope = scope.unwrap_or(HoldScope::Everything);
    if arguments.reason.trim().is_empty() {
        return Err(CliError::Invalid(
            "--reason is empty; give one for operators who run `why` later".into(),
        ));
    }
    let Some(machine) = arguments.machine.as_deref() else {
        let each = MachineOrder::Hold { scope, until };
        return give_bulk_order(client, &arguments.selection, each, Some(&arguments.reason), format).await;
    };
    let until = until.map(|until| match until {
        Expiry::After(span) => v1::hold_request::Expiry::ExpiresAfter(span.to_string()),
        Expiry::At(moment) => v1::hold_request::Expiry::ExpiresAt(prost_types::Timestamp {
            seconds: moment.timestamp(),
            nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
        }),
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
    format_response(order_retry::send_order(&mut client.clone(), &arguments.reason, give).await?, format)
}

/// Runs `release M`: removes a hold from a machine.
pub async fn release_machine(
    client: &FleetClient,
    arguments: &ReleaseArgs,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return give_bulk_order(
            client,
            &arguments.selection,
            MachineOrder::Release { quarantine: arguments.quarantine },
            reason,
            format,
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
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

/// Runs `retry M`: lets everything that failed on a machine be tried again at once.
pub async fn retry_machine(
    client: &FleetClient,
    arguments: &RetryArgs,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return give_bulk_order(client, &arguments.selection, MachineOrder::Retry, reason, format).await;
    };
    let give = async |service, order| {
        let request = v1::RetryRequest { machine: machine.to_owned(), order: Some(order) };
        MachinesClient::new(service).retry(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}

/// Runs `allow host-key M`: accepts another SSH host key.
pub async fn allow_host_key(
    client: &FleetClient,
    arguments: &AllowHostKey,
    format: Format,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::AllowHostKeyRequest {
            machine: arguments.machine.clone(),
            order: Some(order),
            fingerprint: arguments.fingerprint.clone(),
        };
        MachinesClient::new(service).allow_host_key(request).await
    };
    let reason = reason_or_placeholder(arguments.reason.as_deref());
    format_response(order_retry::send_order(&mut client.clone(), reason, give).await?, format)
}
