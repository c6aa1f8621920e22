//! Authorization: which kind of peer may make which gRPC call.
//!
//! There is one table, with a row for each call. A call without a row is rejected, and a test fails for it. Handlers do
//! not check the kind of peer: the auth router does, before anything of a request is read. The only fact of a request
//! that authorization needs is the node that it concerns, which the handler has checked (`authorize_node`).
//!
//! There are four kinds of peers. A *node* has a certificate of the cluster and acts on itself alone; of other nodes it
//! reads what every node may know. An *owner* has a certificate of the cluster, too, and gives orders. A *registrant*
//! proves a key by a certificate that it made itself, and nothing else. And there are peers that prove nothing.
//!
//! A curator that does not lead serves only the service Leader, which names the leader and has the certificate of the
//! authority and its newest statement: any other response could be stale.

use curator_client::node_id::NodeId;
use curator_client::peer_identity::Peer;

/// The protobuf package of all services, which every path begins with.
const PACKAGE: &str = "shepherd.curator.v1";

/// The kinds of peers that may make a call. No peer is of two kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllowedCallers {
    /// What nodes may do with the call.
    pub nodes: NodeAccess,
    /// Whether owners may make it.
    pub owners: bool,
    /// Whether peers with nothing but a key of their own may make it.
    pub registering: bool,
    /// Whether peers that prove nothing may make it, too.
    pub anybody: bool,
}

/// What a call of a node may concern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeAccess {
    /// Nodes may not make this call.
    Denied,
    /// Only the node that calls.
    OwnNode,
    /// Data that every node may read.
    ReadAll,
}

/// Which curators serve a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// Only the curator that leads.
    Leader,
    /// Leader and followers alike.
    AnyCurator,
}

/// The permission row of one gRPC method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MethodPermission {
    /// Service and method: `Nodes/Watch`.
    pub method: &'static str,
    /// The kinds of peers that may call it.
    pub allowed: AllowedCallers,
    /// The curators that serve it.
    pub served_by: ServedBy,
}

const NOBODY: AllowedCallers =
    AllowedCallers { nodes: NodeAccess::Denied, owners: false, registering: false, anybody: false };
const OWNERS: AllowedCallers = AllowedCallers { owners: true, ..NOBODY };
const OWN_NODE: AllowedCallers = AllowedCallers { nodes: NodeAccess::OwnNode, ..NOBODY };
const READERS: AllowedCallers = AllowedCallers { nodes: NodeAccess::ReadAll, ..OWNERS };
const REGISTERING: AllowedCallers = AllowedCallers { registering: true, ..NOBODY };
const ANYBODY: AllowedCallers =
    AllowedCallers { nodes: NodeAccess::ReadAll, owners: true, registering: true, anybody: true };

const fn leader_call(method: &'static str, allowed: AllowedCallers) -> MethodPermission {
    MethodPermission { method, allowed, served_by: ServedBy::Leader }
}

const fn any_curator_call(method: &'static str, allowed: AllowedCallers) -> MethodPermission {
    MethodPermission { method, allowed, served_by: ServedBy::AnyCurator }
}

