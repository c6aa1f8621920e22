//! A stolen curator that a node follows when it is revoked: the node follows it no more within the time that the
//! documents promise, runs nothing further of what it declares, and finds the others by itself.
//!
//! The stolen curator listens at an address of its own, and has led the node there before: the node's list of curators has
//! that address alone. It answers calls of the node and the request for the statement, and denies that there is a newer
//! one. The true curators have proved themselves to the node before, and nobody names them to it.
//!
//! The certificate of the curator is revoked, and not its node: the membership of a revoked node ends, for which etcd
//! restarts at the others, and a curator answers nobody while it does.

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use shepherd::curator_client::certificate::Serial;
use shepherd::curator_client::leader_channel::REVOCATION_BOUND;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::revoke_credentials_request::Target;

use super::super::node::Node;
use super::super::owner::{Owner, patiently};
use super::super::services::{founded, joined};
use super::listeners::{FalseCurator, Requests};
use super::{
    Loot, OPEN_CALL, curator_certificate, curator_of, newest_statement, open_calls, script,
    until_it_has_a_statement,
};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::port::reserved;

/// A cluster of two consensus members and of a node without roles, to which both curators have proved themselves.
async fn cluster_of_two() -> Result<(Owner, [Node; 2], Node)> {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    let second = joined(&owner, &first).await?;
    owner.roles(&second, &["consensus-member"], &[]).await?;
    second.until_control_plane(true).await?;
    owner.until_well(2, 3).await?;
    until_it_has_a_statement(&node).await?;
    let curators = [&first, &second].map(|member| curator_of(member).to_string());
    until("both curators have proved themselves", async || {
        let proved = node.files().read_proved_curators();
        Ok(curators.iter().all(|address| proved.contains_key(address)))
    })
    .await
    .with_context(|| format!("{:?}\n{}", node.files().read_proved_curators(), node.report()))?;
    Ok((owner, [first, second], node))
}

/// The calls of those who believe that the false curator leads.
fn believing_calls(requests: &Requests) -> u32 {
    requests.calls.iter().filter(|(call, _)| *call != OPEN_CALL).map(|(_, count)| count).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_follows_a_revoked_curator_no_more_within_the_documented_time() -> TestResult {
    let (owner, [first, second], mut node) = cluster_of_two().await?;
    let loot = Loot::copy(&second)?;
    let stolen = curator_certificate(&second)?;
    let serial = Serial::from_der(&stolen).context("no serial number")?;

    node.stop().await?;
    let at = reserved()?;
    node.files().write_curators(&BTreeSet::from([at.to_string()]))?;
    node.files().remove_former_curators()?;
    let place = tempfile::tempdir()?;
    let file = place.path().join("run-by-the-thief");
    let newest = vec![("the newest statement", newest_statement(&open_calls(&loot, &first)?).await?)];
    let answers = script(&owner, &node, loot.id, 0, newest, &file).await?;
    let thief = FalseCurator::start(at, loot.with(&stolen)?, answers).await?;
    node.start()?;
    until("the node runs what the thief declares", async || Ok(file.exists()))
        .await
        .with_context(|| format!("{:?}\n{}", thief.requests(), node.report()))?;
    let connection = node.facts.connection.latest().context("it is no node")?;
    let leader = || connection.curators.leader().map(|leader| leader.address);
    let is_led_by_thief = || leader() == Some(at.to_string());
    assert!(is_led_by_thief(), "{:?} leads", leader());

    let mut credentials = CredentialsClient::new(owner.curators()?.channel());
    let request = wire::RevokeCredentialsRequest { target: Some(Target::Serial(serial.to_string())) };
    patiently(async || credentials.revoke(request.clone()).await).await?;
    let revoked = Instant::now();
    until("the node has the statement and follows the thief no more", async || {
        let stored = node.files().read_statement(&loot.anchor)?.context("it has lost its statement")?;
        let is_listed = stored.statement.revoked.contains_key(&serial);
        ensure!(
            revoked.elapsed() < REVOCATION_BOUND,
            "it follows {:?} {:?} after the revocation, and its statement lists it: {is_listed}\n{}",
            leader(),
            revoked.elapsed(),
            node.report()
        );
        Ok(is_listed && !is_led_by_thief())
    })
    .await?;

    // What the thief declares now is no order any more, however often the node connects to it.
    until("the thief is refused", async || Ok(thief.requests().refused_handshakes > 0)).await?;
    let before = thief.requests();
    until("the thief is refused again", async || {
        Ok(thief.requests().refused_handshakes > before.refused_handshakes + 1)
    })
    .await
    .with_context(|| format!("{:?}\n{}", thief.requests(), node.report()))?;
    let honest = [&first, &second].map(|member| curator_of(member).to_string());
    until("the node follows a true curator", async || {
        Ok(leader().is_some_and(|leader| honest.contains(&leader)))
    })
    .await
    .with_context(|| format!("{:?}\n{}", thief.requests(), node.report()))?;
    until("what the thief declared has ended", async || {
        Ok(!node.children().iter().any(|name| name.starts_with("web_")))
    })
    .await
    .with_context(|| format!("{:?}\n{}", node.children(), node.report()))?;
    let after = thief.requests();
    assert_eq!(believing_calls(&after), believing_calls(&before), "{before:?} {after:?}");
    Ok(())
}
