//! Classifies API-server errors: conflict, already exists, immutable, not found.

use kube::core::Status;

/// The class of a rejected write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiErrorKind {
    /// Another client changed the object first. The next pass sees the new state.
    Conflict,
    /// An object of this name exists, without our label.
    AlreadyExists,
    /// The change is to an immutable field: only a new object can have it.
    Immutable,
    /// The object does not exist any more.
    NotFound,
    /// Any other error, which a later pass may not meet.
    Other,
}

/// Texts by which a server rejects a change of an immutable field. All but the first come from the validation of single
/// kinds: priority classes, storage classes, and the role of a role binding.
const IMMUTABLE_PHRASES: [&str; 4] =
    ["field is immutable", "may not be changed in an update", "are forbidden", "cannot change roleRef"];

/// Classifies the error of a rejected write.
#[must_use]
pub fn classify_api_error(status: &Status) -> ApiErrorKind {
    if is_immutable(status) {
        ApiErrorKind::Immutable
    } else if status.is_already_exists() {
        ApiErrorKind::AlreadyExists
    } else if status.is_conflict() {
        ApiErrorKind::Conflict
    } else if status.is_not_found() {
        ApiErrorKind::NotFound
    } else {
        ApiErrorKind::Other
    }
}

/// Whether immutable fields are the only reason of a rejection. If there were another one, a new object would be
/// rejected as well, and the old one would be gone.
fn is_immutable(status: &Status) -> bool {
    let causes = status.details.as_ref().map_or(&[][..], |details| &details.causes);
    status.is_invalid()
        && !causes.is_empty()
        && causes.iter().all(|cause| IMMUTABLE_PHRASES.iter().any(|words| cause.message.contains(words)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn classify(code: u16, reason: &str, causes: &[&str]) -> ApiErrorKind {
        let causes: Vec<_> = causes.iter().map(|message| json!({"field": "x", "message": message})).collect();
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
            "message": "refused", "details": {"causes": causes}});
        classify_api_error(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn object_is_replaced_only_if_immutability_is_the_sole_error() {
        let fixed = "Invalid value: \"x\": field is immutable";
        for (code, reason, causes, expected) in [
            (500, "InternalError", &[][..], ApiErrorKind::Other),
            (500, "InternalError", &[fixed], ApiErrorKind::Other),
            (409, "Conflict", &[], ApiErrorKind::Conflict),
            (409, "Conflict", &[fixed], ApiErrorKind::Conflict),
            (409, "AlreadyExists", &[], ApiErrorKind::AlreadyExists),
            (404, "NotFound", &[], ApiErrorKind::NotFound),
            (422, "Invalid", &[], ApiErrorKind::Other),
            (422, "Invalid", &["Required value"], ApiErrorKind::Other),
            (422, "Invalid", &[fixed, "Required value"], ApiErrorKind::Other),
            (422, "Invalid", &[fixed], ApiErrorKind::Immutable),
            (422, "Invalid", &[fixed, fixed], ApiErrorKind::Immutable),
            (422, "Invalid", &["Forbidden: may not be changed in an update."], ApiErrorKind::Immutable),
            (422, "Invalid", &["Forbidden: updates to parameters are forbidden."], ApiErrorKind::Immutable),
            (422, "Invalid", &["Invalid value: {}: cannot change roleRef", fixed], ApiErrorKind::Immutable),
        ] {
            assert_eq!(classify(code, reason, causes), expected, "{code} {reason} {causes:?}");
        }
    }

    #[test]
    fn response_without_details_never_deletes() {
        let status =
            json!({"status": "Failure", "code": 422, "reason": "Invalid", "message": "field is immutable"});
        assert_eq!(classify_api_error(&serde_json::from_value(status).unwrap()), ApiErrorKind::Other);
    }
}
