//! What owners order of nodes, and what everybody may ask about the cluster.

use std::collections::BTreeSet;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::curator::credential::Revocation;
use crate::curator::filter::Filter;
use crate::curator::kubernetes::allotment::{self, Allotment};
use crate::curator::labels;
use crate::curator::life_cycle::{self, Bypass, Outcome, Refusal};
use crate::curator::membership::owners;
use crate::curator::node::{Node, State};
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::roles::{Next, Order, evaluate};
use crate::curator::service::failure::Failure;
use crate::curator::service::leader::{Caller, Leading};
use crate::curator::service::nodes::parse_node;
use crate::curator::service::store::put_node;
use crate::etcd::guard::{Change, Expected};
use crate::model::role::{DeclaredRole, Role, RoleNameError};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::management_server;

/// The service.
#[derive(Clone, Debug)]
pub struct ManagementService(pub Arc<Leading>);

impl ManagementService {
    /// Changes one node by a decision about its record alone.
    async fn change(
        &self,
        id: NodeId,
        decide: impl Fn(Option<&Node>) -> Result<Outcome, Failure>,
    ) -> Result<Node, Failure> {
        let store = &self.0.store;
        let changed = store.decide(|| async {
            let known = store.node(&id).await?;
            let outcome = decide(known.as_ref().map(|known| &known.value))?;
            if let Outcome::Changed(node) = &outcome {
                store.write(&[put_node(node, known.as_ref().map(|known| known.revision))?]).await?;
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
        _: Request<wire::GetClusterRequest>,
    ) -> Result<Response<wire::GetClusterResponse>, Status> {
        Ok(Response::new(wire::GetClusterResponse {
            directory: Some(self.0.directory()),
            name: self.0.cluster.name.clone(),
            created_at_ms: self.0.cluster.created_at.timestamp_millis(),
        }))
    }

    async fn list_nodes(
        &self,
        request: Request<wire::ListNodesRequest>,
    ) -> Result<Response<wire::ListNodesResponse>, Status> {
        let filter = Filter::new(request.get_ref()).map_err(Failure::invalid)?;
        let stored = self.0.store.nodes().await?;
        let (heard, now) = (self.0.heartbeats(), self.0.clock.running());
        let nodes = stored.nodes.values().filter_map(|node| {
            let health = heard.health(node, now);
            let shown = filter.shows(node, health);
            shown.then(|| wire::ListedNode { node: Some(node.to_wire()), health: Some(health.to_wire()) })
        });
        Ok(Response::new(wire::ListNodesResponse { nodes: nodes.collect() }))
    }

    async fn approve(
        &self,
        request: Request<wire::ApproveRequest>,
    ) -> Result<Response<wire::ApproveResponse>, Status> {
        let caller = Caller::of(&request)?;
        let key = PublicKey::from_slice(&request.get_ref().public_key).map_err(Failure::invalid)?;
        let id = NodeId::of(&key);
        let now = self.0.clock.now();
        let node = self.change(id, |known| Ok(life_cycle::approve(known, &key, now)?)).await?;
        tracing::info!(node = %id, by = %caller.peer, "a node was approved");
        Ok(Response::new(wire::ApproveResponse { node: Some(node.to_wire()) }))
    }

    async fn update_roles(
        &self,
        request: Request<wire::UpdateRolesRequest>,
    ) -> Result<Response<wire::UpdateRolesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let id = parse_node(&asked.node_id)?;
        let order = Order { give: roles(&asked.give)?, take: roles(&asked.take)? };
        let leading = &self.0;
        let _alone = leading.membership().await;
        let node = leading.store.decide(|| async {
            // Members first, as membership::sync wants it.
            let mut members = leading.members().await?;
            let stored = leading.store.nodes().await?;
            let node = stored.nodes.get(&id).ok_or(Refusal::Unknown(id))?;
            let declared: BTreeSet<DeclaredRole> =
                leading.store.declarations().await?.iter().map(|kept| kept.value.role().clone()).collect();
            let plan = evaluate(node, &order, &members, &stored.nodes, &declared)?;
            let settings = leading.store.kubernetes().await?.map(|stored| stored.value);
            let allotments = leading.store.allotments().await?;
            let given = allotment::given(node, &order, settings.as_ref(), &allotments.all)?;
            let mut made = false;
            let changed = loop {
                match plan.next(made, node, &members, &stored.nodes)? {
                    Next::Membership(step) => {
                        leading.step(&step).await?;
                        members = leading.members().await?;
                        made = true;
                    }
                    Next::Record(changed) => break *changed,
                }
            };
            if changed != *node {
                let mut changes = vec![put_node(&changed, stored.revisions.get(&id).copied())?];
                if let Some(given) = given {
                    changes.push(allotments.put(&id, &given)?);
                    leading.store.write_while(&changes, &allotments.unchanged()).await?;
                } else {
                    leading.store.write(&changes).await?;
                }
                let (before, now) = (crate::model::role::told(node.roles.names()), changed.roles.names());
                tracing::info!(
                    node = %id, by = %caller.peer, before, now = crate::model::role::told(now), "roles were changed"
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
        let asked = request.into_inner();
        let id = parse_node(&asked.node_id)?;
        let changed = self.change(id, |known| {
            let known = known.ok_or(Refusal::Unknown(id))?;
            let labels = labels::change(&known.labels, &asked.set, &asked.remove)?;
            if labels == known.labels {
                return Ok(Outcome::Unchanged(known.clone()));
            }
            Ok(Outcome::Changed(Node { labels, ..known.clone() }))
        });
        Ok(Response::new(wire::UpdateLabelsResponse { node: Some(changed.await?.to_wire()) }))
    }

    async fn decommission(
        &self,
        request: Request<wire::DecommissionRequest>,
    ) -> Result<Response<wire::DecommissionResponse>, Status> {
        let caller = Caller::of(&request)?;
        let id = parse_node(&request.get_ref().node_id)?;
        let now = self.0.clock.now();
        let node = {
            let _alone = self.0.membership().await;
            self.change(id, |known| Ok(life_cycle::decommission(known, id, now)?)).await?
        };
        tracing::warn!(node = %id, by = %caller.peer, "a node was decommissioned");
        self.0
            .until_seen(|seen| seen.nodes.get(&id).is_none_or(|node| node.state == State::Decommissioned))
            .await?;
        Ok(Response::new(wire::DecommissionResponse { node: Some(node.to_wire()) }))
    }

    async fn delete(
        &self,
        request: Request<wire::DeleteRequest>,
    ) -> Result<Response<wire::DeleteResponse>, Status> {
        let caller = Caller::of(&request)?;
        let asked = request.into_inner();
        let id = parse_node(&asked.node_id)?;
        let bypass =
            Bypass { has_roles: asked.bypass_has_roles, not_decommissioned: asked.bypass_not_decommissioned };
        let leading = &self.0;
        {
            let _alone = leading.membership().await;
            let deleted = leading.store.decide(|| async {
                let members = leading.members().await?;
                let stored = leading.store.nodes().await?;
                let step = life_cycle::delete(stored.nodes.get(&id), id, bypass, &members, &stored.nodes)?;
                if let Some(step) = step {
                    leading.step(&step).await?;
                }
                let expected = stored.revisions.get(&id).map_or(Expected::Absent, |at| Expected::At(*at));
                let changes = [
                    Change::Delete { key: Node::etcd_key(&id)?, expected },
                    Change::Delete { key: Revocation::Node(id).etcd_key()?, expected: Expected::Anything },
                    Change::Delete { key: Allotment::etcd_key(&id)?, expected: Expected::Anything },
                ];
                leading.store.write(&changes).await
            });
            deleted.await?;
        }
        tracing::warn!(node = %id, by = %caller.peer, ?bypass, "a node was deleted");
        leading.until_seen(|seen| seen.nodes.get(&id).is_none_or(|node| node.state == State::New)).await?;
        Ok(Response::new(wire::DeleteResponse {}))
    }

    async fn get_consensus(
        &self,
        _: Request<wire::GetConsensusRequest>,
    ) -> Result<Response<wire::GetConsensusResponse>, Status> {
        let members = self.0.members().await?;
        let stored = self.0.store.nodes().await?;
        let owners = owners(&members, &stored.nodes);
        let node_of = |member: u64| {
            owners.of_node.iter().find(|(_, owned)| owned.id == member).map(|(node, _)| node.to_string())
        };
        let members = members.iter().map(|member| wire::EtcdMember {
            member_id: member.id,
            node_id: node_of(member.id).unwrap_or_default(),
            peer_urls: member.peer_urls.clone(),
            learner: member.learner,
            started: member.started(),
            reachable: member.reachable,
        });
        Ok(Response::new(wire::GetConsensusResponse { members: members.collect() }))
    }
}

fn roles(names: &[String]) -> Result<BTreeSet<Role>, Failure> {
    let parsed = names.iter().map(|name| name.parse::<Role>());
    parsed.collect::<Result<_, RoleNameError>>().map_err(|error| Failure::invalid(error.to_string()))
}
