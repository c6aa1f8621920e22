//! Three members that were off until every certificate of theirs had ended: those of nodes, of curators and of etcd.
//!
//! etcd compares certificates with the clock of the host, which no test moves: libfaketime does not reach a program in Go,
//! which reads the clock without the C library, and a time namespace has no clock of its own for the date. So the nodes begin four weeks before it,
//! when a certificate by their clock is still valid by that of the host, and come back two days after it. The peer
//! certificates are replaced by ones that have ended by both clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::cluster_snapshot::ClusterSnapshot;
use shepherd::model::time::{Timestamp, after, before};

use super::node::Node;
use super::owner::Owner;
use super::peer_renewal::{
    authority_of, certificate, ended, order_certificate, replace_certificate, until_certificate_ended,
};
use super::restoring::snapshot;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

const DAY: Duration = Duration::from_hours(24);
/// Days from the clock of the host to that of the nodes, before and after they were off. In between are more than the thirty
/// days for which a node's certificate is valid.
const BEFORE: i32 = -29;
const AFTER: i32 = 2;

/// A clock that is this many days ahead of the host's, or behind it.
fn clock_moved_by(days: &Arc<AtomicI32>) -> Clock {
    let (days, host) = (days.clone(), Clock::system());
    let now = move || {
        let (days, now) = (days.load(Ordering::SeqCst), Timestamp::from(SystemTime::now()));
        let moved = DAY * days.unsigned_abs();
        if days < 0 { before(now, moved) } else { after(now, moved) }
    };
    Clock::new(now, move || host.monotonic())
}

/// Whether each certificate on the disk of a node is valid now, or each has ended.
fn validity_of_all(node: &Node, clock: &Clock) -> Result<(bool, bool)> {
    let files = node.files();
    let own = files.read_credentials()?.context("no certificate of a node")?.certificate;
    let curator = files.read_curator_certificate().context("no certificate of a curator")?;
    let validities = [
        Validity::from_der(&hex::decode(own)?).context("a damaged certificate of a node")?,
        Validity::from_der(&curator).context("a damaged certificate of a curator")?,
        certificate(node)?.1,
    ];
    let now = clock.now();
    let are = |is: &dyn Fn(&Validity) -> bool| validities.iter().all(is);
    Ok((are(&|one| one.contains(now)), are(&|one| one.has_ended(now))))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_whose_certificates_have_all_ended_come_back_by_one_order() -> TestResult {
    let days = Arc::new(AtomicI32::new(BEFORE));
    let clock = clock_moved_by(&days);
    let mut owner = Owner::new()?;
    let mut nodes = [Node::new()?, Node::new()?, Node::new()?];
    for node in &mut nodes {
        node.clock = clock.clone();
    }
    let [first, second, third] = &mut nodes;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_it_is_one().await?;
    owner.claim(first).await?;
    for (node, voters) in [(second, 2), (third, 3)] {
        node.ask(owner.join(first).await?)?;
        node.start()?;
        owner.approve(node).await?;
        node.until_it_is_one().await?;
        owner.wait_for_node_status(node).await?;
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, voters).await?;
    }
    owner.learn(&nodes.each_ref())?;
    let authority = authority_of(&nodes[0]).await?;
    let taken = ClusterSnapshot::decode(&snapshot(&owner).await?)?;
    for node in &nodes {
        until("all its certificates are stored", async || {
            Ok(node.files().read_curator_certificate().is_some() && validity_of_all(node, &clock)?.0)
        })
        .await
        .with_context(|| node.report())?;
    }

    for node in &mut nodes {
        node.cut_power().await?;
    }
    days.store(AFTER, Ordering::SeqCst);
    for node in &mut nodes {
        replace_certificate(node, &authority, ended())?;
        assert!(validity_of_all(node, &clock)?.1, "a certificate is still valid");
        node.start()?;
    }
    for node in &nodes {
        until_certificate_ended(node).await?;
    }
    for node in &nodes {
        order_certificate(node, &taken, &authority)?;
    }
    for node in &nodes {
        node.until_control_plane(true).await?;
        until("all its certificates are valid", async || Ok(validity_of_all(node, &clock)?.0))
            .await
            .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))?;
    }
    // The certificate of the owner has ended, too.
    owner.claim_by(nodes.each_ref(), authority.anchor().clone()).await?;
    owner.until_well(3, 3).await?;
    Ok(())
}
