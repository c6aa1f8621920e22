//! What is asked of an API server about nodes and the pods on them.
//!
//! All nodes are listed by whoever keeps the objects. All else is asked by a worker about its own node, with the kubelet's
//! certificate, which lets it do no more than this: the authorizer for nodes and the admission plugin `NodeRestriction`
//! (Kubernetes, "Using Node Authorization") allow it to amend its own node, but for labels below `kubernetes.io`, and to
//! evict pods that are bound to it.

use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use serde_json::{Value, json};

use crate::reconciler::objects::kind::{Key, Kind, MANAGER, in_address};
use crate::reconciler::objects::kubernetes::{Api, AskError, items, unsent, within};

/// A kind of the core of Kubernetes, which has no name as a group.
fn core(kind: &str, plural: &str, namespaced: bool) -> Kind {
    let (kind, plural) = (kind.to_owned(), plural.to_owned());
    Kind { group: String::new(), version: "v1".to_owned(), kind, plural, namespaced }
}

/// Nodes.
pub(super) fn nodes() -> Kind {
    core("Node", "nodes", false)
}

fn pods() -> Kind {
    core("Pod", "pods", true)
}

/// What an API server says to an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The pod is told to end, or is gone.
    Done,
    /// Not now: too few others of its kind would be left.
    NotNow,
}

impl Api {
    /// What stands in every node as it does in other objects: its name, its labels, which state of it this is.
    ///
    /// What else a node says is a hundred times as much.
    pub async fn nodes(&self) -> Result<Vec<Value>, AskError> {
        let request = Request::new(nodes().path(None)).list_metadata(&ListParams::default());
        items(within(self.0.request(request.map_err(|error| unsent(&error))?)).await?, &nodes())
    }

    /// A node; none where nobody has registered it.
    pub async fn node(&self, name: &str) -> Result<Option<Value>, AskError> {
        self.get(&nodes(), &Key { namespace: None, name: name.to_owned() }).await
    }

    /// Changes of a node what this says (RFC 7386).
    pub async fn amend_node(&self, name: &str, change: &Value) -> Result<(), AskError> {
        let parameters = PatchParams { field_manager: Some(MANAGER.to_owned()), ..PatchParams::default() };
        let request =
            Request::new(nodes().path(None)).patch(&in_address(name), &parameters, &Patch::Merge(change));
        within(self.0.request::<Value>(request.map_err(|error| unsent(&error))?)).await.map(drop)
    }

    /// All pods that are bound to a node.
    pub async fn pods_on(&self, node: &str) -> Result<Vec<Value>, AskError> {
        let parameters = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let request = Request::new(pods().path(None)).list(&parameters).map_err(|error| unsent(&error))?;
        items(within(self.0.request(request)).await?, &pods())
    }

    /// Has a pod end, if as many others of its kind are left as its budget for disruptions wants. `api_version` is that of
    /// the group `policy` in which an eviction is spoken of.
    pub async fn evict(&self, namespace: &str, pod: &str, api_version: &str) -> Result<Eviction, AskError> {
        let body = json!({
            "apiVersion": api_version, "kind": "Eviction", "metadata": {"namespace": namespace, "name": pod},
        });
        let request = Request::new(pods().path(Some(namespace)))
            .create_subresource(
                "eviction",
                &in_address(pod),
                &PostParams::default(),
                body.to_string().into_bytes(),
            )
            .map_err(|error| unsent(&error))?;
        match within(self.0.request::<Value>(request)).await {
            Ok(_) => Ok(Eviction::Done),
            Err(AskError::Refused(status)) if status.is_not_found() => Ok(Eviction::Done),
            Err(AskError::Refused(status)) if status.code == 429 => Ok(Eviction::NotNow),
            Err(error) => Err(error),
        }
    }
}
