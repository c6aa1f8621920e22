//! Cluster specifications: create, scale, approve members, delete; reading clusters with their machines.
//!
//! Operators' orders write the desired state here; the holder of the cluster's lease writes the observed state
//! (`cluster_transitions.rs`). An order only changes the desired state: its transaction chooses no machine, contacts no
//! curator and ends nothing.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::action::OrderOutcome;
use crate::audit::{
    Order, OrderResult, begin_dry_run, find_by_idempotency_key, record_audit, roll_back_dry_run,
};
use crate::cluster_candidates::hardware_from_columns;
use crate::cluster_declaration::list_declarations;
use crate::cluster_kubernetes::{self, KubernetesPatch, KubernetesRecord, read_kubernetes};
use crate::cluster_upgrade::{self, UpgradeRecord, read_upgrade};
use crate::connection::{Bmdb, DbContext as _};
use crate::error::BmdbError;
use crate::inspect;
use model::cluster::declaration::{DeclarationView, DesiredDeclaration, ServiceView};
use model::cluster::hardware::Hardware;
use model::cluster::kubernetes::NodeKubernetes;
use model::cluster::plan::MachineLocations;
use model::cluster::snapshot::{ClusterSnapshots, LastSnapshot};
use model::cluster::spec::{ClusterPart, ClusterSpec, ClusterSpecChange};
use model::cluster::state::{
    Cluster, ClusterIdentity, ClusterMember, CuratorAnswer, LastOrder, MemberReport, MembershipOrder,
    PendingRestore,
};
use model::cluster::view::{
    ClusterMachineView, ClusterMembership, ClusterView, RESTORING_STAGE, cluster_stage,
};
use model::ids::MachineId;
use model::phase::Phase;
use model::time::Timestamp;

const OPERATION: &str = "reading clusters";
/// The target of orders about clusters, for people.
#[must_use]
pub fn order_target(name: &str) -> String {
    format!("the cluster {name}")
}

/// A cluster with everything that is stored about it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterRecord {
    /// Id of the cluster's row.
    pub id: Uuid,
    /// The specification that operators ordered.
    pub spec: ClusterSpec,
    /// Version of the desired state; grows with every change.
    pub version: i64,
    /// When an operator created it.
    pub created_at: Timestamp,
    /// Name of the operator who created it.
    pub created_by: String,
    /// When its deletion was ordered, and by which operator.
    pub deleting: Option<(Timestamp, String)>,
    /// Its identity; `None` until it is founded.
    pub founded: Option<ClusterIdentity>,
    /// When a shepherd last examined it.
    pub polled_at: Option<Timestamp>,
    /// When its curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Since when its curators have not answered any query; `None` while they answer.
    pub unreachable_since: Option<Timestamp>,
    /// What the cluster as a whole waits for.
    pub wait_reasons: Vec<String>,
    /// Whether it matched its specification when a shepherd last examined it.
    pub converged: bool,
    /// Voting members of etcd, and how many of them were reached.
    pub voters: Option<(i64, i64)>,
    /// State of its snapshots and of their schedule.
    pub snapshots: ClusterSnapshots,
    /// How often it was restored from a snapshot, counting a restore that is under way.
    pub epoch: u64,
    /// When it was last restored; `None` if never.
    pub restored_at: Option<Timestamp>,
    /// The restore that is ordered or under way.
    pub restoring: Option<PendingRestore>,
    /// The snapshot of the restore under way; `None` without one.
    pub restoring_from: Option<Uuid>,
    /// Operator who ordered the restore under way; `None` without one.
    pub restoring_by: Option<String>,
    /// Since when the shepherd's key for it is in force; `None` until it is founded.
    pub key_since: Option<Timestamp>,
    /// Operator who ordered that this key be replaced.
    pub key_rotation_requested_by: Option<String>,
    /// Since when its curators reject every key that the shepherd has.
    pub keys_rejected_since: Option<Timestamp>,
}

/// A machine of a cluster with everything that is stored about it there.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterMachineRecord {
    /// The membership as decisions need it.
    pub member: ClusterMember,
    /// The machine's location as its provider reports it; `None` if unknown.
    pub location: Option<String>,
    /// Its hardware, as far as it was reported.
    pub hardware: Hardware,
    /// What it waits for.
    pub wait_reason: Option<String>,
    /// Its node, as the curators reported it at `observed_at`.
    pub node: Option<NodeRecord>,
    /// When its curator last answered.
    pub observed_at: Option<Timestamp>,
    /// Services of operators' roles on its node, as last reported.
    pub services: Vec<ServiceView>,
    /// Kubernetes on its node, as last reported.
    pub kubernetes: Option<NodeKubernetes>,
}

