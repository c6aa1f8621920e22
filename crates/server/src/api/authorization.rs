//! Authorization table: required role and subject of each RPC.
//!
//! Three rules assign a role to each call that changes something. What decides which programs machines run, or which
//! cluster they trust, is root on them, and requires a deployer. What loses data for good, exceeds limits, or gives
//! somebody access requires an admin. The rest is for operators: it acts on machines and on what they run already,
//! within budgets and limits. `docs/security.md` has the worst use of each call, and a test compares the roles there with
//! this table.
//!
//! A call that is not in the table is rejected. A test reads the descriptors and fails for a call that is missing
//! here.

use model::access::{AccessRole, AccessScope};
use model::rpc_name::{
    ABORT_UPDATE_RPC, ABORT_UPGRADE_RPC, ADD_ARTEFACT_RPC, ALLOW_HOST_KEY_RPC, ALLOW_SIGNING_KEYS_RPC,
    APPROVE_MACHINE_RPC, APPROVE_RPC, CANCEL_POWER_RPC, CANCEL_RETIRE_RPC, CHANGE_CLUSTER_RPC,
    CREATE_CLUSTER_RPC, CREATE_CREDENTIAL_RPC, CREATE_UPDATE_RPC, DECLARE_ROLE_RPC, DELETE_ARTEFACT_RPC,
    DELETE_CLUSTER_RPC, HOLD_RPC, ISSUE_CERTIFICATE_RPC, ISSUE_KUBERNETES_USER_RPC, LABEL_RPC,
    PAUSE_LOOP_RPC, PAUSE_UPDATE_RPC, PAUSE_UPGRADE_RPC, POWER_RPC, PRIORITIZE_RPC, PUT_ARTEFACT_PIECE_RPC,
    QUARANTINE_RPC, REBOOT_RPC, RELEASE_RPC, REMOVE_KUBERNETES_RPC, RENEW_PEERS_RPC, REQUEST_LOG_RPC,
    RESTORE_CLUSTER_RPC, RESUME_LOOP_RPC, RESUME_UPDATE_RPC, RESUME_UPGRADE_RPC, RETIRE_RPC, RETRY_RPC,
    REVOKE_CERTIFICATE_RPC, REVOKE_CREDENTIAL_RPC, ROLL_BACK_KUBERNETES_RPC, ROTATE_AUTHORITY_RPC,
    ROTATE_KEY_RPC, ROTATE_KUBERNETES_RPC, ROTATE_SECRETS_KEY_RPC, SET_BUDGET_RPC, SET_KUBERNETES_RPC,
    SNAPSHOT_CLUSTER_RPC, SUBMIT_BULK_ORDER_RPC, UNDECLARE_ROLE_RPC, UPGRADE_KUBERNETES_RPC, WAIVE_RPC,
};

/// The authorization that a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequiredAuth {
    /// No credential is required, because the content is public.
    Public,
    /// A credential with this role or a higher one.
    Role(AccessRole),
}

/// What a call reads or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallSubject {
    /// Machines: a credential for some providers reaches only their machines, which the call itself enforces.
    Machines,
    /// The whole fleet: a credential for some providers is rejected.
    Fleet,
    /// The caller itself: any scope may call.
    Caller,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallRule {
    /// Path of the call without the leading slash.
    pub rpc: &'static str,
    /// Required authorization of the call.
    pub required: RequiredAuth,
    /// What the call reads or changes.
    pub subject: CallSubject,
}

const fn role_rule(rpc: &'static str, role: AccessRole, about: CallSubject) -> CallRule {
    CallRule { rpc, required: RequiredAuth::Role(role), subject: about }
}

const fn public_rule(rpc: &'static str) -> CallRule {
    CallRule { rpc, required: RequiredAuth::Public, subject: CallSubject::Caller }
}

