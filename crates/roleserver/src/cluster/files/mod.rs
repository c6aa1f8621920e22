//! Files of the node's cluster state: order, key, credentials, membership, roles, epoch.
//!
//! They are in the directory `cluster` below the state directory.
//!
//! | file | written by | content |
//! | --- | --- | --- |
//! | `order.json` | `order_inbox`, or an operator | what the machine is ordered to be; holds a ticket, mode 0600 |
//! | `node_key.pk8` | `node_enrolment`, once | the key of the node, mode 0600 |
//! | `authority.json` | `node_enrolment`, while founding | the new cluster's authority with its key, mode 0600 |
//! | `membership.json` | `control_plane` | etcd's data directory and the arguments it was started with |
//! | `etcd_version.json` | `etcd_start` | the version of the etcd that last ran on the data of the membership |
//! | `roles.json` | `control_plane` while founding, then `roles` | the roles of the node |
//! | `credentials.json` | `node_enrolment`, `control_plane`, `certificate_renewal` | both certificates |
//! | `curator.json` | `curator_certificate` | the certificate that the curator of the node shows |
//! | `curators.json` | `node_enrolment`, `order_inbox`, `curator_directory` | addresses of curators |
//! | `former_curators.json` | `curator_directory` | those before the last change, until one of the new ones is verified |
//! | `proved_curators.json` | `curator_directory` | addresses at which curators have proved themselves |
//! | `epoch.json` | `order_inbox`, `node_enrolment`, `node_facts` | highest epoch, and the highest proved one |
//! | `statement.json` | `node_facts` | newest statement of the authority, which says who is no curator any more |
//! | `statement_stored.json` | `node_facts` | mark that there was a statement: without it, a missing one is no damage |
//! | `next_authority.json` | `authority_order`, or an operator | the authority that replaces a stolen one, mode 0600 |
//! | `secret_keys.json` | `order_inbox` | keys of Kubernetes Secrets, mode 0600 |
//! | `secret_keys_status.json` | `kubernetes` | which of these keys the API server was started with |
//! | `snapshot` | `node_enrolment`, while restoring | the snapshot to restore, with its secrets, mode 0600 |
//! | `image` | `node_enrolment`, while restoring | the image of etcd to restore, with its secrets, mode 0600 |
//! | `declarations.json`, `about.json` | `services` | see [`persisted`][crate::cluster::services::persisted] |
//! | `services/` | `services` | a directory for each service |
//! | `artefacts/` | `services` | fetched programs, by their digests |
//! | `kubernetes.json`, `kubernetes-*.json` | `kubernetes` | see [`kubernetes`][crate::cluster::kubernetes] |
//! | `kubernetes/` | `kubernetes` | key material, and directories of components |
//! | `kubernetes/bundles/` | `kubernetes` | bundles of programs, by their digests |
//! | `etcd/` | etcd, `control_plane`, `peer_*` | its data, sockets, TLS files, revoked peers, last start |
//!
//! Truth are the order, the key, the authority, the one that replaces it, the membership, the credentials, the epoch,
//! the statement, the keys of Secrets and etcd's data: nothing here can replace them. Damaged truth is an error that names
//! the file and the way back, and stays as it is. A missing statement is damaged if its mark is there. Another key would make it another node, and a guessed epoch or a lost
//! statement could make it follow the wrong curators.
//!
//! Everything else is a hint, which comes again from a curator or from the running programs. Damaged roles count as
//! absent and never as "no roles": a node that read them so would stop its part of the control plane. A damaged list of
//! curators counts as empty, and a damaged certificate of a curator as absent. A curator itself stores nothing here: its
//! records are in etcd.
//!
//! A file is also damaged if its format is that of a newer release ([`state_format`][crate::state_format]), or if a
//! directory is in its place. A hint that is written moves such a directory out of the way.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use curator_client::identity::{Identity, IdentityError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::atomic_file::{self, Durability};
use crate::cluster::node_order::NodeOrder;
use crate::disk::{self, PendingWrite};
use crate::state_format::check_format;

mod curator_certificate;
mod curators;
mod epoch;
mod etcd_files;
mod next_authority;
mod roles;
mod secret_keys;
mod statement;

pub use next_authority::NextAuthority;
#[cfg(test)]
pub(super) use secret_keys::tests as secret_keys_tests;
pub use secret_keys::{SecretKeysOrder, SecretKeysStatus, SecretsProvider};

