//! A machine that joins while a revoked curator is the only one that answers, and denies that there is a statement.

use std::collections::BTreeMap;
use std::time::Duration;

use prost::Message as _;
use shepherd::curator::bootstrap::create_authority;
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::node_id::NodeId;
use shepherd::curator_client::statement::{SignedStatement, Statement};
use shepherd::curator_client::testing::{pkcs8, public, serial};
use shepherd::curator_client::tls::certified_key;
use shepherd::roleserver::cluster::node_order::OrderKind;
use uuid::Uuid;

use super::OPEN_CALL;
use super::listeners::{FalseCurator, Script};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::port::reserved;
use crate::nodes::node::Node;

/// The call of a machine that believes a curator.
const REGISTER: &str = "Registration/Register";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_that_joins_with_a_statement_follows_no_revoked_curator() -> TestResult {
    let mut node = Node::new()?;
    let now = node.clock.now();
    let authority = create_authority(Uuid::new_v4(), now)?;
    let anchor = authority.anchor().clone();
    let validity = Validity::starting(now, Duration::from_hours(1));
    let shown = authority.issue_curator_certificate(&public(5), serial(3), validity)?;
    let statement = Statement {
        cluster: anchor.cluster,
        epoch: 0,
        number: 2,
        issued_at: now,
        authorities: vec![anchor.clone()],
        revoked: BTreeMap::from([(serial(3), validity.not_after)]),
    };
    let statement = statement.sign(&authority)?;
    let address = reserved()?;
    let script = Script::leading(NodeId::from_key(&public(5)));
    let attacker =
        FalseCurator::start(address, certified_key(&shown.certificate, &pkcs8(5))?, script).await?;
    let order = |statement: Option<&SignedStatement>| OrderKind::Join {
        ticket: "05".repeat(32),
        ca_certificate: hex::encode(&anchor.certificate),
        curators: vec![address.to_string()],
        epoch: 0,
        statement: statement.map(|signed| hex::encode(signed.to_wire().encode_to_vec())),
    };

    node.ask(order(Some(&statement)))?;
    node.start()?;
    until("the false curator is refused", async || Ok(attacker.requests().refused_handshakes > 1)).await?;
    let calls = attacker.requests().calls;
    assert!(calls.keys().eq([OPEN_CALL]), "the machine follows a revoked curator: {calls:?}");
    assert_eq!(node.files().read_statement(&anchor)?, Some(statement));
    node.stop().await?;

    // The order alone makes the difference.
    let mut without = Node::new()?;
    without.ask(order(None))?;
    without.start()?;
    until("it is followed", async || Ok(attacker.requests().calls.contains_key(REGISTER))).await?;
    assert_eq!(without.files().read_statement(&anchor)?, None);
    Ok(without.stop().await?)
}
