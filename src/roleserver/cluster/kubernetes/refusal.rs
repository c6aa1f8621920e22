//! What a role server without the feature `reconciler` does with roles of Kubernetes: it reports why it runs none of them.

use crate::curator::node::Roles;
use crate::proto::curator::v1::KubernetesStatus;
use crate::roleserver::cluster::facts::Facts;
use crate::supervisor::context::Runnable;
use crate::supervisor::reduce::{Inputs, reduce};

/// Why nothing of Kubernetes runs. The node reports it as what it waits for.
const REFUSAL: &str = "this role server was built without Kubernetes (without the feature `reconciler`, like the \
                       demo's): roll out one that `make roleserver` builds";

/// The runnable in the place of Kubernetes.
#[must_use]
pub(super) fn refusal(facts: &Facts) -> Runnable {
    let roles = facts.roles.clone();
    let inputs =
        move || Inputs::new(None).with(&roles, |known: &mut Option<Roles>, roles| *known = Some(roles));
    reduce(inputs, |roles: &Option<Roles>| roles.as_ref().map(status), &facts.kubernetes)
}

/// What the node reports of Kubernetes; `None` for a node without a role of it.
fn status(roles: &Roles) -> Option<KubernetesStatus> {
    let has_role = roles.kubernetes_controller || roles.kubernetes_worker;
    has_role.then(|| KubernetesStatus { waits: REFUSAL.to_owned(), ..KubernetesStatus::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::kubernetes::status::check;
    use crate::supervisor::supervise::{Settings, Supervisor};

    #[tokio::test]
    async fn node_with_a_role_of_kubernetes_reports_what_it_lacks_and_one_without_reports_nothing() {
        let facts = Facts::default();
        let supervisor = Supervisor::start(refusal(&facts), Settings::default());
        let mut reported = facts.kubernetes.watch();
        facts.roles.set(Roles::default());
        assert_eq!(reported.next().await, None);
        for (kubernetes_controller, kubernetes_worker) in [(true, false), (false, true), (true, true)] {
            facts.roles.set(Roles { kubernetes_controller, kubernetes_worker, ..Roles::default() });
            let status = reported.next().await.expect("a status");
            assert!(check(&status).is_ok(), "the curator takes it");
            assert!(
                status.waits.contains("built without Kubernetes") && status.waits.contains("make roleserver")
            );
            assert!(status.components.is_empty() && !status.reconciles);
            facts.roles.set(Roles::default());
            assert_eq!(reported.next().await, None);
        }
        supervisor.stop().await;
    }
}