/// File with the key of the node.
const NODE_KEY: &str = "node_key.pk8";
/// Largest file that is read, in bytes.
const FILE_LIMIT: u64 = 4 << 20;

/// The directory of a node's cluster state.
#[derive(Clone, Debug)]
pub struct ClusterFiles {
    path: PathBuf,
}

/// Why a file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterFilesError {
    /// A system call failed.
    #[error("{operation} {path} failed: {source}", path = path.display())]
    Io {
        /// What was attempted, such as "reading".
        operation: &'static str,
        /// File or directory that it was attempted on.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The content is not what this program writes.
    #[error(
        "the file {path} is damaged ({reason}), and nothing else has its content; restore it from a copy of this disk, \
         or without one replace this node by `shepherdctl cluster scale`, which removes unhealthy nodes first",
        path = path.display()
    )]
    Damaged {
        /// Path of the damaged file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: String,
    },
    /// The statement of the cluster's authority is damaged.
    #[error(
        "the file {path} is damaged ({reason}), so this node follows no curator; what runs here continues; find out what \
         has damaged it, and restore it from a copy of this disk or remove it and statement_stored.json: without both \
         this node trusts any node of its cluster, a revoked one too, until a curator sends the next statement",
        path = path.display()
    )]
    DamagedStatement {
        /// Path of the damaged file.
        path: PathBuf,
        /// What is wrong with the content.
        reason: String,
    },
    /// The node's key cannot be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

impl ClusterFilesError {
    /// Whether a directory is in the place of the file.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == ErrorKind::IsADirectory)
    }
}

/// A node's certificate and its issuer's. DER in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// Certificate of the node.
    pub certificate: String,
    /// Certificate of the cluster's authority.
    pub ca_certificate: String,
}

/// An authority that is not in etcd yet. DER in hexadecimal digits. `Debug` shows only the certificate.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredAuthority {
    /// Certificate of the authority.
    pub certificate: String,
    /// Private key, PKCS #8.
    pub private_key: String,
}

impl std::fmt::Debug for StoredAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptAuthority").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The etcd membership of this node, as it began. Everything but `member` stays the same while etcd runs, because its
/// arguments must not change. A member that was off may come back with another `address`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EtcdMembership {
    /// etcd's member ID; `None` until the first member of a new cluster has responded.
    pub member: Option<u64>,
    /// Name of its data directory below `etcd/`.
    pub data: String,
    /// IP address in its peer URL.
    pub address: IpAddr,
    /// Members at the beginning, including this one: names and peer URLs in the syntax of etcd's `--initial-cluster`.
    pub initial_cluster: String,
    /// Whether it is the first member of a new cluster.
    pub new_cluster: bool,
    /// Epoch of the cluster when the membership began.
    #[serde(default)]
    pub epoch: u64,
}

impl ClusterFiles {
    /// The directory `cluster` below a state directory. It is created with the first file: a machine that is no node
    /// writes nothing, and one with a read-only disk can still do the rest of its work.
    #[must_use]
    pub fn in_state_directory(state_directory: &Path) -> Self {
        Self { path: state_directory.join("cluster") }
    }

    /// Working directory of etcd, with its data and TLS files.
    #[must_use]
    pub fn etcd_directory(&self) -> PathBuf {
        self.path.join("etcd")
    }

    /// Parent of the directories of services.
    #[must_use]
    pub fn services_directory(&self) -> PathBuf {
        self.path.join("services")
    }

    /// Directory of the artefact store.
    #[must_use]
    pub fn artefacts_directory(&self) -> PathBuf {
        self.path.join("artefacts")
    }

    /// Directory of everything that belongs to Kubernetes.
    #[must_use]
    pub fn kubernetes_directory(&self) -> PathBuf {
        self.path.join("kubernetes")
    }

    /// Directory of the Kubernetes bundle store.
    #[must_use]
    pub fn bundles_directory(&self) -> PathBuf {
        self.path.join("kubernetes/bundles")
    }

    /// Reads the order of this machine; `None` if it has none.
    pub fn read_order(&self) -> Result<Option<NodeOrder>, ClusterFilesError> {
        self.read_json("order.json")
    }

    /// Stores an order, replacing the previous one.
    pub fn write_order(&self, order: &NodeOrder) -> Result<(), ClusterFilesError> {
        self.write_json("order.json", order)
    }

