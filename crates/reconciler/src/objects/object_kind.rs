//! Object kinds, keys, labels and metadata.
//!
//! Objects are stored as the server's JSON. Types of one version of Kubernetes would lose the fields that they do not
//! know, and an update of another client's object must lose none of its fields.

use std::fmt;

use serde_json::Value;

/// The label of all objects that are managed here. An object that gets this label from someone else is deleted.
pub const MANAGED_LABEL: &str = "shepherd.dev/kept";
/// The value of [`MANAGED_LABEL`] on objects of the release.
pub const MANAGED_BUILT_IN: &str = "built-in";
/// The value of [`MANAGED_LABEL`] on objects of an add-on.
pub const MANAGED_ADD_ON: &str = "add-on";
/// The label with the name of the add-on.
pub const ADD_ON_LABEL: &str = "shepherd.dev/add-on";
/// The annotation with the SHA-256 of the applied object.
pub const APPLIED_ANNOTATION: &str = "shepherd.dev/applied";
/// The field manager that the server records for our writes.
pub const FIELD_MANAGER: &str = "shepherd";

/// A kind of objects, as a server serves it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKind {
    /// Its API group; empty for the core group.
    pub group: String,
    /// The API version within the group.
    pub version: String,
    /// Its name in objects, for example `ClusterRole`.
    pub kind: String,
    /// Its plural name in URLs, for example `clusterroles`.
    pub plural: String,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
}

impl ObjectKind {
    /// The `apiVersion` of its objects.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// The URL path of its objects: all of them, or those of one namespace.
    #[must_use]
    pub fn path(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let (api, plural) = (self.api_version(), &self.plural);
        match namespace {
            Some(namespace) => format!("{root}/{api}/namespaces/{}/{plural}", escape_path_segment(namespace)),
            None => format!("{root}/{api}/{plural}"),
        }
    }

    /// The resource type, which is the same for all versions.
    #[must_use]
    pub fn resource(&self) -> ResourceType {
        ResourceType { group: self.group.clone(), plural: self.plural.clone() }
    }
}

/// A resource in any version: listed once, and watched once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResourceType {
    /// Its API group; empty for the core group.
    pub group: String,
    /// Its plural name in URLs.
    pub plural: String,
}

impl fmt::Display for ResourceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group.as_str() {
            "" => f.write_str(&self.plural),
            group => write!(f, "{}.{group}", self.plural),
        }
    }
}

/// Identifies an object among those of its kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Its namespace; `None` for a kind that is not namespaced.
    pub namespace: Option<String>,
    /// Its name, unique within the namespace.
    pub name: String,
}

impl ObjectKey {
    /// The key of an object, from its metadata.
    #[must_use]
    pub fn from_object(object: &Value) -> Self {
        let text = |field: &str| metadata(object, field).and_then(Value::as_str);
        Self {
            namespace: text("namespace").filter(|namespace| !namespace.is_empty()).map(str::to_owned),
            name: text("name").unwrap_or_default().to_owned(),
        }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A metadata field of an object.
#[must_use]
pub fn metadata<'o>(object: &'o Value, field: &str) -> Option<&'o Value> {
    object.get("metadata")?.get(field)
}

/// A label of an object.
#[must_use]
pub fn label<'o>(object: &'o Value, name: &str) -> Option<&'o str> {
    metadata(object, "labels")?.get(name)?.as_str()
}

/// An annotation of an object.
#[must_use]
pub fn annotation<'o>(object: &'o Value, name: &str) -> Option<&'o str> {
    metadata(object, "annotations")?.get(name)?.as_str()
}

/// The uid of an object, which distinguishes it from earlier objects of its name.
#[must_use]
pub fn uid(object: &Value) -> &str {
    metadata(object, "uid").and_then(Value::as_str).unwrap_or_default()
}

/// The resource version of an object.
#[must_use]
pub fn resource_version(object: &Value) -> &str {
    metadata(object, "resourceVersion").and_then(Value::as_str).unwrap_or_default()
}

/// Whether the object is being deleted, and waits for its finalizers.
#[must_use]
pub fn is_terminating(object: &Value) -> bool {
    metadata(object, "deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// A name as a path segment. Names of roles may contain characters that URLs may not.
#[must_use]
pub fn escape_path_segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._:".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push('%');
            text.push_str(&hex::encode_upper([byte]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_match_the_api_server() {
        let kind = |group: &str, namespaced| ObjectKind {
            group: group.to_owned(),
            version: "v1".to_owned(),
            kind: "Thing".to_owned(),
            plural: "things".to_owned(),
            namespaced,
        };
        for (group, namespace, path) in [
            ("", None, "/api/v1/things"),
            ("", Some("a"), "/api/v1/namespaces/a/things"),
            ("x.y", None, "/apis/x.y/v1/things"),
            ("x.y", Some("a b/c"), "/apis/x.y/v1/namespaces/a%20b%2Fc/things"),
        ] {
            assert_eq!(kind(group, namespace.is_some()).path(namespace), path);
        }
        assert_eq!(escape_path_segment("shepherd:owners"), "shepherd:owners");
    }
}
