//! Clusters: what operators asked for is made of the fleet's machines, and kept so.
//!
//! For each cluster a task, under a named lease, so that of any number of shepherds one at a time has it. A pass reads
//! what the BMDB knows of the cluster and what its curators say, decides ([`crate::model::cluster::plan`]), does what was
//! decided, and writes down what is waited for. Nothing is remembered between two passes but the way to the curators.
//!
//! # A crash between any two steps
//!
//! * A machine that was chosen and asked nothing is asked in the next pass.
//! * A ticket that was made and never handed on expires within the hour, and is good for one node.
//! * An epoch that was drawn for a machine to restore the cluster, and never handed on, is nobody's.
//! * What curators were told and answered to nobody is seen in what they say next.
//! * A key that was made takes the place of the one in force in a later pass, or goes on doing so.
//!
//! # While the loop is paused
//!
//! A pass looks, writes down what it would do next, and takes no step. Snapshots are taken, certificates of people signed
//! and refused, and the shepherd's key replaced, as ever: that disturbs nothing, and is wanted most when somebody has
//! stopped the rest.
//!
//! # Who may do it
//!
//! Before anything goes out, the session must outlast the call: one who was frozen in between does no further step, finds
//! its lease gone, and whoever has it by then decides anew. Curators know no fence, but each change there is guarded by what its leader
//! knows, and can be made twice.

mod credentials;
pub mod curators;
mod keys;
mod kubernetes;
mod snapshots;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::cluster::ClusterAndMachines;
use crate::bmdb::cluster_work::{LEASE, Look, MachineLook};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::lease::NamedLease;
use crate::bmdb::pause::Pauses;
use crate::bmdb::secret::SecretsKey;
use crate::bmdb::session::{Session, Sessions};
use crate::manager::cluster::curators::{ANSWER, CuratorError, Way};
use crate::manager::control_loop::panic_text;
use crate::manager::failpoint;
use crate::manager::metrics::ManagerMetrics;
use crate::model::cluster::kubernetes::Known;
use crate::model::cluster::kubernetes_view::Known as KnownView;
use crate::model::cluster::plan::{Plan, plan};
use crate::model::cluster::snapshot::due;
use crate::model::cluster::spec::Part;
use crate::model::cluster::state::{Cluster, Seen, View};
use crate::model::pause::Loop;
use crate::model::time::Timestamp;

/// Who starts its sessions.
pub const COMPONENT: &str = "cluster";
/// How often new clusters are looked for.
const LOOK: Duration = Duration::from_secs(2);
/// How often a cluster is looked at that is not as it is to be.
const SOON: Duration = Duration::from_secs(2);
/// How often a cluster is looked at that is.
const SETTLED: Duration = Duration::from_secs(15);
const PAUSE: Duration = Duration::from_secs(1);
/// What its sessions last at the least, whatever those of others do: nothing is begun that an answer may outlast, so that
/// under a session of less than an answer's time nothing would ever be.
const LASTS: Duration = ANSWER.saturating_mul(3);

