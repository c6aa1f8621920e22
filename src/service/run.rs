//! Runs the service from its start to a signal, and then through its graceful shutdown.

use tokio_util::sync::CancellationToken;

use crate::service::database::open_database;
use crate::service::failure::ExitFailure;
use crate::service::os_process::StopSignals;
use crate::service::preflight::{OnUnreachableProvider, inspect_plan};
use crate::service::service_plan::ServicePlan;
use crate::service::start::start_service;
use crate::service::stop_deadline::{StopDeadline, StopStep};
use crate::service::traces::Traces;

/// Runs the service until a signal: the first one stops it in order, the second one at once.
pub async fn serve_until_signal(plan: ServicePlan, traces: Traces) -> Result<(), ExitFailure> {
    let mut signals = StopSignals::listen()?;
    // Checked before the database is changed: another mistake must not leave an upgraded schema behind.
    inspect_plan(&plan, OnUnreachableProvider::Warn).await?;
    let database = open_database(&plan).await?;
    let stop_traces = CancellationToken::new();
    let trace_task = traces.sender.map(|sender| tokio::spawn(sender.run(stop_traces.clone())));
    let started = start_service(&plan, &database, &traces.counts).await;
    let running = match started {
        Ok(running) => running,
        Err(failure) => {
            if let Err(error) = database.close(StopDeadline::from_now()).await {
                tracing::warn!(%error, "cannot close the database");
            }
            return Err(failure);
        }
    };
    tracing::info!(database = %database.bmdb.settings().address(), "running");
    signals.recv().await;
    tracing::info!(grace = ?plan.flags.shutdown_grace.0, "stopping; a second signal stops at once");
    let abort = running.abort_token();
    let second_signal = tokio::spawn(async move {
        signals.recv().await;
        abort.cancel();
    });
    let deadline = running.stop().await;
    second_signal.abort();
    // Stopped once no work is left, so that the last trace is complete.
    stop_traces.cancel();
    if let Some(trace_task) = trace_task
        && !matches!(deadline.limit(StopStep::Traces, trace_task).await, Some(Ok(())))
    {
        tracing::warn!("the last traces were not sent");
    }
    database.close(deadline).await
}
