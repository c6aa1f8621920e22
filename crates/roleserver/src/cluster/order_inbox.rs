//! Accept or reject cluster orders from a shepherd, and report on them.
//!
//! The shepherd repeats an order in its heartbeat responses until the machine has reported on it. The order is durable
//! before it is reported, and a newer order replaces an older one by its number. Each report is complete and made from
//! the files on the disk. So the shepherd can tell a machine that lost its disk from one where nothing happened, even
//! if the shepherd lost its own memory.
//!
//! An order alone does not move a node to another cluster: the machine has to be ordered to leave first, which stops
//! what it runs and removes its files. Otherwise one wrong row in a database would take a member away from a working
//! cluster.
//!
//! An order also contains the epoch of its cluster. An epoch that is lower than the highest one that an order or a
//! statement has proved to this machine is rejected. A higher one takes effect when the order is accepted, also for a node
//! that stays in the cluster: it keeps its key, its certificate and its services, and connects to other curators.
//!
//! Three orders are no orders to be something. One has a certificate for the etcd member of a node
//! ([`peer_order`][crate::cluster::peer_order]), one another authority of its cluster (`authority_replacement`), and one
//! keys of Kubernetes Secrets (`secret_keys`). They do not replace the stored order, which only gets their number.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use curator_client::clock::Clock;
use model::ids::MachineId;
use proto::agent::v1 as wire;
use proto::agent::v1::cluster_order::Operation as OrderedOperation;

use crate::cluster::files::{ClusterFiles, ClusterFilesError};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_order::{EtcdImage, NodeOrder, OrderError, OrderKind, ca_cluster};
use crate::cluster::node_problems::NodePart;
use crate::cluster::order_decision::{InboxState, OrderDecision, decide_order};
use crate::cluster::order_inbox::authority_replacement::{follow_authority, report_replacement};
use crate::cluster::order_inbox::secret_keys::{report_secret_keys, store_secret_keys};
use crate::cluster::peer_order::{PeerOrderDecision, carry_out_peer_order};

mod authority_replacement;
mod secret_keys;

/// Parses an order. The error shows nothing of a ticket.
fn parse_order(machine: MachineId, order: &wire::ClusterOrder) -> Result<NodeOrder, OrderError> {
    let address = match order.address.as_str() {
        "" => None,
        text => {
            Some(text.parse().map_err(|_| OrderError(format!("the address {text:?} is not an IP address")))?)
        }
    };
    let what = match order.operation.as_ref() {
        Some(OrderedOperation::Found(found)) => OrderKind::Found {
            cluster: found
                .cluster_id
                .parse()
                .map_err(|_| OrderError("the id of the cluster is no UUID".to_owned()))?,
            name: found.name.clone(),
            owner_keys: found.owner_keys.iter().map(hex::encode).collect(),
            snapshot: Some(hex::encode(&found.snapshot_sha256)).filter(|text| !text.is_empty()),
            image: found.image.as_ref().map(|image| EtcdImage {
                sha256: hex::encode(&image.sha256),
                etcd_version: image.etcd_version.clone(),
            }),
            revocations: found
                .revocations
                .iter()
                .map(|record| (record.key.clone(), hex::encode(&record.value)))
                .collect(),
            epoch: found.epoch,
        },
        Some(OrderedOperation::Join(join)) => OrderKind::Join {
            ticket: hex::encode(&join.ticket),
            ca_certificate: hex::encode(&join.ca_certificate),
            curators: join.curators.clone(),
            epoch: join.epoch,
            statement: Some(hex::encode(&join.statement)).filter(|text| !text.is_empty()),
        },
        Some(OrderedOperation::Leave(_)) => OrderKind::Leave {},
        // A certificate, another authority, or keys are no order to be something.
        Some(
            OrderedOperation::RenewPeer(_)
            | OrderedOperation::ReplaceAuthority(_)
            | OrderedOperation::EncryptSecrets(_),
        )
        | None => {
            return Err(OrderError("its operation is not known to this release".to_owned()));
        }
    };
    let labels = order.labels.clone().into_iter().collect();
    Ok(NodeOrder { generation: order.generation, what, machine: Some(machine), labels, address })
}

/// The machine's side of orders and reports. Clones share their state.
#[derive(Clone, Debug)]
pub struct OrderInbox(Arc<InboxInner>);

#[derive(Debug)]
struct InboxInner {
    machine: MachineId,
    files: ClusterFiles,
    facts: NodeFacts,
    /// The newest order that was not accepted, and why.
    rejected: Mutex<Option<RejectedOrder>>,
}

#[derive(Debug)]
struct RejectedOrder {
    generation: i64,
    why: Rejection,
}

