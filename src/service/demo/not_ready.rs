//! Explains the machines of a demo that are not Ready at the deadline, in the words of `shepherdctl why`.

use crate::bmdb::connection::Bmdb;
use crate::model::ids::MachineId;
use crate::model::time::Span;
use crate::model::why::explain_machine;
use crate::model::why::render::{ExplanationDetail, render_explanation};
use crate::service::failure::ExitFailure;

/// Number of machines that are explained one by one; the others are counted.
const MAX_EXPLAINED: i64 = 20;

/// The failure of a fleet of which `ready_before` machines were Ready at the last check.
pub(super) async fn not_ready_failure(
    bmdb: &Bmdb,
    deadline: Span,
    fleet: i64,
    ready_before: i64,
) -> ExitFailure {
    let found = match bmdb.list_not_ready_machines(MAX_EXPLAINED).await {
        Ok(found) => found,
        Err(error) => {
            return ExitFailure::failed(format!(
                "only {ready_before} of {fleet} machines were Ready after {deadline}; cannot say why: {error}"
            ));
        }
    };
    // If no machine waits, the query did not count the others either, so the last count is used.
    let ready = if found.not_ready == 0 { ready_before } else { found.ready };
    let mut parts = vec![format!("only {ready} of {fleet} machines were Ready after {deadline}")];
    let listed = i64::try_from(found.machines.len()).unwrap_or(i64::MAX);
    for machine in found.machines {
        parts.push(explain_text(bmdb, machine).await);
    }
    if found.not_ready > listed {
        parts.push(format!("{} more: not Ready either", found.not_ready - listed));
    }
    let unseen = fleet - ready - found.not_ready;
    if unseen > 0 {
        parts.push(format!("{unseen} more: not in the database yet; the provisioner has not come to them"));
    }
    ExitFailure::failed(parts.join("\n\n"))
}

async fn explain_text(bmdb: &Bmdb, machine: MachineId) -> String {
    match bmdb.machine_view(machine).await {
        Ok(view) => {
            let mut why = explain_machine(&view);
            // The commands are useless, because the database ends with the demo.
            why.advice.clear();
            render_explanation(&why, None, ExplanationDetail::Full).trim_end().to_owned()
        }
        Err(error) => format!("{machine}: cannot say why: {error}"),
    }
}
