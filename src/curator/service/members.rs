//! The members of etcd as decisions want them, and the changes that decisions ask for.

use std::collections::BTreeSet;

use crate::curator::membership::{Member, Nodes, promotion};
use crate::curator::roles::Step;
use crate::curator::service::failure::Failure;
use crate::etcd::client::Client;
use crate::etcd::members::{MemberError, MemberId};

/// Lists the members, with whether the one that answers has each of them in reach.
///
/// In reach is whom that member exchanges messages with at this moment; itself, always.
pub async fn list(client: &Client) -> Result<Vec<Member>, Failure> {
    let own = client.status().await?.member;
    let connected: BTreeSet<u64> = client.connected_peers().await?;
    let members = client.members().await?.into_iter().map(|member| Member {
        id: member.id.0,
        reachable: member.id.0 == own || connected.contains(&member.id.0),
        name: member.name,
        peer_urls: member.peer_urls,
        learner: member.learner,
    });
    let mut members: Vec<Member> = members.collect();
    members.sort_by_key(|member| member.id);
    Ok(members)
}

/// Changes the members; a change that was made before is no fault.
pub async fn step(client: &Client, step: &Step) -> Result<(), Failure> {
    match step {
        Step::AddLearner { peer_url } => match client.add_learner(std::slice::from_ref(peer_url)).await {
            Ok(member) => {
                tracing::info!(member = %member.id, peer_url, "a member of etcd was added; it learns");
            }
            Err(MemberError::AlreadyThere { .. }) => {}
            Err(error) => return Err(error.into()),
        },
        Step::Remove { member } => match client.remove_member(MemberId(*member)).await {
            Ok(()) => tracing::info!(member = %MemberId(*member), "a member of etcd was removed"),
            Err(MemberError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        },
    }
    Ok(())
}

/// Gives a vote to a member that has learnt enough, if this host's member leads etcd. Says which.
pub async fn promote(client: &Client, nodes: &Nodes) -> Result<Option<u64>, Failure> {
    let status = client.status().await?;
    let Some(leader) = status.leader else { return Ok(None) };
    if leader != status.member {
        return Ok(None);
    }
    let members = list(client).await?;
    let Some(learner) = promotion(status.member, leader, &members, nodes) else { return Ok(None) };
    match client.promote(MemberId(learner)).await {
        Ok(()) => {
            tracing::info!(member = %MemberId(learner), "a member of etcd has caught up and votes now");
            Ok(Some(learner))
        }
        Err(MemberError::NotCaughtUp { .. } | MemberError::NotLearner { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
