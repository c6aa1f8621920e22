//! Orders to follow another authority after a theft, as the files of a machine show what becomes of them.

use anyhow::{Result, ensure};
use curator::bootstrap::create_authority;
use curator_client::clock::Clock;
use model::ids::MachineId;
use proto::agent::v1 as agent;
use proto::agent::v1::cluster_order::Operation;
use shepherd_roleserver::cluster::files::{ClusterFiles, Credentials};
use shepherd_roleserver::cluster::node_facts::NodeFacts;
use shepherd_roleserver::cluster::order_inbox::OrderInbox;
use uuid::Uuid;

fn order(generation: i64, operation: Operation) -> agent::ClusterOrder {
    agent::ClusterOrder { generation, operation: Some(operation), ..Default::default() }
}

#[test]
fn order_of_before_a_restore_is_forgotten_with_it() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let files = ClusterFiles::in_state_directory(directory.path());
    let inbox = OrderInbox::new(MachineId::generate(), files.clone(), NodeFacts::default());
    let (cluster, now) = (Uuid::new_v4(), Clock::system().now());
    let (former, next) = (create_authority(cluster, now)?, create_authority(cluster, now)?);
    let join = |generation, epoch| {
        let join = agent::JoinCluster {
            ticket: vec![5; 32],
            ca_certificate: former.anchor().certificate.clone(),
            curators: vec![format!("10.0.0.{generation}:7835")],
            epoch,
            ..Default::default()
        };
        order(generation, Operation::Join(join))
    };
    inbox.accept(&join(1, 0));
    files.read_or_create_key()?;
    let ca_certificate = hex::encode(&former.anchor().certificate);
    files.write_credentials(&Credentials { certificate: String::new(), ca_certificate })?;
    let replace = agent::ReplaceAuthority {
        step: agent::AuthorityStep::Follow.into(),
        ca_certificate: next.anchor().certificate.clone(),
        ..Default::default()
    };
    inbox.accept(&order(2, Operation::ReplaceAuthority(replace)));
    let report = inbox.report();
    ensure!(report.generation == 2 && report.next_authority == next.anchor().certificate, "{report:?}");

    // Its cluster was restored from a snapshot that has the former authority.
    inbox.accept(&join(3, 1));
    let report = inbox.report();
    ensure!(report.generation == 3 && report.error.is_empty(), "{report:?}");
    ensure!(files.read_next_authority()?.is_none(), "the order of before the restore is still carried out");
    ensure!(report.next_authority.is_empty(), "{report:?}");
    Ok(())
}
