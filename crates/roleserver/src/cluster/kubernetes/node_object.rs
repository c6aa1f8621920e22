//! This worker's Node object: labels, cordon, drain.
//!
//! All requests use the kubelet's certificate through the node's own load balancer, so a node cannot do anything to the
//! object of another one. What that certificate does not permit is left alone: a node may not set labels below
//! `kubernetes.io` on itself.
//!
//! # Draining
//!
//! Before a worker ends, and before its bundle changes, its pods are moved to other nodes: the node is cordoned, each
//! pod is evicted, which respects disruption budgets, and the drain waits until they are gone. Pods of a daemon set and
//! static pods stay, because they belong to the node. A drain takes [`DRAIN_TIMEOUT`] at most, or [`API_TIMEOUT`] if no
//! API server responds. After that the kubelet is stopped anyway, and its pods end with it if the role has ended. The
//! start time is stored, so that a role server that is replaced in the middle does not start the timeout again.
//!
//! A node that was cordoned for a drain is uncordoned when it is a worker with its bundle again. A node that an
//! operator cordoned stays cordoned.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use curator_client::clock::Clock;
use model::kubernetes::bundle_manifest::KubernetesDuty;
use model::kubernetes::version::ReleaseVersion;
use model::role_declaration::Sha256;
use proto::curator::v1::ServiceStatus;
use proto::curator::v1::service_status::Kind;
use reconciler::objects::api_client::{
    ApiClient, ApiError, ApiServerConnection, ClientIdentity, ReloadingClient,
};
use reconciler::objects::node_api::Eviction;
use reconciler::objects::object_kind::{annotation, is_terminating};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use supervisor::combine::CombinedInputs;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::bundle_install::InstalledBundle;
use crate::cluster::kubernetes::component_revisions::RevisionHistory;
use crate::cluster::kubernetes::components::{kubelet, service_id};
use crate::cluster::kubernetes::key_material::{SERVER_CAS, role_directory};
use crate::cluster::kubernetes::setup::{self, NodeSetup};
use crate::cluster::kubernetes::startup::{KubernetesStartup, RoleStartup};

/// Longest time that a drain takes.
pub const DRAIN_TIMEOUT: Duration = Duration::from_mins(5);
/// Longest time that a drain goes on without a response from an API server.
pub const API_TIMEOUT: Duration = Duration::from_mins(1);
/// Interval between two checks of an object that is in sync.
const SYNC_INTERVAL: Duration = Duration::from_secs(30);
/// Interval between two checks while pods are evicted, or while the object does not exist.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// File with the start time of the current drain.
const DRAIN_FILE: &str = "kubernetes-leaving.json";
/// Prefixes of the labels that the cluster owns.
const LABEL_PREFIXES: [&str; 2] = ["shepherd/", "label.shepherd/"];
/// Annotation of a node that was cordoned for a drain.
const CORDON_ANNOTATION: &str = "shepherd.dev/handing-over";
/// The first version whose eviction API is `policy/v1`.
const STABLE_EVICTION_API: ReleaseVersion = ReleaseVersion::new(1, 22, 0);

/// The result of draining this worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    /// Whether no pod has to be evicted before the worker ends.
    pub is_drained: bool,
    /// The bundle that the worker may run with: the current one, or another one once the node is drained.
    pub allowed_bundle: Option<Sha256>,
}

#[derive(Serialize, Deserialize)]
struct DrainStart {
    milliseconds: i64,
}

/// What the runnable needs from the node.
#[derive(Clone)]
pub struct NodeContext {
    /// Cluster files of this node.
    pub files: ClusterFiles,
    /// Where children of the role server are recorded.
    pub children: Arc<ChildContext>,
    /// Clock for the start time of a drain.
    pub clock: Clock,
    /// URL of the node's load balancer.
    pub url: String,
    /// Which Kubernetes roles run here.
    pub startup: WatchCell<KubernetesStartup>,
    /// The installed bundle, if there is one.
    pub bundle: WatchCell<InstalledBundle>,
    /// Status of every component.
    pub statuses: WatchCell<Vec<ServiceStatus>>,
    /// Revisions that components were started with.
    pub revisions: WatchCell<RevisionHistory>,
}

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
    // Without a kubelet no component would end evicted pods.
    let Some(running) = running else {
        return Some((NodeTask::Idle, DrainState { is_drained: true, allowed_bundle: to_run }));
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
    Some((task, DrainState { is_drained: over, allowed_bundle: bundle }))
}

