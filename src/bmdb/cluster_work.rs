//! What whoever holds a cluster's lease reads and writes of it.
//!
//! Every write checks the lease in its own transaction, so that one who was away for too long changes nothing any more.
//! What concerns a machine is written under that machine's lock and told in its history, like everything that becomes of
//! a machine.

use serde_json::{Value, json};
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::cluster::{ClusterAndMachines, clusters, with_all};
use crate::bmdb::cluster_credential::remove_credentials;
use crate::bmdb::cluster_key::forget_former_keys;
use crate::bmdb::cluster_kubernetes::remove_of_cluster;
use crate::bmdb::cluster_snapshot::remove_snapshots;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::inspect;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{lock, tell};
use crate::model::cluster::declared::ServiceView;
use crate::model::cluster::disturb::FRESH;
use crate::model::cluster::kubernetes::OnNode;
use crate::model::cluster::kubernetes_view::Known;
use crate::model::cluster::spec::Part;
use crate::model::cluster::state::Wanted;
use crate::model::ids::MachineId;
use crate::model::phase::{Phase, phase_of};
use crate::model::time::Timestamp;

/// Kind of the named lease; its name is the cluster's id.
pub const LEASE: &str = "cluster";

/// What a pass found of a machine, as it is shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineLook {
    /// What it waits for.
    pub waits: Option<String>,
    /// Its node's id, state, roles and health.
    pub node: Option<(String, &'static str, Vec<String>, &'static str)>,
    /// Whether its node is a member of etcd that votes.
    pub voter: bool,
    /// What its node runs of operators' roles.
    pub services: Vec<ServiceView>,
    /// What its node runs of Kubernetes.
    pub kubernetes: Option<OnNode>,
}

/// What a pass found, as it is shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// What the cluster waits for as a whole.
    pub waits: Vec<String>,
    /// Whether it is as it is to be, and nothing had to be done.
    pub settled: bool,
    /// When its curators were asked, if they answered.
    pub seen: Option<Timestamp>,
    /// Members of etcd that vote, and how many of them are reached; none when the curators did not answer.
    pub votes: Option<(usize, usize)>,
    /// What the curators have of Kubernetes; none where they did not say.
    pub kubernetes: Option<Known>,
    /// Each machine.
    pub machines: Vec<(MachineId, MachineLook)>,
}

impl Bmdb {
    /// Every cluster's id and name, in order of their ids.
    pub async fn cluster_names(&self) -> Result<Vec<(Uuid, String)>, BmdbError> {
        let rows = self
            .statement("looking for clusters", |pool| {
                Box::pin(async move { sqlx::query_file!("sql/cluster/list_names.sql").fetch_all(pool).await })
            })
            .await?;
        Ok(rows.into_iter().map(|row| (row.cluster_id, row.name)).collect())
    }

    /// A cluster with its machines, and the database's clock then; none when it is gone.
    pub async fn cluster(&self, name: &str) -> Result<Option<(ClusterAndMachines, Timestamp)>, BmdbError> {
        let name = name.to_owned();
        self.transact("reading a cluster", move |tx| {
            let name = name.clone();
            Box::pin(async move {
                let Some(cluster) = clusters(tx, Some(&name)).await?.pop() else { return Ok(None) };
                Ok(Some((with_all(tx, cluster).await?, inspect::now(tx).await?)))
            })
        })
        .await
    }