/// A node as it was last observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node's id in its cluster.
    pub id: String,
    /// `new`, `standby`, `up` or `decommissioned`.
    pub state: String,
    /// Names of the node's roles.
    pub roles: Vec<String>,
    /// `healthy`, `silent` or `unknown`.
    pub health: String,
}

/// A cluster and its machines.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterDetails {
    /// The cluster without its machines.
    pub cluster: ClusterRecord,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<ClusterMachineRecord>,
    /// Roles that operators declared to it, in order of their names.
    pub declarations: Vec<DeclarationView>,
    /// Keys of nodes that left it, as far back as its snapshots go.
    pub departed_keys: BTreeSet<[u8; 32]>,
    /// Its desired Kubernetes; `None` without one.
    pub kubernetes: Option<KubernetesRecord>,
    /// The upgrade under way, or else the newest one.
    pub upgrade: Option<UpgradeRecord>,
}

impl ClusterDetails {
    /// The state that decisions need, with the curators' answer.
    #[must_use]
    pub fn planning_state(&self, view: CuratorAnswer) -> Cluster {
        let cluster = &self.cluster;
        Cluster {
            id: cluster.id,
            spec: cluster.spec.clone(),
            deleting: cluster.deleting.is_some(),
            identity: cluster.founded.clone(),
            epoch: cluster.epoch,
            restored_at: cluster.restored_at,
            restoring: cluster.restoring.clone(),
            declared_roles: self.declarations.iter().filter_map(parse_declared).collect(),
            kubernetes: self.kubernetes.as_ref().map(|line| line.desired.clone()),
            upgrade: (self.upgrade.as_ref())
                .filter(|line| line.ended.is_none())
                .map(|line| line.upgrade.clone()),
            members: self.machines.iter().map(|line| line.member.clone()).collect(),
            departed_keys: self.departed_keys.clone(),
            observed: view,
        }
    }

    /// Location of each of its machines.
    #[must_use]
    pub fn machine_locations(&self) -> MachineLocations {
        self.machines.iter().map(|line| (line.member.machine, line.location.clone())).collect()
    }
}

/// The desired state of a declared role.
fn parse_declared(kept: &DeclarationView) -> Option<DesiredDeclaration> {
    // The database holds 32 bytes.
    let digest = hex::decode(&kept.digest).ok()?.try_into().ok()?;
    Some(DesiredDeclaration { role: kept.role.clone(), digest, withdrawn: kept.withdrawn })
}

fn corrupt_error(what: &str, name: &str, error: impl std::fmt::Display) -> BmdbError {
    BmdbError::Corrupt(format!("the {what} of cluster {name:?}: {error}"))
}

fn json_strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

/// The columns of a cluster's specification.
struct SpecColumns {
    name: String,
    control_plane: i64,
    workers: i64,
    selector: String,
    roles: Value,
    approval: String,
}

impl SpecColumns {
    fn into_spec(self) -> Result<ClusterSpec, BmdbError> {
        let count =
            |what, count: i64| u32::try_from(count).map_err(|error| corrupt_error(what, &self.name, error));
        Ok(ClusterSpec {
            control_plane: count("control plane", self.control_plane)?,
            workers: count("number of workers", self.workers)?,
            selector: self.selector.parse().map_err(|error| corrupt_error("selector", &self.name, error))?,
            roles: json_strings(&self.roles).into_iter().collect(),
            approval: self.approval.parse().map_err(|error| corrupt_error("approval", &self.name, error))?,
            name: self.name,
        })
    }
}

