//! State transitions of a cluster upgrade, written under the cluster's lease.
//!
//! Every write checks the lease in its own transaction. A request to a node is recorded under its machine's lock before
//! the curators receive it, and that transaction decides again whether an operator has objected since. So a shepherd
//! that dies in between has sent no request, or has left a record that the next one finds.

use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::engine::facts::read_snapshot;
use crate::engine::intent::{lock_disruption_context, record_ordered_disruption};
use crate::engine::named_lease::NamedLease;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::{lock_due_rows, record_event};
use model::artefact::parse_digest;
use model::cluster::upgrade::{BundleRef, ClusterUpgrade, NodeUpgrade};
use model::disruption::{DisruptionContext, may_disrupt};
use model::ids::MachineId;
use model::phase::{Phase, phase_of};
use model::policy::DisruptionKind;

const REQUESTING: &str = "ordering a node to run a bundle";
const OPERATION: &str = "recording the progress of an upgrade";

type RequestedNodes = std::collections::BTreeMap<String, NodeUpgrade>;

/// Locks an upgrade under way and reads the nodes that have a request; `None` if it has ended.
async fn lock_requested_nodes(
    tx: &mut PgConnection,
    id: &str,
) -> Result<Option<(RequestedNodes, Option<String>)>, BmdbError> {
    let row =
        sqlx::query_file!("../../sql/upgrade/lock.sql", id).fetch_optional(tx).await.context(OPERATION)?;
    let Some(row) = row.filter(|row| row.ended.is_none()) else { return Ok(None) };
    let requests = serde_json::from_value(row.requested_nodes)
        .map_err(|error| BmdbError::Corrupt(format!("the upgrade {id}: {error}")))?;
    Ok(Some((requests, row.paused)))
}

