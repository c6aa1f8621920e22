//! Parses add-on manifests (YAML) into objects to apply.
//!
//! A manifest is parsed as a whole or not at all. If one document cannot be understood, the desired state is unknown:
//! nothing of the manifest is applied, and nothing that it created before is deleted.

use std::collections::BTreeSet;

use ring::digest::{SHA256, digest};
use serde_json::{Map, Value, json};

use crate::objects::cluster_config::AddOn;
use crate::objects::object_kind::{ADD_ON_LABEL, APPLIED_ANNOTATION, MANAGED_ADD_ON, MANAGED_LABEL};
use model::text_file::decode_text;

/// The longest value of a label.
const MAX_LABEL_CHARS: usize = 63;
/// Metadata fields that only the server sets.
const SERVER_FIELDS: [&str; 7] = [
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// One object of a manifest, ready to be applied.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ManifestObject {
    /// Group and version, for example `apps/v1`; `v1` in the core group.
    pub(super) api_version: String,
    pub(super) kind: String,
    /// The namespace, if the manifest names one.
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// The object to apply, with our labels.
    pub(super) object: Value,
    /// The SHA-256 of `object`.
    pub(super) digest: String,
}

/// Parses a manifest. The error is the end of a sentence.
pub(super) fn parse_manifest(add_on: &AddOn) -> Result<Vec<ManifestObject>, String> {
    if !is_label_value(&add_on.name) {
        return Err(format!(
            "its name can be no label: use at most {MAX_LABEL_CHARS} letters, digits, dots, dashes and underscores"
        ));
    }
    let text =
        decode_text(&add_on.manifest).map_err(|error| format!("its manifest cannot be read: {error}"))?;
    let documents: Vec<Value> = serde_saphyr::from_multiple(text)
        .map_err(|error| format!("its manifest is no YAML: {}", first_line(&error.to_string())))?;
    let mut all = Vec::new();
    for document in documents {
        if !document.is_null() {
            flatten_document(document, &mut all)?;
        }
    }
    let (mut declared, mut seen) = (Vec::new(), BTreeSet::new());
    for (number, object) in all.into_iter().enumerate() {
        let object =
            parse_object(&add_on.name, object).map_err(|why| format!("its object {}: {why}", number + 1))?;
        let ManifestObject { api_version, kind, namespace, name, .. } = &object;
        if !seen.insert((api_version.clone(), kind.clone(), namespace.clone(), name.clone())) {
            return Err(format!("its manifest has two objects {kind} {name}"));
        }
        declared.push(object);
    }
    if declared.is_empty() {
        // An empty file is usually a mistake. If it were applied, it would delete everything of the add-on.
        return Err("its manifest holds no object".to_owned());
    }
    Ok(declared)
}

fn flatten_document(document: Value, all: &mut Vec<Value>) -> Result<(), String> {
    let is_list = document.get("kind").and_then(Value::as_str) == Some("List");
    let Value::Object(mut fields) = document else {
        return Err("its manifest has a document that is no object".to_owned());
    };
    if !is_list {
        all.push(Value::Object(fields));
        return Ok(());
    }
    match fields.remove("items") {
        Some(Value::Array(items)) => {
            all.extend(items);
            Ok(())
        }
        _ => Err("its manifest has a list without items".to_owned()),
    }
}

fn parse_object(add_on: &str, mut object: Value) -> Result<ManifestObject, String> {
    let text = |object: &Value, path: &str| {
        object.pointer(path).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let api_version = text(&object, "/apiVersion").ok_or("it has no apiVersion")?;
    let kind = text(&object, "/kind").ok_or("it has no kind")?;
    let name = text(&object, "/metadata/name").ok_or_else(|| format!("{kind} has no name"))?;
    // YAML as Kubernetes reads it takes `n`, `no` and `off` for false.
    if object.pointer("/metadata/namespace").is_some_and(|namespace| !namespace.is_string()) {
        return Err(format!("{kind} {name}: its namespace is no text; quote it"));
    }
    let namespace = text(&object, "/metadata/namespace");
    let of_it = format!("{kind} {name}");
    let fields = object.as_object_mut().ok_or("it is no object")?;
    // The status is observed, so it is no part of the desired state.
    fields.remove("status");
    let metadata = fields.get_mut("metadata").and_then(Value::as_object_mut).ok_or("it has no metadata")?;
    for field in SERVER_FIELDS {
        metadata.remove(field);
    }
    let labels = map_field(metadata, "labels").ok_or_else(|| format!("{of_it}: its labels are no map"))?;
    labels.insert(MANAGED_LABEL.to_owned(), json!(MANAGED_ADD_ON));
    labels.insert(ADD_ON_LABEL.to_owned(), json!(add_on));
    let annotations =
        map_field(metadata, "annotations").ok_or_else(|| format!("{of_it}: its annotations are no map"))?;
    annotations.remove(APPLIED_ANNOTATION);
    let digest = hex::encode(digest(&SHA256, object.to_string().as_bytes()));
    object["metadata"]["annotations"][APPLIED_ANNOTATION] = json!(digest);
    Ok(ManifestObject { api_version, kind, namespace, name, object, digest })
}

/// A field that is a map, created if it is missing; `None` if it is something else.
fn map_field<'m>(fields: &'m mut Map<String, Value>, field: &str) -> Option<&'m mut Map<String, Value>> {
    let value = fields.entry(field).or_insert_with(|| json!({}));
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut()
}

