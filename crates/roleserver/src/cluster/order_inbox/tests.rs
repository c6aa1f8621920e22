//! Tests of orders: what is stored, rejected and reported.

use std::time::Duration;

use curator::bootstrap::create_authority;
use curator_client::certificate::{Serial, Validity};
use curator_client::known_epoch::EpochChange;
use curator_client::node_id::PublicKey;
use curator_client::testing::{authority, statement};
use prost::Message as _;

use super::*;
use crate::cluster::etcd_member;
use crate::cluster::files::Credentials;
use crate::cluster::files::tests::membership;
use crate::cluster::order_decision::tests::{HERE, join};

pub(super) fn inbox() -> (tempfile::TempDir, OrderInbox) {
    let directory = tempfile::tempdir().unwrap();
    let files = ClusterFiles::in_state_directory(directory.path());
    (directory, OrderInbox::new(MachineId::generate(), files, NodeFacts::default()))
}

pub(super) fn wire_order(generation: i64, what: OrderedOperation) -> wire::ClusterOrder {
    wire::ClusterOrder { generation, operation: Some(what), ..Default::default() }
}

pub(super) fn founding(generation: i64, name: &str) -> wire::ClusterOrder {
    let found = wire::FoundCluster {
        cluster_id: HERE.to_string(),
        name: name.to_owned(),
        owner_keys: vec![vec![7; 32]],
        ..Default::default()
    };
    wire_order(generation, OrderedOperation::Found(found))
}

#[test]
fn order_is_durable_before_it_is_reported() {
    let (directory, order_inbox) = inbox();
    assert_eq!(order_inbox.report(), wire::ClusterReport::default());
    order_inbox.accept(&founding(2, "ams"));
    assert_eq!(order_inbox.report().generation, 2);
    let kept = ClusterFiles::in_state_directory(directory.path()).read_order().unwrap().unwrap();
    assert_eq!((kept.generation, kept.machine), (2, Some(order_inbox.0.machine)));
}

#[test]
fn rejected_order_is_reported_with_its_reason_and_changes_nothing() {
    let (directory, order_inbox) = inbox();
    order_inbox.accept(&founding(2, "ams"));
    order_inbox.accept(&founding(3, ""));
    let report = order_inbox.report();
    assert_eq!(report.generation, 3);
    assert!(report.error.contains("the order is invalid"), "{}", report.error);
    assert_eq!(
        ClusterFiles::in_state_directory(directory.path()).read_order().unwrap().unwrap().generation,
        2
    );
    order_inbox.accept(&founding(4, "ams"));
    assert_eq!((order_inbox.report().generation, order_inbox.report().error.as_str()), (4, ""));
    order_inbox.accept(&wire::ClusterOrder { generation: 5, ..Default::default() });
    assert!(
        order_inbox.report().error.contains("not known to this release"),
        "{}",
        order_inbox.report().error
    );
}

#[test]
fn epoch_is_stored_and_reported_and_a_lower_one_is_rejected() {
    let (directory, order_inbox) = inbox();
    let joining = |generation, epoch| {
        let OrderKind::Join { ca_certificate, .. } = join(HERE) else { panic!() };
        let join = wire::JoinCluster {
            ticket: vec![5; 32],
            ca_certificate: hex::decode(ca_certificate).unwrap(),
            curators: vec![format!("10.0.0.{generation}:7835")],
            epoch,
            ..Default::default()
        };
        wire_order(generation, OrderedOperation::Join(join))
    };
    order_inbox.accept(&joining(2, 3));
    assert_eq!((order_inbox.report().generation, order_inbox.report().epoch), (2, 3));
    let files = ClusterFiles::in_state_directory(directory.path());
    assert_eq!(files.epoch_of_cluster(HERE).unwrap(), 3);
    assert_eq!(files.read_curators(), ["10.0.0.2:7835".to_owned()].into());
    order_inbox.accept(&joining(3, 2));
    assert!(order_inbox.report().error.contains("has been restored since"), "{}", order_inbox.report().error);
    assert_eq!(files.read_order().unwrap().unwrap().generation, 2);
    order_inbox.accept(&joining(4, 3));
    assert_eq!((order_inbox.report().generation, order_inbox.report().error.as_str()), (4, ""));
}

#[test]
fn epoch_that_a_node_has_reported_keeps_no_order_away() {
    let (directory, order_inbox) = inbox();
    let files = ClusterFiles::in_state_directory(directory.path());
    let cluster = authority(1).anchor().cluster;
    files.change_epoch(cluster, EpochChange::Reported(900)).unwrap();
    let join = wire::JoinCluster {
        ticket: vec![5; 32],
        ca_certificate: authority(1).anchor().certificate.clone(),
        curators: vec!["10.0.0.1:7835".to_owned()],
        ..Default::default()
    };
    order_inbox.accept(&wire_order(2, OrderedOperation::Join(join)));
    let report = order_inbox.report();
    assert_eq!((report.generation, report.epoch, report.error.as_str()), (2, 900, ""));
    files.write_statement(&statement(0, 2).sign(&authority(1)).unwrap()).unwrap();
    assert_eq!(order_inbox.report().epoch, 0);
}

