//! Kubernetes node calls: list and patch nodes, list and evict pods.
//!
//! The reconciler lists all nodes. All other calls are made by a worker about its own node, with the kubelet's
//! certificate, which allows no more than this: the authorizer for nodes and the admission plugin `NodeRestriction`
//! (Kubernetes, "Using Node Authorization") let it patch its own node, except labels below `kubernetes.io`, and evict
//! pods that are bound to it.

use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::core::Request;
use serde_json::{Value, json};

use crate::objects::api_client::{ApiClient, ApiError, request_error, take_items, with_timeout};
use crate::objects::object_kind::{FIELD_MANAGER, ObjectKey, ObjectKind, escape_path_segment};

/// A kind of the core API group, whose name is empty.
fn core_kind(kind: &str, plural: &str, namespaced: bool) -> ObjectKind {
    let (kind, plural) = (kind.to_owned(), plural.to_owned());
    ObjectKind { group: String::new(), version: "v1".to_owned(), kind, plural, namespaced }
}

/// The kind of nodes.
pub(super) fn node_kind() -> ObjectKind {
    core_kind("Node", "nodes", false)
}

fn pod_kind() -> ObjectKind {
    core_kind("Pod", "pods", true)
}

/// The API server's answer to an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The pod is terminating, or is gone.
    Accepted,
    /// Rejected for now: the disruption budget requires more pods of its kind.
    BlockedByBudget,
}

impl ApiClient {
    /// Lists the metadata of all nodes: name, labels, resource version.
    ///
    /// The other fields of a node are a hundred times as large.
    pub async fn list_nodes(&self) -> Result<Vec<Value>, ApiError> {
        let request = Request::new(node_kind().path(None)).list_metadata(&ListParams::default());
        take_items(
            with_timeout(self.0.request(request.map_err(|error| request_error(&error))?)).await?,
            &node_kind(),
        )
    }

    /// Reads a node; `None` if it is not registered.
    pub async fn read_node(&self, name: &str) -> Result<Option<Value>, ApiError> {
        self.get(&node_kind(), &ObjectKey { namespace: None, name: name.to_owned() }).await
    }

    /// Patches a node with a merge patch (RFC 7386).
    pub async fn patch_node(&self, name: &str, change: &Value) -> Result<(), ApiError> {
        let parameters =
            PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let request = Request::new(node_kind().path(None)).patch(
            &escape_path_segment(name),
            &parameters,
            &Patch::Merge(change),
        );
        with_timeout(self.0.request::<Value>(request.map_err(|error| request_error(&error))?)).await.map(drop)
    }

    /// Lists all pods that are bound to a node.
    pub async fn list_pods_on(&self, node: &str) -> Result<Vec<Value>, ApiError> {
        let parameters = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let request =
            Request::new(pod_kind().path(None)).list(&parameters).map_err(|error| request_error(&error))?;
        take_items(with_timeout(self.0.request(request)).await?, &pod_kind())
    }

    /// Evicts a pod, if its disruption budget allows it. `api_version` is the version of the group `policy` that the
    /// eviction is sent in.
    pub async fn evict_pod(
        &self,
        namespace: &str,
        pod: &str,
        api_version: &str,
    ) -> Result<Eviction, ApiError> {
        let body = json!({
            "apiVersion": api_version, "kind": "Eviction", "metadata": {"namespace": namespace, "name": pod},
        });
        let request = Request::new(pod_kind().path(Some(namespace)))
            .create_subresource(
                "eviction",
                &escape_path_segment(pod),
                &PostParams::default(),
                body.to_string().into_bytes(),
            )
            .map_err(|error| request_error(&error))?;
        match with_timeout(self.0.request::<Value>(request)).await {
            Ok(_) => Ok(Eviction::Accepted),
            Err(ApiError::Rejected(status)) if status.is_not_found() => Ok(Eviction::Accepted),
            Err(ApiError::Rejected(status)) if status.code == 429 => Ok(Eviction::BlockedByBudget),
            Err(error) => Err(error),
        }
    }
}
