//! State transitions of a cluster, written under its lease: choose, order, found, leave, observe.
//!
//! Every write checks the lease in its own transaction, so that a holder that was away for too long changes nothing any
//! more. Changes of a machine are written under that machine's lock and recorded in its history, like all changes of
//! machines.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::credential::delete_cluster_credentials;
use crate::cluster::kubernetes::delete_cluster_kubernetes;
use crate::cluster::owner_key::delete_former_keys;
use crate::cluster::reading::{list_clusters, read_cluster_details};
use crate::cluster::record::ClusterDetails;
use crate::cluster::snapshot::delete_cluster_snapshots;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::facts::read_snapshot;
use crate::engine::named_lease::NamedLease;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::record_event;
use model::cluster::declaration::ServiceView;
use model::cluster::disruption::OBSERVATION_TTL;
use model::cluster::kubernetes::NodeKubernetes;
use model::cluster::spec::ClusterPart;
use model::cluster::state::MembershipOrder;
use model::cluster::view::KubernetesStatusView;
use model::ids::MachineId;
use model::phase::{Phase, phase_of};
use model::time::Timestamp;

/// Kind of the named lease; its name is the cluster's id.
pub const LEASE_KIND: &str = "cluster";
const ORDERING: &str = "giving a machine an order about a cluster";

/// What a pass observed of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineObservation {
    /// What it waits for.
    pub wait_reason: Option<String>,
    /// Id, state, roles and health of its node.
    pub node: Option<(String, &'static str, Vec<String>, &'static str)>,
    /// Whether its node is a voting member of etcd.
    pub voter: bool,
    /// Services of operators' roles on its node.
    pub services: Vec<ServiceView>,
    /// Kubernetes on its node.
    pub kubernetes: Option<NodeKubernetes>,
}

/// What a pass observed of a cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterObservation {
    /// What the cluster waits for as a whole.
    pub wait_reasons: Vec<String>,
    /// Whether the cluster matches its specification and nothing had to be done.
    pub converged: bool,
    /// When its curators were queried, if they answered; `None` if they did not.
    pub observed_at: Option<Timestamp>,
    /// Voting members of etcd, and how many of them are reachable; `None` when the curators did not answer.
    pub votes: Option<(usize, usize)>,
    /// Size of the database file of its etcd; `None` if the curators did not report it.
    pub etcd_bytes: Option<u64>,
    /// Size of that file from which etcd accepts no writes; `None` if the curators did not report it.
    pub etcd_quota_bytes: Option<u64>,
    /// Whether a member of its etcd has the alarm `NOSPACE`; `None` when the curators did not answer.
    pub is_etcd_full: Option<bool>,
    /// How often its authority was replaced, by its newest statement; `None` without one.
    pub authority_replacements: Option<usize>,
    /// The curators' state of Kubernetes; `None` if they did not report it.
    pub kubernetes: Option<KubernetesStatusView>,
    /// The observation of each machine.
    pub machines: Vec<(MachineId, MachineObservation)>,
}

impl Bmdb {
    /// Id and name of every cluster, in order of their ids.
    pub async fn cluster_names(&self) -> Result<Vec<(Uuid, String)>, BmdbError> {
        let rows = self
            .statement("looking for clusters", |pool| {
                Box::pin(
                    sqlx::query!("SELECT cluster_id, name FROM cluster ORDER BY cluster_id").fetch_all(pool),
                )
            })
            .await?;
        Ok(rows.into_iter().map(|row| (row.cluster_id, row.name)).collect())
    }

    /// A cluster with its machines, and the database's clock when it was read; `None` if it was deleted.
    pub async fn read_cluster(&self, name: &str) -> Result<Option<(ClusterDetails, Timestamp)>, BmdbError> {
        self.transact_with("reading a cluster", name.to_owned(), move |tx, name| {
            Box::pin(async move {
                let Some(cluster) = list_clusters(tx, Some(name)).await?.pop() else { return Ok(None) };
                Ok(Some((read_cluster_details(tx, cluster).await?, database_now(tx).await?)))
            })
        })
        .await
    }

