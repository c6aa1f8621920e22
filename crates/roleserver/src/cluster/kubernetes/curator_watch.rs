//! Watch the Kubernetes setup that the curator assigns to this node.

use curator_client::status_text::describe_status;
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::setup::{NodeSetup, write_setup};
use crate::cluster::node_facts::NodeFacts;

/// Makes the runnable that watches the curator, stores each new setup and publishes it.
#[must_use]
pub fn watch_setup(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut kubernetes = KubernetesClient::new(connection.curators.channel());
            let failed = |status: tonic::Status| {
                let why = describe_status(&status);
                RunnableError::msg(format!("the watch of this node's Kubernetes setup ended: {why}"))
            };
            let opening = kubernetes.watch_own(wire::WatchOwnKubernetesRequest {});
            let mut streaming = scope.until_cancelled(opening).await?.map_err(failed)?.into_inner();
            let _healthy = starting.mark_healthy();
            loop {
                let message = scope.until_cancelled(streaming.message()).await?.map_err(failed)?;
                let message = message
                    .ok_or_else(|| RunnableError::msg("the watch of this node's Kubernetes setup ended"))?;
                let now = match message.setup.map(NodeSetup::new).transpose() {
                    Ok(now) => now,
                    Err(why) => {
                        tracing::error!(
                            reason = why,
                            "the Kubernetes setup of this node cannot be used; running components continue"
                        );
                        continue;
                    }
                };
                if facts.setup.latest().as_ref() != Some(&now) {
                    let generation = now.as_ref().map(NodeSetup::generation);
                    let bundle = now.as_ref().map(|setup| hex::encode(setup.bundle().0));
                    tracing::info!(generation, bundle, "the Kubernetes setup of this node has changed");
                    write_setup(&files, now.as_ref())?;
                    facts.setup.set(now);
                }
            }
        }
    })
}
