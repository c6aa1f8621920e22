//! Reason of an order (`--reason`), for history and audit.
//!
//! One rule says which orders need one: [`model::order_rules::OrderPurpose::requires_reason`]. The grammar of each command
//! follows it, and a test compares them.

use crate::error::CliError;

/// The reason, or a placeholder for the audit: the API requires a reason.
pub(crate) fn reason_or_placeholder(reason: Option<&str>) -> &str {
    reason.filter(|reason| !reason.trim().is_empty()).unwrap_or("(no reason was given)")
}

/// Checks that an order has a reason for operators who read the audit.
pub(crate) fn require_audit_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid("--reason is empty; give one for operators who read the audit".into()));
    }
    Ok(reason)
}

/// Checks that an order has a reason for operators who run `why`.
pub(crate) fn require_why_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid(
            "--reason is empty; give one for operators who run `why` later".into(),
        ));
    }
    Ok(reason)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::Command;

    use crate::command::grammar;
    use model::order_rules::{ORDER_RULES, OrderPurpose, find_order_rule};

    /// A UUID, for commands that take one.
    const ID: &str = "0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10";

    /// A command line without a reason for each order, with the RPC that gives it.
    const LINES: &[(&str, &str)] = &[
        ("hold m", "Machines/Hold"),
        ("release m", "Machines/Release"),
        ("retry m", "Machines/Retry"),
        ("quarantine m", "Machines/Quarantine"),
        ("label m row=7", "Machines/Label"),
        ("prioritize m urgent", "Machines/Prioritize"),
        ("allow host-key m --fingerprint f", "Machines/AllowHostKey"),
        ("allow signing-keys m", "Machines/AllowSigningKeys"),
        ("retire m", "Machines/Retire"),
        ("retire cancel m", "Machines/CancelRetire"),
        ("retire waive m wipe", "Machines/WaiveStage"),
        ("reboot m", "Machines/Reboot"),
        ("power off m", "Machines/Power"),
        ("power cancel m", "Machines/CancelPower"),
        ("logs m etcd", "Logs/Request"),
        ("tokens create lee --role viewer", "Credentials/Create"),
        ("tokens revoke ID", "Credentials/Revoke"),
        ("loops pause recoverer", "Loops/Pause"),
        ("loops resume recoverer", "Loops/Resume"),
        ("approve ID", "Approvals/Approve"),
        ("budget set reboot --max-count 5", "Budgets/Set"),
        ("update --selector cpus>=4 --release r", "Updates/Create"),
        ("update pause u", "Updates/Pause"),
        ("update resume u", "Updates/Resume"),
        ("update abort u", "Updates/Abort"),
        ("artefacts add file --name n", "Artefacts/Add"),
        ("artefacts delete n", "Artefacts/Delete"),
        ("cluster create ams --workers 1", "Clusters/Create"),
        ("cluster scale ams --workers 3", "Clusters/Change"),
        ("cluster roles ams --add-role web", "Clusters/Change"),
        ("cluster declare ams file", "Clusters/DeclareRole"),
        ("cluster undeclare ams web", "Clusters/UndeclareRole"),
        ("cluster approve ams m", "Clusters/ApproveMachine"),
        ("cluster snapshot ams", "Clusters/Snapshot"),
        ("cluster rotate-key ams", "Clusters/RotateKey"),
        ("cluster rotate-secrets-key ams", "Clusters/RotateSecretsKey"),
        ("cluster rotate-authority ams", "Clusters/RotateAuthority"),
        ("cluster renew-peers ams", "Clusters/RenewPeers"),
        ("cluster restore ams", "Clusters/Restore"),
        ("cluster delete ams", "Clusters/Delete"),
        ("cluster credentials issue ams --output-dir d", "ClusterCredentials/Issue"),
        ("cluster credentials revoke ams id", "ClusterCredentials/Revoke"),
        ("cluster kubernetes set ams --bundle b", "ClusterKubernetes/Set"),
        ("cluster kubernetes rotate ams --keys clients", "ClusterKubernetes/Rotate"),
        ("cluster kubernetes remove ams", "ClusterKubernetes/Remove"),
        ("cluster kubeconfig ams", "ClusterKubernetes/IssueUser"),
        ("cluster upgrade ams --kubernetes-bundle b", "ClusterKubernetes/Upgrade"),
        ("cluster upgrade ams --rollback", "ClusterKubernetes/RollBack"),
        ("cluster upgrade ams --pause", "ClusterKubernetes/PauseUpgrade"),
        ("cluster upgrade ams --resume", "ClusterKubernetes/ResumeUpgrade"),
        ("cluster upgrade ams --abort", "ClusterKubernetes/AbortUpgrade"),
        ("declare restored", "shepherd.direct/DeclareRestored"),
        ("policy disable-two-person-rule", "shepherd.direct/DisableTwoPersonRule"),
    ];

    fn rpc(name: &str) -> String {
        if name.starts_with("shepherd.") { name.to_owned() } else { format!("shepherd.fleet.v1.{name}") }
    }

    /// The path of each command that takes a reason, the program's name left out.
    fn commands_with_reason(command: &Command, path: &str, found: &mut Vec<String>) {
        if command.get_arguments().any(|argument| argument.get_id() == "reason") {
            found.push(path.to_owned());
        }
        for below in command.get_subcommands() {
            commands_with_reason(below, format!("{path} {}", below.get_name()).trim(), found);
        }
    }

    #[test]
    fn every_order_needs_a_reason_by_the_one_rule() {
        for (line, name) in LINES {
            let line = line.replace("ID", ID);
            let words: Vec<&str> = std::iter::once("shepherdctl").chain(line.split(' ')).collect();
            let rule = find_order_rule(&rpc(name)).unwrap();
            let without = grammar().try_get_matches_from(&words);
            assert_eq!(without.is_ok(), !rule.purpose.requires_reason(), "{line}: {:?}", without.err());
            let with = grammar().try_get_matches_from([&words[..], &["--reason", "r"]].concat());
            assert!(with.is_ok(), "{line} --reason r: {:?}", with.err());
        }
    }

    #[test]
    fn rule_is_tested_for_every_order_and_every_command() {
        let tested: BTreeSet<String> = LINES.iter().map(|(_, name)| rpc(name)).collect();
        let rules = ORDER_RULES.iter().filter(|rule| rule.purpose != OrderPurpose::OfOperation);
        assert_eq!(tested, rules.map(|rule| rule.rpc.to_owned()).collect());
        let mut commands = Vec::new();
        commands_with_reason(&grammar(), "", &mut commands);
        assert!(commands.len() > 40, "{commands:?}");
        for command in commands {
            let is_tested =
                LINES.iter().any(|(line, _)| line.starts_with(&format!("{command} ")) || *line == command);
            assert!(is_tested, "`{command}` takes a reason, and has no line here");
        }
    }
}
