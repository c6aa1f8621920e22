//! This worker's own object in Kubernetes: its labels, and its pods before they must go elsewhere.
//!
//! All of it is asked with the kubelet's certificate through the node's own load balancer, so that no node can do to
//! another what it does to itself. What that certificate does not allow is left: labels below `kubernetes.io` are not a
//! node's own to set.
//!
//! # Handing over
//!
//! Before a worker ends, and before its bundle changes, its pods go to other nodes: the node is closed to new ones, each
//! pod is evicted, which keeps to budgets for disruptions, and it is waited until they are gone. Pods of a daemon set and
//! those that the kubelet has from files stay, as they are the node's own. That takes [`PATIENCE`] at the most, and where
//! no API server answers [`UNANSWERED`]: then the kubelet ends all the same, and its pods with it if the role is gone. When
//! it began stands on the disk, so that a role server that is replaced meanwhile does not begin anew.
//!
//! A node that was closed for that is opened again when it is a worker with its bundle. One that a person closed stays so.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};

use crate::curator::clock::Clock;
use crate::model::declaration::Sha256;
use crate::model::kubernetes::bundle::Duty;
use crate::model::kubernetes::version::Version;
use crate::proto::curator::v1::ServiceStatus;
use crate::proto::curator::v1::service_status::Kind;
use crate::reconciler::objects::kind::{annotation, is_ending};
use crate::reconciler::objects::kubernetes::{Api, AskError, Connection, Identity, Kubernetes};
use crate::reconciler::objects::workers::Eviction;
use crate::roleserver::child::keep::Places;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::components::{id, kubelet};
use crate::roleserver::cluster::kubernetes::held::Held;
use crate::roleserver::cluster::kubernetes::material::{SERVERS, name};
use crate::roleserver::cluster::kubernetes::runs::Runs;
use crate::roleserver::cluster::kubernetes::setup::{self, Setup};
use crate::roleserver::cluster::kubernetes::startup::{Part, Startup};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::reduce::Inputs;
use crate::supervisor::value::Value;

/// How long handing over may take.
pub const PATIENCE: Duration = Duration::from_mins(5);
/// How long it is tried to reach an API server that does not answer.
pub const UNANSWERED: Duration = Duration::from_mins(1);
/// Between two looks at a node that is as it should be.
const LOOK: Duration = Duration::from_secs(30);
/// Between two looks at pods that are to go, or at a node that is not there yet.
const SOON: Duration = Duration::from_secs(2);
/// When handing over began.
const SINCE: &str = "kubernetes-leaving.json";
/// What labels of ours begin with.
const OURS: [&str; 2] = ["shepherd/", "label.shepherd/"];
/// Says of a node that we closed it.
const CLOSED: &str = "shepherd.dev/handing-over";
/// From this version on an eviction is spoken of in `policy/v1`.
const EVICTIONS_ARE_STABLE: Version = Version::new(1, 22, 0);

/// What this worker has handed over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Handed {
    /// Whether it has no pods that would have to go elsewhere before it ends.
    pub over: bool,
    /// The bundle that it may go on with: the one that it runs by, or another once its pods are elsewhere.
    pub bundle: Option<Sha256>,
}

#[derive(Serialize, Deserialize)]
struct Since {
    milliseconds: i64,
}

/// With what it is run.
#[derive(Clone)]
pub struct Around {
    /// What is kept.
    pub files: Files,
    /// Where programs are kept.
    pub places: Arc<Places>,
    /// The time.
    pub clock: Clock,
    /// The address of the load balancer.
    pub url: String,
    /// What is to run.
    pub startup: Value<Startup>,
    /// The bundle.
    pub held: Value<Held>,
    /// How components do.
    pub statuses: Value<Vec<ServiceStatus>>,
    /// By what they were started.
    pub runs: Value<Runs>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    startup: Option<Startup>,
    held: Held,
    statuses: Option<Vec<ServiceStatus>>,
    runs: Runs,
}

/// What is to be done with the node.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Task {
    /// Nothing: no kubelet of ours runs there.
    Nothing,
    /// It is as its cluster wants it, and open.
    Keep,
    /// Its pods go elsewhere.
    HandOver,
}

