//! Steps that need the running etcd of this node, and that stop nothing when they fail.
//!
//! etcd is a child of the control plane. An error that ended the control plane would stop etcd, too, and start it again,
//! for as long as the reason lasts. The other members may need this one for their quorum, also if its node gets no
//! certificate: it stays a member until its role is removed. So such a step is repeated, and the reason is reported.

use backoff::ExponentialBackoff;
use curator::bootstrap::register_peer_certificate;
use curator_client::node_id::PublicKey;
use etcd::client::Client;
use supervisor::context::Scope;
use supervisor::exit_reason::RunnableError;

use crate::cluster::etcd_member;
use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_problems::NodePart;

/// Repeats a step until it succeeds, and reports why it does not.
pub(super) async fn retry_beside_etcd<T, Step>(
    scope: &Scope,
    facts: &NodeFacts,
    step: impl Fn() -> Step,
) -> Result<T, RunnableError>
where
    Step: Future<Output = Result<T, RunnableError>>,
{
    let mut failures = 0_u32;
    loop {
        let sentence = match scope.until_cancelled(step()).await? {
            Ok(done) => {
                facts.problems.set(NodePart::BesideEtcd, None);
                return Ok(done);
            }
            Err(error) => error.to_string(),
        };
        failures = failures.saturating_add(1);
        tracing::warn!(
            failures,
            reason = sentence,
            "a step beside the running etcd failed; it is tried again"
        );
        facts.problems.set(NodePart::BesideEtcd, Some(sentence));
        let pause = ExponentialBackoff::DEFAULT.delay(failures, rand::random());
        scope.until_cancelled(tokio::time::sleep(pause)).await?;
    }
}

/// Records the certificate of the etcd member that runs here with the number of the member, which is returned.
pub(super) async fn register_pair(
    files: &ClusterFiles,
    client: &Client,
    node_key: PublicKey,
) -> Result<u64, RunnableError> {
    let member = client.status().await?.member_id;
    if let Some(certificate) = etcd_member::read_peer_certificate(files) {
        register_peer_certificate(client, node_key, &certificate, member).await?;
    }
    Ok(member)
}
