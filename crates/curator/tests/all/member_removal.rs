//! What the end of a consensus membership does to the authority of the cluster: the disk of the member has its key.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use curator_client::authority_ring::{AuthorityRing, ReplacementStage};
use curator_client::cluster::authority_record_key;
use curator_client::node::{ConsensusMember, Node};
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use tonic::transport::Channel;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, certificate, status};
use testkit::etcd_servers::until;
use testkit::key_holder::Holder;

use crate::authority_rotation::{report, until_listed};
use crate::leading::{revoke_node, start_connected, three, way};

/// The record of the authorities, as it is stored.
async fn stored_ring(cluster: &Cluster) -> Result<AuthorityRing> {
    let key = authority_record_key()?;
    let record = cluster.client_of(0).get(&key).await?.context("no record")?;
    Ok(AuthorityRing::decode(&key, &record.value)?)
}

/// Whether the authority is about to be replaced, and whether it is replaced once more after that.
pub(crate) async fn replacement(cluster: &Cluster) -> Result<Option<bool>> {
    let ring = stored_ring(cluster).await?;
    Ok(ring.replacement.map(|replacement| replacement.again))
}

/// A node that has become a consensus member. Its etcd does not run.
pub(crate) async fn join_as_member(
    cluster: &Cluster,
    management: &mut ManagementClient<Channel>,
    last: u8,
) -> Result<Holder> {
    let node = Holder::new()?;
    let certificate = cluster.take_in(&node).await?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(node.with(&certificate)?))?);
    let (node_id, status) = (node.id.to_string(), Some(status(([127, 77, 0, last], 0).into())));
    nodes.update_status(wire::UpdateStatusRequest { node_id: node_id.clone(), status }).await?;
    let add_roles = vec!["consensus-member".to_owned()];
    management.update_roles(wire::UpdateRolesRequest { node_id, add_roles, ..Default::default() }).await?;
    Ok(node)
}

pub(crate) fn removal(node: &Holder, start_rotation: bool) -> wire::UpdateRolesRequest {
    wire::UpdateRolesRequest {
        node_id: node.id.to_string(),
        remove_roles: vec!["consensus-member".to_owned()],
        start_rotation,
        ..Default::default()
    }
}

/// Nobody waits for a node that is decommissioned.
pub(crate) async fn decommission(management: &mut ManagementClient<Channel>, node: &Holder) -> Result<()> {
    management.decommission(wire::DecommissionRequest { node_id: node.id.to_string() }).await?;
    Ok(())
}

#[tokio::test]
async fn end_of_a_membership_begins_a_replacement_unless_the_authority_is_kept() -> TestResult {
    let cluster = Cluster::start().await?;
    let (founder, old) = (&cluster.nodes[0], cluster.anchor.clone());
    let by_old = certificate(&cluster.authority, founder, cluster.time.now())?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(founder.with(&by_old)?))?);
    let mut management = ManagementClient::new(cluster.as_owner().await?);

    let kept = join_as_member(&cluster, &mut management, 1).await?;
    management.update_roles(removal(&kept, false)).await?;
    assert_eq!(replacement(&cluster).await?, None, "its disk is wiped");
    decommission(&mut management, &kept).await?;

    let removed = join_as_member(&cluster, &mut management, 2).await?;
    // The response to the first call may be lost: the second one ends no membership.
    for _ in 0..2 {
        management.update_roles(removal(&removed, true)).await?;
        assert_eq!(replacement(&cluster).await?, Some(false), "one replacement, and no more");
    }
    decommission(&mut management, &removed).await?;
    let both = until_listed(&cluster, |listed| listed.len() == 2).await?;
    let new = both[1].clone();

    // A member that is removed meanwhile has the new key on its disk.
    let late = join_as_member(&cluster, &mut management, 3).await?;
    let delete = wire::DeleteRequest {
        node_id: late.id.to_string(),
        bypass_has_roles: true,
        bypass_not_decommissioned: true,
        start_rotation: true,
    };
    management.delete(delete).await?;
    assert_eq!(replacement(&cluster).await?, Some(true), "the next one is due after this one");

    nodes.update_status(report(&cluster, &[&old, &new], &old, &[&old, &new])?).await?;
    until_listed(&cluster, |listed| *listed == [new.clone(), old.clone()]).await?;
    let by_new = nodes.renew_certificate(wire::RenewCertificateRequest {}).await?.into_inner().certificate;
    let mut renewed = NodesClient::new(cluster.channel(0, Some(founder.with(&by_new)?))?);
    renewed.update_status(report(&cluster, &[&new, &old], &new, &[&old, &new])?).await?;
    until_listed(&cluster, |listed| *listed == [new.clone()]).await?;
    renewed.update_status(report(&cluster, &[&new], &new, &[&new])?).await?;

    let again = until_listed(&cluster, |listed| listed.len() == 2 && listed[0] == new).await?;
    assert!(again[1] != old, "the removed members had both keys");
    let ring = stored_ring(&cluster).await?;
    assert_eq!(ring.successors.len(), 2);
    let second = ring.replacement.context("it ended")?;
    assert!(matches!(second.stage, ReplacementStage::Trusted { .. }) && !second.again);
    Ok(())
}

