//! Objects that are reconciled by a leader elected in a real etcd: no change waits for the next periodic pass.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use shepherd::reconciler::leadership::ReconcileTiming;
use shepherd::reconciler::objects::ObjectReconciler;
use shepherd::reconciler::objects::reconcile::KubernetesObjects;
use shepherd::reconciler::service::{Reconciler, ReconcilerSettings};
use shepherd::reconciler::status::ReconcilerStatus;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::kit::{EVERYTHING, Other, Server, bindings, cluster_roles, everything, named, role};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, in_time, until};
use crate::reconciler::kit::{program, until_status};

/// The next periodic pass is later than the end of a test.
const PACE: ReconcileTiming =
    ReconcileTiming { settle_time: Duration::from_millis(10), interval: Duration::from_hours(1) };

async fn until_owners_own(other: &Other) -> Result<()> {
    until("the binding is as it should be", async || {
        let binding = other.get(&bindings(), &named("shepherd:owners")).await;
        Ok(binding.is_ok_and(|binding| {
            binding.is_ok_and(|binding| binding["subjects"][0]["name"] == "shepherd:owners")
        }))
    })
    .await
}

#[tokio::test]
async fn leader_reverts_what_others_change_without_waiting() -> TestResult {
    Ok(led(&mut Server::simulated().await?).await?)
}

#[tokio::test]
async fn leader_reverts_changes_in_a_real_server_without_waiting_also_after_it_was_killed() -> TestResult {
    let Some(mut server) = Server::real().await? else { return Ok(()) };
    Ok(led(&mut server).await?)
}

async fn led(server: &mut Server) -> Result<()> {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "1.0.0")?;
    let (_wishes, receiver) = watch::channel(Some(everything()));
    let objects = KubernetesObjects::new(server.connection(), receiver);
    let ttl = Duration::from_hours(1);
    let settings = ReconcilerSettings {
        name: "own".to_owned(),
        program: own.clone(),
        client: client.clone(),
        ttl,
        timing: PACE,
    };
    let cancel = CancellationToken::new();
    let running = tokio::spawn({
        let cancel = cancel.clone();
        async move { Box::pin(Reconciler::new(settings, objects).run(&cancel)).await }
    });
    until_status(&client, &ReconcilerStatus::completed_by(&own)).await?;
    let mut other = server.other()?;
    for round in 0..2 {
        until_owners_own(&other).await?;
        other.edit(&bindings(), &named("shepherd:owners"), |binding| binding["subjects"] = json!([])).await?;
        until_owners_own(&other).await?;
        other.delete(&bindings(), &named("shepherd:owners")).await??;
        until_owners_own(&other).await?;
        other.create(&cluster_roles(), &role("stray", "get", true)).await??;
        until("the stray is gone", async || Ok(other.get(&cluster_roles(), &named("stray")).await?.is_err()))
            .await?;
        if let (0, Server::Real(real)) = (round, &mut *server) {
            // While all of this is under way.
            other.delete(&bindings(), &named("shepherd:owners")).await??;
            real.kill()?;
            real.run().await?;
            other = server.other()?;
        }
    }
    let (_wishes, receiver) = watch::channel(Some(everything()));
    let passed = KubernetesObjects::new(server.connection(), receiver).reconcile().await?;
    assert!(passed.is_unchanged(), "{EVERYTHING} objects are as they should be: {passed}");
    cancel.cancel();
    in_time("the end of a reconciler", running).await??;
    Ok(())
}
