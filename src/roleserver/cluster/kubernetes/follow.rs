//! What this node is to run of Kubernetes: from its disk first, and from the curator then.

use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::kubernetes_client::KubernetesClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::setup::{Setup, keep};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// The runnable that follows the curator.
#[must_use]
pub fn follow(files: Files, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut kubernetes = KubernetesClient::new(connection.curators.channel());
            let failed = |status: tonic::Status| {
                let why = format!("following what is to run of Kubernetes ended: {}", status.message());
                Stop::because(why)
            };
            let asking = kubernetes.watch_own(wire::WatchOwnKubernetesRequest {});
            let mut told = scope.until_cancelled(asking).await?.map_err(failed)?.into_inner();
            let _healthy = starting.healthy();
            loop {
                let message = scope.until_cancelled(told.message()).await?.map_err(failed)?;
                let message =
                    message.ok_or_else(|| Stop::because("following what is to run of Kubernetes ended"))?;
                let now = match message.setup.map(Setup::new).transpose() {
                    Ok(now) => now,
                    Err(why) => {
                        tracing::error!(
                            why,
                            "what is to run of Kubernetes cannot be carried out; what runs goes on"
                        );
                        continue;
                    }
                };
                if facts.setup.latest().as_ref() != Some(&now) {
                    let generation = now.as_ref().map(Setup::generation);
                    let bundle = now.as_ref().map(|setup| hex::encode(setup.bundle().0));
                    tracing::info!(generation, bundle, "what is to run of Kubernetes has changed");
                    keep(&files, now.as_ref())?;
                    facts.setup.set(now);
                }
            }
        }
    })
}
