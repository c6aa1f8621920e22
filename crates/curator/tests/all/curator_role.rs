//! Who gets a curator's certificate, and that nobody without one is a curator to a client that demands it.

use anyhow::{Context as _, Result};
use curator_client::cluster::cluster_record_key;
use curator_client::curator_channel::open_channel;
use curator_client::curator_role::identify_curator;
use curator_client::node_id::NodeId;
use curator_client::peer_identity::Revocations;
use curator_client::tls::curator_client_config;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::registration_client::RegistrationClient;
use shepherd_curator::bootstrap::issue_curator_from_local_etcd;
use shepherd_curator::service::gate_monitor::GateMonitor;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::Code;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate, refusal, status};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

use crate::leading::{call_leader, revoke_node, way, way_of};

const REQUEST: wire::IssueCuratorCertificateRequest = wire::IssueCuratorCertificateRequest {};

/// The node of the curator that shows this certificate, to a client of the cluster.
fn curator_of(cluster: &Cluster, certificate: &[u8]) -> Result<NodeId> {
    let anchors = [cluster.anchor.clone()];
    Ok(identify_curator(&[certificate], &anchors, &Revocations::default(), cluster.time.now())?)
}

/// A client of the leader for the node's own calls.
fn nodes_of(
    cluster: &Cluster,
    node: &Holder,
    leader: usize,
) -> Result<NodesClient<tonic::transport::Channel>> {
    let own = node.with(&certificate(&cluster.authority, node, cluster.time.now())?)?;
    Ok(NodesClient::new(cluster.channel(leader, Some(own))?))
}

/// A consensus member gets a certificate from the leader and from its own etcd. Both are recorded, and nobody else gets
/// one.
#[tokio::test]
async fn node_without_the_role_is_given_no_curators_certificate() -> TestResult {
    let cluster = Cluster::start().await?;
    let (member, worker) = (&cluster.nodes[0], Holder::new()?);
    cluster.take_in(&worker).await?;
    let (code, text) = refusal(nodes_of(&cluster, &worker, 0)?.issue_curator_certificate(REQUEST).await)?;
    assert_eq!((code, text.contains("no consensus member")), (Code::FailedPrecondition, true), "{text}");
    let (client, now) = (cluster.client_of(0), cluster.time.now());
    let refused = issue_curator_from_local_etcd(&client, worker.key, now).await;
    let text = refused.err().context("it was issued")?.to_string();
    assert!(text.contains("no consensus member"), "{text}");
    for (own, code) in [
        (Some(worker.itself()?), Code::PermissionDenied),
        (Some(cluster.owner.itself()?), Code::PermissionDenied),
        (None, Code::Unauthenticated),
    ] {
        let mut nodes = NodesClient::new(cluster.channel(0, own)?);
        assert_eq!(refusal(nodes.issue_curator_certificate(REQUEST).await)?.0, code);
    }
    let owner = cluster.as_owner().await?;
    let mut nodes = NodesClient::new(owner.clone());
    assert_eq!(refusal(nodes.issue_curator_certificate(REQUEST).await)?.0, Code::PermissionDenied);

    let issued = nodes_of(&cluster, member, 0)?.issue_curator_certificate(REQUEST).await?.into_inner();
    assert_eq!(curator_of(&cluster, &issued.certificate)?, member.id);
    let alone = issue_curator_from_local_etcd(&client, member.key, now).await?;
    assert_eq!(curator_of(&cluster, &alone)?, member.id);
    assert_eq!(curator_of(&cluster, cluster.certificate_of_curator(0))?, member.id);
    // The third one is what the curator shows.
    let mut credentials = CredentialsClient::new(owner);
    let listed = credentials.list(wire::ListCredentialsRequest {}).await?.into_inner().credentials;
    let of = |node: &Holder, kind: wire::CertificateKind| {
        let id = wire::credential::Holder::NodeId(node.id.to_string());
        let its = |listed: &&wire::Credential| listed.holder.as_ref() == Some(&id) && listed.kind() == kind;
        listed.iter().filter(its).count()
    };
    assert_eq!((of(member, wire::CertificateKind::Curator), of(member, wire::CertificateKind::Node)), (3, 1));
    assert_eq!(
        (of(&worker, wire::CertificateKind::Curator), of(&worker, wire::CertificateKind::Node)),
        (0, 1)
    );
    Ok(())
}

