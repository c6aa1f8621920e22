//! What a pass observed of a cluster, and the issues that follow from it.

use std::collections::BTreeSet;

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
    // Curators of an earlier release report no size, and later ones no quota.
    for (etcd_bytes, etcd_quota_bytes, expected) in [
        (None, None, false),
        (Some(1 << 30), None, false),
        (Some(1_800_000_000), None, true),
        (None, None, true),
        (Some(90_000), None, false),
        (Some(14 << 20), Some(16 << 20), true),
        (Some(14 << 20), None, true),
        (Some(12 << 20), None, false),
        (Some(1_800_000_000), Some(8 << 30), false),
    ] {
        let look = ClusterObservation { etcd_bytes, etcd_quota_bytes, ..ClusterObservation::default() };
        holder.shepherd.bmdb.record_cluster_observation(&holder.lease, cluster, &look).await?;
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let found =
            issues.iter().any(|issue| issue.id == "cluster-etcd-large" && issue.subject == "cluster ams");
        assert_eq!(found, expected, "{etcd_bytes:?} of {etcd_quota_bytes:?}: {issues:?}");
    }
    Ok(())
}

#[tokio::test]
async fn cluster_that_is_not_founded_within_an_hour_is_an_issue_until_it_is_or_is_deleted() -> TestResult {
    let kit = Kit::new("cluster_not_founded").await?;
    kit.founded_cluster(3, 1).await?;
    for (what, change, expected) in [
        ("it is founded", "created_at = clock_timestamp() - INTERVAL '2 hours'", None),
        (
            "it is not",
            "founded_at = NULL, ca_certificate = NULL, curators = NULL",
            Some("it was created 2h00m ago, and no machine has founded it"),
        ),
        (
            "the cause is stored",
            "wait_reasons = '[\"no machine is free\"]'",
            Some("it was created 2h00m ago, and no machine has founded it: no machine is free"),
        ),
        ("it is young", "created_at = clock_timestamp() - INTERVAL '50 minutes'", None),
        (
            "it is deleted",
            "created_at = clock_timestamp() - INTERVAL '2 hours', deleting_at = clock_timestamp()",
            None,
        ),
    ] {
        let statement = sqlx::AssertSqlSafe(format!("UPDATE cluster SET {change}"));
        sqlx::query(statement).execute(&kit.pool).await?;
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let found = issues.iter().find(|issue| issue.id == "cluster-not-founded");
        assert_eq!(found.map(|issue| issue.message.as_str()), expected, "{what}: {issues:?}");
    }
    Ok(())
}

#[tokio::test]
async fn address_in_a_providers_list_is_that_of_the_node_unless_the_provider_is_left_out() -> TestResult {
    let kit = Kit::new("cluster_listed_address").await?;
    kit.founded_cluster(1, 0).await?;
    kit.control_plane(1).await?;
    for (text, expected) in [
        (Some("10.0.0.7"), Some("10.0.0.7")),
        (Some("m7.example"), None),
        (Some("127.0.0.1"), None),
        (None, None),
    ] {
        sqlx::query("UPDATE machine_provided SET address = $1").bind(text).execute(&kit.pool).await?;
        let (found, _) = kit.bmdb.read_cluster("ams").await?.context("a cluster")?;
        let expected: Option<std::net::IpAddr> = expected.map(str::parse).transpose()?;
        for (left_out, expected) in [("another", expected), ("rack", None)] {
            let found = found.clone().without_listed_addresses(&BTreeSet::from([left_out.to_owned()]));
            assert_eq!(found.machines[0].member.listed_address, expected, "{text:?} without {left_out}");
        }
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

/// The archive of a bundle in which only the manifest is real, with this containerd.
fn bundle_with(containerd: &str) -> anyhow::Result<Vec<u8>> {
    let directory = tempfile::tempdir()?;
    let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let manifest = format!(
        r#"{{"format": 1, "name": "test", "kubernetes": "1.36.2", "needs_roleserver": "0.1.0", "add_ons": [], "images": [],
            "files": [{{"component": "containerd", "path": "bin/containerd", "version": "{containerd}", "size": 3,
                       "mode": "0755", "sha256": "{digest}"}}]}}"#
    );
    std::fs::write(directory.path().join("manifest.json"), manifest)?;
    let mut command = std::process::Command::new("tar");
    command.args(["--format=ustar", "-cz", "-C"]).arg(directory.path()).arg("manifest.json");
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}

