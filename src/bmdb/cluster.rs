//! Clusters as the BMDB has them, and the orders about them.
//!
//! What is wanted is written here, by operators; what becomes of it is written by whoever holds the cluster's lease
//! (`cluster_work.rs`). An order only changes what is wanted: nothing is chosen, asked or ended in its transaction.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster_candidates::hardware;
use crate::bmdb::cluster_declaration::declarations;
use crate::bmdb::cluster_kubernetes::{self, KubernetesLine, Wish, kubernetes_of};
use crate::bmdb::cluster_upgrade::{self, UpgradeLine, upgrade_of};
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::model::cluster::declared::{DeclarationView, Declared, ServiceView};
use crate::model::cluster::hardware::Hardware;
use crate::model::cluster::kubernetes::OnNode;
use crate::model::cluster::plan::Places;
use crate::model::cluster::snapshot::{LastSnapshot, Snapshots};
use crate::model::cluster::spec::{Change, Part, Spec};
use crate::model::cluster::state::{Asked, Cluster, Founded, Member, Report, Restoring, View, Wanted};
use crate::model::cluster::view::{ClusterMachineView, ClusterView, PartOfCluster, RESTORING, stage};
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::time::Timestamp;

const WHAT: &str = "reading clusters";
/// What orders about clusters are about, for people.
#[must_use]
pub fn target(name: &str) -> String {
    format!("the cluster {name}")
}

/// A cluster with everything that is known of it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterLine {
    /// Its id.
    pub id: Uuid,
    /// What it is to be.
    pub spec: Spec,
    /// Grows with every change of that.
    pub version: i64,
    /// When it was asked for.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// Since when it is to end, and who says so.
    pub deleting: Option<(Timestamp, String)>,
    /// By what it is known, once it is founded.
    pub founded: Option<Founded>,
    /// When a shepherd last looked at it.
    pub looked_at: Option<Timestamp>,
    /// When its curators last answered.
    pub seen_at: Option<Timestamp>,
    /// Since when they have been asked without a pause, and not answered.
    pub away_since: Option<Timestamp>,
    /// What it waits for as a whole.
    pub waits: Vec<String>,
    /// Whether it was as it is to be when a shepherd last looked.
    pub settled: bool,
    /// Members of etcd that vote, and how many of them were reached.
    pub voters: Option<(i64, i64)>,
    /// Its snapshots.
    pub snapshots: Snapshots,
    /// How often it was restored from one, or is to have been.
    pub epoch: u64,
    /// When it was restored last.
    pub restored_at: Option<Timestamp>,
    /// Whether it is being restored.
    pub restoring: Option<Restoring>,
    /// From which snapshot.
    pub restoring_from: Option<Uuid>,
    /// As whom.
    pub restoring_by: Option<String>,
    /// Since when the shepherd's key for it is in force, once it is founded.
    pub key_since: Option<Timestamp>,
    /// Who wants that replaced.
    pub key_asked_by: Option<String>,
    /// Since when its curators refuse every key that the shepherd has.
    pub keys_refused_since: Option<Timestamp>,
}

/// A machine of a cluster with everything that is known of it there.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineLine {
    /// What decisions need.
    pub member: Member,
    /// Where it stands.
    pub location: Option<String>,
    /// Its hardware, as far as it is known.
    pub hardware: Hardware,
    /// What it waits for.
    pub waits: Option<String>,
    /// Its node, as the curator said at `seen_at`.
    pub node: Option<NodeLine>,
    /// When its curator last answered.
    pub seen_at: Option<Timestamp>,
    /// What its node runs of operators' roles, as it said last.
    pub services: Vec<ServiceView>,
    /// What its node runs of Kubernetes, as it said last.
    pub kubernetes: Option<OnNode>,
}

/// A node as it was last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLine {
    /// Its id.
    pub id: String,
    /// `new`, `standby`, `up` or `decommissioned`.
    pub state: String,
    /// Its roles.
    pub roles: Vec<String>,
    /// `healthy`, `silent` or `unknown`.
    pub health: String,
}

