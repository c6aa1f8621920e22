//! Statements and certificates of curators by clocks that differ, and connections that outlast a certificate.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::certificate::{CLOCK_SKEW, Serial, Validity};
use curator_client::clock::Clock;
use curator_client::node_id::NodeId;
use curator_client::statement::{SignedStatement, Statement};
use curator_client::statement_trust::StatementTrust;
use etcd::key_space::CERTIFICATES;
use etcd::namespace::KeySelector;
use model::time::{Timestamp, after, before};
use prost::Message as _;
use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use shepherd_curator::bootstrap::register_peer_certificate;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions};
use testkit::etcd_servers::{in_time, until};

use crate::false_curator::{FalseClaims, FalseCurator};
use crate::leading::three;
use crate::statements::{Follower, trust_of, until_stated, week_long_certificate};

fn replay(node: NodeId, signed: &SignedStatement) -> FalseClaims {
    FalseClaims { node, epoch: 0, statement: Some((signed.to_wire(), signed.statement.number)) }
}

/// The statement after this one, signed at another time.
fn next_statement(
    cluster: &Cluster,
    former: &SignedStatement,
    issued_at: Timestamp,
) -> Result<SignedStatement> {
    let former = &former.statement;
    let next = Statement { number: former.number + 1, issued_at, ..former.clone() };
    Ok(next.sign(&cluster.authority)?)
}

/// Somebody has the key of a removed member, and kept a node from every statement until the certificate of that member
/// ended. No list has it any more, so nothing but its end closes what is open.
#[tokio::test]
async fn connection_ends_with_the_certificate_of_its_curator() -> TestResult {
    let cluster = Cluster::start().await?;
    let first = until_stated(&cluster, 0, 1).await?;
    let (node, start) = (&cluster.nodes[0], cluster.time.now());
    let validity =
        Validity { not_before: before(start, CLOCK_SKEW), not_after: after(start, Duration::from_secs(5)) };
    let serial = Serial::new(rand::random());
    let shown = cluster.authority.issue_curator_certificate(&node.key, serial, validity)?.certificate;
    let curator = FalseCurator::start(node.with(&shown)?, replay(node.id, &first)).await?;
    // Only the test moves the clock of the node: a slow host loses no handshake to it.
    let now = Arc::new(Mutex::new(start));
    let time = now.clone();
    let clock = Clock::new(move || *time.lock().unwrap_or_else(PoisonError::into_inner), || Duration::ZERO);
    let trust = StatementTrust::in_memory(cluster.anchor.clone(), clock);
    let follower = Follower::start(&trust, std::slice::from_ref(&curator.address));
    follower.until_it_follows(&curator.address).await?;
    let mut open =
        LeaderClient::new(follower.tracker.channel()).watch(wire::WatchLeaderRequest {}).await?.into_inner();
    in_time("an answer", open.message()).await??.context("it ended")?;
    let ended = in_time("the end of what was open", open.message()).await?;
    assert!(ended.is_err(), "{ended:?}");

    // By the node's clock the certificate is still valid, so it follows the curator again. Then it ends there, too.
    follower.until_it_follows(&curator.address).await?;
    *now.lock().unwrap_or_else(PoisonError::into_inner) = after(start, Duration::from_mins(1));
    follower.until_refusal("expired at").await?;
    until("nobody is followed", async || Ok(follower.leader().is_none())).await?;
    Ok(())
}

/// The clock of the leader is two hours fast, so each of its statements is of the future. A node follows it by the
/// statement of before, and once that one is stale, it names the clocks.
#[tokio::test]
async fn clocks_are_named_if_the_only_newer_statement_is_of_the_future() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let first = until_stated(&cluster, 0, 1).await?;
    let trust = trust_of(&cluster);
    assert!(trust.offer(&first.to_wire(), 0).await?);
    cluster.stop(0).await?;
    let node = &cluster.nodes[0];
    let lasting = week_long_certificate(&cluster, node)?;
    let two_hours = Duration::from_hours(2);
    let fast = next_statement(&cluster, &first, after(cluster.time.now(), two_hours))?;
    let curator = FalseCurator::start(node.with(&lasting)?, replay(node.id, &fast)).await?;
    let follower = Follower::start(&trust, std::slice::from_ref(&curator.address));
    follower.until_it_follows(&curator.address).await?;
    let current = trust.current().context("no statement")?.statement.order();
    assert_eq!(current, first.statement.order(), "a statement of the future counts");
    drop(follower);

    cluster.time.pass(25 * 3_600);
    let fast = next_statement(&cluster, &first, after(cluster.time.now(), two_hours))?;
    let curator = FalseCurator::start(node.with(&lasting)?, replay(node.id, &fast)).await?;
    let follower = Follower::start(&trust, std::slice::from_ref(&curator.address));
    follower.until_refusal("is one of the two clocks wrong?").await?;
    assert_eq!(follower.leader(), None);
    Ok(())
}

