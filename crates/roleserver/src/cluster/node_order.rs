//! The order that makes a machine a node: found, join or leave.

use std::collections::BTreeMap;
use std::net::IpAddr;

use curator::node_labels;
use curator::tickets::TicketSecret;
use curator_client::cluster::validate_name;
use curator_client::node_id::PublicKey;
use curator_client::pki::TrustAnchor;
use curator_client::statement::SignedStatement;
use model::ids::MachineId;
use model::label::Labels;
use model::role_declaration::Sha256;
use prost::Message as _;
use proto::curator::v1 as wire;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// An order to this machine about a cluster, stored as `order.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct NodeOrder {
    /// Number of the order among those of the shepherd; 0 if a person wrote it.
    #[serde(default)]
    pub generation: i64,
    /// Whether to found a cluster, to join one, or to leave it.
    pub what: OrderKind,
    /// ID of this machine as the shepherd knows it; `None` if the order names none.
    pub machine: Option<MachineId>,
    /// Labels of the node.
    #[serde(default)]
    pub labels: Labels,
    /// Address at which other nodes connect to this one; detected if it is `None`.
    pub address: Option<IpAddr>,
}

/// An image of etcd to restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdImage {
    /// SHA-256 of the image, in hexadecimal digits.
    pub sha256: String,
    /// Version of the etcd that it is of.
    pub etcd_version: String,
}

/// Whether to found a cluster, to join one, or to leave it. `Debug` shows no ticket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OrderKind {
    /// Become the first node of a cluster.
    Found {
        /// UUID of the cluster.
        cluster: Uuid,
        /// Name of the cluster.
        name: String,
        /// Public keys that may claim an owner's certificate, in hexadecimal digits.
        owner_keys: Vec<String>,
        /// SHA-256 of the snapshot to restore, in hexadecimal digits; `None` for a new cluster.
        #[serde(default)]
        snapshot: Option<String>,
        /// The image of etcd to restore with the snapshot; `None` if the objects of Kubernetes are not restored.
        #[serde(default)]
        image: Option<EtcdImage>,
        /// Revocations of after the snapshot: the records in hexadecimal digits, by their etcd keys.
        #[serde(default)]
        revocations: BTreeMap<String, String>,
        /// How often the cluster was restored, including this time.
        #[serde(default)]
        epoch: u64,
    },
    /// Join a cluster as another node.
    Join {
        /// Secret of a ticket, in hexadecimal digits.
        ticket: String,
        /// Certificate of the cluster's authority, DER, in hexadecimal digits.
        ca_certificate: String,
        /// Addresses of curators to register with, `host:port` each.
        curators: Vec<String>,
        /// How often the cluster was restored.
        #[serde(default)]
        epoch: u64,
        /// The newest statement of the cluster's authority, as curators send it, in hexadecimal digits.
        #[serde(default)]
        statement: Option<String>,
    },
    /// Stop being a node: everything that the node runs is stopped, and its files are removed.
    Leave {},
}

impl std::fmt::Debug for OrderKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Found { cluster, name, .. } => {
                f.debug_struct("Found").field("cluster", cluster).field("name", name).finish_non_exhaustive()
            }
            Self::Join { curators, .. } => {
                f.debug_struct("Join").field("curators", curators).finish_non_exhaustive()
            }
            Self::Leave {} => f.write_str("Leave"),
        }
    }
}

/// Why an order cannot be executed, as part of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OrderError(pub String);

impl NodeOrder {
    /// The epoch of the order's cluster; 0 for an order to leave.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        match self.what {
            OrderKind::Found { epoch, .. } | OrderKind::Join { epoch, .. } => epoch,
            OrderKind::Leave {} => 0,
        }
    }

    /// The cluster of the order; `None` for an order to leave.
    #[must_use]
    pub fn cluster(&self) -> Option<Uuid> {
        match &self.what {
            OrderKind::Leave {} => None,
            OrderKind::Found { cluster, .. } => Some(*cluster),
            OrderKind::Join { ca_certificate, .. } => ca_cluster(ca_certificate),
        }
    }

    /// Validates the fields of the order.
    pub fn validate(&self) -> Result<(), OrderError> {
        node_labels::validate_labels(&self.labels).map_err(OrderError)?;
        match &self.what {
            OrderKind::Found { name, owner_keys, snapshot, image, .. } => {
                validate_name(name).map_err(OrderError)?;
                if let Some(snapshot) = snapshot {
                    parse_snapshot(snapshot)?;
                }
                if let Some(image) = image {
                    parse_snapshot(&image.sha256)?;
                    if snapshot.is_none() {
                        return Err(OrderError("it has an image of etcd and no snapshot".to_owned()));
                    }
                }
                if owner_keys.is_empty() {
                    return Err(OrderError("a cluster needs an owner's key".to_owned()));
                }
                owner_keys.iter().try_for_each(|key| parse_key(key).map(drop))
            }
            OrderKind::Join { ticket, ca_certificate, curators, statement, .. } => {
                parse_ticket(ticket)?;
                let anchor = parse_anchor(ca_certificate)?;
                if let Some(statement) = statement {
                    parse_statement(statement, &anchor)?;
                }
                if curators.is_empty() {
                    return Err(OrderError("it names no curator to register with".to_owned()));
                }
                Ok(())
            }
            OrderKind::Leave {} => Ok(()),
        }
    }
}

/// Parses an owner's public key.
pub fn parse_key(text: &str) -> Result<PublicKey, OrderError> {
    let bytes =
        hex::decode(text).map_err(|_| OrderError("an owner's key is no hexadecimal text".to_owned()))?;
    PublicKey::from_slice(&bytes).map_err(OrderError)
}

/// Parses the digest of a snapshot, or of its image of etcd.
pub fn parse_snapshot(text: &str) -> Result<Sha256, OrderError> {
    let none = || OrderError("the name of the snapshot is not a SHA-256 in hexadecimal digits".to_owned());
    let bytes = hex::decode(text).map_err(|_| none())?;
    bytes.try_into().map(Sha256).map_err(|_| none())
}

/// Parses the secret of a ticket. The error shows nothing of it.
pub fn parse_ticket(text: &str) -> Result<TicketSecret, OrderError> {
    let bytes = hex::decode(text).map_err(|_| OrderError("the ticket is no hexadecimal text".to_owned()))?;
    TicketSecret::from_slice(&bytes).map_err(OrderError)
}

/// Parses the certificate of a cluster's authority.
pub fn parse_anchor(text: &str) -> Result<TrustAnchor, OrderError> {
    let der =
        hex::decode(text).map_err(|_| OrderError("the certificate is no hexadecimal text".to_owned()))?;
    TrustAnchor::parse(&der).map_err(|error| OrderError(error.to_string()))
}

/// Parses a statement of the cluster's authority, and verifies it.
pub fn parse_statement(text: &str, anchor: &TrustAnchor) -> Result<SignedStatement, OrderError> {
    let bytes =
        hex::decode(text).map_err(|_| OrderError("the statement is no hexadecimal text".to_owned()))?;
    let sent = wire::SignedStatement::decode(bytes.as_slice())
        .map_err(|_| OrderError("the statement cannot be decoded".to_owned()))?;
    SignedStatement::verify(&sent, std::slice::from_ref(anchor))
        .map_err(|error| OrderError(error.to_string()))
}

/// The cluster of an authority's certificate, which is in hexadecimal digits; `None` if it cannot be parsed.
pub(super) fn ca_cluster(certificate: &str) -> Option<Uuid> {
    Some(TrustAnchor::parse(&hex::decode(certificate).ok()?).ok()?.cluster)
}
