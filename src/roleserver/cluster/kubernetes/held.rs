//! Has the bundle here that this node is to run by.
//!
//! Until another one is here, whole, the one before goes on: what ends of it is started again from it. The one before stays
//! on the disk, for going back.

use std::time::Duration;

use crate::model::declaration::Sha256;
use crate::model::kubernetes::bundle::Duty;
use crate::model::kubernetes::version::Version;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::bundles::{Bundle, Bundles};
use crate::roleserver::cluster::kubernetes::runs::Runs;
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::supervisor::backoff::Backoff;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::value::Value;

/// Pauses between attempts.
const PAUSES: Backoff = Backoff::USUAL;

/// What components are started from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// The bundle; the one before while another is not here yet.
    pub bundle: Option<Bundle>,
    /// Why it is not the one that was asked for.
    pub said: Option<String>,
}

/// The runnable; `output` is what there is.
#[must_use]
pub fn held(bundles: Bundles, files: Files, startup: Value<Startup>, output: Value<Held>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (bundles, files, output) = (bundles.clone(), files.clone(), output.clone());
        let mut startups = startup.watch();
        async move {
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut now = scope.until_cancelled(startups.next()).await?;
            let mut failures = 0;
            loop {
                let Some(setup) = now.setup.clone() else {
                    now = scope.until_cancelled(startups.next()).await?;
                    continue;
                };
                let (wanted, before) = (setup.bundle(), output.latest().and_then(|held: Held| held.bundle));
                if before.as_ref().is_some_and(|before| before.digest == wanted) {
                    output.set(Held { bundle: before, said: None });
                    now = scope.until_cancelled(startups.next()).await?;
                    continue;
                }
                let before = match before {
                    Some(before) => Some(before),
                    None => scope.until_cancelled(of_before(&bundles, &files, wanted)).await?,
                };
                let here = |said| Held { bundle: before.clone(), said: Some(said) };
                let name = hex::encode(wanted.0);
                output.set(here(format!("bundle {}… is being brought here", &name[..12])));
                let having = async {
                    let bundle = bundles.have(&wanted).await.map_err(|error| error.to_string())?;
                    suits(&bundle, &now)?;
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
                        if let Err(error) = bundles.keep_only(&keep).await {
                            tracing::warn!(%error, "bundles of Kubernetes that nobody needs any more stay");
                        }
                        output.set(Held { bundle: Some(bundle), said: None });
                        continue;
                    }
                    Err(said) => {
                        failures += 1;
                        tracing::warn!(said, "the Kubernetes bundle of this node is not to be had");
                        output.set(here(said));
                        PAUSES.after(failures, rand::random()).max(Duration::from_secs(1))
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

/// The bundle that components were started from last, if it is still here and another one than this.
async fn of_before(bundles: &Bundles, files: &Files, wanted: Sha256) -> Option<Bundle> {
    let runs = Runs::read(files);
    let name = &runs.last()?.bundle;
    let digest = hex::decode(name).ok().and_then(|digest| digest.try_into().ok()).map(Sha256)?;
    if digest == wanted || !files.bundles().join(name).is_dir() {
        return None;
    }
    bundles.have(&digest).await.ok()
}

/// Whether a bundle has all that is to run of it here.
fn suits(bundle: &Bundle, startup: &Startup) -> Result<(), String> {
    let own: Version = env!("CARGO_PKG_VERSION").parse().unwrap_or(Version::new(0, 0, 0));
    for (duty, part) in [(Duty::Controller, &startup.controller), (Duty::Worker, &startup.worker)] {
        if matches!(part, Part::On | Part::Held(_)) {
            bundle.manifest.check(duty, own)?;
        }
    }
    Ok(())
}
