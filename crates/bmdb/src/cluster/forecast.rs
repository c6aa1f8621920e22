//! Inputs of the cluster forecast (what if): the stored state of a cluster and its candidates.
//!
//! The cluster's curators are not contacted. Their last answer is stored for each machine
//! ([`crate::cluster::record::ClusterMachineRecord`]). So the forecast takes it that they have exactly the declared
//! roles, and that a member of etcd is reachable if its node is healthy.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::cluster::reading::{list_clusters, read_cluster_details};
use crate::cluster::record::{ClusterDetails, ClusterMachineRecord};
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, database_now};
use model::cluster::forecast::{Forecast, ForecastInput, forecast_cluster};
use model::cluster::kubernetes::{CuratorKubernetes, ObservedKubernetes, spec_from_settings};
use model::cluster::node_address::NodeAddresses;
use model::cluster::plan::MachineLocations;
use model::cluster::spec::{ClusterSpec, ClusterSpecChange, JoinApproval};
use model::cluster::state::{
    Cluster, ClusterNode, CuratorAnswer, EtcdMember, NodeHealth, NodeState, ObservedCluster,
};
use model::ids::MachineId;
use model::selector::Selector;
use model::time::between;

/// The forecast of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForecastResult {
    /// Of a cluster that exists.
    Existing(Forecast),
    /// Of a cluster that does not exist, as if it were created.
    Hypothetical(Forecast),
    /// No cluster has that name, and the hypothesis does not describe a new one.
    NoSuchCluster,
}

/// The hypothetical order that a forecast assumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hypothesis {
    /// The assumed change of the specification.
    pub change: ClusterSpecChange,
    /// Selector of the machines; cannot be changed for a cluster that exists.
    pub select: Option<Selector>,
    /// Whether the cluster is assumed to be deleted.
    pub delete: bool,
}

impl Hypothesis {
    /// Specification of a cluster that does not exist yet; `None` if the hypothesis gives no control plane.
    fn new_cluster_spec(&self, name: &str) -> Option<ClusterSpec> {
        Some(ClusterSpec {
            name: name.to_owned(),
            control_plane: self.change.control_plane?,
            workers: 0,
            selector: self.select.clone().unwrap_or_default(),
            roles: BTreeSet::new(),
            approval: JoinApproval::default(),
        })
    }
}

impl Bmdb {
    /// Computes what would become of the cluster of this name if the hypothesis were ordered.
    pub async fn forecast_cluster(
        &self,
        name: &str,
        supposed: &Hypothesis,
    ) -> Result<ForecastResult, BmdbError> {
        let refused = |text: String| order_rejected("INVALID_SPEC", text);
        let new = supposed.new_cluster_spec(name);
        let look = self.transact_read_only_with(name.to_owned(), move |tx, name| {
            Box::pin(async move {
                let found = match list_clusters(tx, Some(name)).await?.pop() {
                    Some(cluster) => Some(read_cluster_details(tx, cluster).await?),
                    None => None,
                };
                Ok((found, database_now(tx).await?))
            })
        });
        let (found, now) = look.await?;
        let is_there = found.is_some();
        if is_there && supposed.select.is_some() {
            let text =
                format!("{name} exists, and the selector of a cluster cannot be changed; omit the selector");
            return Err(refused(text));
        }
        let mut beginning = match (found, new) {
            (Some(found), _) => {
                let last = last_observation(&found);
                let view = match (&found.cluster.observed_at, &found.cluster.unreachable_since) {
                    _ if found.cluster.founded.is_none() || found.cluster.restoring.is_some() => {
                        CuratorAnswer::NotQueried
                    }
                    (_, Some(since)) => {
                        CuratorAnswer::Unreachable(format!("for {} s", between(*since, now).as_secs()))
                    }
                    (None, None) => CuratorAnswer::NotQueried,
                    (Some(_), None) => CuratorAnswer::Observed(last.clone()),
                };
                let (cluster, places) = (found.planning_state(view), found.machine_locations());
                ForecastInput { cluster, last_observed: last, candidates: Vec::new(), locations: places }
            }
            (None, Some(spec)) => ForecastInput {
                cluster: Cluster::new(Uuid::nil(), spec),
                last_observed: ObservedCluster::default(),
                candidates: Vec::new(),
                locations: MachineLocations::new(),
            },
            (None, None) => return Ok(ForecastResult::NoSuchCluster),
        };
        let cluster = &mut beginning.cluster;
        cluster.spec = cluster.spec.apply_change(&supposed.change).map_err(refused)?;
        cluster.deleting |= supposed.delete;
        beginning.candidates = self.cluster_candidates(&beginning.cluster.spec.selector).await?;
        let forecast = forecast_cluster(beginning, now);
        Ok(if is_there { ForecastResult::Existing(forecast) } else { ForecastResult::Hypothetical(forecast) })
    }
}

/// The cluster's nodes as its curators last reported them.
fn last_observation(found: &ClusterDetails) -> ObservedCluster {
    let nodes: Vec<ClusterNode> = found.machines.iter().filter_map(node_from_record).collect();
    let members = nodes.iter().filter(|node| node.is_etcd_member());
    let etcd = members.map(|node| EtcdMember {
        node: Some(node.id.clone()),
        learner: false,
        reachable: node.health == NodeHealth::Healthy,
    });
    let kubernetes = match &found.kubernetes {
        None => ObservedKubernetes::NotQueried,
        Some(line) => match &line.observed {
            Some(known) if known.in_sync => ObservedKubernetes::Present(CuratorKubernetes {
                spec: spec_from_settings(line.desired.spec.to_settings()),
                assigned_bundles: known.assigned_bundles.clone(),
                rotations: known.rotations.clone(),
                api_servers: known.api_servers.clone(),
            }),
            _ => ObservedKubernetes::Absent,
        },
    };
    let declared = found.declarations.iter().filter_map(|declared| {
        let digest = hex::decode(&declared.digest).ok()?.try_into().ok()?;
        Some((declared.role.clone(), digest))
    });
    ObservedCluster {
        etcd_members: etcd.collect(),
        declared_digests: declared.collect(),
        kubernetes,
        nodes,
        is_etcd_full: found.cluster.etcd_full_since.is_some(),
        ..ObservedCluster::default()
    }
}

fn node_from_record(line: &ClusterMachineRecord) -> Option<ClusterNode> {
    let node_record = line.node.as_ref()?;
    let machine: MachineId = line.member.machine;
    Some(ClusterNode {
        id: node_record.id.clone(),
        // A machine whose key is not stored was a node before.
        key: line.member.key().unwrap_or_default(),
        machine: Some(machine),
        state: NodeState::ALL.into_iter().find(|state| state.as_str() == node_record.state)?,
        roles: node_record.roles.iter().cloned().collect(),
        health: match node_record.health.as_str() {
            "healthy" => NodeHealth::Healthy,
            "silent" => NodeHealth::Silent(std::time::Duration::ZERO),
            _ => NodeHealth::Unknown,
        },
        services: line.services.clone(),
        kubernetes: line.kubernetes.clone(),
        addresses: NodeAddresses::default(),
    })
}
