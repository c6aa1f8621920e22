//! What is said of the machines that are not Ready when the deadline has passed: the same as
//! `shepherdctl why` says of each.

use crate::bmdb::connection::Bmdb;
use crate::model::ids::MachineId;
use crate::model::time::Span;
use crate::model::why::explain;
use crate::model::why::render::render;
use crate::service::failure::Failure;

/// Machines that are explained one by one; the others are counted.
const EXPLAINED: i64 = 20;

/// The failure of a fleet of which `ready_before` were Ready when it was last looked at.
pub(super) async fn why(bmdb: &Bmdb, deadline: Span, fleet: i64, ready_before: i64) -> Failure {
    let found = match bmdb.not_ready(EXPLAINED).await {
        Ok(found) => found,
        Err(error) => {
            return Failure::failed(format!(
                "only {ready_before} of {fleet} machines were Ready after {deadline}; cannot say why: {error}"
            ));
        }
    };
    // Where nobody waits nobody counted the others either; what was seen last must do.
    let ready = if found.waiting == 0 { ready_before } else { found.ready };
    let mut parts = vec![format!("only {ready} of {fleet} machines were Ready after {deadline}")];
    let listed = i64::try_from(found.machines.len()).unwrap_or(i64::MAX);
    for machine in found.machines {
        parts.push(explained(bmdb, machine).await);
    }
    if found.waiting > listed {
        parts.push(format!("{} more: not Ready either", found.waiting - listed));
    }
    let unseen = fleet - ready - found.waiting;
    if unseen > 0 {
        parts.push(format!("{unseen} more: not in the database yet; the provisioner has not come to them"));
    }
    Failure::failed(parts.join("\n\n"))
}

async fn explained(bmdb: &Bmdb, machine: MachineId) -> String {
    match bmdb.machine_view(machine).await {
        Ok(view) => {
            let mut why = explain(&view);
            // Commands help nobody when the database ends with us.
            why.advice.clear();
            render(&why, None).trim_end().to_owned()
        }
        Err(error) => format!("{machine}: cannot say why: {error}"),
    }
}
