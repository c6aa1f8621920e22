//! The reconciler as a task: watches releases, takes part in the election, leads.
//!
//! It runs on every controller. Other modules decide; this one executes. The lease is released as soon as it is not
//! needed any more, because this program is not the newest or because it stops, so that the next leader does not wait
//! for it to expire.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use etcd::client::{Client, EtcdError};
use etcd::election::{Candidate, campaign};
use etcd::election_view::CandidateRole;
use etcd::guard::{LeaderGuard, LostLeadership, WriteError};
use etcd::key_space::{NODES, RECONCILER_LEADER, RECONCILER_STATUS};
use etcd::key_watcher::KeyWatcher;
use etcd::namespace::KeySelector;
use etcd::retry::RETRY_BACKOFF;
use futures::FutureExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::controller_releases::{ControllerReleases, ReleaseBlock};
use crate::leadership::{
    FailureLogLevel, LeaderStep, Leadership, ReconcileTiming, StatusWrite, StoredStatus, WakeSource,
};
use crate::objects::ObjectReconciler;
use crate::program::Program;
use crate::status::ReconcilerStatus;

/// How long after its last renewal a leader is replaced. A leader that stops in order is replaced at once.
pub const LEADER_TTL: Duration = Duration::from_mins(1);
/// Time between two reads of the node records when no change is observed.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_secs(30);

/// The settings of a reconciler.
#[derive(Clone, Debug)]
pub struct ReconcilerSettings {
    /// The name of its node, shown to people.
    pub name: String,
    /// The release and requirements of this program.
    pub program: Program,
    /// The etcd of its node, in the namespace of the curator: one transaction covers nodes and status.
    pub client: Client,
    /// The lifetime of its lease without renewal, after which it is replaced.
    pub ttl: Duration,
    /// Its waiting times as a leader.
    pub timing: ReconcileTiming,
}

/// Reconciles objects whenever this program leads.
#[derive(Debug)]
pub struct Reconciler<O> {
    settings: ReconcilerSettings,
    objects: O,
    is_leading: watch::Sender<bool>,
}

/// Marks this reconciler as the leader until it is dropped.
struct LeadingFlag<'r>(&'r watch::Sender<bool>);

impl<'r> LeadingFlag<'r> {
    fn set(leads: &'r watch::Sender<bool>) -> Self {
        leads.send_replace(true);
        Self(leads)
    }
}

impl Drop for LeadingFlag<'_> {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

/// Reads the releases of all controllers at one moment.
pub async fn read_releases(client: &Client, program: &Program) -> Result<ControllerReleases, EtcdError> {
    Ok(ControllerReleases::from_listing(program, &client.list(&node_record_keys()).await?))
}

/// Reads the releases of all controllers, and again whenever a node changes. Never ends.
///
/// Each read is a complete listing: what is published with a revision was read at that revision, which a watch does not
/// guarantee.
pub async fn watch_releases(
    client: &Client,
    program: &Program,
    sender: &watch::Sender<Option<ControllerReleases>>,
) -> Infallible {
    let mut follower =
        KeyWatcher::new(client, node_record_keys(), |_: &str, _: &[u8]| Ok::<_, Infallible>(()));
    let mut failures = 0;
    loop {
        match read_releases(client, program).await {
            Ok(releases) => {
                failures = 0;
                sender.send_replace(Some(releases));
            }
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, failures, "the releases of controllers were not read");
                tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
                continue;
            }
        }
        let _ = tokio::time::timeout(RELEASE_POLL_INTERVAL, follower.next_event()).await;
        // Several events cause one read.
        while follower.next_event().now_or_never().is_some() {}
    }
}

/// Writes the status as the leader, if the status and the nodes it relies on are unchanged. Returns its new revision.
pub async fn write_status(
    client: &Client,
    guard: &LeaderGuard,
    write: &StatusWrite,
) -> Result<i64, WriteError> {
    let changes = [write.to_change()];
    match write.unchanged_keys() {
        None => client.write_guarded(guard, &changes).await,
        Some(unchanged) => client.write_if_unchanged(guard, &changes, &unchanged).await,
    }
}

impl<O: ObjectReconciler> Reconciler<O> {
    /// A reconciler of these objects.
    #[must_use]
    pub fn new(settings: ReconcilerSettings, objects: O) -> Self {
        Self { settings, objects, is_leading: watch::Sender::new(false) }
    }

