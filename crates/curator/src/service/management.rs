//! gRPC service Management: approve, roles, labels, decommission, delete.
//!
//! It also has the read-only calls about the cluster, its nodes and its etcd members.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use curator_client::node::{Node, NodeState};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::peer_identity::Peer;
use etcd::guard::{ExpectedRevision, KeyChange};
use model::node_role::{DeclaredRole, NodeRole, RoleNameError};
use proto::curator::v1 as wire;
use proto::curator::v1::management_server;
use tonic::{Code, Request, Response, Status};

use crate::authority_rotation::ends_membership;
use crate::credential::Revocation;
use crate::kubernetes::node_allocation::{self, NodeAllocation};
use crate::membership::match_members_to_nodes;
use crate::node_address::parse_assigned;
use crate::node_filter::NodeFilter;
use crate::node_labels;
use crate::node_lifecycle::{self, DeleteBypass, LifecycleError, NodeUpdate};
use crate::role_orders::{MemberChange, NextStep, RoleOrder, plan_role_change};
use crate::service::authority_rotation::explain_unavailable;
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext};
use crate::service::nodes::parse_node_id;
use crate::service::store::node_change;

/// How long the quota of etcd may take to be read. The rest of the consensus is reported without it.
const QUOTA_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(super) struct ManagementService(pub(super) Arc<LeaderContext>);

impl ManagementService {
    /// Changes one node by a decision about its record alone.
    async fn update_node(
        &self,
        id: NodeId,
        decide: impl Fn(Option<&Node>) -> Result<NodeUpdate, ServiceError>,
    ) -> Result<Node, ServiceError> {
        let store = &self.0.store;
        let changed = store.retry_on_conflict(|| async {
            let known = store.node(&id).await?;
            let outcome = decide(known.as_ref().map(|known| &known.value))?;
            if let NodeUpdate::Changed(node) = &outcome {
                store.write(&[node_change(node, known.as_ref().map(|known| known.revision))?]).await?;
            }
            Ok(outcome.node().clone())
        });
        changed.await
    }
}

