//! Send node heartbeats to the curator.

use std::time::Duration;

use curator::node_health::HEARTBEAT_INTERVAL;
use curator_client::status_text::describe_status;
use proto::curator::v1 as wire;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::cluster::node_facts::NodeFacts;

/// Makes the runnable. It is healthy once a heartbeat was answered, so that a change of leader does not increase its
/// backoff.
#[must_use]
pub fn send_heartbeats(facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let facts = facts.clone();
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut nodes = NodesClient::new(connection.curators.channel());
            let (beat, beats) = mpsc::channel(1);
            let failed = |status: tonic::Status| {
                RunnableError::msg(format!("a heartbeat was not answered: {}", describe_status(&status)))
            };
            let ended = || RunnableError::msg("the curator ended the heartbeats of this node");
            beat.send(wire::HeartbeatRequest {}).await.map_err(|_| ended())?;
            let opening = nodes.heartbeat(ReceiverStream::new(beats));
            let mut answers = scope.until_cancelled(opening).await?.map_err(failed)?.into_inner();
            let mut starting = Some(starting);
            let mut healthy = None;
            loop {
                // A stopped leader keeps the connection open and sends nothing.
                let answer = tokio::time::timeout(HEARTBEAT_INTERVAL * 2, answers.message());
                let answer = scope.until_cancelled(answer).await?;
                let answer =
                    answer.map_err(|_| RunnableError::msg("a heartbeat was not answered in time"))?;
                let answer = answer.map_err(failed)?.ok_or_else(ended)?;
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
                }
                let _ = &healthy;
                let pause = Duration::from_millis(answer.interval_ms)
                    .clamp(Duration::from_millis(100), HEARTBEAT_INTERVAL);
                scope.until_cancelled(tokio::time::sleep(pause)).await?;
                beat.send(wire::HeartbeatRequest {}).await.map_err(|_| ended())?;
            }
        }
    })
}