    /// Receives whether this reconciler leads.
    #[must_use]
    pub fn watch_leading(&self) -> watch::Receiver<bool> {
        self.is_leading.subscribe()
    }

    /// The object reconciler that it runs.
    #[must_use]
    pub const fn objects(&self) -> &O {
        &self.objects
    }

    /// Runs until cancelled, and then releases its lease.
    pub async fn run(&self, cancel: &CancellationToken) {
        let (sender, releases) = watch::channel(None);
        tokio::select! {
            never = watch_releases(&self.settings.client, &self.settings.program, &sender) => match never {},
            () = self.campaign_when_newest(releases, cancel) => {}
        }
    }

    /// Stands for election whenever this is the newest release.
    async fn campaign_when_newest(
        &self,
        releases: watch::Receiver<Option<ControllerReleases>>,
        cancel: &CancellationToken,
    ) {
        let settings = &self.settings;
        let candidate = Candidate {
            election: RECONCILER_LEADER.range().start.trim_end_matches('/').to_owned(),
            name: settings.name.clone(),
            ttl: settings.ttl,
        };
        while cancel.run_until_cancelled(self.wait_until_newest(releases.clone())).await.is_some() {
            let stop = cancel.child_token();
            let (sender, standing) = watch::channel(CandidateRole::Unknown);
            let standing_for_it = campaign(&settings.client, &candidate, sender, &stop);
            let leading = async {
                tokio::select! {
                    () = self.lead_when_elected(standing, &releases) => {}
                    () = self.wait_until_outdated(releases.clone()) => {}
                    () = cancel.cancelled() => {}
                }
                stop.cancel();
            };
            tokio::join!(standing_for_it, leading);
        }
    }

    async fn wait_until_newest(&self, mut releases: watch::Receiver<Option<ControllerReleases>>) {
        let mut block = None;
        let newest = |seen: &Option<ControllerReleases>| match seen
            .as_ref()
            .map(|seen| seen.check_candidacy(&self.settings.program))
        {
            None => false,
            Some(Ok(())) => true,
            Some(Err(blocked)) => {
                log_block(&blocked, &mut block);
                false
            }
        };
        // The sender lives as long as this task.
        let _ = releases.wait_for(newest).await;
    }

    async fn wait_until_outdated(&self, mut releases: watch::Receiver<Option<ControllerReleases>>) {
        let other = |seen: &Option<ControllerReleases>| {
            seen.as_ref().is_some_and(|seen| seen.check_candidacy(&self.settings.program).is_err())
        };
        let _ = releases.wait_for(other).await;
    }

    /// Leads whenever it is elected, until it loses the election.
    async fn lead_when_elected(
        &self,
        mut standing: watch::Receiver<CandidateRole>,
        releases: &watch::Receiver<Option<ControllerReleases>>,
    ) {
        loop {
            let now = standing.borrow_and_update().clone();
            let changed = async {
                while *standing.borrow_and_update() == now {
                    if standing.changed().await.is_err() {
                        return;
                    }
                }
            };
            let CandidateRole::Leader(guard) = &now else {
                changed.await;
                if standing.has_changed().is_err() {
                    return;
                }
                continue;
            };
            let leading = async {
                let _leading = LeadingFlag::set(&self.is_leading);
                let Err(lost) = self.run_leadership(guard, releases.clone()).await;
                tracing::info!(leadership_loss = %lost, "the built-in objects of Kubernetes are left to the next leader");
                // The election reports the loss, too.
                std::future::pending::<()>().await;
            };
            tokio::select! {
                // Polled first: a program that does not lead any more must send nothing.
                biased;
                () = changed => {}
                () = leading => {}
            }
        }
    }

