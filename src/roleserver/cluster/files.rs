//! What a node keeps of its cluster, in a directory of its own below the state directory.
//!
//! | file | written by | what |
//! | --- | --- | --- |
//! | `order.json` | whoever asks | what the machine is asked to be; holds a ticket, mode 0600 |
//! | `node_key.pk8` | enrolment, once | the key of the node, mode 0600 |
//! | `authority.json` | enrolment, while founding | the new cluster's authority with its key, mode 0600 |
//! | `membership.json` | control plane | which data directory of etcd is in use, and how it was begun |
//! | `roles.json` | control plane while founding, then roles | what the node is to do |
//! | `credentials.json` | enrolment, control plane, certificate | the node's certificate and the authority's |
//! | `curators.json` | enrolment, directory | where curators are |
//! | `epoch.json` | whoever hears of it | the highest epoch of the cluster: curators of a lower one are not followed |
//! | `snapshot` | enrolment, while restoring | what the cluster is brought back from, its secrets included, mode 0600 |
//! | `declarations.json`, `about.json` | services | what the node is to run of operators' roles: see there |
//! | `services/` | services | a directory for each service |
//! | `artefacts/` | services | programs that were fetched, by their digests |
//! | `kubernetes.json`, `kubernetes-runs.json`, `kubernetes-leaving.json`, `kubernetes/` | kubernetes | what the node runs of Kubernetes: see there |
//! | `kubernetes/bundles/` | kubernetes | bundles of programs, by their digests |
//! | `etcd/` | etcd | its data, its sockets, the files it proves itself with |
//!
//! What is damaged of the first three, of credentials and of the epoch is an error that a person must look at: to make another key
//! would be to be another node, and to follow any epoch would be to follow the wrong one. Damaged roles or curators count as absent, and never as none: a node that took them for
//! none would stop its part of the control plane.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::curator::identity::{Identity, IdentityError};
use crate::curator::node::{ConsensusMember, Roles};
use crate::roleserver::cluster::order::Order;
use crate::roleserver::durable::{self, Durability};

/// The largest file that is read.
const FILE_LIMIT: u64 = 4 << 20;

/// The directory of a node's part in its cluster.
#[derive(Clone, Debug)]
pub struct Files {
    path: PathBuf,
}

/// Why a file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The system said no.
    #[error("{doing} {path} failed: {source}", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// It is not what this program writes.
    #[error("the file {path} is damaged ({reason}); look at it before anything is removed", path = path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The key.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// A node's certificate, and that of who signed it. DER in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// The node's.
    pub certificate: String,
    /// The authority's.
    pub ca_certificate: String,
}

/// How often a cluster was restored, as far as this machine has heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    /// The cluster.
    pub cluster: Uuid,
    /// How often.
    pub epoch: u64,
}

/// An authority that is not in etcd yet. DER in hexadecimal digits. `Debug` shows the public half alone.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAuthority {
    /// Its certificate.
    pub certificate: String,
    /// Its key.
    pub private_key: String,
}

impl std::fmt::Debug for KeptAuthority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptAuthority").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// The membership of etcd that this node carries out, as it was begun. All of it stays as it is for as long as the
/// membership lasts: what etcd is started with must not change while it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// etcd's number; not known while the first member of a new cluster has not answered yet.
    pub member: Option<u64>,
    /// The name of its data directory below `etcd/`.
    pub data: String,
    /// The address of its peer URL.
    pub address: IpAddr,
    /// Members at its beginning, itself included: names and peer URLs, as etcd wants them.
    pub initial_cluster: String,
    /// Whether it is the first of a new cluster.
    pub new_cluster: bool,
    /// The epoch of the cluster when it was begun.
    #[serde(default)]
    pub epoch: u64,
}

#[derive(Serialize, Deserialize)]
struct KeptRoles {
    consensus_member: Option<KeptMember>,
    kubernetes_controller: bool,
    kubernetes_worker: bool,
    declared: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
struct KeptMember {
    member: u64,
    peers: BTreeMap<String, String>,
}

impl Files {
    /// The directory `cluster` below a state directory. It is made when something is first kept there: a machine that is
    /// no node keeps nothing, and one whose disk can only be read goes on with the rest of what it does.
    #[must_use]
    pub fn of(state_directory: &Path) -> Self {
        Self { path: state_directory.join("cluster") }
    }

    /// Where etcd runs.
    #[must_use]
    pub fn etcd(&self) -> PathBuf {
        self.path.join("etcd")
    }