impl Bmdb {
    /// Records the request that a node run a bundle, unless something speaks against it by now; returns that reason
    /// then.
    pub async fn request_node_upgrade(
        &self,
        lease: &NamedLease,
        upgrade: &ClusterUpgrade,
        (node, machine): (&str, MachineId),
        bundle: &str,
    ) -> Result<Option<String>, BmdbError> {
        let (id, back) = (upgrade.id.clone(), upgrade.rolling_back);
        let versions = upgrade.bundles.clone().map(|(from, to)| if back { from.version } else { to.version });
        let detail = format!(
            "Kubernetes {} ({}), in the upgrade {id}",
            versions.unwrap_or_default(),
            bundle.get(..16).unwrap_or(bundle)
        );
        let (session, fence) = (lease.session, lease.fence);
        let given = (self.clone(), id, node.to_owned(), detail);
        self.transact_for_machine(REQUESTING, (lease, machine), given, move |tx, (bmdb, id, node, detail)| {
            Box::pin(async move {
                let not_under_way = || Ok(Some("its cluster's upgrade is paused, or has ended".to_owned()));
                let Some((mut requests, paused)) = lock_requested_nodes(tx, id).await? else {
                    return not_under_way();
                };
                if paused.is_some() {
                    return not_under_way();
                }
                if requests.contains_key(node) {
                    return Ok(None);
                }
                let snapshot = read_snapshot(tx, machine).await?;
                let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                let (facts, kind, now) = (&snapshot.facts, DisruptionKind::RestartAgent, snapshot.now);
                let phase = phase_of(facts, &policy, now);
                if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.is_active_at(now)) {
                    return Ok(Some(format!("{} holds it: {}", hold.by, hold.reason)));
                }
                if !matches!(phase, Phase::Ready | Phase::Installed) {
                    return Ok(Some(format!("its machine is {phase}")));
                }
                let window = policy.budgets.get(&kind).map(|budget| budget.window).unwrap_or_default();
                // The plan has already considered the cluster's objections.
                let counted = lock_disruption_context(tx, machine, kind.as_str(), window, None).await?;
                let circumstances = DisruptionContext { cluster: None, ..counted };
                if let Err(no) = may_disrupt(facts, kind, &circumstances, &policy, now, now) {
                    return Ok(Some(no.reason));
                }
                requests.insert(node.clone(), NodeUpgrade { requested_at: now, is_done: false });
                sqlx::query_file!("../../sql/upgrade/set_requested_nodes.sql", id, json!(requests))
                    .execute(&mut *tx)
                    .await
                    .context(REQUESTING)?;
                let holder = (session, fence);
                record_ordered_disruption(tx, facts, kind, machine, holder, detail, REQUESTING).await?;
                record_event(tx, machine, "KubernetesOrdered", detail).await?;
                Ok(None)
            })
        })
        .await
    }

    /// Records that a node is finished.
    pub async fn record_node_upgraded(
        &self,
        lease: &NamedLease,
        id: &str,
        node: &str,
        machine: Option<MachineId>,
    ) -> Result<(), BmdbError> {
        let arguments = (id.to_owned(), node.to_owned());
        self.transact_under_lease(OPERATION, lease, arguments, move |tx, (id, node)| {
            Box::pin(async move {
                if let Some(machine) = machine {
                    lock_due_rows(tx, machine).await?;
                }
                let Some((mut requests, _)) = lock_requested_nodes(tx, id).await? else { return Ok(()) };
                let Some(one) = requests.get_mut(node).filter(|upgrade| !upgrade.is_done) else {
                    return Ok(());
                };
                one.is_done = true;
                sqlx::query_file!("../../sql/upgrade/set_requested_nodes.sql", id, json!(requests))
                    .execute(&mut *tx)
                    .await
                    .context(OPERATION)?;
                match machine {
                    Some(machine) => {
                        let detail = format!("it is healthy with the bundle (upgrade {id})");
                        record_event(tx, machine, "KubernetesRuns", &detail).await
                    }
                    None => Ok(()),
                }
            })
        })
        .await
    }

    /// Pauses an upgrade, with the reason.
    pub async fn pause_upgrade(&self, lease: &NamedLease, id: &str, why: &str) -> Result<(), BmdbError> {
        let (id, why) = (id.to_owned(), why.to_owned());
        self.execute_under_lease(OPERATION, lease, move || {
            sqlx::query_file!("../../sql/upgrade/set_paused.sql", id, Some(why.as_str()) as Option<&str>)
        })
        .await
    }

    /// Records that the role servers are finished.
    pub async fn record_upgrade_roll_out_done(&self, lease: &NamedLease, id: &str) -> Result<(), BmdbError> {
        let id = id.to_owned();
        self.execute_under_lease(OPERATION, lease, move || {
            sqlx::query_file!("../../sql/upgrade/mark_roll_out_done.sql", id)
        })
        .await
    }

    /// Ends an upgrade that is finished: what all nodes run is the cluster's specification from now on.
    pub async fn complete_upgrade(
        &self,
        lease: &NamedLease,
        cluster: Uuid,
        upgrade: &ClusterUpgrade,
    ) -> Result<(), BmdbError> {
        let (id, back) = (upgrade.id.clone(), upgrade.rolling_back);
        let target: Option<BundleRef> =
            upgrade.bundles.clone().map(|(from, to)| if back { from } else { to });
        self.transact_under_lease(OPERATION, lease, (id, target), move |tx, (id, target)| {
            Box::pin(async move {
                // An operator may have rolled it back meanwhile, and then it is not finished.
                if lock_requested_nodes(tx, id).await?.is_none() {
                    return Ok(());
                }
                let line = crate::cluster::upgrade::read_active_upgrade(tx, cluster).await?;
                if line.is_none_or(|line| {
                    line.upgrade.rolling_back != back || line.upgrade.pause_reason.is_some()
                }) {
                    return Ok(());
                }
                let how = if back { "rolled back" } else { "finished" };
                let ended = sqlx::query_file_scalar!("../../sql/upgrade/end.sql", id, how)
                    .fetch_optional(&mut *tx)
                    .await
                    .context(OPERATION)?;
                if let (Some(_), Some(target)) = (ended, target) {
                    let digest = parse_digest(&target.digest).map_err(BmdbError::Corrupt)?;
                    let digest = digest.0.as_slice();
                    sqlx::query_file!(
                        "../../sql/kubernetes/set_current_bundle.sql",
                        cluster,
                        digest,
                        target.version
                    )
                    .execute(&mut *tx)
                    .await
                    .context(OPERATION)?;
                }
                Ok(())
            })
        })
        .await
    }
}
