//! The file `roles.json`: the last known roles of the node.
//!
//! A damaged file counts as absent and never as "no roles", which would stop the node's part of the control plane.

use std::collections::{BTreeMap, BTreeSet};

use curator_client::node::{ConsensusMember, NodeRoles};
use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

#[derive(Serialize, Deserialize)]
struct StoredRoles {
    consensus_member: Option<StoredMember>,
    kubernetes_controller: bool,
    kubernetes_worker: bool,
    declared: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
struct StoredMember {
    member: u64,
    peers: BTreeMap<String, String>,
}

impl ClusterFiles {
    /// Reads the last known roles of the node; `None` also for a damaged file.
    #[must_use]
    pub fn read_roles(&self) -> Option<NodeRoles> {
        let read = self
            .read_json::<StoredRoles>("roles.json")
            .and_then(|kept| kept.map(|kept| self.parse_roles(kept)).transpose());
        read.unwrap_or_else(|error| {
            tracing::warn!(%error, "the stored roles of this node cannot be read; waiting for a curator to send them");
            None
        })
    }

    fn parse_roles(&self, kept: StoredRoles) -> Result<NodeRoles, ClusterFilesError> {
        let damaged =
            |reason: String| ClusterFilesError::Damaged { path: self.path.join("roles.json"), reason };
        let member = kept.consensus_member.map(|member| {
            let peers = member.peers.into_iter().map(|(node, url)| {
                Ok((
                    node.parse().map_err(|error: curator_client::node_id::InvalidNodeId| {
                        damaged(error.to_string())
                    })?,
                    url,
                ))
            });
            Ok::<_, ClusterFilesError>(ConsensusMember {
                member_id: member.member,
                peers: peers.collect::<Result<_, ClusterFilesError>>()?,
            })
        });
        let declared = kept.declared.iter().map(|role| {
            role.parse().map_err(|error: model::node_role::RoleNameError| damaged(error.to_string()))
        });
        Ok(NodeRoles {
            consensus_member: member.transpose()?,
            kubernetes_controller: kept.kubernetes_controller,
            kubernetes_worker: kept.kubernetes_worker,
            declared: declared.collect::<Result<_, _>>()?,
        })
    }

    /// Stores the roles of the node.
    pub fn write_roles(&self, roles: &NodeRoles) -> Result<(), ClusterFilesError> {
        let member = roles.consensus_member.as_ref().map(|role| StoredMember {
            member: role.member_id,
            peers: role.peers.iter().map(|(node, url)| (node.to_string(), url.clone())).collect(),
        });
        let kept = StoredRoles {
            consensus_member: member,
            kubernetes_controller: roles.kubernetes_controller,
            kubernetes_worker: roles.kubernetes_worker,
            declared: roles.declared.iter().map(ToString::to_string).collect(),
        };
        self.write_hint("roles.json", &kept)
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::node_id;

    use super::*;
    use crate::cluster::files::tests::files;

    fn roles() -> NodeRoles {
        let peers = BTreeMap::from([(node_id(2), "https://10.0.0.2:7834".to_owned())]);
        NodeRoles {
            consensus_member: Some(ConsensusMember { member_id: u64::MAX, peers }),
            kubernetes_controller: true,
            kubernetes_worker: false,
            declared: BTreeSet::from(["web".parse().unwrap()]),
        }
    }

    #[test]
    fn roles_read_back_as_they_were_written() {
        let (_directory, files) = files();
        assert_eq!(files.read_roles(), None);
        for roles in [roles(), NodeRoles::default()] {
            files.write_roles(&roles).unwrap();
            assert_eq!(files.read_roles(), Some(roles));
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
            assert_eq!(files.read_roles(), None, "{length} bytes");
        }
        let other = String::from_utf8(whole).unwrap().replace("\"web\"", "\"Not A Role\"");
        std::fs::write(&path, other).unwrap();
        assert_eq!(files.read_roles(), None);
    }
}
