//! Disaster recovery: restoring a cluster from a snapshot.
//!
//! The order names the snapshot, and the machine if the operator cares. It is rejected unless the old control plane is
//! known not to work ([`check_restore_allowed`]). The objects of a cluster's Kubernetes come back with the image of etcd of
//! its snapshot, if a machine can restore that. Without an image, or on request, the operator confirms their loss
//! ([`check_restore_confirmation`]). The order changes the desired state and nothing else, and another order replaces it. Each machine that receives a request to restore gets an epoch of its own: of two machines,
//! because the first was lost in between, the second one's restore counts.

#[cfg(feature = "sealing")]
use std::fmt;

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::candidates::{check_restoring_machine, find_restoring_candidate, is_candidate};
use crate::cluster::cluster_order::lock_and_read_cluster;
#[cfg(feature = "sealing")]
use crate::cluster::credential::requeue_revocations;
use crate::cluster::kubernetes::read_kubernetes;
#[cfg(feature = "sealing")]
use crate::cluster::owner_key::requeue_key_removals;
use crate::cluster::reading::{list_cluster_machines, membership_of_machine};
use crate::cluster::record::ClusterRecord;
use crate::cluster::snapshot::list_snapshots;
#[cfg(feature = "sealing")]
use crate::cluster::transitions::withdraw_cluster_order;
use crate::connection::error::{BmdbError, order_rejected};
use crate::connection::{Bmdb, DbContext as _, database_now};
#[cfg(feature = "sealing")]
use crate::engine::named_lease::NamedLease;
use crate::machine::lookup::{LookupResult, find_machine};
use crate::orders::order::{Order, OrderEffect, OrderResult};
use model::cluster::authority_theft::AuthorityStep;
#[cfg(feature = "sealing")]
use model::cluster::restore::MAX_EPOCH_LEAD;
use model::cluster::restore::{
    ControlPlaneEvidence, check_restore_allowed, check_restore_confirmation, has_authority,
    is_present_authority,
};
use model::cluster::restore_programs::check_restore_programs;
use model::cluster::snapshot::SnapshotView;
use model::cluster::spec::ClusterPart;
use model::humanize::absolute_time;
use model::ids::MachineId;
use model::phase::Phase;

const RESTORING_CLUSTER: &str = "having a cluster brought back";

/// What to restore a cluster from, and where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestoreRequest {
    /// Id of the snapshot; `None` is the newest one.
    pub snapshot: Option<String>,
    /// The machine that restores it; `None` is any candidate.
    pub target_machine: Option<String>,
    /// Whether to restore although most of the control plane answers.
    pub bypass_quorum: bool,
    /// Whether to lose the Kubernetes objects although the snapshot has an image of them.
    pub without_kubernetes: bool,
    /// The words that confirm the loss of Kubernetes objects; may be empty where none are lost.
    pub confirmation: String,
}

/// A snapshot that a machine is to restore. `Debug` shows no order.
#[cfg(feature = "sealing")]
#[derive(Clone, PartialEq, Eq)]
pub struct SnapshotToRestore {
    /// Id of the snapshot.
    pub snapshot: Uuid,
    /// The sealed order. It decides, and the columns of the database do not.
    pub sealed_order: Vec<u8>,
}

#[cfg(feature = "sealing")]
impl fmt::Debug for SnapshotToRestore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SnapshotToRestore").field("snapshot", &self.snapshot).finish_non_exhaustive()
    }
}

/// An image of etcd that a machine is to restore. `Debug` shows no order.
#[cfg(feature = "sealing")]
#[derive(Clone, PartialEq, Eq)]
pub struct ImageToRestore {
    /// Id of the image.
    pub image: Uuid,
    /// Id of its cluster.
    pub cluster: Uuid,
    /// Id of the snapshot that it belongs to.
    pub snapshot: Uuid,
    /// Number of its parts.
    pub parts: u64,
    /// Size in bytes, before sealing.
    pub bytes: u64,
    /// The sealed order. It decides, and the columns of the database do not.
    pub sealed_order: Vec<u8>,
}

#[cfg(feature = "sealing")]
impl fmt::Debug for ImageToRestore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageToRestore")
            .field("image", &self.image)
            .field("cluster", &self.cluster)
            .field("snapshot", &self.snapshot)
            .field("parts", &self.parts)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Bmdb {
    /// Orders that a cluster be restored from a snapshot.
    pub async fn restore_cluster(
        &self,
        order: Order,
        name: String,
        restore: RestoreRequest,
    ) -> Result<OrderResult, BmdbError> {
        self.execute_order(RESTORING_CLUSTER, order, None, (name, restore), |tx, order, (name, restore)| {
            Box::pin(restore_cluster_in_tx(tx, order, name, restore))
        })
        .await
    }
}