/// The permissions of all methods.
pub const PERMISSIONS: &[MethodPermission] = &[
    any_curator_call("Leader/Watch", ANYBODY),
    any_curator_call("Leader/GetCaCertificate", ANYBODY),
    any_curator_call("Leader/GetStatement", ANYBODY),
    leader_call("Registration/Register", REGISTERING),
    leader_call("Registration/Commit", REGISTERING),
    // With the node's key rather than its certificate, which may have expired while the node was down.
    leader_call("Registration/Join", REGISTERING),
    leader_call("Nodes/Watch", READERS),
    leader_call("Nodes/WatchAll", READERS),
    leader_call("Nodes/UpdateStatus", OWN_NODE),
    leader_call("Nodes/Heartbeat", OWN_NODE),
    leader_call("Nodes/RenewCertificate", OWN_NODE),
    leader_call("Nodes/IssuePeerCertificate", OWN_NODE),
    leader_call("Nodes/IssueCuratorCertificate", OWN_NODE),
    leader_call("Declarations/Put", OWNERS),
    // A declaration has files and the environment of its services. A node watches those of its own roles.
    leader_call("Declarations/List", OWNERS),
    leader_call("Declarations/Delete", OWNERS),
    leader_call("Declarations/WatchOwn", OWN_NODE),
    leader_call("Kubernetes/Put", OWNERS),
    leader_call("Kubernetes/Get", READERS),
    leader_call("Kubernetes/Delete", OWNERS),
    leader_call("Kubernetes/AssignBundle", OWNERS),
    // These requests name no node: each concerns the node of the caller's certificate.
    leader_call("Kubernetes/WatchOwn", OWN_NODE),
    leader_call("Kubernetes/IssueCertificate", OWN_NODE),
    leader_call("Kubernetes/GetSigningKey", OWN_NODE),
    leader_call("Kubernetes/IssueUser", OWNERS),
    leader_call("Kubernetes/Rotate", OWNERS),
    leader_call("Management/GetCluster", READERS),
    leader_call("Management/ListNodes", READERS),
    leader_call("Management/Approve", OWNERS),
    leader_call("Management/UpdateRoles", OWNERS),
    leader_call("Management/UpdateLabels", OWNERS),
    leader_call("Management/Decommission", OWNERS),
    leader_call("Management/Delete", OWNERS),
    leader_call("Management/GetConsensus", READERS),
    leader_call("Management/RotateAuthority", OWNERS),
    leader_call("Tickets/Create", OWNERS),
    leader_call("Tickets/List", OWNERS),
    leader_call("Tickets/Revoke", OWNERS),
    leader_call("Credentials/IssueOwner", OWNERS),
    // With an owner's key rather than a certificate, which is short-lived. The handler checks the key.
    leader_call("Credentials/ClaimOwner", REGISTERING),
    leader_call("Credentials/AddOwnerKey", OWNERS),
    leader_call("Credentials/RemoveOwnerKey", OWNERS),
    leader_call("Credentials/Revoke", OWNERS),
    leader_call("Credentials/List", OWNERS),
    // A snapshot has all of the cluster's secrets, its authority's key among them.
    leader_call("Snapshots/Take", OWNERS),
    leader_call("Snapshots/TakeImage", OWNERS),
];

/// Why a call is rejected by the auth router.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PermissionError {
    /// The method has no row in the table.
    #[error("this curator has no call {method}: is its release older than the caller's?")]
    UnknownMethod {
        /// Path of the call, truncated.
        method: String,
    },
    /// This curator does not lead.
    #[error(
        "this curator does not lead, and {method} is for the one that does: ask Leader/Watch who that is"
    )]
    NotLeader {
        /// The method that was called.
        method: &'static str,
    },
    /// The peer showed no certificate.
    #[error("{method} needs a certificate, and none was shown")]
    Unauthenticated {
        /// The method that was called.
        method: &'static str,
    },
    /// Peers of this kind may not make the call.
    #[error("{peer} may not call {method}")]
    WrongPeerKind {
        /// The peer, as text.
        peer: String,
        /// The method that was called.
        method: &'static str,
    },
    /// A node made a call about another node.
    #[error("{node} may call {method} for itself alone, and named {target}")]
    OtherNode {
        /// The node that called.
        node: NodeId,
        /// The method that was called.
        method: &'static str,
        /// The node that the request names.
        target: NodeId,
    },
}

impl PermissionError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> tonic::Code {
        match self {
            Self::UnknownMethod { .. } | Self::NotLeader { .. } => tonic::Code::Unimplemented,
            Self::Unauthenticated { .. } => tonic::Code::Unauthenticated,
            Self::WrongPeerKind { .. } | Self::OtherNode { .. } => tonic::Code::PermissionDenied,
        }
    }
}