/// Every cluster, or the one of that name, in order of their names.
pub async fn list_clusters(
    tx: &mut PgConnection,
    name: Option<&str>,
) -> Result<Vec<ClusterRecord>, BmdbError> {
    let rows =
        sqlx::query_file!("../../sql/cluster/list.sql", name).fetch_all(tx).await.context(OPERATION)?;
    rows.into_iter()
        .map(|row| {
            let founded = match (row.founded_at, row.ca_certificate, row.curators) {
                (Some(at), Some(ca_certificate), Some(curators)) => Some(ClusterIdentity {
                    ca_certificate,
                    curators: json_strings(&curators),
                    founded_at: at,
                }),
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
            Ok(ClusterRecord {
                id: row.cluster_id,
                spec: spec.into_spec()?,
                version: row.version,
                created_at: row.created_at,
                created_by: row.created_by,
                deleting: row.deleting_at.zip(row.deleting_by),
                founded,
                polled_at: row.polled_at,
                observed_at: row.observed_at,
                unreachable_since: row.unreachable_since,
                wait_reasons: json_strings(&row.wait_reasons),
                converged: row.settled,
                voters: row.voters.zip(row.voters_reached),
                snapshots: ClusterSnapshots {
                    last: match (row.snapshot_id, row.taken_at, row.snapshot_voters) {
                        (Some(id), Some(at), Some(voters)) => {
                            Some(LastSnapshot { id, at, voters: json_strings(&voters).into_iter().collect() })
                        }
                        _ => None,
                    },
                    requested_at: row.snapshot_requested_at,
                },
                epoch: row.epoch.try_into().unwrap_or(0),
                restored_at: row.restored_at,
                restoring: row.restoring_since.map(|since| PendingRestore {
                    requested_at: since,
                    target_machine: row.restoring_onto.map(MachineId),
                    digest: row.from_digest.and_then(|digest| digest.try_into().ok()),
                }),
                restoring_from: row.restoring_from,
                restoring_by: row.restoring_by,
                key_since: row.key_since,
                key_rotation_requested_by: row.key_rotation_requested_by,
                keys_rejected_since: row.keys_refused_since,
            })
        })
        .collect()
}

/// The machines of a cluster, in the order in which they were chosen.
pub async fn list_cluster_machines(
    tx: &mut PgConnection,
    cluster: Uuid,
) -> Result<Vec<ClusterMachineRecord>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/cluster/list_machines.sql", cluster)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    rows.into_iter()
        .map(|row| {
            let machine = MachineId(row.machine_id);
            let odd = |error: &dyn std::fmt::Display| {
                BmdbError::Corrupt(format!("machine {machine} in its cluster: {error}"))
            };
            let order = match (row.what, row.ordered_generation, row.ordered_at) {
                (Some(what), Some(generation), Some(at)) => Some(LastOrder {
                    order: what.parse::<MembershipOrder>().map_err(|error| odd(&error))?,
                    generation,
                    sent_at: at,
                }),
                _ => None,
            };
            let report = row.reported.map(|generation| MemberReport {
                generation,
                key: row.node_key.and_then(|key| key.try_into().ok()),
                ca_certificate: row.ca_certificate,
                address: row.address,
                error: row.error,
                epoch: row.epoch.and_then(|epoch| epoch.try_into().ok()).unwrap_or(0),
            });
            let node = row.node_id.map(|id| NodeRecord {
                id,
                state: row.node_state.unwrap_or_default(),
                roles: row.roles.as_ref().map(json_strings).unwrap_or_default(),
                health: row.health.unwrap_or_default(),
            });
            Ok(ClusterMachineRecord {
                member: ClusterMember {
                    machine,
                    name: row.provider_id.unwrap_or_else(|| machine.to_string()),
                    part: row.part.parse::<ClusterPart>().map_err(|error| odd(&error))?,
                    chosen_at: row.chosen_at,
                    approved_key: row.approved.and_then(|key| key.try_into().ok()),
                    leave_reason: row.leaving,
                    last_order: order,
                    report,
                    phase: row.phase.parse::<Phase>().map_err(|error| odd(&error))?,
                    retiring: row.retiring,
                },
                location: row.location,
                hardware: hardware_from_columns(
                    row.manufacturer,
                    row.product,
                    row.memory_bytes,
                    row.cpu_threads,
                ),
                wait_reason: row.wait_reason,
                node,
                observed_at: row.observed_at,
                // A value that another release wrote and this one cannot read is written again by the next pass.
                services: row
                    .services
                    .and_then(|value| serde_json::from_value(value).ok())
                    .unwrap_or_default(),
                kubernetes: row.kubernetes.and_then(|value| serde_json::from_value(value).ok()),
            })
        })
        .collect()
}