#[cfg(feature = "sealing")]
impl Bmdb {
    /// Allocates an epoch for the next machine that receives the request to restore a cluster; `None` if no restore is
    /// ordered.
    pub async fn allocate_cluster_epoch(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
    ) -> Result<Option<u64>, BmdbError> {
        self.transact_under_lease(RESTORING_CLUSTER, lease, (), move |tx, ()| {
            Box::pin(async move {
                let ahead = i64::try_from(MAX_EPOCH_LEAD).unwrap_or(i64::MAX);
                let epoch = sqlx::query_file_scalar!("../../sql/cluster/allocate_epoch.sql", cluster, ahead)
                    .fetch_optional(tx)
                    .await
                    .context(RESTORING_CLUSTER)?;
                Ok(epoch.and_then(|epoch| epoch.try_into().ok()))
            })
        })
        .await
    }

    /// Records that a machine has restored a cluster, and withdraws its order.
    pub async fn record_cluster_restored(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        machine: MachineId,
        curators: &[String],
    ) -> Result<(), BmdbError> {
        let doing = "recording that a cluster is restored";
        self.transact_for_machine(doing, (lease, machine), json!(curators), move |tx, curators| {
            Box::pin(async move {
                let restored =
                    sqlx::query_file_scalar!("../../sql/cluster/record_restored.sql", cluster, curators)
                        .fetch_optional(&mut *tx)
                        .await
                        .context(doing)?;
                if restored.is_some() {
                    requeue_revocations(tx, cluster).await?;
                    requeue_key_removals(tx, cluster).await?;
                }
                let reported = restored.map(|_| ("ClusterRestored", "it is the first node of it"));
                withdraw_cluster_order(tx, machine, reported, doing).await
            })
        })
        .await
    }

