//! Damaged files of a node: what continues, what the node reports, and the way back.

use anyhow::{Context as _, Result};

use super::node::Node;
use super::services::founded;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// Waits until the node follows a leader.
async fn until_led(node: &Node) -> Result<()> {
    let connection = node.facts.connection.clone();
    until("the node follows a leader", async || {
        Ok(connection.latest().is_some_and(|connection| connection.curators.leader().is_some()))
    })
    .await
    .with_context(|| format!("{:?}\n{}", node.facts.refusal.latest(), node.report()))
}

/// After a power cut that damaged the statement, etcd and the curator of the node run: the cluster may need them. The node
/// itself follows nobody until a person has removed the file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_statement_stops_no_etcd() -> TestResult {
    let (_owner, mut node) = founded().await?;
    let statement = node.disk().join("statement.json");
    until("the node has a statement", async || Ok(statement.exists())).await?;
    node.cut_power().await?;
    std::fs::write(&statement, "{")?;
    node.start()?;
    node.until_control_plane(true).await?;
    assert!(node.etcd().context("it has no etcd")?.instance.is_alive());
    let refusal = node.facts.refusal.clone();
    until("it names the file and the way back", async || {
        let refusal = refusal.latest().flatten().unwrap_or_default();
        Ok(refusal.contains("statement.json is damaged") && refusal.contains("remove it"))
    })
    .await
    .with_context(|| node.report())?;
    let connection = node.facts.connection.latest().context("no connection")?;
    assert_eq!(connection.curators.leader(), None, "it follows nobody");

    // Without the file, the node still has the mark that there was one.
    std::fs::remove_file(&statement)?;
    let refusal = node.facts.refusal.clone();
    until("it names the missing file", async || {
        Ok(refusal.latest().flatten().unwrap_or_default().contains("it is missing"))
    })
    .await
    .with_context(|| node.report())?;
    assert_eq!(connection.curators.leader(), None, "it follows nobody");

    std::fs::remove_file(node.disk().join("statement_stored.json"))?;
    until_led(&node).await?;
    until("the node has a statement again", async || Ok(statement.exists())).await?;
    Ok(())
}
