//! Reading clusters with their machines from the database.

use serde_json::Value;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::declaration::list_declarations;
use crate::cluster::kubernetes::read_kubernetes;
use crate::cluster::lock::no_such_cluster;
use crate::cluster::record::{
    ClusterDetails, ClusterMachineRecord, ClusterRecord, NodeRecord, SpecColumns, json_strings,
};
use crate::cluster::upgrade::read_upgrade;
use crate::connection::error::BmdbError;
use crate::connection::{DbContext as _, database_now};
use crate::machine::traits::hardware_from_columns;
use model::cluster::authority_rotation::{AuthorityRotationOrder, RotationKind};
use model::cluster::authority_theft::{AuthorityStep, AuthorityTheft, TheftStage};
use model::cluster::kubernetes::NodeKubernetes;
use model::cluster::node_address::listed_node_address;
use model::cluster::restore_programs::EtcdPrograms;
use model::cluster::secret_keys::SecretKeys;
use model::cluster::snapshot::{ClusterSnapshots, LastSnapshot};
use model::cluster::spec::ClusterPart;
use model::cluster::state::{
    ClusterIdentity, ClusterMember, LastOrder, MemberReport, MembershipOrder, PeerRenewal, PendingRestore,
    StoredImage,
};
use model::cluster::view::ClusterMembership;
use model::ids::MachineId;
use model::phase::Phase;
use model::time::Timestamp;

const OPERATION: &str = "reading clusters";

/// The cluster of that name; an error if no cluster has it.
pub(crate) async fn require_cluster(tx: &mut PgConnection, name: &str) -> Result<ClusterRecord, BmdbError> {
    list_clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such_cluster(name))
}

/// Every cluster, or the one of that name, in order of their names.
pub(crate) async fn list_clusters(
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
            let rotation_columns = (
                row.authority_rotation,
                row.authority_rotation_ordered_at,
                row.authority_rotation_ordered_by,
            );
            let authority_rotation = parse_rotation_order(rotation_columns, row.authority_rotation_from)?;
            let theft_columns = (
                row.authority_rotation_certificate,
                row.authority_rotation_step,
                row.authority_rotation_since,
            );
            let authority_theft = parse_theft(authority_rotation.as_ref(), theft_columns)?;
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
                etcd_full_since: row.etcd_full_since,
                snapshots: ClusterSnapshots {
                    last: match (row.snapshot_id, row.taken_at, row.snapshot_voters) {
                        (Some(id), Some(at), Some(voters)) => {
                            let voters = json_strings(&voters).into_iter().collect();
                            let (authority, has_image) = (row.snapshot_authority, row.snapshot_has_image);
                            Some(LastSnapshot { id, at, voters, authority, has_image })
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
                    image: row.restoring_with_image.then(|| StoredImage {
                        digest: row.image_digest.and_then(|digest| digest.try_into().ok()),
                        etcd_version: row.image_etcd_version.unwrap_or_default(),
                    }),
                }),
                peer_renewal: row
                    .peer_renewal_requested_at
                    .zip(row.peer_renewal_requested_by)
                    .map(|(requested_at, requested_by)| PeerRenewal { requested_at, requested_by }),
                authority_rotation,
                authority_theft,
                // What another release wrote and this one cannot read is written again by the next pass.
                authority_progress: row
                    .authority_rotation_progress
                    .and_then(|value| serde_json::from_value(value).ok()),
                restoring_from: row.restoring_from,
                restoring_by: row.restoring_by,
                key_since: row.key_since,
                key_rotation_requested_by: row.key_rotation_requested_by,
                keys_rejected_since: row.keys_refused_since,
                secret_keys: parse_secret_keys(row.secret_keys)?,
                oldest_snapshot: row.oldest_snapshot,
            })
        })
        .collect()
}

/// The order to replace the authority, from its kind, its time and the operator; `None` without one.
pub(crate) fn parse_rotation_order(
    columns: (Option<String>, Option<Timestamp>, Option<String>),
    replaces: Option<Vec<u8>>,
) -> Result<Option<AuthorityRotationOrder>, BmdbError> {
    let (Some(kind), Some(ordered_at), Some(ordered_by)) = columns else { return Ok(None) };
    let kind = kind
        .parse::<RotationKind>()
        .map_err(|error| BmdbError::Corrupt(format!("an order to replace an authority: {error}")))?;
    Ok(Some(AuthorityRotationOrder { kind, ordered_at, ordered_by, replaces }))
}