    /// The image of etcd with this digest, if the machine has an order to restore its cluster with exactly that one.
    pub async fn image_to_restore(
        &self,
        machine: MachineId,
        digest: [u8; 32],
    ) -> Result<Option<ImageToRestore>, BmdbError> {
        let row = self
            .statement("looking for the image that a machine is to restore", move |connection| {
                Box::pin(
                    sqlx::query_file!(
                        "../../sql/cluster/find_image_to_restore.sql",
                        machine.0,
                        digest.as_slice()
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(row.map(|row| ImageToRestore {
            image: row.image_id,
            cluster: row.cluster_id,
            snapshot: row.snapshot_id,
            parts: row.parts.try_into().unwrap_or(0),
            bytes: row.bytes.try_into().unwrap_or(0),
            sealed_order: row.sealed_order,
        }))
    }

    /// The snapshot with this digest, if the machine has an order to restore its cluster from exactly that one.
    pub async fn snapshot_to_restore(
        &self,
        machine: MachineId,
        digest: [u8; 32],
    ) -> Result<Option<SnapshotToRestore>, BmdbError> {
        let row = self
            .statement("looking for the snapshot that a machine is to restore", move |connection| {
                Box::pin(
                    sqlx::query_file!(
                        "../../sql/cluster/find_snapshot_to_restore.sql",
                        machine.0,
                        digest.as_slice()
                    )
                    .fetch_optional(connection),
                )
            })
            .await?;
        Ok(row.map(|row| SnapshotToRestore { snapshot: row.snapshot_id, sealed_order: row.sealed_order }))
    }
}

async fn restore_cluster_in_tx(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    restore: &RestoreRequest,
) -> Result<OrderEffect, BmdbError> {
    let cluster = lock_and_read_cluster(tx, name).await?;
    let id = cluster.id;
    // Objects of a Kubernetes that is being removed are lost anyway.
    let has_kubernetes = read_kubernetes(tx, id).await?.is_some_and(|found| found.removing_by.is_none());
    // Someone who confirms the loss of the objects gets the newest snapshot.
    let wants_objects = has_kubernetes && !restore.without_kubernetes && restore.confirmation.is_empty();
    let kept = list_snapshots(tx, id).await?;
    let snapshot = choose_snapshot(kept, name, restore.snapshot.as_deref(), wants_objects)?;
    let with_image = has_kubernetes && !restore.without_kubernetes && snapshot.image_bytes.is_some();
    let onto = match &restore.target_machine {
        Some(machine) => Some(resolve_target_machine(tx, &cluster, machine).await?),
        None => None,
    };
    let now = database_now(tx).await?;
    let from: Uuid = snapshot.id.parse().map_err(|_| BmdbError::Corrupt("a snapshot's id".to_owned()))?;
    require_present_authority(tx, name, (from, &snapshot)).await?;
    if let (Some(by), Some(restoring)) = (&cluster.restoring_by, &cluster.restoring) {
        // Another order replaces the one before: the epoch of what that one began does not count any more.
        let same = cluster.restoring_from.is_some_and(|from| from.to_string() == snapshot.id)
            && restoring.target_machine.map(|onto| onto.0) == onto.as_ref().map(|(machine, _)| *machine)
            && restoring.image.is_some() == with_image;
        if same {
            let text = format!(
                "is already being restored in exactly this way, as {by} ordered; nothing was changed"
            );
            return Ok(OrderEffect::already(text, None));
        }
    } else if !restore.bypass_quorum {
        check_restore_allowed(&control_plane_evidence(&cluster), now)
            .map_err(|(reason, text)| order_rejected(reason, format!("the cluster {name} {text}")))?;
    }
    let loses_objects = has_kubernetes && !with_image;
    check_restore_confirmation(loses_objects, name, snapshot.taken_at, now, &restore.confirmation)
        .map_err(|(reason, text)| order_rejected(reason, format!("the cluster {name} {text}")))?;
    if with_image {
        require_restoring_machine(tx, &cluster, from, onto.as_ref()).await?;
    }
    let machine = onto.as_ref().map(|(machine, _)| *machine);
    sqlx::query!(
        "UPDATE cluster SET restoring_since = clock_timestamp(), restoring_from = $2, restoring_onto = $3,
             restoring_by = $4, restoring_with_image = $5, settled = FALSE, version = version + 1
         WHERE cluster_id = $1",
        id,
        from,
        machine,
        order.actor.name,
        with_image
    )
    .execute(&mut *tx)
    .await
    .context(RESTORING_CLUSTER)?;
    let place =
        onto.map_or_else(|| "onto a machine that is free".to_owned(), |(_, name)| format!("onto {name}"));
    let lost = match (loses_objects, with_image) {
        (true, _) => "every Kubernetes object and what was changed since then are lost",
        (false, true) => "its Kubernetes objects come back as they were then, what was changed since is lost",
        (false, false) => "what was changed since then is lost",
    };
    let text = format!(
        "is restored from its snapshot of {} {place}; {lost}, and its old control plane leaves; watch it with: \
         shepherdctl cluster describe {name}",
        absolute_time(snapshot.taken_at)
    );
    let after =
        json!({ "cluster": name, "snapshot": snapshot.id, "onto": machine, "with_image": with_image });
    Ok(OrderEffect::changed(text, None, Some(after)))
}

/// Checks that the authority in the snapshot signs now.
async fn require_present_authority(
    tx: &mut PgConnection,
    name: &str,
    (id, snapshot): (Uuid, &SnapshotView),
) -> Result<(), BmdbError> {
    let found = sqlx::query!(
        "SELECT s.authority, k.statement, k.authority_rotation_step, k.ca_certificate
         FROM cluster_snapshot s JOIN cluster k ON k.cluster_id = s.cluster_id
         WHERE s.snapshot_id = $1",
        id
    )
    .fetch_optional(tx)
    .await
    .context(RESTORING_CLUSTER)?;
    let Some(found) = found else { return Ok(()) };
    let (authority, statement) = (found.authority.as_deref(), found.statement.unwrap_or_default());
    // After a theft there may be no statement of the new authority yet.
    let is_of_before = found.authority_rotation_step == Some(AuthorityStep::Follow.number())
        && statement.is_empty()
        && !has_authority(authority, &found.ca_certificate.unwrap_or_default());
    if !is_of_before && is_present_authority(authority, &statement) {
        return Ok(());
    }
    let text = format!(
        "the cluster {name} is not restored from its snapshot of {}: the authority in it was replaced since then, and \
         nodes refuse what it signs. Name a later one with --snapshot; to list them, run: shepherdctl cluster snapshots \
         {name}",
        absolute_time(snapshot.taken_at)
    );
    Err(order_rejected("FORMER_AUTHORITY", text))
}

/// What is known of a cluster's control plane.
pub(super) fn control_plane_evidence(cluster: &ClusterRecord) -> ControlPlaneEvidence {
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    ControlPlaneEvidence {
        founded: cluster.founded.is_some(),
        polled_at: cluster.polled_at,
        answered_at: cluster.observed_at,
        unreachable_since: cluster.unreachable_since,
        votes: cluster.voters.map(|(voters, reached)| (count(voters), count(reached))),
        etcd_full_since: cluster.etcd_full_since,
    }
}

/// Rejects the restore of an image that no machine can restore: the old control plane must not leave for that.
async fn require_restoring_machine(
    tx: &mut PgConnection,
    cluster: &ClusterRecord,
    snapshot: Uuid,
    onto: Option<&(Uuid, String)>,
) -> Result<(), BmdbError> {
    let version = sqlx::query_scalar!(
        "SELECT etcd_version FROM cluster_image WHERE snapshot_id = $1 AND completed_at IS NOT NULL",
        snapshot
    )
    .fetch_optional(&mut *tx)
    .await
    .context(RESTORING_CLUSTER)?;
    let version = version.flatten().unwrap_or_default();
    let missing = if let Some((machine, name)) = onto {
        check_restoring_machine(tx, *machine, &version).await?.err().map(|text| format!("{name} {text}"))
    } else {
        find_missing_program(tx, cluster, &version).await?
    };
    let Some(missing) = missing else { return Ok(()) };
    let name = &cluster.spec.name;
    let text = format!(
        "the cluster {name} is not restored with its Kubernetes objects: {missing}. A machine reports its programs within ten \
         minutes. To lose the objects, give --without-kubernetes. Nothing was changed"
    );
    Err(order_rejected("NO_RESTORE_PROGRAM", text))
}

/// What keeps every machine that could be chosen from restoring an image of this version of etcd, by the example of one
/// machine; `None` if one can.
async fn find_missing_program(
    tx: &mut PgConnection,
    cluster: &ClusterRecord,
    version: &str,
) -> Result<Option<String>, BmdbError> {
    let of_this = list_cluster_machines(tx, cluster.id).await?;
    // A machine of the old control plane restores the cluster if no other one is free, once it has left.
    let may = of_this.iter().map(|line| &line.member).filter(|member| {
        member.part == ClusterPart::ControlPlane
            && !member.retiring
            && matches!(member.phase, Phase::Ready | Phase::Installed)
    });
    let mut missing = None;
    for member in may {
        let programs = member.report.as_ref().map(|report| report.programs.clone()).unwrap_or_default();
        match check_restore_programs(version, &programs) {
            Ok(()) => return Ok(None),
            Err(text) => missing = missing.or(Some(format!("{} {text}", member.name))),
        }
    }
    Ok(match find_restoring_candidate(tx, &cluster.spec.selector, version).await? {
        Ok(()) => None,
        Err(Some((name, text))) => Some(format!("{name} {text}")),
        Err(None) => missing.or_else(|| Some("no machine is free".to_owned())),
    })
}

/// The snapshot of this id, or the newest one: of those with an image of etcd, if there is one and `wants_objects`.
fn choose_snapshot(
    kept: Vec<SnapshotView>,
    name: &str,
    id: Option<&str>,
    wants_objects: bool,
) -> Result<SnapshotView, BmdbError> {
    let with_objects =
        kept.iter().position(|snapshot| snapshot.image_bytes.is_some()).filter(|_| wants_objects);
    let mut kept = kept.into_iter();
    let found = match id {
        None => kept.nth(with_objects.unwrap_or(0)),
        Some(id) => kept.find(|snapshot| snapshot.id == id),
    };
    found.ok_or_else(|| {
        let which = id.map_or_else(|| "no snapshot".to_owned(), |id| format!("no snapshot {id}"));
        let text =
            format!("{which} of the cluster {name} is kept; run: shepherdctl cluster snapshots {name}");
        order_rejected("NO_SUCH_SNAPSHOT", text)
    })
}

/// The machine that a cluster is restored onto, and its name: one of its old control plane, which leaves first, or a
/// candidate.
async fn resolve_target_machine(
    tx: &mut PgConnection,
    cluster: &ClusterRecord,
    machine: &str,
) -> Result<(Uuid, String), BmdbError> {
    let found = match find_machine(tx, machine).await? {
        LookupResult::One(found) => found,
        LookupResult::Unresolved(text) => return Err(order_rejected("NO_SUCH_MACHINE", text)),
    };
    let (id, short) = (found.machine, found.short_name());
    let of_this = list_cluster_machines(tx, cluster.id).await?;
    let member = of_this.iter().map(|line| &line.member).find(|member| member.machine.0 == id);
    let text = match member {
        Some(member) if member.part == ClusterPart::Worker => {
            Some(format!("{short} is a worker of the cluster, and stays one"))
        }
        Some(member) if member.retiring => Some(format!("{short} is being retired")),
        Some(member) if !matches!(member.phase, Phase::Ready | Phase::Installed) => {
            Some(format!("{short} is {}", member.phase))
        }
        Some(_) => None,
        None if is_candidate(tx, &cluster.spec.selector, id).await? => None,
        None => Some(match membership_of_machine(tx, MachineId(id)).await? {
            Some(part) => format!("{short} is of the cluster {}", part.name),
            None => format!(
                "{short} cannot be chosen: it must be Ready or Installed, not held, not quarantined and not being \
                 retired, have left every other cluster, and match the selector of the cluster ({}); see: \
                 shepherdctl describe machine {short}",
                match cluster.spec.selector.to_string() {
                    selector if selector.is_empty() => "any machine".to_owned(),
                    selector => selector,
                }
            ),
        }),
    };
    match text {
        Some(text) => Err(order_rejected(
            "MACHINE_IN_USE",
            format!("{text}; name another machine with --target-machine"),
        )),
        None => Ok((id, short)),
    }
}
