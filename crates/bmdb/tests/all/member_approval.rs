//! Orders that admit a machine to a cluster: by every name that a machine has.

use anyhow::{Context as _, Result};
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::Kit;

/// The message of the order to admit the machine of this name.
async fn approve(kit: &Kit, machine: &str) -> Result<String> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/ApproveMachine".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "its key is that of its console".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(b"approve"),
    };
    let carried = kit.bmdb.approve_cluster_member(order, "ams".to_owned(), machine.to_owned()).await?;
    Ok(carried.outcome.message)
}

#[tokio::test]
async fn member_is_admitted_by_each_of_its_names() -> TestResult {
    let kit = Kit::new("member_approval").await?;
    kit.founded_cluster(1, 0).await?;
    let machine = kit.control_plane(1).await?[0].0;
    sqlx::query(
        "INSERT INTO machine_cluster_report (machine_id, generation, node_key, epoch, reported_at)
         VALUES ($1, 3, decode(repeat('07', 32), 'hex'), 0, clock_timestamp())",
    )
    .bind(machine)
    .execute(&kit.pool)
    .await?;
    let id = machine.to_string();
    for name in [id.clone(), id[..8].to_owned(), format!("rack/{id}")] {
        let text = approve(&kit, &name).await?;
        assert!(text.starts_with(&format!("admits {name} with the key 0707")), "{text}");
        sqlx::query("UPDATE machine_cluster SET approved = NULL").execute(&kit.pool).await?;
    }
    let stranger = kit.provided(1, "rack").await?[0].0;
    for name in [stranger.to_string(), "rack/unknown".to_owned()] {
        let text = approve(&kit, &name).await.err().context("no member has this name")?.to_string();
        assert!(text.starts_with(&format!("the cluster ams has no machine {name:?}; run: ")), "{text}");
    }
    Ok(())
}