#[tokio::test]
async fn membership_that_ended_without_its_call_begins_a_replacement() -> TestResult {
    let cluster = Cluster::start().await?;
    let node = Holder::new()?;
    cluster.take_in(&node).await?;
    // As a leader leaves it that is lost after etcd has removed the member.
    let (client, key) = (cluster.client_of(0), Node::etcd_key(&node.id)?);
    let read = async || {
        let record = client.get(&key).await?.context("no record")?;
        anyhow::Ok(Node::decode(&key, &record.value)?)
    };
    let mut record = read().await?;
    record.roles.consensus_member = Some(ConsensusMember { member_id: 7, peers: BTreeMap::new() });
    client.put_unguarded(&key, &record.encode()?).await?;
    until("a replacement has begun", async || Ok(replacement(&cluster).await? == Some(false))).await?;
    assert_eq!(read().await?.roles.consensus_member, None, "both are written, or none");
    Ok(())
}

#[tokio::test]
async fn removal_before_the_first_statement_replaces_nothing() -> TestResult {
    let options = ClusterOptions { old_curators: 1, ..ClusterOptions::default() };
    let cluster = Cluster::start_with(options).await?;
    cluster.until_one_leads(None).await?;
    let mut management = ManagementClient::new(cluster.as_owner().await?);
    let node = join_as_member(&cluster, &mut management, 1).await?;
    let taken = management.update_roles(removal(&node, true)).await?.into_inner().node.context("no node")?;
    assert!(taken.roles.is_none_or(|roles| roles.consensus_member.is_none()));
    assert_eq!(replacement(&cluster).await?, None, "nodes could not follow");
    Ok(())
}

/// A list of revoked peers would not be enough: the other members connect to this one, too.
#[tokio::test]
async fn membership_of_a_revoked_node_ends_and_begins_a_replacement() -> TestResult {
    let (cluster, leader) = start_connected(three()).await?;
    let client = cluster.client_of(leader);
    let (revoked, key) = (&cluster.nodes[(leader + 1) % 3], authority_record_key()?);
    let (curators, _following) = way(&cluster)?;
    revoke_node(&curators, revoked).await?;

    let management = ManagementClient::new(curators.channel());
    let get = async || management.clone().get_consensus(wire::GetConsensusRequest {}).await;
    let mut members = Vec::new();
    let ended = until("its membership ends", async || {
        // etcd may have no leader for a moment.
        let Ok(response) = get().await else { return Ok(false) };
        members = response.into_inner().members;
        Ok(members.len() == 2)
    });
    ended.await.with_context(|| format!("a revoked node is still a member of etcd: {members:?}"))?;
    until("its record has no role, and the authority is replaced", async || {
        let node_key = Node::etcd_key(&revoked.id)?;
        let (Ok(node), Ok(ring)) = (client.get(&node_key).await, client.get(&key).await) else {
            return Ok(false);
        };
        let node = Node::decode(&node_key, &node.context("no record")?.value)?;
        let ring = AuthorityRing::decode(&key, &ring.context("no authority")?.value)?;
        Ok(node.roles.consensus_member.is_none() && ring.replacement.is_some())
    })
    .await?;
    Ok(())
}