/// A cluster and its machines.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterAndMachines {
    /// It.
    pub cluster: ClusterLine,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<MachineLine>,
    /// Roles that were declared to it, in order of their names.
    pub declarations: Vec<DeclarationView>,
    /// Keys of nodes that left it, as far back as its snapshots go.
    pub left: BTreeSet<[u8; 32]>,
    /// What it is to run of Kubernetes.
    pub kubernetes: Option<KubernetesLine>,
    /// The upgrade that is under way, or else the newest one.
    pub upgrade: Option<UpgradeLine>,
}

impl ClusterAndMachines {
    /// What decisions about it need, with what is known of its nodes.
    #[must_use]
    pub fn cluster(&self, view: View) -> Cluster {
        let cluster = &self.cluster;
        Cluster {
            id: cluster.id,
            spec: cluster.spec.clone(),
            deleting: cluster.deleting.is_some(),
            founded: cluster.founded.clone(),
            epoch: cluster.epoch,
            restored_at: cluster.restored_at,
            restoring: cluster.restoring.clone(),
            declared: self.declarations.iter().filter_map(declared).collect(),
            kubernetes: self.kubernetes.as_ref().map(|line| line.wanted.clone()),
            upgrade: (self.upgrade.as_ref())
                .filter(|line| line.ended.is_none())
                .map(|line| line.upgrade.clone()),
            members: self.machines.iter().map(|line| line.member.clone()).collect(),
            left: self.left.clone(),
            view,
        }
    }

    /// Where its machines stand.
    #[must_use]
    pub fn places(&self) -> Places {
        self.machines.iter().map(|line| (line.member.machine, line.location.clone())).collect()
    }
}

/// A role as it is to be declared.
fn declared(kept: &DeclarationView) -> Option<Declared> {
    // The database holds 32 bytes.
    let digest = hex::decode(&kept.digest).ok()?.try_into().ok()?;
    Some(Declared { role: kept.role.clone(), digest, withdrawn: kept.withdrawn })
}

fn corrupt(what: &str, name: &str, error: impl std::fmt::Display) -> BmdbError {
    BmdbError::Corrupt(format!("the {what} of cluster {name:?}: {error}"))
}

fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// Columns of what a cluster is to be.
struct SpecColumns {
    name: String,
    control_plane: i64,
    workers: i64,
    selector: String,
    roles: Value,
    approval: String,
}

impl SpecColumns {
    fn read(self) -> Result<Spec, BmdbError> {
        let count = |what, count: i64| u32::try_from(count).map_err(|error| corrupt(what, &self.name, error));
        Ok(Spec {
            control_plane: count("control plane", self.control_plane)?,
            workers: count("number of workers", self.workers)?,
            selector: self.selector.parse().map_err(|error| corrupt("selector", &self.name, error))?,
            roles: strings(&self.roles).into_iter().collect(),
            approval: self.approval.parse().map_err(|error| corrupt("approval", &self.name, error))?,
            name: self.name,
        })
    }
}

/// Every cluster, or the one of that name, in order of their names.
pub async fn clusters(tx: &mut PgConnection, name: Option<&str>) -> Result<Vec<ClusterLine>, BmdbError> {
    let rows = sqlx::query_file!("sql/cluster/list.sql", name).fetch_all(tx).await.doing(WHAT)?;
    rows.into_iter()
        .map(|row| {
            let founded = match (row.founded_at, row.ca_certificate, row.curators) {
                (Some(at), Some(ca_certificate), Some(curators)) => {
                    Some(Founded { ca_certificate, curators: strings(&curators), at })
                }
                _ => None,
            };
            let spec = SpecColumns {
                name: row.name,
                control_plane: row.control_plane,
                workers: row.workers,
                selector: row.selector,
                roles: row.roles,
                approval: row.approval,
            };
            Ok(ClusterLine {
                id: row.cluster_id,
                spec: spec.read()?,
                version: row.version,
                created_at: row.created_at,
                created_by: row.created_by,
                deleting: row.deleting_at.zip(row.deleting_by),
                founded,
                looked_at: row.looked_at,
                seen_at: row.seen_at,
                away_since: row.away_since,
                waits: strings(&row.waits),
                settled: row.settled,
                voters: row.voters.zip(row.voters_reached),
                snapshots: Snapshots {
                    last: match (row.snapshot_id, row.taken_at, row.snapshot_voters) {
                        (Some(id), Some(at), Some(voters)) => {
                            Some(LastSnapshot { id, at, voters: strings(&voters).into_iter().collect() })
                        }
                        _ => None,
                    },
                    asked: row.snapshot_asked_at,
                },
                epoch: row.epoch.try_into().unwrap_or(0),
                restored_at: row.restored_at,
                restoring: row.restoring_since.map(|since| Restoring {
                    since,
                    onto: row.restoring_onto.map(MachineId),
                    digest: row.from_digest.and_then(|digest| digest.try_into().ok()),
                }),
                restoring_from: row.restoring_from,
                restoring_by: row.restoring_by,
                key_since: row.key_since,
                key_asked_by: row.key_asked_by,
                keys_refused_since: row.keys_refused_since,
            })
        })
        .collect()
}

