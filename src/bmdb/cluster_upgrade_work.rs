//! What whoever holds a cluster's lease writes of its upgrade.
//!
//! Every write checks the lease in its own transaction. That a node is asked is written under its machine's lock, before the
//! curators are told; whether a person has said no since is decided again there. So whoever dies in between has asked
//! nobody, or has left what the next one finds.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::read;
use crate::bmdb::intent::count_budget;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{lock, tell};
use crate::model::artefact::read_digest;
use crate::model::cluster::upgrade::{Asked, Bundle, Upgrade};
use crate::model::disturb::{Circumstances, may_disturb};
use crate::model::ids::MachineId;
use crate::model::phase::{Phase, phase_of};
use crate::model::policy::Disturbance;

const ASKING: &str = "asking a node to run a bundle";
const WHAT: &str = "writing down what becomes of an upgrade";

type AskedNodes = std::collections::BTreeMap<String, Asked>;

/// The nodes that were asked, of an upgrade that is under way; it is locked. None where it has ended.
async fn asked(tx: &mut PgConnection, id: &str) -> Result<Option<(AskedNodes, Option<String>)>, BmdbError> {
    let row = sqlx::query_file!("sql/upgrade/lock.sql", id).fetch_optional(tx).await.doing(WHAT)?;
    let Some(row) = row.filter(|row| row.ended.is_none()) else { return Ok(None) };
    let asked = serde_json::from_value(row.asked)
        .map_err(|error| BmdbError::Corrupt(format!("the upgrade {id}: {error}")))?;
    Ok(Some((asked, row.paused)))
}