fn is_label_value(text: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= MAX_LABEL_CHARS
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(byte))
}

/// The first line of a parser's message. The other lines show the position as a picture.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(name: &str, text: &str) -> Result<Vec<ManifestObject>, String> {
        parse_manifest(&AddOn { name: name.to_owned(), manifest: text.as_bytes().to_vec() })
    }

    #[test]
    fn documents_and_lists_are_split_and_labelled() {
        let text = "---\n# nothing\n---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n  namespace: there\n  uid: x\n\
                    data: {k: '1'}\nstatus: {x: 1}\n---\napiVersion: v1\nkind: List\nitems:\n- apiVersion: apps/v1\n  \
                    kind: Deployment\n  metadata: {name: b, labels: {own: x}}\n";
        let declared = parse_text("dns", text).unwrap();
        assert_eq!(declared.len(), 2);
        assert_eq!(
            declared[0].object,
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "there",
                "labels": {MANAGED_LABEL: MANAGED_ADD_ON, ADD_ON_LABEL: "dns"}, "annotations": {APPLIED_ANNOTATION: declared[0].digest}},
                "data": {"k": "1"}})
        );
        assert_eq!(
            declared[1].object["metadata"]["labels"],
            json!({MANAGED_LABEL: MANAGED_ADD_ON, ADD_ON_LABEL: "dns", "own": "x"})
        );
        assert_eq!((declared[1].namespace.as_deref(), declared[1].name.as_str()), (None, "b"));
    }

    #[test]
    fn manifest_is_read_as_editors_save_it() {
        let text = "apiVersion: v1\nkind: A\nmetadata: {name: a}\n";
        let parse = |manifest: Vec<u8>| parse_manifest(&AddOn { name: "dns".to_owned(), manifest });
        let plain = parse_text("dns", text).unwrap();
        assert_eq!(parse_text("dns", &format!("\u{feff}{text}")), Ok(plain));
        let utf16 = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(parse(utf16).unwrap_err().starts_with("its manifest cannot be read: it is UTF-16"));
        let latin = [text.as_bytes(), b"# caf\xe9"].concat();
        assert!(parse(latin).unwrap_err().contains("it is not UTF-8 from byte"));
    }

    #[test]
    fn digest_covers_the_applied_object() {
        let of = |name: &str, text: &str| parse_text(name, text).unwrap()[0].digest.clone();
        let text = "{apiVersion: v1, kind: A, metadata: {name: a}, x: 1}";
        assert_eq!(of("dns", text), of("dns", &text.replace("{name: a}", "{name: a, uid: u}")));
        assert_ne!(of("dns", text), of("dns", &text.replace("x: 1", "x: 2")));
        assert_ne!(of("dns", text), of("other", text), "it changes hands");
    }

    #[test]
    fn invalid_manifest_is_rejected_as_a_whole() {
        let good = "apiVersion: v1\nkind: A\nmetadata: {name: a}\n";
        for (name, text, says) in [
            ("dns", "", "no object"),
            ("dns", "---\n---\n", "no object"),
            ("dns", "a: [", "no YAML"),
            ("dns", "just text", "a document that is no object"),
            ("dns", "kind: A\nmetadata: {name: a}", "its object 1: it has no apiVersion"),
            ("dns", "apiVersion: v1\nmetadata: {name: a}", "its object 1: it has no kind"),
            ("dns", "apiVersion: v1\nkind: A\nmetadata: {generateName: a}", "its object 1: A has no name"),
            (
                "dns",
                "apiVersion: v1\nkind: A\nmetadata: {name: a, labels: 7}",
                "its object 1: A a: its labels are no map",
            ),
            (
                "dns",
                "apiVersion: v1\nkind: A\nmetadata: {name: a, namespace: n}",
                "A a: its namespace is no text",
            ),
            ("dns", "apiVersion: v1\nkind: List", "a list without items"),
            ("no label", good, "its name can be no label"),
            ("-", good, "its name can be no label"),
        ] {
            let error = parse_text(name, text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
        assert!(parse_text("dns", &format!("{good}---\n{good}")).unwrap_err().contains("two objects A a"));
        assert!(parse_text("dns", &format!("{good}---\nkind: B\n")).unwrap_err().contains("its object 2"));
    }
}
