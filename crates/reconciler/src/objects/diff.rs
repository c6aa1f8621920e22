//! Finds drift: compares a desired object with the live one, and builds create and update bodies.
//!
//! Only the desired fields are compared: a server fills in defaults, another server knows fields that these types do
//! not have, and people add annotations of their own. So a desired object has to set *all* fields that must be kept,
//! including the server's defaults. A test makes the server prove that none is missing.
//!
//! An empty value is desired only if it is set: an empty list must be empty, and a missing list is not compared. Empty
//! values are never sent, because a server rejects some of them. A server in turn writes no empty list, no empty text,
//! no zero and no `false`, so a missing field satisfies each of those.
//!
//! An API server of an older Kubernetes silently drops fields that it does not know, and it rewrites quantities and
//! times in its own way. Then the object never equals the request, and repeating the request changes nothing.
//! [`AppliedState`][applied] remembers the result of a request, so that it is not repeated in each pass.
//!
//! [applied]: crate::objects::object_plan::AppliedState

use serde_json::{Map, Value};

use crate::objects::object_kind::{FIELD_MANAGER, metadata};

/// Whether the live value has everything that is desired.
#[must_use]
pub fn is_satisfied(wanted: &Value, present: Option<&Value>) -> bool {
    match (wanted, present) {
        (wanted, None | Some(Value::Null)) => is_omittable(wanted),
        (Value::Object(wanted), Some(present)) if wanted.is_empty() => is_empty(present),
        (Value::Object(wanted), Some(Value::Object(present))) => {
            wanted.iter().all(|(field, wanted)| is_satisfied(wanted, present.get(field)))
        }
        (Value::Array(wanted), Some(Value::Array(present))) => {
            wanted.len() == present.len()
                && wanted.iter().zip(present).all(|(wanted, present)| is_satisfied(wanted, Some(present)))
        }
        (wanted, Some(present)) => wanted == present,
    }
}

/// Whether a server may omit this value.
fn is_omittable(value: &Value) -> bool {
    match value {
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Object(fields) => fields.values().all(is_omittable),
        Value::Null | Value::Array(_) => is_empty(value),
    }
}

