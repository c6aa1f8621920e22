//! Cluster worker: one leased task per cluster that plans and executes.
//!
//! Each cluster has a task under a named lease, so that only one of any number of shepherds works on it at a time. A
//! pass reads what the BMDB knows of the cluster and what its curators report, decides
//! ([`crate::model::cluster::plan::plan_cluster`]), executes the plan, and records what it waits for. Between two
//! passes the task keeps only the connection to the curators.
//!
//! # A crash between any two steps
//!
//! * A machine that was chosen but got no order gets it in the next pass.
//! * A ticket that was created but never sent expires within the hour, and admits one node only.
//! * An epoch that was drawn for a machine to restore the cluster, but never sent, stays unused.
//! * If a curator changed something but its answer was lost, the next pass observes the change.
//! * A key that was created replaces the current one in a later pass, or continues to do so.
//! * An image of etcd that was not completed never counts. The next holder of the lease takes another one.
//! * An authority that the curators began to replace is not replaced twice: the order has the one that it replaces. After a
//!   theft, the one that is stored is used (`authority_theft`).
//!
//! # While the loop is paused
//!
//! A pass observes, records what it would do next, and takes no step. It still takes snapshots, signs and revokes
//! certificates of people, and rotates the shepherd's key: none of that disrupts anything, and operators need it most
//! while the rest is stopped.
//!
//! # Which shepherd may act
//!
//! Before each outward call, the remaining time of the session must be longer than the call. A shepherd that was frozen
//! in between takes no further step and finds its lease gone, and the next holder of the lease plans from the new
//! state. Curators know no fence, but their leader guards each change with what it knows, and each change can be
//! repeated.

mod authority_rotation;
mod authority_theft;
mod certificate_requests;
mod curator_responses;
pub mod curators;
mod images;
mod kubernetes;
mod owner_calls;
mod owner_keys;
mod peer_renewal;
mod secret_keys;
mod snapshots;
pub mod statements;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::cluster::record::ClusterDetails;
use crate::bmdb::cluster::transitions::{ClusterObservation, LEASE_KIND, MachineObservation};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::named_lease::NamedLease;
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::fleet::secret::SecretsKey;
use crate::bmdb::orders::loop_pause::PauseCache;
use crate::curator_client::statement_trust::StatementTrust;
use crate::manager::catch_panic::catch_panic;
use crate::manager::cluster::curators::{CURATOR_TIMEOUT, CuratorCallError, CuratorClient};
use crate::manager::cluster::images::ImageTask;
use crate::manager::failpoint;
use crate::manager::metrics::ManagerMetrics;
use crate::model::cluster::image::FailedImage;
use crate::model::cluster::kubernetes::ObservedKubernetes;
use crate::model::cluster::plan::{ClusterPlan, plan_cluster};
use crate::model::cluster::snapshot::snapshot_due;
use crate::model::cluster::spec::ClusterPart;
use crate::model::cluster::state::{Cluster, CuratorAnswer, ObservedCluster};
use crate::model::cluster::view::KubernetesStatusView;
use crate::model::pause::LoopKind;
use crate::model::time::Timestamp;

/// Component name of its sessions.
pub const COMPONENT: &str = "cluster";
/// Time between two searches for new clusters.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two passes of a cluster that has not converged.
const ACTIVE_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two passes of a converged cluster.
const CONVERGED_INTERVAL: Duration = Duration::from_secs(15);
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Minimum lifetime of its sessions, whatever the configured one is. No call starts that may outlast the session, so a
/// session shorter than the time limit of a call would never do anything.
const MIN_SESSION_TTL: Duration = CURATOR_TIMEOUT.saturating_mul(3);

