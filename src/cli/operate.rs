//! `hold`, `release`, `retry`, `allow`: what an operator may order, through the API or straight in the BMDB.
//!
//! Each is decided under the machine's lock on what is known there ([`crate::bmdb::action`]), and leaves a
//! line of history and one of the audit that name who asked and why. The API knows who that is by the
//! credential; in the BMDB it is what the environment says, because whoever may write there is believed.

use serde::Serialize;

use crate::bmdb::action::{self, Done, Until, by, read_until};
use crate::bmdb::audit::{Actor, Order, request_digest};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::each::Each;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::find::id_of;
use crate::bmdb::work::Decision;
use crate::cli::again;
use crate::cli::command::{AllowHostKey, Hold as HoldArguments, Release, Retry};
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::get::json;
use crate::cli::machine::find;
use crate::cli::many::many;
use crate::cli::order_key;
use crate::cli::output::Format;
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::facts::HoldScope;
use crate::model::machine_view::MachineName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

#[derive(Serialize)]
struct DoneAnswer {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    done: Done,
}

pub(crate) fn told(name: MachineName, done: Done, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = serde_json::to_value(DoneAnswer { name, done })?;
            dry_run::mark(&mut answer);
            json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{} {}", name.short(), done.said)))),
    }
}

/// Who asks, for the history: `kim@workstation`.
pub(crate) fn who() -> String {
    let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
    let user = variable("USER")
        .or_else(|| variable("LOGNAME"))
        .unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
}

/// Gives an order about a machine, as the API does, and tells what became of it.
async fn order(
    bmdb: &Bmdb,
    name: MachineName,
    rpc: &str,
    reason: Option<&str>,
    format: Format,
    decide: impl Fn(&Snapshot) -> Decision<Done> + Send + Sync + 'static,
) -> Result<String, CliError> {
    let order = direct(&format!("shepherd.fleet.v1.Machines/{rpc}"), name.short(), reason);
    let carried = bmdb.order_machine(order, id_of(&name), decide).await?;
    told(name, carried.done, format)
}

/// An order of whoever writes to the BMDB directly.
pub(crate) fn direct(rpc: &str, target: String, reason: Option<&str>) -> Order {
    order_key::named(Order {
        actor: Actor { name: who(), credential: None },
        rpc: rpc.to_owned(),
        target,
        reason: reason.unwrap_or_default().to_owned(),
        idempotency_key: None,
        dry_run: dry_run::asked(),
        expected_version: None,
        request: request_digest(&[]),
    })
}

/// The API wants a reason; where none was typed, the audit says so.
pub(crate) fn reason_or_none(reason: Option<&str>) -> &str {
    reason.filter(|reason| !reason.trim().is_empty()).unwrap_or("(no reason was given)")
}

/// Tells what became of an order through the API.
pub(crate) fn carried(said: v1::OrderResponse, format: Format) -> Result<String, CliError> {
    let done = Done { changed: said.changed, said: said.said };
    told(remote_read::name(said.name)?, done, format)
}

/// What `--until` says.
pub(crate) fn until_of(text: &str) -> Result<Until, CliError> {
    read_until(text).ok_or_else(|| {
        CliError::Wrong(format!(
            "--until {text:?} is neither a duration (2h, 30m, 1d) nor a moment (2026-11-20T18:00:00Z)"
        ))
    })
}

/// `hold M`.
pub async fn hold(source: &Source, arguments: &HoldArguments, format: Format) -> Result<String, CliError> {
    let until = match arguments.until.as_deref() {
        None => None,
        Some(text) => Some(until_of(text)?),
    };
    let scope = HoldScope::ALL.into_iter().find(|scope| scope.as_str() == arguments.scope);
    let scope = scope.unwrap_or(HoldScope::Everything);
    if arguments.reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    let Some(machine) = arguments.machine.as_deref() else {
        let each = Each::Hold { scope, until };
        return many(source, &arguments.selection, each, Some(&arguments.reason), format).await;
    };
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let until = until.map(|until| match until {
                Until::After(span) => v1::hold_request::Until::After(span.to_string()),
                Until::At(moment) => v1::hold_request::Until::At(prost_types::Timestamp {
                    seconds: moment.timestamp(),
                    nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
                }),
            });
            let give = async |service, order| {
                let request = v1::HoldRequest {
                    machine: machine.to_owned(),
                    order: Some(order),
                    scope: scope.as_str().to_owned(),
                    until: until.clone(),
                };
                MachinesClient::new(service).hold(request).await
            };
            return carried(again::order(&mut remote.clone(), &arguments.reason, give).await?, format);
        }
    };
    let (reason, who) = (arguments.reason.clone(), who());
    let name = find(bmdb, machine).await?;
    order(bmdb, name, "Hold", Some(&arguments.reason), format, move |snapshot| {
        action::hold(snapshot, scope, &reason, &who, until)
    })
    .await
}

/// `release M`.
pub async fn release(source: &Source, arguments: &Release, format: Format) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return many(
            source,
            &arguments.selection,
            Each::Release { quarantine: arguments.quarantine },
            reason,
            format,
        )
        .await;
    };
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ReleaseRequest {
                    machine: machine.to_owned(),
                    order: Some(order),
                    quarantine: arguments.quarantine,
                };
                MachinesClient::new(service).release(request).await
            };
            let reason = reason_or_none(arguments.reason.as_deref());
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let (quarantine, by) = (arguments.quarantine, by(&who(), arguments.reason.as_deref()));
    let name = find(bmdb, machine).await?;
    order(bmdb, name, "Release", arguments.reason.as_deref(), format, move |snapshot| {
        action::release(&snapshot.facts, quarantine, &by)
    })
    .await
}

/// `retry M`.
pub async fn retry(source: &Source, arguments: &Retry, format: Format) -> Result<String, CliError> {
    let Some(machine) = arguments.machine.as_deref() else {
        let reason = arguments.reason.as_deref();
        return many(source, &arguments.selection, Each::Retry, reason, format).await;
    };
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RetryRequest { machine: machine.to_owned(), order: Some(order) };
                MachinesClient::new(service).retry(request).await
            };
            let reason = reason_or_none(arguments.reason.as_deref());
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let by = by(&who(), arguments.reason.as_deref());
    let name = find(bmdb, machine).await?;
    order(bmdb, name, "Retry", arguments.reason.as_deref(), format, move |snapshot| {
        action::retry(&snapshot.facts, &by)
    })
    .await
}

/// `allow host-key M`.
pub async fn allow_host_key(
    source: &Source,
    arguments: &AllowHostKey,
    format: Format,
) -> Result<String, CliError> {
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::AllowHostKeyRequest {
                    machine: arguments.machine.clone(),
                    order: Some(order),
                    fingerprint: arguments.fingerprint.clone(),
                };
                MachinesClient::new(service).allow_host_key(request).await
            };
            let reason = reason_or_none(arguments.reason.as_deref());
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, &arguments.machine).await?;
    let reason = arguments.reason.as_deref();
    let order = direct("shepherd.fleet.v1.Machines/AllowHostKey", name.short(), reason);
    let fingerprint = action::fingerprint(&arguments.fingerprint).to_owned();
    let meant = (name.short(), fingerprint, by(&who(), reason));
    let carried = bmdb.order_host_key(order, id_of(&name), meant).await?;
    told(name, carried.done, format)
}
