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
mod tests;