#[tokio::test]
async fn versions_of_etcd_and_of_bundles_are_issues_while_they_are_there() -> TestResult {
    let kit = Kit::new("cluster_versions").await?;
    kit.founded_cluster(2, 1).await?;
    let machines = kit.control_plane(2).await?;
    let reported = async || -> anyhow::Result<Vec<String>> {
        let issues = find_issues(&kit.bmdb.read_issue_inputs().await?);
        let issues = issues.into_iter().filter(|issue| issue.id == "version-fault");
        Ok(issues.map(|issue| format!("{}: {}", issue.subject, issue.message)).collect())
    };
    let names: Vec<String> = machines.iter().map(|machine| machine.0.to_string()).collect();
    for (machine, etcd, affected) in [
        (0, "3.7.3", None),
        (1, "3.6.8", Some(names[1].clone())),
        (0, "3.6.8", Some(names.join(", "))),
        (0, "3.6.14", Some(names[1].clone())),
        (1, "3.7.3", None),
    ] {
        sqlx::query(
            "INSERT INTO machine_cluster_report (machine_id, generation, epoch, reported_at, etcd_version)
             VALUES ($1, 0, 0, clock_timestamp(), $2)
             ON CONFLICT (machine_id) DO UPDATE SET etcd_version = $2",
        )
        .bind(machines[machine].0)
        .bind(etcd)
        .execute(&kit.pool)
        .await?;
        let found = reported().await?;
        assert_eq!(found.len(), usize::from(affected.is_some()), "{machine} {etcd}: {found:?}");
        let expected = format!("cluster ams: on {}: etcd 3.6.8 can answer", affected.unwrap_or_default());
        assert!(found.iter().all(|text| text.starts_with(&expected)), "{found:?}");
    }

    kit.request_kubernetes("1.36.2").await?;
    for (digest, containerd, expected) in
        [("1a", "1.7.32", Some("cluster ams: containerd 1.7.32 lets an image")), ("1b", "1.7.33", None)]
    {
        sqlx::query(
            "UPDATE machine_cluster SET kubernetes = jsonb_build_object('bundle', repeat($1, 32), 'version', '1.36.2',
                 'components', '[]'::JSONB, 'waits', '')",
        )
        .bind(digest)
        .execute(&kit.pool)
        .await?;
        assert_eq!(reported().await?, [""; 0], "the bundle {digest} is not stored");
        let bytes = bundle_with(containerd)?;
        sqlx::query(
            "INSERT INTO artefact (sha256, size, upload, begun_at, name, added_at, added_by)
             VALUES (decode(repeat($1, 32), 'hex'), $2, gen_random_uuid(), clock_timestamp(), $1, clock_timestamp(), 'kim')",
        )
        .bind(digest)
        .bind(i64::try_from(bytes.len())?)
        .execute(&kit.pool)
        .await?;
        sqlx::query("INSERT INTO artefact_chunk (sha256, number, bytes) VALUES (decode(repeat($1, 32), 'hex'), 0, $2)")
            .bind(digest)
            .bind(bytes)
            .execute(&kit.pool)
            .await?;
        let found = reported().await?;
        assert_eq!(found.len(), usize::from(expected.is_some()), "{containerd}: {found:?}");
        assert!(found.iter().all(|text| text.starts_with(expected.unwrap_or_default())), "{found:?}");
    }
    Ok(())
}
