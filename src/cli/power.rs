//! `reboot`, `power`, `power cancel`: power by hand.

use crate::bmdb::action::by;
use crate::bmdb::each::Each;
use crate::bmdb::power_order;
use crate::cli::again;
use crate::cli::command::{CancelPower, Power, PowerChange, Reboot};
use crate::cli::error::CliError;
use crate::cli::machine::find;
use crate::cli::many::{Selection, many};
use crate::cli::operate::{carried, reason_or_none, who};
use crate::cli::output::Format;
use crate::cli::retire::{order, said};
use crate::cli::source::Source;
use crate::model::power_order::Switch;
use crate::model::process::UnknownName;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;

/// `reboot M`.
pub async fn reboot(source: &Source, arguments: &Reboot, format: Format) -> Result<String, CliError> {
    let about = (arguments.machine.as_deref(), &arguments.selection);
    switched(source, about, Switch::Reboot, said(&arguments.reason)?, format).await
}

/// `power …`.
pub async fn power(source: &Source, arguments: &Power, format: Format) -> Result<String, CliError> {
    if let Some(PowerChange::Cancel(cancel)) = &arguments.change {
        return cancelled(source, cancel, format).await;
    }
    let action = arguments.action.as_deref().unwrap_or_default();
    let switch = action.parse().map_err(|error: UnknownName| CliError::Wrong(error.to_string()))?;
    let about = (arguments.machine.as_deref(), &arguments.selection);
    switched(source, about, switch, said(arguments.reason.as_deref().unwrap_or_default())?, format).await
}

async fn switched(
    source: &Source,
    (machine, selection): (Option<&str>, &Selection),
    switch: Switch,
    reason: &str,
    format: Format,
) -> Result<String, CliError> {
    let Some(machine) = machine else {
        return many(source, selection, Each::Power(switch), Some(reason), format).await;
    };
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let (mut client, machine, order) =
                    (MachinesClient::new(service), machine.to_owned(), Some(order));
                if switch == Switch::Reboot {
                    return client.reboot(v1::RebootRequest { machine, order }).await;
                }
                client.power(v1::PowerRequest { machine, order, action: switch.as_str().to_owned() }).await
            };
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, machine).await?;
    let (why, who) = (reason.to_owned(), who());
    let rpc = if switch == Switch::Reboot { "Reboot" } else { "Power" };
    order(bmdb, name, rpc, reason, format, move |snapshot| power_order::switch(snapshot, switch, &why, &who))
        .await
}

/// `power cancel M`.
async fn cancelled(source: &Source, arguments: &CancelPower, format: Format) -> Result<String, CliError> {
    let reason = reason_or_none(arguments.reason.as_deref());
    let bmdb = match source {
        Source::Direct(bmdb) => bmdb,
        Source::Api(remote) => {
            let give = async |service, order| {
                let request =
                    v1::CancelPowerRequest { machine: arguments.machine.clone(), order: Some(order) };
                MachinesClient::new(service).cancel_power(request).await
            };
            return carried(again::order(&mut remote.clone(), reason, give).await?, format);
        }
    };
    let name = find(bmdb, &arguments.machine).await?;
    let by = by(&who(), arguments.reason.as_deref());
    order(bmdb, name, "CancelPower", reason, format, move |snapshot| {
        power_order::cancel(&snapshot.facts, &by)
    })
    .await
}