/// The required role and the subject of each call, one row per call.
pub const RULES: &[CallRule] = &[
    role_rule("shepherd.fleet.v1.Machines/List", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Machines/Get", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Machines/Describe", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Machines/Why", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Machines/Timeline", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Machines/Watch", AccessRole::Viewer, CallSubject::Machines),
    role_rule(HOLD_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(RELEASE_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(RETRY_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(QUARANTINE_RPC, AccessRole::Operator, CallSubject::Machines),
    // A label that a cluster's selector names requires a deployer, which the call itself enforces.
    role_rule(LABEL_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(PRIORITIZE_RPC, AccessRole::Operator, CallSubject::Machines),
    // Exceeding the limits of the policy requires an admin, which the call itself enforces.
    role_rule(SUBMIT_BULK_ORDER_RPC, AccessRole::Operator, CallSubject::Machines),
    // The shepherd installs its role server on the host with this key, and sends it the machine's orders.
    role_rule(ALLOW_HOST_KEY_RPC, AccessRole::Deployer, CallSubject::Machines),
    // A machine runs what these keys sign.
    role_rule(ALLOW_SIGNING_KEYS_RPC, AccessRole::Admin, CallSubject::Machines),
    role_rule(RETIRE_RPC, AccessRole::Operator, CallSubject::Machines),
    // While a wipe is pending, this requires an admin, which the call itself enforces.
    role_rule(CANCEL_RETIRE_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(REBOOT_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(POWER_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule(CANCEL_POWER_RPC, AccessRole::Operator, CallSubject::Machines),
    // A waived stage is never carried out later.
    role_rule(WAIVE_RPC, AccessRole::Admin, CallSubject::Machines),
    // A service may log anything, so reading logs requires a role that may act on the machine.
    role_rule(REQUEST_LOG_RPC, AccessRole::Operator, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Logs/Read", AccessRole::Operator, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Sessions/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Shepherds/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Work/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Schedule/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Backoffs/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Providers/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Loops/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule(PAUSE_LOOP_RPC, AccessRole::Operator, CallSubject::Fleet),
    role_rule(RESUME_LOOP_RPC, AccessRole::Operator, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Approvals/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule(APPROVE_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Artefacts/List", AccessRole::Viewer, CallSubject::Fleet),
    // Machines run artefacts, and uploads take the room of those that others need.
    role_rule("shepherd.fleet.v1.Artefacts/BeginUpload", AccessRole::Deployer, CallSubject::Fleet),
    role_rule(PUT_ARTEFACT_PIECE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(ADD_ARTEFACT_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(DELETE_ARTEFACT_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Budgets/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule(SET_BUDGET_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Clusters/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Clusters/Plan", AccessRole::Viewer, CallSubject::Fleet),
    // Nodes of a cluster run what is declared to it, as root.
    role_rule(CREATE_CLUSTER_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(CHANGE_CLUSTER_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(DECLARE_ROLE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(UNDECLARE_ROLE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // A snapshot holds the keys of the cluster, and the oldest one is deleted for it.
    role_rule(SNAPSHOT_CLUSTER_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // It revokes only the shepherd's own access, after the new key is proven to work.
    role_rule(ROTATE_KEY_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // It restarts API servers, one at a time, and gives nobody anything.
    role_rule(ROTATE_SECRETS_KEY_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // After a theft, all certificates of people and all snapshots until then are worthless.
    role_rule(ROTATE_AUTHORITY_RPC, AccessRole::Admin, CallSubject::Fleet),
    // The certificates are for the keys of members, and nothing is lost; the authority in a snapshot signs them.
    role_rule(RENEW_PEERS_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // Changes since the snapshot are lost.
    role_rule(RESTORE_CLUSTER_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Clusters/ListSnapshots", AccessRole::Viewer, CallSubject::Fleet),
    // The approved machine gets the certificates of a node.
    role_rule(APPROVE_MACHINE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // The data of the cluster is lost for good.
    role_rule(DELETE_CLUSTER_RPC, AccessRole::Admin, CallSubject::Fleet),
    // Holders of these certificates may do in the cluster what the shepherd may, without orders and without our audit.
    role_rule("shepherd.fleet.v1.ClusterCredentials/List", AccessRole::Admin, CallSubject::Fleet),
    role_rule(ISSUE_CERTIFICATE_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule(REVOKE_CERTIFICATE_RPC, AccessRole::Admin, CallSubject::Fleet),
    // It decides which programs run as root on nodes, and which add-ons in the cluster.
    role_rule(SET_KUBERNETES_RPC, AccessRole::Deployer, CallSubject::Fleet),
    // The workloads of the cluster end.
    role_rule(REMOVE_KUBERNETES_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule(ROTATE_KUBERNETES_RPC, AccessRole::Admin, CallSubject::Fleet),
    // Holders of these certificates reach the API servers, without orders and without our audit.
    role_rule("shepherd.fleet.v1.ClusterKubernetes/ListUsers", AccessRole::Admin, CallSubject::Fleet),
    role_rule(ISSUE_KUBERNETES_USER_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule(UPGRADE_KUBERNETES_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(ROLL_BACK_KUBERNETES_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(PAUSE_UPGRADE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(RESUME_UPGRADE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(ABORT_UPGRADE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Updates/List", AccessRole::Viewer, CallSubject::Fleet),
    // A release is root on the machines to which it is rolled out.
    role_rule(CREATE_UPDATE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(PAUSE_UPDATE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(RESUME_UPDATE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule(ABORT_UPDATE_RPC, AccessRole::Deployer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Policy/Get", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Plan/Get", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.Issues/List", AccessRole::Viewer, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Statistics/Get", AccessRole::Viewer, CallSubject::Machines),
    role_rule("shepherd.fleet.v1.About/Get", AccessRole::Viewer, CallSubject::Caller),
    role_rule("shepherd.fleet.v1.Credentials/WhoAmI", AccessRole::Viewer, CallSubject::Caller),
    role_rule("shepherd.fleet.v1.Credentials/List", AccessRole::Admin, CallSubject::Fleet),
    role_rule(CREATE_CREDENTIAL_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule(REVOKE_CREDENTIAL_RPC, AccessRole::Admin, CallSubject::Fleet),
    role_rule("shepherd.fleet.v1.Audit/List", AccessRole::Admin, CallSubject::Fleet),
    // The contracts are public, and a load balancer has no credential.
    public_rule("grpc.health.v1.Health/Check"),
    // Health/Watch is left out: anybody could leave such a stream open for ever. Its contract lets a server leave it
    // unimplemented, and requires clients to cope.
    public_rule("grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    public_rule("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
];

/// The row of a call; `None` if it has no row.
#[must_use]
pub fn find_rule(rpc: &str) -> Option<CallRule> {
    RULES.iter().find(|rule| rule.rpc == rpc).copied()
}

/// Checks whether a role and scope may make a call of this row. The error is a sentence.
pub fn authorize_call(rule: &CallRule, role: AccessRole, scope: &AccessScope) -> Result<(), String> {
    if let RequiredAuth::Role(needed) = rule.required
        && role < needed
    {
        return Err(format!(
            "{} needs the role {needed}, and this credential has the role {role}; an admin creates another one with \
             `shepherdctl tokens create NAME --role {needed}`",
            rule.rpc
        ));
    }
    match (rule.subject, scope) {
        (CallSubject::Fleet, AccessScope::Providers(providers)) => {
            let providers: Vec<&str> = providers.iter().map(String::as_str).collect();
            Err(format!(
                "{} is about the fleet as a whole, and this credential is for the machines of {}",
                rule.rpc,
                providers.join(", ")
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost_reflect::DescriptorPool;

    use super::*;
    use model::order_rules::ORDER_RULES;

    fn descriptors() -> DescriptorPool {
        DescriptorPool::decode(proto::fleet::DESCRIPTORS).unwrap()
    }

    #[test]
    fn every_rpc_has_exactly_one_rule() {
        let calls: BTreeSet<String> = descriptors()
            .services()
            .flat_map(|service| {
                let name = service.full_name().to_owned();
                service.methods().map(|method| format!("{name}/{}", method.name())).collect::<Vec<_>>()
            })
            .collect();
        assert!(calls.len() > 15, "{calls:?}");
        let rows: Vec<String> = RULES
            .iter()
            .filter(|rule| rule.rpc.starts_with("shepherd."))
            .map(|rule| rule.rpc.to_owned())
            .collect();
        assert_eq!(rows.len(), rows.iter().collect::<BTreeSet<_>>().len(), "a call has two rows");
        assert_eq!(calls, rows.into_iter().collect());
    }

    #[test]
    fn orders_require_at_least_an_operator() {
        for service in descriptors().services() {
            for method in service.methods() {
                let name = format!("{}/{}", service.full_name(), method.name());
                if method.input().get_field_by_name("order").is_some() {
                    let RequiredAuth::Role(role) = find_rule(&name).unwrap().required else {
                        panic!("{name}")
                    };
                    assert!(role >= AccessRole::Operator, "{name}");
                }
            }
        }
    }

    #[test]
    fn every_order_has_a_rule_and_nothing_else_has_one() {
        let descriptors = descriptors();
        let calls = descriptors.services().flat_map(|service| {
            let name = service.full_name().to_owned();
            let orders =
                service.methods().filter(|method| method.input().get_field_by_name("order").is_some());
            orders.map(|method| format!("{name}/{}", method.name())).collect::<Vec<_>>()
        });
        let orders: BTreeSet<String> = calls.collect();
        assert!(orders.len() > 40, "{orders:?}");
        let rules = ORDER_RULES.iter().filter(|rule| !rule.rpc.starts_with("shepherd.direct/"));
        assert_eq!(orders, rules.map(|rule| rule.rpc.to_owned()).collect());
    }

    #[test]
    fn public_calls_are_no_open_ended_streams() {
        assert_eq!(find_rule("grpc.health.v1.Health/Watch"), None);
        for rule in RULES.iter().filter(|rule| rule.rpc.ends_with("/Watch")) {
            assert_ne!(rule.required, RequiredAuth::Public, "{}", rule.rpc);
        }
    }

    #[test]
    fn role_and_scope_both_count() {
        let (all, rack) = (AccessScope::Fleet, AccessScope::from_providers(["rack".to_owned()]));
        for (rpc, role, scope, expected) in [
            ("shepherd.fleet.v1.Machines/List", AccessRole::Viewer, &all, true),
            ("shepherd.fleet.v1.Machines/List", AccessRole::Viewer, &rack, true),
            (HOLD_RPC, AccessRole::Viewer, &all, false),
            (HOLD_RPC, AccessRole::Operator, &rack, true),
            (ALLOW_HOST_KEY_RPC, AccessRole::Operator, &rack, false),
            (ALLOW_HOST_KEY_RPC, AccessRole::Deployer, &rack, true),
            (CREATE_UPDATE_RPC, AccessRole::Operator, &all, false),
            (CREATE_UPDATE_RPC, AccessRole::Deployer, &all, true),
            (CREATE_UPDATE_RPC, AccessRole::Admin, &all, true),
            (RESTORE_CLUSTER_RPC, AccessRole::Deployer, &all, false),
            ("shepherd.fleet.v1.Sessions/List", AccessRole::Admin, &rack, false),
            (CREATE_CREDENTIAL_RPC, AccessRole::Deployer, &all, false),
            (CREATE_CREDENTIAL_RPC, AccessRole::Admin, &all, true),
            ("shepherd.fleet.v1.Credentials/WhoAmI", AccessRole::Viewer, &rack, true),
        ] {
            assert_eq!(
                authorize_call(&find_rule(rpc).unwrap(), role, scope).is_ok(),
                expected,
                "{rpc} {role} {scope:?}"
            );
        }
        assert_eq!(find_rule("shepherd.fleet.v1.Machines/Explode"), None);
    }
}
