//! The shepherd's own key for a cluster: replaced by order and by schedule, through crashes, and after the cluster was
//! restored from an older snapshot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustls::sign::CertifiedKey;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::pki::TrustAnchor;
use shepherd::curator_client::tls::{certified_key, client_config};
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::credentials_client::CredentialsClient;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::clusters::{FLAGS, Field, settled};
use crate::harness::aloud::TestResult;
use crate::harness::curators::found_no_leader;
use crate::harness::fleet::{PATIENCE, endpoint};

/// Holder of a present or former key of the shepherd, with the certificate that was claimed with it.
struct Holder {
    key: Identity,
    certificate: Option<Vec<u8>>,
}

impl Holder {
    /// A holder of the key that is in force now.
    async fn of_now(field: &Field) -> Result<Self> {
        let sealed: Vec<u8> =
            sqlx::query_scalar("SELECT sealed FROM sealed_secret WHERE name LIKE 'cluster/%/owner'")
                .fetch_one(&field.fleet.pool)
                .await?;
        let secrets = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
        let plain = secrets.unseal("a key", &sealed)?;
        Ok(Self { key: Identity::from_pkcs8(plain.expose_secret())?, certificate: None })
    }

    async fn channel(&self, field: &Field, certificate: &[u8]) -> Result<Channel> {
        let own: Arc<CertifiedKey> = certified_key(certificate, self.key.pkcs8())?;
        let (ca, curators): (Vec<u8>, Value) = sqlx::query_as("SELECT ca_certificate, curators FROM cluster")
            .fetch_one(&field.fleet.pool)
            .await?;
        let curator = curators[0].as_str().context("a curator")?.to_owned();
        Ok(open_channel(&curator, client_config(TrustAnchor::parse(&ca)?, None, Some(own), Clock::system())?))
    }

    /// Claims a certificate, and stores it.
    async fn claim(&mut self, field: &Field) -> Result<Result<(), Status>> {
        let request = wire::ClaimOwnerRequest { lifetime_ms: 3_600_000 };
        let end = Instant::now() + PATIENCE;
        loop {
            let channel = self.channel(field, self.key.certificate_der()).await?;
            match CredentialsClient::new(channel).claim_owner(request).await {
                Err(status) if found_no_leader(&status) && Instant::now() < end => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                Err(status) => return Ok(Err(status)),
                Ok(claimed) => {
                    self.certificate = Some(claimed.into_inner().certificate);
                    return Ok(Ok(()));
                }
            }
        }
    }

    /// Makes a call with the certificate that was claimed, again while nobody serves: on a busy host the only curator may
    /// lose its etcd for a moment, and then it starts again.
    async fn ask(&self, field: &Field) -> Result<Result<(), Status>> {
        let certificate = self.certificate.as_deref().context("it has claimed nothing")?;
        let end = Instant::now() + PATIENCE;
        loop {
            let channel = self.channel(field, certificate).await?;
            match ManagementClient::new(channel).get_cluster(wire::GetClusterRequest {}).await {
                Err(status) if found_no_leader(&status) && Instant::now() < end => {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                result => return Ok(result.map(drop)),
            }
        }
    }

    /// Whether the key and the certificate open nothing.
    async fn is_out(&mut self, field: &Field) -> Result<()> {
        let status = self.ask(field).await?.err().context("its certificate is taken")?;
        ensure!(
            status.code() == Code::Unauthenticated && status.message().contains("was removed"),
            "{status}"
        );
        let claimed = self.claim(field).await?.err().context("it claims a certificate")?;
        ensure!(claimed.code() == Code::PermissionDenied, "{claimed}");
        Ok(())
    }
}

const REPLACED: &str =
    "SELECT count(*) = 1 FROM cluster WHERE key_next IS NULL AND key_rotation_requested_at IS NULL
    AND NOT EXISTS (SELECT 1 FROM cluster_former_key WHERE removed_at IS NULL)
    AND EXISTS (SELECT 1 FROM cluster_former_key)";

/// A rotation is ordered once: six shepherds die, each after another step, and two more complete it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_is_replaced_by_order_whatever_dies_meanwhile_and_the_old_one_opens_nothing() -> TestResult {
    let mut field = Field::start("cluster_keys", 1).await?;
    field.make_ams(1, 0).await?;
    let mut old = Holder::of_now(&field).await?;
    old.claim(&field).await??;
    old.ask(&field).await??;
    field.shepherd = None;

