//! The session under which a shepherd works on a cluster. The cluster has no machines, so it is never founded.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use shepherd::bmdb::engine::session::Sessions;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::cluster::{ClusterSettings, run_clusters};
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::model::ids::ProcessId;
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, ended, until};
use crate::harness::aloud::TestResult;

/// Whether the first session is closed, and whether a pass was made long after it had ended for its process.
const FIRST_SESSION: &str = "SELECT s.closed_at IS NOT NULL,
           COALESCE(c.polled_at > s.started_at + INTERVAL '25 seconds', FALSE)
     FROM session s, cluster c WHERE s.component = 'cluster' ORDER BY s.started_at LIMIT 1";

/// A frozen process wakes when its session is over here, before the thread that renews sessions has seen it. Nothing renews
/// this one, and its session has not ended in the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_pass_over_a_cluster_is_made_once_its_session_is_over() -> TestResult {
    let kit = Kit::new("cluster_sessions").await?;
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled)
         VALUES (gen_random_uuid(), 'ams', 1, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE)",
    )
    .execute(&kit.pool)
    .await?;
    let directory = tempfile::tempdir()?;
    let settings = ClusterSettings {
        secrets: Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?),
        metrics: ManagerMetrics::register(&Metrics::new()),
        connection_providers: Arc::new(BTreeSet::new()),
    };
    let (sessions, renewer) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), Duration::from_secs(3));
    drop(renewer);
    let stop = CancellationToken::new();
    let working = tokio::spawn(run_clusters(sessions, settings, stop.clone()));
    until("a pass is made", async || {
        Ok(kit.count("SELECT count(*) FROM cluster WHERE polled_at IS NOT NULL").await? == 1)
    })
    .await?;
    // As by a renewal of which this process got no answer.
    sqlx::query(
        "UPDATE session SET deadline = clock_timestamp() + INTERVAL '1 hour' WHERE component = 'cluster'",
    )
    .execute(&kit.pool)
    .await?;
    until("the session is closed", async || {
        let found: Option<(bool, bool)> = sqlx::query_as(FIRST_SESSION).fetch_optional(&kit.pool).await?;
        let (is_closed, is_late) = found.unwrap_or_default();
        ensure!(is_closed || !is_late, "a pass was made after the session was over");
        Ok(is_closed)
    })
    .await?;
    stop.cancel();
    ended("the work on clusters", working).await?;
    let open = "SELECT count(*) FROM session WHERE component = 'cluster' AND closed_at IS NULL";
    assert_eq!(kit.count(open).await?, 0);
    Ok(())
}