/// Why an order was not accepted.
#[derive(Debug)]
enum Rejection {
    /// The order can never be accepted, and is reported as done with this error.
    Permanent(String),
    /// It could not be stored now, and has to be sent again.
    Temporary(String),
}

/// What an order from a heartbeat response has changed.
#[derive(Clone, Copy, Debug)]
enum Acceptance {
    /// Nothing: the order is not newer than the stored one.
    Ignored,
    /// An order about what this machine has to be.
    Order,
    /// A certificate for its etcd member.
    Certificate,
    /// Another authority of its cluster.
    Authority,
    /// Keys of Kubernetes Secrets.
    Keys,
}

impl OrderInbox {
    /// The inbox of this machine.
    #[must_use]
    pub fn new(machine: MachineId, files: ClusterFiles, facts: NodeFacts) -> Self {
        Self(Arc::new(InboxInner { machine, files, facts, rejected: Mutex::default() }))
    }

    /// Accepts or rejects an order from a heartbeat response.
    pub fn accept(&self, order: &wire::ClusterOrder) {
        let InboxInner { files, facts, rejected: refused, .. } = &*self.0;
        let taken = match &order.operation {
            Some(OrderedOperation::RenewPeer(renew)) => {
                use_certificate(files, order.generation, &renew.certificate)
            }
            Some(OrderedOperation::ReplaceAuthority(next)) => follow_authority(files, order.generation, next),
            Some(OrderedOperation::EncryptSecrets(keys)) => {
                store_secret_keys(files, facts, order.generation, keys)
            }
            _ => self.store_order(order),
        };
        let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        match taken {
            Ok(Acceptance::Ignored) => {}
            Ok(Acceptance::Certificate) => {
                let generation = order.generation;
                tracing::info!(generation, "the etcd member of this machine has a certificate by an order");
                *refused = None;
            }
            Ok(Acceptance::Authority) => {
                let generation = order.generation;
                tracing::warn!(
                    generation,
                    "this machine follows another authority of its cluster by an order"
                );
                *refused = None;
            }
            Ok(Acceptance::Keys) => {
                let generation = order.generation;
                tracing::info!(generation, "this machine has keys of Kubernetes Secrets by an order");
                *refused = None;
            }
            Ok(Acceptance::Order) => {
                tracing::info!(generation = order.generation, "this machine accepted a cluster order");
                *refused = None;
                // These problems were about the previous order.
                facts.problems.clear_parts(&[NodePart::Enrolment, NodePart::ControlPlane]);
                facts.order_changed.set(());
            }
            Err(why) => {
                if refused.as_ref().is_none_or(|refused| refused.generation != order.generation) {
                    let (Rejection::Permanent(why) | Rejection::Temporary(why)) = &why;
                    tracing::warn!(
                        generation = order.generation,
                        reason = why,
                        "a cluster order was not accepted"
                    );
                }
                *refused = Some(RejectedOrder { generation: order.generation, why });
            }
        }
    }

    /// Stores an order about what this machine has to be, if it is accepted.
    fn store_order(&self, order: &wire::ClusterOrder) -> Result<Acceptance, Rejection> {
        let InboxInner { machine, files, facts, .. } = &*self.0;
        let never = |error: OrderError| Rejection::Permanent(error.to_string());
        let cannot = |error: ClusterFilesError| Rejection::Temporary(error.to_string());
        let order = parse_order(*machine, order).map_err(never)?;
        match decide_order(&read_context(files).map_err(cannot)?, &order) {
            OrderDecision::Ignore => Ok(Acceptance::Ignored),
            OrderDecision::Reject(why) => Err(Rejection::Permanent(why)),
            OrderDecision::Accept => {
                adopt_epoch(&order, files, facts).map_err(Rejection::Temporary)?;
                // It is of before this order: the cluster may have been restored with the former authority.
                files.remove_next_authority().map_err(cannot)?;
                files.write_order(&order).map(|()| Acceptance::Order).map_err(cannot)
            }
        }
    }

