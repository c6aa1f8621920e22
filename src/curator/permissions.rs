//! Who may make which call.
//!
//! One table with a row for each call there is; what has no row is refused, and a test fails for it. Handlers
//! do not ask who calls: the door does, before anything of a request is looked at, and what it needs to know
//! of a request is only which node it is about.
//!
//! Four kinds of peers come to the door. A *node* has a certificate of the cluster, and acts on itself alone:
//! of others it reads what every node may know. An *owner* has a certificate of the cluster, too, and orders.
//! Who *registers* proves a key by a certificate it made itself, which says nothing but that. And there is
//! whoever proves nothing.
//!
//! A curator that does not lead serves what asks who does, and nothing else: whatever else it answered could
//! be stale.

use crate::curator::node_id::NodeId;
use crate::curator::peer::Peer;

/// What every method's full name begins with.
const PACKAGE: &str = "shepherd.curator.v1";

/// Who may make a call: one kind of peer is never another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    /// Nodes, and about whom.
    pub nodes: NodesMay,
    /// Owners.
    pub owners: bool,
    /// Who proves a key of its own.
    pub registering: bool,
    /// Anybody at all, whatever is proved.
    pub anybody: bool,
}

/// What a node may say a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodesMay {
    /// Nodes do not make this call.
    Never,
    /// It is about the node that calls.
    AboutItself,
    /// It reads what every node may know.
    ReadAll,
}

/// Which curators answer a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// The one that leads.
    Leader,
    /// All of them.
    Everyone,
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its service and its name: `Nodes/Watch`.
    pub method: &'static str,
    /// Who may make it.
    pub allowed: Allowed,
    /// Who answers it.
    pub served_by: ServedBy,
}

const NOBODY: Allowed = Allowed { nodes: NodesMay::Never, owners: false, registering: false, anybody: false };
const OWNERS: Allowed = Allowed { owners: true, ..NOBODY };
const ITSELF: Allowed = Allowed { nodes: NodesMay::AboutItself, ..NOBODY };
const READERS: Allowed = Allowed { nodes: NodesMay::ReadAll, ..OWNERS };
const REGISTERING: Allowed = Allowed { registering: true, ..NOBODY };
const ANYBODY: Allowed = Allowed { nodes: NodesMay::ReadAll, owners: true, registering: true, anybody: true };

const fn leader(method: &'static str, allowed: Allowed) -> Row {
    Row { method, allowed, served_by: ServedBy::Leader }
}

const fn everyone(method: &'static str, allowed: Allowed) -> Row {
    Row { method, allowed, served_by: ServedBy::Everyone }
}

/// Every call there is.
pub const TABLE: &[Row] = &[
    everyone("Leader/Watch", ANYBODY),
    everyone("Leader/GetCaCertificate", ANYBODY),
    leader("Registration/Register", REGISTERING),
    leader("Registration/Commit", REGISTERING),
    // With the node's own key rather than its certificate: that may have expired while it was off.
    leader("Registration/Join", REGISTERING),
    leader("Nodes/Watch", READERS),
    leader("Nodes/WatchAll", READERS),
    leader("Nodes/UpdateStatus", ITSELF),
    leader("Nodes/Heartbeat", ITSELF),
    leader("Nodes/RenewCertificate", ITSELF),
    leader("Nodes/IssuePeerCertificate", ITSELF),
    leader("Declarations/Put", OWNERS),
    leader("Declarations/List", READERS),
    leader("Declarations/Delete", OWNERS),
    leader("Declarations/WatchOwn", ITSELF),
    leader("Kubernetes/Put", OWNERS),
    leader("Kubernetes/Get", READERS),
    leader("Kubernetes/Delete", OWNERS),
    leader("Kubernetes/AssignBundle", OWNERS),
    // No node is named in these: each is about the one that its certificate names.
    leader("Kubernetes/WatchOwn", ITSELF),
    leader("Kubernetes/IssueCertificate", ITSELF),
    leader("Kubernetes/GetSigningKey", ITSELF),
    leader("Kubernetes/IssueUser", OWNERS),
    leader("Kubernetes/Rotate", OWNERS),
    leader("Management/GetCluster", READERS),
    leader("Management/ListNodes", READERS),
    leader("Management/Approve", OWNERS),
    leader("Management/UpdateRoles", OWNERS),
    leader("Management/UpdateLabels", OWNERS),
    leader("Management/Decommission", OWNERS),
    leader("Management/Delete", OWNERS),
    leader("Management/GetConsensus", READERS),
    leader("Tickets/Create", OWNERS),
    leader("Tickets/List", OWNERS),
    leader("Tickets/Revoke", OWNERS),
    leader("Credentials/IssueOwner", OWNERS),
    // With an owner's key rather than a certificate: that is short-lived. The handler knows the keys.
    leader("Credentials/ClaimOwner", REGISTERING),
    leader("Credentials/AddOwnerKey", OWNERS),
    leader("Credentials/RemoveOwnerKey", OWNERS),
    leader("Credentials/Revoke", OWNERS),
    leader("Credentials/List", OWNERS),
    // All of the cluster's secrets, its authority's key among them.
    leader("Snapshots/Take", OWNERS),
];

