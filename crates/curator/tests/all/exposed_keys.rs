//! The keys of Kubernetes that a former consensus member or a thief has from the data of etcd.

use anyhow::{Context as _, Result};
use model::cluster::kubernetes::KeyPurpose;
use proto::curator::v1 as wire;
use proto::curator::v1::management_client::ManagementClient;
use proto::curator::v1::nodes_client::NodesClient;
use shepherd_curator::authority_installation::install_authority;
use shepherd_curator::bootstrap::create_authority;
use shepherd_curator::kubernetes::key_rotation::TOKEN_OVERLAP;
use shepherd_curator::kubernetes::keys::KubernetesKeys;

use testkit::aloud::TestResult;
use testkit::curators::{Cluster, certificate, put_kubernetes};
use testkit::etcd_servers::until;
use testkit::forged_access::{ForgedAccess, stored_keys};

use crate::authority_rotation::{report, until_listed};
use crate::member_removal::{decommission, join_as_member, removal, replacement};

async fn keys_of(cluster: &Cluster) -> Result<KubernetesKeys> {
    stored_keys(&cluster.client_of(0)).await
}

/// Whether API servers accept the client and the token that are forged.
async fn accepted(cluster: &Cluster, forged: &ForgedAccess) -> Result<(bool, bool)> {
    let bundle = keys_of(cluster).await?.trust_bundle();
    Ok((forged.is_client_accepted(&bundle, cluster.time.now())?, forged.is_token_accepted(&bundle)))
}

/// Waits until each key but that of tokens has been replaced.
async fn until_rotated(cluster: &Cluster, copied: &KubernetesKeys) -> Result<()> {
    let mut keys = copied.clone();
    until("all keys of Kubernetes are replaced", async || {
        keys = keys_of(cluster).await?;
        Ok(keys.exposed.is_empty()
            && keys.rings.iter().all(|(which, ring)| {
                ring.signer != copied.rings[which].signer
                    && (ring.replacement.is_none() || *which == KeyPurpose::ServiceAccounts)
            }))
    })
    .await
    .with_context(|| format!("still exposed: {:?}", keys.exposed))
}

/// Waits until nothing that is forged with the copied keys is accepted, and checks that nothing is rotated again.
async fn until_worthless(cluster: &Cluster, copied: &KubernetesKeys, forged: &ForgedAccess) -> Result<()> {
    until_rotated(cluster, copied).await?;
    assert_eq!(
        accepted(cluster, forged).await?,
        (false, true),
        "tokens that pods have are accepted for a while"
    );
    until("it is known until when tokens are accepted", async || {
        let ring = keys_of(cluster).await?.rings.remove(&KeyPurpose::ServiceAccounts);
        Ok(ring.and_then(|ring| ring.replacement).is_some_and(|replacement| replacement.settled_at.is_some()))
    })
    .await?;
    cluster.time.pass(u32::try_from(TOKEN_OVERLAP.as_secs())?);
    until("the copied keys are worth nothing", async || {
        Ok(accepted(cluster, forged).await? == (false, false))
    })
    .await?;
    let done = keys_of(cluster).await?;
    assert!(done.exposed.is_empty() && done.rings.values().all(|ring| ring.replacement.is_none()));
    // Trusted, signing and dropped, once for each purpose.
    assert_eq!(done.generation, copied.generation + 3 * u64::try_from(KeyPurpose::ALL.len())?);
    Ok(())
}

#[tokio::test]
async fn keys_on_the_disk_of_a_removed_member_are_rotated_after_the_authority() -> TestResult {
    let mut cluster = Cluster::start().await?;
    let old = cluster.anchor.clone();
    put_kubernetes(cluster.as_owner().await?).await?;
    let copied = keys_of(&cluster).await?;
    let forged = ForgedAccess::create(&copied, cluster.time.now())?;
    assert_eq!(accepted(&cluster, &forged).await?, (true, true), "a disk is worth that");

    let mut management = ManagementClient::new(cluster.as_owner().await?);
    let kept = join_as_member(&cluster, &mut management, 1).await?;
    management.update_roles(removal(&kept, false)).await?;
    assert!(keys_of(&cluster).await?.exposed.is_empty(), "its disk is wiped");
    decommission(&mut management, &kept).await?;

    let removed = join_as_member(&cluster, &mut management, 2).await?;
    management.update_roles(removal(&removed, true)).await?;
    let marked = keys_of(&cluster).await?;
    assert!(marked.exposed.iter().eq(&KeyPurpose::ALL), "not all keys of Kubernetes are marked: {marked:?}");
    decommission(&mut management, &removed).await?;
    let both = until_listed(&cluster, |listed| listed.len() == 2).await?;
    let new = both[1].clone();

    // Another leader has the mark, too. It rotates nothing while the authority that is replaced opens etcd.
    cluster.stop(0).await?;
    cluster.run(0).await?;
    cluster.until_one_leads(None).await?;
    let founder = &cluster.nodes[0];
    let by_old = certificate(&cluster.authority, founder, cluster.time.now())?;
    let mut nodes = NodesClient::new(cluster.channel(0, Some(founder.with(&by_old)?))?);
    nodes.update_status(report(&cluster, &[&old, &new], &old, &[&old, &new])?).await?;
    until_listed(&cluster, |listed| *listed == [new.clone(), old.clone()]).await?;
    assert_eq!(keys_of(&cluster).await?, marked, "they could be read until the authority is replaced");
    let by_new = nodes.renew_certificate(wire::RenewCertificateRequest {}).await?.into_inner().certificate;
    let mut renewed = NodesClient::new(cluster.channel(0, Some(founder.with(&by_new)?))?);
    renewed.update_status(report(&cluster, &[&new, &old], &new, &[&old, &new])?).await?;
    until_listed(&cluster, |listed| *listed == [new.clone()]).await?;
    renewed.update_status(report(&cluster, &[&new], &new, &[&new])?).await?;
    until("the replacement has ended", async || Ok(replacement(&cluster).await?.is_none())).await?;
    until_worthless(&cluster, &copied, &forged).await?;
    Ok(())
}

#[tokio::test]
async fn keys_that_a_thief_has_read_are_rotated_by_the_next_authority() -> TestResult {
    let mut cluster = Cluster::start().await?;
    put_kubernetes(cluster.as_owner().await?).await?;
    let copied = keys_of(&cluster).await?;
    let forged = ForgedAccess::create(&copied, cluster.time.now())?;
    cluster.stop(0).await?;
    let next = create_authority(cluster.id, cluster.time.now())?;
    // Each member has the same order.
    for _ in 0..2 {
        let (client, now) = (cluster.client_of(0), cluster.time.now());
        install_authority(&client, &next, &[cluster.owner.key], now).await?;
    }
    let marked = keys_of(&cluster).await?;
    assert!(marked.exposed.iter().eq(&KeyPurpose::ALL), "not all keys of Kubernetes are marked: {marked:?}");
    cluster.anchor = next.anchor().clone();
    cluster.run(0).await?;
    until_worthless(&cluster, &copied, &forged).await?;
    Ok(())
}