#[tonic::async_trait]
impl management_server::Management for ManagementService {
    async fn get_cluster(
        &self,
        request: Request<wire::GetClusterRequest>,
    ) -> Result<Response<wire::GetClusterResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        // Every node calls this each few seconds, and the replacement names as many nodes as there are.
        let authority_rotation = match caller.peer {
            Peer::Owner { .. } => self.0.describe_replacement().await?,
            Peer::Node { .. } | Peer::Registering { .. } | Peer::Unauthenticated => None,
        };
        Ok(Response::new(wire::GetClusterResponse {
            directory: Some(self.0.directory()),
            name: self.0.cluster.name.clone(),
            created_at_ms: self.0.cluster.created_at.timestamp_millis(),
            statement_waits_for: self.0.statement_waits_for().iter().map(ToString::to_string).collect(),
            authority_rotation,
        }))
    }

    async fn list_nodes(
        &self,
        request: Request<wire::ListNodesRequest>,
    ) -> Result<Response<wire::ListNodesResponse>, Status> {
        let filter = NodeFilter::new(request.get_ref()).map_err(ServiceError::invalid_argument)?;
        let stored = self.0.store.nodes().await?;
        let (tracker, now) = (self.0.lock_heartbeats(), self.0.clock.monotonic());
        let nodes = stored.nodes.values().filter_map(|node| {
            let health = tracker.node_health(node, now);
            let assigned = node.assigned_address.map(|address| address.to_string()).unwrap_or_default();
            filter.matches(node, health).then(|| wire::ListedNode {
                node: Some(node.to_wire()),
                health: Some(health.to_wire()),
                assigned_address: Some(assigned),
            })
        });
        Ok(Response::new(wire::ListNodesResponse { nodes: nodes.collect() }))
    }

    async fn approve(
        &self,
        request: Request<wire::ApproveRequest>,
    ) -> Result<Response<wire::ApproveResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let key =
            PublicKey::from_slice(&request.get_ref().public_key).map_err(ServiceError::invalid_argument)?;
        let address = parse_assigned(self.0.address_rule, &request.get_ref().address)
            .map_err(ServiceError::invalid_argument)?;
        let id = NodeId::from_key(&key);
        let now = self.0.clock.now();
        let approved = self.update_node(id, |known| {
            Ok(node_lifecycle::assign_address(node_lifecycle::approve_node(known, &key, now)?, address))
        });
        let node = approved.await?;
        tracing::info!(node = %id, actor = %caller.peer, "a node was approved");
        Ok(Response::new(wire::ApproveResponse { node: Some(node.to_wire()) }))
    }

    async fn update_roles(
        &self,
        request: Request<wire::UpdateRolesRequest>,
    ) -> Result<Response<wire::UpdateRolesResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let id = parse_node_id(&body.node_id)?;
        let order =
            RoleOrder { add: parse_roles(&body.add_roles)?, remove: parse_roles(&body.remove_roles)? };
        let start_rotation = body.start_rotation;
        let leading = &self.0;
        let _alone = leading.lock_membership().await;
        let node = leading.store.retry_on_conflict(|| async {
            // Members before nodes, as `membership::plan_sync` requires.
            let mut members = leading.list_members().await?;
            let stored = leading.store.nodes().await?;
            let node = stored.nodes.get(&id).ok_or(LifecycleError::Unknown(id))?;
            let declared: BTreeSet<DeclaredRole> =
                leading.store.declarations().await?.iter().map(|kept| kept.value.role().clone()).collect();
            let plan = plan_role_change(node, &order, &members, &stored.nodes, &declared)?;
            if matches!(plan.member_change, Some(MemberChange::RemoveMember { .. })) {
                Box::pin(leading.check_member_removal(id, &members, &stored.nodes)).await?;
            }
            let settings = leading.store.kubernetes().await?.map(|stored| stored.value);
            let allotments = leading.store.allocations().await?;
            let given = node_allocation::plan_allocation(node, &order, settings.as_ref(), &allotments.allocations)?;
            let mut made = false;
            let changed = loop {
                match plan.next_step(made, node, &members, &stored.nodes)? {
                    NextStep::ChangeMembers(step) => {
                        leading.change_members(&step).await?;
                        members = leading.list_members().await?;
                        made = true;
                    }
                    NextStep::WriteRecord(changed) => break *changed,
                }
            };
            if changed != *node {
                let mut changes = vec![node_change(&changed, stored.revisions.get(&id).copied())?];
                if start_rotation && ends_membership(node, Some(&changed)) {
                    Box::pin(leading.add_rotation_after_removal(&mut changes)).await?;
                }
                if let Some(given) = given {
                    changes.push(allotments.allocation_change(&id, &given)?);
                    leading.store.write_if_unchanged(&changes, &allotments.unchanged_keys()).await?;
                } else {
                    leading.store.write(&changes).await?;
                }
                let (before, now) = (model::node_role::join_names(node.roles.names()), changed.roles.names());
                tracing::info!(
                    node = %id, actor = %caller.peer, before, roles = model::node_role::join_names(now), "roles were changed"
                );
            }
            Ok(changed)
        });
        Ok(Response::new(wire::UpdateRolesResponse { node: Some(node.await?.to_wire()) }))
    }

    async fn update_labels(
        &self,
        request: Request<wire::UpdateLabelsRequest>,
    ) -> Result<Response<wire::UpdateLabelsResponse>, Status> {
        let body = request.into_inner();
        let id = parse_node_id(&body.node_id)?;
        let changed = self.update_node(id, |known| {
            let known = known.ok_or(LifecycleError::Unknown(id))?;
            let labels = node_labels::apply_label_changes(&known.labels, &body.set, &body.remove)?;
            if labels == known.labels {
                return Ok(NodeUpdate::Unchanged(known.clone()));
            }
            Ok(NodeUpdate::Changed(Node { labels, ..known.clone() }))
        });
        Ok(Response::new(wire::UpdateLabelsResponse { node: Some(changed.await?.to_wire()) }))
    }

    async fn decommission(
        &self,
        request: Request<wire::DecommissionRequest>,
    ) -> Result<Response<wire::DecommissionResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let id = parse_node_id(&request.get_ref().node_id)?;
        let now = self.0.clock.now();
        let node = {
            let _alone = self.0.lock_membership().await;
            self.update_node(id, |known| Ok(node_lifecycle::decommission_node(known, id, now)?)).await?
        };
        tracing::warn!(node = %id, actor = %caller.peer, "a node was decommissioned");
        self.0
            .wait_until_cached(|seen| {
                seen.nodes.get(&id).is_none_or(|node| node.state == NodeState::Decommissioned)
            })
            .await?;
        Ok(Response::new(wire::DecommissionResponse { node: Some(node.to_wire()) }))
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteRequest>,
    ) -> Result<Response<wire::DeleteResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let body = request.into_inner();
        let id = parse_node_id(&body.node_id)?;
        let bypass = DeleteBypass {
            has_roles: body.bypass_has_roles,
            not_decommissioned: body.bypass_not_decommissioned,
        };
        let leading = &self.0;
        {
            let _alone = leading.lock_membership().await;
            let deleted = leading.store.retry_on_conflict(|| async {
                let members = leading.list_members().await?;
                let stored = leading.store.nodes().await?;
                let step = node_lifecycle::plan_node_deletion(
                    stored.nodes.get(&id),
                    id,
                    bypass,
                    &members,
                    &stored.nodes,
                )?;
                if let Some(step) = step {
                    Box::pin(leading.check_member_removal(id, &members, &stored.nodes)).await?;
                    leading.change_members(&step).await?;
                }
                let expected = stored
                    .revisions
                    .get(&id)
                    .map_or(ExpectedRevision::Absent, |at| ExpectedRevision::At(*at));
                let mut changes = vec![
                    KeyChange::Delete { key: Node::etcd_key(&id)?, expected },
                    KeyChange::Delete {
                        key: Revocation::Node(id).etcd_key()?,
                        expected: ExpectedRevision::Any,
                    },
                    KeyChange::Delete {
                        key: NodeAllocation::etcd_key(&id)?,
                        expected: ExpectedRevision::Any,
                    },
                ];
                let known = stored.nodes.get(&id);
                if body.start_rotation && known.is_some_and(|node| ends_membership(node, None)) {
                    Box::pin(leading.add_rotation_after_removal(&mut changes)).await?;
                }
                leading.store.write(&changes).await
            });
            deleted.await?;
        }
        tracing::warn!(node = %id, actor = %caller.peer, ?bypass, "a node was deleted");
        leading
            .wait_until_cached(|seen| seen.nodes.get(&id).is_none_or(|node| node.state == NodeState::New))
            .await?;
        Ok(Response::new(wire::DeleteResponse {}))
    }

    async fn get_consensus(
        &self,
        _: Request<wire::GetConsensusRequest>,
    ) -> Result<Response<wire::GetConsensusResponse>, Status> {
        let members = self.0.list_members().await?;
        let client = self.0.store.client();
        let status = client.database_status().await.map_err(ServiceError::from)?;
        let quota = read_optional(client.database_quota(), QUOTA_TIMEOUT).await;
        let stored = self.0.store.nodes().await?;
        let owners = match_members_to_nodes(&members, &stored.nodes);
        let node_of = |member: u64| {
            owners.by_node.iter().find(|(_, owned)| owned.id == member).map(|(node, _)| node.to_string())
        };
        let members = members.iter().map(|member| wire::EtcdMember {
            member_id: member.id,
            node_id: node_of(member.id).unwrap_or_default(),
            peer_urls: member.peer_urls.clone(),
            learner: member.learner,
            started: member.has_started(),
            reachable: member.reachable,
        });
        Ok(Response::new(wire::GetConsensusResponse {
            members: members.collect(),
            database_bytes: status.file_bytes,
            has_space_alarm: status.has_space_alarm,
            quota_bytes: quota.unwrap_or_default(),
        }))
    }

    async fn rotate_authority(
        &self,
        request: Request<wire::RotateAuthorityRequest>,
    ) -> Result<Response<wire::RotateAuthorityResponse>, Status> {
        let caller = Caller::from_request(&request)?;
        let wire::RotateAuthorityRequest { cluster_id: named, replaces } = request.into_inner();
        let own = self.0.cluster.id.to_string();
        if named != own {
            return Err(ServiceError::invalid_argument(format!(
                "the request names cluster {named:?}, and this is cluster {own}: is the address right?"
            ))
            .into());
        }
        if !replaces.is_empty() && replaces != self.0.authority().anchor().fingerprint() {
            return Err(ServiceError::rejected(
                Code::FailedPrecondition,
                "the authority that the request names does not sign any more: it was replaced already",
            )
            .into());
        }
        self.0.begin_replacement().await.map_err(explain_unavailable)?;
        tracing::warn!(actor = %caller.peer, "the authority of the cluster is being replaced");
        let rotation = self.0.describe_replacement().await?;
        Ok(Response::new(wire::RotateAuthorityResponse { rotation }))
    }
}

/// The value that `read` finds; `None` if it finds none, fails, or takes longer than `limit`.
async fn read_optional<T, E>(
    read: impl Future<Output = Result<Option<T>, E>> + Send,
    limit: Duration,
) -> Option<T> {
    tokio::time::timeout(limit, read).await.ok()?.ok()?
}

fn parse_roles(names: &[String]) -> Result<BTreeSet<NodeRole>, ServiceError> {
    let parsed = names.iter().map(|name| name.parse::<NodeRole>());
    parsed
        .collect::<Result<_, RoleNameError>>()
        .map_err(|error| ServiceError::invalid_argument(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn value_that_fails_or_takes_too_long_is_left_out() {
        let never = std::future::pending::<Result<Option<u64>, ()>>();
        assert_eq!(read_optional(never, Duration::ZERO).await, None);
        for (found, expected) in [(Ok(Some(7)), Some(7)), (Ok(None), None), (Err(()), None)] {
            assert_eq!(read_optional(std::future::ready(found), QUOTA_TIMEOUT).await, expected, "{found:?}");
        }
    }
}