    /// Assigns a machine to a cluster, if it is still a candidate.
    pub async fn assign_to_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        part: ClusterPart,
    ) -> Result<bool, BmdbError> {
        let what = "choosing a machine for a cluster";
        let arguments = (self.clone(), format!("as {part} of cluster {name}"));
        self.transact_for_machine(what, (lease, machine), arguments, move |tx, (bmdb, detail)| {
            Box::pin(async move {
                let snapshot = read_snapshot(tx, machine).await?;
                let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
                let held = snapshot.facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(snapshot.now));
                if held || !matches!(phase, Phase::Ready | Phase::Installed) {
                    return Ok(false);
                }
                let chosen = sqlx::query_file_scalar!(
                    "../../sql/cluster/insert_member.sql",
                    machine.0,
                    cluster,
                    part.as_str()
                )
                .fetch_optional(&mut *tx)
                .await
                .context(what)?;
                if chosen.is_some() {
                    record_event(tx, machine, "ClusterChosen", detail).await?;
                }
                Ok(chosen.is_some())
            })
        })
        .await
    }

    /// Issues an order about its cluster to a machine; `sealed` is the order.
    pub async fn issue_cluster_order(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (what, name): (MembershipOrder, &str),
        sealed: Vec<u8>,
    ) -> Result<(), BmdbError> {
        let detail = match what {
            MembershipOrder::Found => format!("to found cluster {name}"),
            MembershipOrder::Join => format!("to join cluster {name}"),
            MembershipOrder::Leave => format!("to leave cluster {name}"),
        };
        // The name of the event stays as it is: the histories of machines have it, and operators search for it.
        self.place_recorded_order(lease, machine, (what, sealed), ("ClusterAsked", detail)).await
    }

    /// Places a sealed order about its cluster for a machine, and records this event with its detail.
    pub(super) async fn place_recorded_order(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (what, sealed): (MembershipOrder, Vec<u8>),
        (event, detail): (&'static str, String),
    ) -> Result<(), BmdbError> {
        let arguments = (sealed, detail);
        self.transact_for_machine(ORDERING, (lease, machine), arguments, move |tx, (sealed, detail)| {
            Box::pin(async move {
                place_order(tx, machine, what, sealed).await?;
                record_event(tx, machine, event, detail).await
            })
        })
        .await
    }

    /// Records a cluster's identity, and withdraws the order to found it.
    pub async fn record_cluster_founded(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        machine: MachineId,
        ca_certificate: &[u8],
        curators: &[String],
    ) -> Result<(), BmdbError> {
        let doing = "recording the founding of a cluster";
        let arguments = (ca_certificate.to_vec(), json!(curators));
        self.transact_for_machine(
            doing,
            (lease, machine),
            arguments,
            move |tx, (ca_certificate, curators)| {
                Box::pin(async move {
                    let founded = sqlx::query_scalar!(
                    "UPDATE cluster SET founded_at = clock_timestamp(), ca_certificate = $2, curators = $3
                     WHERE cluster_id = $1 AND founded_at IS NULL
                     RETURNING cluster_id",
                    cluster,
                    ca_certificate,
                    curators
                )
                    .fetch_optional(&mut *tx)
                    .await
                    .context(doing)?;
                    let reported = founded.map(|_| ("ClusterFounded", "it is the first node"));
                    withdraw_cluster_order(tx, machine, reported, doing).await
                })
            },
        )
        .await
    }

    /// Marks that a machine has to leave its cluster, from now on. `surplus`: it leaves because an operator made the
    /// cluster smaller, who may have ordered to keep the authority of the cluster.
    pub async fn mark_leaving_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        (why, surplus): (&str, bool),
    ) -> Result<(), BmdbError> {
        let doing = "having a machine leave its cluster";
        let arguments = (why.to_owned(), format!("cluster {name}: {why}"));
        self.transact_for_machine(doing, (lease, machine), arguments, move |tx, (why, detail)| {
            Box::pin(async move {
                let changed = sqlx::query_file_scalar!(
                    "../../sql/cluster/mark_leaving.sql",
                    machine.0,
                    cluster,
                    why,
                    surplus
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                if changed.is_none() {
                    return Ok(());
                }
                sqlx::query_file!("../../sql/cluster/upsert_left_node.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                sqlx::query_file!("../../sql/cluster/clear_restore_target.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                record_event(tx, machine, "ClusterLeaving", detail).await
            })
        })
        .await
    }

    /// Removes a machine from its cluster.
    pub async fn remove_from_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        how: &str,
    ) -> Result<(), BmdbError> {
        let doing = "letting a machine leave its cluster";
        let detail = format!("cluster {name}: {how}");
        self.transact_for_machine(doing, (lease, machine), detail, move |tx, detail| {
            Box::pin(async move {
                sqlx::query_file!("../../sql/cluster/upsert_left_node.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                // From now on the machine is no member of the cluster.
                sqlx::query!(
                    "UPDATE cluster_left_node SET left_at = clock_timestamp()
                     WHERE machine_id = $1 AND cluster_id = $2",
                    machine.0,
                    cluster
                )
                .execute(&mut *tx)
                .await
                .context(doing)?;
                let gone = sqlx::query_scalar!(
                    "DELETE FROM machine_cluster
                     WHERE machine_id = $1 AND cluster_id = $2 RETURNING machine_id",
                    machine.0,
                    cluster
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                match gone {
                    Some(_) => record_event(tx, machine, "ClusterLeft", detail).await,
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Deletes a cluster that has ended, with its secrets, and everything that is sealed below their names.
    pub async fn purge_cluster(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        secrets: &[String],
    ) -> Result<(), BmdbError> {
        let doing = "forgetting a cluster";
        let arguments = (lease.kind.clone(), lease.name.clone(), secrets.to_vec());
        self.transact_under_lease(doing, lease, arguments, move |tx, (kind, name, secrets)| {
            Box::pin(async move {
                delete_cluster_snapshots(tx, cluster).await?;
                delete_cluster_credentials(tx, cluster).await?;
                delete_former_keys(tx, cluster).await?;
                delete_cluster_kubernetes(tx, cluster).await?;
                sqlx::query!("DELETE FROM cluster_left_node WHERE cluster_id = $1", cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                sqlx::query!("DELETE FROM cluster_declaration WHERE cluster_id = $1", cluster)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                sqlx::query!(
                    "DELETE FROM cluster
                     WHERE cluster_id = $1 AND deleting_at IS NOT NULL RETURNING cluster_id",
                    cluster
                )
                .fetch_optional(&mut *tx)
                .await
                .context(doing)?;
                // Nothing acquires the named lease of a deleted cluster again.
                sqlx::query!("DELETE FROM named_lease WHERE kind = $1 AND name = $2", kind, name)
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                for secret in secrets {
                    sqlx::query!(
                        "DELETE FROM sealed_secret WHERE name = $1 OR starts_with(name, $1 || '/')",
                        secret
                    )
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Stores the addresses of a cluster's curators, and the epoch that their statement proves.
    pub async fn store_curators(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (curators, epoch): (&[String], u64),
    ) -> Result<(), BmdbError> {
        let (curators, epoch) = (json!(curators), i64::try_from(epoch).unwrap_or(i64::MAX));
        self.execute_under_lease("keeping where curators are", lease, move || {
            sqlx::query!(
                "UPDATE cluster SET curators = $2, epoch = GREATEST(epoch, $3)
                 WHERE cluster_id = $1 AND (curators IS DISTINCT FROM $2 OR epoch < $3)",
                cluster,
                curators,
                epoch
            )
        })
        .await
    }

    /// Records what a pass observed.
    pub async fn record_cluster_observation(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        look: &ClusterObservation,
    ) -> Result<(), BmdbError> {
        let doing = "recording the state of a cluster";
        self.transact_under_lease(doing, lease, look.clone(), move |tx, look| {
            Box::pin(async move {
                let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
                let size = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
                sqlx::query_file!(
                    "../../sql/cluster/record_observation.sql",
                    cluster,
                    json!(look.wait_reasons),
                    look.observed_at,
                    look.votes.map(|(voters, _)| count(voters)),
                    look.votes.map(|(_, reached)| count(reached)),
                    look.converged,
                    i64::try_from(OBSERVATION_TTL.as_millis()).unwrap_or(i64::MAX),
                    look.etcd_bytes.map(size),
                    look.is_etcd_full,
                    look.authority_replacements.map(count),
                    look.etcd_quota_bytes.map(size)
                )
                .execute(&mut *tx)
                .await
                .context(doing)?;
                if let Some(known) = &look.kubernetes {
                    sqlx::query_file!(
                        "../../sql/kubernetes/update_observed_state.sql",
                        cluster,
                        json!(known)
                    )
                    .execute(&mut *tx)
                    .await
                    .context(doing)?;
                }
                record_machine_observations(tx, cluster, look).await
            })
        })
        .await
    }
}

/// Places a sealed order about its cluster for a machine, in place of the last one.
async fn place_order(
    tx: &mut PgConnection,
    machine: MachineId,
    what: MembershipOrder,
    sealed: &[u8],
) -> Result<(), BmdbError> {
    let generation = compute_next_generation(tx, machine).await?;
    sqlx::query_file!("../../sql/cluster/upsert_order.sql", machine.0, generation, what.as_str(), sealed)
        .execute(tx)
        .await
        .context(ORDERING)
        .map(drop)
}

/// Withdraws the order about its cluster that a machine has carried out. The first time, the event and detail of its
/// line of history are given; `None` afterwards.
pub(super) async fn withdraw_cluster_order(
    tx: &mut PgConnection,
    machine: MachineId,
    reported: Option<(&str, &str)>,
    doing: &'static str,
) -> Result<(), BmdbError> {
    // The order is withdrawn whatever the machine reports.
    sqlx::query!("UPDATE cluster_order SET sealed = NULL WHERE machine_id = $1", machine.0)
        .execute(&mut *tx)
        .await
        .context(doing)?;
    match reported {
        Some((event, detail)) => record_event(tx, machine, event, detail).await,
        None => Ok(()),
    }
}

/// Computes the next generation of a cluster order: one more than any order that the machine ever had, as far as this
/// database or the machine knows.
async fn compute_next_generation(tx: &mut PgConnection, machine: MachineId) -> Result<i64, BmdbError> {
    sqlx::query_scalar!(
        r#"SELECT GREATEST(COALESCE((SELECT generation FROM cluster_order WHERE machine_id = $1), 0),
               COALESCE((SELECT generation FROM machine_cluster_report WHERE machine_id = $1), 0))
               + 1 AS "generation!""#,
        machine.0
    )
    .fetch_one(tx)
    .await
    .context(ORDERING)
}

async fn record_machine_observations(
    tx: &mut PgConnection,
    cluster: Uuid,
    look: &ClusterObservation,
) -> Result<(), BmdbError> {
    let of = |field: &dyn Fn(&MachineObservation) -> Option<String>| -> Vec<Option<String>> {
        look.machines.iter().map(|(_, machine)| field(machine)).collect()
    };
    let ids: Vec<Uuid> = look.machines.iter().map(|(machine, _)| machine.0).collect();
    let waits = of(&|machine| machine.wait_reason.clone());
    let nodes = of(&|machine| machine.node.as_ref().map(|node| node.0.clone()));
    let states = of(&|machine| machine.node.as_ref().map(|node| node.1.to_owned()));
    let health = of(&|machine| machine.node.as_ref().map(|node| node.3.to_owned()));
    let roles: Vec<Option<Value>> =
        look.machines.iter().map(|(_, machine)| machine.node.as_ref().map(|node| json!(node.2))).collect();
    let voters: Vec<bool> = look.machines.iter().map(|(_, machine)| machine.voter).collect();
    let services: Vec<Value> = look.machines.iter().map(|(_, machine)| json!(machine.services)).collect();
    let kubernetes: Vec<Option<Value>> = (look.machines.iter())
        .map(|(_, machine)| machine.kubernetes.as_ref().map(|kubernetes| json!(kubernetes)))
        .collect();
    sqlx::query_file!(
        "../../sql/cluster/record_machine_observations.sql",
        cluster,
        look.observed_at,
        &ids,
        &waits as &[Option<String>],
        &nodes as &[Option<String>],
        &states as &[Option<String>],
        &roles as &[Option<Value>],
        &health as &[Option<String>],
        &voters,
        &services,
        &kubernetes as &[Option<Value>]
    )
    .execute(tx)
    .await
    .context("recording the states of a cluster's machines")?;
    Ok(())
}
