//! A snapshot of a cluster, with the key of its authority, is sent only to the machine that has to restore exactly that
//! snapshot. The same is true of its image of etcd, which is opened part by part.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use secrecy::SecretSlice;
use shepherd::bmdb::cluster::sealed_image::{PART_BYTES, PartPlace, seal_part};
use shepherd::bmdb::cluster::sealed_snapshot::seal_snapshot;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::orders::order::request_digest;
use shepherd::model::role_declaration::Sha256;
use shepherd::roleserver::server_pool::{FetchError, ServerEndpoint, ServerEndpoints, ServerPool};
use sqlx::PgPool;
use uuid::Uuid;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{Listener, TestAgent, settings, untold};
use crate::harness::postgres::TestDatabase;

/// The shepherd of a machine.
fn shepherds(listener: &Listener, agent: &TestAgent) -> Result<ServerPool> {
    let way = ServerEndpoint {
        endpoint: listener.server.local_addr.to_string(),
        ca_certificates: listener.server.current_ca_certificates(),
    };
    let shepherds = ServerPool::default();
    shepherds.set_endpoints(ServerEndpoints {
        machine_id: agent.machine,
        identity: agent.identity.clone(),
        time: untold()?,
        endpoints: vec![way],
    });
    Ok(shepherds)
}

/// A cluster that one machine restores from a snapshot, with another machine of its control plane.
async fn restored_by(pool: &PgPool, restorer: &TestAgent, other: &TestAgent, sealed: &[u8]) -> Result<()> {
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled, restoring_since, restoring_by)
         VALUES (gen_random_uuid(), 'ams', 3, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp() - INTERVAL '1 hour', 'kim')",
    )
    .execute(pool)
    .await?;
    sqlx::query(
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 10, 5, 3, '[]', $1 FROM cluster",
    )
    .bind(request_digest(SNAPSHOT).as_slice())
    .execute(pool)
    .await?;
    for (number, chunk) in sealed.chunks(100).enumerate() {
        sqlx::query("INSERT INTO cluster_snapshot_chunk SELECT snapshot_id, $1, $2 FROM cluster_snapshot")
            .bind(i64::try_from(number)?)
            .bind(chunk)
            .execute(pool)
            .await?;
    }
    sqlx::query("UPDATE cluster SET restoring_from = (SELECT snapshot_id FROM cluster_snapshot)")
        .execute(pool)
        .await?;
    for (machine, what) in [(restorer, "found"), (other, "join")] {
        for statement in [
            "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
             SELECT $1, cluster_id, 'control-plane', clock_timestamp() FROM cluster WHERE $2 <> ''",
            "INSERT INTO cluster_order (machine_id, generation, what, sealed, ordered_at)
             VALUES ($1, 1, $2, 'sealed', clock_timestamp())",
        ] {
            sqlx::query(statement).bind(machine.machine.0).bind(what).execute(pool).await?;
        }
    }
    Ok(())
}

const SNAPSHOT: &[u8] = &[7; 600_000];

