//! Members of etcd with ended certificates come back by one order of an operator.
//!
//! As in `clusters.rs`, the machines are simulated and the nodes are not: real etcd, real curators, a real service.
//!
//! The certificates have ended by the clock of the host, which all programs share. Nodes with clocks past the end of every
//! certificate, without a service, are in `nodes/ended_certificates.rs`, with the reason why etcd has no clock of its own.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use shepherd::bmdb::cluster::sealed_snapshot::unseal_snapshot;
use shepherd::bmdb::fleet::secret::SecretsKey;
use shepherd::curator_client::certificate::{Serial, Validity};
use shepherd::curator_client::cluster_snapshot::ClusterSnapshot;
use shepherd::curator_client::node_id::PublicKey;
use shepherd::curator_client::pki::Authority;
use shepherd::model::time::before;
use shepherd::roleserver::child::launch::{ChildRecord, read_record};
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::cluster::files::ClusterFiles;
use uuid::Uuid;

use crate::clusters::{Field, machines, settled};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::PATIENCE;

/// The authority of the one cluster, from its newest snapshot.
async fn authority(field: &Field) -> Result<Authority> {
    let newest = "SELECT snapshot_id, digest FROM cluster_snapshot ORDER BY taken_at DESC LIMIT 1";
    let (snapshot, digest): (Uuid, Vec<u8>) = sqlx::query_as(newest).fetch_one(&field.fleet.pool).await?;
    let chunks = "SELECT sealed FROM cluster_snapshot_chunk WHERE snapshot_id = $1 ORDER BY number";
    let sealed: Vec<Vec<u8>> = sqlx::query_scalar(chunks).bind(snapshot).fetch_all(&field.fleet.pool).await?;
    let secrets = SecretsKey::open(&field.fleet.directory().join("secrets.key"))?;
    let encoded = unseal_snapshot(&secrets, &sealed.concat(), &digest)?;
    Ok(ClusterSnapshot::decode(encoded.expose_secret())?.cluster_and_authority()?.1)
}

fn etcd(field: &Field, machine: &str) -> Result<ChildRecord> {
    read_record(&field.disk(machine).join("children/etcd/process.json")).context("no etcd")
}

/// Gives the member of this machine a certificate that ended an hour ago.
fn end_certificate(field: &Field, machine: &str, authority: &Authority) -> Result<()> {
    let files = ClusterFiles::in_state_directory(&field.disk(machine));
    let key = PublicKey(files.read_key()?.context("no key")?.public_key());
    let address = files.read_membership()?.context("no membership")?.address;
    let hours_ago = |hours| before(SystemTime::now().into(), Duration::from_hours(hours));
    let validity = Validity { not_before: hours_ago(31 * 24), not_after: hours_ago(1) };
    let serial = Serial::new(rand::random());
    let issued = authority.issue_etcd_peer_certificate(&key, address, serial, validity)?;
    Ok(etcd_member::replace_peer_certificate(&files, &issued.certificate)?)
}

/// Orders certificates until that is accepted. It is rejected while the last contact is less than a minute ago.
async fn renew_peers(field: &Field) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match field.ctl(&["cluster", "renew-peers", "ams", "--reason", "it was dark for weeks"]) {
            Ok(text) => {
                let begin = "the cluster ams sends its members of etcd new certificates";
                ensure!(text.starts_with(begin), "{text}");
                return Ok(());
            }
            Err(refused) => {
                let text = refused.to_string();
                ensure!(text.contains("within a minute") || text.contains("after a minute"), "{text}");
            }
        }
        ensure!(Instant::now() < end, "it is refused for ever");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Orders to replace the authority of the cluster, of which no curator answers. The cluster, its machines and the issues show
