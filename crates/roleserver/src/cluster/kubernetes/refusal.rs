//! The refusal: a role server without the feature `reconciler` reports why it runs no Kubernetes role.

use curator_client::node::NodeRoles;
use proto::curator::v1::KubernetesStatus;
use supervisor::combine::{CombinedInputs, derive_value};
use supervisor::context::Runnable;

use crate::cluster::node_facts::NodeFacts;

/// Why no component of Kubernetes runs. The node reports it as what it waits for.
const REFUSAL: &str = "this role server was built without Kubernetes (without the feature `reconciler`, like the \
                       demo's): roll out one that `make roleserver` builds";

/// Makes the runnable that replaces the Kubernetes parts.
#[must_use]
pub(super) fn refusal(facts: &NodeFacts) -> Runnable {
    let roles = facts.roles.clone();
    let inputs = move || {
        CombinedInputs::new(None).with(&roles, |known: &mut Option<NodeRoles>, roles| *known = Some(roles))
    };
    derive_value(inputs, |roles: &Option<NodeRoles>| roles.as_ref().map(status), &facts.kubernetes)
}

/// The status that the node reports; `None` without a Kubernetes role.
fn status(roles: &NodeRoles) -> Option<KubernetesStatus> {
    let has_role = roles.kubernetes_controller || roles.kubernetes_worker;
    has_role.then(|| KubernetesStatus { wait_reason: REFUSAL.to_owned(), ..KubernetesStatus::default() })
}

#[cfg(test)]
mod tests {
    use curator_client::kubernetes_status::validate_status;
    use supervisor::supervise::{Supervisor, SupervisorSettings};

    use super::*;

    #[tokio::test]
    async fn node_with_a_role_of_kubernetes_reports_what_it_lacks_and_one_without_reports_nothing() {
        let facts = NodeFacts::default();
        let supervisor = Supervisor::start(refusal(&facts), SupervisorSettings::default());
        let mut reported = facts.kubernetes.watch();
        facts.roles.set(NodeRoles::default());
        assert_eq!(reported.next().await, None);
        for (kubernetes_controller, kubernetes_worker) in [(true, false), (false, true), (true, true)] {
            facts.roles.set(NodeRoles { kubernetes_controller, kubernetes_worker, ..NodeRoles::default() });
            let status = reported.next().await.expect("a status");
            assert!(validate_status(&status).is_ok(), "the curator takes it");
            assert!(
                status.wait_reason.contains("built without Kubernetes")
                    && status.wait_reason.contains("make roleserver")
            );
            assert!(status.components.is_empty() && !status.is_reconciler);
            facts.roles.set(NodeRoles::default());
            assert_eq!(reported.next().await, None);
        }
        supervisor.stop().await;
    }
}
