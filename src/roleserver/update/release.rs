//! The role server's side of an update.
//!
//! An order comes with the answer to a heartbeat, and again until it was reported on. What was ordered is fetched while
//! everything goes on; only when it lies ready beside the stable program does this role server end its own parts, in
//! order, and become it. How an order ended is written down before it is reported.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::model::declaration::Sha256;
use crate::proto::agent::v1 as wire;
use crate::roleserver::clock::{BootClock as _, HostClock};
use crate::roleserver::running::{Instance, program_digest};
use crate::roleserver::shepherds::Shepherds;
use crate::roleserver::update::decision::{Act, Concluded, Start, Trial, at_start, on_order, patience};
use crate::roleserver::update::files::{UpdateFiles, promote};
use crate::roleserver::update::watch;
use crate::supervisor::backoff::Backoff;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::value::Value;

/// A release that lies ready.
#[derive(Clone, Debug)]
pub struct Staged {
    generation: i64,
    sha256: String,
    stable: PathBuf,
    candidate: PathBuf,
    patience: Duration,
}

/// Why a role server ends that nobody asked to end.
#[derive(Clone, Debug)]
pub enum Handover {
    /// To become another release.
    To(Box<Staged>),
    /// To be the former one again.
    Back(PathBuf),
}

#[derive(Debug)]
struct State {
    concluded: Concluded,
    trial: Option<Trial>,
    handover: Option<Handover>,
}

/// What this role server is, and what becomes of it; cheap to clone.
#[derive(Clone)]
pub struct Release {
    files: UpdateFiles,
    directory: PathBuf,
    own: String,
    clock: HostClock,
    orders: Value<wire::ReleaseOrder>,
    state: Arc<Mutex<State>>,
    handed: Arc<Notify>,
}

impl Release {
    /// Finds out what this program is at its start. An error here is no reason not to run.
    ///
    /// `own` is the digest of this program.
    #[must_use]
    pub fn at_start(state_directory: &Path, own: &str, clock: &HostClock) -> Self {
        let files = UpdateFiles::of(state_directory);
        let trial = files.trial();
        let stable = trial.as_ref().and_then(|trial| program_digest(&trial.stable).ok());
        let start = at_start(trial.as_ref(), own, stable.as_deref(), &clock.boot_id(), clock.milliseconds());
        let release = Self {
            directory: state_directory.to_owned(),
            own: own.to_owned(),
            clock: clock.clone(),
            orders: Value::new(),
            state: Arc::new(Mutex::new(State { concluded: files.concluded(), trial: None, handover: None })),
            handed: Arc::default(),
            files,
        };
        match (start, trial) {
            (Start::Plain, _) | (_, None) => {}
            (Start::OnTrial, Some(trial)) => {
                tracing::info!(
                    generation = trial.generation,
                    "this release is on trial until a shepherd has heard it"
                );
                release.locked(|state| state.trial = Some(trial));
            }
            (Start::Proven, Some(trial)) => release.end(trial.generation, None),
            (Start::Back(why), Some(trial)) => {
                release.files.unstage(&trial.stable);
                release.end(trial.generation, Some(why));
            }
            (Start::GiveWay, Some(trial)) => release.hand(Handover::Back(trial.stable)),
        }
        release
    }

    fn locked<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What shepherds are told.
    #[must_use]
    pub fn report(&self) -> wire::ReleaseReport {
        let concluded = self.locked(|state| state.concluded.clone());
        wire::ReleaseReport {
            generation: concluded.generation,
            sha256: hex::decode(&self.own).unwrap_or_default(),
            error: concluded.error.unwrap_or_default(),
        }
    }

    /// Hears what a shepherd asks for.
    pub fn hear(&self, order: &wire::ReleaseOrder) {
        if self.orders.latest().as_ref() != Some(order) {
            self.orders.set(order.clone());
        }
    }

