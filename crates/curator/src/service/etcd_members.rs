//! Lists, changes and promotes the members of etcd, as the membership decisions need it.

use std::collections::BTreeSet;

use etcd::client::Client;
use etcd::members::{MemberError, MemberId};

use crate::membership::{EtcdMember, Nodes, learner_to_promote};
use crate::role_orders::MemberChange;
use crate::service::error::ServiceError;

/// Lists the members, and whether each is reachable from the one that `client` uses.
///
/// Reachable are the members that it exchanges messages with at this moment, and always itself.
pub async fn list_members(client: &Client) -> Result<Vec<EtcdMember>, ServiceError> {
    let own = client.status().await?.member_id;
    let connected: BTreeSet<u64> = client.connected_peers().await?;
    let members = client.list_members().await?.into_iter().map(|member| EtcdMember {
        id: member.id.0,
        reachable: member.id.0 == own || connected.contains(&member.id.0),
        name: member.name,
        peer_urls: member.peer_urls,
        learner: member.learner,
    });
    let mut members: Vec<EtcdMember> = members.collect();
    members.sort_by_key(|member| member.id);
    Ok(members)
}

/// Changes the members; a change that was made before is no error.
pub(super) async fn change_members(client: &Client, step: &MemberChange) -> Result<(), ServiceError> {
    match step {
        MemberChange::AddLearner { peer_url } => {
            match client.add_learner(std::slice::from_ref(peer_url)).await {
                Ok(member) => {
                    tracing::info!(member = %member.id, peer_url, "a member of etcd was added; it learns");
                }
                Err(MemberError::AlreadyExists { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        MemberChange::RemoveMember { member } => match client.remove_member(MemberId(*member)).await {
            Ok(()) => tracing::info!(member = %MemberId(*member), "a member of etcd was removed"),
            Err(MemberError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        },
    }
    Ok(())
}

/// Promotes a learner that has caught up, if this host's member leads etcd. Returns its number.
pub(super) async fn promote_learner(client: &Client, nodes: &Nodes) -> Result<Option<u64>, ServiceError> {
    let status = client.status().await?;
    let Some(leader) = status.leader else { return Ok(None) };
    if leader != status.member_id {
        return Ok(None);
    }
    let members = list_members(client).await?;
    let Some(learner) = learner_to_promote(status.member_id, leader, &members, nodes) else {
        return Ok(None);
    };
    match client.promote_learner(MemberId(learner)).await {
        Ok(()) => {
            tracing::info!(member = %MemberId(learner), "a member of etcd has caught up and votes now");
            Ok(Some(learner))
        }
        Err(MemberError::NotCaughtUp { .. } | MemberError::NotLearner { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
