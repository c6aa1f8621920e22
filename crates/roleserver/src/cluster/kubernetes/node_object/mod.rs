//! Manage this worker's Node object: keep it in sync, and drain the node before it changes.
//!
//! One of three tasks is due. It follows from the node's roles, from the installed bundle, and from the bundle that the
//! running kubelet was started with:
//!
//! * Idle: nothing is to be done, for example because no kubelet runs or no bundle is installed.
//! * Sync: the worker runs as it should. Its labels are kept in sync, and a cordon of an earlier drain is lifted.
//! * Drain: the worker is about to end, or its bundle is about to change. Its pods are moved to other nodes first.
//!
//! All requests use the kubelet's certificate through the node's own load balancer, so a node cannot do anything to the
//! object of another one. What that certificate does not permit is left alone: a node may not set labels below
//! `kubernetes.io` on itself.
//!
//! A node that was cordoned for a drain is uncordoned when it is a worker with its bundle again. A node that an
//! operator cordoned stays cordoned: an annotation distinguishes the two.
//!
//! # How the files fit
//!
//! * [`context`][]: what both tasks need: the node's files, the API client, the annotation.
//! * `sync.rs`: labels and scheduling. `drain.rs`: moves the pods elsewhere.
//!
//! The result is a [`DrainState`], by which [`startup`][crate::cluster::kubernetes::startup] and
//! [`desired`][crate::cluster::kubernetes::desired] decide what may stop or change.

use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::kubernetes::version::ReleaseVersion;
use model::role_declaration::Sha256;
use proto::curator::v1::ServiceStatus;
use proto::curator::v1::service_status::Kind;
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::child::lifecycle::ChildContext;
use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::component_revisions::RevisionHistory;
use crate::cluster::kubernetes::components::{kubelet, service_id};
use crate::cluster::kubernetes::node_object::context::NodeContext;
use crate::cluster::kubernetes::node_object::drain::drain_node;
use crate::cluster::kubernetes::node_object::sync::sync_node;
use crate::cluster::kubernetes::setup::NodeSetup;
use crate::cluster::kubernetes::startup::{DrainState, KubernetesStartup, RoleStartup};

pub mod context;
mod drain;
mod sync;

#[derive(Clone, Debug, Default)]
struct NodeInputs {
    startup: Option<KubernetesStartup>,
    bundle: InstalledBundle,
    statuses: Option<Vec<ServiceStatus>>,
    revisions: RevisionHistory,
}

/// What to do with the node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NodeTask {
    /// Do nothing, for example because no kubelet runs here.
    Idle,
    /// Keep labels in sync and the node uncordoned.
    Sync,
    /// Cordon the node and evict its pods.
    Drain,
}

/// Chooses the task, and the drain state to publish until it is done; `None` while the kubelet's status is unknown.
fn choose_task(known: &NodeInputs) -> Option<(NodeTask, DrainState)> {
    let (startup, statuses) = (known.startup.as_ref()?, known.statuses.as_ref()?);
    let kubelet = service_id(KubernetesDuty::Worker, kubelet::NAME);
    let running = statuses.iter().find(|status| {
        status.role == kubelet.role
            && status.service == kubelet.service
            && matches!(status.kind(), Kind::Healthy | Kind::Unhealthy | Kind::Starting)
    });
    let to_run = known.bundle.bundle.as_ref().map(|bundle| bundle.digest);
    let leaves = matches!(startup.worker, RoleStartup::Draining(_));
    // Without a kubelet no component would end the pods of a drain.
    let Some(running) = running else {
        return Some((
            NodeTask::Idle,
            DrainState { is_drained: true, allowed_bundle: to_run, is_evicted: false },
        ));
    };
    let runs_by = known.revisions.get(running.declaration_revision).map(|run| run.bundle.clone());
    let same = to_run.is_some_and(|to_run| runs_by == Some(hex::encode(to_run.0)));
    let bundle = to_run.filter(|_| same);
    let task = match &startup.worker {
        RoleStartup::On if to_run.is_none() => NodeTask::Idle,
        RoleStartup::On if same => NodeTask::Sync,
        RoleStartup::On | RoleStartup::Draining(_) => NodeTask::Drain,
        RoleStartup::Off(_) | RoleStartup::Paused(_) => NodeTask::Idle,
    };
    // Once the role is off there is no way back: the worker is being stopped.
    let over = !leaves && matches!(startup.worker, RoleStartup::Off(_));
    Some((task, DrainState { is_drained: over, allowed_bundle: bundle, is_evicted: false }))
}

