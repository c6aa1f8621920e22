//! Bringing a cluster back from a snapshot: the order for it, and what whoever holds the cluster's lease writes of it.
//!
//! The order says from what, and onto which machine if a person cares; it is refused unless the old control plane is known
//! not to work ([`may_be_restored`]). It changes what is wanted and nothing else, and another order takes its place. What
//! each machine is then asked has an epoch of its own: of two that were asked to restore, because the first was lost in
//! between, the second one's counts.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::action::Done;
use crate::bmdb::audit::{Carried, Order, begin_attempt, end_attempt, given_before, write_down};
use crate::bmdb::cluster::{ClusterLine, clusters, locked, machines, no_such, part_of};
use crate::bmdb::cluster_candidates::is_free;
#[cfg(feature = "shepherd")]
use crate::bmdb::cluster_credential::revoke_again;
#[cfg(feature = "shepherd")]
use crate::bmdb::cluster_key::remove_keys_again;
use crate::bmdb::cluster_snapshot::snapshots;
#[cfg(feature = "shepherd")]
use crate::bmdb::cluster_work::done_with;
use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::find::{Found, find};
use crate::bmdb::inspect;
#[cfg(feature = "shepherd")]
use crate::bmdb::lease::{NamedLease, lock_lease};
#[cfg(feature = "shepherd")]
use crate::bmdb::schedule::lock;
#[cfg(feature = "shepherd")]
use crate::model::cluster::restore::EPOCHS_AHEAD;
use crate::model::cluster::restore::{Evidence, may_be_restored};
use crate::model::cluster::snapshot::SnapshotView;
use crate::model::cluster::spec::Part;
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::telling::absolute;

const DOING: &str = "having a cluster brought back";

/// What a cluster is to be brought back from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restore {
    /// The snapshot; none: the newest one.
    pub snapshot: Option<String>,
    /// The machine that restores it; none: any that is free.
    pub onto: Option<String>,
    /// Do it though most of its control plane answers.
    pub bypass_quorum: bool,
}

impl Bmdb {
    /// Has a cluster brought back from a snapshot.
    pub async fn restore_cluster(
        &self,
        order: Order,
        name: String,
        restore: Restore,
    ) -> Result<Carried, BmdbError> {
        let given = order.clone();
        let carried = self
            .ordered(DOING, move |tx| {
                let (order, name, restore) = (order.clone(), name.clone(), restore.clone());
                Box::pin(async move { order_restore(tx, &order, &name, &restore).await })
            })
            .await;
        self.note_refusal(carried, &given, None).await
    }

    /// An epoch for the next machine that is asked to restore a cluster; none when it is not to be restored.
    #[cfg(feature = "shepherd")]
    pub async fn next_epoch(&self, lease: &NamedLease, cluster: Uuid) -> Result<Option<u64>, BmdbError> {
        let lease = lease.clone();
        self.transact(DOING, move |tx| {
            let lease = lease.clone();
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let ahead = i64::try_from(EPOCHS_AHEAD).unwrap_or(i64::MAX);
                let epoch = sqlx::query_file_scalar!("sql/cluster/allocate_epoch.sql", cluster, ahead)
                    .fetch_optional(tx)
                    .await
                    .doing(DOING)?;
                Ok(epoch.and_then(|epoch| epoch.try_into().ok()))
            })
        })
        .await
    }

    /// Writes down that a machine has brought a cluster back, and asks it for that no more.
    #[cfg(feature = "shepherd")]
    pub async fn cluster_restored(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        machine: MachineId,
        curators: &[String],
    ) -> Result<(), BmdbError> {
        let (lease, curators) = (lease.clone(), json!(curators));
        let doing = "writing down that a cluster is back";
        self.transact(doing, move |tx| {
            let (lease, curators) = (lease.clone(), curators.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                let restored = sqlx::query_file_scalar!("sql/cluster/record_restored.sql", cluster, curators)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(doing)?;
                if restored.is_some() {
                    revoke_again(tx, cluster).await?;
                    remove_keys_again(tx, cluster).await?;
                }
                let told = restored.map(|_| ("ClusterRestored", "it is the first node of it"));
                done_with(tx, machine, told, doing).await
            })
        })
        .await
    }

    /// The snapshot of this digest, if the machine is asked to restore its cluster from just that one.
    #[cfg(feature = "shepherd")]
    pub async fn snapshot_for(
        &self,
        machine: MachineId,
        digest: [u8; 32],
    ) -> Result<Option<Uuid>, BmdbError> {
        self.statement("looking for the snapshot that a machine is to restore", move |pool| {
            Box::pin(async move {
                sqlx::query_file_scalar!(
                    "sql/cluster/find_snapshot_to_restore.sql",
                    machine.0,
                    digest.as_slice()
                )
                .fetch_optional(pool)
                .await
            })
        })
        .await
    }
}

fn refused(reason: &'static str, said: String) -> BmdbError {
    BmdbError::OrderRefused { reason, said }
}