/// Why a call is refused at the door.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No row says who may make it.
    #[error("{method} is no call of this curator: does its release know what the caller's knows?")]
    UnknownMethod {
        /// What was called.
        method: String,
    },
    /// This one does not lead.
    #[error(
        "this curator does not lead, and {method} is for the one that does: ask Leader/Watch who that is"
    )]
    NotLeading {
        /// What was called.
        method: &'static str,
    },
    /// Nothing was proved.
    #[error("{method} needs a certificate, and none was shown")]
    NothingProved {
        /// What was called.
        method: &'static str,
    },
    /// This kind of peer does not make it.
    #[error("{peer} may not call {method}")]
    WrongKind {
        /// Who called.
        peer: String,
        /// What was called.
        method: &'static str,
    },
    /// A node named another node.
    #[error("{node} may call {method} for itself alone, and named {named}")]
    AnotherNode {
        /// Who called.
        node: NodeId,
        /// What was called.
        method: &'static str,
        /// Whom the request is about.
        named: NodeId,
    },
}

impl Refusal {
    /// The code it is answered with.
    #[must_use]
    pub const fn code(&self) -> tonic::Code {
        match self {
            Self::UnknownMethod { .. } | Self::NotLeading { .. } => tonic::Code::Unimplemented,
            Self::NothingProved { .. } => tonic::Code::Unauthenticated,
            Self::WrongKind { .. } | Self::AnotherNode { .. } => tonic::Code::PermissionDenied,
        }
    }
}

/// Whether `peer` may make a call, by its path: `/shepherd.curator.v1.Nodes/Watch`.
pub fn authorise(path: &str, peer: &Peer, leading: bool) -> Result<&'static Row, Refusal> {
    let unknown = || Refusal::UnknownMethod { method: path.chars().take(200).collect() };
    let name = path.strip_prefix('/').and_then(|path| path.strip_prefix(PACKAGE));
    let name = name.and_then(|name| name.strip_prefix('.')).ok_or_else(unknown)?;
    let row = TABLE.iter().find(|row| row.method == name).ok_or_else(unknown)?;
    if row.served_by == ServedBy::Leader && !leading {
        return Err(Refusal::NotLeading { method: row.method });
    }
    let allowed = row.allowed;
    let may = match peer {
        Peer::Node { .. } => allowed.nodes != NodesMay::Never,
        Peer::Owner { .. } => allowed.owners,
        Peer::Registering { .. } => allowed.registering,
        Peer::Unauthenticated if allowed.anybody => true,
        Peer::Unauthenticated => return Err(Refusal::NothingProved { method: row.method }),
    };
    if may { Ok(row) } else { Err(Refusal::WrongKind { peer: peer.to_string(), method: row.method }) }
}

