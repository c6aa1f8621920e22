//! `declare restored`: accept a BMDB that was restored from a backup.

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::order::confirmation::{ConfirmFlag, RequiredConfirmation, require_confirmation};
use crate::order::operator::{current_user, direct_order};
use crate::output::{Format, format_json};
use bmdb::orders::declare_restored::LiveSession;
use bmdb::orders::order::format_attribution;
use model::order_rules::{ConfirmationKind, irreversible_reason};
use model::rpc_name::DECLARE_RESTORED_RPC;
use model::unknown_fence::FENCE_LIFT;

/// Subcommands of `declare`, which need a connection to the database.
#[derive(Debug, Subcommand)]
pub enum DeclareCommand {
    /// Declare that the BMDB was restored from a backup; stop every shepherd first
    #[command(long_about = "\
Declare that the BMDB was restored from a backup, and that this copy is the one that counts from now on.

Machines remember the orders that were given after the backup was taken, and reject a database that does
not contain them. This raises every fence above those that machines remember, ends the sessions, work and steps in the
backup, and writes a line into every machine's history. Nothing undoes that: type the name of the database, or
give --yes. Stop every shepherd first. The whole procedure: shepherdctl explain backup#restoring")]
    Restored(DeclareRestoredArgs),
}

/// Arguments of `declare restored`: the backup that the BMDB was restored from, and the reason.
#[derive(Debug, Args)]
pub struct DeclareRestoredArgs {
    /// Which backup, and why: kept in every machine's history
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm: ConfirmFlag,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeclareRestoredOutput {
    machines: usize,
    fences_lifted_by: i64,
    sessions_ended: usize,
    work_freed: usize,
    steps_of_unknown_outcome: usize,
}

/// Runs `declare restored`: accepts the restored BMDB.
pub async fn declare_restored(
    context: &CommandContext,
    arguments: &DeclareRestoredArgs,
) -> Result<String, CliError> {
    let bmdb = context.client.require_bmdb("`declare restored`", "no shepherd may run while it works")?;
    if arguments.reason.trim().is_empty() {
        return Err(CliError::Invalid("--reason is empty; say which backup was restored, and why".into()));
    }
    let live = bmdb.list_live_sessions().await?;
    if !live.is_empty() {
        return Err(CliError::Ended { exit: ExitCode::Refused, message: active_sessions_message(&live) });
    }
    if !arguments.confirm.yes {
        let required = RequiredConfirmation {
            kind: ConfirmationKind::Name,
            text: bmdb.settings().database_name().to_owned(),
            reason: irreversible_reason(DECLARE_RESTORED_RPC).unwrap_or_default().to_owned(),
        };
        require_confirmation(context, "this copy of the database counts from now on", &required)?;
    }
    let reason = Some(arguments.reason.as_str());
    let order = direct_order(DECLARE_RESTORED_RPC, "the BMDB".to_owned(), reason);
    let restored = bmdb.declare_restored(order, &format_attribution(&current_user(), reason)).await?;
    let answer = DeclareRestoredOutput {
        machines: restored.machines,
        fences_lifted_by: FENCE_LIFT,
        sessions_ended: restored.sessions,
        work_freed: restored.work,
        steps_of_unknown_outcome: restored.steps,
    };
    match context.format {
        Format::Json => format_json(&answer),
        Format::Table => Ok(format!(
            "The fences of {} machines are lifted by {FENCE_LIFT}; ended {} sessions of the backup, freed {} work items, \
             and {} steps that were under way have an unknown outcome.\nStart the shepherds now.\n",
            answer.machines, answer.sessions_ended, answer.work_freed, answer.steps_of_unknown_outcome
        )),
    }
}

fn active_sessions_message(live: &[LiveSession]) -> String {
    let mut who: Vec<String> = live
        .iter()
        .map(|session| {
            let unknown = || "?".to_owned();
            format!(
                "process {} on {}",
                session.pid.clone().unwrap_or_else(unknown),
                session.host.clone().unwrap_or_else(unknown)
            )
        })
        .collect();
    who.sort();
    who.dedup();
    format!(
        "shepherds are working on this BMDB ({}): stop all of them, then repeat the command; nothing was changed",
        who.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_process_is_listed_once() {
        let session = |component: &str, pid: &str| LiveSession {
            component: component.to_owned(),
            host: Some("rack1".to_owned()),
            pid: Some(pid.to_owned()),
        };
        let text = active_sessions_message(&[
            session("initializer", "7"),
            session("recoverer", "7"),
            session("updater", "8"),
        ]);
        assert!(
            text.starts_with("shepherds are working on this BMDB (process 7 on rack1, process 8 on rack1):"),
            "{text}"
        );
    }
}