/// Checks that `peer` may make a call, by its path: `/shepherd.curator.v1.Nodes/Watch`.
pub fn authorize_call(
    path: &str,
    peer: &Peer,
    leading: bool,
) -> Result<&'static MethodPermission, PermissionError> {
    let unknown = || PermissionError::UnknownMethod { method: path.chars().take(200).collect() };
    let name = path.strip_prefix('/').and_then(|path| path.strip_prefix(PACKAGE));
    let name = name.and_then(|name| name.strip_prefix('.')).ok_or_else(unknown)?;
    let row = PERMISSIONS.iter().find(|row| row.method == name).ok_or_else(unknown)?;
    if row.served_by == ServedBy::Leader && !leading {
        return Err(PermissionError::NotLeader { method: row.method });
    }
    let allowed = row.allowed;
    let may = match peer {
        Peer::Node { .. } => allowed.nodes != NodeAccess::Denied,
        Peer::Owner { .. } => allowed.owners,
        Peer::Registering { .. } => allowed.registering,
        Peer::Unauthenticated if allowed.anybody => true,
        Peer::Unauthenticated => return Err(PermissionError::Unauthenticated { method: row.method }),
    };
    if may {
        Ok(row)
    } else {
        Err(PermissionError::WrongPeerKind { peer: peer.to_string(), method: row.method })
    }
}