/// The membership of a machine in its cluster, if it has one.
pub(crate) async fn membership_of_machine(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<ClusterMembership>, BmdbError> {
    let row = sqlx::query_file!("../../sql/cluster/read_membership_of_machine.sql", machine.0)
        .fetch_optional(tx)
        .await
        .context(OPERATION)?;
    Ok(row.map(|row| ClusterMembership {
        name: row.name,
        part: row.part,
        leave_reason: row.leaving,
        wait_reason: row.wait_reason,
        health: row.health,
        kubernetes: row.kubernetes.and_then(|value| serde_json::from_value::<NodeKubernetes>(value).ok()),
    }))
}

/// A cluster as people see it.
#[must_use]
pub fn cluster_view(found: &ClusterDetails) -> ClusterView {
    let ClusterDetails { cluster, machines, declarations, kubernetes, upgrade, .. } = found;
    let (deleting, founded) = (cluster.deleting.is_some(), cluster.founded.is_some());
    let stage = match &cluster.restoring {
        Some(_) if !deleting => RESTORING_STAGE,
        _ => cluster_stage(deleting, founded, machines.len(), cluster.converged),
    };
    let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    ClusterView {
        name: cluster.spec.name.clone(),
        id: cluster.id.to_string(),
        stage: stage.to_owned(),
        control_plane: cluster.spec.control_plane,
        workers: cluster.spec.workers,
        selector: cluster.spec.selector.to_string(),
        roles: cluster.spec.roles.iter().cloned().collect(),
        approval: cluster.spec.approval.as_str().to_owned(),
        created_at: cluster.created_at,
        created_by: cluster.created_by.clone(),
        deletion_requested_by: cluster.deleting.as_ref().map(|(_, by)| by.clone()),
        curators: cluster.founded.as_ref().map(|founded| founded.curators.clone()).unwrap_or_default(),
        observed_at: cluster.observed_at,
        voters: cluster.voters.map(|(voters, _)| count(voters)),
        voters_reached: cluster.voters.map(|(_, reached)| count(reached)),
        snapshot_at: cluster.snapshots.last.as_ref().map(|last| last.at),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at,
        restoring_from: cluster.restoring_from.map(|id| id.to_string()),
        restore_requested_by: cluster.restoring_by.clone(),
        key_since: cluster.key_since,
        key_rotation_requested_by: cluster.key_rotation_requested_by.clone(),
        keys_rejected_since: cluster.keys_rejected_since,
        wait_reasons: cluster.wait_reasons.clone(),
        machines: machines.iter().map(machine_view).collect(),
        declarations: declarations.clone(),
        kubernetes: kubernetes.as_ref().map(cluster_kubernetes::kubernetes_view),
        upgrade: upgrade.as_ref().map(cluster_upgrade::upgrade_view),
    }
}

fn machine_view(line: &ClusterMachineRecord) -> ClusterMachineView {
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
        leave_reason: member.leave_reason.clone(),
        wait_reason: line.wait_reason.clone(),
        services: line.services.clone(),
        kubernetes: line.kubernetes.clone(),
    }
}

/// Every cluster, or the one of that name, with its machines, and the database's clock when they were read.
pub async fn list_cluster_details(
    tx: &mut PgConnection,
    name: Option<&str>,
) -> Result<(Vec<ClusterDetails>, Timestamp), BmdbError> {
    let mut found = Vec::new();
    for cluster in list_clusters(tx, name).await? {
        found.push(read_cluster_details(tx, cluster).await?);
    }
    Ok((found, inspect::database_now(tx).await?))
}

/// Reads a cluster's machines, declarations, Kubernetes and upgrade.
pub(crate) async fn read_cluster_details(
    tx: &mut PgConnection,
    cluster: ClusterRecord,
) -> Result<ClusterDetails, BmdbError> {
    let machines = list_cluster_machines(tx, cluster.id).await?;
    let declarations = list_declarations(tx, cluster.id).await?;
    let keys = sqlx::query_file_scalar!("../../sql/cluster/list_left_node_keys.sql", cluster.id)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let left = keys.into_iter().filter_map(|key| key.try_into().ok()).collect();
    let kubernetes = read_kubernetes(tx, cluster.id).await?;
    let upgrade = read_upgrade(tx, cluster.id).await?;
    Ok(ClusterDetails { cluster, machines, declarations, departed_keys: left, kubernetes, upgrade })
}

