//! Expired certificates.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::peer_identity::Revocations;
use shepherd::curator_client::pki::NODE_LIFETIME;
use shepherd::curator_client::tls::{CuratorCheck, CuratorCheckProvider, curator_client_config};
use shepherd::model::time::{Timestamp, after};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::leader_client::LeaderClient;
use shepherd::roleserver::cluster::control_plane::CURATOR_PORT;

use super::node::{Node, Owner};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// A month after which no certificate is valid: the etcd member issues itself and its curator other certificates, and
/// the other node gets one for its key alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_were_off_for_longer_than_their_certificates_come_back() -> TestResult {
    let days = Arc::new(AtomicU32::new(0));
    let clock = {
        let (days, host) = (days.clone(), Clock::system());
        let now = move || {
            let passed = Duration::from_hours(24) * days.load(Ordering::SeqCst);
            after(Timestamp::from(SystemTime::now()), passed)
        };
        Clock::new(now, move || host.monotonic())
    };
    let mut owner = Owner::new()?;
    let (mut first, mut node) = (Node::new()?, Node::new()?);
    (first.clock, node.clock) = (clock.clone(), clock.clone());
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_it_is_one().await?;
    owner.claim(&first).await?;
    node.ask(owner.join(&first).await?)?;
    node.start()?;
    owner.approve(&node).await?;
    node.until_it_is_one().await?;
    owner.wait_for_node_status(&node).await?;

    node.stop().await?;
    first.stop().await?;
    days.store(u32::try_from(NODE_LIFETIME.as_secs() / 86_400)? + 1, Ordering::SeqCst);
    node.start()?;
    first.start()?;
    for node in [&first, &node] {
        let connection = node.facts.connection.clone();
        let good = until("it has a certificate that is good now", async || {
            let shown = connection.latest().map(|connection| connection.certificate.current());
            let validity = shown.and_then(|shown| Validity::from_der(shown.cert.first()?));
            Ok(validity.is_some_and(|validity| validity.contains(clock.now())))
        });
        good.await.with_context(|| node.report())?;
        let kept = node.files().read_credentials()?.context("no certificate")?.certificate;
        let kept = Validity::from_der(&hex::decode(kept)?).context("no certificate")?;
        assert!(kept.contains(clock.now()), "and keeps it");
    }
    // The curator shows a certificate of its own, which is good now.
    let stored = first.files().read_curator_certificate().context("no certificate of a curator")?;
    let stored = Validity::from_der(&stored).context("no certificate")?;
    assert!(stored.contains(clock.now()), "{stored:?}");
    let anchor = first.facts.connection.latest().context("no connection")?.anchor;
    let demand: CuratorCheckProvider = {
        let (anchors, revocations) = (vec![anchor.clone()], Arc::new(Revocations::default()));
        Arc::new(move || {
            Ok(CuratorCheck::Curator { anchors: anchors.clone(), revocations: revocations.clone() })
        })
    };
    let config = curator_client_config(anchor, demand, Some(first.id()?), None, clock.clone())?;
    let address = SocketAddr::new(first.address, CURATOR_PORT).to_string();
    let mut asking = LeaderClient::new(open_channel(&address, config));
    let answered = until("its curator is one to who demands a curator", async || {
        Ok(asking.get_ca_certificate(wire::GetCaCertificateRequest {}).await.is_ok())
    });
    answered.await.with_context(|| first.report())?;
    // With the new certificate, the control plane accepts it as the same node.
    node.until_control_plane(false).await?;
    Ok(())
}
