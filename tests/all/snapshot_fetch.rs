//! A snapshot of a cluster, with the key of its authority, is sent only to the machine that has to restore exactly that
//! snapshot, by its sealed order. The same is true of its image of etcd, which is opened part by part.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use prost::Message as _;
use secrecy::SecretSlice;
use shepherd::bmdb::cluster::sealed_image::{PART_BYTES, PartPlace, seal_part};
use shepherd::bmdb::cluster::sealed_snapshot::seal_snapshot;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::bmdb::orders::order::request_digest;
use shepherd::model::role_declaration::Sha256;
use shepherd::proto::agent::v1::cluster_order::Operation;
use shepherd::proto::agent::v1::{ClusterOrder, EtcdImage, FoundCluster};
use shepherd::proto::curator::v1::{Snapshot, SnapshotRecord};
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

/// The cluster that is restored.
const CLUSTER: Uuid = Uuid::from_u128(0xa5);
const OTHER_CLUSTER: Uuid = Uuid::from_u128(0xf4);

/// A snapshot of this cluster, of several pieces.
fn snapshot_of(cluster: Uuid) -> Vec<u8> {
    let record = SnapshotRecord { key: "nodes/1".to_owned(), value: vec![7; 600_000] };
    Snapshot { cluster_id: cluster.to_string(), records: vec![record], ..Default::default() }.encode_to_vec()
}

/// The sealed order for a machine to restore the cluster from this snapshot, and with this image.
fn seal_order(
    secrets: &SecretsKey,
    agent: &TestAgent,
    snapshot: &[u8],
    image: Option<&[u8]>,
) -> Result<Vec<u8>> {
    let found = FoundCluster {
        cluster_id: CLUSTER.to_string(),
        snapshot_sha256: request_digest(snapshot).to_vec(),
        image: image.map(|image| EtcdImage { sha256: request_digest(image).to_vec(), ..Default::default() }),
        ..Default::default()
    };
    let order = ClusterOrder {
        operation: Some(Operation::Found(found)),
        machine_id: agent.machine.to_string(),
        ..Default::default()
    };
    Ok(secrets.seal("an order", &SecretSlice::from(order.encode_to_vec()))?)
}

/// A cluster that one machine restores from a snapshot by its sealed order, with another machine of its control plane.
async fn restored_by(
    pool: &PgPool,
    secrets: &SecretsKey,
    (restorer, order): (&TestAgent, Vec<u8>),
    other: &TestAgent,
) -> Result<()> {
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled, restoring_since, restoring_by)
         VALUES ($1, 'ams', 3, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp() - INTERVAL '1 hour', 'kim')",
    )
    .bind(CLUSTER)
    .execute(pool)
    .await?;
    let sealed = seal_snapshot(secrets, &SecretSlice::from(snapshot_of(CLUSTER)))?;
    sqlx::query(
        "INSERT INTO cluster_snapshot
         SELECT gen_random_uuid(), cluster_id, clock_timestamp(), 'first', 7, 0, 10, 5, 3, '[]', $1 FROM cluster",
    )
    .bind(request_digest(&snapshot_of(CLUSTER)).as_slice())
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
    for (agent, what, order) in [(restorer, "found", order), (other, "join", b"sealed".to_vec())] {
        sqlx::query(
            "INSERT INTO machine_cluster (machine_id, cluster_id, part, chosen_at)
             VALUES ($1, $2, 'control-plane', clock_timestamp())",
        )
        .bind(agent.machine.0)
        .bind(CLUSTER)
        .execute(pool)
        .await?;
        sqlx::query(
            "INSERT INTO cluster_order (machine_id, generation, what, sealed, ordered_at)
             VALUES ($1, 1, $2, $3, clock_timestamp())",
        )
        .bind(agent.machine.0)
        .bind(what)
        .bind(order)
        .execute(pool)
        .await?;
    }
    sqlx::query("CREATE TABLE order_of_before AS SELECT * FROM cluster_order").execute(pool).await?;
    Ok(())
}

/// Puts the orders back that were changed.
const ORDERS_OF_BEFORE: &str =
    "UPDATE cluster_order o SET what = b.what, sealed = b.sealed, ordered_at = b.ordered_at
     FROM order_of_before b WHERE b.machine_id = o.machine_id";

async fn fetch_snapshot(shepherds: &ServerPool, directory: &Path) -> Result<Vec<u8>, FetchError> {
    fetch_file(shepherds, directory, request_digest(&snapshot_of(CLUSTER))).await
}

