//! What an answer of the server means for what was asked.

use kube::core::Status;

/// What is to be done about a write that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Others were faster. The next pass sees what they did.
    Raced,
    /// There is an object of this name, and it is not among those with the label.
    NameTaken,
    /// What was to change cannot be changed: only a new object can have it.
    Immutable,
    /// It is not there any more.
    Gone,
    /// Anything else.
    Other,
}

/// What a server says of a field that cannot be changed. All but the first stand in the validation of single kinds:
/// priority classes, storage classes, and the role of a role binding.
const IMMUTABLE: [&str; 4] =
    ["field is immutable", "may not be changed in an update", "are forbidden", "cannot change roleRef"];

/// Reads a refusal.
#[must_use]
pub fn refusal(status: &Status) -> Refusal {
    if is_immutable(status) {
        Refusal::Immutable
    } else if status.is_already_exists() {
        Refusal::NameTaken
    } else if status.is_conflict() {
        Refusal::Raced
    } else if status.is_not_found() {
        Refusal::Gone
    } else {
        Refusal::Other
    }
}

/// Whether all that is wrong with a write is that something cannot be changed. Were there anything else, an object made
/// anew would be refused as well, and the old one would be gone.
fn is_immutable(status: &Status) -> bool {
    let causes = status.details.as_ref().map_or(&[][..], |details| &details.causes);
    status.is_invalid()
        && !causes.is_empty()
        && causes.iter().all(|cause| IMMUTABLE.iter().any(|words| cause.message.contains(words)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn judged(code: u16, reason: &str, causes: &[&str]) -> Refusal {
        let causes: Vec<_> = causes.iter().map(|message| json!({"field": "x", "message": message})).collect();
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason,
            "message": "refused", "details": {"causes": causes}});
        refusal(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn only_what_nothing_else_is_wrong_with_is_made_anew() {
        let fixed = "Invalid value: \"x\": field is immutable";
        for (code, reason, causes, expected) in [
            (500, "InternalError", &[][..], Refusal::Other),
            (500, "InternalError", &[fixed], Refusal::Other),
            (409, "Conflict", &[], Refusal::Raced),
            (409, "Conflict", &[fixed], Refusal::Raced),
            (409, "AlreadyExists", &[], Refusal::NameTaken),
            (404, "NotFound", &[], Refusal::Gone),
            (422, "Invalid", &[], Refusal::Other),
            (422, "Invalid", &["Required value"], Refusal::Other),
            (422, "Invalid", &[fixed, "Required value"], Refusal::Other),
            (422, "Invalid", &[fixed], Refusal::Immutable),
            (422, "Invalid", &[fixed, fixed], Refusal::Immutable),
            (422, "Invalid", &["Forbidden: may not be changed in an update."], Refusal::Immutable),
            (422, "Invalid", &["Forbidden: updates to parameters are forbidden."], Refusal::Immutable),
            (422, "Invalid", &["Invalid value: {}: cannot change roleRef", fixed], Refusal::Immutable),
        ] {
            assert_eq!(judged(code, reason, causes), expected, "{code} {reason} {causes:?}");
        }
    }

    #[test]
    fn an_answer_without_details_is_no_reason_to_delete_anything() {
        let status =
            json!({"status": "Failure", "code": 422, "reason": "Invalid", "message": "field is immutable"});
        assert_eq!(refusal(&serde_json::from_value(status).unwrap()), Refusal::Other);
    }
}