    /// Above the directories of services.
    #[must_use]
    pub fn services(&self) -> PathBuf {
        self.path.join("services")
    }

    /// Where artefacts are.
    #[must_use]
    pub fn artefacts(&self) -> PathBuf {
        self.path.join("artefacts")
    }

    /// What there is of Kubernetes.
    #[must_use]
    pub fn kubernetes(&self) -> PathBuf {
        self.path.join("kubernetes")
    }

    /// Where bundles of Kubernetes are.
    #[must_use]
    pub fn bundles(&self) -> PathBuf {
        self.path.join("kubernetes/bundles")
    }

    /// What was asked, if anything was.
    pub fn order(&self) -> Result<Option<Order>, FilesError> {
        self.read("order.json")
    }

    /// Asks something.
    pub fn write_order(&self, order: &Order) -> Result<(), FilesError> {
        self.write("order.json", order)
    }

    /// Removes everything that was kept, but for what was asked.
    pub fn remove_all_but_the_order(&self) -> Result<(), FilesError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| FilesError::Io { doing: "removing", path, source }
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

    /// The key of the node, if it has one.
    pub fn key(&self) -> Result<Option<Identity>, FilesError> {
        let Some(bytes) = self.bytes("node_key.pk8", FILE_LIMIT)? else { return Ok(None) };
        Ok(Some(Identity::from_pkcs8(&bytes)?))
    }

    /// The key of the node, which is made if there is none.
    pub fn key_or_new(&self) -> Result<Identity, FilesError> {
        if let Some(key) = self.key()? {
            return Ok(key);
        }
        let key = Identity::generate()?;
        self.replace("node_key.pk8", key.pkcs8())?;
        Ok(key)
    }

    /// The authority of a cluster that is being founded.
    pub fn authority(&self) -> Result<Option<KeptAuthority>, FilesError> {
        self.read("authority.json")
    }

    /// Keeps the authority of a cluster that is being founded.
    pub fn write_authority(&self, authority: &KeptAuthority) -> Result<(), FilesError> {
        self.write("authority.json", authority)
    }

    /// Forgets it: it is in etcd by now.
    pub fn remove_authority(&self) -> Result<(), FilesError> {
        self.remove("authority.json")
    }

    /// The membership that is carried out, if one is.
    pub fn membership(&self) -> Result<Option<Membership>, FilesError> {
        self.read("membership.json")
    }

    /// Begins a membership, or says more of it.
    pub fn write_membership(&self, membership: &Membership) -> Result<(), FilesError> {
        self.write("membership.json", membership)
    }

