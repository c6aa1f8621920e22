//! An order to restore a cluster with Kubernetes, by `shepherdctl` and by JSON: what is lost is listed before it is.

use anyhow::Context as _;
use serde_json::json;
use shepherd::model::access::AccessRole;

use crate::api::command_line::Operator;
use crate::api::{Api, order};
use crate::harness::aloud::TestResult;

const WORDS: &str = "the Kubernetes objects of ams are lost";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_of_a_cluster_with_kubernetes_is_confirmed_first() -> TestResult {
    let api = Api::start("api_restore").await?;
    for statement in [
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
         VALUES (gen_random_uuid(), 'ams', 3, 1, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp(), 'ca', '[]')",
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp() - INTERVAL '1 hour', 'interval', 7, 0, 12345, 5, 3, '[]',
                decode(repeat('cd', 32), 'hex') FROM cluster",
        "INSERT INTO cluster_kubernetes
         SELECT cluster_id, decode(repeat('1a', 32), 'hex'), '1.30.1', '10.96.0.0/16', '10.128.0.0/12', 24,
                'cluster.local', '{}', NULL, clock_timestamp(), 'kim', NULL, '[]', NULL FROM cluster",
    ] {
        sqlx::query(statement).execute(&api.pool).await?;
    }
    let kim = Operator { api: &api, home: tempfile::tempdir()? };
    let restore = |more: &[&str]| {
        let order = ["cluster", "restore", "ams", "--bypass-quorum", "--reason", "two of three burnt"];
        kim.direct(&[&order[..], more].concat())
    };
    let restoring = "SELECT count(*) FROM cluster WHERE restoring_from IS NOT NULL";
    for more in [&[][..], &["--dry-run"], &["--confirm", "yes"]] {
        let refused = restore(more).err().context("it is restored without a confirmation")?.to_string();
        for lost in ["every pod", "Secrets", "custom resources", "was taken, 1h", WORDS] {
            assert!(refused.contains(lost), "{lost}: {refused}");
        }
        assert_eq!(api.count(restoring).await?, 0, "{more:?}");
    }
    let admin = api.key(AccessRole::Admin, &[], None).await?;
    let body = json!({ "name": "ams", "bypassQuorum": true, "order": order("two of three burnt", "k") });
    let refused = api.call(Some(&admin.token), "Clusters/Restore", body).await?;
    assert_eq!((refused.code, &refused.json["error"]["status"]), (400, &json!("FAILED_PRECONDITION")));
    assert!(refused.message().contains(WORDS), "{refused:?}");
    assert_eq!(api.count(restoring).await?, 0);

    let restored = restore(&["--confirm", WORDS, "--yes"])?;
    assert!(restored.starts_with("the cluster ams is restored from its snapshot of "), "{restored}");
    assert!(restored.contains("every Kubernetes object"), "{restored}");
    assert_eq!(api.count(restoring).await?, 1);
    Ok(api.stop().await?)
}