    /// Hears that a shepherd has answered a heartbeat: what was on trial is proven.
    pub fn heard(&self) {
        let Some(trial) = self.locked(|state| state.trial.take()) else { return };
        match promote(&trial) {
            Ok(()) => {
                tracing::info!(
                    generation = trial.generation,
                    "a shepherd has heard this release, and it stays"
                );
                self.end(trial.generation, None);
            }
            Err(error) => {
                tracing::error!(%error, "this release could not take its place; the former one comes back");
                self.hand(Handover::Back(trial.stable));
            }
        }
    }

    /// Writes down how an order has ended, and that nothing is on trial.
    fn end(&self, generation: i64, error: Option<String>) {
        if let Some(why) = &error {
            tracing::error!(generation, why, "a release was given up");
        }
        let concluded = Concluded { generation, error };
        // What cannot be written is found again at the next start, and ends there in the same way.
        let written = self.files.conclude(&concluded).and_then(|()| self.files.end_trial());
        if let Err(error) = written {
            tracing::warn!(%error, "how an update ended could not be written down");
        }
        self.locked(|state| state.concluded = concluded);
    }

    fn hand(&self, handover: Handover) {
        self.locked(|state| state.handover = Some(handover));
        self.handed.notify_one();
    }

    /// Waits until this role server has to become another program, and gives which. A trial that nobody hears ends here.
    pub async fn handed_over(&self) -> Handover {
        loop {
            if let Some(handover) = self.locked(|state| state.handover.clone()) {
                return handover;
            }
            let left = self.locked(|state| {
                let until = state.trial.as_ref()?.until_ms;
                Some(Duration::from_millis(until.saturating_sub(self.clock.milliseconds())))
            });
            match left {
                None => self.handed.notified().await,
                Some(left) => tokio::select! {
                    () = self.handed.notified() => {}
                    () = tokio::time::sleep(left) => {
                        if let Some(trial) = self.locked(|state| state.trial.take()) {
                            tracing::error!("no shepherd has heard this release in time; the former one comes back");
                            self.hand(Handover::Back(trial.stable));
                        }
                    }
                },
            }
        }
    }

