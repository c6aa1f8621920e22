//! Self-updater: fetch a release, hand over by `execve`, confirm or roll back the trial.
//!
//! An order comes with the response to a heartbeat, and is repeated until its outcome was reported. The release is
//! fetched while everything goes on. Only when it is ready beside the stable program does this role server stop its own
//! parts, in order, and become it. The outcome of an order is written before it is reported.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use model::kubernetes::version::ReleaseVersion;
use model::signed_artefact::RELEASE_NAME;
use model::signed_artefact::signed_fields::ArtefactKind;
use proto::agent::v1 as wire;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;
use tokio::sync::Notify;

use crate::boot_clock::{BootClock as _, HostClock};
use crate::disk;
use crate::process::program_digest;
use crate::server_pool::ServerPool;
use crate::signing_store::SigningStore;
use crate::update::decision::{
    MinimumAction, StartDecision, Trial, UpdateResult, decide_minimum, decide_trial_or_rollback,
    replaces_order,
};
use crate::update::files::{UpdateFiles, claim_trial, promote_candidate};

mod handover;
mod release_order;

/// A release that is ready to run.
#[derive(Clone, Debug)]
pub struct StagedRelease {
    generation: i64,
    sha256: String,
    stable: PathBuf,
    candidate: PathBuf,
    /// The open file of the candidate, which was verified.
    program: Arc<File>,
    /// The lowest version that is accepted once it has proved itself.
    minimum_version: Option<ReleaseVersion>,
    trial_timeout: Duration,
}

/// Why a role server ends without a signal: another program replaces it.
#[derive(Clone, Debug)]
pub enum Handover {
    /// Replaced by the ordered release, for a trial.
    Update(Box<StagedRelease>),
    /// Replaced by the former release at this path.
    RollBack(PathBuf),
}

#[derive(Debug)]
struct UpdateState {
    result: UpdateResult,
    trial: Option<Trial>,
    /// The open record of the trial of this program. Its claim lasts as long as this process.
    trial_record: Option<File>,
    /// Whether a proven release has not got the stable path yet.
    is_promoting: bool,
    /// The newest order of that time.
    deferred_order: Option<wire::ReleaseOrder>,
    handover: Option<Handover>,
}

/// The state of this role server's updates; cheap to clone.
#[derive(Clone)]
pub struct SelfUpdater {
    files: UpdateFiles,
    directory: PathBuf,
    own_digest: String,
    clock: HostClock,
    orders: WatchCell<wire::ReleaseOrder>,
    signing: SigningStore,
    state: Arc<Mutex<UpdateState>>,
    /// Held while the outcome is written.
    result_writing: Arc<Mutex<()>>,
    handover_requested: Arc<Notify>,
}

/// Takes the order that came during a promotion, when dropped.
struct PromotionEnd<'u>(&'u SelfUpdater);

impl Drop for PromotionEnd<'_> {
    fn drop(&mut self) {
        self.0.with_state(|state| {
            state.is_promoting = false;
            if let Some(order) = state.deferred_order.take() {
                self.0.replace_order(&order);
            }
        });
    }
}

impl SelfUpdater {
    /// Determines at the start of this program whether it is on trial. An error here does not keep it from running.
    ///
    /// `own` is the digest of this program. `signing` has the keys that other releases must be signed with.
    #[must_use]
    pub fn resume_update(
        state_directory: &Path,
        own: &str,
        clock: &HostClock,
        signing: SigningStore,
    ) -> Self {
        let files = UpdateFiles::in_state_directory(state_directory);
        let trial = files.read_trial();
        let stable = trial.as_ref().and_then(|trial| program_digest(&trial.stable).ok());
        let start = decide_trial_or_rollback(
            trial.as_ref(),
            own,
            stable.as_deref(),
            &clock.boot_id(),
            clock.milliseconds(),
        );
        let release = Self {
            directory: state_directory.to_owned(),
            own_digest: own.to_owned(),
            clock: clock.clone(),
            orders: WatchCell::new(),
            signing,
            state: Arc::new(Mutex::new(UpdateState {
                result: files.read_result(),
                trial: None,
                trial_record: None,
                is_promoting: false,
                deferred_order: None,
                handover: None,
            })),
            result_writing: Arc::default(),
            handover_requested: Arc::default(),
            files,
        };
        match (start, trial) {
            (StartDecision::Normal, _) | (_, None) => {}
            (StartDecision::OnTrial, Some(trial)) => {
                tracing::info!(
                    generation = trial.generation,
                    "this release is on trial until a shepherd acknowledges its heartbeat"
                );
                let record = release.files.open_trial();
                release.with_state(|state| (state.trial, state.trial_record) = (Some(trial), record));
            }
            (StartDecision::Proven, Some(trial)) => release.finish_trial(&trial),
            (StartDecision::RolledBack(why), Some(trial)) => {
                release.files.remove_candidate(&trial.stable);
                release.finish_order(trial.generation, Some(why));
            }
            (StartDecision::RollBack, Some(trial)) => {
                release.request_handover(Handover::RollBack(trial.stable));
            }
        }
        // What an earlier start could not store.
        release.store_signing();
        release
    }

