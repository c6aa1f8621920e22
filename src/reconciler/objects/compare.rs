//! Whether an object is as it should be.
//!
//! Compared is what is wanted, and nothing else: a server fills in what nobody said, another one knows fields that these
//! types do not, and people put annotations of their own on anything. So what is wanted has to say *all* that is to be
//! kept, the server's own defaults among it; a test has the server prove that nothing was left out.
//!
//! What is empty is said by saying it is: an empty list is wanted empty, and one that is not there is nobody's business.
//! Nothing that is empty is sent, because some of it is refused when it is. A server in turn writes no empty list, no
//! empty text, no zero and no `false`, so that what is not there satisfies each of those.
//!
//! What an API server of an older Kubernetes does not know it drops without a word, and what it reads as a quantity or a
//! time it writes in its own way. Then no object will ever be as it was asked for, and asking again changes nothing.
//! [`Made`][made] remembers what became of what was asked, so that it is not asked each time.
//!
//! [made]: crate::reconciler::objects::plan::Made

use serde_json::{Map, Value};

use crate::reconciler::objects::kind::{MANAGER, metadata};

/// Whether all that is wanted is there.
#[must_use]
pub fn holds(wanted: &Value, present: Option<&Value>) -> bool {
    match (wanted, present) {
        (wanted, None | Some(Value::Null)) => may_be_left_out(wanted),
        (Value::Object(wanted), Some(present)) if wanted.is_empty() => is_empty(present),
        (Value::Object(wanted), Some(Value::Object(present))) => {
            wanted.iter().all(|(field, wanted)| holds(wanted, present.get(field)))
        }
        (Value::Array(wanted), Some(Value::Array(present))) => {
            wanted.len() == present.len()
                && wanted.iter().zip(present).all(|(wanted, present)| holds(wanted, Some(present)))
        }
        (wanted, Some(present)) => wanted == present,
    }
}

/// Whether a server may write nothing for this.
fn may_be_left_out(value: &Value) -> bool {
    match value {
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Object(fields) => fields.values().all(may_be_left_out),
        Value::Null | Value::Array(_) => is_empty(value),
    }
}

/// Whether this says that there is nothing.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// What is sent for a new object: what is wanted, without what is wanted empty.
#[must_use]
pub fn to_create(wanted: &Value) -> Value {
    match wanted {
        Value::Object(fields) => {
            let said = fields.iter().filter(|(_, value)| !is_empty(value));
            Value::Object(said.map(|(field, value)| (field.clone(), to_create(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(to_create).collect()),
        other => other.clone(),
    }
}

/// What is sent for an object that is there: what is wanted, laid over it. All else stays as it is.
#[must_use]
pub fn to_update(wanted: &Value, present: &Value) -> Value {
    let mut object = laid_over(wanted, present);
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        // The server's own; it keeps what it has.
        metadata.remove("managedFields");
    }
    object
}

fn laid_over(wanted: &Value, present: &Value) -> Value {
    let (Value::Object(wanted), Value::Object(present)) = (wanted, present) else { return to_create(wanted) };
    let mut fields: Map<String, Value> = present.clone();
    for (field, wanted) in wanted {
        if is_empty(wanted) {
            fields.remove(field);
        } else {
            let value = laid_over(wanted, present.get(field).unwrap_or(&Value::Null));
            fields.insert(field.clone(), value);
        }
    }
    Value::Object(fields)
}

/// The fields of an object that are ours because we applied them, as its server records it: whoever changes one of them
/// in another way takes it from this list.
#[must_use]
pub fn applied_fields(object: &Value) -> Option<String> {
    entries(object)
        .find(|entry| is_ours(entry) && entry.get("operation").and_then(Value::as_str) == Some("Apply"))
        .map(|entry| entry.get("fieldsV1").unwrap_or(&Value::Null).to_string())
}

/// Whether anything of an object was written from here.
#[must_use]
pub fn was_written_by_us(object: &Value) -> bool {
    entries(object).any(is_ours)
}

fn entries(object: &Value) -> impl Iterator<Item = &Value> {
    metadata(object, "managedFields").and_then(Value::as_array).into_iter().flatten()
}

fn is_ours(entry: &Value) -> bool {
    entry.get("manager").and_then(Value::as_str) == Some(MANAGER)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_wanted_is_compared_and_nothing_else() {
        for (wanted, present, expected) in [
            (json!({"a": 1}), json!({"a": 1}), true),
            (json!({"a": 1}), json!({"a": 2}), false),
            (json!({"a": 1}), json!({"a": 1, "b": 2}), true),
            (json!({"a": 1, "b": 2}), json!({"a": 1}), false),
            (json!({"a": {"b": 1}}), json!({"a": {"b": 1, "c": 2}}), true),
            (json!({"a": ["x"]}), json!({"a": ["x", "y"]}), false),
            (json!({"a": ["x", "y"]}), json!({"a": ["y", "x"]}), false),
            (json!({"a": [{"b": 1}]}), json!({"a": [{"b": 1, "filled": "in"}]}), true),
            // What is wanted empty is not left to others, and need not be there.
            (json!({"a": []}), json!({}), true),
            (json!({"a": []}), json!({"a": null}), true),
            (json!({"a": []}), json!({"a": ["x"]}), false),
            (json!({"a": {}}), json!({"a": {"b": 1}}), false),
            (json!({"a": {"b": []}}), json!({}), true),
            // What a server does not write.
            (json!({"a": false, "b": 0, "c": "", "d": null}), json!({}), true),
            (json!({"a": false}), json!({"a": true}), false),
            (json!({"a": true}), json!({}), false),
            (json!({"a": "x"}), json!({}), false),
        ] {
            assert_eq!(holds(&wanted, Some(&present)), expected, "{wanted} {present}");
        }
    }

    #[test]
    fn an_object_of_others_is_not_emptied_by_what_is_laid_over_it() {
        let wanted = json!({"metadata": {"name": "n", "labels": {"ours": "1"}}, "rules": [{"verbs": ["get"], "names": []}],
            "selector": {}});
        let present = json!({"metadata": {"name": "n", "labels": {"theirs": "2", "ours": "0"}, "finalizers": ["f"],
            "resourceVersion": "7", "managedFields": [{}]}, "rules": [{"verbs": ["get", "list"]}], "selector": {"x": "y"},
            "unknown": true});
        let sent = to_update(&wanted, &present);
        assert_eq!(
            sent,
            json!({"metadata": {"name": "n", "labels": {"theirs": "2", "ours": "1"}, "finalizers": ["f"],
                "resourceVersion": "7"}, "rules": [{"verbs": ["get"]}], "unknown": true})
        );
        assert!(holds(&wanted, Some(&sent)), "what is sent is what is wanted");
        assert_eq!(
            to_create(&wanted),
            json!({"metadata": {"name": "n", "labels": {"ours": "1"}}, "rules": [{"verbs": ["get"]}]})
        );
    }

    #[test]
    fn what_we_applied_is_told_from_what_we_wrote_and_what_others_did() {
        let by = |manager: &str, operation: &str| {
            json!({"metadata": {"managedFields": [
                {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:x": {}}},
                {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {}}},
            ]}})
        };
        assert_eq!(applied_fields(&by(MANAGER, "Apply")).as_deref(), Some(r#"{"f:spec":{}}"#));
        assert_eq!(applied_fields(&by(MANAGER, "Update")), None);
        assert_eq!(applied_fields(&by("another", "Apply")), None);
        assert!(was_written_by_us(&by(MANAGER, "Update")));
        assert!(!was_written_by_us(&by("another", "Update")));
        assert!(!was_written_by_us(&json!({})));
    }
}