/// Whether this value is empty.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// The body of a create request: the desired object without its empty values.
#[must_use]
pub fn create_body(wanted: &Value) -> Value {
    match wanted {
        Value::Object(fields) => {
            let reported = fields.iter().filter(|(_, value)| !is_empty(value));
            Value::Object(reported.map(|(field, value)| (field.clone(), create_body(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(create_body).collect()),
        other => other.clone(),
    }
}

/// The body of an update request: the desired object merged onto the live one. All other fields stay as they are.
#[must_use]
pub fn update_body(wanted: &Value, present: &Value) -> Value {
    let mut object = merge_onto(wanted, present);
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        // The server maintains this field and keeps its own value.
        metadata.remove("managedFields");
    }
    object
}

fn merge_onto(wanted: &Value, present: &Value) -> Value {
    let (Value::Object(wanted), Value::Object(present)) = (wanted, present) else {
        return create_body(wanted);
    };
    let mut fields: Map<String, Value> = present.clone();
    for (field, wanted) in wanted {
        if is_empty(wanted) {
            fields.remove(field);
        } else {
            let value = merge_onto(wanted, present.get(field).unwrap_or(&Value::Null));
            fields.insert(field.clone(), value);
        }
    }
    Value::Object(fields)
}

/// The fields of an object that we applied, as its server records them. A field that another client changes is removed
/// from this record.
#[must_use]
pub fn applied_fields(object: &Value) -> Option<String> {
    managed_fields(object)
        .find(|entry| is_our_entry(entry) && entry.get("operation").and_then(Value::as_str) == Some("Apply"))
        .map(|entry| entry.get("fieldsV1").unwrap_or(&Value::Null).to_string())
}

/// Whether any field of an object was written by us.
#[must_use]
pub fn was_written_by_us(object: &Value) -> bool {
    managed_fields(object).any(is_our_entry)
}

fn managed_fields(object: &Value) -> impl Iterator<Item = &Value> {
    metadata(object, "managedFields").and_then(Value::as_array).into_iter().flatten()
}

fn is_our_entry(entry: &Value) -> bool {
    entry.get("manager").and_then(Value::as_str) == Some(FIELD_MANAGER)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_desired_fields_are_compared() {
        for (wanted, present, expected) in [
            (json!({"a": 1}), json!({"a": 1}), true),
            (json!({"a": 1}), json!({"a": 2}), false),
            (json!({"a": 1}), json!({"a": 1, "b": 2}), true),
            (json!({"a": 1, "b": 2}), json!({"a": 1}), false),
            (json!({"a": {"b": 1}}), json!({"a": {"b": 1, "c": 2}}), true),
            (json!({"a": ["x"]}), json!({"a": ["x", "y"]}), false),
            (json!({"a": ["x", "y"]}), json!({"a": ["y", "x"]}), false),
            (json!({"a": [{"b": 1}]}), json!({"a": [{"b": 1, "filled": "in"}]}), true),
            // A value that must be empty may be missing, but must not be set by others.
            (json!({"a": []}), json!({}), true),
            (json!({"a": []}), json!({"a": null}), true),
            (json!({"a": []}), json!({"a": ["x"]}), false),
            (json!({"a": {}}), json!({"a": {"b": 1}}), false),
            (json!({"a": {"b": []}}), json!({}), true),
            // Values that a server omits.
            (json!({"a": false, "b": 0, "c": "", "d": null}), json!({}), true),
            (json!({"a": false}), json!({"a": true}), false),
            (json!({"a": true}), json!({}), false),
            (json!({"a": "x"}), json!({}), false),
        ] {
            assert_eq!(is_satisfied(&wanted, Some(&present)), expected, "{wanted} {present}");
        }
    }

    #[test]
    fn update_keeps_fields_of_others() {
        let wanted = json!({"metadata": {"name": "n", "labels": {"ours": "1"}}, "rules": [{"verbs": ["get"], "names": []}],
            "selector": {}});
        let present = json!({"metadata": {"name": "n", "labels": {"theirs": "2", "ours": "0"}, "finalizers": ["f"],
            "resourceVersion": "7", "managedFields": [{}]}, "rules": [{"verbs": ["get", "list"]}], "selector": {"x": "y"},
            "unknown": true});
        let sent = update_body(&wanted, &present);
        assert_eq!(
            sent,
            json!({"metadata": {"name": "n", "labels": {"theirs": "2", "ours": "1"}, "finalizers": ["f"],
                "resourceVersion": "7"}, "rules": [{"verbs": ["get"]}], "unknown": true})
        );
        assert!(is_satisfied(&wanted, Some(&sent)), "what is sent is what is wanted");
        assert_eq!(
            create_body(&wanted),
            json!({"metadata": {"name": "n", "labels": {"ours": "1"}}, "rules": [{"verbs": ["get"]}]})
        );
    }

    #[test]
    fn applied_fields_are_distinguished_from_other_writes() {
        let by = |manager: &str, operation: &str| {
            json!({"metadata": {"managedFields": [
                {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:x": {}}},
                {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {}}},
            ]}})
        };
        assert_eq!(applied_fields(&by(FIELD_MANAGER, "Apply")).as_deref(), Some(r#"{"f:spec":{}}"#));
        assert_eq!(applied_fields(&by(FIELD_MANAGER, "Update")), None);
        assert_eq!(applied_fields(&by("another", "Apply")), None);
        assert!(was_written_by_us(&by(FIELD_MANAGER, "Update")));
        assert!(!was_written_by_us(&by("another", "Update")));
        assert!(!was_written_by_us(&json!({})));
    }
}
