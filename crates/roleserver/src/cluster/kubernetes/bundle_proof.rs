//! Raise the lowest accepted version of bundles, once the bundle of this node has proved itself.
//!
//! A bundle has proved itself when all components of the node run with it and are healthy for a minute without a gap.
//! From then on the machine unpacks no bundle below the `minimum-version` in its signature. A bundle of any version that is unpacked
//! already stays: it is the way back.

use std::time::Duration;

use model::role_declaration::Sha256;
use model::signed_artefact::BUNDLE_NAME;
use model::signed_artefact::signed_fields::ArtefactKind;
use proto::curator::v1::KubernetesStatus;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;
use tokio::time::Instant;

use crate::cluster::kubernetes::bundle_store::BundleStore;
use crate::signing_store::SigningStore;

/// How long all components must be healthy.
const PROOF_TIME: Duration = Duration::from_mins(1);

/// Since when the components are healthy with a bundle.
#[derive(Debug)]
struct ProofTimer {
    /// How long they must be healthy.
    proof_time: Duration,
    running: Option<(Sha256, Instant)>,
    /// The bundle that proved itself last.
    proven: Option<Sha256>,
}

impl ProofTimer {
    const fn new(proof_time: Duration) -> Self {
        Self { proof_time, running: None, proven: None }
    }

    /// Takes the bundle that all components are healthy with now.
    fn observe(&mut self, healthy: Option<Sha256>, now: Instant) {
        if self.running.map(|(bundle, _)| bundle) != healthy {
            self.running = healthy.map(|bundle| (bundle, now));
        }
    }

    /// When the bundle that runs will have proved itself; `None` if it has, or none runs.
    fn deadline(&self) -> Option<Instant> {
        let (bundle, since) = self.running?;
        (self.proven != Some(bundle)).then_some(since + self.proof_time)
    }

    /// The bundle that has proved itself by now. Each is returned once.
    fn take_proven(&mut self, now: Instant) -> Option<Sha256> {
        self.deadline().filter(|at| *at <= now)?;
        self.proven = self.running.map(|(bundle, _)| bundle);
        self.proven
    }
}

/// The bundle that all components of a node run with and are healthy with.
fn healthy_bundle(status: Option<&KubernetesStatus>) -> Option<Sha256> {
    let status = status.filter(|status| status.generation > 0 && !status.components.is_empty())?;
    hex::decode(&status.bundle).ok()?.try_into().ok().map(Sha256)
}

/// Makes the runnable that watches the status of the node, and raises the version.
#[must_use]
pub fn prove_bundles(
    bundles: BundleStore,
    signing: SigningStore,
    status: WatchCell<Option<KubernetesStatus>>,
) -> Runnable {
    prove_bundles_within(PROOF_TIME, bundles, signing, status)
}

/// The same for bundles that prove themselves within this time.
fn prove_bundles_within(
    proof_time: Duration,
    bundles: BundleStore,
    signing: SigningStore,
    status: WatchCell<Option<KubernetesStatus>>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (bundles, signing, mut statuses) = (bundles.clone(), signing.clone(), status.watch());
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut timer = ProofTimer::new(proof_time);
            loop {
                let due = timer.deadline();
                let proof = async {
                    match due {
                        Some(at) => tokio::time::sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = statuses.next() => timer.observe(healthy_bundle(next.as_ref()), Instant::now()),
                    () = proof => {
                        if let Some(bundle) = timer.take_proven(Instant::now()) {
                            let (bundles, signing) = (bundles.clone(), signing.clone());
                            tokio::task::spawn_blocking(move || raise_minimum(&bundles, &signing, bundle)).await?;
                        }
                    }
                }
            }
        }
    })
}

