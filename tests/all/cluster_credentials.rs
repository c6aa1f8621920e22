//! Certificates of people for a cluster: issued, used at its curators without any shepherd, and revoked.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::curator_channel::open_channel;
use shepherd::curator_client::pki::TrustAnchor;
use shepherd::curator_client::tls::{certified_key, client_config};
use shepherd::model::time::Timestamp;
use shepherd::proto::curator::v1 as wire;
use shepherd::proto::curator::v1::management_client::ManagementClient;
use tonic::{Code, Status};

use crate::clusters::Field;
use crate::harness::aloud::TestResult;
use crate::harness::fleet::PATIENCE;

/// Lists the nodes at the curator that leads, with a person's files and nothing else.
async fn nodes(files: &Path, holder: &str, curators: &[String]) -> Result<Result<Vec<wire::Node>, Status>> {
    let certificate = CertificateDer::from_pem_file(files.join(format!("{holder}.crt")))?;
    let key = PrivatePkcs8KeyDer::from_pem_file(files.join(format!("{holder}.key")))?;
    let anchor = TrustAnchor::parse(&CertificateDer::from_pem_file(files.join("ca.crt"))?)?;
    let own = certified_key(&certificate, key.secret_pkcs8_der())?;
    let end = Instant::now() + PATIENCE;
    loop {
        for curator in curators {
            let config = client_config(anchor.clone(), None, Some(own.clone()), Clock::system())?;
            let mut management = ManagementClient::new(open_channel(curator, config));
            match management.list_nodes(wire::ListNodesRequest::default()).await {
                Ok(listed) => {
                    let all = listed.into_inner().nodes;
                    return Ok(Ok(all.into_iter().filter_map(|listed| listed.node).collect()));
                }
                // It does not lead, or does not know the leader.
                Err(status) if matches!(status.code(), Code::Unimplemented | Code::Unavailable) => {
                    ensure!(Instant::now() < end, "none of {curators:?} leads: {status}");
                }
                Err(status) => return Ok(Err(status)),
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The certificate of that id in the list.
fn listed(field: &Field, id: &str) -> Result<Value> {
    let output = field.ctl(&["cluster", "credentials", "get", "ams", "-o", "json"])?;
    let all: Value = serde_json::from_str(&output)?;
    let all = all["credentials"].as_array().context("a list")?;
    Ok(all.iter().find(|credential| credential["id"] == id).cloned().unwrap_or_default())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn person_speaks_to_the_curators_until_the_certificate_is_revoked() -> TestResult {
    let field = Field::start("cluster_credentials", 3).await?;
    field.make_ams(3, 0).await?;
    let scratch = tempfile::tempdir()?;
    let files = scratch.path().join("ams");
    let directory = files.to_str().context("a path")?;
    // At a time, as with `hold --until`.
    let end = Timestamp::from(SystemTime::now() + Duration::from_hours(24));
    let end = end.format("%Y-%m-%dT%H:%M:%SZ").to_string();
    let issue = |holder: &str| {
        let issue = ["cluster", "credentials", "issue", "ams", "--output-dir", directory, "--holder", holder];
        field.ctl(&[&issue[..], &["--until", &end, "--reason", "a look", "-o", "json"]].concat())
    };
    let made: Value = serde_json::from_str(&issue("kim")?)?;
    assert_eq!(made["credential"]["state"], "valid", "{made:#}");
    let id = made["credential"]["id"].as_str().context("an id")?;
    // A certificate lasts as long as the rest of the time was when it was ordered, and begins when it is signed.
    let expires_at = made["credential"]["expiresAt"].as_str().context("an end")?.parse::<Timestamp>()?;
    let late = expires_at - end.parse::<Timestamp>()?;
    assert!((-60..=600).contains(&late.num_seconds()), "{late}");
    let mode = |name: &str| anyhow::Ok(std::fs::metadata(files.join(name))?.permissions().mode() & 0o777);
    assert_eq!((mode("kim.key")?, mode("kim.crt")?), (0o600, 0o644));
    let key = std::fs::read_to_string(files.join("kim.key"))?;
    assert!(issue("kim").is_err(), "what is there is not overwritten");
    assert_eq!(std::fs::read_to_string(files.join("kim.key"))?, key);

    let curators: Vec<String> = serde_json::from_value(made["curators"].clone())?;
    assert!(!curators.is_empty());
    let all = nodes(&files, "kim", &curators).await??;
    assert_eq!(all.len(), 3, "it is an owner's");
    for node in &all {
        // The simulator defines this for each model.
        let expected = match node.labels.get("product").map(String::as_str) {
            Some("PowerEdge-R6615") => ["Dell-Inc", "64", "384"],
            Some("SYS-121C-TN10R") => ["Supermicro", "128", "512"],
            Some("ProLiant-DL20-Gen10-Plus") => ["HPE", "16", "64"],
            other => Err(anyhow!("no model of the simulator is called {other:?}"))?,
        };
        let has = ["manufacturer", "cpus", "memory-gib"].map(|key| node.labels.get(key).map(String::as_str));
        assert_eq!(has, expected.map(Some), "{:?}", node.labels);
    }

    // What is stored of it: no key, and the audit's record.
    let kept: Vec<Vec<u8>> = sqlx::query_scalar(
        "SELECT public_key || certificate || convert_to(holder || coalesce(serial, ''), 'UTF8') FROM cluster_credential",
    )
    .fetch_all(&field.fleet.pool)
    .await?;
    let secret = PrivatePkcs8KeyDer::from_pem_slice(key.as_bytes())?;
    let secret = &secret.secret_pkcs8_der()[16..];
    assert!(
        kept.iter().all(|row| !row.windows(secret.len()).any(|part| part == secret)),
        "the key went somewhere"
    );
    let audited: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM audit WHERE rpc LIKE '%ClusterCredentials/Issue' AND outcome = 'changed' AND reason = 'a look'",
    )
    .fetch_one(&field.fleet.pool)
    .await?;
    assert_eq!(audited, 1);

    issue("lee")?;
    // By the name of the holder, and later by the beginning of the id.
    field.ctl(&["cluster", "credentials", "revoke", "ams", "kim", "--reason", "kim has left"])?;
    let end = Instant::now() + PATIENCE;
    while listed(&field, id)?["state"] != "revoked" {
        assert!(Instant::now() < end, "no curator received the revocation: {:#}", listed(&field, id)?);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let refused = nodes(&files, "kim", &curators).await?;
    let why = format!("{:?}", refused.expect_err("a certificate that was revoked is taken"));
    assert!(why.contains("is revoked"), "{why}");
    assert_eq!(nodes(&files, "lee", &curators).await??.len(), 3, "that of another is as good as before");
    let start = &id[..13];
    let again = field.ctl(&["cluster", "credentials", "revoke", "ams", start, "--reason", "once more"])?;
    assert!(again.contains("has nothing to revoke"), "{again}");

    // The certificate is deleted with its cluster.
    field.ctl(&["cluster", "delete", "ams", "--yes", "--reason", "the trial is over"])?;
    field.fleet.until("it is gone", "SELECT count(*) = 0 FROM cluster").await?;
    assert!(field.fleet.holds("SELECT count(*) = 0 FROM cluster_credential").await?);
    Ok(())
}