/// Makes the runnable that manages the Node object, and publishes the drain state in `output`.
#[must_use]
pub fn manage_node_object(context: NodeContext, output: WatchCell<DrainState>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (context, output) = (context.clone(), output.clone());
        async move {
            if output.latest().is_none() && !has_kubelet_record(&context.children) {
                output.set(DrainState { is_drained: true, ..DrainState::default() });
            } else if output.latest().is_none() {
                output.set(DrainState::default());
            }
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut inputs = CombinedInputs::new(NodeInputs::default())
                .with(&context.startup, |known: &mut NodeInputs, startup| known.startup = Some(startup))
                .with(&context.bundle, |known: &mut NodeInputs, held| known.bundle = held)
                .with(&context.statuses, |known: &mut NodeInputs, statuses| known.statuses = Some(statuses))
                .with(&context.revisions, |known: &mut NodeInputs, runs| known.revisions = runs);
            let mut known = scope.until_cancelled(inputs.next()).await?;
            let mut at_work: Option<(NodeTask, Option<Sha256>, Option<NodeSetup>)> = None;
            loop {
                let Some((task, handed)) = choose_task(&known) else {
                    known = scope.until_cancelled(inputs.next()).await?;
                    continue;
                };
                let to_run = known.bundle.bundle.as_ref().map(|bundle| bundle.digest);
                let setup = known.startup.as_ref().and_then(|startup| startup.setup.clone());
                // A drain that has completed stays so until the node has another task.
                let now = Some((task.clone(), to_run, setup.clone()));
                if at_work != now {
                    at_work.clone_from(&now);
                    publish(&output, handed);
                }
                let (version, leaving) = (kubernetes_version(&known), is_draining(&known));
                let done = output.latest().is_some_and(|drain_state| match task {
                    NodeTask::Drain if leaving => drain_state.is_drained,
                    NodeTask::Drain => drain_state.allowed_bundle == to_run,
                    _ => false,
                });
                let work = async {
                    match task {
                        NodeTask::Drain if !done => {
                            let is_evicted = drain_node(&context, version).await?;
                            let bundle = to_run.filter(|_| !leaving);
                            let handed =
                                DrainState { is_drained: leaving, allowed_bundle: bundle, is_evicted };
                            publish(&output, handed);
                            std::future::pending().await
                        }
                        NodeTask::Sync => sync_node(&context, setup.as_ref()).await,
                        NodeTask::Idle | NodeTask::Drain => std::future::pending().await,
                    }
                };
                tokio::pin!(work);
                // A change that does not affect the task does not interrupt it.
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        done = &mut work => done?,
                        next = inputs.next() => {
                            known = next;
                            let setup = known.startup.as_ref().and_then(|startup| startup.setup.clone());
                            let to_run = known.bundle.bundle.as_ref().map(|bundle| bundle.digest);
                            let next = self::choose_task(&known).map(|(task, _)| (task, to_run, setup));
                            if next != now {
                                break;
                            }
                        }
                    }
                }
            }
        }
    })
}

fn publish(output: &WatchCell<DrainState>, handed: DrainState) {
    if output.latest().as_ref() != Some(&handed) {
        output.set(handed);
    }
}

fn is_draining(known: &NodeInputs) -> bool {
    known.startup.as_ref().is_some_and(|startup| matches!(startup.worker, RoleStartup::Draining(_)))
}

fn kubernetes_version(known: &NodeInputs) -> Option<ReleaseVersion> {
    known.bundle.bundle.as_ref().map(|bundle| bundle.manifest.kubernetes)
}

/// Whether a kubelet is recorded among the children.
fn has_kubelet_record(children: &ChildContext) -> bool {
    children.recorded_names().contains(&service_id(KubernetesDuty::Worker, kubelet::NAME).child_name())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::kubernetes::components::tests::bundle;

    fn status(kind: Kind, revision: u64) -> ServiceStatus {
        let kubelet = service_id(KubernetesDuty::Worker, kubelet::NAME);
        ServiceStatus {
            role: kubelet.role,
            service: kubelet.service,
            kind: kind.into(),
            declaration_revision: revision,
            ..Default::default()
        }
    }

    #[test]
    fn node_is_drained_only_before_its_role_or_its_bundle_changes() {
        let mut runs = RevisionHistory::default();
        let own = runs.revision_for(3, &hex::encode(bundle().digest.0), "1.20.2", "", 0);
        let other = runs.revision_for(3, "cd", "1.20.1", "", 0);
        let leaving = || RoleStartup::Draining(String::new());
        let held = || RoleStartup::Paused(String::new());
        let digest = Some(bundle().digest);
        let state = |over, bundle| DrainState { is_drained: over, allowed_bundle: bundle, is_evicted: false };
        let nothing = |over, bundle| (NodeTask::Idle, state(over, bundle));
        let hand_over = |bundle| (NodeTask::Drain, state(false, bundle));
        let keep = (NodeTask::Sync, state(false, digest));
        for (worker, statuses, has, expected) in [
            (RoleStartup::On, vec![status(Kind::Healthy, own)], true, keep.clone()),
            (RoleStartup::On, vec![status(Kind::Unhealthy, own)], true, keep),
            (RoleStartup::On, vec![status(Kind::Healthy, other)], true, hand_over(None)),
            (RoleStartup::On, vec![status(Kind::Healthy, 99)], true, hand_over(None)),
            // The desired bundle is not installed yet.
            (RoleStartup::On, vec![status(Kind::Healthy, own)], false, nothing(false, None)),
            // No kubelet runs that could end a pod.
            (RoleStartup::On, vec![], true, nothing(true, digest)),
            (RoleStartup::On, vec![status(Kind::BackingOff, other)], true, nothing(true, digest)),
            (leaving(), vec![status(Kind::Healthy, own)], true, hand_over(digest)),
            (leaving(), vec![status(Kind::Healthy, own)], false, hand_over(None)),
            (leaving(), vec![], true, nothing(true, digest)),
            (held(), vec![status(Kind::Healthy, own)], true, nothing(false, digest)),
            (RoleStartup::Off(None), vec![status(Kind::Healthy, own)], true, nothing(true, digest)),
            (RoleStartup::Off(None), vec![], false, nothing(true, None)),
        ] {
            let known = NodeInputs {
                startup: Some(KubernetesStartup {
                    controller: RoleStartup::Off(None),
                    worker: worker.clone(),
                    setup: None,
                }),
                bundle: InstalledBundle { bundle: has.then(bundle), message: None },
                statuses: Some(statuses.clone()),
                revisions: runs.clone(),
            };
            assert_eq!(choose_task(&known), Some(expected), "{worker:?} {statuses:?} {has}");
        }
        assert_eq!(choose_task(&NodeInputs::default()), None);
    }
}