/// The machines of a cluster, in the order in which they were chosen.
pub async fn machines(tx: &mut PgConnection, cluster: Uuid) -> Result<Vec<MachineLine>, BmdbError> {
    let rows = sqlx::query_file!("sql/cluster/list_machines.sql", cluster).fetch_all(tx).await.doing(WHAT)?;
    rows.into_iter()
        .map(|row| {
            let machine = MachineId(row.machine_id);
            let odd = |error: &dyn std::fmt::Display| {
                BmdbError::Corrupt(format!("machine {machine} in its cluster: {error}"))
            };
            let asked = match (row.what, row.asked, row.ordered_at) {
                (Some(what), Some(generation), Some(at)) => {
                    Some(Asked { what: what.parse::<Wanted>().map_err(|error| odd(&error))?, generation, at })
                }
                _ => None,
            };
            let report = row.reported.map(|generation| Report {
                generation,
                key: row.node_key.and_then(|key| key.try_into().ok()),
                ca_certificate: row.ca_certificate,
                address: row.address,
                error: row.error,
                epoch: row.epoch.and_then(|epoch| epoch.try_into().ok()).unwrap_or(0),
            });
            let node = row.node_id.map(|id| NodeLine {
                id,
                state: row.node_state.unwrap_or_default(),
                roles: row.roles.as_ref().map(strings).unwrap_or_default(),
                health: row.health.unwrap_or_default(),
            });
            Ok(MachineLine {
                member: Member {
                    machine,
                    name: row.provider_id.unwrap_or_else(|| machine.to_string()),
                    part: row.part.parse::<Part>().map_err(|error| odd(&error))?,
                    chosen_at: row.chosen_at,
                    approved: row.approved.and_then(|key| key.try_into().ok()),
                    leaving: row.leaving,
                    asked,
                    report,
                    phase: row.phase.parse::<Phase>().map_err(|error| odd(&error))?,
                    retiring: row.retiring,
                },
                location: row.location,
                hardware: hardware(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads),
                waits: row.waits,
                node,
                seen_at: row.seen_at,
                // What another release wrote is shown again with the next look.
                services: row.services.and_then(|said| serde_json::from_value(said).ok()).unwrap_or_default(),
                kubernetes: row.kubernetes.and_then(|said| serde_json::from_value(said).ok()),
            })
        })
        .collect()
}

