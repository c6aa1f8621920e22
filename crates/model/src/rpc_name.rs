//! Names of the RPCs that give orders, and of the orders that are given to the database itself.
//!
//! Each is the path of a call without its leading slash. The audit stores it, the [rules of orders][crate::order_rules] and
//! the table of roles have a row for it, and the service that implements it passes it on. An RPC that only reads is named
//! once, in the table of roles.

/// Puts a hold on a machine.
pub const HOLD_RPC: &str = "shepherd.fleet.v1.Machines/Hold";
/// Ends the hold or the quarantine of a machine.
pub const RELEASE_RPC: &str = "shepherd.fleet.v1.Machines/Release";
/// Clears the failures of a machine.
pub const RETRY_RPC: &str = "shepherd.fleet.v1.Machines/Retry";
/// Puts a machine into quarantine.
pub const QUARANTINE_RPC: &str = "shepherd.fleet.v1.Machines/Quarantine";
/// Sets labels on a machine.
pub const LABEL_RPC: &str = "shepherd.fleet.v1.Machines/Label";
/// Sets the priority of a machine.
pub const PRIORITIZE_RPC: &str = "shepherd.fleet.v1.Machines/Prioritize";
/// Pins another SSH host key of a machine.
pub const ALLOW_HOST_KEY_RPC: &str = "shepherd.fleet.v1.Machines/AllowHostKey";
/// Permits a takeover to replace pinned signing keys.
pub const ALLOW_SIGNING_KEYS_RPC: &str = "shepherd.fleet.v1.Machines/AllowSigningKeys";
/// Retires a machine from the fleet.
pub const RETIRE_RPC: &str = "shepherd.fleet.v1.Machines/Retire";
/// Cancels the retirement of a machine.
pub const CANCEL_RETIRE_RPC: &str = "shepherd.fleet.v1.Machines/CancelRetire";
/// Waives a stage of a retirement.
pub const WAIVE_RPC: &str = "shepherd.fleet.v1.Machines/WaiveStage";
/// Reboots a machine by its provider or over SSH.
pub const REBOOT_RPC: &str = "shepherd.fleet.v1.Machines/Reboot";
/// Switches the power of a machine.
pub const POWER_RPC: &str = "shepherd.fleet.v1.Machines/Power";
/// Cancels a power order that has not begun.
pub const CANCEL_POWER_RPC: &str = "shepherd.fleet.v1.Machines/CancelPower";
/// Gives an order for many machines.
pub const SUBMIT_BULK_ORDER_RPC: &str = "shepherd.fleet.v1.BulkOrders/Submit";
/// Requests a log from a machine.
pub const REQUEST_LOG_RPC: &str = "shepherd.fleet.v1.Logs/Request";
/// Creates a credential of an operator.
pub const CREATE_CREDENTIAL_RPC: &str = "shepherd.fleet.v1.Credentials/Create";
/// Revokes a credential of an operator.
pub const REVOKE_CREDENTIAL_RPC: &str = "shepherd.fleet.v1.Credentials/Revoke";
/// Pauses a control loop.
pub const PAUSE_LOOP_RPC: &str = "shepherd.fleet.v1.Loops/Pause";
/// Resumes a paused control loop.
pub const RESUME_LOOP_RPC: &str = "shepherd.fleet.v1.Loops/Resume";
/// Approves an order as the second person.
pub const APPROVE_RPC: &str = "shepherd.fleet.v1.Approvals/Approve";
/// Sets the budget of a disruption.
pub const SET_BUDGET_RPC: &str = "shepherd.fleet.v1.Budgets/Set";
/// Rolls out a release of the role server.
pub const CREATE_UPDATE_RPC: &str = "shepherd.fleet.v1.Updates/Create";
/// Pauses an update of role servers.
pub const PAUSE_UPDATE_RPC: &str = "shepherd.fleet.v1.Updates/Pause";
/// Resumes a paused update of role servers.
pub const RESUME_UPDATE_RPC: &str = "shepherd.fleet.v1.Updates/Resume";
/// Ends an update of role servers early.
pub const ABORT_UPDATE_RPC: &str = "shepherd.fleet.v1.Updates/Abort";
/// Uploads a piece of an artefact. It is no order.
pub const PUT_ARTEFACT_PIECE_RPC: &str = "shepherd.fleet.v1.Artefacts/PutPiece";
/// Adds an artefact that was uploaded.
pub const ADD_ARTEFACT_RPC: &str = "shepherd.fleet.v1.Artefacts/Add";
/// Deletes an artefact of the fleet.
pub const DELETE_ARTEFACT_RPC: &str = "shepherd.fleet.v1.Artefacts/Delete";
/// Creates a cluster of machines.
pub const CREATE_CLUSTER_RPC: &str = "shepherd.fleet.v1.Clusters/Create";
/// Changes the specification of a cluster.
pub const CHANGE_CLUSTER_RPC: &str = "shepherd.fleet.v1.Clusters/Change";
/// Declares a role of a cluster.
pub const DECLARE_ROLE_RPC: &str = "shepherd.fleet.v1.Clusters/DeclareRole";
/// Withdraws the declaration of a role.
pub const UNDECLARE_ROLE_RPC: &str = "shepherd.fleet.v1.Clusters/UndeclareRole";
/// Approves a machine as a member of a cluster.
pub const APPROVE_MACHINE_RPC: &str = "shepherd.fleet.v1.Clusters/ApproveMachine";
/// Takes a snapshot of a cluster.
pub const SNAPSHOT_CLUSTER_RPC: &str = "shepherd.fleet.v1.Clusters/Snapshot";
/// Replaces the shepherd's own key of a cluster.
pub const ROTATE_KEY_RPC: &str = "shepherd.fleet.v1.Clusters/RotateKey";
/// Replaces the key that encrypts the Secrets of a cluster.
pub const ROTATE_SECRETS_KEY_RPC: &str = "shepherd.fleet.v1.Clusters/RotateSecretsKey";
/// Replaces the authority of a cluster.
pub const ROTATE_AUTHORITY_RPC: &str = "shepherd.fleet.v1.Clusters/RotateAuthority";
/// Renews the certificates of the members of etcd.
pub const RENEW_PEERS_RPC: &str = "shepherd.fleet.v1.Clusters/RenewPeers";
/// Restores a cluster from a snapshot.
pub const RESTORE_CLUSTER_RPC: &str = "shepherd.fleet.v1.Clusters/Restore";
/// Deletes a cluster with its data.
pub const DELETE_CLUSTER_RPC: &str = "shepherd.fleet.v1.Clusters/Delete";
/// Issues a certificate of a person for a cluster.
pub const ISSUE_CERTIFICATE_RPC: &str = "shepherd.fleet.v1.ClusterCredentials/Issue";
/// Revokes a certificate of a person for a cluster.
pub const REVOKE_CERTIFICATE_RPC: &str = "shepherd.fleet.v1.ClusterCredentials/Revoke";
/// Sets the Kubernetes of a cluster.
pub const SET_KUBERNETES_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/Set";
/// Replaces the keys of Kubernetes in a cluster.
pub const ROTATE_KUBERNETES_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/Rotate";
/// Issues a certificate of a user of Kubernetes.
pub const ISSUE_KUBERNETES_USER_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/IssueUser";
/// Upgrades the Kubernetes of a cluster.
pub const UPGRADE_KUBERNETES_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/Upgrade";
/// Rolls an upgrade of Kubernetes back.
pub const ROLL_BACK_KUBERNETES_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/RollBack";
/// Pauses an upgrade of Kubernetes.
pub const PAUSE_UPGRADE_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/PauseUpgrade";
/// Resumes a paused upgrade of Kubernetes.
pub const RESUME_UPGRADE_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/ResumeUpgrade";
/// Ends an upgrade of Kubernetes early.
pub const ABORT_UPGRADE_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/AbortUpgrade";
/// Removes Kubernetes from a cluster.
pub const REMOVE_KUBERNETES_RPC: &str = "shepherd.fleet.v1.ClusterKubernetes/Remove";
/// Accepts a restored database. It is given to the database itself.
pub const DECLARE_RESTORED_RPC: &str = "shepherd.direct/DeclareRestored";
/// Switches the two-person rule off. It is given to the database itself.
pub const DISABLE_TWO_PERSON_RULE_RPC: &str = "shepherd.direct/DisableTwoPersonRule";