/// A node without the role runs a curator at the address that the cluster has for its leader, and even wins the
/// election. A client that knows nothing of roles follows it, as every client of the release before does. One that
/// demands a curator does not: not if it meets that node first, and not if a true curator names it.
#[tokio::test]
async fn any_node_at_the_leaders_address_is_neither_followed_nor_dialled() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let impostor = Holder::new()?;
    let shown = cluster.take_in(&impostor).await?;
    let false_one = cluster.bind_curator(&impostor, 0, &shown, GateMonitor::default()).await?;
    let address = false_one.address;
    let report =
        wire::UpdateStatusRequest { node_id: impostor.id.to_string(), status: Some(status(address)) };
    nodes_of(&cluster, &impostor, 0)?.update_status(report).await?;
    cluster.stop(0).await?;
    let (stop, mut running) = (CancellationToken::new(), JoinSet::new());
    let stopped = stop.clone();
    running.spawn(async move { false_one.run(&stopped).await });

    // The attack, as it works without the demand.
    let own = cluster.owner.itself()?;
    let (trusting, _following) = way_of(&cluster, own.clone());
    trusting.set_directory([address.to_string()]);
    until("the false curator is followed", async || {
        Ok(trusting.leader().is_some_and(|leader| leader.node == impostor.id))
    })
    .await?;

    let demand = |expected| {
        let (anchor, clock) = (cluster.anchor.clone(), cluster.time.clock());
        curator_client_config(anchor, cluster.curators_only(), expected, Some(own.clone()), clock)
    };
    for expected in [None, Some(impostor.id)] {
        let mut client = LeaderClient::new(open_channel(&address.to_string(), demand(expected)?));
        let refused = client.get_ca_certificate(wire::GetCaCertificateRequest {}).await;
        let text = format!("{:?}", refused.err().context("it was believed")?);
        assert!(text.contains("has no curator's certificate: only a consensus member leads"), "{text}");
    }

    // A true curator names the false one as the leader: the call does not reach it.
    cluster.run(0).await?;
    let strict = cluster.strict_curators(Some(own.clone()));
    let mut following = JoinSet::new();
    following.spawn({
        let strict = strict.clone();
        async move { match strict.track_leader().await {} }
    });
    until("the leader is named", async || {
        Ok(strict.leader().is_some_and(|leader| leader.node == impostor.id))
    })
    .await?;
    let mut management = ManagementClient::new(strict.channel());
    let calling = management.get_cluster(wire::GetClusterRequest {});
    let (code, text) = refusal(in_time("the refusal", calling).await?)?;
    assert_eq!(code, Code::Unavailable, "{text}");
    assert!(text.contains("only a consensus member leads"), "{text}");

    // Once it is gone, the true curator leads and is followed.
    stop.cancel();
    in_time("its end", running.join_next()).await?.context("it ran")???;
    until("the true curator is followed", async || {
        Ok(strict.leader().is_some_and(|leader| leader.node == cluster.nodes[0].id))
    })
    .await?;
    Ok(())
}

/// A member that lost its role or its trust gets no further certificate, from the leader or from an etcd.
#[tokio::test]
async fn removed_member_is_given_no_other_one() -> TestResult {
    let cluster = Cluster::start_with(ClusterOptions { size: 3, ..ClusterOptions::default() }).await?;
    let leader = cluster.until_one_leads(None).await?;
    let former = &cluster.nodes[(leader + 1) % 3];
    let client = cluster.client_of(leader);
    let (curators, _following) = way(&cluster)?;
    let (mut nodes, mut issued) = (nodes_of(&cluster, former, leader)?, None);
    until("it has the role and is given a certificate", async || {
        issued = nodes.issue_curator_certificate(REQUEST).await.ok();
        Ok(issued.is_some())
    })
    .await?;
    let issued = issued.context("no certificate")?.into_inner();
    assert_eq!(curator_of(&cluster, &issued.certificate)?, former.id);

    until("all are connected", async || Ok(client.connected_peers().await?.len() == 2)).await?;
    let take = wire::UpdateRolesRequest {
        node_id: former.id.to_string(),
        add_roles: Vec::new(),
        remove_roles: vec!["consensus-member".to_owned()],
        ..Default::default()
    };
    let management = ManagementClient::new(curators.channel());
    call_leader("its end", async || management.clone().update_roles(take.clone()).await).await?;
    // The former member may have led etcd: nothing can be read until another one leads.
    until("etcd has a leader", async || Ok(client.get(&cluster_record_key()?).await.is_ok())).await?;
    let (code, text) = refusal(nodes_of(&cluster, former, leader)?.issue_curator_certificate(REQUEST).await)?;
    assert_eq!((code, text.contains("no consensus member")), (Code::FailedPrecondition, true), "{text}");
    let refused = issue_curator_from_local_etcd(&client, former.key, cluster.time.now()).await;
    let text = refused.err().context("it was issued")?.to_string();
    assert!(text.contains("no consensus member"), "{text}");
    let own = &cluster.nodes[leader];
    let issued = issue_curator_from_local_etcd(&client, own.key, cluster.time.now()).await?;
    assert_eq!(curator_of(&cluster, &issued)?, own.id);

    // A member with revoked credentials gets none either.
    let revoked = &cluster.nodes[(leader + 2) % 3];
    revoke_node(&curators, revoked).await?;
    let (code, text) =
        refusal(nodes_of(&cluster, revoked, leader)?.issue_curator_certificate(REQUEST).await)?;
    assert_eq!(code, Code::Unauthenticated, "{text}");
    // Its membership ends as well, and etcd may have no leader for a moment.
    until("its own etcd refuses it", async || {
        let refused = issue_curator_from_local_etcd(&client, revoked.key, cluster.time.now()).await;
        let text = refused.err().context("it was issued")?.to_string();
        Ok(text.contains("are revoked") || text.contains("no consensus member"))
    })
    .await?;
    Ok(())
}