impl Bmdb {
    /// Creates a cluster, which is founded later.
    pub async fn create_cluster(
        &self,
        order: Order,
        spec: ClusterSpec,
        kubernetes: Option<KubernetesPatch>,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("asking for a cluster", move |tx| {
                let (order, spec, kubernetes) = (order.clone(), spec.clone(), kubernetes.clone());
                Box::pin(async move { create_cluster_in_tx(tx, &order, &spec, kubernetes.as_ref()).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Changes a cluster's specification.
    pub async fn change_cluster(
        &self,
        order: Order,
        name: String,
        change: ClusterSpecChange,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("changing a cluster", move |tx| {
                let (order, name, change) = (order.clone(), name.clone(), change.clone());
                Box::pin(async move { change_cluster_in_tx(tx, &order, &name, &change).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Admits the key that a machine of a cluster reports now.
    pub async fn approve_cluster_member(
        &self,
        order: Order,
        name: String,
        machine: String,
    ) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("letting a machine into a cluster", move |tx| {
                let (order, name, machine) = (order.clone(), name.clone(), machine.clone());
                Box::pin(async move { approve_member_in_tx(tx, &order, &name, &machine).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }

    /// Orders a cluster's deletion: its machines leave it, and then its rows are deleted.
    pub async fn delete_cluster(&self, order: Order, name: String) -> Result<OrderResult, BmdbError> {
        let given = order.clone();
        let carried = self
            .run_order_transaction("ending a cluster", move |tx| {
                let (order, name) = (order.clone(), name.clone());
                Box::pin(async move { delete_cluster_in_tx(tx, &order, &name).await })
            })
            .await;
        self.audit_rejection(carried, &given, None).await
    }
}

async fn create_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    spec: &ClusterSpec,
    kubernetes: Option<&KubernetesPatch>,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    spec.validate()
        .map_err(|reason| BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: reason })?;
    let kubernetes = match kubernetes {
        Some(wish) => Some(cluster_kubernetes::resolve_desired(tx, &spec.name, None, wish).await?),
        None => None,
    };
    begin_dry_run(tx, order).await?;
    let made = sqlx::query_file_scalar!(
        "../../sql/cluster/insert.sql",
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
    .context("asking for a cluster")?;
    let Some(made) = made else {
        let text = format!(
            "{} exists already; give another name, or change it with: shepherdctl cluster scale {}",
            order_target(&spec.name),
            spec.name
        );
        return Err(BmdbError::OrderRejected { reason: "CLUSTER_EXISTS", message: text });
    };
    if let Some(kubernetes) = &kubernetes {
        cluster_kubernetes::store_desired(tx, made, kubernetes, &order.actor.name).await?;
    }
    roll_back_dry_run(tx, order).await?;
    let text = format!(
        "is requested: {}, {}{} from machines that {}; watch it with: shepherdctl cluster describe {}",
        count_noun(spec.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(spec.workers, "worker", "workers"),
        kubernetes.as_ref().map(|k| format!(" with Kubernetes {}", k.version)).unwrap_or_default(),
        describe_selector(spec),
        spec.name
    );
    let mut after = audit_json(spec);
    if let Some(kubernetes) = &kubernetes {
        after["kubernetes"] = cluster_kubernetes::audit_json(kubernetes);
    }
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(after)).await
}

async fn change_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    change: &ClusterSpecChange,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, spec) = lock_cluster(tx, name).await?;
    let wanted = spec
        .apply_change(change)
        .map_err(|reason| BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: reason })?;
    if wanted == spec {
        let text = "is so already; nothing was changed".to_owned();
        return record_audit(
            tx,
            order,
            None,
            OrderOutcome { changed: false, message: text },
            Some(audit_json(&spec)),
            Some(audit_json(&spec)),
        )
        .await;
    }
    begin_dry_run(tx, order).await?;
    sqlx::query_file!(
        "../../sql/cluster/update_spec.sql",
        id,
        i64::from(wanted.control_plane),
        i64::from(wanted.workers),
        json!(wanted.roles)
    )
    .execute(&mut *tx)
    .await
    .context("changing a cluster")?;
    roll_back_dry_run(tx, order).await?;
    let roles = match wanted.roles.len() {
        0 => "no roles of yours".to_owned(),
        _ => format!("the roles {}", wanted.roles.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    let text = format!(
        "is to have {} and {}, with {roles}; watch it with: shepherdctl cluster describe {name}",
        count_noun(wanted.control_plane, "member of the control plane", "members of the control plane"),
        count_noun(wanted.workers, "worker", "workers"),
    );
    record_audit(
        tx,
        order,
        None,
        OrderOutcome { changed: true, message: text },
        Some(audit_json(&spec)),
        Some(audit_json(&wanted)),
    )
    .await
}

async fn approve_member_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    machine: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = lock_cluster(tx, name).await?;
    let members = sqlx::query_file!("../../sql/cluster/list_member_keys.sql", id)
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
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
        let text = nothing.unwrap_or_default();
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    };
    begin_dry_run(tx, order).await?;
    let key = sqlx::query_file_scalar!("../../sql/cluster/approve_member.sql", member.machine_id, id)
        .fetch_optional(&mut *tx)
        .await
        .context("letting a machine into a cluster")?;
    roll_back_dry_run(tx, order).await?;
    let key = hex::encode(key.unwrap_or_default());
    let text = format!("lets {machine} in by the key {key}, which it reported over its agent channel");
    let after = json!({ "machine": member.machine_id, "key": key });
    record_audit(tx, order, None, OrderOutcome { changed: true, message: text }, None, Some(after)).await
}

async fn delete_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
) -> Result<OrderResult, BmdbError> {
    if let Some(carried) = find_by_idempotency_key(tx, order).await? {
        return Ok(carried);
    }
    let found = sqlx::query_file!("../../sql/cluster/lock.sql", name)
        .fetch_optional(&mut *tx)
        .await
        .context(OPERATION)?;
    let found = found.ok_or_else(|| no_such_cluster(name))?;
    if let Some(by) = found.deleting_by {
        let text = format!("is ending already, as {by} ordered; nothing was changed");
        return record_audit(tx, order, None, OrderOutcome { changed: false, message: text }, None, None)
            .await;
    }
    begin_dry_run(tx, order).await?;
    sqlx::query_file!("../../sql/cluster/mark_deleting.sql", found.cluster_id, order.actor.name)
        .execute(&mut *tx)
        .await
        .context("ending a cluster")?;
    roll_back_dry_run(tx, order).await?;
    let output = "ends: its machines are ordered to leave it, and what they keep of it is removed".to_owned();
    record_audit(tx, order, None, OrderOutcome { changed: true, message: output }, None, None).await
}

/// The error for a name that no cluster has.
#[must_use]
pub fn no_such_cluster(name: &str) -> BmdbError {
    let output = format!("there is no cluster {name:?}; run: shepherdctl cluster get");
    BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: output }
}

/// Locks the cluster of that name to change its specification; a cluster that is being deleted cannot be changed.
pub(crate) async fn lock_cluster(
    tx: &mut PgConnection,
    name: &str,
) -> Result<(Uuid, ClusterSpec), BmdbError> {
    let found =
        sqlx::query_file!("../../sql/cluster/lock.sql", name).fetch_optional(tx).await.context(OPERATION)?;
    let found = found.ok_or_else(|| no_such_cluster(name))?;
    if let Some(by) = found.deleting_by {
        let text = format!("{} is ending, as {by} ordered, and cannot be changed", order_target(name));
        return Err(BmdbError::OrderRejected { reason: "CLUSTER_ENDS", message: text });
    }
    let spec = SpecColumns {
        name: found.name,
        control_plane: found.control_plane,
        workers: found.workers,
        selector: found.selector,
        roles: found.roles,
        approval: found.approval,
    };
    Ok((found.cluster_id, spec.into_spec()?))
}

fn count_noun(count: u32, one: &str, several: &str) -> String {
    match count {
        0 => format!("no {several}"),
        1 => format!("1 {one}"),
        _ => format!("{count} {several}"),
    }
}

fn describe_selector(spec: &ClusterSpec) -> String {
    match spec.selector.to_string().as_str() {
        "" => "are free".to_owned(),
        text => format!("are free and fit {text}"),
    }
}

/// A specification as the audit stores it.
fn audit_json(spec: &ClusterSpec) -> Value {
    json!({
        "cluster": spec.name,
        "control_plane": spec.control_plane,
        "workers": spec.workers,
        "select": spec.selector.to_string(),
        "roles": spec.roles,
        "approval": spec.approval.as_str(),
    })
}