/// Whether a call that was let in may be about this node.
pub fn may_act_on(row: &'static Row, peer: &Peer, named: NodeId) -> Result<(), Refusal> {
    match peer {
        Peer::Node { id, .. } if row.allowed.nodes == NodesMay::AboutItself && *id != named => {
            Err(Refusal::AnotherNode { node: *id, method: row.method, named })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use tonic::Code;

    use super::*;
    use crate::curator::node_id::tests::{key, node_id};
    use crate::curator::pki::Serial;

    fn peers() -> [Peer; 4] {
        [
            Peer::Node { id: node_id(1), key: key(1), serial: Serial::new([1; 16]) },
            Peer::Owner { name: "kim".to_owned(), key: key(2), serial: Serial::new([2; 16]) },
            Peer::Registering { key: key(3) },
            Peer::Unauthenticated,
        ]
    }

    fn path(row: &Row) -> String {
        format!("/{PACKAGE}.{}", row.method)
    }

    /// `Service/Method` of every call in the contract.
    fn contract() -> BTreeSet<String> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/shepherd/curator/v1");
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
    fn every_call_of_the_contract_has_one_row_and_no_row_is_of_another() {
        let contract = contract();
        assert!(contract.len() > 20, "only {contract:?} were found");
        let rows: BTreeSet<String> = TABLE.iter().map(|row| row.method.to_owned()).collect();
        assert_eq!(rows, contract);
        assert_eq!(rows.len(), TABLE.len(), "a call has two rows");
    }

    #[test]
    fn only_what_asks_who_leads_is_open_to_anybody_and_served_by_all() {
        for row in TABLE {
            let open = row.method.starts_with("Leader/");
            assert_eq!(row.allowed.anybody, open, "{}", row.method);
            assert_eq!(row.served_by == ServedBy::Everyone, open, "{}", row.method);
            for peer in peers() {
                let refusal = authorise(&path(row), &peer, false).err();
                assert_eq!(refusal.is_none(), open, "{peer} {}", row.method);
                assert!(refusal.is_none_or(|refusal| refusal.code() == Code::Unimplemented));
            }
        }
    }

    #[test]
    fn each_kind_of_peer_makes_its_own_calls_and_no_others() {
        let [node, owner, registering, unproved] = peers();
        let may = |peer: &Peer| -> BTreeSet<&str> {
            TABLE
                .iter()
                .map(|row| row.method)
                .filter(|method| authorise(&format!("/{PACKAGE}.{method}"), peer, true).is_ok())
                .collect()
        };
        let open = BTreeSet::from(["Leader/GetCaCertificate", "Leader/Watch"]);
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
            "Declarations/List",
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
        // Owners order, and do not play a node.
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
        assert!(may(&owner).contains("Snapshots/Take"));
    }

    #[test]
    fn refusal_has_the_code_of_its_cause() {
        let [node, owner, registering, unproved] = peers();
        for (peer, method, code) in [
            (&node, "/shepherd.curator.v1.Management/Delete", Code::PermissionDenied),
            (&node, "/shepherd.curator.v1.Snapshots/Take", Code::PermissionDenied),
            (&registering, "/shepherd.curator.v1.Snapshots/Take", Code::PermissionDenied),
            (&owner, "/shepherd.curator.v1.Nodes/Heartbeat", Code::PermissionDenied),
            (&registering, "/shepherd.curator.v1.Nodes/Watch", Code::PermissionDenied),
            (&unproved, "/shepherd.curator.v1.Nodes/Watch", Code::Unauthenticated),
            (&owner, "/shepherd.curator.v1.Nodes/Other", Code::Unimplemented),
            (&owner, "/shepherd.curator.v2.Nodes/Watch", Code::Unimplemented),
            (&owner, "Nodes/Watch", Code::Unimplemented),
            (&owner, "/shepherd.curator.v1Nodes/Watch", Code::Unimplemented),
        ] {
            assert_eq!(authorise(method, peer, true).unwrap_err().code(), code, "{peer} {method}");
        }
    }

    #[test]
    fn node_acts_on_itself_alone() {
        let [node, owner, ..] = peers();
        for row in TABLE.iter().filter(|row| row.allowed.nodes != NodesMay::Never) {
            assert_eq!(may_act_on(row, &node, node_id(1)), Ok(()), "{}", row.method);
            let of_another = may_act_on(row, &node, node_id(2));
            match row.allowed.nodes {
                NodesMay::AboutItself => {
                    assert_eq!(of_another.unwrap_err().code(), Code::PermissionDenied, "{}", row.method);
                }
                _ => assert_eq!(of_another, Ok(()), "{}", row.method),
            }
            assert_eq!(may_act_on(row, &owner, node_id(2)), Ok(()), "{}", row.method);
        }
    }

    #[test]
    fn node_changes_nothing_but_what_is_its_own() {
        let writes =
            ["Update", "Put", "Delete", "Create", "Revoke", "Approve", "Issue", "Decommission", "Renew"];
        for row in TABLE.iter().filter(|row| row.allowed.nodes == NodesMay::ReadAll) {
            let (_, method) = row.method.split_once('/').unwrap();
            assert!(!writes.iter().any(|write| method.starts_with(write)), "{}", row.method);
        }
    }
}
