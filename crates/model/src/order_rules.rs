//! Rules of orders: which of them nothing undoes, and which need a reason.
//!
//! [`ORDER_RULES`] has one row for each RPC that takes an order, and one for each order that a person gives to the
//! database itself. A test of `crates/server` compares the table with the contracts, so an RPC without a row fails it.
//!
//! * A person confirms an order that nothing undoes ([`Reversal`]). The response to its dry run has what to type
//!   ([`Confirmation`]), so a client only shows that and compares.
//! * An order that stops, disturbs, removes, changes or permits something needs a reason. One that undoes, annotates or
//!   reads does not ([`OrderPurpose::requires_reason`]).

use crate::rpc_name::{
    ABORT_UPDATE_RPC, ABORT_UPGRADE_RPC, ADD_ARTEFACT_RPC, ALLOW_HOST_KEY_RPC, ALLOW_SIGNING_KEYS_RPC,
    APPROVE_MACHINE_RPC, APPROVE_RPC, CANCEL_POWER_RPC, CANCEL_RETIRE_RPC, CHANGE_CLUSTER_RPC,
    CREATE_CLUSTER_RPC, CREATE_CREDENTIAL_RPC, CREATE_UPDATE_RPC, DECLARE_RESTORED_RPC, DECLARE_ROLE_RPC,
    DELETE_ARTEFACT_RPC, DELETE_CLUSTER_RPC, DISABLE_TWO_PERSON_RULE_RPC, HOLD_RPC, ISSUE_CERTIFICATE_RPC,
    ISSUE_KUBERNETES_USER_RPC, LABEL_RPC, PAUSE_LOOP_RPC, PAUSE_UPDATE_RPC, PAUSE_UPGRADE_RPC, POWER_RPC,
    PRIORITIZE_RPC, QUARANTINE_RPC, REBOOT_RPC, RELEASE_RPC, REMOVE_KUBERNETES_RPC, RENEW_PEERS_RPC,
    REQUEST_LOG_RPC, RESTORE_CLUSTER_RPC, RESUME_LOOP_RPC, RESUME_UPDATE_RPC, RESUME_UPGRADE_RPC, RETIRE_RPC,
    RETRY_RPC, REVOKE_CERTIFICATE_RPC, REVOKE_CREDENTIAL_RPC, ROLL_BACK_KUBERNETES_RPC, ROTATE_AUTHORITY_RPC,
    ROTATE_KEY_RPC, ROTATE_KUBERNETES_RPC, ROTATE_SECRETS_KEY_RPC, SET_BUDGET_RPC, SET_KUBERNETES_RPC,
    SNAPSHOT_CLUSTER_RPC, SUBMIT_BULK_ORDER_RPC, UNDECLARE_ROLE_RPC, UPGRADE_KUBERNETES_RPC, WAIVE_RPC,
};

/// What an order is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderPurpose {
    /// Work on something stops.
    Stop,
    /// Something that runs is interrupted.
    Disturb,
    /// Something is gone afterwards.
    Remove,
    /// A setting or an object is new, or differs afterwards.
    Change,
    /// Somebody, or some program, may do more afterwards.
    Permit,
    /// A stop, a refusal, a failure or an order ends.
    Undo,
    /// People describe an object; nothing depends on it.
    Annotate,
    /// Data are read from a machine.
    Read,
    /// That of the operation in a bulk order.
    OfOperation,
}

impl OrderPurpose {
    /// Whether `shepherdctl` requires `--reason`.
    #[must_use]
    pub const fn requires_reason(self) -> bool {
        match self {
            Self::Stop | Self::Disturb | Self::Remove | Self::Change | Self::Permit => true,
            Self::Undo | Self::Annotate | Self::Read | Self::OfOperation => false,
        }
    }
}