async fn fetch_file(
    shepherds: &ServerPool,
    directory: &Path,
    digest: [u8; 32],
) -> Result<Vec<u8>, FetchError> {
    let path = directory.join(uuid::Uuid::new_v4().to_string());
    shepherds.fetch_artefact(Sha256(digest), &path).await?;
    std::fs::read(path).map_err(|error| FetchError::Failed(error.to_string()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_goes_to_the_machine_that_restores_it_for_as_long_as_it_is_ordered_to_and_to_no_other()
-> TestResult {
    let database = TestDatabase::create("snapshot_fetch").await?;
    let directory = tempfile::tempdir()?;
    let secrets = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let settings = shepherd::server::callback::callback_server::CallbackSettings {
        secrets: Some(secrets.clone()),
        ..settings(directory.path())?
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let restorer = TestAgent::new(&pool, &listener.bmdb).await?;
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    let stranger = TestAgent::new(&pool, &listener.bmdb).await?;
    let snapshot = snapshot_of(CLUSTER);
    let order = seal_order(&secrets, &restorer, &snapshot, None)?;
    restored_by(&pool, &secrets, (&restorer, order), &other).await?;

    let ways = shepherds(&listener, &restorer)?;
    for _ in 0..2 {
        assert!(fetch_snapshot(&ways, directory.path()).await? == snapshot, "it is another file");
        // The shepherd has unsealed it now, and still sends it to no other machine.
        for (agent, who) in [(&other, "another machine of the cluster"), (&stranger, "any machine")] {
            let answer = fetch_snapshot(&shepherds(&listener, agent)?, directory.path()).await;
            assert_eq!(answer.err(), Some(FetchError::Absent), "{who} was given the snapshot");
        }
    }
    for (statement, undo) in [
        ("UPDATE cluster_order SET sealed = NULL", ORDERS_OF_BEFORE),
        ("UPDATE machine_cluster SET leaving = 'it is lost'", "UPDATE machine_cluster SET leaving = NULL"),
        ("UPDATE cluster_order SET ordered_at = ordered_at - INTERVAL '2 hours'", ORDERS_OF_BEFORE),
        ("UPDATE cluster SET restoring_since = NULL, restoring_from = NULL", ""),
    ] {
        sqlx::query(statement).execute(&pool).await?;
        let answer = fetch_snapshot(&ways, directory.path()).await;
        assert_eq!(answer.err(), Some(FetchError::Absent), "after {statement}");
        if !undo.is_empty() {
            sqlx::query(undo).execute(&pool).await?;
            assert!(fetch_snapshot(&ways, directory.path()).await? == snapshot, "after {undo}");
        }
    }
    Ok(listener.stop().await?)
}

/// Whether a fetch failed, with a reason that contains this text.
fn is_refused(fetched: &Result<usize, FetchError>, expected: &str) -> bool {
    matches!(fetched, Err(FetchError::Failed(text)) if text.contains(expected))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn columns_of_the_database_lead_no_machine_to_the_snapshot_of_another_cluster() -> TestResult {
    let database = TestDatabase::create("snapshot_columns").await?;
    let directory = tempfile::tempdir()?;
    let secrets = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let settings = shepherd::server::callback::callback_server::CallbackSettings {
        secrets: Some(secrets.clone()),
        ..settings(directory.path())?
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let restorer = TestAgent::new(&pool, &listener.bmdb).await?;
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    let order = seal_order(&secrets, &restorer, &snapshot_of(CLUSTER), None)?;
    restored_by(&pool, &secrets, (&restorer, order), &other).await?;
    let ways = shepherds(&listener, &restorer)?;

    // The sealed order of one machine is given to another one.
    sqlx::query(
        "UPDATE cluster_order SET what = 'found', sealed = (SELECT sealed FROM order_of_before WHERE what = 'found')
         WHERE machine_id = $1",
    )
    .bind(other.machine.0)
    .execute(&pool)
    .await?;
    let fetched = fetch_snapshot(&shepherds(&listener, &other)?, directory.path()).await;
    let fetched = fetched.map(|file| file.len());
    assert!(is_refused(&fetched, "was sealed for the machine"), "a copied order: {fetched:?}");
    sqlx::query(ORDERS_OF_BEFORE).execute(&pool).await?;

    // The snapshot of another cluster is written into the rows of the cluster that is restored.
    let foreign = snapshot_of(OTHER_CLUSTER);
    let sealed = seal_snapshot(&secrets, &SecretSlice::from(foreign.clone()))?;
    sqlx::query("DELETE FROM cluster_snapshot_chunk").execute(&pool).await?;
    sqlx::query("INSERT INTO cluster_snapshot_chunk SELECT snapshot_id, 0, $1 FROM cluster_snapshot")
        .bind(sealed)
        .execute(&pool)
        .await?;
    sqlx::query("UPDATE cluster_snapshot SET digest = $1")
        .bind(request_digest(&foreign).as_slice())
        .execute(&pool)
        .await?;
    let fetched = fetch_file(&ways, directory.path(), request_digest(&foreign)).await;
    let fetched = fetched.map(|file| file.len());
    assert!(is_refused(&fetched, "names another file"), "a foreign snapshot: {fetched:?}");

    // A shepherd was led to order it.
    sqlx::query("UPDATE cluster_order SET sealed = $2 WHERE machine_id = $1")
        .bind(restorer.machine.0)
        .bind(seal_order(&secrets, &restorer, &foreign, None)?)
        .execute(&pool)
        .await?;
    let fetched = fetch_file(&ways, directory.path(), request_digest(&foreign)).await;
    let fetched = fetched.map(|file| file.len());
    assert!(is_refused(&fetched, "is of the cluster"), "an order: {fetched:?}");
    Ok(listener.stop().await?)
}

/// Stores an image of the only snapshot, of three parts, which its cluster is restored with. Returns the place of the second
/// part.
async fn add_image(pool: &PgPool, secrets: &SecretsKey, image: &[u8]) -> Result<PartPlace> {
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
    Ok(PartPlace { cluster, snapshot, image: id, number: 1, last_of: None })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn image_of_etcd_goes_to_the_machine_that_restores_it_in_its_right_parts_alone() -> TestResult {
    let database = TestDatabase::create("image_fetch").await?;
    let directory = tempfile::tempdir()?;
    let secrets = Arc::new(SecretsKey::open(&directory.path().join("secrets.key"))?);
    let settings = shepherd::server::callback::callback_server::CallbackSettings {
        secrets: Some(secrets.clone()),
        ..settings(directory.path())?
    };
    let listener = Listener::start(&database, settings).await?;
    let pool = database.pool().await?;
    let restorer = TestAgent::new(&pool, &listener.bmdb).await?;
    let other = TestAgent::new(&pool, &listener.bmdb).await?;
    let image: Vec<u8> = (0_u8..=250).cycle().take(2 * PART_BYTES + 5).collect();
    let order = seal_order(&secrets, &restorer, &snapshot_of(CLUSTER), Some(&image))?;
    restored_by(&pool, &secrets, (&restorer, order), &other).await?;
    let second = add_image(&pool, &secrets, &image).await?;

    let digest = Sha256(request_digest(&image));
    let path = directory.path().join("image");
    let ways = shepherds(&listener, &restorer)?;
    ways.fetch_artefact(digest, &path).await?;
    assert!(std::fs::read(&path)? == image, "it is another image");
    std::fs::remove_file(&path)?;
    let given = shepherds(&listener, &other)?.fetch_artefact(digest, &path).await;
    assert_eq!(given.err(), Some(FetchError::Absent), "another machine of the cluster was given the image");
    // The shepherd has the last part open, and reads the others again.
    let refused = async |what: &str, expected: &str| -> Result<()> {
        let _ = std::fs::remove_file(&path);
        let fetched = ways.fetch_artefact(digest, &path).await;
        let is_refused = match &fetched {
            Err(FetchError::Failed(text)) => text.contains(expected) && !text.contains('\n'),
            _ => false,
        };
        ensure!(is_refused, "{what} were sent: {fetched:?}");
        Ok(())
    };
    let swap = "UPDATE cluster_image_part SET number = 10 WHERE number = 0;
         UPDATE cluster_image_part SET number = 0 WHERE number = 1;
         UPDATE cluster_image_part SET number = 1 WHERE number = 10";
    sqlx::raw_sql(swap).execute(&pool).await?;
    refused("swapped parts", "the stored part is number 1; restore another snapshot").await?;
    sqlx::raw_sql(swap).execute(&pool).await?;
    let part = &image[PART_BYTES..2 * PART_BYTES];
    for (what, place) in [
        ("another cluster", PartPlace { cluster: OTHER_CLUSTER, ..second }),
        ("another snapshot", PartPlace { snapshot: Uuid::new_v4(), ..second }),
        ("another image", PartPlace { image: Uuid::new_v4(), ..second }),
    ] {
        sqlx::query("UPDATE cluster_image_part SET sealed = $1 WHERE number = 1")
            .bind(seal_part(&secrets, &place, part)?)
            .execute(&pool)
            .await?;
        refused(&format!("parts of {what}"), &format!("the stored part is of {what}")).await?;
    }
    sqlx::query("DELETE FROM cluster_image_part WHERE number = 1").execute(&pool).await?;
    refused("all but lost parts", "it is missing; restore another snapshot").await?;
    sqlx::query("UPDATE cluster SET restoring_with_image = FALSE").execute(&pool).await?;
    let given = ways.fetch_artefact(digest, &path).await;
    assert_eq!(given.err(), Some(FetchError::Absent), "its objects are not to be restored");
    Ok(listener.stop().await?)
}