    /// Removes every stored file except the order.
    pub fn remove_all_except_order(&self) -> Result<(), ClusterFilesError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| ClusterFilesError::Io { operation: "removing", path, source }
        };
        let entries = match std::fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(failed(&self.path)(source)),
        };
        for entry in entries {
            let entry = entry.map_err(failed(&self.path))?;
            if entry.file_name() == "order.json" {
                continue;
            }
            let path = entry.path();
            let directory = entry.file_type().map_err(failed(&path))?.is_dir();
            let removed =
                if directory { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(failed(&path))?;
        }
        Ok(())
    }

    /// Reads the key of the node; `None` if it has none.
    pub fn read_key(&self) -> Result<Option<Identity>, ClusterFilesError> {
        let Some(bytes) = self.read_bytes(NODE_KEY, FILE_LIMIT)? else { return Ok(None) };
        let key = Identity::from_pkcs8(&bytes);
        key.map(Some).map_err(|error| self.damaged_error(NODE_KEY, error.to_string()))
    }

    /// Reads the key of the node, and creates it if it does not exist.
    pub fn read_or_create_key(&self) -> Result<Identity, ClusterFilesError> {
        if let Some(key) = self.read_key()? {
            return Ok(key);
        }
        let key = Identity::generate()?;
        self.replace_file(NODE_KEY, key.pkcs8())?;
        Ok(key)
    }

    /// Reads the authority of a cluster that is being founded.
    pub fn read_authority(&self) -> Result<Option<StoredAuthority>, ClusterFilesError> {
        self.read_json("authority.json")
    }

    /// Stores the authority of a cluster that is being founded.
    pub fn write_authority(&self, authority: &StoredAuthority) -> Result<(), ClusterFilesError> {
        self.write_json("authority.json", authority)
    }

    /// Removes the stored authority, once it is in etcd.
    pub fn remove_authority(&self) -> Result<(), ClusterFilesError> {
        self.remove_file("authority.json")
    }

    /// Reads the current etcd membership; `None` if there is none.
    pub fn read_membership(&self) -> Result<Option<EtcdMembership>, ClusterFilesError> {
        self.read_json("membership.json")
    }

    /// Stores a new membership, or one whose member ID became known.
    pub fn write_membership(&self, membership: &EtcdMembership) -> Result<(), ClusterFilesError> {
        self.write_json("membership.json", membership)
    }

    /// Ends a membership: removes its data first, then its pair, and then the file that refers to it.
    pub fn remove_membership(&self, membership: &EtcdMembership) -> Result<(), ClusterFilesError> {
        let data = self.etcd_directory().join(&membership.data);
        match disk::run_beside(&data, || std::fs::remove_dir_all(&data)) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                return Err(ClusterFilesError::Io { operation: "removing", path: data, source });
            }
            _ => {}
        }
        self.remove_peer_pair()?;
        self.remove_file(etcd_files::ETCD_VERSION)?;
        self.remove_file("membership.json")
    }

    /// Reads the node's certificate; `None` until it is a node.
    pub fn read_credentials(&self) -> Result<Option<Credentials>, ClusterFilesError> {
        self.read_json("credentials.json")
    }

    /// Stores the node's certificate.
    pub fn write_credentials(&self, credentials: &Credentials) -> Result<(), ClusterFilesError> {
        self.write_json("credentials.json", credentials)
    }

    /// The slow write below the state directory, if there is one. A record of a program that waits for the disk is not in
    /// this directory, and holds the node up as well.
    #[must_use]
    pub fn find_slow_write(&self) -> Option<PendingWrite> {
        disk::find_slow_write(self.path.parent().unwrap_or(&self.path))
    }

    /// Path of the snapshot that is fetched for a restoration.
    #[must_use]
    pub fn snapshot_path(&self) -> PathBuf {
        self.path.join("snapshot")
    }

    /// Removes the snapshot, once all of it is in etcd.
    pub fn remove_snapshot(&self) -> Result<(), ClusterFilesError> {
        self.remove_file("snapshot")
    }

    /// Path of the image of etcd that is fetched for a restoration.
    #[must_use]
    pub fn image_path(&self) -> PathBuf {
        self.path.join("image")
    }

    /// Removes the image of etcd, once etcd has it.
    pub fn remove_image(&self) -> Result<(), ClusterFilesError> {
        self.remove_file("image")
    }

    /// Replaces a file in etcd's directory, and returns its path.
    pub fn write_etcd_file(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, ClusterFilesError> {
        let path = self.etcd_directory().join(name);
        create_directory(&self.etcd_directory())?;
        atomic_file::replace_file(&path, bytes, Durability::Durable)
            .map_err(|source| ClusterFilesError::Io { operation: "writing", path: path.clone(), source })?;
        Ok(path)
    }

    /// Replaces a hint in etcd's directory.
    pub(super) fn write_etcd_hint(&self, name: &str, bytes: &[u8]) -> Result<(), ClusterFilesError> {
        let path = self.etcd_directory().join(name);
        create_directory(&self.etcd_directory())?;
        atomic_file::replace_hint(&path, bytes, Durability::Durable).map_err(|source| ClusterFilesError::Io {
            operation: "writing",
            path,
            source,
        })
    }

    /// Reads a file of the node. A directory in its place is damage.
    fn read_bytes(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ClusterFilesError> {
        self.read_file(name, limit).map_err(|error| {
            if error.is_directory() {
                self.damaged_error(name, "it is a directory".to_owned())
            } else {
                error
            }
        })
    }

    fn read_file(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, ClusterFilesError> {
        use std::io::Read as _;
        let path = self.path.join(name);
        let read = std::fs::File::open(&path).and_then(|file| {
            let mut bytes = Vec::new();
            file.take(limit).read_to_end(&mut bytes)?;
            Ok(bytes)
        });
        match read {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ClusterFilesError::Io { operation: "reading", path, source }),
        }
    }

    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ClusterFilesError> {
        self.read_json_limited(name, FILE_LIMIT)
    }

    /// Reads a JSON file of at most `limit` bytes; a longer file counts as damaged.
    pub(super) fn read_json_limited<T: DeserializeOwned>(
        &self,
        name: &str,
        limit: u64,
    ) -> Result<Option<T>, ClusterFilesError> {
        let Some(bytes) = self.read_bytes(name, limit)? else { return Ok(None) };
        // The position only: the content may be secret.
        let place = |error: serde_json::Error| format!("line {}, column {}", error.line(), error.column());
        check_format(&bytes)
            .and_then(|()| serde_json::from_slice(&bytes).map_err(place))
            .map(Some)
            .map_err(|reason| self.damaged_error(name, reason))
    }

    /// The error for a file whose content is not what this program writes.
    pub(super) fn damaged_error(&self, name: &str, reason: String) -> ClusterFilesError {
        ClusterFilesError::Damaged { path: self.path.join(name), reason }
    }

    /// Replaces a JSON file that is truth durably. A directory in its place is an error.
    fn write_json<T: Serialize>(&self, name: &str, value: &T) -> Result<(), ClusterFilesError> {
        let bytes =
            serde_json::to_vec_pretty(value).map_err(|error| self.damaged_error(name, error.to_string()))?;
        self.replace_file(name, &bytes)
    }

    /// Replaces a JSON file that is a hint durably. A directory in its place is moved away.
    pub(super) fn write_hint<T: Serialize>(&self, name: &str, value: &T) -> Result<(), ClusterFilesError> {
        let path = self.path.join(name);
        let bytes =
            serde_json::to_vec_pretty(value).map_err(|error| self.damaged_error(name, error.to_string()))?;
        create_directory(&self.path)?;
        atomic_file::replace_hint(&path, &bytes, Durability::Durable)
            .map_err(|source| ClusterFilesError::Io { operation: "writing", path, source })
    }

    fn replace_file(&self, name: &str, bytes: &[u8]) -> Result<(), ClusterFilesError> {
        let path = self.path.join(name);
        create_directory(&self.path)?;
        atomic_file::replace_file(&path, bytes, Durability::Durable).map_err(|source| ClusterFilesError::Io {
            operation: "writing",
            path,
            source,
        })
    }

    pub(super) fn remove_file(&self, name: &str) -> Result<(), ClusterFilesError> {
        let path = self.path.join(name);
        match disk::run_beside(&path, || std::fs::remove_file(&path)) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(ClusterFilesError::Io { operation: "removing", path, source })
            }
            _ => Ok(()),
        }
    }
}

fn create_directory(path: &Path) -> Result<(), ClusterFilesError> {
    let made = disk::run_beside(path, || std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path));
    made.map_err(|source| ClusterFilesError::Io { operation: "making", path: path.to_owned(), source })
}

#[cfg(test)]
pub(crate) mod tests;
