//! Roles and the members of etcd: which of them decides, and how they become consistent.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use curator_client::cluster::cluster_record_key;
use curator_client::node::{ConsensusMember, Node};
use etcd::members::MemberId;
use model::cluster::state::MAX_ETCD_BYTES;
use model::node_role::NodeRole;
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use tonic::Code;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, peer_url_of, refusal, status};
use testkit::etcd_servers::until;
use testkit::key_holder::Holder;

fn roles(node: &Holder, give: &[&str], take: &[&str]) -> wire::UpdateRolesRequest {
    wire::UpdateRolesRequest {
        node_id: node.id.to_string(),
        add_roles: give.iter().map(|&name| name.to_owned()).collect(),
        remove_roles: take.iter().map(|&name| name.to_owned()).collect(),
        ..Default::default()
    }
}

async fn roles_of(cluster: &Cluster, node: &Holder) -> Result<Vec<String>> {
    let key = Node::etcd_key(&node.id)?;
    let record = cluster.client_of(0).get(&key).await?.context("no record")?;
    let names = Node::decode(&key, &record.value)?.roles.names();
    Ok(names.iter().map(ToString::to_string).collect())
}

async fn say_address(cluster: &Cluster, node: &Holder, certificate: &[u8], last: u8) -> Result<()> {
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(certificate)?))?);
    let status = Some(status(([127, 77, 0, last], 0).into()));
    nodes.update_status(wire::UpdateStatusRequest { node_id: node.id.to_string(), status }).await?;
    Ok(())
}

async fn members(owner: &Channel) -> Result<Vec<wire::EtcdMember>> {
    let response = ManagementClient::new(owner.clone()).get_consensus(wire::GetConsensusRequest {}).await?;
    let response = response.into_inner();
    // The smallest database file of etcd has several pages of 4 KiB.
    ensure!(response.database_bytes > 10_000 && !response.has_space_alarm, "{response:?}");
    ensure!(response.quota_bytes == MAX_ETCD_BYTES, "{response:?}");
    Ok(response.members)
}

/// Scenario C-13, and two checks that the system that we follow does not make: the state of the node, and name order.
#[tokio::test]
async fn order_about_roles_is_judged_by_what_the_node_would_have() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let mut management = ManagementClient::new(owner.clone());
    let first = &cluster.nodes[0];
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;

    let refused = refusal(management.update_roles(roles(&node, &["kubernetes-controller"], &[])).await)?;
    assert_eq!(
        (refused.0, refused.1.contains("no consensus-member")),
        (Code::FailedPrecondition, true),
        "{}",
        refused.1
    );
    let refused = refusal(management.update_roles(roles(&node, &["consensus-member"], &[])).await)?;
    assert_eq!((refused.0, refused.1.contains("address")), (Code::FailedPrecondition, true), "{}", refused.1);
    say_address(&cluster, &node, &certificate, 1).await?;
    testkit::curators::put_kubernetes(owner.clone()).await?;
    management.update_roles(roles(&node, &["kubernetes-worker"], &[])).await?;
    assert_eq!(roles_of(&cluster, &node).await?, ["kubernetes-worker"]);

    // Membership first, then the role: by now the node is a member and a learner, and its role names the member.
    let given = roles(&node, &["kubernetes-controller", "consensus-member"], &["kubernetes-worker"]);
    let given = management.update_roles(given).await?.into_inner().node.context("no node")?;
    let role = given.roles.context("no roles")?;
    assert!(role.kubernetes_controller && !role.kubernetes_worker);
    let member = role.consensus_member.context("no member")?;
    let listed = members(&owner).await?;
    let its =
        listed.iter().find(|member| member.node_id == node.id.to_string()).context("no member of etcd")?;
    assert_eq!(its.member_id, member.member_id);
    assert_eq!((its.learner, its.started, its.reachable), (true, false, false));
    assert_eq!(its.peer_urls, [peer_url_of("127.77.0.1")?]);
    assert_eq!(member.peers.len(), 1, "the one other member: {:?}", member.peers);
    assert_eq!(member.peers[0].node_id, first.id.to_string());
    let own = listed.iter().find(|member| member.node_id == first.id.to_string()).context("not the first")?;
    assert_eq!((own.learner, own.started, own.reachable), (false, true, true));

    let other = Holder::new()?;
    let certificate = cluster.take_in(&other).await?;
    say_address(&cluster, &other, &certificate, 2).await?;
    let refused = refusal(management.update_roles(roles(&other, &["consensus-member"], &[])).await)?;
    assert_eq!((refused.0, refused.1.contains("still learning")), (Code::Unavailable, true), "{}", refused.1);
    assert_eq!(roles_of(&cluster, &other).await?, Vec::<String>::new());

    let refused = refusal(management.update_roles(roles(&node, &[], &["consensus-member"])).await)?;
    assert_eq!(refused.0, Code::FailedPrecondition, "it would be a controller alone: {}", refused.1);
    let taken = roles(&node, &[], &["consensus-member", "kubernetes-controller"]);
    for _ in 0..2 {
        management.update_roles(taken.clone()).await?;
        assert_eq!(roles_of(&cluster, &node).await?, Vec::<String>::new());
        assert_eq!(members(&owner).await?.len(), 1, "removed before the role was taken");
    }

    let refused = refusal(management.update_roles(roles(first, &[], &["consensus-member"])).await)?;
    assert_eq!(
        (refused.0, refused.1.contains("last one that votes")),
        (Code::FailedPrecondition, true),
        "{}",
        refused.1
    );
    assert_eq!(roles_of(&cluster, first).await?, ["consensus-member"]);
    for (request, expected) in [
        (roles(&node, &["web"], &["web"]), Code::InvalidArgument),
        (roles(&node, &["Not A Role"], &[]), Code::InvalidArgument),
        (roles(&Holder::new()?, &["kubernetes-worker"], &[]), Code::NotFound),
    ] {
        assert_eq!(refusal(management.update_roles(request).await)?.0, expected);
    }
    Ok(())
}