    /// Reports the stored state. A file that cannot be read is an error in the report, and does not make the report
    /// shorter.
    #[must_use]
    pub fn report(&self) -> wire::ClusterReport {
        let InboxInner { files, facts, rejected: refused, .. } = &*self.0;
        let mut errors = Vec::new();
        let mut reported = |error: ClusterFilesError| errors.push(error.to_string());
        // First: while the other files change with the authority, the report still has the one that replaces it.
        let replacing = report_replacement(files, facts).map_err(&mut reported);
        let (next_authority, next_authority_step) = replacing.unwrap_or_default();
        let order = files.read_order().map_err(&mut reported).ok().flatten();
        let key = files.read_key().map_err(&mut reported).ok().flatten();
        let credentials = files.read_credentials().map_err(&mut reported).ok().flatten();
        // A machine that is no node reports nothing of a cluster.
        let secrets = report_secret_keys(files).map_err(&mut reported).unwrap_or_default();
        let secrets = key.is_some().then_some(secrets);
        let programs = facts.programs.latest().unwrap_or_default();
        let mut report = wire::ClusterReport {
            generation: order.as_ref().map_or(0, |order| order.generation),
            node_key: key.map(|key| key.public_key().to_vec()).unwrap_or_default(),
            ca_certificate: credentials
                .and_then(|kept| hex::decode(kept.ca_certificate).ok())
                .unwrap_or_default(),
            address: facts.address.latest().map(|address| address.to_string()).unwrap_or_default(),
            error: String::new(),
            epoch: files
                .read_epoch()
                .map_err(&mut reported)
                .ok()
                .flatten()
                .map_or(0, |(_, epoch)| epoch.highest),
            next_authority,
            next_authority_step,
            etcd_version: programs.etcd.unwrap_or_default(),
            etcdutl_version: programs.etcdutl.unwrap_or_default(),
            secrets,
        };
        // A machine has left its cluster only when its key and credentials are removed.
        let leaving = order.is_some_and(|order| order.what == OrderKind::Leave {});
        if leaving && (!report.node_key.is_empty() || !report.ca_certificate.is_empty()) {
            report.generation -= 1;
        }
        errors.extend(facts.problems.describe());
        errors.extend(facts.refusal.latest().flatten());
        errors.extend(facts.statements.problem());
        // An order to found or to join waits for other things.
        if !report.ca_certificate.is_empty() {
            errors.extend(facts.unprotected.latest().unwrap_or_default());
        }
        errors.extend(files.find_slow_write().map(|write| write.describe()));
        let refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
        match refused.as_ref().filter(|refused| refused.generation > report.generation) {
            Some(RejectedOrder { generation, why: Rejection::Permanent(why) }) => {
                report.generation = *generation;
                errors = vec![why.clone()];
            }
            // The shepherd sees no report on this order and sends it again.
            Some(RejectedOrder { why: Rejection::Temporary(why), .. }) => errors.push(why.clone()),
            None => {}
        }
        report.error = errors.join("; ");
        report
    }
}

/// Uses the certificate of an order for the etcd member of this node.
fn use_certificate(
    files: &ClusterFiles,
    generation: i64,
    certificate: &[u8],
) -> Result<Acceptance, Rejection> {
    // etcd has no other clock than that of the host.
    let now = Clock::system().now();
    let decided = carry_out_peer_order(files, generation, certificate, now);
    match decided.map_err(|error| Rejection::Temporary(error.to_string()))? {
        PeerOrderDecision::Ignore => Ok(Acceptance::Ignored),
        PeerOrderDecision::Reject(why) => Err(Rejection::Permanent(why)),
        PeerOrderDecision::Keep | PeerOrderDecision::Replace => Ok(Acceptance::Certificate),
    }
}

/// Applies an order's epoch, and its list of curators, to an existing node before the rest of the order takes effect.
/// Connections to leaders of an earlier epoch are closed.
pub(super) fn adopt_epoch(order: &NodeOrder, files: &ClusterFiles, facts: &NodeFacts) -> Result<(), String> {
    let Some(cluster) = order.cluster() else { return Ok(()) };
    let cannot = |error: ClusterFilesError| error.to_string();
    if order.epoch() <= files.known_epoch(cluster).map_err(cannot)?.proved {
        return Ok(());
    }
    let curators: Option<BTreeSet<String>> = match &order.what {
        OrderKind::Join { curators, .. } => Some(curators.iter().cloned().collect()),
        _ => None,
    };
    if let Some(curators) = &curators {
        files.write_curators(curators).map_err(cannot)?;
    }
    let connection = facts.connection.latest().filter(|connection| connection.anchor.cluster == cluster);
    let Some(connection) = connection else {
        return files.raise_epoch(cluster, order.epoch()).map_err(cannot);
    };
    connection.curators.set_directory(curators.clone().unwrap_or_default());
    connection.curators.raise_epoch(order.epoch())?;
    if let Some(curators) = curators {
        facts.curators.set(curators);
    }
    Ok(())
}

fn read_context(files: &ClusterFiles) -> Result<InboxState, ClusterFilesError> {
    let credentials = files.read_credentials()?;
    Ok(InboxState {
        order: files.read_order()?,
        cluster: credentials.and_then(|kept| ca_cluster(&kept.ca_certificate)),
        founding: files.read_authority()?.is_some(),
        proved_epoch: files.read_epoch()?.map(|(cluster, epoch)| (cluster, epoch.proved)),
    })
}

#[cfg(test)]
mod tests {
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
        assert!(
            order_inbox.report().error.contains("has been restored since"),
            "{}",
            order_inbox.report().error
        );
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
}
