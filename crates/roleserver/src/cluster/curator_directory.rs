//! Refresh the list of curators, and follow the leader.
//!
//! The list is stored, so that the node finds a curator after its next start. It counts before it is stored: a node with a
//! full disk follows new curators, too.
//!
//! A revoked curator that the node still follows could report a list without any honest one. The tracker remembers those
//! that a list leaves out, and they are stored, so that this is also true after a restart. They are forgotten when a
//! curator of the new list is verified: it leads, and the open connections were checked by a statement that was signed
//! after the list changed. A curator that was revoked before the change does not pass that.
//!
//! A curator that is revoked later passes it. So the addresses at which curators have proved themselves are stored apart,
//! as soon as they change, and are not forgotten then. That needs no answer of a leader, which may be a stolen curator.
//!
//! Why no curator is followed although one answers is shared with the report to the
//! shepherd.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use curator_client::clock::{Clock, MAX_CLOCK_DIFFERENCE};
use curator_client::leader_channel::{LeaderEndpoint, LeaderTracker};
use curator_client::proved_curators::ProvedCurators;
use curator_client::status_text::describe_status;
use model::time::{Timestamp, after};
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use tokio::sync::watch;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;

/// Interval between two requests for the list of curators.
const REFRESH_INTERVAL: Duration = Duration::from_secs(15);
/// Time until addresses that could not be stored are stored again.
const STORE_RETRY_INTERVAL: Duration = Duration::from_mins(1);

