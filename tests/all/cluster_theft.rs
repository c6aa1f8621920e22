//! The authority of a cluster is replaced after a theft of its key by one order, once, although shepherds die meanwhile.
//!
//! As in `clusters.rs`, the machines are simulated and the nodes are not: real etcd, real curators, a real service.
//! What a thief gets is in `nodes/attacker/theft.rs`.

use std::slice;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use prost::Message as _;
use serde_json::Value;
use shepherd::curator_client::peer_authorities::find_issuer;
use shepherd::curator_client::pki::TrustAnchor;
use shepherd::curator_client::statement::SignedStatement;
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::cluster::etcd_member::{
    decode_pem_bundle, read_authority_certificate, read_peer_certificate,
};
use shepherd::roleserver::cluster::files::ClusterFiles;

use crate::clusters::{FLAGS, Field, machines, settled};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::PATIENCE;

const ROTATE: [&str; 8] = [
    "cluster",
    "rotate-authority",
    "ams",
    "--compromised",
    "--confirm",
    "the authority of ams is compromised",
    "--reason",
    "a stolen disk",
];

/// The authority that the shepherds trust.
async fn trusted_authority(field: &Field) -> Result<TrustAnchor> {
    let certificate: Vec<u8> =
        sqlx::query_scalar("SELECT ca_certificate FROM cluster").fetch_one(&field.fleet.pool).await?;
    Ok(TrustAnchor::parse(&certificate)?)
}

/// The certificate of the authority that replaces the stolen one; `None` before it is made and after it is the only one.
async fn next_authority(field: &Field) -> Result<Option<Vec<u8>>> {
    let query = "SELECT authority_rotation_certificate FROM cluster";
    Ok(sqlx::query_scalar(query).fetch_one(&field.fleet.pool).await?)
}

/// Starts a shepherd that dies at this place, and waits until it has.
async fn let_die_at(field: &Field, place: &str, number: usize) -> Result<()> {
    let (point, name) = (format!("cluster.{place}"), format!("{place}-{number}"));
    // The agents know this endpoint. No other shepherd finds them while the curators receive their heartbeats.
    let at = slice::from_ref(&field.endpoint);
    let mut dying = field.fleet.shepherd_dying_at(&point, &name, at, &FLAGS)?;
    let end = Instant::now() + PATIENCE;
    while dying.ended()?.is_none() {
        ensure!(Instant::now() < end, "nobody passed {place}: {}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The session of the dead shepherd would expire in some seconds.
    sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
        .execute(&field.fleet.pool)
        .await?;
    Ok(())
}

/// Checks that nothing of a machine's node is of another authority, and that nothing of the order is left.
fn check_node(field: &Field, machine: &str, part: &str, authority: &TrustAnchor) -> Result<()> {
    let files = ClusterFiles::in_state_directory(&field.disk(machine));
    let by_it = |certificate: &[u8]| find_issuer(certificate, slice::from_ref(authority)).is_some();
    let credentials = files.read_credentials()?.context("no credentials")?;
    ensure!(
        credentials.ca_certificate == hex::encode(&authority.certificate),
        "{machine} trusts another one"
    );
    ensure!(by_it(&hex::decode(&credentials.certificate)?), "{machine} has a certificate of the stolen one");
    ensure!(files.read_next_authority()?.is_none(), "{machine} still has the order");
    let stated = files.read_statement(authority)?.context("no statement of the new authority")?;
    ensure!(stated.statement.authorities == slice::from_ref(authority), "{machine} trusts two authorities");
    if part != "control-plane" {
        return Ok(());
    }
    let peer = read_peer_certificate(&files).context("no peer certificate")?;
    ensure!(by_it(&peer), "etcd on {machine} has a certificate of the stolen one");
    let curator = files.read_curator_certificate().context("no curator's certificate")?;
    ensure!(by_it(&curator), "the curator on {machine} has a certificate of the stolen one");
    let bundle = String::from_utf8(read_authority_certificate(&files)?.context("no bundle")?)?;
    ensure!(
        decode_pem_bundle(&bundle) == slice::from_ref(&authority.certificate),
        "etcd on {machine} trusts another authority"
    );
    Ok(())
}

/// Waits until this is true of every node of the cluster.
async fn until_each(nodes: &[(String, &str)], check: impl Fn(&str, &str) -> Result<()>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let checked: Result<()> = nodes.iter().try_for_each(|(machine, part)| check(machine, part));
        match checked {
            Ok(()) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stolen_authority_is_replaced_once_by_one_order_although_shepherds_die() -> TestResult {
    let mut field = Field::start("cluster_theft", 4).await?;
    let cluster = field.make_ams(3, 1).await?;
    let mut nodes = Vec::new();
    for part in ["control-plane", "worker"] {
        for machine in machines(&cluster, part) {
            nodes.push((machine["name"].as_str().context("a name")?.to_owned(), part));
        }
    }
    assert_eq!(nodes.len(), 4, "{cluster:#}");
    let old = trusted_authority(&field).await?;
    field.shepherd = None;
    sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
        .execute(&field.fleet.pool)
        .await?;

    let output = field.ctl(&ROTATE)?;
    assert!(
        output.starts_with("the cluster ams replaces its authority by orders to its machines"),
        "{output}"
    );
    let refused = field.ctl(&ROTATE).err().context("a second order is accepted")?.to_string();
    assert!(refused.contains("already has a replacement, which "), "{refused}");

    // A shepherd dies after each thing that it leaves behind, and another one continues.
    let_die_at(&field, "next-authority-stored", 0).await?;
    let next = next_authority(&field).await?.context("no authority is made")?;
    for number in 0..5 {
        let_die_at(&field, "next-authority-sent", number).await?;
        let_die_at(&field, "authority-step-begun", number).await?;
        let made = next_authority(&field).await?;
        assert_eq!(made.as_ref(), Some(&next), "another authority was made, after {number} steps");
    }
    let new = trusted_authority(&field).await?;
    assert!(new != old && new.certificate == next, "the shepherds trust another authority");

    field.shepherd = Some(field.fleet.shepherd("last", slice::from_ref(&field.endpoint), &FLAGS)?);
    let ended = "SELECT count(*) = 1 FROM cluster
        WHERE authority_rotation IS NULL AND authority_rotation_key IS NULL AND authority_rotation_step IS NULL
            AND authority_rotation_certificate IS NULL AND authority_rotation_progress IS NULL";
    field.fleet.until("the order has ended", ended).await?;
    until_each(&nodes, |machine, part| check_node(&field, machine, part, &new)).await?;
    let back = |cluster: &Value| {
        settled(cluster) && cluster["votersReached"] == 3 && cluster["authorityRotation"] == Value::Null
    };
    field.until("all is well", "ams", back).await?;
    let stored: Vec<u8> = sqlx::query_scalar("SELECT statement FROM cluster WHERE statement IS NOT NULL")
        .fetch_one(&field.fleet.pool)
        .await?;
    let sent = wire::SignedStatement::decode(stored.as_slice())?;
    assert!(sent.successors.is_empty(), "the stolen authority leads to the new one");
    SignedStatement::verify(&sent, slice::from_ref(&new))?;
    let taken = "SELECT count(*) >= 1 FROM cluster_snapshot s JOIN cluster c ON c.cluster_id = s.cluster_id
        WHERE s.authority = sha256(c.ca_certificate)";
    field.fleet.until("a snapshot has the new authority", taken).await?;
    let audited = "SELECT count(*) = 1 FROM audit
        WHERE rpc LIKE '%Clusters/RotateAuthority' AND outcome = 'changed'";
    assert!(field.fleet.holds(audited).await?);
    Ok(())
}