/// Checks that an authorized call may concern this node.
pub fn authorize_node(
    row: &'static MethodPermission,
    peer: &Peer,
    named: NodeId,
) -> Result<(), PermissionError> {
    match peer {
        Peer::Node { id, .. } if row.allowed.nodes == NodeAccess::OwnNode && *id != named => {
            Err(PermissionError::OtherNode { node: *id, method: row.method, target: named })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use curator_client::certificate::Serial;
    use curator_client::testing::{key, node_id};
    use tonic::Code;

    use super::*;

    fn peers() -> [Peer; 4] {
        [
            Peer::Node { id: node_id(1), key: key(1), serial: Serial::new([1; 16]) },
            Peer::Owner { name: "kim".to_owned(), key: key(2), serial: Serial::new([2; 16]) },
            Peer::Registering { key: key(3) },
            Peer::Unauthenticated,
        ]
    }

    fn path(row: &MethodPermission) -> String {
        format!("/{PACKAGE}.{}", row.method)
    }

    /// `Service/Method` of every call in the API definition.
    fn contract() -> BTreeSet<String> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto/shepherd/curator/v1");
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir(directory).unwrap() {
            let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
            let mut service = String::new();
            for line in text.lines().map(str::trim_start) {
                if let Some(name) = line.strip_prefix("service ") {
                    service = name.split_whitespace().next().unwrap().to_owned();
                } else if let Some(name) = line.strip_prefix("rpc ") {
                    found.insert(format!("{service}/{}", name.split('(').next().unwrap().trim()));
                }
            }
        }
        found
    }

    #[test]
    fn every_method_of_the_contract_has_exactly_one_permission() {
        let contract = contract();
        assert!(contract.len() > 20, "only {contract:?} were found");
        let rows: BTreeSet<String> = PERMISSIONS.iter().map(|row| row.method.to_owned()).collect();
        assert_eq!(rows, contract);
        assert_eq!(rows.len(), PERMISSIONS.len(), "a call has two rows");
    }

    #[test]
    fn only_leader_discovery_is_open_to_anybody_on_every_curator() {
        for row in PERMISSIONS {
            let open = row.method.starts_with("Leader/");
            assert_eq!(row.allowed.anybody, open, "{}", row.method);
            assert_eq!(row.served_by == ServedBy::AnyCurator, open, "{}", row.method);
            for peer in peers() {
                let refusal = authorize_call(&path(row), &peer, false).err();
                assert_eq!(refusal.is_none(), open, "{peer} {}", row.method);
                assert!(refusal.is_none_or(|refusal| refusal.code() == Code::Unimplemented));
            }
        }
    }

    #[test]
    fn each_kind_of_peer_makes_its_own_calls_and_no_others() {
        let [node, owner, registering, unproved] = peers();
        let may = |peer: &Peer| -> BTreeSet<&str> {
            PERMISSIONS
                .iter()
                .map(|row| row.method)
                .filter(|method| authorize_call(&format!("/{PACKAGE}.{method}"), peer, true).is_ok())
                .collect()
        };
        let open = BTreeSet::from(["Leader/GetCaCertificate", "Leader/GetStatement", "Leader/Watch"]);
        let with =
            |more: &[&'static str]| -> BTreeSet<&'static str> { open.iter().chain(more).copied().collect() };
        assert_eq!(may(&unproved), open);
        let registering_may =
            ["Registration/Register", "Registration/Commit", "Registration/Join", "Credentials/ClaimOwner"];
        assert_eq!(may(&registering), with(&registering_may));
        let node_may = [
            "Nodes/Watch",
            "Nodes/WatchAll",
            "Nodes/UpdateStatus",
            "Nodes/Heartbeat",
            "Nodes/RenewCertificate",
            "Nodes/IssuePeerCertificate",
            "Nodes/IssueCuratorCertificate",
            "Declarations/WatchOwn",
            "Kubernetes/Get",
            "Kubernetes/WatchOwn",
            "Kubernetes/IssueCertificate",
            "Kubernetes/GetSigningKey",
            "Management/GetCluster",
            "Management/ListNodes",
            "Management/GetConsensus",
        ];
        assert_eq!(may(&node), with(&node_may));
        // Owners give orders, and do not act as a node.
        let of_nodes = [
            "Nodes/UpdateStatus",
            "Nodes/Heartbeat",
            "Kubernetes/IssueCertificate",
            "Kubernetes/GetSigningKey",
        ];
        for method in registering_may.iter().chain(&of_nodes) {
            assert!(!may(&owner).contains(method), "{method}");
        }
        assert!(may(&owner).contains("Management/Delete"));
        for method in ["Credentials/AddOwnerKey", "Credentials/RemoveOwnerKey"] {
            assert!(may(&owner).contains(method) && !may(&node).contains(method), "{method}");
            assert!(!may(&registering).contains(method), "{method}");
        }
        assert!(may(&owner).contains("Snapshots/Take") && may(&owner).contains("Snapshots/TakeImage"));
    }

    #[test]
    fn permission_error_has_the_code_of_its_cause() {
        let [node, owner, registering, unproved] = peers();
        for (peer, method, code) in [
            (&node, "/shepherd.curator.v1.Management/Delete", Code::PermissionDenied),
            (&node, "/shepherd.curator.v1.Snapshots/Take", Code::PermissionDenied),
            (&registering, "/shepherd.curator.v1.Snapshots/Take", Code::PermissionDenied),
            (&node, "/shepherd.curator.v1.Snapshots/TakeImage", Code::PermissionDenied),
            (&registering, "/shepherd.curator.v1.Snapshots/TakeImage", Code::PermissionDenied),
            (&owner, "/shepherd.curator.v1.Nodes/Heartbeat", Code::PermissionDenied),
            (&registering, "/shepherd.curator.v1.Nodes/Watch", Code::PermissionDenied),
            (&unproved, "/shepherd.curator.v1.Nodes/Watch", Code::Unauthenticated),
            (&owner, "/shepherd.curator.v1.Nodes/Other", Code::Unimplemented),
            (&owner, "/shepherd.curator.v2.Nodes/Watch", Code::Unimplemented),
            (&owner, "Nodes/Watch", Code::Unimplemented),
            (&owner, "/shepherd.curator.v1Nodes/Watch", Code::Unimplemented),
        ] {
            assert_eq!(authorize_call(method, peer, true).unwrap_err().code(), code, "{peer} {method}");
        }
    }

    #[test]
    fn node_acts_on_itself_alone() {
        let [node, owner, ..] = peers();
        for row in PERMISSIONS.iter().filter(|row| row.allowed.nodes != NodeAccess::Denied) {
            assert_eq!(authorize_node(row, &node, node_id(1)), Ok(()), "{}", row.method);
            let of_another = authorize_node(row, &node, node_id(2));
            match row.allowed.nodes {
                NodeAccess::OwnNode => {
                    assert_eq!(of_another.unwrap_err().code(), Code::PermissionDenied, "{}", row.method);
                }
                _ => assert_eq!(of_another, Ok(()), "{}", row.method),
            }
            assert_eq!(authorize_node(row, &owner, node_id(2)), Ok(()), "{}", row.method);
        }
    }

    #[test]
    fn node_writes_only_its_own_state() {
        let writes =
            ["Update", "Put", "Delete", "Create", "Revoke", "Approve", "Issue", "Decommission", "Renew"];
        for row in PERMISSIONS.iter().filter(|row| row.allowed.nodes == NodeAccess::ReadAll) {
            let (_, method) = row.method.split_once('/').unwrap();
            assert!(!writes.iter().any(|write| method.starts_with(write)), "{}", row.method);
        }
    }
}