/// Whether another order undoes an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reversal {
    /// It can be undone, or loses nothing. The text is how.
    Possible(&'static str),
    /// Nothing undoes it. The text is why.
    Impossible(&'static str),
    /// Nothing undoes it for a machine with a node that votes in etcd of its cluster, if it is switched off. The text is why.
    ImpossibleForVoters(&'static str),
    /// That of the operation in a bulk order.
    OfOperation,
}

/// The row of one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderRule {
    /// The RPC that gives the order, as the audit names it.
    pub rpc: &'static str,
    /// What it is for.
    pub purpose: OrderPurpose,
    /// Whether another order undoes it.
    pub reversal: Reversal,
}

const fn reversible(rpc: &'static str, purpose: OrderPurpose, how: &'static str) -> OrderRule {
    OrderRule { rpc, purpose, reversal: Reversal::Possible(how) }
}

const fn irreversible(rpc: &'static str, purpose: OrderPurpose, reason: &'static str) -> OrderRule {
    OrderRule { rpc, purpose, reversal: Reversal::Impossible(reason) }
}

/// The rules of all orders, in the order of the contracts.
pub const ORDER_RULES: &[OrderRule] = &[
    reversible(HOLD_RPC, OrderPurpose::Stop, "a release ends the hold"),
    reversible(RELEASE_RPC, OrderPurpose::Undo, "another hold stops work again"),
    reversible(RETRY_RPC, OrderPurpose::Undo, "failures are counted again"),
    reversible(QUARANTINE_RPC, OrderPurpose::Stop, "a release ends the quarantine"),
    reversible(LABEL_RPC, OrderPurpose::Annotate, "other labels replace these"),
    reversible(PRIORITIZE_RPC, OrderPurpose::Change, "another priority replaces it"),
    reversible(ALLOW_HOST_KEY_RPC, OrderPurpose::Undo, "any other key of the machine is rejected"),
    reversible(ALLOW_SIGNING_KEYS_RPC, OrderPurpose::Undo, "it ends with the next takeover, or within a day"),
    irreversible(
        RETIRE_RPC,
        OrderPurpose::Remove,
        "its provider takes the machine back, and a retired machine is never adopted again",
    ),
    reversible(CANCEL_RETIRE_RPC, OrderPurpose::Undo, "another order retires the machine"),
    irreversible(WAIVE_RPC, OrderPurpose::Remove, "a waived stage is never carried out later"),
    reversible(REBOOT_RPC, OrderPurpose::Disturb, "the machine comes back"),
    OrderRule {
        rpc: POWER_RPC,
        purpose: OrderPurpose::Disturb,
        reversal: Reversal::ImpossibleForVoters(
            "its node votes in etcd of its cluster, which cannot write without a majority of its members",
        ),
    },
    reversible(CANCEL_POWER_RPC, OrderPurpose::Undo, "the power order can be given again"),
    OrderRule {
        rpc: SUBMIT_BULK_ORDER_RPC,
        purpose: OrderPurpose::OfOperation,
        reversal: Reversal::OfOperation,
    },
    reversible(REQUEST_LOG_RPC, OrderPurpose::Read, "nothing is changed on the machine"),
    reversible(CREATE_CREDENTIAL_RPC, OrderPurpose::Permit, "it can be revoked"),
    reversible(REVOKE_CREDENTIAL_RPC, OrderPurpose::Remove, "another one can be created"),
    reversible(PAUSE_LOOP_RPC, OrderPurpose::Stop, "the loop can be resumed"),
    reversible(RESUME_LOOP_RPC, OrderPurpose::Undo, "the loop can be paused again"),
    reversible(APPROVE_RPC, OrderPurpose::Permit, "it expires unless it is used"),
    reversible(SET_BUDGET_RPC, OrderPurpose::Change, "the former limits can be set again"),
    reversible(CREATE_UPDATE_RPC, OrderPurpose::Disturb, "another release can be rolled out"),
    reversible(PAUSE_UPDATE_RPC, OrderPurpose::Stop, "the update can be resumed"),
    reversible(RESUME_UPDATE_RPC, OrderPurpose::Undo, "the update can be paused again"),
    reversible(ABORT_UPDATE_RPC, OrderPurpose::Stop, "another update does the rest"),
    reversible(ADD_ARTEFACT_RPC, OrderPurpose::Change, "the artefact can be deleted"),
    reversible(DELETE_ARTEFACT_RPC, OrderPurpose::Remove, "the artefact can be added again"),
    reversible(CREATE_CLUSTER_RPC, OrderPurpose::Change, "the cluster can be deleted"),
    reversible(CHANGE_CLUSTER_RPC, OrderPurpose::Disturb, "it can be changed back"),
    reversible(DECLARE_ROLE_RPC, OrderPurpose::Change, "the role can be withdrawn"),
    reversible(UNDECLARE_ROLE_RPC, OrderPurpose::Remove, "the role can be declared again"),
    reversible(APPROVE_MACHINE_RPC, OrderPurpose::Permit, "the machine can be retired from the cluster"),
    reversible(SNAPSHOT_CLUSTER_RPC, OrderPurpose::Change, "the cluster stays as it is"),
    reversible(ROTATE_KEY_RPC, OrderPurpose::Change, "the next key replaces it"),
    reversible(
        ROTATE_SECRETS_KEY_RPC,
        OrderPurpose::Disturb,
        "the next key replaces it, and no Secret is lost",
    ),
    reversible(
        ROTATE_AUTHORITY_RPC,
        OrderPurpose::Disturb,
        "the next authority replaces it; after a theft, the order has confirming words of its own",
    ),
    reversible(RENEW_PEERS_RPC, OrderPurpose::Change, "the next certificates replace these"),
    irreversible(
        RESTORE_CLUSTER_RPC,
        OrderPurpose::Remove,
        "changes of the cluster since the snapshot are lost for good",
    ),
    irreversible(DELETE_CLUSTER_RPC, OrderPurpose::Remove, "the data of the cluster are lost for good"),
    reversible(ISSUE_CERTIFICATE_RPC, OrderPurpose::Permit, "it can be revoked"),
    reversible(REVOKE_CERTIFICATE_RPC, OrderPurpose::Remove, "another one can be issued"),
    reversible(SET_KUBERNETES_RPC, OrderPurpose::Change, "it can be set again"),
    reversible(ROTATE_KUBERNETES_RPC, OrderPurpose::Disturb, "the next keys replace these"),
    reversible(
        ISSUE_KUBERNETES_USER_RPC,
        OrderPurpose::Permit,
        "it expires, and a rotation of the keys of clients ends it",
    ),
    reversible(UPGRADE_KUBERNETES_RPC, OrderPurpose::Disturb, "the upgrade can be rolled back"),
    reversible(ROLL_BACK_KUBERNETES_RPC, OrderPurpose::Disturb, "the cluster can be upgraded again"),
    reversible(PAUSE_UPGRADE_RPC, OrderPurpose::Stop, "the upgrade can be resumed"),
    reversible(RESUME_UPGRADE_RPC, OrderPurpose::Undo, "the upgrade can be paused again"),
    reversible(ABORT_UPGRADE_RPC, OrderPurpose::Stop, "another upgrade does the rest"),
    irreversible(
        REMOVE_KUBERNETES_RPC,
        OrderPurpose::Remove,
        "the pods of the cluster end, and its authorities of Kubernetes are deleted",
    ),
    irreversible(
        DECLARE_RESTORED_RPC,
        OrderPurpose::Change,
        "the fences of all machines are raised, and everything that was under way in the backup ends",
    ),
    reversible(
        DISABLE_TWO_PERSON_RULE_RPC,
        OrderPurpose::Remove,
        "a shepherd with --require_second_admin true switches it on again",
    ),
];

/// The rule of an order; `None` for an RPC that gives none.
#[must_use]
pub fn find_order_rule(rpc: &str) -> Option<&'static OrderRule> {
    ORDER_RULES.iter().find(|rule| rule.rpc == rpc)
}

