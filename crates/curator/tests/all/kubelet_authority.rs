//! Kubelets of a cluster from a release before get an authority of their own.

use anyhow::{Context as _, Result};
use model::cluster::kubernetes::KeyPurpose;
use proto::curator::v1 as wire;
use proto::curator::v1::kubernetes_client::KubernetesClient;
use shepherd_curator::kubernetes::keys::{KubernetesKeys, keys_record_key};
use shepherd_curator::statement_record::statement_record_key;
use tonic::Code;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, ClusterOptions, put_kubernetes, refusal};
use testkit::etcd_servers::until;

/// The stored keys.
async fn stored_keys(cluster: &Cluster) -> Result<KubernetesKeys> {
    let key = keys_record_key()?;
    let record = cluster.client_of(0).get(&key).await?.context("there are no keys")?;
    Ok(KubernetesKeys::decode(&key, &record.value)?)
}

/// A release before, which has one authority for API servers and kubelets, is updated: nothing of the new authority
/// exists until every curator has shown its role, and the leader makes it then.
#[tokio::test]
async fn leader_separates_kubelets_once_every_curator_runs_the_release() -> TestResult {
    let options = ClusterOptions { old_curators: 1, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(options).await?;
    cluster.until_one_leads(None).await?;
    let owner = cluster.as_owner().await?;
    put_kubernetes(owner.clone()).await?;
    let before = stored_keys(&cluster).await?;
    assert!(!before.rings.contains_key(&KeyPurpose::Kubelets), "API servers would reject what it signs");
    let rotate = wire::RotateKubernetesRequest { keys: wire::KubernetesKeys::Kubelets.into() };
    let (code, text) = refusal(KubernetesClient::new(owner).rotate(rotate).await)?;
    assert_eq!((code, text.contains("by themselves")), (Code::FailedPrecondition, true), "{text}");
    assert!(cluster.client_of(0).get(&statement_record_key()?).await?.is_none());
    assert_eq!(stored_keys(&cluster).await?, before);

    cluster.stop(0).await?;
    cluster.run(0).await?;
    until("kubelets have an authority of their own", async || {
        let keys = stored_keys(&cluster).await?;
        Ok(keys.rings.get(&KeyPurpose::Kubelets).is_some_and(|ring| ring.replacement.is_none()))
    })
    .await?;
    let after = stored_keys(&cluster).await?;
    let of = |keys: &KubernetesKeys, which| keys.key_ring(which).map(|ring| ring.signer.clone());
    assert_ne!(of(&after, KeyPurpose::Kubelets)?, of(&before, KeyPurpose::Servers)?);
    assert_eq!(of(&after, KeyPurpose::Servers)?, of(&before, KeyPurpose::Servers)?);
    assert_eq!(after.generation, before.generation + 3, "one for each step");
    Ok(())
}
