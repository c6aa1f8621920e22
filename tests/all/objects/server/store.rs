//! The objects of a server, and their events.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use shepherd::reconciler::objects::object_kind::{
    ObjectKey, ObjectKind, ResourceType, is_terminating, resource_version, uid,
};

use super::{fields, kinds};

/// A rejection: a code, a reason, a message, and causes.
pub(super) type Refused = (u16, &'static str, String, Vec<(String, String)>);

pub(super) struct Happened {
    pub(super) revision: u64,
    pub(super) resource: ResourceType,
    pub(super) before: Option<Value>,
    pub(super) after: Option<Value>,
}

#[derive(Default)]
pub(super) struct Store {
    pub(super) revision: u64,
    /// Events up to this revision are compacted.
    pub(super) compacted: u64,
    pub(super) happened: Vec<Happened>,
    objects: BTreeMap<(ResourceType, ObjectKey), Value>,
    uids: u64,
}

fn refused(code: u16, reason: &'static str, message: impl Into<String>) -> Refused {
    (code, reason, message.into(), Vec::new())
}

fn valid(kind: &ObjectKind, before: Option<&Value>, object: &Value) -> Result<(), Refused> {
    let causes: Vec<(String, String)> = kinds::wrong(kind, before, object)
        .into_iter()
        .map(|(field, message)| (field.trim_start_matches('/').replace('/', "."), message))
        .collect();
    if causes.is_empty() { Ok(()) } else { Err((422, "Invalid", format!("{causes:?}"), causes)) }
}

impl Store {
    pub(super) fn begin() -> Self {
        // Not zero, as in the etcd of a starting API server.
        Self { revision: 100, ..Self::default() }
    }

    pub(super) fn list(&self, resource: &ResourceType, namespace: Option<&str>) -> Vec<Value> {
        let of_it = self.objects.iter().filter(|((of, key), _)| {
            of == resource && namespace.is_none_or(|namespace| key.namespace.as_deref() == Some(namespace))
        });
        of_it.map(|(_, object)| object.clone()).collect()
    }

    pub(super) fn get(&self, kind: &ObjectKind, key: &ObjectKey) -> Result<Value, Refused> {
        let found = self.objects.get(&(kind.resource(), key.clone())).cloned();
        found.ok_or_else(|| refused(404, "NotFound", format!("{} \"{key}\" not found", kind.resource())))
    }

    fn keep(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        before: Option<Value>,
        mut after: Option<Value>,
    ) -> Value {
        self.revision += 1;
        let (resource, revision) = (kind.resource(), self.revision);
        let mut last = before.clone().unwrap_or_default();
        for object in after.iter_mut().chain([&mut last]) {
            if object.is_object() {
                object["metadata"]["resourceVersion"] = json!(revision.to_string());
            }
        }
        match &after {
            Some(object) => drop(self.objects.insert((resource.clone(), key.clone()), object.clone())),
            None => drop(self.objects.remove(&(resource.clone(), key.clone()))),
        }
        let answer = after.clone().unwrap_or(last);
        self.happened.push(Happened { revision, resource, before, after });
        answer
    }

    pub(super) fn create(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        object: Value,
        manager: &str,
    ) -> Result<Value, Refused> {
        if self.get(kind, key).is_ok() {
            return Err(refused(
                409,
                "AlreadyExists",
                format!("{} \"{key}\" already exists", kind.resource()),
            ));
        }
        let object = self.new_object(kind, key, object);
        valid(kind, None, &object)?;
        let mut object = object;
        fields::update(None, &mut object, manager);
        Ok(self.keep(kind, key, None, Some(object)))
    }

    fn new_object(&mut self, kind: &ObjectKind, key: &ObjectKey, mut object: Value) -> Value {
        kinds::default(kind, &mut object);
        self.uids += 1;
        object["metadata"]["uid"] = json!(format!("uid-{}", self.uids));
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        if let Some(namespace) = &key.namespace {
            object["metadata"]["namespace"] = json!(namespace);
        }
        object
    }

    pub(super) fn replace(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        object: Value,
        manager: &str,
    ) -> Result<Value, Refused> {
        let before = self.get(kind, key)?;
        let raced = || {
            refused(
                409,
                "Conflict",
                "the object has been modified; please apply your changes to the latest version",
            )
        };
        if !resource_version(&object).is_empty() && resource_version(&object) != resource_version(&before)
            || !uid(&object).is_empty() && uid(&object) != uid(&before)
        {
            return Err(raced());
        }
        let mut object = object;
        kinds::default(kind, &mut object);
        if let Some(metadata) = object["metadata"].as_object_mut() {
            for field in ["uid", "creationTimestamp", "deletionTimestamp", "namespace"] {
                match before["metadata"].get(field) {
                    Some(value) => drop(metadata.insert(field.to_owned(), value.clone())),
                    None => drop(metadata.remove(field)),
                }
            }
        }
        valid(kind, Some(&before), &object)?;
        fields::update(Some(&before), &mut object, manager);
        Ok(self.changed(kind, key, before, object))
    }

    /// A merge patch (RFC 7386).
    pub(super) fn merge(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        change: &Value,
        manager: &str,
    ) -> Result<Value, Refused> {
        let mut object = self.get(kind, key)?;
        merge(&mut object, change);
        self.replace(kind, key, object, manager)
    }

    /// A write that changes nothing causes no event.
    fn changed(&mut self, kind: &ObjectKind, key: &ObjectKey, before: Value, mut object: Value) -> Value {
        object["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
        if object == before {
            return before;
        }
        let finalizers = object.pointer("/metadata/finalizers").and_then(Value::as_array);
        if is_terminating(&object) && finalizers.is_none_or(Vec::is_empty) {
            return self.keep(kind, key, Some(before), None);
        }
        self.keep(kind, key, Some(before), Some(object))
    }

    pub(super) fn apply(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        value: &Value,
        (manager, force): (&str, bool),
    ) -> Result<Value, Refused> {
        if value.get(kinds::UNKNOWN_FIELD).is_some() {
            // By its schema, which other writes do not compare with.
            let message = format!(
                "failed to create typed patch object: .{}: field not declared in schema",
                kinds::UNKNOWN_FIELD
            );
            return Err(refused(500, "", message));
        }
        let before = self.get(kind, key).ok();
        let conflicts = |conflicts: Vec<String>| {
            let causes = conflicts.iter().map(|conflict| (String::new(), conflict.clone())).collect();
            (409, "Conflict", format!("Apply failed with conflicts: {conflicts:?}"), causes)
        };
        let mut object = fields::apply(before.as_ref(), value, manager, force).map_err(conflicts)?;
        kinds::default(kind, &mut object);
        valid(kind, before.as_ref(), &object)?;
        if let Some(before) = before {
            return Ok(self.changed(kind, key, before, object));
        }
        let object = self.new_object(kind, key, object);
        Ok(self.keep(kind, key, None, Some(object)))
    }

    pub(super) fn delete(
        &mut self,
        kind: &ObjectKind,
        key: &ObjectKey,
        options: &Value,
    ) -> Result<Value, Refused> {
        let before = self.get(kind, key)?;
        for (field, is) in [("uid", uid(&before)), ("resourceVersion", resource_version(&before))] {
            let wanted = options.pointer("/preconditions").and_then(|wanted| wanted[field].as_str());
            if let Some(wanted) = wanted.filter(|wanted| *wanted != is) {
                let message =
                    format!("Precondition failed: {field} in precondition: {wanted}, in object meta: {is}");
                return Err(refused(409, "Conflict", message));
            }
        }
        if before
            .pointer("/metadata/finalizers")
            .and_then(Value::as_array)
            .is_some_and(|values| !values.is_empty())
        {
            let mut ending = before.clone();
            ending["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            return Ok(self.changed(kind, key, before, ending));
        }
        Ok(self.keep(kind, key, Some(before), None))
    }
}

fn merge(target: &mut Value, change: &Value) {
    let Value::Object(change) = change else {
        *target = change.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, change) in change {
        if change.is_null() {
            target.as_object_mut().and_then(|fields| fields.remove(field));
        } else {
            merge(&mut target[field], change);
        }
    }
}
