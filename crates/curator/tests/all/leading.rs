//! Which curator leads, that no other curator answers, and that callers find the next leader by themselves.

use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use curator_client::certificate::{Serial, Validity};
use curator_client::leader_channel::LeaderTracker;
use etcd::key_space::TICKETS;
use etcd::namespace::KeySelector;
use proto::curator::v1 as wire;
use proto::curator::v1::credentials_client::CredentialsClient;
use proto::curator::v1::leader_client::LeaderClient;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use proto::curator::v1::revoke_credentials_request::Target;
use proto::curator::v1::tickets_client::TicketsClient;
use rustls::sign::CertifiedKey;
use tokio::task::JoinSet;
use tonic::{Code, Status, Streaming};

use testkit::aloud::TestResult;
use testkit::curators::{AN_HOUR_MS, Cluster, ClusterOptions, certificate, found_no_leader, refusal};
use testkit::etcd_servers::{in_time, until};
use testkit::key_holder::Holder;

pub(super) fn three() -> ClusterOptions {
    ClusterOptions {
        size: 3,
        ttl: Duration::from_secs(5),
        deadline: Duration::from_secs(3),
        ..ClusterOptions::default()
    }
}

/// Starts three curators, and waits until one leads and its member of etcd is connected to the others. Returns its number.
pub(super) async fn start_connected(options: ClusterOptions) -> Result<(Cluster, usize)> {
    let cluster = Cluster::start_with(options).await?;
    let leader = cluster.until_one_leads(None).await?;
    let client = cluster.client_of(leader);
    until("all are connected", async || Ok(client.connected_peers().await?.len() == 2)).await?;
    Ok((cluster, leader))
}

/// A tracker of the leader with an owner's certificate, which runs in the background.
pub(super) fn way(cluster: &Cluster) -> Result<(LeaderTracker, JoinSet<()>)> {
    let validity = Validity::starting(cluster.time.now(), Duration::from_hours(1));
    let issued = cluster.authority.issue_owner_certificate(
        "kim",
        &cluster.owner.key,
        Serial::new(rand::random()),
        validity,
    )?;
    Ok(way_of(cluster, cluster.owner.with(&issued.certificate)?))
}

/// A tracker of the leader with this certificate, which runs in the background.
pub(super) fn way_of(cluster: &Cluster, own: Arc<CertifiedKey>) -> (LeaderTracker, JoinSet<()>) {
    let curators = cluster.curators(Some(own));
    let mut following = JoinSet::new();
    following.spawn({
        let curators = curators.clone();
        async move { match curators.track_leader().await {} }
    });
    (curators, following)
}

/// Makes a call to the leader, and again while none is found.
pub(super) async fn call_leader<T>(
    what: &str,
    call: impl AsyncFn() -> Result<tonic::Response<T>, Status>,
) -> Result<T> {
    let calling = async {
        loop {
            match call().await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) if found_no_leader(&status) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(status) => return Err(status.into()),
            }
        }
    };
    in_time(what, calling).await?
}

/// Has the leader revoke the credentials of a node. The call is repeated while none is found.
pub(super) async fn revoke_node(curators: &LeaderTracker, node: &Holder) -> Result<()> {
    let credentials = CredentialsClient::new(curators.channel());
    let target = Some(Target::NodeId(node.id.to_string()));
    let request = wire::RevokeCredentialsRequest { target };
    call_leader("a revocation", async || credentials.clone().revoke(request.clone()).await).await?;
    Ok(())
}

/// Every place with an address of a curator has one of IPv6: the listeners, the directory, the status of each node and the
/// response that names the leader.
#[tokio::test]
async fn leader_at_an_ipv6_address_is_found_and_followed() -> TestResult {
    let listen = Ipv6Addr::LOCALHOST.into();
    let cluster = Cluster::start_with(ClusterOptions { listen, ..three() }).await?;
    let leader = cluster.until_one_leads(None).await?;
    assert!(cluster.address(leader)?.starts_with("[::1]:"), "{}", cluster.address(leader)?);
    let (curators, _following) = way(&cluster)?;
    make_ticket(&curators, "by IPv6").await?;

    let follower = (leader + 1) % 3;
    let mut asking = LeaderClient::new(cluster.channel(follower, None)?);
    let mut named = None;
    until("a follower names the leader", async || {
        let Ok(answers) = asking.watch(wire::WatchLeaderRequest {}).await else { return Ok(false) };
        named = answers.into_inner().message().await.ok().flatten();
        Ok(named.as_ref().is_some_and(|response| !response.leader_address.is_empty()))
    })
    .await?;
    let named = named.context("nothing")?;
    let port = u16::try_from(named.leader_port)?;
    let place = SocketAddr::new(named.leader_address.parse()?, port).to_string();
    assert_eq!(place, cluster.address(leader)?);
    Ok(())
}

