//! The replacement of the cluster's authority, as a node and an owner see it.

use std::slice;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::authority_ring::{AuthorityRing, ReplacementStep};
use curator_client::certificate::Serial;
use curator_client::cluster::authority_record_key;
use curator_client::peer_authorities::identify_peer_by_any;
use curator_client::peer_identity::{Peer, Revocations};
use curator_client::pki::TrustAnchor;
use curator_client::statement::SignedStatement;
use proto::curator::v1 as wire;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use shepherd_curator::bootstrap::create_authority;
use tonic::Code;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate, refusal, status};
use testkit::etcd_servers::until;

use crate::statements::{Follower, trust_of};

/// What the first node reports: the authorities that it trusts, the one that signed all that it shows, and those that its
/// etcd was started with.
pub(crate) fn report(
    cluster: &Cluster,
    trusted: &[&TrustAnchor],
    issuer: &TrustAnchor,
    etcd: &[&TrustAnchor],
) -> Result<wire::UpdateStatusRequest> {
    let prints = |anchors: &[&TrustAnchor]| anchors.iter().map(|anchor| anchor.fingerprint()).collect();
    let authority = wire::AuthorityStatus {
        trusted: prints(trusted),
        node_issuer: issuer.fingerprint(),
        curator_issuer: issuer.fingerprint(),
        peer_issuer: issuer.fingerprint(),
        etcd_trusted: prints(etcd),
    };
    let status = wire::NodeStatus { authority: Some(authority), ..status(cluster.address(0)?.parse()?) };
    Ok(wire::UpdateStatusRequest { node_id: cluster.nodes[0].id.to_string(), status: Some(status) })
}

async fn served_statement(cluster: &Cluster) -> Result<wire::SignedStatement> {
    let mut leader = LeaderClient::new(cluster.channel(0, None)?);
    let response = leader.get_statement(wire::GetStatementRequest {}).await?.into_inner();
    response.statement.context("no statement")
}

/// Waits until the statement lists these authorities, as a node verifies it that trusts the first one.
pub(crate) async fn until_listed(
    cluster: &Cluster,
    is_listed: impl Fn(&[TrustAnchor]) -> bool,
) -> Result<Vec<TrustAnchor>> {
    let mut listed = Vec::new();
    until("the statement lists the authorities", async || {
        let served = served_statement(cluster).await?;
        let verified = SignedStatement::verify(&served, slice::from_ref(&cluster.anchor))?;
        listed = verified.statement.authorities;
        Ok(is_listed(&listed))
    })
    .await?;
    Ok(listed)
}

/// The replacement as an owner sees it.
async fn rotation(management: &mut ManagementClient<Channel>) -> Result<Option<wire::AuthorityRotation>> {
    Ok(management.get_cluster(wire::GetClusterRequest {}).await?.into_inner().authority_rotation)
}

/// Without a quorum of etcd an order is refused in one sentence, and begins nothing. Another one begins it afterwards.
#[tokio::test]
async fn order_without_a_quorum_begins_nothing() -> TestResult {
    let options = ClusterOptions { deadline: Duration::from_secs(3), ..ClusterOptions::default() };
    let cluster = Cluster::start_with(options).await?;
    cluster.until_one_leads(None).await?;
    let mut management = ManagementClient::new(cluster.as_owner().await?);
    let request =
        || wire::RotateAuthorityRequest { cluster_id: cluster.id.to_string(), ..Default::default() };
    let key = authority_record_key()?;
    let etcd = cluster.etcd.client();
    let record = async || Ok::<_, anyhow::Error>(etcd.get(&key).await?.context("no record")?.value);
    let before = record().await?;
    cluster.etcd.silence(0)?;
    let refused = management.rotate_authority(request()).await;
    cluster.etcd.let_speak(0)?;
    let (code, text) = refusal(refused)?;
    assert_eq!(code, Code::Unavailable, "{text}");
    assert!(
        text.starts_with("the authority of the cluster is not replaced") && !text.contains(". "),
        "{text}"
    );
    assert_eq!(record().await?, before, "a part of the order is carried out");
    assert_eq!(rotation(&mut management).await?, None);
    let begun = management.rotate_authority(request()).await?.into_inner().rotation.context("nothing")?;
    assert_eq!(begun.stage(), wire::AuthorityStage::Trusted);
    assert_ne!(record().await?, before);
    Ok(())
}

