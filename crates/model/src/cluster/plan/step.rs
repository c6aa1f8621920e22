//! Steps of a cluster plan, and how people read them.
//!
//! A step is data. The cluster loop executes it, and a forecast applies what it changes
//! ([`forecast`][crate::cluster::forecast]). `Display` writes a step as a sentence about a machine, a node or the
//! cluster.

use std::fmt;
use std::net::IpAddr;

use crate::cluster::authority_theft::AuthorityStep;
use crate::cluster::kubernetes::KeyPurpose;
use crate::cluster::secret_keys::SecretsStep;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::MembershipOrder;
use crate::cluster::upgrade::UpgradeEvent;
use crate::ids::MachineId;

/// One step of a cluster plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterPlanStep {
    /// Make a machine a member of the cluster.
    AddMember {
        /// The machine that is chosen.
        machine: MachineId,
        /// Its part in the cluster.
        part: ClusterPart,
    },
    /// Send an order to a machine over its agent channel.
    SendOrder {
        /// The machine that gets the order.
        machine: MachineId,
        /// What the machine has to do.
        order: MembershipOrder,
    },
    /// Send a machine a new certificate for its member of etcd, over its agent channel.
    RenewPeer {
        /// The machine that gets the certificate.
        machine: MachineId,
    },
    /// Record that the members of etcd need no certificates by an order any more.
    EndPeerRenewal,
    /// Make the authority that replaces the stolen one, and store it.
    CreateAuthority,
    /// Send a machine the new authority for this step, over its agent channel.
    SendAuthority {
        /// The machine that gets it.
        machine: MachineId,
        /// The step that the machine has to take.
        step: AuthorityStep,
    },
    /// Record that the next step of the replacement begins.
    AdvanceAuthority {
        /// The step that begins.
        step: AuthorityStep,
    },
    /// Record that the stolen authority is replaced on every machine.
    EndAuthorityTheft,
    /// Record the identity of the founded cluster, as this machine reported it.
    RecordFounding {
        /// The machine that founded the cluster.
        machine: MachineId,
    },
    /// Approve a node by its key.
    ApproveNode {
        /// The machine that reported the key.
        machine: MachineId,
        /// The node's public key, Ed25519.
        key: [u8; 32],
        /// The address in the provider's list, which is assigned to the node; `None` if there is none.
        address: Option<IpAddr>,
    },
    /// Assign a node that is up the address in its provider's list.
    AssignAddress {
        /// The machine of the node.
        machine: MachineId,
        /// The node's public key, Ed25519.
        key: [u8; 32],
        /// The address in the list.
        address: IpAddr,
        /// Whether it is another one than the node was assigned before. Then the machine first gets an order that names it.
        is_moved: bool,
    },
    /// Change the roles of a node.
    ChangeRoles {
        /// ID of the node.
        node: String,
        /// Roles that the node gets.
        add: Vec<String>,
        /// Roles that the node loses.
        remove: Vec<String>,
        /// Whether the authority of the cluster stays if this ends the node's membership of etcd. Otherwise it is
        /// replaced, because the disk of the node has its key.
        keep_authority: bool,
    },
    /// Remove a node from the cluster for ever.
    DecommissionNode {
        /// ID of the node.
        node: String,
    },
    /// Delete the record of a node.
    DeleteNode {
        /// ID of the node.
        node: String,
    },
    /// Record that a machine has to leave from now on.
    MarkLeaving {
        /// The machine that has to leave.
        machine: MachineId,
        /// Why it has to leave.
        reason: String,
        /// Whether it leaves because an operator made the cluster smaller. Then it counts whether that operator keeps
        /// the authority of the cluster.
        surplus: bool,
    },
    /// End a machine's membership of the cluster.
    RemoveMember {
        /// The machine that left.
        machine: MachineId,
        /// How its membership ended.
        reason: String,
    },
    /// Declare a role to the curators, or replace its declaration.
    DeclareRole {
        /// Name of the role.
        role: String,
    },
    /// Have the curators delete the declaration of a role that no node has.
    UndeclareRole {
        /// Name of the role.
        role: String,
    },
    /// Delete the record of a withdrawn role that the curators do not have.
    DeleteDeclaration {
        /// Name of the role.
        role: String,
    },
    /// Send the desired Kubernetes to the curators.
    PutKubernetes,
    /// Have the curators delete Kubernetes, which no node runs any more.
    DeleteKubernetes,
    /// Delete the record of Kubernetes, which the curators do not have.
    DeleteKubernetesRecord,
    /// Have the curators rotate keys of Kubernetes.
    RotateKeys {
        /// The set of keys to rotate.
        keys: KeyPurpose,
    },
    /// Have a node run a bundle, as the next node of an upgrade.
    AssignBundle {
        /// ID of the node.
        node: String,
        /// The machine that the node runs on.
        machine: MachineId,
        /// SHA-256 of the bundle, in hexadecimal digits.
        bundle: String,
    },
    /// Have a node run the bundle of its cluster again.
    ClearBundle {
        /// ID of the node.
        node: String,
    },
    /// Send a controller the keys of Kubernetes Secrets, over its agent channel.
    SendSecretKeys {
        /// The machine that gets them.
        machine: MachineId,
    },
    /// Take the next step of the encryption of Kubernetes Secrets.
    AdvanceSecretKeys {
        /// What is done with the keys.
        step: SecretsStep,
    },
    /// Record an event of the upgrade.
    RecordUpgrade(UpgradeEvent),
    /// Delete the record of the cluster.
    DeleteCluster,
}

