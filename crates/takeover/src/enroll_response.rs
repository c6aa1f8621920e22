//! What an agent returns to an enrolment: its response is verified before it is trusted (pure).

use crate::takeover_error::TakeoverError;
use model::sanitize::sanitize_text;
use proto::agent::v1::{EnrollError, EnrollRequest, EnrollSuccess, enroll_error, enroll_response};

/// Why a response to another request is wrong.
const OTHER_REQUEST: &str = "it enrolled by another request than the one it was sent";
/// The same for an agent of an earlier release, which leaves out the order to replace pinned keys.
const NO_REPLACEMENT: &str = "its release cannot replace pinned signing keys: let root write \"keys\":[] in place of the keys in \
                              signing.json there, and restart the role server";

/// Verifies an agent's response.
pub(super) fn check_enroll_response(
    result: Option<enroll_response::Result>,
    address: &str,
    agent_path: &str,
    request: &EnrollRequest,
) -> Result<EnrollSuccess, TakeoverError> {
    let bad = |reason: String| TakeoverError::InvalidResponse {
        address: address.to_owned(),
        reason,
        agent_path: agent_path.to_owned(),
    };
    match result {
        Some(enroll_response::Result::Success(success)) => {
            if !success.request.as_ref().is_some_and(|echo| is_echo(echo, request)) {
                let keeping = EnrollRequest { replace_signing_keys: false, ..request.clone() };
                let knows_no_replacement =
                    success.request.as_ref().is_some_and(|echo| is_echo(echo, &keeping));
                return Err(
                    bad(if knows_no_replacement { NO_REPLACEMENT } else { OTHER_REQUEST }.to_owned()),
                );
            }
            if success.public_key.len() != 32 {
                return Err(bad(format!("its public key has {} bytes and not 32", success.public_key.len())));
            }
            if success.public_key.iter().all(|byte| *byte == 0) {
                return Err(bad("its public key is all zero".to_owned()));
            }
            Ok(success)
        }
        Some(enroll_response::Result::Error(error)) => Err(map_enroll_error(&error, address, request)),
        None => Err(bad("it returned neither success nor error".to_owned())),
    }
}

/// Whether an agent returned the request that it was sent. One of a release before signed releases leaves the keys out, and
/// one of a release before signed declarations what is required of these.
fn is_echo(echo: &EnrollRequest, request: &EnrollRequest) -> bool {
    let without = || EnrollRequest { require_signed_declarations: false, ..request.clone() };
    let keyless = || EnrollRequest { signing_keys: vec![], key_rotations: vec![], ..without() };
    echo == request || *echo == without() || *echo == keyless()
}