#[tokio::test]
async fn authority_is_replaced_once_every_node_has_followed() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let (founder, old) = (&cluster.nodes[0], cluster.anchor.clone());
    let by_old = certificate(&cluster.authority, founder, cluster.time.now())?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(founder.with(&by_old)?))?);
    let mut management = ManagementClient::new(cluster.as_owner().await?);
    assert_eq!(rotation(&mut management).await?, None);

    let (code, text) = refusal(management.rotate_authority(wire::RotateAuthorityRequest::default()).await)?;
    assert_eq!(code, Code::InvalidArgument, "{text}");
    let request =
        || wire::RotateAuthorityRequest { cluster_id: cluster.id.to_string(), ..Default::default() };
    let begun = management.rotate_authority(request()).await?.into_inner().rotation.context("nothing")?;
    assert_eq!(begun.stage(), wire::AuthorityStage::Trusted);
    let wait = begun.waits_for.first().context("it waits for nobody")?;
    assert_eq!(wait.node_id, founder.id.to_string());
    assert!(wait.reason.contains("update its role server"), "{}", wait.reason);
    let (code, text) = refusal(management.rotate_authority(request()).await)?;
    assert_eq!(code, Code::AlreadyExists, "{text}");
    assert!(text.contains("wait until that has ended"), "{text}");

    let mut of_node = ManagementClient::new(cluster.channel(0, Some(founder.with(&by_old)?))?);
    assert_eq!(rotation(&mut of_node).await?, None, "every node calls this each few seconds");

    let both = until_listed(&cluster, |listed| listed.len() == 2).await?;
    assert_eq!(both[0], old, "it still signs");
    let new = both[1].clone();
    nodes.update_status(report(&cluster, &[&old, &new], &old, &[&old])?).await?;
    let waiting = rotation(&mut management).await?.context("it ended")?;
    let reason = waiting.waits_for.first().map(|wait| wait.reason.as_str()).unwrap_or_default();
    assert!(
        reason.contains("its etcd has not restarted with"),
        "the new authority signs, although etcd does not trust it: {waiting:?}"
    );
    assert_eq!(until_listed(&cluster, |_| true).await?, [old.clone(), new.clone()]);

    nodes.update_status(report(&cluster, &[&old, &new], &old, &[&old, &new])?).await?;
    until_listed(&cluster, |listed| *listed == [new.clone(), old.clone()]).await?;
    // Both authorities count: the old one for the node, and the new one for what is issued now.
    let by_new = nodes.renew_certificate(wire::RenewCertificateRequest {}).await?.into_inner().certificate;
    let none = Revocations::default();
    let peer = identify_peer_by_any(&[&by_new], slice::from_ref(&new), &none, cluster.time.now())?;
    assert!(matches!(peer, Peer::Node { id, .. } if id == founder.id), "{peer}");
    assert_ne!(Serial::from_der(&by_new), Serial::from_der(&by_old), "no serial number is used twice");
    let mut renewed = NodesClient::new(cluster.channel(0, Some(founder.with(&by_new)?))?);
    let mut management = ManagementClient::new(cluster.as_owner().await?);
    renewed.update_status(report(&cluster, &[&new, &old], &new, &[&old, &new])?).await?;

    until_listed(&cluster, |listed| *listed == [new.clone()]).await?;
    let late = report(&cluster, &[&new, &old], &new, &[&old, &new])?;
    let (code, text) = refusal(nodes.update_status(late).await)?;
    assert_eq!(code, Code::Unauthenticated, "a certificate of the old authority: {text}");
    let dropping = rotation(&mut management).await?.context("it ended")?;
    assert_eq!(dropping.stage(), wire::AuthorityStage::Dropping);

    renewed.update_status(report(&cluster, &[&new], &new, &[&new])?).await?;
    until("the replacement has ended", async || Ok(rotation(&mut management).await?.is_none())).await?;
    // A request that was delayed until now does not replace the successor.
    let late = wire::RotateAuthorityRequest { replaces: old.fingerprint(), ..request() };
    let (code, text) = refusal(management.rotate_authority(late).await)?;
    assert_eq!(code, Code::FailedPrecondition, "{text}");
    assert_eq!(rotation(&mut management).await?, None);
    // A node that was off meanwhile follows the succession.
    let trust = trust_of(&cluster);
    assert!(trust.offer(&served_statement(&cluster).await?, 0).await?);
    assert_eq!(trust.authorities(), slice::from_ref(&new));

    // So it does when the curator shows a certificate of the new authority, which it does not trust.
    cluster.stop(0).await?;
    cluster.run(0).await?;
    let (trust, address) = (trust_of(&cluster), cluster.address(0)?);
    let follower = Follower::start(&trust, slice::from_ref(&address));
    follower.until_it_follows(&address).await?;
    assert_eq!(trust.authorities(), [new]);
    Ok(())
}

/// A leader that is lost right after it has written a step leaves the statement of that step to the next one.
#[tokio::test]
async fn statement_of_a_step_is_signed_by_the_next_leader() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let (client, key) = (cluster.client_of(0), authority_record_key()?);
    let record = client.get(&key).await?.context("no record")?;
    let next = create_authority(cluster.id, cluster.time.now())?;
    let (old, new) = (cluster.anchor.clone(), next.anchor().clone());
    let ring = AuthorityRing::decode(&key, &record.value)?;
    let mut ring = ring.begin(next, cluster.time.now())?.context("one is under way")?;
    let trust = trust_of(&cluster);
    for (step, trusted) in [
        (Some(ReplacementStep::Sign), vec![old.clone(), new.clone()]),
        (Some(ReplacementStep::Drop), vec![new.clone(), old]),
        (Some(ReplacementStep::End), vec![new.clone()]),
        (None, vec![new]),
    ] {
        cluster.stop(0).await?;
        client.put_unguarded(&key, &ring.encode()).await?;
        cluster.run(0).await?;
        let address = cluster.address(0)?;
        let follower = Follower::start(&trust, slice::from_ref(&address));
        follower.until_it_follows(&address).await?;
        until("the node trusts the authorities of the stage", async || Ok(trust.authorities() == trusted))
            .await?;
        if let Some(step) = step {
            ring = ring.apply_step(step, cluster.time.now()).context("it ends another stage")?;
        }
    }
    Ok(())
}