    let output = field.ctl(&["cluster", "rotate-key", "ams", "--reason", "a disk is lost"])?;
    assert!(output.starts_with("the cluster ams replaces the shepherd's key for it as soon as"), "{output}");
    let again = field.ctl(&["cluster", "rotate-key", "ams", "--reason", "once more"])?;
    assert!(again.contains("nothing was changed"), "{again}");
    let described = field.ctl(&["cluster", "describe", "ams"])?;
    assert!(described.contains("; to be replaced, as "), "{described}");
    for (number, place) in
        ["key-stored", "key-added", "key-verified", "key-activated", "key-revoked", "key-removal-recorded"]
            .iter()
            .enumerate()
    {
        let (name, place) = (format!("dying{number}"), format!("cluster.{place}"));
        let mut dying = field.fleet.shepherd_dying_at(&place, &name, &[endpoint()?], &FLAGS)?;
        let end = Instant::now() + PATIENCE;
        while dying.ended()?.is_none() {
            assert!(Instant::now() < end, "nobody passed {place}: {}", field.fleet.explain().await?);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // Its sessions would expire in some seconds.
        sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
            .execute(&field.fleet.pool)
            .await?;
        // Until the next key is known to work and is in force.
        if number <= 3 {
            old.ask(&field).await??;
        }
    }
    let _two = [
        field.fleet.shepherd("one", &[endpoint()?], &FLAGS)?,
        field.fleet.shepherd("other", &[endpoint()?], &FLAGS)?,
    ];
    field.fleet.until("it is replaced", REPLACED).await?;
    old.is_out(&field).await?;
    let mut new = Holder::of_now(&field).await?;
    assert_ne!(new.key.public_key(), old.key.public_key());
    new.claim(&field).await??;
    new.ask(&field).await??;
    let made: i64 = sqlx::query_scalar("SELECT count(*) FROM sealed_secret WHERE name LIKE 'cluster/%'")
        .fetch_one(&field.fleet.pool)
        .await?;
    assert_eq!(made, 2, "the one in force, and the one before, which a snapshot may need");
    field.until("all is well", "ams", settled).await?;
    let audited =
        "SELECT count(*) = 1 FROM audit WHERE rpc LIKE '%Clusters/RotateKey' AND outcome = 'changed'";
    assert!(field.fleet.holds(audited).await?);

    // The key is deleted with its cluster.
    field.ctl(&["cluster", "delete", "ams", "--yes", "--reason", "the trial is over"])?;
    field.fleet.until("it is gone", "SELECT count(*) = 0 FROM cluster").await?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM sealed_secret WHERE name LIKE 'cluster/%'").await?);
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_former_key").await?);
    Ok(())
}

/// Nobody orders a rotation: the key is a month old. Then the cluster is restored from a snapshot that has the old key
/// alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_is_replaced_by_schedule_and_again_in_a_cluster_that_came_back_from_before() -> TestResult {
    let field = Field::start("cluster_keys_restored", 2).await?;
    field.make_ams(1, 0).await?;
    let mut old = Holder::of_now(&field).await?;
    old.claim(&field).await??;
    field.fleet.until("there is a snapshot", "SELECT count(*) > 0 FROM cluster_snapshot").await?;
    let snapshot: uuid::Uuid =
        sqlx::query_scalar("SELECT snapshot_id FROM cluster_snapshot ORDER BY taken_at LIMIT 1")
            .fetch_one(&field.fleet.pool)
            .await?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_former_key").await?, "nothing was due");
    sqlx::query("UPDATE cluster SET key_since = clock_timestamp() - INTERVAL '30 days'")
        .execute(&field.fleet.pool)
        .await?;
    field.fleet.until("it is replaced", REPLACED).await?;
    old.is_out(&field).await?;
    let new = Holder::of_now(&field).await?;

    let snapshot = snapshot.to_string();
    let restore = [
        "cluster",
        "restore",
        "ams",
        "--snapshot",
        &snapshot,
        "--bypass-quorum",
        "--yes",
        "--reason",
        "a test",
    ];
    field.ctl(&restore)?;
    field.until("it is back", "ams", |cluster| settled(cluster) && cluster["epoch"] == "1").await?;
    // The removed key is removed again: the snapshot does not know of the removal.
    field.fleet.until("it knows the key in force", REPLACED).await?;
    old.is_out(&field).await?;
    let mut now = Holder::of_now(&field).await?;
    assert_eq!(now.key.public_key(), new.key.public_key(), "it is the one in force all the same");
    now.claim(&field).await??;

    // A cluster that rejects every key of the shepherd is reported, until it accepts one again.
    let other = Identity::generate()?;
    let secrets = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
    let plain = secrecy::SecretSlice::from(other.pkcs8().to_vec());
    let kept: Vec<u8> =
        sqlx::query_scalar("SELECT sealed FROM sealed_secret WHERE name LIKE 'cluster/%/owner'")
            .fetch_one(&field.fleet.pool)
            .await?;
    let put = "UPDATE sealed_secret SET sealed = $1 WHERE name LIKE 'cluster/%/owner'";
    sqlx::query(put).bind(secrets.seal("a key", &plain)?).execute(&field.fleet.pool).await?;
    let mut field = field;
    field.shepherd = None;
    sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
        .execute(&field.fleet.pool)
        .await?;
    field.shepherd = Some(field.fleet.shepherd("again", &[endpoint()?], &FLAGS)?);
    field
        .fleet
        .until("all are refused", "SELECT count(*) = 1 FROM cluster WHERE keys_refused_since IS NOT NULL")
        .await?;
    let issues = field.ctl(&["issues"])?;
    assert!(issues.contains("cluster-key-refused"), "{issues}");
    let waits = |cluster: &Value| cluster["waitReasons"].to_string().contains("refuse");
    field.until("it says so", "ams", waits).await?;
    sqlx::query(put).bind(kept).execute(&field.fleet.pool).await?;
    field
        .fleet
        .until("one is taken", "SELECT count(*) = 1 FROM cluster WHERE keys_refused_since IS NULL")
        .await?;
    Ok(())
}