impl Bmdb {
    /// Writes down that a node is asked to run a bundle, unless somebody has said no since; then that is answered.
    pub async fn ask_in_upgrade(
        &self,
        lease: &NamedLease,
        upgrade: &Upgrade,
        (node, machine): (&str, MachineId),
        bundle: &str,
    ) -> Result<Option<String>, BmdbError> {
        let (bmdb, lease, id) = (self.clone(), lease.clone(), upgrade.id.clone());
        let (node, back) = (node.to_owned(), upgrade.back);
        let versions = upgrade.bundles.clone().map(|(from, to)| if back { from.version } else { to.version });
        let detail = format!(
            "Kubernetes {} ({}), in the upgrade {id}",
            versions.unwrap_or_default(),
            bundle.get(..16).unwrap_or(bundle)
        );
        self.transact(ASKING, move |tx| {
            let (bmdb, lease, id) = (bmdb.clone(), lease.clone(), id.clone());
            let (node, detail) = (node.clone(), detail.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                lock(tx, machine).await?;
                let stands = || Ok(Some("its cluster's upgrade stands still, or has ended".to_owned()));
                let Some((mut asked, paused)) = asked(tx, &id).await? else { return stands() };
                if paused.is_some() {
                    return stands();
                }
                if asked.contains_key(&node) {
                    return Ok(None);
                }
                let snapshot = read(tx, machine).await?;
                let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                let (facts, kind, now) = (&snapshot.facts, Disturbance::RestartAgent, snapshot.now);
                let phase = phase_of(facts, &policy, now);
                if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.holds_at(now)) {
                    return Ok(Some(format!("{} holds it: {}", hold.by, hold.reason)));
                }
                if !matches!(phase, Phase::Ready | Phase::Installed) {
                    return Ok(Some(format!("its machine is {phase}")));
                }
                let window = policy.budgets.get(&kind).map(|budget| budget.window).unwrap_or_default();
                // What its cluster has against it was asked for the plan.
                let counted = count_budget(tx, machine, kind.as_str(), window, None).await?;
                let circumstances = Circumstances { cluster: None, ..counted };
                if let Err(no) = may_disturb(facts, kind, &circumstances, &policy, now, now) {
                    return Ok(Some(no.reason));
                }
                asked.insert(node, Asked { at: now, through: false });
                sqlx::query_file!("sql/upgrade/set_requested_nodes.sql", id, json!(asked))
                    .execute(&mut *tx)
                    .await
                    .doing(ASKING)?;
                let provider =
                    facts.provided.as_ref().map(|provided| provided.provider.as_str()).unwrap_or_default();
                sqlx::query_file!(
                    "sql/roll_out/insert_resolved_intent.sql",
                    Uuid::now_v7(),
                    kind.as_str(),
                    provider,
                    machine.0,
                    lease.session.0,
                    lease.fence,
                    detail
                )
                .execute(&mut *tx)
                .await
                .doing(ASKING)?;
                tell(tx, machine, "KubernetesOrdered", &detail).await?;
                Ok(None)
            })
        })
        .await
    }

    /// Writes down that a node is through.
    pub async fn through_with_upgrade(
        &self,
        lease: &NamedLease,
        id: &str,
        node: &str,
        machine: Option<MachineId>,
    ) -> Result<(), BmdbError> {
        let (lease, id, node) = (lease.clone(), id.to_owned(), node.to_owned());
        self.transact(WHAT, move |tx| {
            let (lease, id, node) = (lease.clone(), id.clone(), node.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                if let Some(machine) = machine {
                    lock(tx, machine).await?;
                }
                let Some((mut asked, _)) = asked(tx, &id).await? else { return Ok(()) };
                let Some(one) = asked.get_mut(&node).filter(|asked| !asked.through) else { return Ok(()) };
                one.through = true;
                sqlx::query_file!("sql/upgrade/set_requested_nodes.sql", id, json!(asked))
                    .execute(&mut *tx)
                    .await
                    .doing(WHAT)?;
                match machine {
                    Some(machine) => {
                        let detail = format!("it is well with the bundle (upgrade {id})");
                        tell(tx, machine, "KubernetesRuns", &detail).await
                    }
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Lets an upgrade stand still.
    pub async fn upgrade_stands_still(
        &self,
        lease: &NamedLease,
        id: &str,
        why: &str,
    ) -> Result<(), BmdbError> {
        let (lease, id, why) = (lease.clone(), id.to_owned(), why.to_owned());
        self.transact(WHAT, move |tx| {
            let (lease, id, why) = (lease.clone(), id.clone(), why.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/upgrade/set_paused.sql", id, Some(why.as_str()) as Option<&str>)
                    .execute(tx)
                    .await
                    .doing(WHAT)?;
                Ok(())
            })
        })
        .await
    }

    /// Writes down that role servers are through.
    pub async fn upgrade_released(&self, lease: &NamedLease, id: &str) -> Result<(), BmdbError> {
        let (lease, id) = (lease.clone(), id.to_owned());
        self.transact(WHAT, move |tx| {
            let (lease, id) = (lease.clone(), id.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                sqlx::query_file!("sql/upgrade/mark_roll_out_done.sql", id).execute(tx).await.doing(WHAT)?;
                Ok(())
            })
        })
        .await
    }

    /// Ends an upgrade that is through: what all nodes run is what the cluster is to run from now on.
    pub async fn upgrade_finished(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        upgrade: &Upgrade,
    ) -> Result<(), BmdbError> {
        let (lease, id, back) = (lease.clone(), upgrade.id.clone(), upgrade.back);
        let target: Option<Bundle> = upgrade.bundles.clone().map(|(from, to)| if back { from } else { to });
        self.transact(WHAT, move |tx| {
            let (lease, id, target) = (lease.clone(), id.clone(), target.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                // Somebody may have sent it back meanwhile, and then it is not through.
                if asked(tx, &id).await?.is_none() {
                    return Ok(());
                }
                let line = crate::bmdb::cluster_upgrade::upgrade_under_way(tx, cluster).await?;
                if line.is_none_or(|line| line.upgrade.back != back || line.upgrade.paused.is_some()) {
                    return Ok(());
                }
                let how = if back { "rolled back" } else { "finished" };
                let ended = sqlx::query_file_scalar!("sql/upgrade/end.sql", id, how)
                    .fetch_optional(&mut *tx)
                    .await
                    .doing(WHAT)?;
                if let (Some(_), Some(target)) = (ended, target) {
                    let digest = read_digest(&target.digest).map_err(BmdbError::Corrupt)?;
                    let digest = digest.0.as_slice();
                    sqlx::query_file!(
                        "sql/kubernetes/set_current_bundle.sql",
                        cluster,
                        digest,
                        target.version
                    )
                    .execute(&mut *tx)
                    .await
                    .doing(WHAT)?;
                }
                Ok(())
            })
        })
        .await
    }
}
