//! Write every Secret again through the API server of this node, once each controller has the same list of keys.
//!
//! The shepherd orders it when every API server writes with the new key. The node that reconciles does it, through its own
//! API server. Nothing is remembered between two attempts: an API server stores nothing for a Secret that is encrypted with
//! the new key already, so an attempt that was interrupted is repeated from the beginning, and two nodes may do it at once.

use std::time::Duration;

use model::kubernetes::bundle_manifest::KubernetesDuty;
use reconciler::objects::api_client::{ApiServerConnection, ClientIdentity, ReloadingClient};
use reconciler::objects::secret_rewrite::rewrite_all_secrets;
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::cluster::files::{ClusterFiles, SecretKeysOrder, SecretKeysStatus};
use crate::cluster::kubernetes::key_material::{SERVER_CAS, role_directory};
use crate::cluster::kubernetes::reconciler_runner::ControllerReadiness;
use crate::cluster::node_facts::NodeFacts;

/// Time between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// What it depends on.
#[derive(Clone)]
pub struct RewriteInputs {
    /// The keys by the newest order.
    pub ordered: WatchCell<SecretKeysOrder>,
    /// What is done with the keys.
    pub status: WatchCell<SecretKeysStatus>,
    /// Whether this node reconciles.
    pub readiness: WatchCell<ControllerReadiness>,
}

/// The newest of these; an unknown one has its default value.
#[derive(Clone, Debug, Default)]
struct KnownInputs {
    ordered: SecretKeysOrder,
    status: SecretKeysStatus,
    leads: bool,
}

/// The key that every Secret has to be written again with by this node; `None` if nothing has to be done now.
fn due_key(known: &KnownInputs) -> Option<&str> {
    let key = known.ordered.writing_key()?;
    let is_due = known.leads
        && known.ordered.rewrite
        && known.status.running == known.ordered.provider_list()
        && known.status.rewritten != key;
    is_due.then_some(key)
}

/// Makes the runnable that publishes the key that every Secret was written again with.
#[must_use]
pub fn rewrite_secrets(
    files: ClusterFiles,
    facts: NodeFacts,
    port: u16,
    inputs: RewriteInputs,
    output: WatchCell<String>,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts, inputs, output) = (files.clone(), facts.clone(), inputs.clone(), output.clone());
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut changes = CombinedInputs::new(KnownInputs::default())
                .with(&inputs.ordered, |known: &mut KnownInputs, ordered| known.ordered = ordered)
                .with(&inputs.status, |known: &mut KnownInputs, status| known.status = status)
                .with(&inputs.readiness, |known: &mut KnownInputs, readiness: ControllerReadiness| {
                    known.leads = readiness.is_leader;
                });
            let mut known = scope.until_cancelled(changes.next()).await?;
            loop {
                let Some(key) = due_key(&known).map(str::to_owned) else {
                    known = scope.until_cancelled(changes.next()).await?;
                    continue;
                };
                let address = scope.until_cancelled(facts.address.watch().next()).await?;
                let client = own_client(&files, std::net::SocketAddr::new(address, port));
                match scope.until_cancelled(rewrite_all_secrets(&client)).await? {
                    Ok(count) => {
                        tracing::info!(count, %key, "every Kubernetes Secret is written again");
                        output.set(key);
                        known = scope.until_cancelled(changes.next()).await?;
                    }
                    Err(error) => {
                        tracing::warn!(%error, "Kubernetes Secrets cannot be written again; that is tried again");
                        let next = tokio::time::timeout(RETRY_INTERVAL, changes.next());
                        if let Ok(next) = scope.until_cancelled(next).await? {
                            known = next;
                        }
                    }
                }
            }
        }
    })
}

/// A client of this node's API server, as the reconciler.
fn own_client(files: &ClusterFiles, address: std::net::SocketAddr) -> ReloadingClient {
    let directory = files.kubernetes_directory().join(role_directory(KubernetesDuty::Controller));
    ReloadingClient::new(ApiServerConnection {
        url: format!("https://{address}"),
        identity: Some(ClientIdentity {
            authority: directory.join(SERVER_CAS),
            certificate: directory.join("reconciler.crt"),
            key: directory.join("reconciler.key"),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::files::secret_keys_tests::secret_keys_order;

    #[test]
    fn secrets_are_written_again_once_by_the_node_that_reconciles_and_after_its_restart() {
        let order =
            |rewrite| SecretKeysOrder { rewrite, ..secret_keys_order(&[("key2-b", 2), ("key1-a", 1)]) };
        let status = |running: &str, rewritten: &str| SecretKeysStatus {
            running: running.to_owned(),
            rewritten: rewritten.to_owned(),
        };
        let list = "key2-b key1-a";
        for (ordered, status, leads, expected) in [
            (order(true), status(list, ""), true, Some("key2-b")),
            (order(true), status(list, "key1-a"), true, Some("key2-b")),
            (order(true), status(list, "key2-b"), true, None),
            (order(true), status(list, ""), false, None),
            (order(false), status(list, ""), true, None),
            (order(true), status("key1-a key2-b", ""), true, None),
            (SecretKeysOrder::default(), status("", ""), true, None),
        ] {
            let known = KnownInputs { ordered, status, leads };
            assert_eq!(due_key(&known), expected, "{known:?}");
        }
        let plain = SecretKeysOrder { rewrite: true, ..secret_keys_order(&[("identity", 0), ("key1-a", 1)]) };
        let status = status(&plain.provider_list(), "");
        assert_eq!(due_key(&KnownInputs { ordered: plain, status, leads: true }), None);
    }
}
