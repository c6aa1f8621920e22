//! What a pass observed of a cluster, and the issues that follow from it.

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