async fn make_ticket(curators: &LeaderTracker, purpose: &str) -> Result<String> {
    let tickets = TicketsClient::new(curators.channel());
    let request =
        wire::CreateTicketRequest { lifetime_ms: AN_HOUR_MS, max_uses: None, purpose: purpose.to_owned() };
    let made = call_leader("a ticket", async || tickets.clone().create(request.clone()).await).await?;
    made.ticket.map(|ticket| ticket.ticket_id).context("no ticket")
}

/// Scenarios C-1 and C-15: every curator names the leader, the leader serves everything, and the others serve nothing
/// else.
#[tokio::test]
async fn every_curator_says_who_leads_and_only_that_one_does_more() -> TestResult {
    let cluster = Cluster::start_with(three()).await?;
    let leader = cluster.until_one_leads(None).await?;
    for number in 0..3 {
        let channel = cluster.channel(number, None)?;
        let mut asking = LeaderClient::new(channel.clone());
        let mut response = None;
        // A curator that has just started may not know it yet.
        until("it says who leads", async || {
            let Ok(answers) = asking.watch(wire::WatchLeaderRequest {}).await else { return Ok(false) };
            response = answers.into_inner().message().await.ok().flatten();
            Ok(response.is_some())
        })
        .await?;
        let response = response.context("nothing")?;
        assert_eq!(response.leader_node_id, cluster.nodes[leader].id.to_string());
        assert_eq!(response.responding_node_id, cluster.nodes[number].id.to_string());
        let place = format!("{}:{}", response.leader_address, response.leader_port);
        assert_eq!(place, cluster.address(leader)?);
        let ca = asking.get_ca_certificate(wire::GetCaCertificateRequest {}).await?.into_inner();
        assert_eq!(ca.ca_certificate, cluster.anchor.certificate);
        if number != leader {
            let node = &cluster.nodes[number];
            let own = node.with(&certificate(&cluster.authority, node, cluster.time.now())?)?;
            let mut management = ManagementClient::new(cluster.channel(number, Some(own))?);
            let (code, text) = refusal(management.get_cluster(wire::GetClusterRequest {}).await)?;
            assert_eq!((code, text.contains("does not lead")), (Code::Unimplemented, true), "{text}");
        }
    }
    Ok(())
}

