//! What a pass observed of a cluster, and the issues that follow from it.

use anyhow::Context as _;
use model::issues::find_issues;
use shepherd_bmdb::cluster::transitions::{ClusterObservation, LEASE_KIND};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd};

#[tokio::test]
async fn etcd_that_is_nearly_full_is_an_issue_until_another_size_is_reported() -> TestResult {
    let kit = Kit::new("cluster_observations").await?;
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
         VALUES (gen_random_uuid(), 'ams', 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp(), 'ca', '[]')",
    )
    .execute(&kit.pool)
    .await?;
    let cluster: Uuid = sqlx::query_scalar("SELECT cluster_id FROM cluster").fetch_one(&kit.pool).await?;
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let session = shepherd.session().await?;
    let lease = shepherd
        .bmdb
        .acquire_named_lease(&session, LEASE_KIND, &cluster.to_string())
        .await?
        .context("free")?;
    // Curators of an earlier release report no size.
    for (etcd_bytes, expected) in [
        (None, false),
        (Some(1 << 30), false),
        (Some(1_800_000_000), true),
        (None, true),
        (Some(90_000), false),
    ] {
        let look = ClusterObservation { etcd_bytes, ..ClusterObservation::default() };
        shepherd.bmdb.record_cluster_observation(&lease, cluster, &look).await?;
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let found =
            issues.iter().any(|issue| issue.id == "cluster-etcd-large" && issue.subject == "cluster ams");
        assert_eq!(found, expected, "{etcd_bytes:?}: {issues:?}");
    }
    Ok(())
}
