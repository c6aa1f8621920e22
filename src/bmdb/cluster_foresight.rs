//! What a cluster's course is foreseen from: what the BMDB knows of it, and the machines that are free.
//!
//! Its curators are not asked. What they said last is kept for each machine ([`crate::bmdb::cluster::MachineLine`]), so that
//! what they have of roles is taken to be what was declared, and a member of etcd to be reached where its node is heard.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::bmdb::cluster::{ClusterAndMachines, MachineLine, clusters, with_all};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::model::cluster::foresee::{Beginning, Foreseen, foresee};
use crate::model::cluster::kubernetes::{Has, Known, told};
use crate::model::cluster::plan::Places;
use crate::model::cluster::selector::Selector;
use crate::model::cluster::spec::{Approval, Change, Spec};
use crate::model::cluster::state::{Cluster, EtcdMember, Health, Node, NodeState, Seen, View};
use crate::model::ids::MachineId;
use crate::model::time::between;

/// What is foreseen of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foresight {
    /// Of one that there is.
    Of(Foreseen),
    /// Of one that there is not, if it was asked for.
    IfAskedFor(Foreseen),
    /// There is none of that name, and it was not said what it would be.
    NoSuch,
}

/// What is supposed of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Supposed {
    /// What it is to be.
    pub change: Change,
    /// Which machines may be chosen; of one that there is nobody changes that.
    pub select: Option<Selector>,
    /// Whether it is to end.
    pub delete: bool,
}

impl Supposed {
    /// A cluster that there is not, as it would be asked for; none where nothing is said of it.
    fn spec(&self, name: &str) -> Option<Spec> {
        Some(Spec {
            name: name.to_owned(),
            control_plane: self.change.control_plane?,
            workers: 0,
            selector: self.select.clone().unwrap_or_default(),
            roles: BTreeSet::new(),
            approval: Approval::default(),
        })
    }
}

impl Bmdb {
    /// What becomes of a cluster of this name if what is supposed of it was ordered.
    pub async fn foresee_cluster(&self, name: &str, supposed: &Supposed) -> Result<Foresight, BmdbError> {
        let refused = |said: String| BmdbError::OrderRefused { reason: "NO_SUCH_CLUSTER", said };
        let new = supposed.spec(name);
        let asked = name.to_owned();
        let look = self.inspect(move |tx| {
            let name = asked.clone();
            Box::pin(async move {
                let found = match clusters(tx, Some(&name)).await?.pop() {
                    Some(cluster) => Some(with_all(tx, cluster).await?),
                    None => None,
                };
                Ok((found, inspect::now(tx).await?))
            })
        });
        let (found, now) = look.await?;
        let is_there = found.is_some();
        if is_there && supposed.select.is_some() {
            let said = format!(
                "{name} is there, and what its machines are selected by is not changed; leave that out"
            );
            return Err(refused(said));
        }
        let mut beginning = match (found, new) {
            (Some(found), _) => {
                let last = seen_last(&found);
                let view = match (&found.cluster.seen_at, &found.cluster.away_since) {
                    _ if found.cluster.founded.is_none() || found.cluster.restoring.is_some() => View::Nobody,
                    (_, Some(since)) => View::Away(format!("for {} s", between(*since, now).as_secs())),
                    (None, None) => View::Nobody,
                    (Some(_), None) => View::Seen(last.clone()),
                };
                let (cluster, places) = (found.cluster(view), found.places());
                Beginning { cluster, last, candidates: Vec::new(), places }
            }
            (None, Some(spec)) => Beginning {
                cluster: Cluster::asked_for(Uuid::nil(), spec),
                last: Seen::default(),
                candidates: Vec::new(),
                places: Places::new(),
            },
            (None, None) => return Ok(Foresight::NoSuch),
        };
        let cluster = &mut beginning.cluster;
        cluster.spec = cluster.spec.with(&supposed.change).map_err(refused)?;
        cluster.deleting |= supposed.delete;
        beginning.candidates = self.cluster_candidates(&beginning.cluster.spec.selector).await?;
        let foreseen = foresee(beginning, now);
        Ok(if is_there { Foresight::Of(foreseen) } else { Foresight::IfAskedFor(foreseen) })
    }
}

/// Its nodes as its curators said last.
fn seen_last(found: &ClusterAndMachines) -> Seen {
    let nodes: Vec<Node> = found.machines.iter().filter_map(node).collect();
    let members = nodes.iter().filter(|node| node.is_member());
    let etcd = members.map(|node| EtcdMember {
        node: Some(node.id.clone()),
        learner: false,
        reachable: node.health == Health::Healthy,
    });
    let kubernetes = match &found.kubernetes {
        None => Known::NotAsked,
        Some(line) => match &line.known {
            Some(known) if known.told => Known::Has(Has {
                settings: told(line.wanted.kubernetes.settings()),
                assigned: known.assigned.clone(),
                rotations: known.rotations.clone(),
                api_servers: known.api_servers.clone(),
            }),
            _ => Known::Nothing,
        },
    };
    let declared = found.declarations.iter().filter_map(|declared| {
        let digest = hex::decode(&declared.digest).ok()?.try_into().ok()?;
        Some((declared.role.clone(), digest))
    });
    Seen { etcd: etcd.collect(), declared: declared.collect(), kubernetes, nodes }
}

fn node(line: &MachineLine) -> Option<Node> {
    let said = line.node.as_ref()?;
    let machine: MachineId = line.member.machine;
    Some(Node {
        id: said.id.clone(),
        // Whoever has none was a node before.
        key: line.member.key().unwrap_or_default(),
        machine: Some(machine),
        state: NodeState::ALL.into_iter().find(|state| state.as_str() == said.state)?,
        roles: said.roles.iter().cloned().collect(),
        health: match said.health.as_str() {
            "healthy" => Health::Healthy,
            "silent" => Health::Silent(std::time::Duration::ZERO),
            _ => Health::Unknown,
        },
        services: line.services.clone(),
        kubernetes: line.kubernetes.clone(),
    })
}