/// What a machine is in its cluster, if it is in one.
pub(crate) async fn part_of(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<PartOfCluster>, BmdbError> {
    let row = sqlx::query_file!("sql/cluster/read_membership_of_machine.sql", machine.0)
        .fetch_optional(tx)
        .await
        .doing(WHAT)?;
    Ok(row.map(|row| PartOfCluster {
        name: row.name,
        part: row.part,
        leaving: row.leaving,
        waits: row.waits,
        health: row.health,
        kubernetes: row.kubernetes.and_then(|said| serde_json::from_value::<OnNode>(said).ok()),
    }))
}

/// A cluster as people see it.
#[must_use]
pub fn view(found: &ClusterAndMachines) -> ClusterView {
    let ClusterAndMachines { cluster, machines, declarations, kubernetes, upgrade, .. } = found;
    let (deleting, founded) = (cluster.deleting.is_some(), cluster.founded.is_some());
    let stage = match &cluster.restoring {
        Some(_) if !deleting => RESTORING,
        _ => stage(deleting, founded, machines.len(), cluster.settled),
    };
    let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    ClusterView {
        name: cluster.spec.name.clone(),
        id: cluster.id.to_string(),
        stage: stage.to_owned(),
        control_plane: cluster.spec.control_plane,
        workers: cluster.spec.workers,
        select: cluster.spec.selector.to_string(),
        roles: cluster.spec.roles.iter().cloned().collect(),
        approval: cluster.spec.approval.as_str().to_owned(),
        created_at: cluster.created_at,
        created_by: cluster.created_by.clone(),
        deleting_by: cluster.deleting.as_ref().map(|(_, by)| by.clone()),
        curators: cluster.founded.as_ref().map(|founded| founded.curators.clone()).unwrap_or_default(),
        seen_at: cluster.seen_at,
        voters: cluster.voters.map(|(voters, _)| count(voters)),
        voters_reached: cluster.voters.map(|(_, reached)| count(reached)),
        snapshot_at: cluster.snapshots.last.as_ref().map(|last| last.at),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at,
        restoring_from: cluster.restoring_from.map(|id| id.to_string()),
        restoring_by: cluster.restoring_by.clone(),
        key_since: cluster.key_since,
        key_asked_by: cluster.key_asked_by.clone(),
        keys_refused_since: cluster.keys_refused_since,
        waits: cluster.waits.clone(),
        machines: machines.iter().map(machine_view).collect(),
        declarations: declarations.clone(),
        kubernetes: kubernetes.as_ref().map(cluster_kubernetes::view),
        upgrade: upgrade.as_ref().map(cluster_upgrade::view),
    }
}

fn machine_view(line: &MachineLine) -> ClusterMachineView {
    let (member, node) = (&line.member, line.node.as_ref());
    ClusterMachineView {
        machine: member.machine.to_string(),
        name: member.name.clone(),
        part: member.part.to_string(),
        location: line.location.clone(),
        phase: member.phase.to_string(),
        node: node.map(|node| node.id.clone()),
        state: node.map(|node| node.state.clone()),
        health: node.map(|node| node.health.clone()),
        roles: node.map(|node| node.roles.clone()).unwrap_or_default(),
        leaving: member.leaving.clone(),
        waits: line.waits.clone(),
        services: line.services.clone(),
        kubernetes: line.kubernetes.clone(),
    }
}

/// Every cluster, or the one of that name, with its machines, and when that was read.
pub async fn with_machines(
    tx: &mut PgConnection,
    name: Option<&str>,
) -> Result<(Vec<ClusterAndMachines>, Timestamp), BmdbError> {
    let mut found = Vec::new();
    for cluster in clusters(tx, name).await? {
        found.push(with_all(tx, cluster).await?);
    }
    Ok((found, inspect::now(tx).await?))
}

/// A cluster with its machines and what was declared to it.
pub(crate) async fn with_all(
    tx: &mut PgConnection,
    cluster: ClusterLine,
) -> Result<ClusterAndMachines, BmdbError> {
    let machines = machines(tx, cluster.id).await?;
    let declarations = declarations(tx, cluster.id).await?;
    let keys = sqlx::query_file_scalar!("sql/cluster/list_left_node_keys.sql", cluster.id)
        .fetch_all(&mut *tx)
        .await
        .doing(WHAT)?;
    let left = keys.into_iter().filter_map(|key| key.try_into().ok()).collect();
    let kubernetes = kubernetes_of(tx, cluster.id).await?;
    let upgrade = upgrade_of(tx, cluster.id).await?;
    Ok(ClusterAndMachines { cluster, machines, declarations, left, kubernetes, upgrade })
}

impl Bmdb {
    /// Asks for a cluster.
    pub async fn create_cluster(
        &self,
        order: Order,
        spec: Spec,
        kubernetes: Option<Wish>,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("asking for a cluster", move |tx| {
                let (order, spec, kubernetes) = (order.clone(), spec.clone(), kubernetes.clone());
                Box::pin(async move { create(tx, &order, &spec, kubernetes.as_ref()).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Changes what a cluster is to be.
    pub async fn change_cluster(
        &self,
        order: Order,
        name: String,
        change: Change,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("changing a cluster", move |tx| {
                let (order, name, change) = (order.clone(), name.clone(), change.clone());
                Box::pin(async move { alter(tx, &order, &name, &change).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Lets the key in that a machine of a cluster reports now.
    pub async fn approve_in_cluster(
        &self,
        order: Order,
        name: String,
        machine: String,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("letting a machine into a cluster", move |tx| {
                let (order, name, machine) = (order.clone(), name.clone(), machine.clone());
                Box::pin(async move { approve(tx, &order, &name, &machine).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// Ends a cluster: its machines leave it, and it is forgotten.
    pub async fn delete_cluster(&self, order: Order, name: String) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered("ending a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { delete(tx, &order, &name).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }
}

async fn create(
    tx: &mut PgConnection,
    order: &Order,
    spec: &Spec,
    kubernetes: Option<&Wish>,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    spec.check().map_err(|said| BmdbError::OrderRefused { reason: "NO_SUCH_CLUSTER", said })?;
    let kubernetes = match kubernetes {
        Some(wish) => Some(cluster_kubernetes::wanted(tx, &spec.name, None, wish).await?),
        None => None,
    };
    begin_attempt(tx, order).await?;
    let made = sqlx::query_file_scalar!(
        "sql/cluster/insert.sql",
        Uuid::new_v4(),
        spec.name,
        i64::from(spec.control_plane),
        i64::from(spec.workers),
        spec.selector.to_string(),
        json!(spec.roles),
        spec.approval.as_str(),
        order.actor.name
    )
    .fetch_optional(&mut *tx)
    .await
    .doing("asking for a cluster")?;
    let Some(made) = made else {
        let said = format!(
            "{} exists already; give another name, or change it with: shepherdctl cluster scale {}",
            target(&spec.name),
            spec.name
        );
        return Err(BmdbError::OrderRefused { reason: "CLUSTER_EXISTS", said });
    };
    if let Some(kubernetes) = &kubernetes {
        cluster_kubernetes::keep(tx, made, kubernetes, &order.actor.name).await?;
    }
    end_attempt(tx, order).await?;
    let said = format!(
        "is asked for: {}, {}{} from machines that {}; watch it with: shepherdctl cluster describe {}",
        many(spec.control_plane, "member of the control plane", "members of the control plane"),
        many(spec.workers, "worker", "workers"),
        kubernetes.as_ref().map(|k| format!(" with Kubernetes {}", k.version)).unwrap_or_default(),
        fit(spec),
        spec.name
    );
    let mut after = told(spec);
    if let Some(kubernetes) = &kubernetes {
        after["kubernetes"] = cluster_kubernetes::told(kubernetes);
    }
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

async fn alter(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: &Change,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, spec) = locked(tx, name).await?;
    let wanted =
        spec.with(change).map_err(|said| BmdbError::OrderRefused { reason: "NO_SUCH_CLUSTER", said })?;
    if wanted == spec {
        let said = "is so already; nothing was changed".to_owned();
        return write_down(
            tx,
            order,
            None,
            Done { changed: false, said },
            Some(told(&spec)),
            Some(told(&spec)),
        )
        .await;
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!(
        "sql/cluster/update_spec.sql",
        id,
        i64::from(wanted.control_plane),
        i64::from(wanted.workers),
        json!(wanted.roles)
    )
    .execute(&mut *tx)
    .await
    .doing("changing a cluster")?;
    end_attempt(tx, order).await?;
    let roles = match wanted.roles.len() {
        0 => "no roles of yours".to_owned(),
        _ => format!("the roles {}", wanted.roles.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    let said = format!(
        "is to have {} and {}, with {roles}; watch it with: shepherdctl cluster describe {name}",
        many(wanted.control_plane, "member of the control plane", "members of the control plane"),
        many(wanted.workers, "worker", "workers"),
    );
    write_down(tx, order, None, Done { changed: true, said }, Some(told(&spec)), Some(told(&wanted))).await
}

async fn approve(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    machine: &str,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let members =
        sqlx::query_file!("sql/cluster/list_member_keys.sql", id).fetch_all(&mut *tx).await.doing(WHAT)?;
    let known = members.into_iter().find(|member| {
        member.machine_id.to_string() == machine || member.provider_id.as_deref() == Some(machine)
    });
    let nothing = match &known {
        None => Some(format!("has no machine {machine:?}; run: shepherdctl cluster describe {name}")),
        Some(member) if member.node_key.is_none() => {
            Some(format!("cannot let {machine} in yet: it has not reported a key; nothing was changed"))
        }
        Some(member) if member.approved == member.node_key => {
            Some(format!("lets {machine} in already; nothing was changed"))
        }
        Some(_) => None,
    };
    let (Some(member), None) = (known, &nothing) else {
        let said = nothing.unwrap_or_default();
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    };
    begin_attempt(tx, order).await?;
    let key = sqlx::query_file_scalar!("sql/cluster/approve_member.sql", member.machine_id, id)
        .fetch_optional(&mut *tx)
        .await
        .doing("letting a machine into a cluster")?;
    end_attempt(tx, order).await?;
    let key = hex::encode(key.unwrap_or_default());
    let said = format!("lets {machine} in by the key {key}, which it reported over its agent channel");
    let after = json!({ "machine": member.machine_id, "key": key });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

async fn delete(tx: &mut PgConnection, order: &Order, name: &str) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let found = sqlx::query_file!("sql/cluster/lock.sql", name).fetch_optional(&mut *tx).await.doing(WHAT)?;
    let found = found.ok_or_else(|| no_such(name))?;
    if let Some(by) = found.deleting_by {
        let said = format!("is ending already, as {by} ordered; nothing was changed");
        return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
    }
    begin_attempt(tx, order).await?;
    sqlx::query_file!("sql/cluster/mark_deleting.sql", found.cluster_id, order.actor.name)
        .execute(&mut *tx)
        .await
        .doing("ending a cluster")?;
    end_attempt(tx, order).await?;
    let said = "ends: its machines are asked to leave it, and what they keep of it is removed".to_owned();
    write_down(tx, order, None, Done { changed: true, said }, None, None).await
}

pub(crate) fn no_such(name: &str) -> BmdbError {
    let said = format!("there is no cluster {name:?}; run: shepherdctl cluster get");
    BmdbError::OrderRefused { reason: "NO_SUCH_CLUSTER", said }
}

/// The cluster of that name, locked for whoever changes what it is to be; one that is ending cannot be changed.
pub(crate) async fn locked(tx: &mut PgConnection, name: &str) -> Result<(Uuid, Spec), BmdbError> {
    let found = sqlx::query_file!("sql/cluster/lock.sql", name).fetch_optional(tx).await.doing(WHAT)?;
    let found = found.ok_or_else(|| no_such(name))?;
    if let Some(by) = found.deleting_by {
        let said = format!("{} is ending, as {by} ordered, and cannot be changed", target(name));
        return Err(BmdbError::OrderRefused { reason: "CLUSTER_ENDS", said });
    }
    let spec = SpecColumns {
        name: found.name,
        control_plane: found.control_plane,
        workers: found.workers,
        selector: found.selector,
        roles: found.roles,
        approval: found.approval,
    };
    Ok((found.cluster_id, spec.read()?))
}

fn many(count: u32, one: &str, several: &str) -> String {
    match count {
        0 => format!("no {several}"),
        1 => format!("1 {one}"),
        _ => format!("{count} {several}"),
    }
}

fn fit(spec: &Spec) -> String {
    match spec.selector.to_string().as_str() {
        "" => "are free".to_owned(),
        said => format!("are free and fit {said}"),
    }
}

/// What a cluster is to be, as the audit says it.
fn told(spec: &Spec) -> Value {
    json!({
        "cluster": spec.name,
        "control_plane": spec.control_plane,
        "workers": spec.workers,
        "select": spec.selector.to_string(),
        "roles": spec.roles,
        "approval": spec.approval.as_str(),
    })
}