/// What it needs.
#[derive(Clone)]
pub struct ClusterSettings {
    /// What seals orders and owners' keys.
    pub secrets: Arc<SecretsKey>,
    /// Where it counts.
    pub metrics: ManagerMetrics,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum PassError {
    #[error(transparent)]
    Bmdb(#[from] BmdbError),
    #[error(transparent)]
    Curator(#[from] CuratorError),
}

/// Tends every cluster until `stop`.
pub async fn run(sessions: Sessions, settings: ClusterSettings, stop: CancellationToken) {
    let mut tended: BTreeSet<Uuid> = BTreeSet::new();
    let mut tasks: JoinSet<Uuid> = JoinSet::new();
    while !stop.is_cancelled() {
        match sessions.bmdb().cluster_names().await {
            Ok(clusters) => {
                for (cluster, name) in clusters {
                    if tended.insert(cluster) {
                        let (sessions, settings, stop) = (sessions.clone(), settings.clone(), stop.clone());
                        tasks.spawn(async move {
                            tend(&sessions, (cluster, &name), &settings, &stop).await;
                            cluster
                        });
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "cannot look for clusters; trying again"),
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(LOOK) => {}
            Some(Ok(gone)) = tasks.join_next() => { tended.remove(&gone); }
        }
    }
    while tasks.join_next().await.is_some() {}
}

/// Tends one cluster until it is gone or `stop`. The lease is given back before it returns.
async fn tend(
    sessions: &Sessions,
    (cluster, name): (Uuid, &str),
    settings: &ClusterSettings,
    stop: &CancellationToken,
) {
    let mut gone = false;
    while !gone && !stop.is_cancelled() {
        // Never given up half-way: a session that commits after we have stopped would stay open.
        let details = serde_json::json!({ "cluster": name });
        match sessions.start_lasting(COMPONENT, details, LASTS).await {
            Ok(session) => {
                settings.metrics.session_started(COMPONENT);
                gone = passes(sessions.bmdb(), &session, (cluster, name), settings, stop).await;
                if !session.lost().is_cancelled()
                    && let Err(error) = sessions.close(&session, "the cluster is not tended any more").await
                {
                    tracing::warn!(cluster = name, %error, "cannot close a session; the reaper will");
                }
            }
            Err(error) => tracing::warn!(cluster = name, %error, "cannot start a session to tend a cluster"),
        }
        stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
    }
}

/// Makes passes under one session, until it is over or `stop`; says whether the cluster is gone.
async fn passes(
    bmdb: &Bmdb,
    session: &Session,
    (cluster, name): (Uuid, &str),
    settings: &ClusterSettings,
    stop: &CancellationToken,
) -> bool {
    while !stop.is_cancelled() && !session.lost().is_cancelled() {
        match bmdb.take_lease(session, LEASE, &cluster.to_string()).await {
            Ok(Some(lease)) => {
                tracing::info!(cluster = name, fence = lease.fence, "tending a cluster");
                let mut tending = Tending {
                    bmdb,
                    session,
                    lease,
                    settings,
                    way: None,
                    pauses: Pauses::default(),
                    cluster,
                    name,
                };
                let gone = tending.hold(stop).await;
                if let Err(error) = bmdb.give_back_lease(&tending.lease).await {
                    tracing::warn!(cluster = name, %error, "cannot give back a lease; the reaper will");
                }
                return gone;
            }
            // Whoever has it tends it.
            Ok(None) => match bmdb.cluster(name).await {
                Ok(None) => return true,
                _ => drop(stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await),
            },
            Err(error) => {
                tracing::warn!(cluster = name, %error, "cannot take a cluster's lease; trying again");
                stop.run_until_cancelled(tokio::time::sleep(PAUSE)).await;
            }
        }
    }
    false
}

/// What a pass left.
enum After {
    /// There is no such cluster any more.
    Gone,
    /// It is looked at again after this long.
    Again(Duration),
}

struct Tending<'t> {
    bmdb: &'t Bmdb,
    session: &'t Session,
    lease: NamedLease,
    settings: &'t ClusterSettings,
    way: Option<Way>,
    pauses: Pauses,
    cluster: Uuid,
    name: &'t str,
}

impl Tending<'_> {
    async fn hold(&mut self, stop: &CancellationToken) -> bool {
        let name = self.name.to_owned();
        loop {
            let lost = self.session.lost().clone();
            // Dropped at its next wait when the session is over: what it had begun is begun anew by whoever is next.
            let pause = tokio::select! {
                () = stop.cancelled() => return false,
                () = lost.cancelled() => return false,
                result = AssertUnwindSafe(self.pass()).catch_unwind() => match result {
                    Ok(Ok(After::Gone)) => return true,
                    Ok(Ok(After::Again(pause))) => pause,
                    Ok(Err(PassError::Bmdb(BmdbError::SessionOver | BmdbError::LeaseLost))) => return false,
                    Ok(Err(error)) => {
                        tracing::warn!(cluster = name, %error, "a pass over a cluster failed");
                        SOON
                    }
                    Err(panic) => {
                        let text = panic_text(&*panic);
                        tracing::error!(cluster = name, text, "a pass over a cluster panicked; the next one is made");
                        SOON
                    }
                },
            };
            tokio::select! {
                () = stop.cancelled() => return false,
                () = lost.cancelled() => return false,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn pass(&mut self) -> Result<After, PassError> {
        let Some((found, now)) = self.bmdb.cluster(self.name).await? else { return Ok(After::Gone) };
        if found.cluster.id != self.cluster {
            return Ok(After::Gone);
        }
        let view = self.view(&found).await?;
        let cluster = found.cluster(view);
        let lacking = Part::ALL.into_iter().any(|part| cluster.lacks(part) > 0);
        let candidates =
            if lacking { self.bmdb.cluster_candidates(&cluster.spec.selector).await? } else { Vec::new() };
        let mut planned = plan(&cluster, &candidates, &found.places(), now);
        let mut steps = std::mem::take(&mut planned.steps);
        if let Some(next) = steps.first()
            && let Some((pause, at)) = self.pauses.of_all(self.bmdb, Loop::Cluster).await?
        {
            planned.waits.push(format!(
                "{}; the next step would be: {next}; it goes on with: {}",
                pause.sentence(at),
                pause.resume()
            ));
            steps.clear();
        }
        let busy = !steps.is_empty();
        for step in steps {
            failpoint::pass(COMPONENT, "step");
            // It is renewed soon, or it is over; either way the rest is planned anew.
            if self.session.remaining() <= ANSWER {
                return Ok(After::Again(PAUSE));
            }
            if self.take(&found, &cluster, &step, &mut planned).await? {
                return Ok(After::Gone);
            }
        }
        let policy = self.bmdb.policy().1.cluster_snapshots;
        if let View::Seen(seen) = &cluster.view
            && let Some(why) = due(&found.cluster.snapshots, seen, &policy, now)
            && let Err(error) = self.take_snapshot(why, seen, now).await?
        {
            planned.waits.push(format!("no snapshot of it could be taken: {error}"));
        }
        if let View::Seen(_) = &cluster.view
            && let Err(error) = self.tend_credentials().await?
        {
            planned.waits.push(format!("certificates of people have to wait: {error}"));
        }
        if let View::Seen(_) = &cluster.view
            && let Err(error) = self.tend_kubernetes_users().await?
        {
            planned.waits.push(format!("certificates for API servers have to wait: {error}"));
        }
        let settled = !busy && planned.is_settled();
        // Behind that: while it waits for its curators to be of a newer release, the cluster is as it is to be.
        if let (View::Seen(_) | View::Away(_), Some(founded)) = (&cluster.view, &cluster.founded) {
            planned.waits.extend(self.tend_keys(founded, cluster.epoch).await?);
        }
        self.bmdb
            .looked_at_cluster(&self.lease, self.cluster, &look_of(&cluster, &planned, settled, now))
            .await?;
        Ok(After::Again(if settled { SETTLED } else { SOON }))
    }

    /// What the curators say; that none answers is what is known then, and no failure of the pass.
    async fn view(&mut self, found: &ClusterAndMachines) -> Result<View, PassError> {
        let over = found.cluster.deleting.is_some() || found.cluster.restoring.is_some();
        let Some(founded) = found.cluster.founded.as_ref().filter(|_| !over) else {
            self.way = None;
            return Ok(View::Nobody);
        };
        if self.way.as_ref().is_some_and(Way::is_over) {
            self.way = None;
        }
        let asked = async {
            if self.way.is_none() {
                self.way = Some(self.claim(founded, found.cluster.epoch).await?);
            }
            match &self.way {
                Some(way) => way.see(!found.declarations.is_empty(), found.kubernetes.is_some()).await,
                None => Err(CuratorError::Odd("no way to it".to_owned())),
            }
        };
        match asked.await {
            Ok((seen, curators)) => {
                let epoch = self.way.as_ref().map_or(0, Way::epoch);
                let moved = !curators.is_empty() && curators != founded.curators;
                if moved || epoch > found.cluster.epoch {
                    let curators = if moved { &curators } else { &founded.curators };
                    self.bmdb.keep_curators(&self.lease, self.cluster, (curators, epoch)).await?;
                }
                Ok(View::Seen(seen))
            }
            Err(error) => {
                tracing::info!(cluster = self.name, %error, "the curators of a cluster say nothing");
                self.way = None;
                Ok(View::Away(error.to_string()))
            }
        }
    }
}

/// What is written down of a pass. `asked_at`: a moment before the curators were asked, by the database's clock. What took
/// long since then does not make their answer newer.
fn look_of(cluster: &Cluster, planned: &Plan, settled: bool, asked_at: Timestamp) -> Look {
    let none = Seen::default();
    let (seen, answered) = match &cluster.view {
        View::Seen(seen) => (seen, true),
        View::Nobody | View::Away(_) => (&none, false),
    };
    let etcd: BTreeMap<&str, bool> =
        seen.etcd.iter().filter_map(|member| Some((member.node.as_deref()?, !member.learner))).collect();
    let machines = cluster.members.iter().map(|member| {
        let node = member.key().and_then(|key| seen.node_of(&key));
        let look = MachineLook {
            waits: planned.machines.get(&member.machine).cloned(),
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
    Look {
        waits: planned.waits.clone(),
        settled,
        seen: answered.then_some(asked_at),
        votes: answered.then(|| seen.votes()),
        kubernetes: match (&cluster.kubernetes, &seen.kubernetes) {
            (Some(wanted), Known::Has(has)) => Some(KnownView::of(&wanted.kubernetes, has)),
            (Some(_), Known::Nothing) => Some(KnownView::default()),
            _ => None,
        },
        machines: machines.collect(),
    }
}
