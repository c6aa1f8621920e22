//! The one table of who may call what.
//!
//! A call that is not in it is refused, and a test reads the contracts' descriptors and fails on one that is
//! missing here.

use crate::model::access::{Role, Scope};

/// Whom a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Whoever reaches the port: what is told is public.
    Nobody,
    /// A credential of this role or more.
    Role(Role),
}

/// What a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// Machines: a credential for some providers' machines reaches those, and the call sees to it.
    Machines,
    /// The fleet as a whole: a credential for some providers' machines does not reach it.
    Fleet,
    /// The caller.
    Caller,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The call, as its path is without the first slash.
    pub rpc: &'static str,
    /// Whom it is for.
    pub needs: Needs,
    /// What it is about.
    pub about: About,
}

const fn rule(rpc: &'static str, role: Role, about: About) -> Rule {
    Rule { rpc, needs: Needs::Role(role), about }
}

const fn public(rpc: &'static str) -> Rule {
    Rule { rpc, needs: Needs::Nobody, about: About::Caller }
}

/// Who may call what, one row a call.
pub const RULES: &[Rule] = &[
    rule("shepherd.fleet.v1.Machines/List", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Get", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Describe", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Why", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Timeline", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Watch", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Machines/Hold", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Release", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Retry", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Quarantine", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Label", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Prioritize", Role::Operator, About::Machines),
    // Beyond the limits of the policy an admin's alone, which the call sees to.
    rule("shepherd.fleet.v1.Orders/Give", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/AllowHostKey", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Retire", Role::Operator, About::Machines),
    // With a wipe pending an admin's alone, which the call sees to.
    rule("shepherd.fleet.v1.Machines/CancelRetire", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Reboot", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/Power", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Machines/CancelPower", Role::Operator, About::Machines),
    // What it leaves undone is undone for good.
    rule("shepherd.fleet.v1.Machines/Waive", Role::Admin, About::Machines),
    // What services write may be anything: it is for whoever may act on it.
    rule("shepherd.fleet.v1.Logs/Ask", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Logs/Read", Role::Operator, About::Machines),
    rule("shepherd.fleet.v1.Sessions/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Work/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Schedule/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Backoffs/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Providers/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Loops/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Loops/Pause", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Loops/Resume", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Approvals/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Approvals/Approve", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Artefacts/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Artefacts/Begin", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Artefacts/Put", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Artefacts/Add", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Artefacts/Delete", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Budgets/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Budgets/Set", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Plan", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Create", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Change", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Declare", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Undeclare", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Snapshot", Role::Operator, About::Fleet),
    // What it ends is the shepherd's own way in, and another one is seen to work before.
    rule("shepherd.fleet.v1.Clusters/RotateKey", Role::Operator, About::Fleet),
    // What was changed since the snapshot is lost.
    rule("shepherd.fleet.v1.Clusters/Restore", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/ListSnapshots", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Clusters/Approve", Role::Operator, About::Fleet),
    // What the cluster kept is gone for good.
    rule("shepherd.fleet.v1.Clusters/Delete", Role::Admin, About::Fleet),
    // Their holders may do in the cluster what the shepherd may, beside every order and every audit of ours.
    rule("shepherd.fleet.v1.ClusterCredentials/List", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterCredentials/Issue", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterCredentials/Revoke", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/Set", Role::Operator, About::Fleet),
    // What runs in it ends.
    rule("shepherd.fleet.v1.ClusterKubernetes/Remove", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/Rotate", Role::Admin, About::Fleet),
    // Their holders reach the API servers, beside every order and every audit of ours.
    rule("shepherd.fleet.v1.ClusterKubernetes/ListUsers", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/IssueUser", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/Upgrade", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/RollBack", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/PauseUpgrade", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/ResumeUpgrade", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.ClusterKubernetes/AbortUpgrade", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Updates/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Updates/Create", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Updates/Pause", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Updates/Resume", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Updates/Abort", Role::Operator, About::Fleet),
    rule("shepherd.fleet.v1.Policy/Get", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Plan/Get", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Issues/List", Role::Viewer, About::Fleet),
    rule("shepherd.fleet.v1.Statistics/Get", Role::Viewer, About::Machines),
    rule("shepherd.fleet.v1.Credentials/WhoAmI", Role::Viewer, About::Caller),
    rule("shepherd.fleet.v1.Credentials/List", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Credentials/Create", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Credentials/Revoke", Role::Admin, About::Fleet),
    rule("shepherd.fleet.v1.Audit/List", Role::Admin, About::Fleet),
    // The contracts are public, and a load balancer has no credential.
    public("grpc.health.v1.Health/Check"),
    // Not Health/Watch: a stream that anybody may leave open for ever. Its contract lets a server leave it
    // unimplemented, and tells clients not to mind.
    public("grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
    public("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
];

/// The row of a call.
#[must_use]
pub fn rule_of(rpc: &str) -> Option<Rule> {
    RULES.iter().find(|rule| rule.rpc == rpc).copied()
}

/// Whether somebody of this role and scope may make a call of this row; if not, a sentence.
pub fn may(rule: &Rule, role: Role, scope: &Scope) -> Result<(), String> {
    if let Needs::Role(needed) = rule.needs
        && role < needed
    {
        return Err(format!(
            "{} is for the role {needed}, and this credential has the role {role}",
            rule.rpc
        ));
    }
    match (rule.about, scope) {
        (About::Fleet, Scope::Providers(providers)) => {
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

    fn contracts() -> DescriptorPool {
        DescriptorPool::decode(crate::proto::fleet::DESCRIPTORS).unwrap()
    }

    #[test]
    fn every_call_of_the_contracts_has_one_row_and_every_row_its_call() {
        let calls: BTreeSet<String> = contracts()
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
    fn whatever_takes_an_order_is_for_operators_at_least() {
        for service in contracts().services() {
            for method in service.methods() {
                let name = format!("{}/{}", service.full_name(), method.name());
                if method.input().get_field_by_name("order").is_some() {
                    let Needs::Role(role) = rule_of(&name).unwrap().needs else { panic!("{name}") };
                    assert!(role >= Role::Operator, "{name}");
                }
            }
        }
    }

    #[test]
    fn whoever_has_no_credential_leaves_no_stream_open() {
        assert_eq!(rule_of("grpc.health.v1.Health/Watch"), None);
        for rule in RULES.iter().filter(|rule| rule.rpc.ends_with("/Watch")) {
            assert_ne!(rule.needs, Needs::Nobody, "{}", rule.rpc);
        }
    }

    #[test]
    fn role_and_scope_both_count() {
        let (all, rack) = (Scope::Everything, Scope::of(["rack".to_owned()]));
        for (rpc, role, scope, expected) in [
            ("shepherd.fleet.v1.Machines/List", Role::Viewer, &all, true),
            ("shepherd.fleet.v1.Machines/List", Role::Viewer, &rack, true),
            ("shepherd.fleet.v1.Machines/Hold", Role::Viewer, &all, false),
            ("shepherd.fleet.v1.Machines/Hold", Role::Operator, &rack, true),
            ("shepherd.fleet.v1.Sessions/List", Role::Admin, &rack, false),
            ("shepherd.fleet.v1.Credentials/Create", Role::Operator, &all, false),
            ("shepherd.fleet.v1.Credentials/Create", Role::Admin, &all, true),
            ("shepherd.fleet.v1.Credentials/WhoAmI", Role::Viewer, &rack, true),
        ] {
            assert_eq!(may(&rule_of(rpc).unwrap(), role, scope).is_ok(), expected, "{rpc} {role} {scope:?}");
        }
        assert_eq!(rule_of("shepherd.fleet.v1.Machines/Explode"), None);
    }
}
