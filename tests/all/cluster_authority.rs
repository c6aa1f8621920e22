//! The authority of a cluster is replaced by one order, once, although shepherds die meanwhile.
//!
//! As in `clusters.rs`, the machines are simulated and the nodes are not: real etcd, real curators, a real service.

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
use crate::harness::fleet::{PATIENCE, endpoint};

const ROTATE: [&str; 5] = ["cluster", "rotate-authority", "ams", "--reason", "its key is two years old"];
/// The order is carried out.
const ENDED: &str = "SELECT count(*) = 1 FROM cluster
    WHERE authority_rotation IS NULL AND authority_rotation_from IS NULL AND authority_rotation_progress IS NULL";

/// The first authority of the cluster `ams`.
async fn first_authority(field: &Field) -> Result<TrustAnchor> {
    let certificate: Vec<u8> =
        sqlx::query_scalar("SELECT ca_certificate FROM cluster").fetch_one(&field.fleet.pool).await?;
    Ok(TrustAnchor::parse(&certificate)?)
}

/// Waits until the shepherd has stored a statement of one authority alone that is not `former`. Returns that authority,
/// and how many authorities succeeded the first one.
async fn new_authority(field: &Field, former: &TrustAnchor) -> Result<(TrustAnchor, usize)> {
    let first = first_authority(field).await?;
    let end = Instant::now() + PATIENCE;
    loop {
        let encoded: Vec<u8> =
            sqlx::query_scalar("SELECT statement FROM cluster WHERE statement IS NOT NULL")
                .fetch_one(&field.fleet.pool)
                .await?;
        let sent = wire::SignedStatement::decode(encoded.as_slice())?;
        let signed = SignedStatement::verify(&sent, slice::from_ref(&first))?;
        match signed.statement.authorities.as_slice() {
            [only] if only != former => return Ok((only.clone(), sent.successors.len())),
            listed => ensure!(Instant::now() < end, "the newest statement has {} authorities", listed.len()),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// The authorities that a machine's node trusts: those of its statement, and the first one until it has a statement.
fn trusted_by(field: &Field, machine: &str) -> Result<Vec<TrustAnchor>> {
    let files = ClusterFiles::in_state_directory(&field.disk(machine));
    let credentials = files.read_credentials()?.context("no credentials")?;
    let anchor = TrustAnchor::parse(&hex::decode(&credentials.ca_certificate)?)?;
    let stored = files.read_statement(&anchor)?;
    Ok(stored.map_or_else(|| vec![anchor], |signed| signed.statement.authorities))
}

/// Checks that nothing of a machine's node is of another authority.
fn check_node(field: &Field, machine: &str, part: &str, authority: &TrustAnchor) -> Result<()> {
    let trusted = trusted_by(field, machine)?;
    ensure!(trusted == slice::from_ref(authority), "{machine} trusts {} authorities", trusted.len());
    let files = ClusterFiles::in_state_directory(&field.disk(machine));
    let by_it = |certificate: &[u8]| find_issuer(certificate, slice::from_ref(authority)).is_some();
    let credentials = files.read_credentials()?.context("no credentials")?;
    ensure!(
        by_it(&hex::decode(&credentials.certificate)?),
        "{machine} has a certificate of the old authority"
    );
    if part != "control-plane" {
        return Ok(());
    }
    let peer = read_peer_certificate(&files).context("no peer certificate")?;
    ensure!(by_it(&peer), "etcd on {machine} has a certificate of the old authority");
    let curator = files.read_curator_certificate().context("no curator's certificate")?;
    ensure!(by_it(&curator), "the curator on {machine} has a certificate of the old authority");
    let bundle = String::from_utf8(read_authority_certificate(&files)?.context("no bundle")?)?;
    ensure!(
        decode_pem_bundle(&bundle) == slice::from_ref(&authority.certificate),
        "etcd on {machine} trusts another authority"
    );
    Ok(())
}

/// Starts a shepherd that dies at this place, and waits until it has.
async fn let_die_at(field: &Field, place: &str) -> Result<()> {
    let point = format!("cluster.{place}");
    let mut dying = field.fleet.shepherd_dying_at(&point, place, &[endpoint()?], &FLAGS)?;
    let end = Instant::now() + PATIENCE;
    while dying.ended()?.is_none() {
        ensure!(Instant::now() < end, "nobody passed {place}: {}", field.fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    expire_sessions(field).await
}

/// Ends the sessions of shepherds that are dead, which would expire in some seconds.
async fn expire_sessions(field: &Field) -> Result<()> {
    sqlx::query("UPDATE session SET deadline = clock_timestamp() WHERE closed_at IS NULL")
        .execute(&field.fleet.pool)
        .await?;
    Ok(())
}

/// The text with which another order is rejected.
fn refused(field: &Field) -> Result<String> {
    Ok(field.ctl(&ROTATE).err().context("a second order is accepted")?.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authority_is_replaced_once_by_one_order_although_shepherds_die() -> TestResult {
    let mut field = Field::start("cluster_authority", 4).await?;
    let cluster = field.make_ams(3, 1).await?;
    let mut nodes = Vec::new();
    for part in ["control-plane", "worker"] {
        for machine in machines(&cluster, part) {
            nodes.push((machine["name"].as_str().context("a name")?.to_owned(), part));
        }
    }
    assert_eq!(nodes.len(), 4, "{cluster:#}");
    let old = first_authority(&field).await?;
    field.shepherd = None;
    expire_sessions(&field).await?;

    let output = field.ctl(&ROTATE)?;
    assert!(output.starts_with("the cluster ams replaces its authority as soon as its curators"), "{output}");
    let text = refused(&field)?;
    assert!(text.contains("already has a replacement, which ") && text.contains(" ordered at "), "{text}");
    let described = field.ctl(&["cluster", "describe", "ams"])?;
    assert!(described.contains("to be replaced; as "), "{described}");
    for place in ["authority-recorded", "authority-begun"] {
        let_die_at(&field, place).await?;
    }

    // The curators have begun, and no shepherd has recorded that.
    field.shepherd = Some(field.fleet.shepherd("watching", &[endpoint()?], &FLAGS)?);
    let runs = |cluster: &Value| cluster["authorityRotation"]["stage"].is_string();
    field.until("the curators replace the authority", "ams", runs).await?;
    let text = refused(&field)?;
    assert!(text.contains("is being replaced (stage "), "{text}");
    let waits = "the replacement of the cluster's authority waits for it: ";
    let waiting = |cluster: &Value| {
        let all = cluster["machines"].as_array().map(Vec::as_slice).unwrap_or_default();
        all.iter().any(|machine| machine["waitReason"].as_str().is_some_and(|text| text.contains(waits)))
    };
    field.until("a machine shows what it lacks", "ams", waiting).await?;

    // The successor of this shepherd finds another authority, and takes that for the end of the order.
    field.shepherd = None;
    expire_sessions(&field).await?;
    let end = Instant::now() + PATIENCE;
    for (machine, _) in &nodes {
        while trusted_by(&field, machine)?.contains(&old) {
            assert!(Instant::now() < end, "{machine} trusts the old authority for ever");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    field.shepherd = Some(field.fleet.shepherd("last", &[endpoint()?], &FLAGS)?);
    field.fleet.until("the order has ended", ENDED).await?;

    let (new, successors) = new_authority(&field, &old).await?;
    assert_eq!(successors, 1, "the authority was replaced more than once");
    for (machine, part) in &nodes {
        check_node(&field, machine, part, &new)?;
    }
    let back = |cluster: &Value| settled(cluster) && cluster["votersReached"] == 3;
    let cluster = field.until("all is well", "ams", back).await?;
    assert_eq!(cluster["authorityRotation"], Value::Null, "{cluster:#}");
    let taken = "SELECT count(*) = 1 FROM cluster_snapshot WHERE why = 'ordered'";
    field.fleet.until("a snapshot has the new authority", taken).await?;
    let audited = "SELECT count(*) = 1 FROM audit
        WHERE rpc LIKE '%Clusters/RotateAuthority' AND outcome = 'changed'";
    assert!(field.fleet.holds(audited).await?);
    Ok(())
}

/// A cluster of one, where etcd waits for no other member: once after a pause, and once while the command waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authority_of_a_cluster_of_one_is_replaced_twice() -> TestResult {
    let field = Field::start("cluster_authority_of_one", 1).await?;
    let cluster = field.make_ams(1, 0).await?;
    let machine = cluster["machines"][0]["name"].as_str().context("a name")?.to_owned();
    let first = first_authority(&field).await?;
    let compromised = [&ROTATE[..], &["--compromised"]].concat();
    let text = field.ctl(&compromised).err().context("an unconfirmed order is accepted")?.to_string();
    assert!(text.contains("\"the authority of ams is compromised\". Nothing was changed"), "{text}");

    field.ctl(&["loops", "pause", "cluster", "--reason", "the switch is changed"])?;
    field.ctl(&ROTATE)?;
    let step = "the next step would be: its authority is replaced; it continues with: ";
    let paused = |cluster: &Value| cluster["waitReasons"].to_string().contains(step);
    let cluster = field.until("it shows why nothing is begun", "ams", paused).await?;
    assert_eq!(cluster["authorityRotation"]["stage"], Value::Null, "{cluster:#}");
    field.ctl(&["loops", "resume", "cluster", "--reason", "the switch is new"])?;
    field.fleet.until("the order has ended", ENDED).await?;
    let (second, successors) = new_authority(&field, &first).await?;
    assert_eq!(successors, 1, "the authority was replaced more than once");
    check_node(&field, &machine, "control-plane", &second)?;

    let output = field.ctl(&[&ROTATE[..], &["--wait"]].concat())?;
    assert_eq!(output.trim_end(), "the cluster ams has a new authority, and rejects the former one");
    let (third, successors) = new_authority(&field, &second).await?;
    assert_eq!((successors, third == first), (2, false));
    check_node(&field, &machine, "control-plane", &third)?;
    Ok(())
}