/// What is to be done, and what may be said meanwhile; none while nobody knows how the kubelet does.
fn task(known: &Known) -> Option<(Task, Handed)> {
    let (startup, statuses) = (known.startup.as_ref()?, known.statuses.as_ref()?);
    let kubelet = id(Duty::Worker, kubelet::NAME);
    let running = statuses.iter().find(|status| {
        status.role == kubelet.role
            && status.service == kubelet.service
            && matches!(status.kind(), Kind::Healthy | Kind::Unhealthy | Kind::Starting)
    });
    let to_run = known.held.bundle.as_ref().map(|bundle| bundle.digest);
    let leaves = matches!(startup.worker, Part::Leaving(_));
    // Without a kubelet nobody would end what is evicted.
    let Some(running) = running else {
        return Some((Task::Nothing, Handed { over: true, bundle: to_run }));
    };
    let runs_by = known.runs.get(running.declaration_revision).map(|run| run.bundle.clone());
    let same = to_run.is_some_and(|to_run| runs_by == Some(hex::encode(to_run.0)));
    let bundle = to_run.filter(|_| same);
    let task = match &startup.worker {
        Part::On if to_run.is_none() => Task::Nothing,
        Part::On if same => Task::Keep,
        Part::On | Part::Leaving(_) => Task::HandOver,
        Part::Off(_) | Part::Held(_) => Task::Nothing,
    };
    // Once it is off there is no way back: it is being ended.
    let over = !leaves && matches!(startup.worker, Part::Off(_));
    Some((task, Handed { over, bundle }))
}

