//! Rules of the server for single kinds: names, defaults, and immutable fields.
//!
//! From the sources of Kubernetes: `pkg/apis/*/v1/defaults.go` and `pkg/apis/*/validation`.

use serde_json::{Value, json};
use shepherd::reconciler::objects::object_kind::ObjectKind;

const TABLE: &[(&str, &str, &str, bool)] = &[
    ("", "Namespace", "namespaces", false),
    ("", "Node", "nodes", false),
    ("", "ConfigMap", "configmaps", true),
    ("", "Secret", "secrets", true),
    ("rbac.authorization.k8s.io", "ClusterRole", "clusterroles", false),
    ("rbac.authorization.k8s.io", "ClusterRoleBinding", "clusterrolebindings", false),
    ("scheduling.k8s.io", "PriorityClass", "priorityclasses", false),
    ("node.k8s.io", "RuntimeClass", "runtimeclasses", false),
    ("storage.k8s.io", "StorageClass", "storageclasses", false),
    ("storage.k8s.io", "CSIDriver", "csidrivers", false),
];

/// A group whose only kind can be created and nothing else: it has no objects.
pub(super) const REVIEWS: (&str, &str, &str) =
    ("authorization.k8s.io", "SubjectAccessReview", "subjectaccessreviews");

/// A field that no server knows, as if it were of a later Kubernetes.
pub(crate) const UNKNOWN_FIELD: &str = "fieldOfALaterKubernetes";

pub(super) fn kinds() -> impl Iterator<Item = ObjectKind> {
    TABLE.iter().map(|(group, kind, plural, namespaced)| ObjectKind {
        group: (*group).to_owned(),
        version: "v1".to_owned(),
        kind: (*kind).to_owned(),
        plural: (*plural).to_owned(),
        namespaced: *namespaced,
    })
}

/// Fills in the defaults of absent fields, and drops a `globalDefault` of `false` and a field that is not known, as the
/// real server does.
pub(super) fn default(kind: &ObjectKind, object: &mut Value) {
    let mut fill = |path: &str, value: Value| {
        let (parent, field) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = if parent.is_empty() { Some(&mut *object) } else { object.pointer_mut(parent) };
        if let Some(Value::Object(parent)) = parent {
            parent.entry(field.trim_start_matches('/')).or_insert(value);
        }
    };
    match kind.kind.as_str() {
        "ClusterRoleBinding" => fill("/roleRef/apiGroup", json!("rbac.authorization.k8s.io")),
        "PriorityClass" => fill("/preemptionPolicy", json!("PreemptLowerPriority")),
        "StorageClass" => {
            fill("/reclaimPolicy", json!("Delete"));
            fill("/volumeBindingMode", json!("Immediate"));
        }
        "CSIDriver" => {
            fill("/spec/attachRequired", json!(true));
            fill("/spec/podInfoOnMount", json!(false));
            fill("/spec/volumeLifecycleModes", json!(["Persistent"]));
            fill("/spec/fsGroupPolicy", json!("ReadWriteOnceWithFSType"));
            fill("/spec/storageCapacity", json!(false));
            fill("/spec/requiresRepublish", json!(false));
            fill("/spec/seLinuxMount", json!(false));
        }
        _ => {}
    }
    if kind.kind == "ClusterRoleBinding" {
        for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
            if subject["kind"] != "ServiceAccount" && subject.get("apiGroup").is_none() {
                subject["apiGroup"] = json!("rbac.authorization.k8s.io");
            }
        }
    }
    if let Some(fields) = object.as_object_mut() {
        fields.remove(UNKNOWN_FIELD);
        if fields.get("globalDefault") == Some(&json!(false)) {
            fields.remove("globalDefault");
        }
    }
}

/// The errors in an object, each as a field and a message.
pub(super) fn wrong(
    kind: &ObjectKind,
    before: Option<&Value>,
    object: &Value,
) -> Vec<(&'static str, String)> {
    let mut wrong = Vec::new();
    let fixed = "Invalid value: field is immutable";
    let rules: &[(&'static str, &str)] = match kind.kind.as_str() {
        "ClusterRoleBinding" => &[("/roleRef", "Invalid value: cannot change roleRef")],
        "PriorityClass" => {
            &[("/value", "Forbidden: may not be changed in an update."), ("/preemptionPolicy", fixed)]
        }
        "RuntimeClass" => &[("/handler", fixed)],
        "StorageClass" => &[
            ("/provisioner", "Forbidden: updates to provisioner are forbidden."),
            ("/parameters", "Forbidden: updates to parameters are forbidden."),
            ("/reclaimPolicy", "Forbidden: updates to reclaimPolicy are forbidden."),
            ("/volumeBindingMode", fixed),
        ],
        "CSIDriver" => &[("/spec/attachRequired", fixed), ("/spec/fsGroupPolicy", fixed)],
        _ => &[],
    };
    for (field, message) in rules {
        if before.is_some_and(|before| before.pointer(field) != object.pointer(field)) {
            wrong.push((*field, (*message).to_owned()));
        }
    }
    let is_label =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    if kind.kind == "RuntimeClass" && !object["handler"].as_str().is_some_and(is_label) {
        wrong.push(("/handler", "Invalid value: a lowercase RFC 1123 label must consist of …".to_owned()));
    }
    if kind.kind == "ClusterRole"
        && object["aggregationRule"].as_object().is_some_and(serde_json::Map::is_empty)
    {
        wrong.push((
            "/aggregationRule",
            "Required value: at least one clusterRoleSelector required".to_owned(),
        ));
    }
    wrong
}