async fn order_restore(
    tx: &mut PgConnection,
    order: &Order,
    name: &str,
    restore: &Restore,
) -> Result<Carried, BmdbError> {
    if let Some(carried) = given_before(tx, order).await? {
        return Ok(carried);
    }
    let (id, _) = locked(tx, name).await?;
    let cluster = clusters(tx, Some(name)).await?.pop().ok_or_else(|| no_such(name))?;
    let snapshot = chosen(snapshots(tx, id).await?, name, restore.snapshot.as_deref())?;
    let onto = match &restore.onto {
        Some(machine) => Some(onto(tx, &cluster, machine).await?),
        None => None,
    };
    let now = inspect::now(tx).await?;
    if let (Some(by), Some(restoring)) = (&cluster.restoring_by, &cluster.restoring) {
        // Another order takes the place of the one before: what that began is of an epoch that counts no more.
        let same = cluster.restoring_from.is_some_and(|from| from.to_string() == snapshot.id)
            && restoring.onto.map(|onto| onto.0) == onto.as_ref().map(|(machine, _)| *machine);
        if same {
            let said = format!("is being restored just so already, as {by} ordered; nothing was changed");
            return write_down(tx, order, None, Done { changed: false, said }, None, None).await;
        }
    } else if !restore.bypass_quorum {
        may_be_restored(&evidence(&cluster), now)
            .map_err(|(reason, said)| refused(reason, format!("the cluster {name} {said}")))?;
    }
    begin_attempt(tx, order).await?;
    let from: Uuid = snapshot.id.parse().map_err(|_| BmdbError::Corrupt("a snapshot's id".to_owned()))?;
    let machine = onto.as_ref().map(|(machine, _)| *machine);
    sqlx::query_file!("sql/cluster/start_restore.sql", id, from, machine, order.actor.name)
        .execute(&mut *tx)
        .await
        .doing(DOING)?;
    end_attempt(tx, order).await?;
    let place =
        onto.map_or_else(|| "onto a machine that is free".to_owned(), |(_, name)| format!("onto {name}"));
    let said = format!(
        "is restored from its snapshot of {} {place}; what was changed since then is lost, and its old control plane \
         leaves; watch it with: shepherdctl cluster describe {name}",
        absolute(snapshot.taken_at)
    );
    let after = json!({ "cluster": name, "snapshot": snapshot.id, "onto": machine });
    write_down(tx, order, None, Done { changed: true, said }, None, Some(after)).await
}

fn evidence(cluster: &ClusterLine) -> Evidence {
    let count = |count: i64| usize::try_from(count).unwrap_or(0);
    Evidence {
        founded: cluster.founded.is_some(),
        looked_at: cluster.looked_at,
        seen_at: cluster.seen_at,
        away_since: cluster.away_since,
        votes: cluster.voters.map(|(voters, reached)| (count(voters), count(reached))),
    }
}

/// The snapshot of this id, or the newest one.
fn chosen(kept: Vec<SnapshotView>, name: &str, id: Option<&str>) -> Result<SnapshotView, BmdbError> {
    let mut kept = kept.into_iter();
    let found = match id {
        None => kept.next(),
        Some(id) => kept.find(|snapshot| snapshot.id == id),
    };
    found.ok_or_else(|| {
        let which = id.map_or_else(|| "no snapshot".to_owned(), |id| format!("no snapshot {id}"));
        let said =
            format!("{which} of the cluster {name} is kept; run: shepherdctl cluster snapshots {name}");
        refused("NO_SUCH_SNAPSHOT", said)
    })
}

/// The machine that a cluster is to be restored onto, and its name: one of its old control plane, which leaves first, or
/// one that may be chosen for it.
async fn onto(
    tx: &mut PgConnection,
    cluster: &ClusterLine,
    machine: &str,
) -> Result<(Uuid, String), BmdbError> {
    let found = match find(tx, machine).await? {
        Found::One(found) => found,
        Found::Not(said) => return Err(refused("NO_SUCH_MACHINE", said)),
    };
    let (id, short) = (found.machine, found.short());
    let of_this = machines(tx, cluster.id).await?;
    let member = of_this.iter().map(|line| &line.member).find(|member| member.machine.0 == id);
    let said = match member {
        Some(member) if member.part == Part::Worker => {
            Some(format!("{short} is a worker of the cluster, and goes on as one"))
        }
        Some(member) if member.retiring => Some(format!("{short} is being retired")),
        Some(member) if !matches!(member.phase, Phase::Ready | Phase::Installed) => {
            Some(format!("{short} is {}", member.phase))
        }
        Some(_) => None,
        None if is_free(tx, &cluster.spec.selector, id).await? => None,
        None => Some(match part_of(tx, MachineId(id)).await? {
            Some(part) => format!("{short} is of the cluster {}", part.name),
            None => format!(
                "{short} cannot be chosen: it must be Ready or Installed, not held, not quarantined and not being \
                 retired, have left every other cluster, and fit what the cluster was made with ({}); see: \
                 shepherdctl describe machine {short}",
                match cluster.spec.selector.to_string() {
                    selector if selector.is_empty() => "any machine".to_owned(),
                    selector => selector,
                }
            ),
        }),
    };
    match said {
        Some(said) => Err(refused("MACHINE_IN_USE", format!("{said}; name another machine with --onto"))),
        None => Ok((id, short)),
    }
}