    /// Makes a machine part of a cluster, if it is still free and well.
    pub async fn choose_for_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        part: Part,
    ) -> Result<bool, BmdbError> {
        let (bmdb, lease, detail) = (self.clone(), lease.clone(), format!("as {part} of cluster {name}"));
        let what = "choosing a machine for a cluster";
        self.transact(what, move |tx| {
            let (bmdb, lease, detail) = (bmdb.clone(), lease.clone(), detail.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                let snapshot = read(tx, machine).await?;
                let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                let phase = phase_of(&snapshot.facts, &policy, snapshot.now);
                let held = snapshot.facts.hold.as_ref().is_some_and(|hold| hold.holds_at(snapshot.now));
                if held || !matches!(phase, Phase::Ready | Phase::Installed) {
                    return Ok(false);
                }
                let chosen = sqlx::query_file_scalar!(
                    "sql/cluster/insert_member.sql",
                    machine.0,
                    cluster,
                    part.as_str()
                )
                .fetch_optional(&mut *tx)
                .await
                .doing(what)?;
                if chosen.is_some() {
                    tell(tx, machine, "ClusterChosen", &detail).await?;
                }
                Ok(chosen.is_some())
            })
        })
        .await
    }

    /// Asks a machine for something about its cluster; `sealed` is the order.
    pub async fn ask_about_cluster(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        (what, name): (Wanted, &str),
        sealed: Vec<u8>,
    ) -> Result<(), BmdbError> {
        let doing = "asking a machine about a cluster";
        let detail = match what {
            Wanted::Found => format!("to found cluster {name}"),
            Wanted::Join => format!("to join cluster {name}"),
            Wanted::Leave => format!("to leave cluster {name}"),
        };
        self.of_machine(lease, machine, doing, move |tx| {
            let (sealed, detail) = (sealed.clone(), detail.clone());
            Box::pin(async move {
                let generation = sqlx::query_file_scalar!("sql/cluster/next_order_generation.sql", machine.0)
                    .fetch_one(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!(
                    "sql/cluster/upsert_order.sql",
                    machine.0,
                    generation,
                    what.as_str(),
                    sealed
                )
                .execute(&mut *tx)
                .await
                .doing(doing)?;
                tell(tx, machine, "ClusterAsked", &detail).await
            })
        })
        .await
    }

    /// Writes down by what a cluster is known from now on, and asks its founder to found it no more.
    pub async fn cluster_founded(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        machine: MachineId,
        ca_certificate: &[u8],
        curators: &[String],
    ) -> Result<(), BmdbError> {
        let doing = "writing down that a cluster is founded";
        let (ca_certificate, curators) = (ca_certificate.to_vec(), json!(curators));
        self.of_machine(lease, machine, doing, move |tx| {
            let (ca_certificate, curators) = (ca_certificate.clone(), curators.clone());
            Box::pin(async move {
                let founded = sqlx::query_file_scalar!(
                    "sql/cluster/record_founded.sql",
                    cluster,
                    ca_certificate,
                    curators
                )
                .fetch_optional(&mut *tx)
                .await
                .doing(doing)?;
                let told = founded.map(|_| ("ClusterFounded", "it is the first node"));
                done_with(tx, machine, told, doing).await
            })
        })
        .await
    }

    /// Has a machine leave its cluster, from now on.
    pub async fn leave_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        why: &str,
    ) -> Result<(), BmdbError> {
        let doing = "having a machine leave its cluster";
        let (why, detail) = (why.to_owned(), format!("cluster {name}: {why}"));
        self.of_machine(lease, machine, doing, move |tx| {
            let (why, detail) = (why.clone(), detail.clone());
            Box::pin(async move {
                let changed =
                    sqlx::query_file_scalar!("sql/cluster/mark_leaving.sql", machine.0, cluster, why)
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(doing)?;
                if changed.is_none() {
                    return Ok(());
                }
                sqlx::query_file!("sql/cluster/upsert_left_node.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!("sql/cluster/clear_restore_target.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                tell(tx, machine, "ClusterLeaving", &detail).await
            })
        })
        .await
    }

    /// Lets a machine be none of the cluster's.
    pub async fn forget_in_cluster(
        &self,
        lease: &NamedLease,
        (cluster, name): (Uuid, &str),
        machine: MachineId,
        how: &str,
    ) -> Result<(), BmdbError> {
        let doing = "letting a machine leave its cluster";
        let detail = format!("cluster {name}: {how}");
        self.of_machine(lease, machine, doing, move |tx| {
            let detail = detail.clone();
            Box::pin(async move {
                sqlx::query_file!("sql/cluster/upsert_left_node.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!("sql/cluster/update_left_time.sql", machine.0, cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                let gone = sqlx::query_file_scalar!("sql/cluster/delete_member.sql", machine.0, cluster)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(doing)?;
                match gone {
                    Some(_) => tell(tx, machine, "ClusterLeft", &detail).await,
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Forgets a cluster that has ended, with its secrets, and whatever is sealed below their names.
    pub async fn remove_cluster(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        secrets: &[String],
    ) -> Result<(), BmdbError> {
        let (lease, secrets, doing) = (lease.clone(), secrets.to_vec(), "forgetting a cluster");
        self.transact(doing, move |tx| {
            let (lease, secrets) = (lease.clone(), secrets.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                remove_snapshots(tx, cluster).await?;
                remove_credentials(tx, cluster).await?;
                forget_former_keys(tx, cluster).await?;
                remove_of_cluster(tx, cluster).await?;
                sqlx::query_file!("sql/cluster/delete_left_nodes.sql", cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!("sql/cluster/delete_declarations.sql", cluster)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!("sql/cluster/delete.sql", cluster)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(doing)?;
                sqlx::query_file!("sql/cluster/delete_lease.sql", lease.kind, lease.name)
                    .execute(&mut *tx)
                    .await
                    .doing(doing)?;
                for name in &secrets {
                    sqlx::query_file!("sql/cluster/delete_secrets.sql", name)
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Keeps where a cluster's curators are, and how often they say that it was restored.
    pub async fn keep_curators(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        (curators, epoch): (&[String], u64),
    ) -> Result<(), BmdbError> {
        let (lease, curators, doing) = (lease.clone(), json!(curators), "keeping where curators are");
        let epoch = i64::try_from(epoch).unwrap_or(i64::MAX);
        self.transact(doing, move |tx| {
            let (lease, curators) = (lease.clone(), curators.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/cluster/update_curators.sql", cluster, curators, epoch)
                    .execute(tx)
                    .await
                    .doing(doing)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down what a pass found.
    pub async fn looked_at_cluster(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        look: &Look,
    ) -> Result<(), BmdbError> {
        let (lease, look, doing) = (lease.clone(), look.clone(), "writing down what became of a cluster");
        self.transact(doing, move |tx| {
            let (lease, look) = (lease.clone(), look.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
                sqlx::query_file!(
                    "sql/cluster/record_observation.sql",
                    cluster,
                    json!(look.waits),
                    look.seen,
                    look.votes.map(|(voters, _)| count(voters)),
                    look.votes.map(|(_, reached)| count(reached)),
                    look.settled,
                    i64::try_from(FRESH.as_millis()).unwrap_or(i64::MAX)
                )
                .execute(&mut *tx)
                .await
                .doing(doing)?;
                if let Some(known) = &look.kubernetes {
                    sqlx::query_file!("sql/kubernetes/update_observed_state.sql", cluster, json!(known))
                        .execute(&mut *tx)
                        .await
                        .doing(doing)?;
                }
                looked_at_machines(tx, cluster, &look).await
            })
        })
        .await
    }

    async fn of_machine<F>(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        doing: &'static str,
        body: F,
    ) -> Result<(), BmdbError>
    where
        F: for<'c> Fn(&'c mut PgConnection) -> futures::future::BoxFuture<'c, Result<(), BmdbError>>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        let lease = lease.clone();
        self.transact(doing, move |tx| {
            let (lease, body) = (lease.clone(), body.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                body(tx).await
            })
        })
        .await
    }
}

/// What a machine was to do for its cluster is done: it is asked no more, and the first time that is told.
pub(super) async fn done_with(
    tx: &mut PgConnection,
    machine: MachineId,
    told: Option<(&str, &str)>,
    doing: &'static str,
) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/cluster/withdraw_order.sql", machine.0).execute(&mut *tx).await.doing(doing)?;
    match told {
        Some((event, detail)) => tell(tx, machine, event, detail).await,
        None => Ok(()),
    }
}

async fn looked_at_machines(tx: &mut PgConnection, cluster: Uuid, look: &Look) -> Result<(), BmdbError> {
    let of = |field: &dyn Fn(&MachineLook) -> Option<String>| -> Vec<Option<String>> {
        look.machines.iter().map(|(_, machine)| field(machine)).collect()
    };
    let ids: Vec<Uuid> = look.machines.iter().map(|(machine, _)| machine.0).collect();
    let waits = of(&|machine| machine.waits.clone());
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
        "sql/cluster/record_machine_observations.sql",
        cluster,
        look.seen,
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
    .doing("writing down what became of a cluster's machines")?;
    Ok(())
}
