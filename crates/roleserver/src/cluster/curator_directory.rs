//! Refresh the list of curators, and follow the leader.
//!
//! The list is stored, so that the node finds a curator after its next start. It counts before it is stored: a node with a
//! full disk follows new curators, too. Why no curator is followed although one answers is shared with the report to the
//! shepherd.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use curator_client::leader_channel::LeaderTracker;
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
                if !curators.is_empty() {
                    adopt_curators(&files, &connection.curators, &facts, curators);
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

/// Publishes a list of curators, and then stores it.
fn adopt_curators(
    files: &ClusterFiles,
    tracker: &LeaderTracker,
    facts: &NodeFacts,
    curators: BTreeSet<String>,
) {
    if tracker.directory() != curators {
        tracker.set_directory(curators.clone());
    }
    if files.read_curators() != curators
        && let Err(error) = files.write_curators(&curators)
    {
        tracing::warn!(%error, "the list of curators was not stored, and counts until the next start");
    }
    if facts.curators.latest().as_ref() != Some(&curators) {
        facts.curators.set(curators);
    }
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

#[cfg(test)]
mod tests {
    use curator_client::clock::Clock;
    use curator_client::node_id::PublicKey;
    use curator_client::testing::{authority, serial, validity};

    use super::*;
    use crate::cluster::files::Credentials;
    use crate::cluster::node_facts::CuratorConnection;

    fn files() -> (tempfile::TempDir, ClusterFiles) {
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        (directory, files)
    }

    fn list(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    /// The channel to the leader as a start of the node makes it.
    fn start(files: &ClusterFiles) -> LeaderTracker {
        let (key, cluster) = (files.read_or_create_key().unwrap(), authority(1));
        let issued = cluster.issue_node_certificate(&PublicKey(key.public_key()), serial(3), validity());
        let credentials = Credentials {
            certificate: hex::encode(issued.unwrap().certificate),
            ca_certificate: hex::encode(&cluster.anchor().certificate),
        };
        CuratorConnection::new(&key, &credentials, files, &Clock::system()).unwrap().curators
    }

    #[test]
    fn curators_that_cannot_be_stored_are_followed_all_the_same() {
        let (directory, files) = files();
        let (tracker, facts) = (start(&files), NodeFacts::default());
        // No file can be made where a directory is, as on a full disk.
        std::fs::create_dir_all(directory.path().join("cluster/curators.json/full")).unwrap();
        for curators in [list(&["a:1"]), list(&["a:1", "b:1"])] {
            adopt_curators(&files, &tracker, &facts, curators.clone());
            assert_eq!(tracker.directory(), curators);
            assert_eq!(facts.curators.latest(), Some(curators));
            assert_eq!(files.read_curators(), list(&[]));
        }
        std::fs::remove_dir_all(directory.path().join("cluster/curators.json")).unwrap();
        adopt_curators(&files, &tracker, &facts, list(&["a:1", "b:1"]));
        assert_eq!(files.read_curators(), list(&["a:1", "b:1"]), "stored as soon as that is possible");
        assert_eq!(start(&files).directory(), list(&["a:1", "b:1"]));
    }
}
