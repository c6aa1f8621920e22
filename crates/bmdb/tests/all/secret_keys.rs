//! The keys of a cluster's Kubernetes Secrets: stored once and sealed, orders to replace them, and their end.

use anyhow::{Context as _, Result, bail};
use model::cluster::secret_keys::{SecretKeys, SecretsReport, SecretsStep};
use model::cluster::state::MembershipOrder;
use model::time::Timestamp;
use secrecy::{ExposeSecret as _, SecretSlice};
use shepherd_bmdb::cluster::secret_keys::{secret_key_name, secret_keys_prefix};
use shepherd_bmdb::cluster::transitions::LEASE_KIND;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::named_lease::NamedLease;
use shepherd_bmdb::engine::session::Session;
use shepherd_bmdb::fleet::secret::SecretsKey;
use shepherd_bmdb::orders::order::{Actor, Order, request_digest};
use uuid::Uuid;

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, Shepherd};

/// A key, as it would be in a file that leaks.
const KEY: [u8; 32] = *b"thirty-two bytes of a secret key";

async fn lease_of(shepherd: &Shepherd, cluster: Uuid) -> Result<(Session, NamedLease)> {
    let session = shepherd.session().await?;
    let lease = shepherd.bmdb.acquire_named_lease(&session, LEASE_KIND, &cluster.to_string()).await?;
    Ok((session, lease.context("free")?))
}

async fn stored(kit: &Kit) -> Result<Option<SecretKeys>> {
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    Ok(found.cluster.secret_keys)
}

/// The clock of the database.
async fn now(kit: &Kit) -> Result<Timestamp> {
    Ok(kit.bmdb.read_cluster("ams").await?.context("no cluster")?.1)
}

async fn names(kit: &Kit) -> Result<Vec<String>> {
    Ok(sqlx::query_scalar("SELECT name FROM sealed_secret WHERE name LIKE '%secret-keys%' ORDER BY name")
        .fetch_all(&kit.pool)
        .await?)
}

/// The message of the order; if it is rejected, the reason for programs.
async fn rotate(kit: &Kit) -> Result<Result<String, &'static str>> {
    let order = Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: "shepherd.fleet.v1.Clusters/RotateSecretsKey".to_owned(),
        target: "the cluster ams".to_owned(),
        reason: "a disk left".to_owned(),
        idempotency_key: None,
        dry_run: false,
        expected_version: None,
        request_digest: request_digest(b"rotate"),
    };
    match kit.bmdb.rotate_secrets_key(order, "ams".to_owned()).await {
        Ok(carried) => Ok(Ok(carried.outcome.message)),
        Err(BmdbError::OrderRejected { reason, .. }) => Ok(Err(reason)),
        Err(other) => bail!(other),
    }
}

