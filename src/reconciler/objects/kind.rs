//! What an object of Kubernetes is called, and what of it stands in all of them alike.
//!
//! Objects are kept as the JSON that the server speaks. Types of one version of Kubernetes would lose what they do not
//! know, and what is laid over an object of somebody else's must lose nothing of it.

use std::fmt;

use serde_json::Value;

/// The label of all that is kept here. Whoever puts it on an object of his hands that over, and has it deleted.
pub const KEPT: &str = "shepherd.dev/kept";
/// The value of [`KEPT`] on what belongs to the release.
pub const BUILT_IN: &str = "built-in";
/// The value of [`KEPT`] on what belongs to an add-on.
pub const OF_AN_ADD_ON: &str = "add-on";
/// The label that says which add-on.
pub const ADD_ON: &str = "shepherd.dev/add-on";
/// The annotation that says what was applied: the SHA-256 of it.
pub const APPLIED: &str = "shepherd.dev/applied";
/// As whom the server records what is written from here.
pub const MANAGER: &str = "shepherd";

/// A kind of objects, as a server serves it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Its API group; empty for the oldest.
    pub group: String,
    /// The version in which it is spoken of.
    pub version: String,
    /// Its name in objects: `ClusterRole`.
    pub kind: String,
    /// Its name in addresses: `clusterroles`.
    pub plural: String,
    /// Whether its objects live in namespaces.
    pub namespaced: bool,
}

impl Kind {
    /// What an object says of its API.
    #[must_use]
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Where its objects are found: all of them, or those of one namespace.
    #[must_use]
    pub fn path(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let (api, plural) = (self.api_version(), &self.plural);
        match namespace {
            Some(namespace) => format!("{root}/{api}/namespaces/{}/{plural}", in_address(namespace)),
            None => format!("{root}/{api}/{plural}"),
        }
    }

    /// The same objects, whatever the version in which they are spoken of.
    #[must_use]
    pub fn resource(&self) -> Resource {
        Resource { group: self.group.clone(), plural: self.plural.clone() }
    }
}

/// Objects of one kind, in whatever version: what is listed once, and watched once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    /// Its API group.
    pub group: String,
    /// Its name in addresses.
    pub plural: String,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group.as_str() {
            "" => f.write_str(&self.plural),
            group => write!(f, "{}.{group}", self.plural),
        }
    }
}

/// Which object of a kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Its namespace, where it has one.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

impl Key {
    /// That of an object.
    #[must_use]
    pub fn of(object: &Value) -> Self {
        let text = |field: &str| metadata(object, field).and_then(Value::as_str);
        Self {
            namespace: text("namespace").filter(|namespace| !namespace.is_empty()).map(str::to_owned),
            name: text("name").unwrap_or_default().to_owned(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// A field of what all objects have.
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

/// Which object it is, were there others of its name before it.
#[must_use]
pub fn uid(object: &Value) -> &str {
    metadata(object, "uid").and_then(Value::as_str).unwrap_or_default()
}

/// Which state of the object it is.
#[must_use]
pub fn resource_version(object: &Value) -> &str {
    metadata(object, "resourceVersion").and_then(Value::as_str).unwrap_or_default()
}

/// Whether it is being deleted, and waits for somebody who asked to be waited for.
#[must_use]
pub fn is_ending(object: &Value) -> bool {
    metadata(object, "deletionTimestamp").is_some_and(|time| !time.is_null())
}

/// A name as a part of an address. Names of roles may hold what addresses may not.
#[must_use]
pub fn in_address(name: &str) -> String {
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
    fn objects_are_found_where_the_server_has_them() {
        let kind = |group: &str, namespaced| Kind {
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
        assert_eq!(in_address("shepherd:owners"), "shepherd:owners");
    }
}
