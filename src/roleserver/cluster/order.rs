//! What a machine is asked to be in a cluster.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::curator::cluster::check_name;
use crate::curator::labels;
use crate::curator::node_id::PublicKey;
use crate::curator::pki::Anchor;
use crate::curator::tickets::Secret;
use crate::model::declaration::Sha256;
use crate::model::ids::MachineId;
use crate::model::label::Labels;

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub struct Order {
    /// Which order of whoever asks it is; 0 where a person wrote it.
    #[serde(default)]
    pub generation: i64,
    /// To found a cluster, to join one, or to leave it.
    pub what: What,
    /// The machine this is, as whoever asks knows it.
    pub machine: Option<MachineId>,
    /// What is to be said of the node.
    #[serde(default)]
    pub labels: Labels,
    /// The address at which other nodes reach this one; found out when it is not said.
    pub address: Option<IpAddr>,
}

/// To found a cluster, to join one, or to leave it. `Debug` shows no ticket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// To be the first node of a cluster.
    Found {
        /// Its id.
        cluster: Uuid,
        /// Its name.
        name: String,
        /// Public keys that may claim an owner's certificate, in hexadecimal digits.
        owner_keys: Vec<String>,
        /// SHA-256 of the snapshot that the cluster is brought back from, in hexadecimal digits; none of a new one.
        #[serde(default)]
        snapshot: Option<String>,
        /// How often the cluster was restored, this time included.
        #[serde(default)]
        epoch: u64,
    },
    /// To be one more.
    Join {
        /// The secret of a ticket, in hexadecimal digits.
        ticket: String,
        /// The certificate of the cluster's authority, DER, in hexadecimal digits.
        ca_certificate: String,
        /// `host:port` of curators.
        curators: Vec<String>,
        /// How often the cluster was restored.
        #[serde(default)]
        epoch: u64,
    },
    /// To be no node any more: what runs as one ends, and what was kept of it is removed.
    Leave {},
}

impl std::fmt::Debug for What {
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

/// Why an order cannot be carried out, as a part of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OrderError(pub String);

impl Order {
    /// The epoch of the cluster that it speaks of; 0 where it speaks of none.
    #[must_use]
    pub const fn epoch(&self) -> u64 {
        match self.what {
            What::Found { epoch, .. } | What::Join { epoch, .. } => epoch,
            What::Leave {} => 0,
        }
    }

    /// Whether it can be carried out as far as its words go.
    pub fn check(&self) -> Result<(), OrderError> {
        labels::check(&self.labels).map_err(OrderError)?;
        match &self.what {
            What::Found { name, owner_keys, snapshot, .. } => {
                check_name(name).map_err(OrderError)?;
                if let Some(snapshot) = snapshot {
                    parse_snapshot(snapshot)?;
                }
                if owner_keys.is_empty() {
                    return Err(OrderError("a cluster needs an owner's key".to_owned()));
                }
                owner_keys.iter().try_for_each(|key| parse_key(key).map(drop))
            }
            What::Join { ticket, ca_certificate, curators, .. } => {
                parse_ticket(ticket)?;
                parse_anchor(ca_certificate)?;
                if curators.is_empty() {
                    return Err(OrderError("it says no curator to register with".to_owned()));
                }
                Ok(())
            }
            What::Leave {} => Ok(()),
        }
    }
}

/// Reads an owner's key.
pub fn parse_key(text: &str) -> Result<PublicKey, OrderError> {
    let bytes =
        hex::decode(text).map_err(|_| OrderError("an owner's key is no hexadecimal text".to_owned()))?;
    PublicKey::from_slice(&bytes).map_err(OrderError)
}

/// Reads what a snapshot is known by.
pub fn parse_snapshot(text: &str) -> Result<Sha256, OrderError> {
    let none = || OrderError("the snapshot is named by no SHA-256 in hexadecimal digits".to_owned());
    let bytes = hex::decode(text).map_err(|_| none())?;
    bytes.try_into().map(Sha256).map_err(|_| none())
}

/// Reads a ticket. The error shows nothing of it.
pub fn parse_ticket(text: &str) -> Result<Secret, OrderError> {
    let bytes = hex::decode(text).map_err(|_| OrderError("the ticket is no hexadecimal text".to_owned()))?;
    Secret::from_slice(&bytes).map_err(OrderError)
}

/// Reads the certificate of an authority.
pub fn parse_anchor(text: &str) -> Result<Anchor, OrderError> {
    let der =
        hex::decode(text).map_err(|_| OrderError("the certificate is no hexadecimal text".to_owned()))?;
    Anchor::parse(&der).map_err(|error| OrderError(error.to_string()))
}