/// A node that is not up gets no role.
#[tokio::test]
async fn node_that_nobody_approved_is_given_no_role() -> TestResult {
    let cluster = Cluster::start().await?;
    let owner = cluster.as_owner().await?;
    let node = Holder::new()?;
    let ticket = testkit::curators::ticket(owner.clone(), None).await?;
    let mut registration = proto::curator::v1::registration_client::RegistrationClient::new(
        cluster.channel(0, Some(node.itself()?))?,
    );
    registration.register(wire::RegisterRequest { ticket, ..Default::default() }).await?;
    let mut management = ManagementClient::new(owner);
    let refused = refusal(management.update_roles(roles(&node, &["kubernetes-worker"], &[])).await)?;
    assert_eq!(
        (refused.0, refused.1.contains("it is new")),
        (Code::FailedPrecondition, true),
        "{}",
        refused.1
    );
    Ok(())
}

/// Scenario C-20: a change that was interrupted, in each of the three ways.
#[tokio::test]
async fn members_and_records_come_to_agree_whatever_was_left_half_done() -> TestResult {
    let cluster = Cluster::start().await?;
    let client = cluster.client_of(0);
    let owner = cluster.as_owner().await?;
    let (stray, no_member) = (Holder::new()?, Holder::new()?);
    cluster.take_in(&stray).await?;
    cluster.take_in(&no_member).await?;
    let write = async |node: &Holder, change: &dyn Fn(&mut Node)| {
        let key = Node::etcd_key(&node.id)?;
        let record = client.get(&key).await?.context("no record")?;
        let mut record = Node::decode(&key, &record.value)?;
        change(&mut record);
        client.put_unguarded(&key, &record.encode()?).await?;
        anyhow::Ok(())
    };
    // The record of the leader itself loses its role. etcd lists its member, and etcd decides.
    write(&cluster.nodes[0], &|node| node.roles.consensus_member = None).await?;
    until("the leader has its role", async || {
        Ok(roles_of(&cluster, &cluster.nodes[0]).await? == [NodeRole::ConsensusMember.to_string()])
    })
    .await?;

    // A member that belongs to no node, and a role without a member.
    client.add_learner(&[peer_url_of("127.77.0.9")?]).await?;
    write(&no_member, &|node| {
        node.roles.consensus_member = Some(ConsensusMember { member_id: 7, peers: BTreeMap::new() });
        node.roles.kubernetes_controller = true;
        node.roles.kubernetes_worker = true;
    })
    .await?;
    until("the stray member is removed", async || Ok(members(&owner).await?.len() == 1)).await?;
    until("the role without a member is taken", async || {
        Ok(roles_of(&cluster, &no_member).await? == ["kubernetes-worker"])
    })
    .await?;
    assert_eq!(roles_of(&cluster, &cluster.nodes[0]).await?, ["consensus-member"]);
    Ok(())
}

/// A member that does not run is distinguished from one that responds, and the quorum is counted accordingly.
#[tokio::test]
async fn member_out_of_reach_is_seen_and_protects_the_others() -> TestResult {
    let mut cluster = Cluster::start_with(ClusterOptions { size: 3, ..ClusterOptions::default() }).await?;
    let leader = cluster.until_one_leads(None).await?;
    let dead = (leader + 1) % 3;
    let third = (leader + 2) % 3;
    let client = cluster.client_of(leader);
    let ids = client.list_members().await?;
    let id_of = |number: usize| -> Result<MemberId> {
        let name = cluster.nodes[number].id.to_string();
        Ok(ids.iter().find(|member| member.name == name).context("no member")?.id)
    };
    until("all are connected", async || Ok(client.connected_peers().await?.len() == 2)).await?;
    cluster.etcd.kill(dead)?;
    let (its, the_thirds) = (id_of(dead)?.0, id_of(third)?.0);
    until("the dead one is out of reach", async || {
        let connected = client.connected_peers().await?;
        Ok(!connected.contains(&its) && connected.contains(&the_thirds))
    })
    .await?;
    // The dead one may have led etcd: nothing can be read until another one leads.
    until("etcd has a leader", async || Ok(client.get(&cluster_record_key()?).await.is_ok())).await?;
    // Two of three respond: none of those may be removed.
    let owner = curator_client::certificate::Validity::starting(
        cluster.time.now(),
        std::time::Duration::from_mins(5),
    );
    let serial = curator_client::certificate::Serial::new(rand::random());
    let issued = cluster.authority.issue_owner_certificate("kim", &cluster.owner.key, serial, owner)?;
    let owner = cluster.channel(leader, Some(cluster.owner.with(&issued.certificate)?))?;
    let mut management = ManagementClient::new(owner);
    let refused =
        refusal(management.update_roles(roles(&cluster.nodes[third], &[], &["consensus-member"])).await)?;
    assert_eq!(
        (refused.0, refused.1.contains("2 must be")),
        (Code::FailedPrecondition, true),
        "{}",
        refused.1
    );
    management.update_roles(roles(&cluster.nodes[dead], &[], &["consensus-member"])).await?;
    assert_eq!(client.list_members().await?.len(), 2);
    Ok(())
}
