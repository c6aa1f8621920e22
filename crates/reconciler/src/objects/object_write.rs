//! Writes one Kubernetes object: create, update, apply, replace.
//!
//! An object of the release is written as a whole: created, or merged onto the live one and replaced at its resource
//! version. An object of an add-on is applied (server-side apply), so that fields of other managers stay theirs.
//!
//! An object without our label is never overwritten, unless it is ours anyway ([`is_owned`]).
//!
//! # Why objects of the release are not applied
//!
//! Server-side apply would spare `update_body` of [`diff`](crate::objects::diff), but the objects of the release need
//! three things that it does not have. `tests/all/objects/semantics.rs` verifies the first two with a real server.
//!
//! * *Create and nothing else.* An apply creates an object or overwrites it, even if it is another owner's. No
//!   precondition prevents that. A create request is rejected if the name was taken between the list and the request.
//! * *Fields of a later Kubernetes.* An apply with a field that the server does not know is rejected as a whole
//!   ([kubernetes 122480](https://github.com/kubernetes/kubernetes/issues/122480)). Other writes just drop the field.
//!   `seLinuxMount` of our CSI driver is unknown before 1.25. Every pass of a cluster with a driver would fail there,
//!   and no controller would start.
//! * *Fields that must be empty*: there are six, for example the `mountOptions` of the storage class. A field that is
//!   left out of an apply stays with the manager that has set it, and empty values are rejected for some kinds.
//!
//! Objects of add-ons are applied nevertheless: a problem of theirs holds up no controller, and their manifest decides
//! which fields they have. Between the read of such an object and its apply, the name may be taken.

use serde_json::{Value, json};

use crate::objects::api_client::{ApiClient, ApiError};
use crate::objects::api_error::{ApiErrorKind, classify_api_error};
use crate::objects::diff::{applied_fields, create_body, is_satisfied, update_body, was_written_by_us};
use crate::objects::object_kind::{MANAGED_LABEL, ObjectKey, ObjectKind};
use crate::objects::object_plan::{DesiredObject, Precondition};

/// How an object got its present state.
#[derive(Clone, Copy)]
pub(super) enum WriteMode {
    Created,
    Updated,
    Replaced,
}

/// The result of one action.
pub(super) enum WriteResult {
    Written(WriteMode, Value),
    Deleted,
    /// Nothing was written: an object of another owner has this name.
    NameConflict,
}

/// The kind in the API version that the object uses.
pub(super) fn applied_kind<'k>(kind: &'k ObjectKind, wanted: &'k DesiredObject) -> &'k ObjectKind {
    match wanted {
        DesiredObject::BuiltIn(_) => kind,
        DesiredObject::Applied { kind, .. } => kind,
    }
}

/// Whether an object without the label is ours anyway: the label was removed, or its content equals ours.
///
/// Equal content is only enough for an object of the release: an add-on does not take over an object, because it would
/// delete it one day.
pub(super) fn is_owned(wanted: &DesiredObject, present: &Value) -> bool {
    match wanted {
        DesiredObject::BuiltIn(object) => {
            was_written_by_us(present) || is_satisfied(&without_label(object), Some(present))
        }
        DesiredObject::Applied { .. } => applied_fields(present).is_some(),
    }
}

fn without_label(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(labels) = object.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
        labels.remove(MANAGED_LABEL);
    }
    if object.pointer("/metadata/labels") == Some(&json!({}))
        && let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut)
    {
        metadata.remove("labels");
    }
    object
}

/// Creates an object that was not found by its label. If its name is taken, it is updated if it is ours.
pub(super) async fn create_object(
    api: &ApiClient,
    kind: &ObjectKind,
    key: &ObjectKey,
    wanted: &DesiredObject,
) -> Result<WriteResult, ApiError> {
    match wanted {
        DesiredObject::BuiltIn(object) => match api.create(kind, key, &create_body(object)).await {
            Ok(answer) => Ok(WriteResult::Written(WriteMode::Created, answer)),
            Err(ApiError::Rejected(status)) if classify_api_error(&status) == ApiErrorKind::AlreadyExists => {
                match api.get(kind, key).await? {
                    Some(present) if is_owned(wanted, &present) => {
                        update_object(api, kind, key, wanted, &present).await
                    }
                    Some(_) => Ok(WriteResult::NameConflict),
                    // It existed a moment ago; the next pass creates it.
                    None => Err(ApiError::Rejected(status)),
                }
            }
            Err(error) => Err(error),
        },
        DesiredObject::Applied { kind, object, .. } => match api.get(kind, key).await? {
            Some(present) if !is_owned(wanted, &present) => Ok(WriteResult::NameConflict),
            Some(_) => Ok(WriteResult::Written(WriteMode::Updated, api.apply(kind, key, object).await?)),
            None => Ok(WriteResult::Written(WriteMode::Created, api.apply(kind, key, object).await?)),
        },
    }
}

/// Changes an object that differs from the desired one. If an immutable field differs, a built-in object is replaced.
pub(super) async fn update_object(
    api: &ApiClient,
    kind: &ObjectKind,
    key: &ObjectKey,
    wanted: &DesiredObject,
    present: &Value,
) -> Result<WriteResult, ApiError> {
    let object = match wanted {
        DesiredObject::BuiltIn(object) => object,
        // An add-on's object with changed immutable fields may hold data: it is not replaced, but reported.
        DesiredObject::Applied { kind, object, .. } => {
            return Ok(WriteResult::Written(WriteMode::Updated, api.apply(kind, key, object).await?));
        }
    };
    match api.replace(kind, key, &update_body(object, present)).await {
        Ok(answer) => Ok(WriteResult::Written(WriteMode::Updated, answer)),
        Err(ApiError::Rejected(status)) if classify_api_error(&status) == ApiErrorKind::Immutable => {
            // Only the evaluated object is deleted. If the second request were lost, the next pass would create it.
            api.delete(kind, key, &Precondition::from_object(present)).await?;
            Ok(WriteResult::Written(WriteMode::Replaced, api.create(kind, key, &create_body(object)).await?))
        }
        Err(error) => Err(error),
    }
}
