//! What the keys of Kubernetes on a copied disk open at API servers.

use anyhow::{Context as _, Result, ensure};
use shepherd::curator_client::clock::Clock;
use shepherd::etcd::client::Client;
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;

use super::super::node::Node;
use super::attempts::{Attempt, Attempts};
use super::disk::StolenDisk;
use crate::harness::etcd_servers::until;
use crate::harness::forged_access::{ForgedAccess, stored_keys};

/// Shows API servers what is forged with the keys of Kubernetes on the disk, before and after they are rotated.
pub(super) async fn try_kubernetes(
    attempts: &mut Attempts,
    stolen: &StolenDisk,
    member: &Node,
) -> Result<()> {
    let copied = stolen.kubernetes.as_ref().context("the disk has no keys of Kubernetes")?;
    let now = || Clock::system().now();
    let forged = ForgedAccess::create(copied, now())?;
    let former = copied.trust_bundle();
    ensure!(forged.is_client_accepted(&former, now())? && forged.is_token_accepted(&former), "no forgery");
    let client = Client::new(vec![client_endpoint(&member.files())], Namespace::new("curator")?);
    until("API servers refuse a forged client", async || {
        Ok(!forged.is_client_accepted(&stored_keys(&client).await?.trust_bundle(), now())?)
    })
    .await
    .with_context(|| member.report())?;
    attempts.record("an API server, by a false client in system:masters", Attempt::Refused);
    for (which, ring) in &copied.rings {
        until("each key of Kubernetes is replaced", async || {
            Ok(stored_keys(&client).await?.key_ring(*which)?.signer != ring.signer)
        })
        .await
        .with_context(|| format!("keys for {which}"))?;
    }
    // Tokens of before are accepted for as long as pods have them: `curator/exposed_keys` moves its clock past that.
    Ok(())
}