/// why nothing happens, and the order is withdrawn.
async fn stopped_replacement_is_explained(field: &Field, machine: &str) -> Result<()> {
    field.ctl(&["cluster", "rotate-authority", "ams", "--reason", "a member left with its disk"])?;
    let for_long = "UPDATE cluster SET unreachable_since = unreachable_since - INTERVAL '3 minutes'";
    sqlx::query(for_long).execute(&field.fleet.pool).await?;
    let stopped = "does not begin: no curator of it has answered for ";
    let shows = |cluster: &Value| {
        let machines = machines(cluster, "control-plane");
        let waits =
            |machine: &Value| machine["waitReason"].as_str().is_some_and(|text| text.contains(stopped));
        cluster["waitReasons"].to_string().contains(stopped) && machines.into_iter().all(waits)
    };
    field.until("it shows why its authority is not replaced", "ams", shows).await?;
    let why = field.ctl(&["why", machine])?;
    let why: Vec<&str> = why.split_whitespace().collect();
    ensure!(why.join(" ").contains(stopped), "{why:?}");
    let issues = field.ctl(&["issues"])?;
    ensure!(issues.contains("authority-rotation-held"), "{issues}");
    let withdraw = "UPDATE cluster SET authority_rotation = NULL, authority_rotation_ordered_at = NULL,
                        authority_rotation_ordered_by = NULL";
    sqlx::query(withdraw).execute(&field.fleet.pool).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_whose_certificates_have_ended_come_back_by_one_order() -> TestResult {
    let field = Field::start("cluster_peers", 3).await?;
    let cluster = field.make_ams(3, 0).await?;
    let name = |machine: &Value| machine["name"].as_str().context("a name").map(str::to_owned);
    let members: Vec<String> =
        machines(&cluster, "control-plane").into_iter().map(name).collect::<Result<_>>()?;
    field.ctl(&["cluster", "snapshot", "ams", "--reason", "all are members"])?;
    let taken = "SELECT count(*) = 1 FROM cluster_snapshot WHERE why = 'ordered'";
    field.fleet.until("a snapshot has all members", taken).await?;

    // Members that work renew their certificates by themselves.
    let refused = field.ctl(&["cluster", "renew-peers", "ams", "--reason", "a mistake"]);
    let refused = refused.err().context("the order is accepted for a cluster that is well")?.to_string();
    assert!(refused.contains("3 of the 3 members of its control plane answered"), "{refused}");

    let authority = authority(&field).await?;
    for machine in &members {
        end_certificate(&field, machine, &authority)?;
    }
    for machine in &members {
        etcd(&field, machine)?.instance.stop(Duration::ZERO)?;
    }
    let silent = "SELECT count(*) = 1 FROM cluster WHERE unreachable_since IS NOT NULL";
    field.fleet.until("no curator answers", silent).await?;
    stopped_replacement_is_explained(&field, &members[0]).await?;
    renew_peers(&field).await?;
    let sent = "SELECT count(*) = 3 FROM history WHERE event = 'ClusterCertificateSent'";
    field.fleet.until("each member is sent a certificate", sent).await?;
    let back = |cluster: &Value| settled(cluster) && cluster["votersReached"] == 3;
    let cluster = field.until("it is back", "ams", back).await?;
    assert_eq!((&cluster["epoch"], &cluster["voters"]), (&"0".into(), &3.into()), "{cluster:#}");
    assert!(field.fleet.holds(sent).await?, "a member was sent more than one");
    let over = "SELECT count(*) = 1 FROM cluster WHERE peer_renewal_requested_at IS NULL";
    assert!(field.fleet.holds(over).await?, "the order has not ended");
    let audited =
        "SELECT count(*) = 1 FROM audit WHERE rpc LIKE '%Clusters/RenewPeers' AND outcome = 'changed'";
    assert!(field.fleet.holds(audited).await?);

    // With the fleet, all that it started ends.
    let records = members.iter().map(|machine| etcd(&field, machine)).collect::<Result<Vec<_>>>()?;
    let running = |record: &ChildRecord| record.instance.is_alive();
    assert!(records.iter().all(running), "they run until then: {records:?}");
    drop(field);
    assert!(!records.iter().any(running), "an etcd runs on without its fleet: {records:?}");
    Ok(())
}