/// Makes the runnable that requests the list of curators and stores it.
#[must_use]
pub fn refresh_curator_directory(files: ClusterFiles, facts: NodeFacts, clock: Clock) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, clock) = (files.clone(), facts.clone(), clock.clone());
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
            // When the list last changed, or before that, when it was first looked at.
            let (mut changed_at, mut was_verified) = (clock.now(), false);
            loop {
                let answer =
                    scope.until_cancelled(management.get_cluster(wire::GetClusterRequest {})).await?;
                let answer = answer.map_err(|status| {
                    let why = describe_status(&status);
                    RunnableError::msg(format!("the curators could not be listed: {why}"))
                })?;
                let curators = answer.into_inner().directory.unwrap_or_default().curators;
                let curators: BTreeSet<String> = curators.into_iter().collect();
                // A leader to which no node has reported yet knows no curators; an empty list is ignored.
                if !curators.is_empty() {
                    let tracker = &connection.curators;
                    let (leader, statement) = (tracker.leader(), tracker.statement_time());
                    if adopt_curators(&files, tracker, &facts, &curators) {
                        (changed_at, was_verified) = (clock.now(), false);
                    }
                    let verified = is_verified(leader.as_ref(), &curators, statement, changed_at);
                    // Twice, because a new statement may be about to cut off the leader that answered.
                    if verified && was_verified {
                        forget_former_curators(&files);
                    }
                    was_verified = verified;
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

/// Publishes a list of curators, and then stores it with those that it leaves out. Returns whether it is another list.
fn adopt_curators(
    files: &ClusterFiles,
    tracker: &LeaderTracker,
    facts: &NodeFacts,
    curators: &BTreeSet<String>,
) -> bool {
    if tracker.directory() != *curators {
        tracker.set_directory(curators.iter().cloned());
    }
    if facts.curators.latest().as_ref() != Some(curators) {
        facts.curators.set(curators.clone());
    }
    if files.read_curators() == *curators {
        return false;
    }
    // First the former ones. If that fails, they stay in the other file.
    let stored = files.write_former_curators(&tracker.former_directory());
    if let Err(error) = stored.and_then(|()| files.write_curators(curators)) {
        tracing::warn!(%error, "the list of curators was not stored, and counts until the next start");
    }
    true
}

/// Whether a curator of the list leads that the authority trusted after the list changed. `statement` is when the statement
/// was signed by which the open connections were checked.
fn is_verified(
    leader: Option<&LeaderEndpoint>,
    curators: &BTreeSet<String>,
    statement: Option<Timestamp>,
    changed_at: Timestamp,
) -> bool {
    // A statement that was known before may be from a clock that is this much ahead.
    let is_newer = statement.is_some_and(|signed_at| signed_at > after(changed_at, MAX_CLOCK_DIFFERENCE));
    is_newer && leader.is_some_and(|leader| curators.contains(&leader.address))
}

/// Removes the former curators from the disk. The tracker remembers them until the next start.
fn forget_former_curators(files: &ClusterFiles) {
    if files.read_former_curators().is_empty() {
        return;
    }
    match files.remove_former_curators() {
        Ok(()) => {
            tracing::info!("a curator of the present list is verified, so the former ones are forgotten");
        }
        Err(error) => tracing::warn!(%error, "the list of former curators was not removed"),
    }
}

/// Makes the runnable that keeps the node's connection pointed at the current leader, and stores where curators have
/// proved themselves.
#[must_use]
pub fn follow_leader(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let healthy = starting.mark_healthy();
            let mut connections = facts.connection.watch();
            let mut connection = healthy.scope().until_cancelled(connections.next()).await?;
            loop {
                tokio::select! {
                    never = connection.curators.track_leader() => match never {},
                    never = report_refusals(connection.curators.refusal(), &facts) => match never {},
                    never = store_proved_curators(&files, connection.curators.proved_curators()) => match never {},
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

/// Stores the addresses at which curators have proved themselves whenever they change.
async fn store_proved_curators(files: &ClusterFiles, proved: Option<ProvedCurators>) -> Infallible {
    let Some(proved) = proved else { return std::future::pending().await };
    let mut stored = files.read_proved_curators();
    loop {
        let changed = proved.wait_for_change(&stored).await;
        match files.write_proved_curators(&changed) {
            Ok(()) => stored = changed,
            Err(error) => {
                tracing::warn!(%error, "the addresses of proved curators were not stored, and count until the next start");
                tokio::time::sleep(STORE_RETRY_INTERVAL).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use curator_client::node_id::PublicKey;
    use curator_client::proved_curators::ProvedAddresses;
    use curator_client::testing::{at, authority, node_id, serial, validity};

    use super::*;
    use crate::cluster::files::Credentials;
    use crate::cluster::files::tests::files;
    use crate::cluster::node_facts::CuratorConnection;

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
        // No file can be made where a directory is that cannot be moved away, as on a full disk.
        std::fs::create_dir_all(directory.path().join("cluster/curators.json/full")).unwrap();
        std::fs::create_dir_all(directory.path().join("cluster/curators.json.damaged/full")).unwrap();
        for curators in [list(&["a:1"]), list(&["a:1", "b:1"])] {
            assert!(adopt_curators(&files, &tracker, &facts, &curators));
            assert_eq!(tracker.directory(), curators);
            assert_eq!(facts.curators.latest(), Some(curators));
            assert_eq!(files.read_curators(), list(&[]));
        }
        std::fs::remove_dir_all(directory.path().join("cluster/curators.json")).unwrap();
        let curators = list(&["a:1", "b:1"]);
        assert!(adopt_curators(&files, &tracker, &facts, &curators));
        assert_eq!(files.read_curators(), curators, "stored as soon as that is possible");
        assert_eq!(start(&files).directory(), curators);
        assert!(!adopt_curators(&files, &tracker, &facts, &curators), "it is the same list");
    }

    #[test]
    fn curators_that_a_false_leader_leaves_out_are_known_after_a_restart() {
        let (_directory, files) = files();
        let (honest, reported) = (list(&["a:1", "b:1"]), list(&["b:1", "false:1"]));
        files.write_curators(&honest).unwrap();
        let facts = NodeFacts::default();
        assert!(adopt_curators(&files, &start(&files), &facts, &reported));
        for _ in 0..2 {
            let tracker = start(&files);
            assert_eq!(tracker.directory(), reported);
            assert_eq!(tracker.former_directory(), list(&["a:1"]));
            assert!(!adopt_curators(&files, &tracker, &facts, &reported));
        }
        // A second list does not displace them either.
        assert!(adopt_curators(&files, &start(&files), &facts, &list(&["false:2"])));
        assert_eq!(start(&files).former_directory(), list(&["a:1", "b:1", "false:1"]));
        forget_former_curators(&files);
        assert_eq!(start(&files).former_directory(), list(&[]));
        assert_eq!(start(&files).directory(), list(&["false:2"]));
    }

    /// The list of the thief counts as verified before the thief is revoked.
    #[tokio::test]
    async fn proved_curators_are_known_after_a_verified_list_and_a_restart() {
        let (_directory, files) = files();
        let (honest, facts) = (list(&["a:1", "b:1"]), NodeFacts::default());
        let proved: ProvedAddresses = honest.iter().cloned().zip([node_id(1), node_id(2)]).collect();
        let tracker = start(&files);
        adopt_curators(&files, &tracker, &facts, &honest);
        tracker.proved_curators().unwrap().restore(proved.clone());
        let storing = store_proved_curators(&files, tracker.proved_curators());
        let stored = async {
            while files.read_proved_curators() != proved {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            never = storing => match never {},
            () = stored => {}
        }
        adopt_curators(&files, &tracker, &facts, &list(&["false:1"]));
        forget_former_curators(&files);
        let restarted = start(&files);
        assert_eq!(restarted.directory(), list(&["false:1"]));
        let known = restarted.proved_curators().unwrap().addresses();
        assert_eq!(known, proved, "the honest curators are forgotten");
    }

    #[test]
    fn former_curators_are_forgotten_once_a_new_one_is_verified() {
        let leader = |address: &str| LeaderEndpoint { node: node_id(1), address: address.to_owned() };
        let (listed, another) = (leader("a:1"), leader("x:1"));
        let skew = i64::try_from(MAX_CLOCK_DIFFERENCE.as_secs()).unwrap();
        for (leader, signed_at, verified, why) in [
            (Some(&listed), Some(at(skew + 1)), true, "signed after the change"),
            (Some(&listed), Some(at(skew)), false, "it may have been known before"),
            (Some(&listed), None, false, "any node could lead"),
            (Some(&another), Some(at(skew + 1)), false, "the list has another address"),
            (None, Some(at(skew + 1)), false, "nobody leads"),
        ] {
            assert_eq!(is_verified(leader, &list(&["a:1"]), signed_at, at(0)), verified, "{why}");
        }
    }
}