/// How many of 80 requests are granted. They are sent in groups, each at the same time, so that a limit which is
/// counted first and recorded later lets more through.
async fn count_issued<F: Future<Output = bool>>(request: impl Fn() -> F) -> usize {
    let mut issued = 0;
    for _ in 0..4 {
        let outcomes = futures::future::join_all((0..20).map(|_| request())).await;
        issued += outcomes.into_iter().filter(|issued| *issued).count();
    }
    issued
}

/// Somebody with the key of a member requests certificates all the time. If there were more of them than a statement
/// has room for, no statement could revoke the member.
#[tokio::test]
async fn member_gets_no_more_certificates_than_can_be_revoked() -> TestResult {
    let cluster = Cluster::start().await?;
    let nodes = nodes_of(&cluster, &cluster.nodes[0], 0)?;
    let issued = count_issued(|| {
        let mut nodes = nodes.clone();
        async move { nodes.issue_curator_certificate(REQUEST).await.is_ok() }
    })
    .await;
    // The curator itself shows one more.
    assert_eq!(issued, 63);
    let (code, text) = refusal(nodes.clone().issue_curator_certificate(REQUEST).await)?;
    assert_eq!((code, text.contains("64 of this kind")), (Code::ResourceExhausted, true), "{text}");
    // Its own etcd still issues one: the member may be needed.
    let client = cluster.client_of(0);
    issue_curator_from_local_etcd(&client, cluster.nodes[0].key, cluster.time.now()).await?;
    Ok(())
}

/// The same for the certificates of any node, of which each leaves a record in etcd.
#[tokio::test]
async fn node_renews_its_certificate_a_bounded_number_of_times() -> TestResult {
    let cluster = Cluster::start().await?;
    let nodes = nodes_of(&cluster, &cluster.nodes[0], 0)?;
    let issued = count_issued(|| {
        let mut nodes = nodes.clone();
        async move { nodes.renew_certificate(wire::RenewCertificateRequest {}).await.is_ok() }
    })
    .await;
    // It has one more from the founding of the cluster.
    assert_eq!(issued, 63);
    let renewal = nodes.clone().renew_certificate(wire::RenewCertificateRequest {}).await;
    let (code, text) = refusal(renewal)?;
    assert_eq!((code, text.contains("64 of this kind")), (Code::ResourceExhausted, true), "{text}");
    Ok(())
}

/// The same for the key of a node without its certificate. Its calls are bounded, too, and those that were rejected are
/// counted.
#[tokio::test]
async fn key_without_a_certificate_gets_a_bounded_number_of_certificates_and_calls() -> TestResult {
    let cluster = Cluster::start().await?;
    let node = Holder::new()?;
    cluster.take_in(&node).await?;
    let join = async |node: &Holder, calls: usize| {
        let registration = RegistrationClient::new(cluster.channel(0, Some(node.itself()?))?);
        let calls = (0..calls).map(|_| {
            let mut registration = registration.clone();
            async move { registration.join(wire::JoinRequest {}).await }
        });
        anyhow::Ok(futures::future::join_all(calls).await)
    };
    // It has one more certificate from its commit.
    let outcomes = join(&node, 35).await?;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 31);
    for rejected in outcomes.into_iter().filter_map(Result::err) {
        let text = rejected.message();
        assert_eq!(
            (rejected.code(), text.contains("got 32 within a day")),
            (Code::ResourceExhausted, true),
            "{text}"
        );
    }
    assert_eq!(cluster.gate(0)?.rejected_calls, 0);

    let (stranger, began) = (Holder::new()?, std::time::Instant::now());
    let outcomes = join(&stranger, 100).await?;
    let of = |code: Code| {
        let rejections = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
        rejections.filter(|rejection| rejection.code() == code).count()
    };
    let (unknown, too_often) = (of(Code::NotFound), of(Code::ResourceExhausted));
    let at_most = 41 + usize::try_from(began.elapsed().as_millis() / 500)?;
    assert!((40..=at_most).contains(&unknown), "{unknown} of at most {at_most}");
    assert_eq!((unknown + too_often, cluster.gate(0)?.rejected_calls), (100, u64::try_from(too_often)?));
    // It may wait.
    cluster.time.pass(20);
    let outcomes = join(&stranger, 1).await?;
    assert!(matches!(&outcomes[..], [Err(rejection)] if rejection.code() == Code::NotFound), "{outcomes:?}");
    Ok(())
}