/// What the cluster worker needs from the service.
#[derive(Clone)]
pub struct ClusterSettings {
    /// Key that seals orders and owner keys.
    pub secrets: Arc<SecretsKey>,
    /// Metrics that count its sessions.
    pub metrics: ManagerMetrics,
    /// Providers with lists of addresses at which nodes do not reach each other. No node of their machines is assigned one.
    pub connection_providers: Arc<BTreeSet<String>>,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum ClusterPassError {
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error(transparent)]
    Curator(#[from] CuratorCallError),
}

/// Runs a task for every cluster until `stop`.
pub async fn run_clusters(sessions: Sessions, settings: ClusterSettings, stop: CancellationToken) {
    let mut clusters_with_task: BTreeSet<Uuid> = BTreeSet::new();
    let mut tasks: JoinSet<Uuid> = JoinSet::new();
    while !stop.is_cancelled() {
        match sessions.bmdb().cluster_names().await {
            Ok(clusters) => {
                for (cluster, name) in clusters {
                    if clusters_with_task.insert(cluster) {
                        let (sessions, settings, stop) = (sessions.clone(), settings.clone(), stop.clone());
                        tasks.spawn(async move {
                            Box::pin(run_cluster(&sessions, (cluster, &name), &settings, &stop)).await;
                            cluster
                        });
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "cannot look for clusters; trying again"),
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(DISCOVERY_INTERVAL) => {}
            Some(Ok(gone)) = tasks.join_next() => { clusters_with_task.remove(&gone); }
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// Works on one cluster until it is deleted or until `stop`. Releases the lease before it returns.
async fn run_cluster(
    sessions: &Sessions,
    (cluster, name): (Uuid, &str),
    settings: &ClusterSettings,
    stop: &CancellationToken,
) {
    let mut gone = false;
    while !gone && !stop.is_cancelled() {
        // Never cancelled half-way: a session that commits after this task has stopped would stay open.
        let details = serde_json::json!({ "cluster": name });
        match sessions.start_lasting_at_least(COMPONENT, details, MIN_SESSION_TTL).await {
            Ok(session) => {
                settings.metrics.record_session_start(COMPONENT);
                let run = run_under_session(sessions.bmdb(), &session, (cluster, name), settings, stop);
                gone = Box::pin(run).await;
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the cluster is not managed any more").await
                {
                    tracing::warn!(cluster = name, %error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => {
                tracing::warn!(cluster = name, %error, "cannot start a session to manage a cluster");
            }
        }
        stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await;
    }
}

/// Makes passes under one session until the session ends or until `stop`. Returns whether the cluster is gone.
async fn run_under_session(
    bmdb: &Bmdb,
    session: &Session,
    (cluster, name): (Uuid, &str),
    settings: &ClusterSettings,
    stop: &CancellationToken,
) -> bool {
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        match bmdb.acquire_named_lease(session, LEASE_KIND, &cluster.to_string()).await {
            Ok(Some(lease)) => {
                tracing::info!(cluster = name, fence = lease.fence, "managing a cluster");
                let mut worker = ClusterWorker {
                    bmdb,
                    session,
                    lease,
                    settings,
                    curators: None,
                    statements: None,
                    image: None,
                    failed_image: None,
                    pauses: PauseCache::default(),
                    cluster,
                    name,
                };
                let gone = Box::pin(worker.run_passes(stop)).await;
                if let Err(error) = bmdb.release_named_lease(&worker.lease).await {
                    tracing::warn!(cluster = name, %error, "cannot release a lease; the reaper will");
                }
                return gone;
            }
            // Another shepherd holds the lease and works on the cluster.
            Ok(None) => match bmdb.read_cluster(name).await {
                Ok(None) => return true,
                _ => drop(stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await),
            },
            Err(error) => {
                tracing::warn!(cluster = name, %error, "cannot take a cluster's lease; trying again");
                stop.run_until_cancelled(tokio::time::sleep(RETRY_PAUSE)).await;
            }
        }
    }
    false
}

/// What the worker does after a pass.
enum ClusterPassOutcome {
    /// The cluster does not exist any more.
    Deleted,
    /// The next pass starts after this time.
    RequeueAfter(Duration),
}

struct ClusterWorker<'t> {
    bmdb: &'t Bmdb,
    session: &'t Session,
    lease: NamedLease,
    settings: &'t ClusterSettings,
    curators: Option<CuratorClient>,
    /// What the cluster's authority stated last; `None` before the first connection.
    statements: Option<StatementTrust>,
    /// The image of etcd that is being taken.
    image: Option<ImageTask>,
    /// The last attempt to take one, if it failed.
    failed_image: Option<FailedImage>,
    pauses: PauseCache,
    cluster: Uuid,
    name: &'t str,
}

impl ClusterWorker<'_> {
    async fn run_passes(&mut self, stop: &CancellationToken) -> bool {
        let name = self.name.to_owned();
        loop {
            let session = self.session;
            // A pass is dropped at its next await when the session ends. The next holder of the lease starts its work
            // over.
            let pause = tokio::select! {
                () = stop.cancelled() => return false,
                result = session.run_while_open(catch_panic(self.run_pass())) => match result {
                    Some(Ok(Ok(ClusterPassOutcome::Deleted))) => return true,
                    Some(Ok(Ok(ClusterPassOutcome::RequeueAfter(pause)))) => pause,
                    None | Some(Ok(Err(ClusterPassError::Bmdb(BmdbError::SessionEnded | BmdbError::LeaseLost)))) => {
                        return false;
                    }
                    Some(Ok(Err(error))) => {
                        tracing::warn!(cluster = name, %error, "a pass over a cluster failed");
                        ACTIVE_INTERVAL
                    }
                    Some(Err(text)) => {
                        tracing::error!(cluster = name, text, "a pass over a cluster panicked; the next one is made");
                        ACTIVE_INTERVAL
                    }
                },
            };
            tokio::select! {
                () = stop.cancelled() => return false,
                () = session.lost().cancelled() => return false,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn run_pass(&mut self) -> Result<ClusterPassOutcome, ClusterPassError> {
        let Some((found, now)) = self.bmdb.read_cluster(self.name).await? else {
            return Ok(ClusterPassOutcome::Deleted);
        };
        if found.cluster.id != self.cluster {
            return Ok(ClusterPassOutcome::Deleted);
        }
        let found = found.without_listed_addresses(&self.settings.connection_providers);
        let view = self.observe_curators(&found).await?;
        let cluster = found.planning_state(view);
        let lacking = ClusterPart::ALL.into_iter().any(|part| cluster.missing_members(part) > 0);
        let candidates =
            if lacking { self.bmdb.cluster_candidates(&cluster.spec.selector).await? } else { Vec::new() };
        let mut planned = plan_cluster(&cluster, &candidates, &found.machine_locations(), now);
        let mut steps = std::mem::take(&mut planned.steps);
        if let Some(next) = steps.first()
            && let Some((pause, at)) = self.pauses.pause_of_loop(self.bmdb, LoopKind::Cluster).await?
        {
            planned.wait_reasons.push(format!(
                "{}; the next step would be: {next}; it continues with: {}",
                pause.describe(at),
                pause.resume_command()
            ));
            steps.clear();
        }
        let busy = !steps.is_empty();
        for step in steps {
            failpoint::hit(COMPONENT, "step-started");
            // The session is renewed soon, or it has ended. In both cases the remaining steps are planned again.
            if self.session.remaining() <= CURATOR_TIMEOUT {
                return Ok(ClusterPassOutcome::RequeueAfter(RETRY_PAUSE));
            }
            if self.apply_step((&found, now), &cluster, &step, &mut planned).await? {
                return Ok(ClusterPassOutcome::Deleted);
            }
        }
        let policy = self.bmdb.policy().1.cluster_snapshots;
        let signer =
            self.statements.as_ref().and_then(|trust| Some(trust.authorities().first()?.fingerprint()));
        if let CuratorAnswer::Observed(seen) = &cluster.observed
            && let Some(why) = snapshot_due(&found.cluster.snapshots, seen, signer.as_deref(), &policy, now)
            && let Err(error) = self.store_snapshot(why, seen, now).await?
        {
            planned.wait_reasons.push(format!("no snapshot of it could be taken: {error}"));
        }
        if let CuratorAnswer::Observed(_) = &cluster.observed
            && let Err(error) = self.process_credentials().await?
        {
            planned.wait_reasons.push(format!("certificates of people have to wait: {error}"));
        }
        if let CuratorAnswer::Observed(_) = &cluster.observed
            && let Err(error) = self.process_kubernetes_users().await?
        {
            planned.wait_reasons.push(format!("certificates for API servers have to wait: {error}"));
        }
        let settled = !busy && planned.is_converged();
        // This does not affect convergence: a cluster that waits for curators of a newer release has still converged.
        if let (CuratorAnswer::Observed(_) | CuratorAnswer::Unreachable(_), Some(founded)) =
            (&cluster.observed, &cluster.identity)
        {
            planned.wait_reasons.extend(self.rotate_owner_keys(founded, cluster.epoch).await?);
        }
        // Nor does this: a cluster works as specified while its authority is replaced.
        let rotates = self.follow_authority(&found, &cluster, &mut planned, now).await?;
        authority_rotation::explain_stop(&found, &cluster, &mut planned, now);
        if let CuratorAnswer::Observed(_) = &cluster.observed {
            planned.wait_reasons.extend(self.follow_image(&found, now).await);
        }
        let observation = ClusterObservation {
            authority_replacements: self
                .statements
                .as_ref()
                .and_then(StatementTrust::current)
                .map(|signed| signed.succession_count()),
            ..build_observation(&cluster, &planned, settled, now)
        };
        self.bmdb.record_cluster_observation(&self.lease, self.cluster, &observation).await?;
        let calm = settled && !rotates;
        Ok(ClusterPassOutcome::RequeueAfter(if calm { CONVERGED_INTERVAL } else { ACTIVE_INTERVAL }))
    }

    /// What the curators report. If none answers, that is the observation, and the pass does not fail.
    async fn observe_curators(&mut self, found: &ClusterDetails) -> Result<CuratorAnswer, ClusterPassError> {
        let over = found.cluster.deleting.is_some() || found.cluster.restoring.is_some();
        let Some(founded) = found.cluster.founded.as_ref().filter(|_| !over) else {
            self.curators = None;
            return Ok(CuratorAnswer::NotQueried);
        };
        if self.curators.as_ref().is_some_and(|client| client.needs_renewal(&founded.ca_certificate)) {
            self.curators = None;
        }
        let requested = async {
            if self.curators.is_none() {
                self.curators = Some(self.connect_curators(founded, found.cluster.epoch).await?);
            }
            match &self.curators {
                Some(client) => {
                    client.observe_cluster(!found.declarations.is_empty(), found.kubernetes.is_some()).await
                }
                None => Err(CuratorCallError::InvalidResponse("no way to it".to_owned())),
            }
        };
        match requested.await {
            Ok((seen, curators)) => {
                let epoch = self.curators.as_ref().map_or(0, CuratorClient::proved_epoch);
                let moved = !curators.is_empty() && curators != founded.curators;
                if moved || epoch > found.cluster.epoch {
                    let curators = if moved { &curators } else { &founded.curators };
                    self.bmdb.store_curators(&self.lease, self.cluster, (curators, epoch)).await?;
                }
                Ok(CuratorAnswer::Observed(seen))
            }
            Err(error) => {
                let error = match self.curators.take() {
                    Some(client) => client.explain_timeout(error),
                    None => error,
                };
                tracing::info!(cluster = self.name, %error, "the curators of a cluster cannot be queried");
                Ok(CuratorAnswer::Unreachable(error.to_string()))
            }
        }
    }
}

/// Builds the record of a pass. `requested_at` is a moment before the curators were queried, by the database's clock.
/// Time that passed since then does not make their answer newer.
fn build_observation(
    cluster: &Cluster,
    planned: &ClusterPlan,
    settled: bool,
    requested_at: Timestamp,
) -> ClusterObservation {
    let none = ObservedCluster::default();
    let (seen, answered) = match &cluster.observed {
        CuratorAnswer::Observed(seen) => (seen, true),
        CuratorAnswer::NotQueried | CuratorAnswer::Unreachable(_) => (&none, false),
    };
    let etcd: BTreeMap<&str, bool> = seen
        .etcd_members
        .iter()
        .filter_map(|member| Some((member.node.as_deref()?, !member.learner)))
        .collect();
    let machines = cluster.members.iter().map(|member| {
        let node = member.key().and_then(|key| seen.node_by_key(&key));
        let look = MachineObservation {
            wait_reason: planned.machine_waits.get(&member.machine).cloned(),
            node: node.map(|node| {
                let roles = node.roles.iter().cloned().collect();
                (node.id.clone(), node.state.as_str(), roles, node.health.as_str())
            }),
            services: node.map(|node| node.services.clone()).unwrap_or_default(),
            kubernetes: node.and_then(|node| node.kubernetes.clone()),
            voter: node.is_some_and(|node| etcd.get(node.id.as_str()).copied().unwrap_or(false)),
        };
        (member.machine, look)
    });
    ClusterObservation {
        wait_reasons: planned.wait_reasons.clone(),
        converged: settled,
        observed_at: answered.then_some(requested_at),
        votes: answered.then(|| seen.vote_counts()),
        etcd_bytes: seen.etcd_bytes,
        etcd_quota_bytes: seen.etcd_quota_bytes,
        is_etcd_full: answered.then_some(seen.is_etcd_full),
        authority_replacements: None,
        kubernetes: match (&cluster.kubernetes, &seen.kubernetes) {
            (Some(wanted), ObservedKubernetes::Present(has)) => {
                Some(KubernetesStatusView::new(&wanted.spec, has))
            }
            (Some(_), ObservedKubernetes::Absent) => Some(KubernetesStatusView::default()),
            _ => None,
        },
        machines: machines.collect(),
    }
}