/// The leader stops, is killed, and loses its etcd: each time another one leads, and the client's calls go on.
#[tokio::test]
async fn calls_go_on_with_the_next_leader_whatever_became_of_the_last() -> TestResult {
    let mut cluster = Cluster::start_with(three()).await?;
    let (curators, _following) = way(&cluster)?;
    let mut made = vec![make_ticket(&curators, "before").await?];

    // Stopped: the leader revokes its lease, so nobody waits for the lease to expire.
    let mut first = 0;
    until("calls go to who leads", async || {
        first = cluster.until_one_leads(None).await?;
        Ok(curators.leader().is_some_and(|leader| leader.node == cluster.nodes[first].id))
    })
    .await?;
    cluster.stop(first).await?;
    made.push(make_ticket(&curators, "after a stop").await?);
    cluster.run(first).await?;

    // Killed: the lease expires by itself.
    let second = cluster.until_one_leads(Some(first)).await?;
    cluster.kill(second);
    made.push(make_ticket(&curators, "after a crash").await?);
    cluster.run(second).await?;
    // The curators listen on other addresses by now, and the client needs them. On a node, the curator directory
    // supplies them.
    curators.set_directory((0..3).filter_map(|number| cluster.address(number).ok()));

    // Its etcd stops responding: it knows that it no longer leads before any other curator leads.
    let third = cluster.until_one_leads(Some(second)).await?;
    cluster.etcd.silence(third)?;
    made.push(make_ticket(&curators, "after a silence").await?);
    let (code, text) = {
        let node = &cluster.nodes[third];
        let own = node.with(&certificate(&cluster.authority, node, cluster.time.now())?)?;
        let mut nodes = NodesClient::new(cluster.channel(third, Some(own))?);
        refusal(in_time("an answer", nodes.renew_certificate(wire::RenewCertificateRequest {})).await?)?
    };
    assert!(matches!(code, Code::Unavailable | Code::Unimplemented), "{code:?} {text}");
    cluster.etcd.let_speak(third)?;

    // Once its etcd responds, a curator can be elected again.
    let tickets = TicketsClient::new(curators.channel());
    let listing = async || tickets.clone().list(wire::ListTicketsRequest {}).await;
    let listed = call_leader("the tickets", listing).await?;
    let mut listed: Vec<String> = listed.tickets.into_iter().map(|ticket| ticket.ticket_id).collect();
    for id in &made {
        assert!(listed.contains(id), "{id} was answered with success, and is lost");
    }
    let kept = cluster
        .client_of((third + 1) % 3)
        .list(&KeySelector::Prefix(TICKETS.range().start))
        .await?
        .records
        .len();
    listed.dedup();
    assert_eq!(listed.len(), kept);
    Ok(())
}

/// A stream from a former leader ends with the reason.
#[tokio::test]
async fn streams_end_with_the_leadership_they_were_opened_in() -> TestResult {
    let mut cluster = Cluster::start_with(three()).await?;
    let leader = cluster.until_one_leads(None).await?;
    let node = &cluster.nodes[leader];
    let own = node.with(&certificate(&cluster.authority, node, cluster.time.now())?)?;
    let mut nodes = NodesClient::new(cluster.channel(leader, Some(own))?);
    let mut watching = nodes.watch_all(wire::WatchAllRequest {}).await?.into_inner();
    watching.message().await?.context("no backlog")?;
    let mut who = LeaderClient::new(cluster.channel(leader, None)?);
    let mut leading = who.watch(wire::WatchLeaderRequest {}).await?.into_inner();
    leading.message().await?.context("nobody leads")?;
    cluster.stop(leader).await?;
    for ended in [end_of(watching).await?, end_of(leading).await?] {
        let status = ended.context("it ended as if the watch were complete")?;
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    }
    Ok(())
}

/// Reads a stream to its end; returns the status it ended with, `None` for a normal end.
async fn end_of<T>(mut stream: Streaming<T>) -> Result<Option<Status>> {
    loop {
        match in_time("its end", stream.message()).await? {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            Err(status) => return Ok(Some(status)),
        }
    }
}

/// The leader has to prove its identity: another node of the cluster at the leader's address gets no call.
#[tokio::test]
async fn call_goes_to_the_node_that_leads_and_to_nobody_in_its_place() -> TestResult {
    let cluster = Cluster::start().await?;
    let impostor = Holder::new()?;
    let curators = cluster.curators(Some(cluster.owner.itself()?));
    // The name of another node under the address of the leader: the certificate distinguishes them.
    let channel = {
        let (anchor, clock) = (cluster.anchor.clone(), cluster.time.clock());
        let config = curator_client::tls::client_config(anchor, Some(impostor.id), None, clock)?;
        curator_client::curator_channel::open_channel(&cluster.address(0)?, config)
    };
    let mut asking = LeaderClient::new(channel);
    let status =
        asking.get_ca_certificate(wire::GetCaCertificateRequest {}).await.err().context("it was believed")?;
    let text = format!("{status:?}");
    assert!(text.contains("was expected"), "{text}");
    // A curator of another cluster is rejected as well.
    let other = Cluster::start().await?;
    let config = curator_client::tls::client_config(other.anchor.clone(), None, None, cluster.time.clock())?;
    let mut asking =
        LeaderClient::new(curator_client::curator_channel::open_channel(&cluster.address(0)?, config));
    assert!(asking.get_ca_certificate(wire::GetCaCertificateRequest {}).await.is_err());
    assert_eq!(curators.leader(), None, "nobody follows");
    Ok(())
}