fn map_enroll_error(error: &EnrollError, address: &str, request: &EnrollRequest) -> TakeoverError {
    use enroll_error::Kind;
    let address = address.to_owned();
    let message = sanitize_text(&error.message).trim_end_matches('.').to_owned();
    match error.kind() {
        Kind::StaleFence => {
            TakeoverError::StaleFence { address, sent: request.fence, machine_fence: error.current_fence }
        }
        Kind::OtherMachine => {
            TakeoverError::OtherMachine { address, machine_id: request.machine_id.clone(), message }
        }
        Kind::OtherBmdb => TakeoverError::OtherBmdb { address, bmdb_id: request.bmdb_id.clone(), message },
        Kind::Invalid => TakeoverError::MalformedRequest { address, message },
        // A kind that only a later agent knows is a failure whose message can still be shown.
        Kind::Failed | Kind::Unspecified => {
            TakeoverError::StepFailed { address, step: "enrolment", reason: message }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: &str = "192.0.2.7:22";

    fn request() -> EnrollRequest {
        EnrollRequest {
            machine_id: "5a0c2c4e-0000-4000-8000-000000000001".to_owned(),
            lane: "access".to_owned(),
            fence: 7,
            bmdb_id: "5a0c2c4e-0000-4000-8000-00000000000b".to_owned(),
            ..EnrollRequest::default()
        }
    }

    fn success() -> EnrollSuccess {
        EnrollSuccess { request: Some(request()), public_key: vec![7; 32], ..EnrollSuccess::default() }
    }

    fn check_result(result: enroll_response::Result) -> Result<EnrollSuccess, TakeoverError> {
        check_enroll_response(Some(result), ADDRESS, "agent", &request())
    }

    fn rejection_of(kind: enroll_error::Kind, message: &str) -> TakeoverError {
        let error = EnrollError { kind: kind.into(), message: message.to_owned(), current_fence: 9 };
        check_result(enroll_response::Result::Error(error)).unwrap_err()
    }

    #[test]
    fn only_an_echoed_request_with_a_key_is_success() {
        use enroll_response::Result::Success;
        assert_eq!(check_result(Success(success())).unwrap(), success());

        // As an agent of a release before signed releases returns it, and one that was sent other keys.
        let signed = |key: &str| EnrollRequest { signing_keys: vec![key.to_owned()], ..request() };
        for (echo, is_accepted) in [(signed("a"), true), (request(), true), (signed("b"), false)] {
            let returned = Success(EnrollSuccess { request: Some(echo), ..success() });
            let checked = check_enroll_response(Some(returned), ADDRESS, "agent", &signed("a"));
            assert_eq!(checked.is_ok(), is_accepted, "{checked:?}");
        }

        let requiring = |key| EnrollRequest { require_signed_declarations: true, ..signed(key) };
        for (echo, is_accepted) in
            [(requiring("a"), true), (signed("a"), true), (request(), true), (requiring("b"), false)]
        {
            let returned = Success(EnrollSuccess { request: Some(echo), ..success() });
            let checked = check_enroll_response(Some(returned), ADDRESS, "agent", &requiring("a"));
            assert_eq!(checked.is_ok(), is_accepted, "{checked:?}");
        }

        let replacing = EnrollRequest { replace_signing_keys: true, ..signed("a") };
        for (echo, text) in
            [(signed("a"), NO_REPLACEMENT), (request(), NO_REPLACEMENT), (signed("b"), OTHER_REQUEST)]
        {
            let returned = Success(EnrollSuccess { request: Some(echo), ..success() });
            let error = check_enroll_response(Some(returned), ADDRESS, "agent", &replacing).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }

        let mut other = success();
        other.request.as_mut().unwrap().fence = 8;
        insta::assert_snapshot!(check_result(Success(other)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it enrolled by another request than the one it was sent; is the program at agent a role server?");
        let short = EnrollSuccess { public_key: vec![7; 31], ..success() };
        insta::assert_snapshot!(check_result(Success(short)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key has 31 bytes and not 32; is the program at agent a role server?");
        let zero = EnrollSuccess { public_key: vec![0; 32], ..success() };
        insta::assert_snapshot!(check_result(Success(zero)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key is all zero; is the program at agent a role server?");
        insta::assert_snapshot!(check_enroll_response(None, ADDRESS, "agent", &request()).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it returned neither success nor error; is the program at agent a role server?");
    }

    #[test]
    fn each_agent_error_has_its_message() {
        use enroll_error::Kind;
        let stale = rejection_of(Kind::StaleFence, "stale");
        assert!(matches!(stale, TakeoverError::StaleFence { machine_fence: 9, sent: 7, .. }));
        insta::assert_snapshot!(stale, @"192.0.2.7:22 refused fence 7 because it has seen fence 9: another shepherd works on it with a newer lease, or the database was restored from a backup: then stop every shepherd and declare it with `shepherdctl declare restored`");
        insta::assert_snapshot!(rejection_of(Kind::OtherMachine, "it is machine A."), @"192.0.2.7:22 is enrolled as another machine than 5a0c2c4e-0000-4000-8000-000000000001: it is machine A. Two entries may name one address, another machine may have got the address, or its disk may be a copy of another machine's disk; to give it a new identity, remove its agent's state directory");
        insta::assert_snapshot!(rejection_of(Kind::OtherBmdb, "it is of database B."), @"192.0.2.7:22 belongs to another bare metal database than 5a0c2c4e-0000-4000-8000-00000000000b: it is of database B. Release it there, or remove its agent's state directory if that database is gone");
        insta::assert_snapshot!(rejection_of(Kind::Invalid, "the lane is empty."), @"the agent on 192.0.2.7:22 refused the enrolment as malformed: the lane is empty");
        insta::assert_snapshot!(rejection_of(Kind::Failed, "the state directory\nis locked."), @"the enrolment on 192.0.2.7:22 failed: the state directory is locked");
        let later = EnrollError { kind: 99, message: "a later reason.".to_owned(), current_fence: 0 };
        insta::assert_snapshot!(check_result(enroll_response::Result::Error(later)).unwrap_err(), @"the enrolment on 192.0.2.7:22 failed: a later reason");
    }
}
