//! `retire`, `retire cancel`, `retire waive`: giving machines back.

use crate::bmdb::action::{Done, by};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::each::Each;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::find::id_of;
use crate::bmdb::retirement::{self, Refused};
use crate::bmdb::work::Decision;
use crate::cli::again;
use crate::cli::command::{CancelRetire, Retire, RetireChange, Waive};
use crate::cli::error::CliError;
use crate::cli::machine::find;
use crate::cli::many::many;
use crate::cli::operate::{carried, direct, reason_or_none, told, who};
use crate::cli::output::Format;
use crate::cli::source::Source;
use crate::model::access::Role;
use crate::model::machine_view::MachineName;
use crate::model::process::UnknownName;
use crate::model::retirement::{Stage, confirmed};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// `retire …`.
pub async fn retire(source: &Source, arguments: &Retire, format: Format) -> Result<String, CliError> {
    match &arguments.change {
        Some(RetireChange::Cancel(cancel)) => cancelled(source, cancel, format).await,
        Some(RetireChange::Waive(waive)) => waived(source, waive, format).await,
        None => begun(source, arguments, format).await,
    }
}

/// `retire M`.
async fn begun(source: &Source, arguments: &Retire, format: Format) -> Result<String, CliError> {
    let reason = said(arguments.reason.as_deref().unwrap_or_default())?;
    let wipe = arguments.wipe;
    let Some(machine) = arguments.machine.as_deref() else {
        return many(source, &arguments.selection, Each::Retire { wipe }, Some(reason), format).await;
    };
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::RetireRequest { machine: machine.to_owned(), order: Some(order), wipe };
                MachinesClient::new(service).retire(request).await
            };
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, machine).await?;
    let (why, who) = (reason.to_owned(), who());
    order(bmdb, name, "Retire", reason, format, move |snapshot| {
        retirement::retire(snapshot, wipe, &why, &who)
    })
    .await
}

/// `retire cancel M`.
async fn cancelled(source: &Source, arguments: &CancelRetire, format: Format) -> Result<String, CliError> {
    let reason = reason_or_none(arguments.reason.as_deref());
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request =
                    v1::CancelRetireRequest { machine: arguments.machine.clone(), order: Some(order) };
                MachinesClient::new(service).cancel_retire(request).await
            };
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, &arguments.machine).await?;
    let by = by(&who(), arguments.reason.as_deref());
    // Whoever may write to the BMDB directly is believed to be an admin.
    order(bmdb, name, "CancelRetire", reason, format, move |snapshot| {
        retirement::cancel(snapshot, &by, Role::Admin)
    })
    .await
}

/// `retire waive M STAGE`.
async fn waived(source: &Source, arguments: &Waive, format: Format) -> Result<String, CliError> {
    let reason = said(&arguments.reason)?;
    let stage: Stage =
        arguments.stage.parse().map_err(|error: UnknownName| CliError::Wrong(error.to_string()))?;
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::WaiveRequest {
                    machine: arguments.machine.clone(),
                    order: Some(order),
                    stage: stage.as_str().to_owned(),
                    i_know: arguments.i_know.clone(),
                };
                MachinesClient::new(service).waive(request).await
            };
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, &arguments.machine).await?;
    confirmed(stage, &name.short(), &arguments.i_know).map_err(CliError::Wrong)?;
    bmdb.read_policy().await?;
    let (_, policy) = bmdb.policy();
    let (why, who) = (reason.to_owned(), who());
    order(bmdb, name, "Waive", reason, format, move |snapshot| {
        retirement::waive(snapshot, &policy, stage, &why, &who)
    })
    .await
}

pub(crate) fn said(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever asks `why` later will want to know".into()));
    }
    Ok(reason)
}

/// Gives an order that may be refused for what it finds, as the API does.
pub(crate) async fn order(
    bmdb: &Bmdb,
    name: MachineName,
    rpc: &str,
    reason: &str,
    format: Format,
    decide: impl Fn(&Snapshot) -> Result<Decision<Done>, Refused> + Send + Sync + 'static,
) -> Result<String, CliError> {
    let short = name.short();
    let order = direct(&format!("shepherd.fleet.v1.Machines/{rpc}"), short.clone(), Some(reason));
    let decide = move |snapshot: &Snapshot| {
        decide(snapshot).map_err(|(reason, said)| (reason, format!("{short} {said}")))
    };
    let carried = bmdb.order_machine_or_refuse(order, id_of(&name), decide).await?;
    told(name, carried.done, format)
}