/// Why nothing undoes the order of this RPC in any state; `None` if that depends on the state of its target, or if another
/// order undoes it.
#[must_use]
pub fn irreversible_reason(rpc: &str) -> Option<&'static str> {
    match find_order_rule(rpc)?.reversal {
        Reversal::Impossible(reason) => Some(reason),
        Reversal::Possible(_) | Reversal::ImpossibleForVoters(_) | Reversal::OfOperation => None,
    }
}

/// Whether a dry run of this RPC may have to be confirmed.
#[must_use]
pub fn may_need_confirmation(rpc: &str) -> bool {
    find_order_rule(rpc).is_some_and(|rule| {
        matches!(rule.reversal, Reversal::Impossible(_) | Reversal::ImpossibleForVoters(_))
    })
}

/// What a person types to confirm an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfirmationKind {
    /// The name of what the order is about. A flag may take its place.
    Name,
    /// The number of machines that the order is about.
    Count,
    /// Words about what remains undone, which the order itself contains.
    Words,
}

/// What a person must type before an order that nothing undoes is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confirmation {
    /// What kind of text it is.
    pub kind: ConfirmationKind,
    /// The text to type.
    pub text: String,
    /// Why nothing undoes the order.
    pub reason: &'static str,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_order_has_one_row_with_a_reason() {
        let mut rpcs = BTreeSet::new();
        for rule in ORDER_RULES {
            assert!(rpcs.insert(rule.rpc), "{} has two rows", rule.rpc);
            let reason = match rule.reversal {
                Reversal::Possible(reason)
                | Reversal::Impossible(reason)
                | Reversal::ImpossibleForVoters(reason) => reason,
                Reversal::OfOperation => {
                    assert_eq!(rule.purpose, OrderPurpose::OfOperation, "{}", rule.rpc);
                    continue;
                }
            };
            assert!(reason.len() > 10 && !reason.ends_with('.'), "{}: {reason}", rule.rpc);
        }
    }

    #[test]
    fn nothing_undoes_these_orders() {
        let found: Vec<&str> =
            ORDER_RULES.iter().map(|rule| rule.rpc).filter(|rpc| may_need_confirmation(rpc)).collect();
        let expected = [
            RETIRE_RPC,
            WAIVE_RPC,
            POWER_RPC,
            RESTORE_CLUSTER_RPC,
            DELETE_CLUSTER_RPC,
            REMOVE_KUBERNETES_RPC,
            DECLARE_RESTORED_RPC,
        ];
        assert_eq!(found, expected);
        for rpc in expected {
            assert_eq!(irreversible_reason(rpc).is_some(), rpc != POWER_RPC, "{rpc}");
        }
        assert_eq!(irreversible_reason(HOLD_RPC), None);
        assert_eq!(find_order_rule("shepherd.fleet.v1.Machines/List"), None);
    }

    #[test]
    fn reason_is_optional_for_what_undoes_or_annotates() {
        for (rpc, required) in [
            ("Machines/Hold", true),
            ("Machines/Reboot", true),
            ("Machines/Retire", true),
            ("Machines/Prioritize", true),
            ("Credentials/Create", true),
            ("Machines/Release", false),
            ("Machines/Retry", false),
            ("Machines/Label", false),
            ("Machines/CancelRetire", false),
            ("Machines/CancelPower", false),
            ("Loops/Resume", false),
            ("Updates/Resume", false),
            ("ClusterKubernetes/ResumeUpgrade", false),
            ("Logs/Request", false),
        ] {
            let rule = find_order_rule(&format!("shepherd.fleet.v1.{rpc}")).unwrap();
            assert_eq!(rule.purpose.requires_reason(), required, "{rpc}");
        }
    }
}