/// The keys of a cluster's Secrets; `None` for a cluster of a release before them. A state that cannot be read is an error:
/// another one would take keys from controllers.
pub(crate) fn parse_secret_keys(value: Option<Value>) -> Result<Option<SecretKeys>, BmdbError> {
    let parsed = value.map(serde_json::from_value).transpose();
    parsed.map_err(|error| BmdbError::Corrupt(format!("the keys of a cluster's Kubernetes Secrets: {error}")))
}

/// How far an order after a theft is, from the new certificate, the step and its begin; `None` without such an order.
fn parse_theft(
    order: Option<&AuthorityRotationOrder>,
    columns: (Option<Vec<u8>>, Option<i16>, Option<Timestamp>),
) -> Result<Option<AuthorityTheft>, BmdbError> {
    let Some(order) = order.filter(|order| order.kind == RotationKind::Compromised) else { return Ok(None) };
    let stage = match columns {
        (Some(certificate), Some(number), Some(since)) => {
            let step = AuthorityStep::from_number(number).ok_or_else(|| {
                BmdbError::Corrupt(format!(
                    "an order to replace a stolen authority: no step has the number {number}"
                ))
            })?;
            Some(TheftStage { certificate, step, since })
        }
        _ => None,
    };
    Ok(Some(AuthorityTheft { ordered_by: order.ordered_by.clone(), stage }))
}

/// The machines of a cluster, in the order in which they were chosen.
pub(crate) async fn list_cluster_machines(
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
                next_authority: row.next_authority,
                next_authority_step: row.next_authority_step.and_then(AuthorityStep::from_number),
                programs: EtcdPrograms { etcd: row.etcd_version, etcdutl: row.etcdutl_version },
                secrets: row.secrets.and_then(|value| serde_json::from_value(value).ok()),
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
                    keep_authority: row.keep_authority,
                    listed_address: row.listed_address.as_deref().and_then(listed_node_address),
                },
                provider: row.provider,
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

/// Every cluster, or the one of that name, with its machines, and the database's clock when they were read.
pub async fn list_cluster_details(
    tx: &mut PgConnection,
    name: Option<&str>,
) -> Result<(Vec<ClusterDetails>, Timestamp), BmdbError> {
    let mut found = Vec::new();
    for cluster in list_clusters(tx, name).await? {
        found.push(read_cluster_details(tx, cluster).await?);
    }
    Ok((found, database_now(tx).await?))
}

/// Reads a cluster's machines, declarations, Kubernetes and upgrade.
pub(crate) async fn read_cluster_details(
    tx: &mut PgConnection,
    cluster: ClusterRecord,
) -> Result<ClusterDetails, BmdbError> {
    let machines = list_cluster_machines(tx, cluster.id).await?;
    let declarations = list_declarations(tx, cluster.id).await?;
    let keys =
        sqlx::query_scalar!("SELECT node_key FROM cluster_left_node WHERE cluster_id = $1", cluster.id)
            .fetch_all(&mut *tx)
            .await
            .context(OPERATION)?;
    let left = keys.into_iter().filter_map(|key| key.try_into().ok()).collect();
    let kubernetes = read_kubernetes(tx, cluster.id).await?;
    let upgrade = read_upgrade(tx, cluster.id).await?;
    Ok(ClusterDetails { cluster, machines, declarations, departed_keys: left, kubernetes, upgrade })
}

/// The membership of a machine in its cluster, if it has one.
pub(crate) async fn membership_of_machine(
    tx: &mut PgConnection,
    machine: MachineId,
) -> Result<Option<ClusterMembership>, BmdbError> {
    let row = sqlx::query!(
        r#"SELECT k.name, c.part, c.leaving, c.wait_reason, c.health, c.kubernetes, r.error AS "report_error?"
         FROM machine_cluster c JOIN cluster k ON k.cluster_id = c.cluster_id
         LEFT JOIN machine_cluster_report r ON r.machine_id = c.machine_id WHERE c.machine_id = $1"#,
        machine.0
    )
    .fetch_optional(tx)
    .await
    .context(OPERATION)?;
    Ok(row.map(|row| ClusterMembership {
        name: row.name,
        part: row.part,
        leave_reason: row.leaving,
        wait_reason: row.wait_reason,
        health: row.health,
        report_error: row.report_error,
        kubernetes: row.kubernetes.and_then(|value| serde_json::from_value::<NodeKubernetes>(value).ok()),
    }))
}
