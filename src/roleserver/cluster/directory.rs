//! Where curators are, asked anew from time to time and kept for the next start.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::management_client::ManagementClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// Between two questions.
const INTERVAL: Duration = Duration::from_secs(15);

/// The runnable that keeps the directory.
#[must_use]
pub fn directory(files: Files, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut management = ManagementClient::new(connection.curators.channel());
            let mut starting = Some(starting);
            let mut healthy = None;
            let kept = files.curators();
            if facts.curators.latest().is_none() && !kept.is_empty() {
                facts.curators.set(kept);
            }
            loop {
                let answer =
                    scope.until_cancelled(management.get_cluster(wire::GetClusterRequest {})).await?;
                let answer = answer.map_err(|status| {
                    Stop::because(format!("where curators are was not said: {}", status.message()))
                })?;
                let curators = answer.into_inner().directory.unwrap_or_default().curators;
                let curators: BTreeSet<String> = curators.into_iter().collect();
                // A leader to which nobody has said anything yet knows none, and that is no news.
                if !curators.is_empty() && curators != files.curators() {
                    files.write_curators(&curators)?;
                    connection.curators.learn(curators.clone());
                    facts.curators.set(curators);
                }
                if let Some(starting) = starting.take() {
                    healthy = Some(starting.healthy());
                }
                let _ = &healthy;
                scope.until_cancelled(tokio::time::sleep(INTERVAL)).await?;
            }
        }
    })
}

/// The runnable that follows who leads, for everybody on this node.
#[must_use]
pub fn leader(facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let facts = facts.clone();
        async move {
            let healthy = starting.healthy();
            let mut connections = facts.connection.watch();
            let mut connection = healthy.scope().until_cancelled(connections.next()).await?;
            loop {
                tokio::select! {
                    never = connection.curators.follow() => match never {},
                    next = connections.next() => connection = next,
                    cancelled = healthy.scope().cancelled() => return Err(cancelled.into()),
                }
            }
        }
    })
}