async fn fetch_snapshot(shepherds: &ServerPool, directory: &Path) -> Result<Vec<u8>, FetchError> {
    let path = directory.join(uuid::Uuid::new_v4().to_string());
    shepherds.fetch_artefact(Sha256(request_digest(SNAPSHOT)), &path).await?;
    std::fs::read(path).map_err(|error| FetchError::Failed(error.to_string()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_goes_to_the_machine_that_restores_it_for_as_long_as_it_is_ordered_to_and_to_no_other()
-> TestResult {
    let database = TestDatabase::create("snapshot_fetch").await?;
    let directory = tempfile::tempdir()?;
    let secrets = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let sealed = seal_snapshot(&secrets, &SecretSlice::from(SNAPSHOT.to_vec()))?;
    let settings = shepherd::server::callback::callback_server::CallbackSettings {
        secrets: Some(secrets),
        ..settings(directory.path())?
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let restorer = TestAgent::new(&pool, &listener.bmdb).await?;
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    let stranger = TestAgent::new(&pool, &listener.bmdb).await?;
    restored_by(&pool, &restorer, &other, &sealed).await?;

    let ways = shepherds(&listener, &restorer)?;
    for _ in 0..2 {
        assert!(fetch_snapshot(&ways, directory.path()).await? == SNAPSHOT, "it is another file");
        // The shepherd has unsealed it now, and still sends it to no other machine.
        for (agent, who) in [(&other, "another machine of the cluster"), (&stranger, "any machine")] {
            let answer = fetch_snapshot(&shepherds(&listener, agent)?, directory.path()).await;
            assert_eq!(answer.err(), Some(FetchError::Absent), "{who} was given the snapshot");
        }
    }
    for (statement, undo) in [
        ("UPDATE cluster_order SET sealed = NULL", "UPDATE cluster_order SET sealed = 'sealed'"),
        ("UPDATE machine_cluster SET leaving = 'it is lost'", "UPDATE machine_cluster SET leaving = NULL"),
        (
            "UPDATE cluster_order SET ordered_at = ordered_at - INTERVAL '2 hours'",
            "UPDATE cluster_order SET ordered_at = clock_timestamp()",
        ),
        ("UPDATE cluster SET restoring_since = NULL, restoring_from = NULL", ""),
    ] {
        sqlx::query(statement).execute(&pool).await?;
        let answer = fetch_snapshot(&ways, directory.path()).await;
        assert_eq!(answer.err(), Some(FetchError::Absent), "after {statement}");
        if !undo.is_empty() {
            sqlx::query(undo).execute(&pool).await?;
            assert!(fetch_snapshot(&ways, directory.path()).await? == SNAPSHOT, "after {undo}");
        }
    }
    Ok(listener.stop().await?)
}

/// Stores an image of the only snapshot, of three parts, which its cluster is restored with.
async fn add_image(pool: &PgPool, secrets: &SecretsKey, image: &[u8]) -> Result<()> {
    let (cluster, snapshot): (Uuid, Uuid) =
        sqlx::query_as("SELECT cluster_id, snapshot_id FROM cluster_snapshot").fetch_one(pool).await?;
    let id = Uuid::new_v4();
    sqlx::query(
        "INSERT INTO cluster_image (image_id, cluster_id, snapshot_id, begun_at, completed_at, parts, bytes, digest,
             revision, etcd_version)
         VALUES ($1, $2, $3, clock_timestamp(), clock_timestamp(), 3, $4, $5, 7, '3.6.1')",
    )
    .bind(id)
    .bind(cluster)
    .bind(snapshot)
    .bind(i64::try_from(image.len())?)
    .bind(request_digest(image).as_slice())
    .execute(pool)
    .await?;
    for (number, part) in (0..).zip(image.chunks(PART_BYTES)) {
        let last_of = Some(3).filter(|_| number == 2);
        let place = PartPlace { cluster, snapshot, image: id, number, last_of };
        sqlx::query("INSERT INTO cluster_image_part VALUES ($1, $2, $3)")
            .bind(id)
            .bind(i64::try_from(number)?)
            .bind(seal_part(secrets, &place, part)?)
            .execute(pool)
            .await?;
    }
    sqlx::query("UPDATE cluster SET restoring_with_image = TRUE").execute(pool).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_of_etcd_goes_to_the_machine_that_restores_it_in_its_right_parts_alone() -> TestResult {
    let database = TestDatabase::create("image_fetch").await?;
    let directory = tempfile::tempdir()?;
    let secrets = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let sealed = seal_snapshot(&secrets, &SecretSlice::from(SNAPSHOT.to_vec()))?;
    let settings = shepherd::server::callback::callback_server::CallbackSettings {
        secrets: Some(secrets.clone()),
        ..settings(directory.path())?
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let restorer = TestAgent::new(&pool, &listener.bmdb).await?;
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    restored_by(&pool, &restorer, &other, &sealed).await?;
    let image: Vec<u8> = (0_u8..=250).cycle().take(2 * PART_BYTES + 5).collect();
    add_image(&pool, &secrets, &image).await?;

    let digest = Sha256(request_digest(&image));
    let path = directory.path().join("image");
    let ways = shepherds(&listener, &restorer)?;
    ways.fetch_artefact(digest, &path).await?;
    assert!(std::fs::read(&path)? == image, "it is another image");
    std::fs::remove_file(&path)?;
    let given = shepherds(&listener, &other)?.fetch_artefact(digest, &path).await;
    assert_eq!(given.err(), Some(FetchError::Absent), "another machine of the cluster was given the image");
    // The shepherd has the last part open, and reads the others again.
    let swap = "UPDATE cluster_image_part SET number = 10 WHERE number = 0;
         UPDATE cluster_image_part SET number = 0 WHERE number = 1;
         UPDATE cluster_image_part SET number = 1 WHERE number = 10";
    let lose = "DELETE FROM cluster_image_part WHERE number = 1";
    for (what, statement, undo) in [("swapped", swap, swap), ("lost", lose, "")] {
        sqlx::raw_sql(statement).execute(&pool).await?;
        let _ = std::fs::remove_file(&path);
        let fetched = ways.fetch_artefact(digest, &path).await;
        assert!(matches!(fetched, Err(FetchError::Failed(_))), "{what} parts were sent: {fetched:?}");
        if !undo.is_empty() {
            sqlx::raw_sql(undo).execute(&pool).await?;
        }
    }
    sqlx::query("UPDATE cluster SET restoring_with_image = FALSE").execute(&pool).await?;
    let given = ways.fetch_artefact(digest, &path).await;
    assert_eq!(given.err(), Some(FetchError::Absent), "its objects are not to be restored");
    Ok(listener.stop().await?)
}
