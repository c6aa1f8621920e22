//! Install the bundle that this node should run, and keep the previous one for rollback.
//!
//! Until the new bundle is completely installed, components continue with the previous one, and are also restarted from
//! it. The previous bundle stays on the disk for a rollback.

use std::time::Duration;

use backoff::ExponentialBackoff;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::kubernetes::version::ReleaseVersion;
use model::role_declaration::Sha256;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::bundle_store::{Bundle, BundleStore};
use crate::cluster::kubernetes::component_revisions::RevisionHistory;
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};

/// Pauses between attempts to install a bundle.
const RETRY_BACKOFF: ExponentialBackoff = ExponentialBackoff::DEFAULT;

/// The bundle that components are started from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstalledBundle {
    /// The installed bundle; the previous one while the desired one is not installed yet.
    pub bundle: Option<Bundle>,
    /// Why `bundle` is not the desired one; `None` if it is.
    pub message: Option<String>,
}

/// Makes the runnable that installs bundles, and publishes the installed one in `output`.
#[must_use]
pub fn install_bundle(
    bundles: BundleStore,
    files: ClusterFiles,
    startup: WatchCell<KubernetesStartup>,
    output: WatchCell<InstalledBundle>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (bundles, files, output) = (bundles.clone(), files.clone(), output.clone());
        let mut startups = startup.watch();
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut now = scope.until_cancelled(startups.next()).await?;
            let mut failures = 0;
            loop {
                let Some(setup) = now.setup.clone() else {
                    now = scope.until_cancelled(startups.next()).await?;
                    continue;
                };
                let (wanted, before) =
                    (setup.bundle(), output.latest().and_then(|held: InstalledBundle| held.bundle));
                if before.as_ref().is_some_and(|before| before.digest == wanted) {
                    output.set(InstalledBundle { bundle: before, message: None });
                    now = scope.until_cancelled(startups.next()).await?;
                    continue;
                }
                let before = match before {
                    Some(before) => Some(before),
                    None => scope.until_cancelled(previous_bundle(&bundles, &files, wanted)).await?,
                };
                let here = |text| InstalledBundle { bundle: before.clone(), message: Some(text) };
                let name = hex::encode(wanted.0);
                output.set(here(format!("bundle {}… is being fetched", &name[..12])));
                let having = async {
                    let bundle = bundles.ensure_bundle(&wanted).await.map_err(|error| error.to_string())?;
                    check_bundle(&bundle, &now)?;
                    Ok::<_, String>(bundle)
                };
                let got = tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = startups.next() => { now = next; continue; }
                    got = having => got,
                };
                let pause = match got {
                    Ok(bundle) => {
                        failures = 0;
                        let mut keep = vec![bundle.digest];
                        keep.extend(before.as_ref().map(|before| before.digest));
                        if let Err(error) = bundles.remove_unneeded(&keep).await {
                            tracing::warn!(%error, "unneeded Kubernetes bundles could not be removed");
                        }
                        output.set(InstalledBundle { bundle: Some(bundle), message: None });
                        continue;
                    }
                    Err(reason) => {
                        failures += 1;
                        tracing::warn!(reason, "the Kubernetes bundle of this node is not available");
                        output.set(here(reason));
                        RETRY_BACKOFF.delay(failures, rand::random()).max(Duration::from_secs(1))
                    }
                };
                tokio::select! {
                    cancelled = scope.cancelled() => return Err(cancelled.into()),
                    next = startups.next() => now = next,
                    () = tokio::time::sleep(pause) => {}
                }
            }
        }
    })
}

/// The bundle that components were last started from, if it is still here and is not `wanted`.
async fn previous_bundle(bundles: &BundleStore, files: &ClusterFiles, wanted: Sha256) -> Option<Bundle> {
    let runs = RevisionHistory::read(files);
    let name = &runs.last()?.bundle;
    let digest = hex::decode(name).ok().and_then(|digest| digest.try_into().ok()).map(Sha256)?;
    if digest == wanted || !files.bundles_directory().join(name).is_dir() {
        return None;
    }
    bundles.ensure_bundle(&digest).await.ok()
}

/// Checks that the bundle supports every role that should run here.
fn check_bundle(bundle: &Bundle, startup: &KubernetesStartup) -> Result<(), String> {
    let own: ReleaseVersion = env!("CARGO_PKG_VERSION").parse().unwrap_or(ReleaseVersion::new(0, 0, 0));
    for (duty, part) in
        [(KubernetesDuty::Controller, &startup.controller), (KubernetesDuty::Worker, &startup.worker)]
    {
        if matches!(part, RoleStartup::On | RoleStartup::Paused(_)) {
            bundle.manifest.check_supports(duty, own)?;
        }
    }
    Ok(())
}
