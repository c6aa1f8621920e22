//! Sync the labels of this worker's Node object, and lift the cordon of an earlier drain.

use std::collections::BTreeMap;
use std::time::Duration;

use reconciler::objects::api_client::ApiError;
use serde_json::{Map, Value as Json, json};
use supervisor::exit_reason::RunnableError;

use crate::cluster::kubernetes::node_object::context::{
    CORDON_ANNOTATION, DRAIN_FILE, NodeContext, POLL_INTERVAL, api_client,
};
use crate::cluster::kubernetes::setup::NodeSetup;

/// Interval between two checks of an object that is in sync.
const SYNC_INTERVAL: Duration = Duration::from_secs(30);
/// Prefixes of the labels that the cluster owns.
const LABEL_PREFIXES: [&str; 2] = ["shepherd/", "label.shepherd/"];

/// Keeps labels and scheduling of the node in sync with the setup, for ever.
pub(super) async fn sync_node(context: &NodeContext, setup: Option<&NodeSetup>) -> Result<(), RunnableError> {
    let (kubernetes, name) = api_client(context)?;
    let labels: BTreeMap<String, String> = setup
        .into_iter()
        .flat_map(NodeSetup::labels)
        .filter(|(key, _)| is_own_label(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    // An earlier drain is over.
    context.files.remove_file(DRAIN_FILE)?;
    loop {
        let requested = async {
            let api = kubernetes.client().await?;
            let Some(node) = api.read_node(&name).await? else { return Ok(false) };
            if let Some(change) = node_patch(&node, &labels) {
                tracing::info!(patch = %change, "the Node object of this node is patched");
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