    /// The runnable that carries orders out, up to the handover.
    #[must_use]
    pub fn follow(&self, shepherds: Shepherds) -> Runnable {
        let release = self.clone();
        Runnable::new(move |starting: Starting| {
            let (release, shepherds) = (release.clone(), shepherds.clone());
            let mut orders = release.orders.watch();
            async move {
                let healthy = starting.healthy();
                let scope = healthy.scope();
                let mut order = scope.until_cancelled(orders.next()).await?;
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        next = orders.next() => order = next,
                        () = release.carry_out(&order, &shepherds) => {
                            order = scope.until_cancelled(orders.next()).await?;
                        }
                    }
                }
            }
        })
    }

    /// Carries out an order, up to the handover.
    async fn carry_out(&self, order: &wire::ReleaseOrder, shepherds: &Shepherds) {
        let (concluded, on_trial) = self
            .locked(|state| (state.concluded.generation, state.trial.is_some() || state.handover.is_some()));
        let sha256 = hex::encode(&order.sha256);
        match on_order(order.generation, &sha256, &self.own, concluded, on_trial) {
            Act::Nothing => {}
            Act::Runs => self.end(order.generation, None),
            Act::Begin => {
                tracing::info!(generation = order.generation, sha256, "another release was ordered");
                match self.ready(order, &sha256, shepherds).await {
                    Ok(staged) => self.hand(Handover::To(Box::new(staged))),
                    Err(why) => {
                        // A disk that it has filled is no better for it afterwards.
                        if let Ok(stable) = self.stable() {
                            self.files.unstage(&stable);
                        }
                        self.end(order.generation, Some(why));
                    }
                }
            }
        }
    }

    /// Fetches a release and puts it beside the stable program. The error is a sentence.
    async fn ready(
        &self,
        order: &wire::ReleaseOrder,
        sha256: &str,
        shepherds: &Shepherds,
    ) -> Result<Staged, String> {
        let digest = order.sha256.clone().try_into().map(Sha256);
        let digest = digest.map_err(|_| "the order names no digest".to_owned())?;
        let patience = patience(order.deadline_seconds);
        let stable = self.stable()?;
        self.fetch(digest, sha256, shepherds, patience).await?;
        let (files, to, name) = (self.files.clone(), stable.clone(), sha256.to_owned());
        let staged = tokio::task::spawn_blocking(move || files.stage(&to, &name)).await;
        let candidate = staged.map_err(|error| error.to_string())??;
        Ok(Staged { generation: order.generation, sha256: sha256.to_owned(), stable, candidate, patience })
    }

    /// Where this program is, that others start.
    fn stable(&self) -> Result<PathBuf, String> {
        let path =
            std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))?;
        match program_digest(&path) {
            Ok(digest) if digest == self.own => Ok(path),
            _ => Err(format!(
                "{} is not the program that runs; start the role server again first",
                path.display()
            )),
        }
    }

    async fn fetch(
        &self,
        digest: Sha256,
        sha256: &str,
        shepherds: &Shepherds,
        patience: Duration,
    ) -> Result<(), String> {
        let part = self.files.part();
        let (end, mut failures) = (Instant::now() + patience, 0);
        loop {
            // Whoever ordered it waits no longer, however steadily it comes.
            let fetched = tokio::time::timeout_at(end, shepherds.fetch(digest, &part)).await;
            let fetched = match fetched {
                Ok(fetched) => fetched.map_err(|error| error.to_string()),
                Err(_) => return Err("the release could not be fetched in time".to_owned()),
            };
            let path = part.clone();
            let whole = tokio::task::spawn_blocking(move || program_digest(&path)).await;
            let error = match (fetched, whole) {
                (Ok(_), Ok(Ok(found))) if found == sha256 => return Ok(()),
                (Ok(_), _) => {
                    // What is there is a part of something else.
                    let _ = tokio::fs::remove_file(&part).await;
                    "what was sent is another file".to_owned()
                }
                (Err(error), _) => error,
            };
            failures += 1;
            let pause = Backoff::USUAL.after(failures, rand::random());
            if Instant::now() + pause >= end {
                return Err(format!("the release could not be fetched: {error}"));
            }
            tracing::warn!(error, "a release is not here yet");
            tokio::time::sleep(pause).await;
        }
    }

    /// Becomes another program, with the same pid and arguments; nothing of this one runs any more. It returns only if it
    /// could not even become what it was.
    #[must_use]
    pub fn become_it(&self, handover: &Handover) -> std::io::Error {
        let tried = match handover {
            Handover::To(staged) => self.try_out(staged),
            Handover::Back(stable) => {
                tracing::info!(program = %stable.display(), "the former release comes back");
                again(stable)
            }
        };
        tracing::error!(error = %tried, "this program goes on as it was");
        again(Path::new("/proc/self/exe"))
    }

    fn try_out(&self, staged: &Staged) -> std::io::Error {
        let begin = || -> std::io::Result<()> {
            let patience_ms = u64::try_from(staged.patience.as_millis()).unwrap_or(u64::MAX);
            self.files.write_trial(&Trial {
                generation: staged.generation,
                sha256: staged.sha256.clone(),
                former: self.own.clone(),
                stable: staged.stable.clone(),
                candidate: staged.candidate.clone(),
                boot_id: self.clock.boot_id(),
                until_ms: self.clock.milliseconds().saturating_add(patience_ms),
                patience_ms,
                instance: Instance::this()?,
            })?;
            watch::start(&staged.stable, &self.directory)
        };
        let error = match begin() {
            Ok(()) => again(&staged.candidate),
            Err(error) => error,
        };
        self.files.unstage(&staged.stable);
        self.end(staged.generation, Some(format!("this machine could not become it: {error}")));
        error
    }
}

/// Becomes `program` with the arguments of this one.
fn again(program: &Path) -> std::io::Error {
    Command::new(program).args(std::env::args_os().skip(1)).exec()
}
