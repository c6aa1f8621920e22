//! A shepherd that restarts while a revoked curator is the only one that answers, and denies that there is a statement.
//!
//! The shepherd's own client is tested against the false curator. Between the two lives of the shepherd nothing is left
//! but its database.

use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::curator_client::clock::Clock;
use shepherd::curator_client::identity::Identity;
use shepherd::curator_client::node_id::NodeId;
use shepherd::curator_client::statement_trust::StatementTrust;
use shepherd::curator_client::testing::{at, authority, pkcs8, public, serial, statement, validity};
use shepherd::curator_client::tls::certified_key;
use shepherd::manager::cluster::curators::{CuratorCallError, CuratorClient};
use shepherd::manager::cluster::statements::load_statement_trust;
use shepherd::model::cluster::owner_key::OwnerKeySlot;
use shepherd::model::cluster::state::ClusterIdentity;

use super::OPEN_CALL;
use super::listeners::{FalseCurator, Script};
use crate::bmdb_kit::Kit;
use crate::harness::aloud::TestResult;
use crate::harness::port::reserved;

/// The call that a shepherd makes first.
const CLAIM: &str = "Credentials/ClaimOwner";

/// What a shepherd knows of the cluster after a start.
async fn trust_after_a_start(
    kit: &Kit,
    founded: &ClusterIdentity,
) -> Result<StatementTrust, CuratorCallError> {
    load_statement_trust(&kit.bmdb, founded, None, Clock::new(|| at(10), || Duration::ZERO)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shepherd_that_restarts_follows_no_revoked_curator() -> TestResult {
    let kit = Kit::new("restarted_shepherd").await?;
    let anchor = authority(1).anchor().clone();
    sqlx::query(
        "INSERT INTO cluster (cluster_id, name, control_plane, workers, selector, roles, approval, version, created_at,
             created_by, wait_reasons, settled, founded_at, ca_certificate, curators)
         VALUES ($1, 'ams', 1, 0, '', '[]', 'automatic', 1, clock_timestamp(), 'a test', '[]', FALSE,
             clock_timestamp(), $2, '[]')",
    )
    .bind(anchor.cluster)
    .bind(anchor.certificate.as_slice())
    .execute(&kit.pool)
    .await?;

    // The curator was a true one. The statement lists its certificate.
    let shown = authority(1).issue_curator_certificate(&public(5), serial(3), validity())?;
    let address = reserved()?;
    let script = Script::leading(NodeId::from_key(&public(5)));
    let attacker =
        FalseCurator::start(address, certified_key(&shown.certificate, &pkcs8(5))?, script).await?;
    let founded = ClusterIdentity {
        ca_certificate: anchor.certificate.clone(),
        curators: vec![address.to_string()],
        founded_at: at(0),
    };
    let owner = Identity::generate()?;
    let claim = async |trust: &StatementTrust| {
        let claimed =
            CuratorClient::claim_certificate(&founded, 0, (OwnerKeySlot::Current, &owner), trust).await;
        claimed.err().context("the false curator has signed a certificate")
    };

    // As long as there is no statement, any node of the cluster leads.
    let trust = trust_after_a_start(&kit, &founded).await?;
    claim(&trust).await?;
    let before = attacker.requests().calls.get(CLAIM).copied().unwrap_or_default();
    assert!(before > 0, "the false curator is not reached");

    // An honest curator sent the statement. Then the shepherd restarts.
    let sent = statement(0, 2).sign(&authority(1))?.to_wire();
    assert!(trust.offer(&sent, 0).await?);
    drop(trust);
    let trust = trust_after_a_start(&kit, &founded).await?;
    let requests = attacker.requests().calls;
    let error = claim(&trust).await?;
    let calls = attacker.requests().calls;
    assert_eq!(calls.get(CLAIM), Some(&before), "the restarted shepherd follows a revoked curator: {error}");
    assert!(calls.get(OPEN_CALL) > requests.get(OPEN_CALL), "it was not reached: {calls:?}");
    assert!(error.to_string().contains("revoked"), "{error}");

    // Damage is no reason to follow it. A person may clear the statement.
    sqlx::query("UPDATE cluster SET statement = $1")
        .bind(b"no statement".as_slice())
        .execute(&kit.pool)
        .await?;
    let error = trust_after_a_start(&kit, &founded).await.err().context("a damaged statement is believed")?;
    assert!(matches!(error, CuratorCallError::DamagedStatement(_)), "{error}");
    sqlx::query("UPDATE cluster SET statement = NULL").execute(&kit.pool).await?;
    let trust = trust_after_a_start(&kit, &founded).await?;
    assert!(trust.current().is_none());
    assert!(trust.offer(&sent, 0).await?);
    let stored = kit.bmdb.cluster_statement(anchor.cluster).await?.context("it was not stored again")?;
    assert_eq!(stored.order, (0, 2));
    Ok(())
}