/// Makes the runnable that manages the Node object, and publishes the drain state in `output`.
#[must_use]
pub fn manage_node_object(around: NodeContext, output: WatchCell<DrainState>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (around, output) = (around.clone(), output.clone());
        async move {
            if output.latest().is_none() && !has_kubelet_record(&around.children) {
                output.set(DrainState { is_drained: true, allowed_bundle: None });
            } else if output.latest().is_none() {
                output.set(DrainState::default());
            }
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            let mut inputs = CombinedInputs::new(NodeInputs::default())
                .with(&around.startup, |known: &mut NodeInputs, startup| known.startup = Some(startup))
                .with(&around.bundle, |known: &mut NodeInputs, held| known.bundle = held)
                .with(&around.statuses, |known: &mut NodeInputs, statuses| known.statuses = Some(statuses))
                .with(&around.revisions, |known: &mut NodeInputs, runs| known.revisions = runs);
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
                            drain_node(&around, version).await?;
                            let bundle = to_run.filter(|_| !leaving);
                            publish(&output, DrainState { is_drained: leaving, allowed_bundle: bundle });
                            std::future::pending().await
                        }
                        NodeTask::Sync => sync_node(&around, setup.as_ref()).await,
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

fn kubernetes_version(known: &NodeInputs) -> ReleaseVersion {
    known.bundle.bundle.as_ref().map_or(STABLE_EVICTION_API, |bundle| bundle.manifest.kubernetes)
}

/// Whether a kubelet is recorded among the children.
fn has_kubelet_record(places: &ChildContext) -> bool {
    places.recorded_names().contains(&service_id(KubernetesDuty::Worker, kubelet::NAME).child_name())
}

/// A client for the API servers, and the name of this node.
fn api_client(around: &NodeContext) -> Result<(ReloadingClient, String), RunnableError> {
    let directory = around.files.kubernetes_directory().join(role_directory(KubernetesDuty::Worker));
    let identity = ClientIdentity {
        authority: directory.join(SERVER_CAS),
        certificate: directory.join("kubelet.crt"),
        key: directory.join("kubelet.key"),
    };
    let kubernetes =
        ReloadingClient::new(ApiServerConnection { url: around.url.clone(), identity: Some(identity) });
    let key = around.files.read_key()?.ok_or_else(|| RunnableError::msg("this node has no key"))?;
    Ok((kubernetes, crate::cluster::node_facts::node_id_of_key(&key).to_string()))
}

/// Keeps labels and scheduling of the node in sync with the setup, for ever.
async fn sync_node(around: &NodeContext, setup: Option<&NodeSetup>) -> Result<(), RunnableError> {
    let (kubernetes, name) = api_client(around)?;
    let labels: BTreeMap<String, String> = setup
        .into_iter()
        .flat_map(NodeSetup::labels)
        .filter(|(key, _)| is_own_label(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    // An earlier drain is over.
    around.files.remove_file(DRAIN_FILE)?;
    loop {
        let requested = async {
            let api = kubernetes.client().await?;
            let Some(node) = api.read_node(&name).await? else { return Ok(false) };
            if let Some(change) = node_patch(&node, &labels) {
                tracing::info!(patch = %change, "this node's object in Kubernetes is amended");
                api.patch_node(&name, &change).await?;
            }
            Ok::<_, ApiError>(true)
        };
        let pause = match requested.await {
            Ok(true) => SYNC_INTERVAL,
            Ok(false) => POLL_INTERVAL,
            Err(error) => {
                tracing::debug!(%error, "this node's object in Kubernetes could not be looked at");
                POLL_INTERVAL
            }
        };
        tokio::time::sleep(pause).await;
    }
}

fn is_own_label(label: &str) -> bool {
    LABEL_PREFIXES.iter().any(|ours| label.starts_with(ours))
}

/// The patch that gives a node these labels, removes other labels that the cluster owns, and lifts our cordon; `None`
/// if nothing differs.
fn node_patch(node: &Json, labels: &BTreeMap<String, String>) -> Option<Json> {
    let nothing = Map::new();
    let of = |path: &str| node.pointer(path).and_then(Json::as_object).unwrap_or(&nothing);
    let has = of("/metadata/labels");
    let mut change = Map::new();
    for (key, value) in labels.iter().filter(|(key, value)| has.get(*key) != Some(&json!(value))) {
        change.insert(key.clone(), json!(value));
    }
    for key in has.keys().filter(|key| is_own_label(key) && !labels.contains_key(*key)) {
        change.insert(key.clone(), Json::Null);
    }
    let closed = of("/metadata/annotations").contains_key(CORDON_ANNOTATION);
    if change.is_empty() && !closed {
        return None;
    }
    let mut amends = json!({"metadata": {"labels": change}});
    if closed {
        amends["metadata"]["annotations"] = json!({CORDON_ANNOTATION: null});
        amends["spec"] = json!({"unschedulable": null});
    }
    Some(amends)
}

/// Evicts pods until none is left or the time is up.
async fn drain_node(around: &NodeContext, version: ReleaseVersion) -> Result<(), RunnableError> {
    let (kubernetes, name) = api_client(around)?;
    let now = || around.clock.now().timestamp_millis();
    let kept: Option<DrainStart> = around.files.read_json_limited(DRAIN_FILE, 1 << 10).ok().flatten();
    let since = kept.map(|kept| kept.milliseconds).filter(|since| *since <= now()).unwrap_or_else(now);
    around.files.write_json(DRAIN_FILE, &DrainStart { milliseconds: since })?;
    if setup::read_last(&around.files).is_none_or(|setup| setup.api_servers().is_empty()) {
        tracing::info!("no API server is known, so that pods of this node go nowhere else");
        return Ok(around.files.remove_file(DRAIN_FILE)?);
    }
    tracing::info!("pods of this node go elsewhere before it goes on");
    let mut answered = now();
    loop {
        let requested = async { evict_pods(&kubernetes.client().await?, &name, version).await };
        match tokio::time::timeout(API_TIMEOUT, requested).await {
            Ok(Ok(0)) => {
                tracing::info!("no pod of this node has to go elsewhere any more");
                break;
            }
            Ok(Ok(left)) => {
                answered = now();
                tracing::debug!(remaining_pods = left, "pods of this node are still to go");
            }
            Ok(Err(error)) => tracing::warn!(%error, "pods of this node are not evicted yet"),
            Err(_) => tracing::warn!("pods of this node are not evicted yet: no API server answers"),
        }
        if is_drain_timed_out(since, answered, now()) {
            tracing::error!("pods of this node are not elsewhere in time, and end with it");
            break;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(around.files.remove_file(DRAIN_FILE)?)
}

/// Whether a drain gives up waiting. `since` is its start, `answered` the last response of an API server, all in
/// milliseconds since 1970.
fn is_drain_timed_out(since: i64, answered: i64, now: i64) -> bool {
    let taken = |since: i64| Duration::from_millis(u64::try_from(now - since).unwrap_or(0));
    taken(since) >= DRAIN_TIMEOUT || taken(answered) >= API_TIMEOUT
}

/// Cordons the node and evicts every pod that has to go; returns how many there are.
async fn evict_pods(api: &ApiClient, name: &str, version: ReleaseVersion) -> Result<usize, ApiError> {
    // A node that was never registered has no pods.
    let Some(node) = api.read_node(name).await? else { return Ok(0) };
    if node.pointer("/spec/unschedulable") != Some(&Json::Bool(true)) {
        let change = json!({"metadata": {"annotations": {CORDON_ANNOTATION: "true"}}, "spec": {"unschedulable": true}});
        api.patch_node(name, &change).await?;
    }
    let api_version = if version < STABLE_EVICTION_API { "policy/v1beta1" } else { "policy/v1" };
    let pods = api.list_pods_on(name).await?;
    let to_go: Vec<EvictablePod> = pods.iter().filter_map(evictable_pod).collect();
    let mut failed = None;
    for pod in to_go.iter().filter(|pod| !pod.is_ending) {
        match api.evict_pod(&pod.namespace, &pod.name, api_version).await {
            Ok(Eviction::Accepted) => {
                tracing::info!(namespace = pod.namespace, name = pod.name, "a pod is evicted");
            }
            Ok(Eviction::BlockedByBudget) => {
                tracing::debug!(namespace = pod.namespace, name = pod.name, "a pod may not be evicted yet");
            }
            // Evict the remaining pods despite the error.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(to_go.len()), Err)
}

/// A pod that has to be evicted.
#[derive(Debug, PartialEq, Eq)]
struct EvictablePod {
    namespace: String,
    name: String,
    /// Whether it is already terminating.
    is_ending: bool,
}

/// The pod, if it has to be evicted; `None` if it belongs to the node or has finished.
fn evictable_pod(pod: &Json) -> Option<EvictablePod> {
    let text = |path: &str| pod.pointer(path).and_then(Json::as_str).unwrap_or_default().to_owned();
    let owners = pod.pointer("/metadata/ownerReferences").and_then(Json::as_array);
    let of_daemon_set = owners.into_iter().flatten().any(|owner| owner["kind"] == "DaemonSet");
    let from_file = annotation(pod, "kubernetes.io/config.mirror").is_some();
    let over = matches!(text("/status/phase").as_str(), "Succeeded" | "Failed");
    (!of_daemon_set && !from_file && !over).then(|| EvictablePod {
        namespace: text("/metadata/namespace"),
        name: text("/metadata/name"),
        is_ending: is_terminating(pod),
    })
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
    fn drain_times_out_and_sooner_when_no_api_server_responds() {
        let minute = 60_000;
        for (since, answered, now, expected) in [
            (0, 0, 0, false),
            (0, 0, minute - 1, false),
            (0, 0, minute, true),
            (0, 5 * minute - 1, 5 * minute - 1, false),
            (0, 5 * minute, 5 * minute, true),
            // A clock that was set back does not end the drain earlier.
            (9 * minute, 9 * minute, 0, false),
        ] {
            assert_eq!(is_drain_timed_out(since, answered, now), expected, "{since} {answered} {now}");
        }
    }

    #[test]
    fn node_is_drained_only_before_its_role_or_its_bundle_changes() {
        let mut runs = RevisionHistory::default();
        let own = runs.revision_for(3, &hex::encode(bundle().digest.0), "1.20.2", 0);
        let other = runs.revision_for(3, "cd", "1.20.1", 0);
        let leaving = || RoleStartup::Draining(String::new());
        let held = || RoleStartup::Paused(String::new());
        let digest = Some(bundle().digest);
        let nothing =
            |over, bundle| (NodeTask::Idle, DrainState { is_drained: over, allowed_bundle: bundle });
        let hand_over = |bundle| (NodeTask::Drain, DrainState { is_drained: false, allowed_bundle: bundle });
        let keep = (NodeTask::Sync, DrainState { is_drained: false, allowed_bundle: digest });
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

    #[test]
    fn node_labels_are_synced_and_only_our_own_cordon_is_lifted() {
        let labels = BTreeMap::from([("shepherd/machine".to_owned(), "m".to_owned())]);
        let node = |labels: Json, annotations: Json| json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": {"unschedulable": true}});
        let has = json!({"shepherd/machine": "m", "kubernetes.io/hostname": "n", "other": "1"});
        assert_eq!(node_patch(&node(has.clone(), json!({})), &labels), None, "a person closed it");
        assert_eq!(
            node_patch(&node(json!({"label.shepherd/row": "7", "other": "1"}), json!({})), &labels),
            Some(json!({"metadata": {"labels": {"shepherd/machine": "m", "label.shepherd/row": null}}}))
        );
        assert_eq!(
            node_patch(&node(has, json!({CORDON_ANNOTATION: "true"})), &labels),
            Some(json!({
                "metadata": {"labels": {}, "annotations": {CORDON_ANNOTATION: null}}, "spec": {"unschedulable": null},
            }))
        );
        assert!(node_patch(&json!({}), &labels).is_some());
        assert_eq!(node_patch(&json!({}), &BTreeMap::new()), None);
    }

    #[test]
    fn daemon_static_and_finished_pods_are_not_evicted() {
        let pod = |change: fn(&mut Json)| {
            let mut pod =
                json!({"metadata": {"namespace": "n", "name": "p"}, "status": {"phase": "Running"}});
            change(&mut pod);
            evictable_pod(&pod)
        };
        let going =
            |ends| Some(EvictablePod { namespace: "n".to_owned(), name: "p".to_owned(), is_ending: ends });
        assert_eq!(pod(|_| {}), going(false));
        assert_eq!(
            pod(|pod| pod["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z")),
            going(true)
        );
        assert_eq!(
            pod(|pod| pod["metadata"]["ownerReferences"] = json!([{"kind": "ReplicaSet"}])),
            going(false)
        );
        assert_eq!(pod(|pod| pod["metadata"]["ownerReferences"] = json!([{"kind": "DaemonSet"}])), None);
        assert_eq!(
            pod(|pod| pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"})),
            None
        );
        assert_eq!(pod(|pod| pod["status"]["phase"] = json!("Succeeded")), None);
    }
}