#[test]
fn order_with_a_statement_that_the_authority_did_not_sign_is_rejected() {
    let (directory, order_inbox) = inbox();
    let files = ClusterFiles::in_state_directory(directory.path());
    let joining = |generation, statement: Vec<u8>| {
        let join = wire::JoinCluster {
            ticket: vec![5; 32],
            ca_certificate: authority(1).anchor().certificate.clone(),
            curators: vec!["10.0.0.1:7835".to_owned()],
            statement,
            ..Default::default()
        };
        wire_order(generation, OrderedOperation::Join(join))
    };
    let signed = statement(0, 2).sign(&authority(1)).unwrap().to_wire();
    let mut forged = signed.clone();
    forged.signature[0] ^= 1;
    for (generation, sent, reason) in [
        (2, vec![0xff; 9], "the statement cannot be decoded"),
        (3, forged.encode_to_vec(), "no authority of the cluster made it"),
    ] {
        order_inbox.accept(&joining(generation, sent));
        let report = order_inbox.report();
        assert_eq!(report.generation, generation);
        assert!(report.error.contains(reason), "{}", report.error);
        assert_eq!(files.read_order().unwrap(), None);
    }
    order_inbox.accept(&joining(4, signed.encode_to_vec()));
    assert_eq!(order_inbox.report().error, "");
    let order = files.read_order().unwrap().unwrap();
    let OrderKind::Join { statement, .. } = order.what else { panic!("another order") };
    assert_eq!(statement, Some(hex::encode(signed.encode_to_vec())));
}

#[test]
fn certificate_of_an_order_replaces_that_of_the_member_and_no_order() {
    let (directory, order_inbox) = inbox();
    let files = ClusterFiles::in_state_directory(directory.path());
    let renew = |generation, certificate: &[u8]| {
        wire_order(
            generation,
            OrderedOperation::RenewPeer(wire::RenewPeer { certificate: certificate.to_vec() }),
        )
    };
    order_inbox.accept(&founding(2, "ams"));
    let order = files.read_order().unwrap().unwrap();
    order_inbox.accept(&renew(3, b"none"));
    let report = order_inbox.report();
    assert_eq!(report.generation, 3);
    assert!(report.error.contains("runs no member of etcd"), "{}", report.error);

    let (key, now) = (files.read_or_create_key().unwrap(), Clock::system().now());
    let authority = create_authority(HERE, now).unwrap();
    let ca_certificate = hex::encode(&authority.anchor().certificate);
    files.write_credentials(&Credentials { certificate: String::new(), ca_certificate }).unwrap();
    let membership = membership();
    files.write_membership(&membership).unwrap();
    let validity = Validity::starting(now, Duration::from_hours(1));
    let (key, serial) = (PublicKey(key.public_key()), Serial::new([3; 16]));
    let issued = authority.issue_etcd_peer_certificate(&key, membership.address, serial, validity);
    let certificate = issued.unwrap().certificate;
    order_inbox.accept(&renew(4, &certificate));
    let report = order_inbox.report();
    assert_eq!((report.generation, report.error.as_str()), (4, ""));
    assert_eq!(etcd_member::read_peer_certificate(&files), Some(certificate.clone()));
    let stored = files.read_order().unwrap();
    assert_eq!(stored, Some(NodeOrder { generation: 4, ..order }), "it is still the founder");

    order_inbox.accept(&renew(5, b"none"));
    let report = order_inbox.report();
    assert!(report.error.contains("cannot be parsed"), "{}", report.error);
    assert_eq!(etcd_member::read_peer_certificate(&files), Some(certificate), "it stays");
}

#[test]
fn reason_to_follow_no_curator_is_reported_beside_other_problems() {
    let (_directory, order_inbox) = inbox();
    let facts = &order_inbox.0.facts;
    facts.problems.set(NodePart::ControlPlane, Some("etcd does not start".to_owned()));
    facts.refusal.set(Some("no curator is followed".to_owned()));
    assert_eq!(order_inbox.report().error, "etcd does not start; no curator is followed");
    facts.problems.set(NodePart::ControlPlane, None);
    assert_eq!(order_inbox.report().error, "no curator is followed", "another part has no say in it");
    facts.refusal.set(None);
    facts.statements.set(Some("no statement is signed".to_owned()));
    assert_eq!(order_inbox.report().error, "no statement is signed", "by the curator that leads here");
    facts.statements.set(None);
    assert_eq!(order_inbox.report().error, "");
}

#[test]
fn machine_has_left_once_no_node_files_remain() {
    let (directory, order_inbox) = inbox();
    let files = ClusterFiles::in_state_directory(directory.path());
    order_inbox.accept(&founding(2, "ams"));
    files.read_or_create_key().unwrap();
    order_inbox.accept(&wire_order(3, OrderedOperation::Leave(wire::LeaveCluster {})));
    let report = order_inbox.report();
    assert_eq!((report.generation, report.node_key.len()), (2, 32), "it is still a node");
    files.remove_all_except_order().unwrap();
    assert_eq!(order_inbox.report(), wire::ClusterReport { generation: 3, ..Default::default() });
}

#[test]
fn ticket_shows_in_no_text() {
    let join = wire::JoinCluster {
        ticket: vec![0xab; 32],
        ca_certificate: vec![1],
        curators: vec!["10.0.0.1:7835".to_owned()],
        ..Default::default()
    };
    let read = parse_order(MachineId::generate(), &wire_order(1, OrderedOperation::Join(join))).unwrap();
    assert!(!format!("{read:?}").contains("abab"));
    let OrderDecision::Reject(why) = decide_order(&InboxState::default(), &read) else { panic!() };
    assert!(!why.contains("abab"), "{why}");
}
