//! Refresh the list of curators, and follow the leader.
//!
//! The list is stored, so that the node finds a curator after its next start. Why no curator is followed although one
//! answers is shared with the report to the shepherd.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::sync::watch;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;

/// Interval between two requests for the list of curators.
const REFRESH_INTERVAL: Duration = Duration::from_secs(15);

/// Makes the runnable that requests the list of curators and stores it.
#[must_use]
pub fn refresh_curator_directory(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut management = ManagementClient::new(connection.curators.channel());
            let mut starting = Some(starting);
            let mut healthy = None;
            let kept = files.read_curators();
            if facts.curators.latest().is_none() && !kept.is_empty() {
                facts.curators.set(kept);
            }
            loop {
                let answer =
                    scope.until_cancelled(management.get_cluster(wire::GetClusterRequest {})).await?;
                let answer = answer.map_err(|status| {
                    RunnableError::msg(format!("the curators could not be listed: {}", status.message()))
                })?;
                let curators = answer.into_inner().directory.unwrap_or_default().curators;
                let curators: BTreeSet<String> = curators.into_iter().collect();
                // A leader to which no node has reported yet knows no curators; an empty list is ignored.
                if !curators.is_empty() && curators != files.read_curators() {
                    files.write_curators(&curators)?;
                    connection.curators.set_directory(curators.clone());
                    facts.curators.set(curators);
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.mark_healthy());
                }
                let _ = &healthy;
                scope.until_cancelled(tokio::time::sleep(REFRESH_INTERVAL)).await?;
            }
        }
    })
}

/// Makes the runnable that keeps the node's connection pointed at the current leader.
#[must_use]
pub fn follow_leader(facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let facts = facts.clone();
        async move {
            let healthy = starting.mark_healthy();
            let mut connections = facts.connection.watch();
            let mut connection = healthy.scope().until_cancelled(connections.next()).await?;
            loop {
                tokio::select! {
                    never = connection.curators.track_leader() => match never {},
                    never = report_refusals(connection.curators.refusal(), &facts) => match never {},
                    next = connections.next() => connection = next,
                    cancelled = healthy.scope().cancelled() => return Err(cancelled.into()),
                }
            }
        }
    })
}

/// Shares why no curator is followed with the parts that report it.
async fn report_refusals(mut refusal: watch::Receiver<Option<String>>, facts: &NodeFacts) -> Infallible {
    loop {
        let current = refusal.borrow_and_update().clone();
        facts.refusal.set(current);
        if refusal.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}