    fn with_state<T>(&self, change: impl FnOnce(&mut UpdateState) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The release report for heartbeats.
    #[must_use]
    pub fn report(&self) -> wire::ReleaseReport {
        let concluded = self.with_state(|state| state.result.clone());
        wire::ReleaseReport {
            generation: concluded.generation,
            sha256: hex::decode(&self.own_digest).unwrap_or_default(),
            error: concluded.error.unwrap_or_default(),
            findings: Vec::new(),
            pinned_key_ids: self.signing.key_ids(),
            signing_error: self.signing.trust().err().unwrap_or_default(),
        }
    }

    /// The keys that other releases must be signed with.
    #[must_use]
    pub const fn signing(&self) -> &SigningStore {
        &self.signing
    }

    /// Takes an order of a shepherd. While a proven release gets the stable path, the newest order waits for the end of
    /// [`Self::promote_release`]: what an order requires depends on that. It never waits for the disk.
    pub fn set_order(&self, order: &wire::ReleaseOrder) {
        self.with_state(|state| {
            if state.is_promoting {
                state.deferred_order = Some(order.clone());
            } else {
                self.replace_order(order);
            }
        });
    }

    fn replace_order(&self, order: &wire::ReleaseOrder) {
        if replaces_order(self.latest_order().as_ref(), order) {
            self.orders.set(order.clone());
        }
    }

    /// The newest order that was taken; `None` before the first one.
    #[must_use]
    pub fn latest_order(&self) -> Option<wire::ReleaseOrder> {
        self.orders.latest()
    }

    /// Records that a shepherd acknowledged a heartbeat: a release on trial is proven. From then on this process does not
    /// end the trial for its time, and the watchdog does not either, unless it has begun to. It never waits for the disk.
    /// Returns the trial once. [`Self::promote_release`] ends it.
    #[must_use]
    pub fn acknowledge_trial(&self) -> Option<Trial> {
        self.with_state(|state| {
            let trial = state.trial.take()?;
            state.is_promoting = true;
            if !state.trial_record.as_ref().is_none_or(claim_trial) {
                tracing::warn!("the acknowledgement of this release came too late: its watchdog ends it");
            }
            Some(trial)
        })
    }

    /// Gives a proven release the stable path, and stores that the trial is over. It blocks.
    pub fn promote_release(&self, trial: Trial) {
        let _end = PromotionEnd(self);
        match promote_candidate(&trial) {
            Ok(()) => {
                tracing::info!(
                    generation = trial.generation,
                    "a shepherd acknowledged a heartbeat of this release, and it stays"
                );
                self.finish_trial(&trial);
            }
            Err(error) => {
                tracing::error!(%error, "this release could not take the stable path; the former one is started again");
                // The former release reports the outcome, and reads the reason from the trial.
                let failed = Trial { failure: Some(error.failure()), ..trial };
                if let Err(error) = self.files.write_trial(&failed) {
                    tracing::warn!(%error, "the former release does not learn why this one ends");
                }
                self.request_handover(Handover::RollBack(failed.stable));
            }
        }
    }

    /// Ends the trial of a release that has proved itself.
    fn finish_trial(&self, trial: &Trial) {
        let minimum = trial.minimum_version.as_deref().and_then(|version| version.parse().ok());
        self.conclude_order(trial.generation, None, minimum);
    }

    fn finish_order(&self, generation: i64, error: Option<String>) {
        self.conclude_order(generation, error, None);
    }

    /// Writes the outcome of an order with the lowest version that its release permits, and ends the trial.
    fn conclude_order(&self, generation: i64, error: Option<String>, minimum: Option<ReleaseVersion>) {
        if let Some(why) = &error {
            tracing::error!(generation, reason = why, "an update was given up");
        }
        let written = self.change_result(|result| {
            (result.generation, result.error) = (generation, error);
            result.raise_minimum(minimum);
        });
        // What cannot be written is found again at the next start, and ends there in the same way.
        if let Err(error) = written.and_then(|()| self.files.remove_trial()) {
            tracing::warn!(%error, "the outcome of an update could not be stored");
        }
        self.store_signing();
    }

    /// Changes the outcome of the newest order, one change at a time, and writes it.
    fn change_result(&self, change: impl FnOnce(&mut UpdateResult)) -> std::io::Result<()> {
        disk::run_beside(&self.directory, || {
            let _turn = self.result_writing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut result = self.with_state(|state| state.result.clone());
            change(&mut result);
            let written = self.files.write_result(&result);
            self.with_state(|state| state.result = result);
            written
        })
    }

    /// Whether [`Self::store_signing`] has something to do.
    #[must_use]
    pub fn has_unsaved_signing(&self) -> bool {
        self.signing.is_unsaved() || self.with_state(|state| state.result.minimum_version.is_some())
    }

    /// Raises the lowest accepted version to that of a proven release, and stores the pinned keys and versions. What fails
    /// is tried again with the next heartbeat, and at the next start. It blocks.
    pub fn store_signing(&self) {
        if !self.has_unsaved_signing() {
            return;
        }
        let minimum = self.with_state(|state| state.result.minimum());
        let decide = || {
            let (kind, name) = (ArtefactKind::Release, RELEASE_NAME);
            let is_stored = |minimum| self.signing.has_stored_minimum(kind, name, minimum);
            decide_minimum(minimum, minimum.is_some_and(is_stored))
        };
        if let MinimumAction::Raise(minimum) = decide() {
            self.signing.raise_minimum(ArtefactKind::Release, RELEASE_NAME, minimum);
        }
        if let Err(error) = disk::run_beside(&self.directory, || self.signing.save()) {
            tracing::error!(
                %error,
                "the pinned signing keys and the lowest accepted version could not be stored; the next heartbeat tries again"
            );
        }
        if decide() != MinimumAction::Forget {
            return;
        }
        let forgotten = self.change_result(|result| {
            // Another release may have proved itself meanwhile.
            if result.minimum() == minimum {
                result.minimum_version = None;
            }
        });
        if let Err(error) = forgotten {
            tracing::warn!(%error, "the outcome of an update could not be stored");
        }
    }

    fn request_handover(&self, handover: Handover) {
        self.with_state(|state| state.handover = Some(handover));
        self.handover_requested.notify_one();
    }

    /// Waits until another program has to replace this one, and returns which. A trial whose time is over ends here.
    pub async fn wait_for_handover(&self) -> Handover {
        loop {
            if let Some(handover) = self.with_state(|state| state.handover.clone()) {
                return handover;
            }
            let left = self.with_state(|state| {
                let until = state.trial.as_ref()?.until_ms;
                Some(Duration::from_millis(until.saturating_sub(self.clock.milliseconds())))
            });
            match left {
                None => self.handover_requested.notified().await,
                Some(left) => tokio::select! {
                    () = self.handover_requested.notified() => {}
                    () = tokio::time::sleep(left) => {
                        if let Some(trial) = self.with_state(|state| state.trial.take()) {
                            tracing::error!(
                                "no shepherd acknowledged a heartbeat of this release in time; the former one \
                                 comes back"
                            );
                            self.request_handover(Handover::RollBack(trial.stable));
                        }
                    }
                },
            }
        }
    }

    /// The runnable that carries orders out, up to the handover.
    #[must_use]
    pub fn run_updates(&self, server_pool: ServerPool) -> Runnable {
        let release = self.clone();
        Runnable::new(move |starting: Starting| {
            let (release, server_pool) = (release.clone(), server_pool.clone());
            let mut orders = release.orders.watch();
            async move {
                let healthy = starting.mark_healthy();
                let scope = healthy.scope();
                let mut order = scope.until_cancelled(orders.next()).await?;
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        next = orders.next() => order = next,
                        () = release.execute_order(&order, &server_pool) => {
                            order = scope.until_cancelled(orders.next()).await?;
                        }
                    }
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_directory::{Lock, StateDirectory};

    const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";

    #[test]
    fn lowest_version_that_could_not_be_stored_is_stored_later() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let clock = HostClock::read().unwrap();
        let signing = SigningStore::open(state.clone());
        assert!(signing.accept_offer(&[KEY.to_owned()], &[]));
        signing.save().unwrap();
        let minimum = |store: &SigningStore| {
            store.trust().unwrap().minimum_version(ArtefactKind::Release, RELEASE_NAME)
        };
        let files = UpdateFiles::in_state_directory(directory.path());
        let proven = ReleaseVersion::new(1, 2, 0);
        let mut result = UpdateResult { generation: 3, ..UpdateResult::default() };
        result.raise_minimum(Some(proven));
        files.write_result(&result).unwrap();

        // The release has proved itself, and its process ended before the version was stored. It cannot be stored now.
        let held = state.acquire_lock(Lock::SigningKeys).unwrap();
        let start = || {
            SelfUpdater::resume_update(directory.path(), "digest", &clock, SigningStore::open(state.clone()))
        };
        let release = start();
        assert_eq!(minimum(release.signing()), Some(proven), "it is accepted no more");
        assert_eq!(minimum(&SigningStore::open(state.clone())), None, "it is stored");
        assert_eq!(files.read_result(), result);
        // An outcome of another order does not lose it.
        release.finish_order(4, Some("it failed".to_owned()));
        assert!(release.has_unsaved_signing());
        assert_eq!(files.read_result().minimum(), Some(proven));
        drop(held);
        // A heartbeat is answered.
        release.store_signing();
        assert!(!release.has_unsaved_signing());
        assert_eq!(minimum(&SigningStore::open(state.clone())), Some(proven));
        let stored = files.read_result();
        assert_eq!((stored.generation, stored.error.as_deref()), (4, Some("it failed")));
        assert_eq!(stored.minimum_version, None);

        // Root lowers it by removing one file.
        std::fs::remove_file(directory.path().join("signing.json")).unwrap();
        assert_eq!(minimum(start().signing()), None);
        // Keys that cannot be read end nothing.
        std::fs::write(directory.path().join("signing.json"), "{").unwrap();
        files.write_result(&result).unwrap();
        assert!(start().signing().trust().is_err());
        assert_eq!(files.read_result(), result);
    }
}