    /// Executes the steps of a leadership until it is lost.
    async fn run_leadership(
        &self,
        guard: &LeaderGuard,
        mut releases: watch::Receiver<Option<ControllerReleases>>,
    ) -> Result<Infallible, LostLeadership> {
        let settings = &self.settings;
        let version = &settings.program.version;
        tracing::info!(%version, lock = guard.key, "this node reconciles the built-in objects of Kubernetes now");
        let began = Instant::now();
        let mut leadership = Leadership::new(settings.program.clone(), settings.timing);
        let mut block = None;
        loop {
            let now = began.elapsed();
            match leadership.next_step(now) {
                LeaderStep::ReadStatus => {
                    match settings.client.read_guarded(guard, RECONCILER_STATUS).await {
                        Ok(record) => {
                            let stored = record.map(|record| {
                                let status = ReconcilerStatus::decode(&record.value);
                                status.map(|status| StoredStatus { status, revision: record.mod_revision })
                            });
                            let stored = stored.transpose();
                            if let Err(error) = &stored {
                                tracing::error!(
                                    %error,
                                    "the built-in objects of Kubernetes are left as they are until somebody repairs the \
                                     status, or deletes it once no controller of another release runs"
                                );
                            }
                            leadership.on_status_read(began.elapsed(), stored);
                        }
                        Err(error) => handle_write_error(&mut leadership, now, error)?,
                    }
                }
                LeaderStep::ReadReleases => {
                    releases.mark_unchanged();
                    match read_releases(&settings.client, &settings.program).await {
                        Ok(seen) => leadership.on_releases_read(now, &seen),
                        Err(error) => handle_write_error(&mut leadership, now, error.into())?,
                    }
                    if let Some(blocked) = leadership.blocked() {
                        log_block(blocked, &mut block);
                    }
                }
                LeaderStep::WriteStatus(write) => match write_status(&settings.client, guard, &write).await {
                    Ok(revision) => {
                        let ReconcilerStatus { state, version, lowest_compatible } = &write.status;
                        tracing::info!(?state, %version, %lowest_compatible, "the status of objects was written");
                        leadership.on_status_written(began.elapsed(), write.status, revision);
                    }
                    Err(error) => handle_write_error(&mut leadership, began.elapsed(), error)?,
                },
                LeaderStep::Reconcile => self.reconcile_objects(&mut leadership, began).await,
                LeaderStep::Wait(until) => {
                    let listens = leadership.wake_source();
                    tokio::select! {
                        () = tokio::time::sleep(until.saturating_sub(now)) => {}
                        Ok(()) = releases.changed(), if listens == WakeSource::NodeChanges => leadership.on_nodes_changed(),
                        () = self.objects.wait_for_change(), if listens == WakeSource::ObjectChanges => {
                            leadership.on_objects_changed();
                        }
                    }
                }
            }
        }
    }

    async fn reconcile_objects(&self, leadership: &mut Leadership, began: Instant) {
        let passed = self.objects.reconcile().await;
        let level = leadership.on_pass_finished(began.elapsed(), passed.is_ok(), rand::random());
        match (passed, level) {
            (Ok(passed), _) if passed.is_unchanged() => {
                tracing::debug!("the built-in objects of Kubernetes are as they should be");
            }
            (Ok(passed), _) => {
                tracing::info!(summary = %passed, "the built-in objects of Kubernetes were changed");
            }
            (Err(error), FailureLogLevel::Debug) => tracing::debug!(%error, "a pass failed, and is retried"),
            (Err(error), FailureLogLevel::Warn) => tracing::warn!(%error, "a pass failed, and is retried"),
        }
    }
}

/// The keys of all node records.
fn node_record_keys() -> KeySelector {
    KeySelector::Prefix(NODES.range().start)
}

/// After a rejected write all is decided again; after a write without answer the status is read again. A lost
/// leadership is returned as an error.
fn handle_write_error(
    leadership: &mut Leadership,
    now: Duration,
    error: WriteError,
) -> Result<(), LostLeadership> {
    match error {
        WriteError::LostLeadership(lost) => return Err(lost),
        WriteError::Conflict { keys: changed, .. } => {
            tracing::info!(?changed, "the status of objects was not written, and is decided again");
            leadership.on_write_conflict();
        }
        WriteError::Etcd(error) => {
            tracing::info!(%error, "the built-in objects of Kubernetes wait for etcd");
            leadership.on_etcd_error(now);
        }
    }
    Ok(())
}

/// Logs once what blocks the reconciliation.
fn log_block(blocked: &ReleaseBlock, block: &mut Option<ReleaseBlock>) {
    if block.as_ref() == Some(blocked) {
        return;
    }
    match blocked {
        ReleaseBlock::Newer { .. } => {
            tracing::info!(reason = %blocked, "the built-in objects are left to another");
        }
        ReleaseBlock::Older { .. } => {
            tracing::warn!(reason = %blocked, "the built-in objects are left as they are");
        }
        ReleaseBlock::Unknown(_) => {
            tracing::error!(reason = %blocked, "the built-in objects are left as they are");
        }
    }
    *block = Some(blocked.clone());
}