/// A node rejects what a leader with a clock hours fast signs. As two of three members agree on the time, it gives way.
#[tokio::test]
async fn leader_whose_clock_is_wrong_steps_down() -> TestResult {
    let options = ClusterOptions { clock_interval: Duration::from_millis(200), ..three() };
    let mut cluster = Cluster::start_with(options).await?;
    let leader = cluster.until_one_leads(None).await?;
    until_stated(&cluster, leader, 1).await?;
    cluster.set_clock_ahead(leader, 3 * 3_600);
    let next = cluster.until_one_leads(Some(leader)).await?;
    let ended = cluster.stop(leader).await.err().context("it ended without an error")?;
    let text = format!("{ended:#}");
    assert!(text.contains("by those of most consensus members"), "{text}");

    // One of the two others cannot outvote the leader: it signs statements as before.
    cluster.set_clock_ahead(3 - leader - next, 3 * 3_600);
    let mut number = until_stated(&cluster, next, 1).await?.statement.number;
    for _ in 0..3 {
        cluster.time.pass(3_600);
        number = until_stated(&cluster, next, number + 1).await?.statement.number;
    }
    cluster.stop(next).await?;
    Ok(())
}

/// The records of certificates are all that a revocation can name. A clock that is wrong for a moment must not cost them.
#[tokio::test]
async fn leader_that_is_days_fast_forgets_no_valid_certificate() -> TestResult {
    let mut cluster = Cluster::start().await?;
    cluster.stop(0).await?;
    let (client, now, key) = (cluster.client_of(0), cluster.time.now(), cluster.nodes[0].key);
    let day = Duration::from_hours(24);
    let over = Validity { not_before: before(now, day * 60), not_after: before(now, day * 30) };
    let (peer, of_node) = (Serial::new(rand::random()), Serial::new(rand::random()));
    let issued =
        cluster.authority.issue_etcd_peer_certificate(&key, Ipv4Addr::LOCALHOST.into(), peer, over)?;
    register_peer_certificate(&client, key, &issued.certificate, 7).await?;
    let over_key = CERTIFICATES.key(of_node)?;
    let credential = wire::Credential {
        serial: of_node.to_string(),
        public_key: key.0.to_vec(),
        not_before_ms: over.not_before.timestamp_millis(),
        not_after_ms: over.not_after.timestamp_millis(),
        holder: Some(wire::credential::Holder::NodeId(cluster.nodes[0].id.to_string())),
        kind: wire::CertificateKind::Node.into(),
        ..wire::Credential::default()
    };
    let record = wire::CertificateRecord { format: 1, credential: Some(credential) };
    client.put_unguarded(&over_key, &record.encode_to_vec()).await?;
    let all = KeySelector::Prefix(CERTIFICATES.range().start);
    let recorded = async || {
        let records = client.list(&all).await?.records;
        anyhow::Ok(records.into_iter().map(|record| record.key).collect::<BTreeSet<String>>())
    };
    let mut expected = recorded().await?;
    assert!(expected.remove(&over_key) && expected.len() > 1, "{expected:?}");

    cluster.set_clock_ahead(0, 3 * 24 * 3_600);
    let shown = cluster.certificate_of_curator(0).to_vec();
    cluster.run_with(0, shown).await?;
    until("what ended long ago is deleted", async || Ok(!recorded().await?.contains(&over_key))).await?;
    let remaining = recorded().await?;
    assert_eq!(remaining, expected);
    assert!(remaining.contains(&CERTIFICATES.key(peer)?), "nothing confirms the clock of a single member");
    Ok(())
}