    /// Ends a membership: removes its data, and then that it was.
    pub fn remove_membership(&self, membership: &Membership) -> Result<(), FilesError> {
        let data = self.etcd().join(&membership.data);
        match std::fs::remove_dir_all(&data) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                return Err(FilesError::Io { doing: "removing", path: data, source });
            }
            _ => {}
        }
        self.remove("membership.json")
    }

    /// What the node was last to do; `None` also for a file that is damaged.
    #[must_use]
    pub fn roles(&self) -> Option<Roles> {
        let read = self
            .read::<KeptRoles>("roles.json")
            .and_then(|kept| kept.map(|kept| self.roles_of(kept)).transpose());
        read.unwrap_or_else(|error| {
            tracing::warn!(%error, "what this node is to do is not known until a curator says it");
            None
        })
    }

    fn roles_of(&self, kept: KeptRoles) -> Result<Roles, FilesError> {
        let damaged = |reason: String| FilesError::Damaged { path: self.path.join("roles.json"), reason };
        let member = kept.consensus_member.map(|member| {
            let peers = member.peers.into_iter().map(|(node, url)| {
                Ok((
                    node.parse()
                        .map_err(|error: crate::curator::node_id::NoNodeId| damaged(error.to_string()))?,
                    url,
                ))
            });
            Ok::<_, FilesError>(ConsensusMember {
                member: member.member,
                peers: peers.collect::<Result<_, FilesError>>()?,
            })
        });
        let declared = kept.declared.iter().map(|role| {
            role.parse().map_err(|error: crate::model::role::RoleNameError| damaged(error.to_string()))
        });
        Ok(Roles {
            consensus_member: member.transpose()?,
            kubernetes_controller: kept.kubernetes_controller,
            kubernetes_worker: kept.kubernetes_worker,
            declared: declared.collect::<Result<_, _>>()?,
        })
    }

    /// Keeps what the node is to do.
    pub fn write_roles(&self, roles: &Roles) -> Result<(), FilesError> {
        let member = roles.consensus_member.as_ref().map(|role| KeptMember {
            member: role.member,
            peers: role.peers.iter().map(|(node, url)| (node.to_string(), url.clone())).collect(),
        });
        let kept = KeptRoles {
            consensus_member: member,
            kubernetes_controller: roles.kubernetes_controller,
            kubernetes_worker: roles.kubernetes_worker,
            declared: roles.declared.iter().map(ToString::to_string).collect(),
        };
        self.write("roles.json", &kept)
    }

    /// The node's certificate, once it is one.
    pub fn credentials(&self) -> Result<Option<Credentials>, FilesError> {
        self.read("credentials.json")
    }

    /// Keeps the node's certificate.
    pub fn write_credentials(&self, credentials: &Credentials) -> Result<(), FilesError> {
        self.write("credentials.json", credentials)
    }

    /// Where curators were last; none also for a file that is damaged.
    #[must_use]
    pub fn curators(&self) -> BTreeSet<String> {
        self.read("curators.json").ok().flatten().unwrap_or_default()
    }

    /// Keeps where curators are.
    pub fn write_curators(&self, curators: &BTreeSet<String>) -> Result<(), FilesError> {
        self.write("curators.json", curators)
    }

    /// The highest epoch that was heard of, and of which cluster.
    pub fn heard(&self) -> Result<Option<Heard>, FilesError> {
        self.read("epoch.json")
    }

    /// The highest epoch of this cluster that was heard of.
    pub fn epoch(&self, cluster: Uuid) -> Result<u64, FilesError> {
        let heard = self.heard()?.filter(|heard| heard.cluster == cluster);
        Ok(heard.map_or(0, |heard| heard.epoch))
    }

    /// Keeps an epoch of this cluster, if it is higher than the one that is kept.
    pub fn raise_epoch(&self, cluster: Uuid, epoch: u64) -> Result<(), FilesError> {
        if epoch > self.epoch(cluster)? {
            self.write("epoch.json", &Heard { cluster, epoch })
        } else {
            Ok(())
        }
    }

    /// Where a snapshot is put that is being fetched.
    #[must_use]
    pub fn snapshot(&self) -> PathBuf {
        self.path.join("snapshot")
    }

    /// Forgets the snapshot: all of it is in etcd by now.
    pub fn remove_snapshot(&self) -> Result<(), FilesError> {
        self.remove("snapshot")
    }

    /// Replaces a file for etcd.
    pub fn write_for_etcd(&self, name: &str, text: &str) -> Result<PathBuf, FilesError> {
        let path = self.etcd().join(name);
        make(&self.etcd())?;
        durable::replace(&path, text.as_bytes(), Durability::Durable).map_err(|source| FilesError::Io {
            doing: "writing",
            path: path.clone(),
            source,
        })?;
        Ok(path)
    }

    fn bytes(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, FilesError> {
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
            Err(source) => Err(FilesError::Io { doing: "reading", path, source }),
        }
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, FilesError> {
        self.read_up_to(name, FILE_LIMIT)
    }

    /// Reads a file of JSON of no more than so many bytes; what is longer counts as damaged.
    pub(super) fn read_up_to<T: DeserializeOwned>(
        &self,
        name: &str,
        limit: u64,
    ) -> Result<Option<T>, FilesError> {
        let Some(bytes) = self.bytes(name, limit)? else { return Ok(None) };
        // Where it is damaged, and nothing of what stands there.
        let place = |error: serde_json::Error| format!("line {}, column {}", error.line(), error.column());
        serde_json::from_slice(&bytes).map(Some).map_err(|error| self.damaged(name, place(error)))
    }

    /// That a file is not what this program writes.
    pub(super) fn damaged(&self, name: &str, reason: String) -> FilesError {
        FilesError::Damaged { path: self.path.join(name), reason }
    }

    /// Replaces a file of JSON.
    pub(super) fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), FilesError> {
        let bytes = serde_json::to_vec_pretty(value)
            .map_err(|error| FilesError::Damaged { path: self.path.join(name), reason: error.to_string() })?;
        self.replace(name, &bytes)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), FilesError> {
        let path = self.path.join(name);
        make(&self.path)?;
        durable::replace(&path, bytes, Durability::Durable).map_err(|source| FilesError::Io {
            doing: "writing",
            path,
            source,
        })
    }

    pub(super) fn remove(&self, name: &str) -> Result<(), FilesError> {
        let path = self.path.join(name);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(FilesError::Io { doing: "removing", path, source })
            }
            _ => Ok(()),
        }
    }
}

