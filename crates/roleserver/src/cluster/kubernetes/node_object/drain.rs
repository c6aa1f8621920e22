//! Drain the node: cordon it, evict its pods, and wait until they are gone.
//!
//! Each pod is evicted through the eviction API, which respects the budgets that its owner declared. Pods of a daemon
//! set and static pods stay, because they belong to the node. Pods that have finished stay, too.
//!
//! A drain takes [`DRAIN_TIMEOUT`] at most, or [`API_TIMEOUT`] if no API server responds; without a known API server it
//! ends at once. After that the kubelet is stopped anyway, and its pods end with it if the role has ended. The start
//! time is stored, so that a role server that is replaced in the middle does not start the timeout again.

use std::time::Duration;

use model::kubernetes::version::ReleaseVersion;
use reconciler::objects::api_client::{ApiClient, ApiError};
use reconciler::objects::node_api::Eviction;
use reconciler::objects::object_kind::{annotation, is_terminating};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use supervisor::exit_reason::RunnableError;

use crate::cluster::kubernetes::node_object::context::{
    CORDON_ANNOTATION, DRAIN_FILE, NodeContext, POLL_INTERVAL, api_client,
};
use crate::cluster::kubernetes::setup;

/// Longest time that a drain takes.
const DRAIN_TIMEOUT: Duration = Duration::from_mins(5);
/// Longest time that a drain goes on without a response from an API server.
const API_TIMEOUT: Duration = Duration::from_mins(1);
/// The first version whose eviction API is `policy/v1`.
const STABLE_EVICTION_API: ReleaseVersion = ReleaseVersion::new(1, 22, 0);

#[derive(Serialize, Deserialize)]
struct DrainStart {
    milliseconds: i64,
}

/// Evicts pods until none is left or the time is up. Returns whether none is left. `version` is that of Kubernetes in
/// the installed bundle; `None` without one.
pub(super) async fn drain_node(
    context: &NodeContext,
    version: Option<ReleaseVersion>,
) -> Result<bool, RunnableError> {
    let version = version.unwrap_or(STABLE_EVICTION_API);
    let (kubernetes, name) = api_client(context)?;
    let now = || context.clock.now().timestamp_millis();
    let kept: Option<DrainStart> = context.files.read_json_limited(DRAIN_FILE, 1 << 10).ok().flatten();
    let since = kept.map(|kept| kept.milliseconds).filter(|since| *since <= now()).unwrap_or_else(now);
    context.files.write_hint(DRAIN_FILE, &DrainStart { milliseconds: since })?;
    if setup::read_last(&context.files).is_none_or(|setup| setup.api_servers().is_empty()) {
        tracing::info!("no API server is known, so the pods of this node are not evicted");
        context.files.remove_file(DRAIN_FILE)?;
        return Ok(false);
    }
    tracing::info!("the pods of this node are evicted before it continues");
    let mut answered = now();
    let is_evicted = loop {
        let requested = async { evict_pods(&kubernetes.client().await?, &name, version).await };
        match tokio::time::timeout(API_TIMEOUT, requested).await {
            Ok(Ok(0)) => {
                tracing::info!("no pod of this node is left to evict");
                break true;
            }
            Ok(Ok(left)) => {
                answered = now();
                tracing::debug!(remaining_pods = left, "some pods of this node are not evicted yet");
            }
            Ok(Err(error)) => tracing::warn!(%error, "pods of this node are not evicted yet"),
            Err(_) => tracing::warn!("pods of this node are not evicted yet: no API server answers"),
        }
        if is_drain_timed_out(since, answered, now()) {
            tracing::error!("the time to evict pods is over; the remaining pods stop with the node");
            break false;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    };
    context.files.remove_file(DRAIN_FILE)?;
    Ok(is_evicted)
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