/// The runnable; `output` is what was handed over.
#[must_use]
pub fn own_node(around: Around, output: Value<Handed>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (around, output) = (around.clone(), output.clone());
        async move {
            if output.latest().is_none() && !recorded(&around.places) {
                output.set(Handed { over: true, bundle: None });
            } else if output.latest().is_none() {
                output.set(Handed::default());
            }
            let healthy = starting.healthy();
            let scope = healthy.scope();
            let mut inputs = Inputs::new(Known::default())
                .with(&around.startup, |known: &mut Known, startup| known.startup = Some(startup))
                .with(&around.held, |known: &mut Known, held| known.held = held)
                .with(&around.statuses, |known: &mut Known, statuses| known.statuses = Some(statuses))
                .with(&around.runs, |known: &mut Known, runs| known.runs = runs);
            let mut known = scope.until_cancelled(inputs.next()).await?;
            let mut at_work: Option<(Task, Option<Sha256>, Option<Setup>)> = None;
            loop {
                let Some((task, handed)) = task(&known) else {
                    known = scope.until_cancelled(inputs.next()).await?;
                    continue;
                };
                let to_run = known.held.bundle.as_ref().map(|bundle| bundle.digest);
                let setup = known.startup.as_ref().and_then(|startup| startup.setup.clone());
                // What was handed over once stays so, until the node is told to do something else.
                let now = Some((task.clone(), to_run, setup.clone()));
                if at_work != now {
                    at_work.clone_from(&now);
                    tell(&output, handed);
                }
                let (version, leaving) = (version(&known), leaves(&known));
                let done = output.latest().is_some_and(|said| match task {
                    Task::HandOver if leaving => said.over,
                    Task::HandOver => said.bundle == to_run,
                    _ => false,
                });
                let work = async {
                    match task {
                        Task::HandOver if !done => {
                            hand_over(&around, version).await?;
                            let bundle = to_run.filter(|_| !leaving);
                            tell(&output, Handed { over: leaving, bundle });
                            std::future::pending().await
                        }
                        Task::Keep => keep(&around, setup.as_ref()).await,
                        Task::Nothing | Task::HandOver => std::future::pending().await,
                    }
                };
                tokio::pin!(work);
                // What makes no difference does not break it off.
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        done = &mut work => done?,
                        next = inputs.next() => {
                            known = next;
                            let setup = known.startup.as_ref().and_then(|startup| startup.setup.clone());
                            let to_run = known.held.bundle.as_ref().map(|bundle| bundle.digest);
                            let next = self::task(&known).map(|(task, _)| (task, to_run, setup));
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

fn tell(output: &Value<Handed>, handed: Handed) {
    if output.latest().as_ref() != Some(&handed) {
        output.set(handed);
    }
}

fn leaves(known: &Known) -> bool {
    known.startup.as_ref().is_some_and(|startup| matches!(startup.worker, Part::Leaving(_)))
}

fn version(known: &Known) -> Version {
    known.held.bundle.as_ref().map_or(EVICTIONS_ARE_STABLE, |bundle| bundle.manifest.kubernetes)
}

/// Whether there is anything of a kubelet here.
fn recorded(places: &Places) -> bool {
    places.recorded().contains(&id(Duty::Worker, kubelet::NAME).child())
}

/// The way to the API servers, and the name of this node.
fn way(around: &Around) -> Result<(Kubernetes, String), Stop> {
    let directory = around.files.kubernetes().join(name(Duty::Worker));
    let identity = Identity {
        authority: directory.join(SERVERS),
        certificate: directory.join("kubelet.crt"),
        key: directory.join("kubelet.key"),
    };
    let kubernetes = Kubernetes::new(Connection { url: around.url.clone(), identity: Some(identity) });
    let key = around.files.key()?.ok_or_else(|| Stop::because("this node has no key"))?;
    Ok((kubernetes, crate::roleserver::cluster::facts::id_of(&key).to_string()))
}

/// Keeps the node as its cluster wants it.
async fn keep(around: &Around, setup: Option<&Setup>) -> Result<(), Stop> {
    let (kubernetes, name) = way(around)?;
    let labels: BTreeMap<String, String> = setup
        .into_iter()
        .flat_map(Setup::labels)
        .filter(|(key, _)| is_ours(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    // Whatever was begun before is over.
    around.files.remove(SINCE)?;
    loop {
        let asked = async {
            let api = kubernetes.api().await?;
            let Some(node) = api.node(&name).await? else { return Ok(false) };
            if let Some(change) = amends(&node, &labels) {
                tracing::info!(%change, "this node's object in Kubernetes is amended");
                api.amend_node(&name, &change).await?;
            }
            Ok::<_, AskError>(true)
        };
        let pause = match asked.await {
            Ok(true) => LOOK,
            Ok(false) => SOON,
            Err(error) => {
                tracing::debug!(%error, "this node's object in Kubernetes could not be looked at");
                SOON
            }
        };
        tokio::time::sleep(pause).await;
    }
}

fn is_ours(label: &str) -> bool {
    OURS.iter().any(|ours| label.starts_with(ours))
}

/// What has to be changed of a node for it to have these labels, no others of ours, and to be open; none where it is so.
fn amends(node: &Json, labels: &BTreeMap<String, String>) -> Option<Json> {
    let nothing = Map::new();
    let of = |path: &str| node.pointer(path).and_then(Json::as_object).unwrap_or(&nothing);
    let has = of("/metadata/labels");
    let mut change = Map::new();
    for (key, value) in labels.iter().filter(|(key, value)| has.get(*key) != Some(&json!(value))) {
        change.insert(key.clone(), json!(value));
    }
    for key in has.keys().filter(|key| is_ours(key) && !labels.contains_key(*key)) {
        change.insert(key.clone(), Json::Null);
    }
    let closed = of("/metadata/annotations").contains_key(CLOSED);
    if change.is_empty() && !closed {
        return None;
    }
    let mut amends = json!({"metadata": {"labels": change}});
    if closed {
        amends["metadata"]["annotations"] = json!({CLOSED: null});
        amends["spec"] = json!({"unschedulable": null});
    }
    Some(amends)
}

/// Has pods go elsewhere, for as long as that may take.
async fn hand_over(around: &Around, version: Version) -> Result<(), Stop> {
    let (kubernetes, name) = way(around)?;
    let now = || around.clock.now().timestamp_millis();
    let kept: Option<Since> = around.files.read_up_to(SINCE, 1 << 10).ok().flatten();
    let since = kept.map(|kept| kept.milliseconds).filter(|since| *since <= now()).unwrap_or_else(now);
    around.files.write(SINCE, &Since { milliseconds: since })?;
    if setup::last(&around.files).is_none_or(|setup| setup.api_servers().is_empty()) {
        tracing::info!("no API server is known, so that pods of this node go nowhere else");
        return Ok(around.files.remove(SINCE)?);
    }
    tracing::info!("pods of this node go elsewhere before it goes on");
    let mut answered = now();
    loop {
        let asked = async { evict_all(&kubernetes.api().await?, &name, version).await };
        match tokio::time::timeout(UNANSWERED, asked).await {
            Ok(Ok(0)) => {
                tracing::info!("no pod of this node has to go elsewhere any more");
                break;
            }
            Ok(Ok(left)) => {
                answered = now();
                tracing::debug!(left, "pods of this node are still to go");
            }
            Ok(Err(error)) => tracing::warn!(%error, "pods of this node are not evicted yet"),
            Err(_) => tracing::warn!("pods of this node are not evicted yet: no API server answers"),
        }
        if is_given_up(since, answered, now()) {
            tracing::error!("pods of this node are not elsewhere in time, and end with it");
            break;
        }
        tokio::time::sleep(SOON).await;
    }
    Ok(around.files.remove(SINCE)?)
}

/// Whether it is no longer waited for pods, all in milliseconds since 1970: when it began, when an API server answered last.
fn is_given_up(since: i64, answered: i64, now: i64) -> bool {
    let taken = |since: i64| Duration::from_millis(u64::try_from(now - since).unwrap_or(0));
    taken(since) >= PATIENCE || taken(answered) >= UNANSWERED
}

/// Closes the node and asks every pod that is to go to do so; says how many there are.
async fn evict_all(api: &Api, name: &str, version: Version) -> Result<usize, AskError> {
    // One that was never registered has no pods.
    let Some(node) = api.node(name).await? else { return Ok(0) };
    if node.pointer("/spec/unschedulable") != Some(&Json::Bool(true)) {
        let change = json!({"metadata": {"annotations": {CLOSED: "true"}}, "spec": {"unschedulable": true}});
        api.amend_node(name, &change).await?;
    }
    let api_version = if version < EVICTIONS_ARE_STABLE { "policy/v1beta1" } else { "policy/v1" };
    let pods = api.pods_on(name).await?;
    let to_go: Vec<Pod> = pods.iter().filter_map(to_go).collect();
    let mut failed = None;
    for pod in to_go.iter().filter(|pod| !pod.ends) {
        match api.evict(&pod.namespace, &pod.name, api_version).await {
            Ok(Eviction::Done) => {
                tracing::info!(namespace = pod.namespace, name = pod.name, "a pod is evicted");
            }
            Ok(Eviction::NotNow) => {
                tracing::debug!(namespace = pod.namespace, name = pod.name, "a pod may not be evicted yet");
            }
            // The others go all the same.
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(to_go.len()), Err)
}

/// A pod that is to go.
#[derive(Debug, PartialEq, Eq)]
struct Pod {
    namespace: String,
    name: String,
    /// Whether it was told to end.
    ends: bool,
}

/// What is to go of a pod on this node: none of one that is the node's own, or is over.
fn to_go(pod: &Json) -> Option<Pod> {
    let text = |path: &str| pod.pointer(path).and_then(Json::as_str).unwrap_or_default().to_owned();
    let owners = pod.pointer("/metadata/ownerReferences").and_then(Json::as_array);
    let of_daemon_set = owners.into_iter().flatten().any(|owner| owner["kind"] == "DaemonSet");
    let from_file = annotation(pod, "kubernetes.io/config.mirror").is_some();
    let over = matches!(text("/status/phase").as_str(), "Succeeded" | "Failed");
    (!of_daemon_set && !from_file && !over).then(|| Pod {
        namespace: text("/metadata/namespace"),
        name: text("/metadata/name"),
        ends: is_ending(pod),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::cluster::kubernetes::components::tests::bundle;

    fn status(kind: Kind, revision: u64) -> ServiceStatus {
        let kubelet = id(Duty::Worker, kubelet::NAME);
        ServiceStatus {
            role: kubelet.role,
            service: kubelet.service,
            kind: kind.into(),
            declaration_revision: revision,
            ..Default::default()
        }
    }

    #[test]
    fn pods_are_waited_for_so_long_and_a_silent_api_server_less() {
        let minute = 60_000;
        for (since, answered, now, expected) in [
            (0, 0, 0, false),
            (0, 0, minute - 1, false),
            (0, 0, minute, true),
            (0, 5 * minute - 1, 5 * minute - 1, false),
            (0, 5 * minute, 5 * minute, true),
            // A clock that was set back gives it up no sooner.
            (9 * minute, 9 * minute, 0, false),
        ] {
            assert_eq!(is_given_up(since, answered, now), expected, "{since} {answered} {now}");
        }
    }

    #[test]
    fn pods_go_before_the_role_and_before_another_bundle_and_at_no_other_time() {
        let mut runs = Runs::default();
        let own = runs.number(3, &hex::encode(bundle().digest.0), "1.20.2", 0);
        let other = runs.number(3, "cd", "1.20.1", 0);
        let leaving = || Part::Leaving(String::new());
        let held = || Part::Held(String::new());
        let digest = Some(bundle().digest);
        let nothing = |over, bundle| (Task::Nothing, Handed { over, bundle });
        let hand_over = |bundle| (Task::HandOver, Handed { over: false, bundle });
        let keep = (Task::Keep, Handed { over: false, bundle: digest });
        for (worker, statuses, has, expected) in [
            (Part::On, vec![status(Kind::Healthy, own)], true, keep.clone()),
            (Part::On, vec![status(Kind::Unhealthy, own)], true, keep),
            (Part::On, vec![status(Kind::Healthy, other)], true, hand_over(None)),
            (Part::On, vec![status(Kind::Healthy, 99)], true, hand_over(None)),
            // The one that it is to have is not here yet.
            (Part::On, vec![status(Kind::Healthy, own)], false, nothing(false, None)),
            // None runs: there is nobody who could end a pod.
            (Part::On, vec![], true, nothing(true, digest)),
            (Part::On, vec![status(Kind::BackingOff, other)], true, nothing(true, digest)),
            (leaving(), vec![status(Kind::Healthy, own)], true, hand_over(digest)),
            (leaving(), vec![status(Kind::Healthy, own)], false, hand_over(None)),
            (leaving(), vec![], true, nothing(true, digest)),
            (held(), vec![status(Kind::Healthy, own)], true, nothing(false, digest)),
            (Part::Off(None), vec![status(Kind::Healthy, own)], true, nothing(true, digest)),
            (Part::Off(None), vec![], false, nothing(true, None)),
        ] {
            let known = Known {
                startup: Some(Startup { controller: Part::Off(None), worker: worker.clone(), setup: None }),
                held: Held { bundle: has.then(bundle), said: None },
                statuses: Some(statuses.clone()),
                runs: runs.clone(),
            };
            assert_eq!(task(&known), Some(expected), "{worker:?} {statuses:?} {has}");
        }
        assert_eq!(task(&Known::default()), None);
    }

    #[test]
    fn node_gets_its_labels_loses_those_of_before_and_is_opened_by_who_closed_it() {
        let labels = BTreeMap::from([("shepherd/machine".to_owned(), "m".to_owned())]);
        let node = |labels: Json, annotations: Json| json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": {"unschedulable": true}});
        let has = json!({"shepherd/machine": "m", "kubernetes.io/hostname": "n", "other": "1"});
        assert_eq!(amends(&node(has.clone(), json!({})), &labels), None, "a person closed it");
        assert_eq!(
            amends(&node(json!({"label.shepherd/row": "7", "other": "1"}), json!({})), &labels),
            Some(json!({"metadata": {"labels": {"shepherd/machine": "m", "label.shepherd/row": null}}}))
        );
        assert_eq!(
            amends(&node(has, json!({CLOSED: "true"})), &labels),
            Some(json!({
                "metadata": {"labels": {}, "annotations": {CLOSED: null}}, "spec": {"unschedulable": null},
            }))
        );
        assert!(amends(&json!({}), &labels).is_some());
        assert_eq!(amends(&json!({}), &BTreeMap::new()), None);
    }

    #[test]
    fn pods_that_are_the_nodes_own_or_over_stay() {
        let pod = |change: fn(&mut Json)| {
            let mut pod =
                json!({"metadata": {"namespace": "n", "name": "p"}, "status": {"phase": "Running"}});
            change(&mut pod);
            to_go(&pod)
        };
        let going = |ends| Some(Pod { namespace: "n".to_owned(), name: "p".to_owned(), ends });
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