#[tokio::test]
async fn step_is_stored_once_and_its_key_is_sealed_with_it() -> TestResult {
    use SecretsStep::{Drop, Forget, Generate, Rewrite, Write};
    let kit = Kit::new("secret_keys").await?;
    let cluster = kit.founded_cluster(1, 0).await?;
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let (_session, lease) = lease_of(&shepherd, cluster).await?;
    let bmdb = &shepherd.bmdb;
    let directory = tempfile::tempdir()?;
    let opener = SecretsKey::open(&directory.path().join("secrets.key"))?;
    let sealed = || opener.seal("a key", &SecretSlice::from(KEY.to_vec()));

    assert_eq!(stored(&kit).await?, None, "it is of a release before");
    assert_eq!(rotate(&kit).await?, Err("NO_SECRETS_KEY"));
    let at = now(&kit).await?;
    let new = SecretKeys::new(at);
    assert!(bmdb.store_secret_keys(&lease, cluster, (None, &new), None).await?);
    assert_eq!(stored(&kit).await?.as_ref(), Some(&new), "it is read as it was stored");
    let first = new.advance(Generate, "aa", None, at);
    assert!(bmdb.store_secret_keys(&lease, cluster, (Some(&new), &first), Some(sealed()?)).await?);
    // A shepherd that was away for too long makes another one.
    let late = new.advance(Generate, "bb", None, at);
    assert!(!bmdb.store_secret_keys(&lease, cluster, (Some(&new), &late), Some(sealed()?)).await?);
    let name = secret_key_name(cluster, "key1-aa");
    assert_eq!(names(&kit).await?, std::slice::from_ref(&name));
    let opened = opener.get(bmdb, &name).await?.context("no key")?;
    assert_eq!(opened.expose_secret(), KEY);
    let rows: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT sealed FROM sealed_secret UNION ALL SELECT convert_to(secret_keys::TEXT, 'UTF8') FROM cluster",
    )
    .fetch_all(&kit.pool)
    .await?;
    assert!(!rows.iter().any(|row| row.windows(32).any(|part| part == KEY)), "a key is not sealed");

    assert!(rotate(&kit).await?.is_ok_and(|text| text.starts_with("replaces the key")));
    assert!(rotate(&kit).await?.is_ok_and(|text| text.contains("as kim ordered; nothing was changed")));
    // The order came while a shepherd took a step: the step is planned again.
    let second = first.advance(Generate, "cc", None, at);
    assert!(!bmdb.store_secret_keys(&lease, cluster, (Some(&first), &second), Some(sealed()?)).await?);
    let ordered = stored(&kit).await?.context("no keys")?;
    let mut state = ordered.advance(Generate, "cc", None, now(&kit).await?);
    assert!(bmdb.store_secret_keys(&lease, cluster, (Some(&ordered), &state), Some(sealed()?)).await?);
    for step in [Write, Rewrite, Drop] {
        let next = state.advance(step, "", None, now(&kit).await?);
        assert!(bmdb.store_secret_keys(&lease, cluster, (Some(&state), &next), None).await?, "{step}");
        state = next;
    }
    assert_eq!(state.rotation, None);
    assert_eq!(names(&kit).await?.len(), 2, "a snapshot may need the former key");
    let next = state.advance(Forget(1), "", None, now(&kit).await?);
    assert!(bmdb.store_secret_keys(&lease, cluster, (Some(&state), &next), None).await?);
    assert_eq!(names(&kit).await?, [secret_key_name(cluster, "key2-cc")]);

    // All of them end with their cluster.
    sqlx::query("UPDATE cluster SET deleting_at = clock_timestamp(), deleting_by = 'kim'")
        .execute(&kit.pool)
        .await?;
    bmdb.purge_cluster(&lease, cluster, &[secret_keys_prefix(cluster)]).await?;
    assert_eq!(names(&kit).await?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn order_with_keys_is_one_to_join_and_a_report_is_read_as_it_was_stored() -> TestResult {
    let kit = Kit::new("secret_keys_order").await?;
    let cluster = kit.founded_cluster(1, 0).await?;
    let machine = kit.control_plane(1).await?[0];
    let shepherd = Shepherd::start(&kit, "shepherd", LONG).await?;
    let (_session, lease) = lease_of(&shepherd, cluster).await?;
    shepherd.bmdb.send_secret_keys(&lease, machine, ("ams", "key1-aa"), b"sealed".to_vec()).await?;
    let report = SecretsReport {
        ordered: "key1-aa identity".to_owned(),
        rewrite: true,
        running: "key1-aa identity".to_owned(),
        rewritten: "key1-aa".to_owned(),
    };
    sqlx::query(
        "INSERT INTO machine_cluster_report (machine_id, generation, epoch, reported_at, secrets)
         VALUES ($1, 1, 0, clock_timestamp(), $2)
         ON CONFLICT (machine_id) DO UPDATE SET secrets = excluded.secrets",
    )
    .bind(machine.0)
    .bind(serde_json::to_value(&report)?)
    .execute(&kit.pool)
    .await?;
    let (found, _) = kit.bmdb.read_cluster("ams").await?.context("no cluster")?;
    let member = &found.machines[0].member;
    assert_eq!(member.last_order.map(|order| order.order), Some(MembershipOrder::Join));
    assert_eq!(member.report.as_ref().and_then(|report| report.secrets.as_ref()), Some(&report));
    let events: Vec<String> =
        sqlx::query_scalar("SELECT detail FROM history WHERE event = 'ClusterSecretKeysSent'")
            .fetch_all(&kit.pool)
            .await?;
    assert_eq!(events, ["those of Kubernetes Secrets of cluster ams: key1-aa"]);
    Ok(())
}
