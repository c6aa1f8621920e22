//! Files that the role server writes into etcd's directory: certificates, the member's key, the list of revoked peers.
//!
//! The pair of peer certificate and key belongs to one membership. It is removed with the membership, because the serial
//! number of its certificate is then on the list of revoked peers: a node that becomes a member again gets another pair.
//! The list and its copy stay. It is that of the cluster.

use crate::cluster::etcd_start::EtcdVersionRecord;
use crate::cluster::files::{ClusterFiles, ClusterFilesError, FILE_LIMIT};

/// File with the version of the etcd that last ran.
pub(super) const ETCD_VERSION: &str = "etcd_version.json";

impl ClusterFiles {
    /// Name of the peer certificate in etcd's directory.
    pub const PEER_CERTIFICATE: &'static str = "peer.crt";
    /// Name of the key of the peer certificate in etcd's directory.
    pub const PEER_KEY: &'static str = "peer.key";

    /// Reads a file in etcd's directory; `None` if it does not exist.
    pub fn read_etcd_file(&self, name: &str) -> Result<Option<Vec<u8>>, ClusterFilesError> {
        self.read_file(&format!("etcd/{name}"), FILE_LIMIT)
    }

    /// Reads the version of the etcd that last answered; `None` if none is recorded.
    pub fn read_etcd_version(&self) -> Result<Option<EtcdVersionRecord>, ClusterFilesError> {
        self.read_json(ETCD_VERSION)
    }

    /// Stores the version of the etcd that answers.
    pub fn write_etcd_version(&self, record: &EtcdVersionRecord) -> Result<(), ClusterFilesError> {
        self.write_hint(ETCD_VERSION, record)
    }

    /// Removes the pair of the last membership, if it is there. etcd must not run.
    pub fn remove_peer_pair(&self) -> Result<(), ClusterFilesError> {
        // First the certificate: a reader that finds it finds its key, too.
        for name in [Self::PEER_CERTIFICATE, Self::PEER_KEY] {
            self.remove_file(&format!("etcd/{name}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::files::tests::{files, membership};

    use super::*;

    #[test]
    fn end_of_a_membership_removes_its_pair() {
        let (_directory, files) = files();
        let membership = membership();
        files.remove_peer_pair().unwrap();
        files.write_membership(&membership).unwrap();
        for name in [ClusterFiles::PEER_CERTIFICATE, ClusterFiles::PEER_KEY, "peer.crl", "ca.crt"] {
            files.write_etcd_file(name, name.as_bytes()).unwrap();
        }
        files.remove_membership(&membership).unwrap();
        assert_eq!(files.read_etcd_file(ClusterFiles::PEER_CERTIFICATE).unwrap(), None);
        assert_eq!(files.read_etcd_file(ClusterFiles::PEER_KEY).unwrap(), None);
        for name in ["peer.crl", "ca.crt"] {
            let stays = files.read_etcd_file(name).unwrap();
            assert_eq!(stays.as_deref(), Some(name.as_bytes()), "{name} is that of the cluster");
        }
        files.remove_membership(&membership).unwrap();
    }
}