/// Raises the version by the signature of a bundle, and stores it. Blocks.
fn raise_minimum(bundles: &BundleStore, signing: &SigningStore, bundle: Sha256) {
    let Some(minimum) = bundles.minimum_version(bundle) else { return };
    signing.raise_minimum(ArtefactKind::Bundle, BUNDLE_NAME, minimum);
    if let Err(error) = signing.save() {
        tracing::warn!(%error, "the lowest accepted version of bundles is not stored yet; a heartbeat tries again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use proto::curator::v1::KubernetesComponentStatus;
    use supervisor::supervise::{Supervisor, SupervisorSettings};

    use crate::server_pool::ServerPool;
    use crate::state_directory::StateDirectory;

    const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";

    fn status(bundle: &str, generation: u64, components: usize) -> KubernetesStatus {
        KubernetesStatus {
            bundle: bundle.to_owned(),
            generation,
            components: vec![KubernetesComponentStatus::default(); components],
            ..KubernetesStatus::default()
        }
    }

    #[test]
    fn bundle_proves_itself_by_health_without_a_gap() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let (first, second) = (Sha256([1; 32]), Sha256([2; 32]));
        let mut timer = ProofTimer::new(PROOF_TIME);
        assert_eq!((timer.deadline(), timer.take_proven(at(0))), (None, None), "nothing runs");
        timer.observe(Some(first), at(0));
        timer.observe(Some(first), at(50));
        assert_eq!((timer.deadline(), timer.take_proven(at(59))), (Some(at(60)), None), "not yet");
        timer.observe(None, at(59));
        timer.observe(Some(first), at(60));
        assert_eq!(timer.take_proven(at(61)), None, "a component was ill");
        assert_eq!(timer.take_proven(at(120)), Some(first));
        assert_eq!((timer.deadline(), timer.take_proven(at(500))), (None, None), "once is enough");
        timer.observe(Some(second), at(500));
        assert_eq!((timer.take_proven(at(559)), timer.take_proven(at(560))), (None, Some(second)));
    }

    #[test]
    fn bundle_is_healthy_when_all_components_are() {
        let name = "07".repeat(32);
        for (status, expected) in [
            (None, None),
            (Some(status(&name, 1, 2)), Some(Sha256([7; 32]))),
            (Some(status(&name, 0, 2)), None),
            (Some(status(&name, 1, 0)), None),
            (Some(status("", 1, 2)), None),
            (Some(status("07", 1, 2)), None),
        ] {
            assert_eq!(healthy_bundle(status.as_ref()), expected, "{status:?}");
        }
    }

    #[tokio::test]
    async fn lowest_version_of_a_bundle_that_has_proved_itself_is_stored() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let signing = SigningStore::open(state.clone());
        assert!(signing.accept_offer(&[KEY.to_owned()], &[]));
        // What a bundle has there once it was unpacked with its signature.
        let name = "07".repeat(32);
        let bundle = directory.path().join("bundles").join(&name);
        std::fs::create_dir_all(&bundle).unwrap();
        std::fs::write(bundle.join("minimum-version"), "1.20.3").unwrap();
        let bundles = BundleStore::open(directory.path().join("bundles"), ServerPool::default());
        assert_eq!(bundles.minimum_version(Sha256([7; 32])), Some("1.20.3".parse().unwrap()));

        let cell = WatchCell::new();
        let proving = prove_bundles_within(Duration::ZERO, bundles, signing.clone(), cell.clone());
        let supervisor = Supervisor::start(proving, SupervisorSettings::default());
        // The bundle runs, and not all of its components are healthy.
        cell.set(Some(status(&name, 0, 2)));
        let stored = || {
            let trust = SigningStore::open(state.clone()).trust().unwrap();
            trust.minimum_version(ArtefactKind::Bundle, BUNDLE_NAME)
        };
        supervisor.wait_quiescent().await;
        assert_eq!(stored(), None);
        cell.set(Some(status(&name, 1, 2)));
        let end = Instant::now() + Duration::from_mins(1);
        while stored().is_none() {
            assert!(Instant::now() < end, "the lowest version is not stored");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(stored(), Some("1.20.3".parse().unwrap()));
        supervisor.stop().await;
        assert!(!signing.is_unsaved());
    }
}