fn make(path: &Path) -> Result<(), FilesError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| FilesError::Io { doing: "making", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node_id::tests::node_id;

    fn files() -> (tempfile::TempDir, Files) {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        (directory, files)
    }

    fn roles() -> Roles {
        let peers = BTreeMap::from([(node_id(2), "https://10.0.0.2:7834".to_owned())]);
        Roles {
            consensus_member: Some(ConsensusMember { member: u64::MAX, peers }),
            kubernetes_controller: true,
            kubernetes_worker: false,
            declared: BTreeSet::from(["web".parse().unwrap()]),
        }
    }

    #[test]
    fn roles_read_back_as_they_were_kept() {
        let (_directory, files) = files();
        assert_eq!(files.roles(), None);
        for roles in [roles(), Roles::default()] {
            files.write_roles(&roles).unwrap();
            assert_eq!(files.roles(), Some(roles));
        }
    }

    #[test]
    fn damaged_roles_are_absent_and_never_none() {
        let (directory, files) = files();
        files.write_roles(&roles()).unwrap();
        let path = directory.path().join("cluster/roles.json");
        let whole = std::fs::read(&path).unwrap();
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(files.roles(), None, "{length} bytes");
        }
        let other = String::from_utf8(whole).unwrap().replace("\"web\"", "\"Not A Role\"");
        std::fs::write(&path, other).unwrap();
        assert_eq!(files.roles(), None);
    }

    #[test]
    fn key_is_made_once_and_a_damaged_one_is_never_replaced() {
        let (directory, files) = files();
        assert!(files.key().unwrap().is_none());
        let key = files.key_or_new().unwrap().public_key();
        assert_eq!(files.key_or_new().unwrap().public_key(), key);
        std::fs::write(directory.path().join("cluster/node_key.pk8"), b"very secret").unwrap();
        let error = files.key_or_new().unwrap_err().to_string();
        assert!(error.contains("no Ed25519 key") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn epoch_grows_and_is_that_of_one_cluster() {
        let (directory, files) = files();
        let (here, elsewhere) = (Uuid::from_u128(7), Uuid::from_u128(8));
        assert_eq!(files.epoch(here).unwrap(), 0);
        for (epoch, kept) in [(0, 0), (2, 2), (1, 2), (3, 3)] {
            files.raise_epoch(here, epoch).unwrap();
            assert_eq!(files.epoch(here).unwrap(), kept, "{epoch}");
        }
        assert_eq!(files.epoch(elsewhere).unwrap(), 0);
        files.raise_epoch(elsewhere, 1).unwrap();
        assert_eq!((files.epoch(elsewhere).unwrap(), files.epoch(here).unwrap()), (1, 0));
        std::fs::write(directory.path().join("cluster/epoch.json"), "{").unwrap();
        assert!(files.epoch(elsewhere).is_err(), "a damaged one is no epoch that may be followed");
        files.remove_all_but_the_order().unwrap();
        assert_eq!(files.heard().unwrap(), None);
    }

    #[test]
    fn damaged_file_is_told_by_its_name_and_not_by_what_is_in_it() {
        let (directory, files) = files();
        std::fs::create_dir(directory.path().join("cluster")).unwrap();
        std::fs::write(directory.path().join("cluster/order.json"), "{\"ticket\": \"c0ffee").unwrap();
        let error = files.order().unwrap_err().to_string();
        assert!(error.contains("order.json is damaged (line 1") && !error.contains("c0ffee"), "{error}");
    }

    #[test]
    fn end_of_a_membership_removes_its_data_first() {
        let (_directory, files) = files();
        let membership = Membership {
            member: Some(7),
            data: "member-7".to_owned(),
            address: "10.0.0.1".parse().unwrap(),
            initial_cluster: String::new(),
            new_cluster: false,
            epoch: 0,
        };
        files.write_membership(&membership).unwrap();
        std::fs::create_dir_all(files.etcd().join("member-7/member/wal")).unwrap();
        files.remove_membership(&membership).unwrap();
        assert!(!files.etcd().join("member-7").exists());
        assert_eq!(files.membership().unwrap(), None);
        files.remove_membership(&membership).unwrap();
    }
}
