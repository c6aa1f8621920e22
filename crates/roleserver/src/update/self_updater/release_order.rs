//! Carries out an order for a release: verifies its signature, fetches it and puts it beside the stable program.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use backoff::ExponentialBackoff;
use model::kubernetes::version::ReleaseVersion;
use model::role_declaration::Sha256;
use model::signed_artefact::{ExpectedFields, RELEASE_REFUSED};
use proto::agent::v1 as wire;
use tokio::time::Instant;

use crate::process::program_digest;
use crate::server_pool::ServerPool;
use crate::update::decision::{OrderAction, decide_order, lacks_signature, trial_timeout};
use crate::update::files::verify_program;
use crate::update::self_updater::{Handover, SelfUpdater, StagedRelease};

impl SelfUpdater {
    /// Carries out an order, up to the handover.
    pub(super) async fn execute_order(&self, order: &wire::ReleaseOrder, server_pool: &ServerPool) {
        let (concluded, on_trial) = self
            .with_state(|state| (state.result.generation, state.trial.is_some() || state.handover.is_some()));
        let sha256 = hex::encode(&order.sha256);
        let needs_signature =
            lacks_signature(order) && self.signing.trust().is_ok_and(|trust| !trust.keys().is_empty());
        let own = &self.own_digest;
        match decide_order(order.generation, &sha256, own, concluded, on_trial, needs_signature) {
            OrderAction::Nothing => {}
            OrderAction::AlreadyRunning => {
                let minimum = self.verify_own_release(order).await;
                self.conclude_order(order.generation, None, minimum);
            }
            OrderAction::AwaitSignature => self.await_signature(order).await,
            OrderAction::Install => {
                tracing::info!(generation = order.generation, sha256, "another release was ordered");
                match self.prepare_release(order, &sha256, server_pool).await {
                    Ok(staged) => self.request_handover(Handover::Update(Box::new(staged))),
                    Err(why) => {
                        // What is left of the candidate must not keep a full disk full.
                        if let Ok(stable) = self.stable_path() {
                            self.files.remove_candidate(&stable);
                        }
                        self.finish_order(order.generation, Some(why));
                    }
                }
            }
        }
    }

    /// The lowest version that this program permits, by the signature in an order for it; `None` if that is no signature of
    /// this program.
    async fn verify_own_release(&self, order: &wire::ReleaseOrder) -> Option<ReleaseVersion> {
        if order.signature.is_empty() {
            return None;
        }
        let ignored = |error: &str| {
            tracing::warn!(error, "the signature in an order for the release that runs already is ignored");
        };
        let expected = ExpectedFields::release(std::env::consts::ARCH);
        let signed_by = self.signing.accept_signature(&order.signature, &expected);
        let signed_by = signed_by.inspect_err(|error| ignored(error)).ok()??;
        let minimum = signed_by.signature.fields().minimum_version;
        let verify = move || verify_program(Path::new("/proc/self/exe"), &signed_by);
        let verified = tokio::task::spawn_blocking(verify).await.map_err(|error| error.to_string());
        verified.flatten().inspect_err(|error| ignored(error)).ok().map(|()| minimum)
    }

    /// Refuses an order if no shepherd sends its signature within the order's time limit. The order that has it ends the
    /// wait.
    async fn await_signature(&self, order: &wire::ReleaseOrder) {
        tracing::warn!(
            generation = order.generation,
            "an order for another release came without its signature, from a shepherd of an earlier release; \
             waiting for a shepherd that sends it"
        );
        let patience = trial_timeout(order.deadline_seconds);
        tokio::time::sleep(patience).await;
        let why = format!(
            "{RELEASE_REFUSED}its signature did not come within {} s, because shepherds of an earlier release \
             send none; update the shepherds, and order the release again",
            patience.as_secs()
        );
        self.finish_order(order.generation, Some(why));
    }

    /// Fetches a release and puts it beside the stable program. The error is a sentence.
    async fn prepare_release(
        &self,
        order: &wire::ReleaseOrder,
        sha256: &str,
        server_pool: &ServerPool,
    ) -> Result<StagedRelease, String> {
        let digest = order.sha256.clone().try_into().map(Sha256);
        let digest = digest.map_err(|_| "the order names no digest".to_owned())?;
        let expected = ExpectedFields::release(std::env::consts::ARCH);
        let signed_by = self.signing.accept_signature(&order.signature, &expected);
        let signed_by = signed_by.map_err(|error| format!("{RELEASE_REFUSED}{error}"))?;
        let minimum_version =
            signed_by.as_ref().map(|signed_by| signed_by.signature.fields().minimum_version);
        let patience = trial_timeout(order.deadline_seconds);
        let stable = self.stable_path()?;
        self.fetch_release(digest, sha256, server_pool, patience).await?;
        let (files, to, name) = (self.files.clone(), stable.clone(), sha256.to_owned());
        let stage = move || files.stage_candidate(&to, &name, signed_by.as_ref());
        let staged = tokio::task::spawn_blocking(stage).await.map_err(|error| error.to_string())??;
        Ok(StagedRelease {
            generation: order.generation,
            sha256: sha256.to_owned(),
            stable,
            candidate: staged.path,
            program: Arc::new(staged.file),
            minimum_version,
            trial_timeout: patience,
        })
    }

    /// The path of this program, which the init system or the supervisor starts.
    fn stable_path(&self) -> Result<PathBuf, String> {
        let path =
            std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))?;
        match program_digest(&path) {
            Ok(digest) if digest == self.own_digest => Ok(path),
            _ => Err(format!(
                "{} is not the program that runs; start the role server again first",
                path.display()
            )),
        }
    }

    async fn fetch_release(
        &self,
        digest: Sha256,
        sha256: &str,
        server_pool: &ServerPool,
        patience: Duration,
    ) -> Result<(), String> {
        let part = self.files.part_path();
        let (end, mut failures, mut last_error) = (Instant::now() + patience, 0, None);
        loop {
            // After `end` the client that ordered it no longer waits, however steadily the download goes.
            let fetched = tokio::time::timeout_at(end, server_pool.fetch_artefact(digest, &part)).await;
            let Ok(fetched) = fetched else {
                let why = last_error.map_or_else(|| " in time".to_owned(), |error| format!(": {error}"));
                return Err(format!("the release could not be fetched{why}"));
            };
            let fetched = fetched.map_err(|error| error.to_string());
            let path = part.clone();
            let whole = tokio::task::spawn_blocking(move || program_digest(&path)).await;
            let error = match (fetched, whole) {
                (Ok(_), Ok(Ok(found))) if found == sha256 => return Ok(()),
                (Ok(_), _) => {
                    // The fetched bytes are a part of another file.
                    let _ = tokio::fs::remove_file(&part).await;
                    "what was sent is another file".to_owned()
                }
                (Err(error), _) => error,
            };
            failures += 1;
            let pause = ExponentialBackoff::DEFAULT.delay(failures, rand::random());
            if Instant::now() + pause >= end {
                return Err(format!("the release could not be fetched: {error}"));
            }
            tracing::warn!(error, "a release is not here yet");
            last_error = Some(error);
            tokio::time::sleep(pause).await;
        }
    }
}