impl fmt::Display for ClusterPlanStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddMember { machine, part } => write!(f, "machine {machine} is chosen as {part}"),
            Self::SendOrder { machine, order: what } => write!(f, "machine {machine} is ordered to {what}"),
            Self::RenewPeer { machine } => {
                write!(f, "machine {machine} is sent a new certificate for its member of etcd")
            }
            Self::EndPeerRenewal => f.write_str("its members of etcd have their certificates"),
            Self::CreateAuthority => f.write_str("the authority that replaces the stolen one is made"),
            Self::SendAuthority { machine, step } => {
                write!(f, "machine {machine} is sent the new authority ({step})")
            }
            Self::AdvanceAuthority { step } => {
                write!(f, "its new authority takes the next step ({step})")
            }
            Self::EndAuthorityTheft => f.write_str("its stolen authority is replaced on every machine"),
            Self::RecordFounding { machine } => write!(f, "machine {machine} has founded it"),
            Self::ApproveNode { machine, key, .. } => {
                write!(f, "machine {machine} is admitted with the key {}", hex::encode(key))
            }
            Self::AssignAddress { machine, address, .. } => {
                write!(f, "machine {machine} is assigned the address {address} as a node")
            }
            Self::ChangeRoles { node, add: give, remove: take, .. } => {
                let (give, take) = (give.join(", "), take.join(", "));
                match (give.as_str(), take.as_str()) {
                    (give, "") => write!(f, "{node} is given {give}"),
                    ("", take) => write!(f, "{node} gives up {take}"),
                    (give, take) => write!(f, "{node} is given {give}, and gives up {take}"),
                }
            }
            Self::DecommissionNode { node } => write!(f, "{node} is decommissioned"),
            Self::DeleteNode { node } => write!(f, "{node} is deleted"),
            Self::MarkLeaving { machine, reason: why, .. } => {
                write!(f, "machine {machine} is to leave: {why}")
            }
            Self::RemoveMember { machine, reason: how } => {
                write!(f, "machine {machine} is removed from the cluster: {how}")
            }
            Self::DeclareRole { role } => write!(f, "role {role} is declared"),
            Self::UndeclareRole { role } => write!(f, "role {role} is withdrawn"),
            Self::DeleteDeclaration { role } => write!(f, "the declaration of role {role} is deleted"),
            Self::PutKubernetes => f.write_str("its curators receive the Kubernetes spec"),
            Self::DeleteKubernetes => f.write_str("its curators delete their Kubernetes settings and keys"),
            Self::DeleteKubernetesRecord => f.write_str("the record of Kubernetes is deleted"),
            Self::RotateKeys { keys } => write!(f, "{} of Kubernetes are replaced", keys.as_str()),
            Self::AssignBundle { node, bundle, .. } => {
                write!(f, "{node} is ordered to run the bundle {}", bundle.get(..16).unwrap_or(bundle))
            }
            Self::SendSecretKeys { machine } => {
                write!(f, "machine {machine} is sent the keys of Kubernetes Secrets")
            }
            Self::AdvanceSecretKeys { step } => step.fmt(f),
            Self::ClearBundle { node } => write!(f, "{node} runs the bundle of its cluster"),
            Self::RecordUpgrade(UpgradeEvent::NodeDone { node }) => {
                write!(f, "{node} has finished its upgrade")
            }
            Self::RecordUpgrade(UpgradeEvent::Pause { reason: why }) => {
                write!(f, "its upgrade is paused: {why}")
            }
            Self::RecordUpgrade(UpgradeEvent::ReleaseDone) => f.write_str("its role servers are through"),
            Self::RecordUpgrade(UpgradeEvent::Finish) => f.write_str("its upgrade is done"),
            Self::DeleteCluster => f.write_str("nothing of it is left"),
        }
    }
}
