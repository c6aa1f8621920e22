//! What a pass observed of a cluster, and the issues that follow from it.

use anyhow::Context as _;
use model::issues::find_issues;
use shepherd_bmdb::cluster::transitions::{ClusterObservation, LEASE_KIND};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LeaseHolder};

#[tokio::test]
async fn etcd_that_is_nearly_full_is_an_issue_until_another_size_is_reported() -> TestResult {
    let kit = Kit::new("cluster_observations").await?;
    let cluster = kit.founded_cluster(3, 1).await?;
    let holder = LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    // Curators of an earlier release report no size.
    for (etcd_bytes, expected) in [
        (None, false),
        (Some(1 << 30), false),
        (Some(1_800_000_000), true),
        (None, true),
        (Some(90_000), false),
    ] {
        let look = ClusterObservation { etcd_bytes, ..ClusterObservation::default() };
        holder.shepherd.bmdb.record_cluster_observation(&holder.lease, cluster, &look).await?;
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let found =
            issues.iter().any(|issue| issue.id == "cluster-etcd-large" && issue.subject == "cluster ams");
        assert_eq!(found, expected, "{etcd_bytes:?}: {issues:?}");
    }
    Ok(())
}

#[tokio::test]
async fn full_etcd_and_used_up_authority_are_issues_by_the_last_answer() -> TestResult {
    let kit = Kit::new("cluster_etcd_full").await?;
    let cluster = kit.founded_cluster(3, 1).await?;
    let holder = LeaseHolder::start(&kit, "shepherd", LEASE_KIND, &cluster.to_string()).await?;
    let mut since = None;
    for (what, is_etcd_full, authority_replacements, full, used_up) in [
        ("curators never answered", None, None, false, false),
        ("it has room", Some(false), Some(1_999), false, false),
        ("it is full", Some(true), Some(2_000), true, true),
        ("it is full for longer", Some(true), Some(2_000), true, true),
        ("no curator answers", None, None, true, true),
        ("it has room again", Some(false), Some(0), false, false),
    ] {
        let look =
            ClusterObservation { is_etcd_full, authority_replacements, ..ClusterObservation::default() };
        holder.shepherd.bmdb.record_cluster_observation(&holder.lease, cluster, &look).await?;
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let found = |id: &str| issues.iter().any(|issue| issue.id == id && issue.subject == "cluster ams");
        assert_eq!(found("cluster-etcd-full"), full, "{what}: {issues:?}");
        assert_eq!(found("authority-replacements"), used_up, "{what}: {issues:?}");
        let (stored, _) = kit.bmdb.read_cluster("ams").await?.context("a cluster")?;
        let full_since = stored.cluster.etcd_full_since;
        assert_eq!(full_since.is_some(), full, "{what}");
        assert!(since.is_none() || full_since.is_none() || since == full_since, "{what}: it begins once");
        since = full_since;
    }
    Ok(())
}

#[tokio::test]
async fn snapshots_without_kubernetes_objects_are_an_issue_until_one_has_an_image() -> TestResult {
    let kit = Kit::new("cluster_image_old").await?;
    kit.founded_cluster(3, 1).await?;
    let reported = async || -> anyhow::Result<bool> {
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        Ok(issues.iter().any(|issue| issue.id == "cluster-image-old"))
    };
    let kubernetes = "INSERT INTO cluster_kubernetes
         SELECT cluster_id, decode(repeat('1a', 32), 'hex'), '1.30.1', '10.96.0.0/16', '10.128.0.0/12', 24,
             'cluster.local', '{}', NULL, clock_timestamp() - INTERVAL '1 day', 'kim', NULL, '[]', NULL FROM cluster";
    let image = |ended: &str| {
        format!(
            "INSERT INTO cluster_image
             SELECT gen_random_uuid(), cluster_id, snapshot_id, clock_timestamp(), FALSE, {ended}, 1, 9,
                 decode(repeat('ef', 32), 'hex'), 7, '3.6.1' FROM cluster_snapshot"
        )
    };
    for (what, statement, expected) in [
        (
            "it is old",
            "UPDATE cluster SET founded_at = clock_timestamp() - INTERVAL '1 day'".to_owned(),
            false,
        ),
        (
            "it has a snapshot",
            "INSERT INTO cluster_snapshot
             SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 10, 5, 3, '[]',
                 decode(repeat('cd', 32), 'hex') FROM cluster"
                .to_owned(),
            false,
        ),
        ("it has Kubernetes", kubernetes.to_owned(), true),
        ("its image is not complete", image("NULL"), true),
        ("its image is complete", image("clock_timestamp()"), false),
    ] {
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&kit.pool).await?;
        assert_eq!(reported().await?, expected, "{what}");
    }
    Ok(())
}
