//! Ownership of the fields of an object, as server-side apply defines it. A list is one field here, as it is in the
//! kinds that are used.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

type Fields = BTreeSet<Vec<String>>;

/// The fields of an object that a client can own.
fn collect_settable_fields(object: &Value) -> Fields {
    let mut fields = Fields::new();
    collect(object, &mut Vec::new(), &mut fields);
    fields.retain(|path| {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        match path.as_slice() {
            ["apiVersion" | "kind", ..] => false,
            ["metadata", field, ..] => ["labels", "annotations", "finalizers"].contains(field),
            _ => true,
        }
    });
    fields
}

fn collect(value: &Value, path: &mut Vec<String>, fields: &mut Fields) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                path.push(name.clone());
                collect(value, path, fields);
                path.pop();
            }
        }
        _ => drop(fields.insert(path.clone())),
    }
}

fn value_at<'v>(object: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(object, |value, name| value.get(name))
}

fn put(object: &mut Value, path: &[String], value: Option<Value>) {
    let Some((last, parents)) = path.split_last() else { return };
    let mut at = object;
    for name in parents {
        if value.is_none() && at.get(name).is_none() {
            return;
        }
        at = &mut at[name.as_str()];
    }
    match value {
        Some(value) => at[last.as_str()] = value,
        None => {
            if let Some(map) = at.as_object_mut() {
                map.remove(last);
            }
        }
    }
}

fn written(fields: &Fields) -> Value {
    let mut tree = Value::Object(Map::new());
    for path in fields {
        let mut at = &mut tree;
        for name in path {
            at = &mut at[format!("f:{name}")];
            if at.is_null() {
                *at = json!({});
            }
        }
    }
    tree
}

fn read(tree: &Value) -> Fields {
    fn walk(tree: &Value, path: &mut Vec<String>, fields: &mut Fields) {
        let Some(map) = tree.as_object().filter(|map| !map.is_empty()) else {
            fields.insert(path.clone());
            return;
        };
        for (name, tree) in map {
            path.push(name.trim_start_matches("f:").to_owned());
            walk(tree, path, fields);
            path.pop();
        }
    }
    let mut fields = Fields::new();
    if tree.as_object().is_some_and(|map| !map.is_empty()) {
        walk(tree, &mut Vec::new(), &mut fields);
    }
    fields
}

struct Entry {
    manager: String,
    operation: String,
    fields: Fields,
}

fn entries(object: &Value) -> Vec<Entry> {
    let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array).into_iter().flatten();
    let text = |entry: &Value, field: &str| entry[field].as_str().unwrap_or_default().to_owned();
    entries
        .map(|entry| Entry {
            manager: text(entry, "manager"),
            operation: text(entry, "operation"),
            fields: read(&entry["fieldsV1"]),
        })
        .collect()
}

fn record(object: &mut Value, entries: Vec<Entry>) {
    let entries = entries.into_iter().filter(|entry| !entry.fields.is_empty()).map(|entry| {
        json!({"manager": entry.manager, "operation": entry.operation, "apiVersion": object["apiVersion"],
            "fieldsType": "FieldsV1", "fieldsV1": written(&entry.fields)})
    });
    object["metadata"]["managedFields"] = entries.collect();
}

fn of<'e>(entries: &'e mut Vec<Entry>, manager: &str, operation: &str) -> &'e mut Entry {
    let at = entries.iter().position(|entry| entry.manager == manager && entry.operation == operation);
    let at = at.unwrap_or_else(|| {
        entries.push(Entry {
            manager: manager.to_owned(),
            operation: operation.to_owned(),
            fields: Fields::new(),
        });
        entries.len() - 1
    });
    &mut entries[at]
}

/// Records the write of a client: it owns the fields that it changed.
pub(super) fn update(before: Option<&Value>, object: &mut Value, manager: &str) {
    let mut entries = before.map(entries).unwrap_or_default();
    let now = collect_settable_fields(object);
    let changed: Fields = now
        .iter()
        .filter(|path| before.is_none_or(|before| value_at(before, path) != value_at(object, path)))
        .cloned()
        .collect();
    for entry in &mut entries {
        entry.fields.retain(|path| now.contains(path) && !changed.contains(path));
    }
    if !changed.is_empty() {
        of(&mut entries, manager, "Update").fields.extend(changed);
    }
    record(object, entries);
}

/// Applies the fields of a client. The error names the clients that have other values.
pub(super) fn apply(
    before: Option<&Value>,
    reported_now: &Value,
    manager: &str,
    force: bool,
) -> Result<Value, Vec<String>> {
    let mut object = before.cloned().unwrap_or_else(|| {
        let mut object = reported_now.clone();
        object["metadata"]["managedFields"] = json!([]);
        object
    });
    let mut entries = entries(&object);
    let fields = collect_settable_fields(reported_now);
    let mut conflicts = Vec::new();
    for path in &fields {
        if before.is_none_or(|before| value_at(before, path) == value_at(reported_now, path)) {
            continue;
        }
        for other in &mut entries {
            if (other.manager != manager || other.operation != "Apply") && other.fields.remove(path) {
                conflicts.push(format!("conflict with {:?}: .{}", other.manager, path.join(".")));
            }
        }
    }
    if !conflicts.is_empty() && !force {
        return Err(conflicts);
    }
    let own = std::mem::replace(&mut of(&mut entries, manager, "Apply").fields, fields.clone());
    for path in own.difference(&fields) {
        if !entries.iter().any(|entry| entry.fields.contains(path)) {
            put(&mut object, path, None);
        }
    }
    for path in &fields {
        put(&mut object, path, value_at(reported_now, path).cloned());
    }
    record(&mut object, entries);
    Ok(object)
}
