//! A node's role server becomes another release while its services are used.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::agent::settings::AgentSettings;

use super::node::Node;
use super::owner::Owner;
use super::services::{Traffic, declare, instance, until_well, web};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::port::reserved;
use crate::harness::program::own_role_server;
use crate::roleserver::callback::Callback;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_loses_no_request_while_its_role_server_becomes_another_release() -> TestResult {
    let order = Arc::new(Mutex::new(None));
    let orders = order.clone();
    let shepherd = tokio::task::spawn_blocking(move || {
        Callback::start(move |request| {
            Ok(wire::HeartbeatResponse {
                hardware_report_requested: request.hardware_report.is_none(),
                heartbeat_interval_seconds: 1,
                release_order: orders.lock().map_or(None, |order| order.clone()),
                ..Default::default()
            })
        })
    })
    .await??;
    let place = tempfile::tempdir()?;
    let program = place.path().join("roleserver");
    own_role_server(&program)?;
    let former = std::fs::read(&program)?;
    // The same program with bytes appended: another release, by its digest.
    let release = [&former[..], b"another release"].concat();
    let sha256 = shepherd.serve(release.clone())?;

    let mut owner = Owner::new()?;
    let mut node = Node::new()?;
    node.ask(owner.founding_order())?;
    // The test reads the key of the cluster from it, so it is a part of this process at first.
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    owner.until_well(1, 1).await?;
    node.stop().await?;
    let settings =
        AgentSettings::new(std::slice::from_ref(&shepherd.endpoint), std::slice::from_ref(&shepherd.ca), 1);
    node.start_program(&program, settings.map_err(anyhow::Error::msg)?)?;
    let at: SocketAddr = reserved()?;
    let declared = declare(&owner, "web", &[web(at, "one")]).await?;
    owner.roles(&node, &["web"], &[]).await?;
    until_well(&owner, &node, "server", declared).await?;
    let (runs, etcd) = (instance(&node, "web_server")?, node.etcd().context("no etcd")?.instance);
    let role_server = node.role_server()?.context("no role server")?;
    let traffic = Traffic::start(at);

    let ordered = wire::ReleaseOrder {
        generation: 1,
        sha256: sha256.clone(),
        deadline_seconds: 120,
        signature: String::new(),
        is_unsigned: true,
    };
    *order.lock().map_err(|_| anyhow::anyhow!("poisoned"))? = Some(ordered);
    until("it is the other release", async || {
        let mut observations = shepherd.heartbeats().into_iter().rev();
        let newest =
            observations.find_map(|observations| observations.request.release_report).unwrap_or_default();
        anyhow::ensure!(newest.error.is_empty(), "{}", newest.error);
        Ok(newest.generation == 1 && newest.sha256 == sha256)
    })
    .await
    .with_context(|| node.report())?;
    assert!(std::fs::read(&program)? == release, "the other release has not the former one's place");
    assert_eq!(node.role_server()?, Some(role_server), "it is the same process");
    owner.until_well(1, 1).await?;
    let status = until_well(&owner, &node, "server", declared).await?;
    assert_eq!((status.restarts, instance(&node, "web_server")?), (0, runs), "only the role server changed");
    assert_eq!(node.etcd().context("no etcd")?.instance, etcd);
    let (requested, failures) = traffic.end()?;
    assert!(
        requested > 0 && failures.is_empty(),
        "{} of {requested} were not answered: {failures:?}",
        failures.len()
    );
    Ok(())
}
