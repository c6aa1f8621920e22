//! `roleserver enroll`: accept an enrolment request on standard input.
//!
//! Reads one `EnrollRequest` from standard input, writes one `EnrollResponse` to standard output, and nothing else
//! there. A failure after the request was read is a response, which the shepherd at the other end of the SSH session
//! reads. The exit code is for people and scripts, and distinguishes failures, malformed requests and refusals.
//!
//! An accepted enrolment is on the disk before the agent is touched, so that a machine that loses power in between
//! knows the fence of the request.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use prost::Message as _;
use proto::agent::v1 as wire;

use crate::boot_clock::{BootClock as _, HostClock};
use crate::child::migration;
use crate::commands::CommandError;
use crate::enrolment::{self, EnrollError, REQUEST_LIMIT_BYTES};
use crate::init_system::systemd::{Systemd, UNIT};
use crate::init_system::{self, DesiredAgent, ENROLMENT_TIMEOUT, SupervisionMode, SupervisionPlan};
use crate::mountinfo::read_mountinfo;
use crate::process::program_digest;
use crate::signing_store::SigningStore;
use crate::state_directory::{Lock, StateDirectory};
use crate::systemd_manager::manager::SystemdManager;
use crate::trusted_time::TimeSample;

/// How long to wait for another enrolment of the same machine.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);

/// Reads one request, carries it out, and writes the response. Returns the exit code for it.
pub fn execute(
    state_directory: &Path,
    home: Option<&Path>,
    mode: SupervisionMode,
) -> Result<u8, CommandError> {
    let input = std::io::stdin();
    if input.is_terminal() {
        return Err(CommandError::Usage(
            "enroll is called by a shepherd over SSH: it reads a request from standard input, not from a \
             terminal; `roleserver --help` says more"
                .to_owned(),
        ));
    }
    let bytes = read_request(input)?;
    let enrolled =
        decode_request(&bytes).and_then(|request| enroll_machine(state_directory, home, mode, request));
    let (answer, exit_code) = match enrolled {
        Ok(answer) => (answer, 0),
        Err(error) => {
            tracing::error!(%error, "the machine was not enrolled");
            (error.to_response(), error.exit_code())
        }
    };
    let mut output = std::io::stdout();
    output
        .write_all(&answer.encode_to_vec())
        .and_then(|()| output.flush())
        .map_err(|error| CommandError::Failed(format!("writing the answer failed: {error}")))?;
    Ok(exit_code)
}

/// Reads to the end of the input, within limits of size and time: a session that was cut unnoticed must not leave a
/// process waiting for ever.
fn read_request(input: std::io::Stdin) -> Result<Vec<u8>, CommandError> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let limit = u64::try_from(REQUEST_LIMIT_BYTES).unwrap_or(u64::MAX) + 1;
        let mut bytes = Vec::new();
        let read = input.lock().take(limit).read_to_end(&mut bytes);
        // After the timeout the receiver is gone.
        let _ = sender.send(read.map(|_| bytes));
    });
    receiver
        .recv_timeout(REQUEST_TIMEOUT)
        .map_err(|_| {
            let seconds = REQUEST_TIMEOUT.as_secs();
            CommandError::Failed(format!("standard input did not end within {seconds} s; a request does"))
        })?
        .map_err(|error| CommandError::Failed(format!("reading the request failed: {error}")))
}

/// Decodes a request; the error of a malformed one is sent as the response.
pub fn decode_request(bytes: &[u8]) -> Result<wire::EnrollRequest, EnrollError> {
    if bytes.is_empty() {
        return Err(EnrollError::Invalid("it is empty".to_owned()));
    }
    if bytes.len() > REQUEST_LIMIT_BYTES {
        return Err(EnrollError::Invalid(format!("it has more than {REQUEST_LIMIT_BYTES} bytes")));
    }
    wire::EnrollRequest::decode(bytes).map_err(|error| EnrollError::Invalid(error.to_string()))
}

fn enroll_machine(
    state_directory: &Path,
    home: Option<&Path>,
    mode: SupervisionMode,
    request: wire::EnrollRequest,
) -> Result<wire::EnrollResponse, EnrollError> {
    let until = Instant::now() + ENROLMENT_TIMEOUT;
    let failed = |error: &dyn std::fmt::Display| EnrollError::Failed(error.to_string());
    let state = StateDirectory::open(state_directory).map_err(|error| failed(&error))?;
    // Two shepherds may enrol one machine at once; one after the other they are distinguished by their fences.
    let _held = state.wait_for_lock(Lock::Enroll, LOCK_TIMEOUT).map_err(|error| failed(&error))?;

    let kept = state.read_enrolment().map_err(|error| failed(&error))?;
    let mut enrolment = enrolment::accept_enrolment(kept.as_ref(), &request)?;
    let plan =
        init_system::choose_supervision(mode, init_system::detect_host()).map_err(|error| failed(&error))?;
    // Before anything is written: a damaged key refuses the request, and nothing has changed then.
    let is_keyless = state.read_identity().map_err(|error| failed(&error))?.is_none();
    if kept.is_some() && is_keyless {
        // The key was removed; an agent that still runs has the old one in memory.
        enrolment.revision = enrolment.revision.wrapping_add(1);
    }
    let signing = SigningStore::open(state.clone());
    if request.replace_signing_keys {
        let (keys, rotations) = (&request.signing_keys, &request.key_rotations);
        let replaced = signing.replace_keys(keys, rotations, request.require_signed_declarations);
        if replaced.map_err(|error| failed(&error))? {
            // An agent that runs has the former keys in memory.
            enrolment.revision = enrolment.revision.wrapping_add(1);
        }
    }
    if kept.as_ref() != Some(&enrolment) {
        state.write_enrolment(&enrolment).map_err(|error| failed(&error))?;
    }
    // No keys are pinned if some are there already. The agent that runs, if there is one, pins the same with a heartbeat.
    if request.require_signed_declarations {
        signing.require_signed_declarations();
    }
    if signing.accept_offer(&request.signing_keys, &request.key_rotations) {
        signing.save().map_err(|error| failed(&error))?;
    }
    let clock = HostClock::read().map_err(|error| failed(&error))?;
    let unkept = TimeSample::from_server_time(&clock, request.shepherd_time_ms)
        .and_then(|sample| state.write_time_sample(&sample).err())
        .map(|error| {
            format!("the time of the shepherd could not be stored, so this machine's own clock has to be right: {error}")
        });
    let identity = state.read_or_create_identity().map_err(|error| failed(&error))?;

    let program = std::env::current_exe().map_err(|error| failed(&error))?;
    let program_sha256 = program_digest(Path::new("/proc/self/exe")).map_err(|error| failed(&error))?;
    let wanted = DesiredAgent { program, program_sha256, revision: enrolment.revision };
    let systemd = match (plan, home) {
        (SupervisionPlan::UserUnit, Some(home)) => Systemd::user(home),
        _ => Systemd::system(),
    };
    let protect = || {
        let manager = match plan {
            SupervisionPlan::UserUnit => SystemdManager::own_user(),
            _ => SystemdManager::system(),
        };
        let mountinfo = read_mountinfo().unwrap_or_default();
        migration::protect_children(state.path(), &manager, UNIT, &mountinfo, until)
    };
    let (supervision, mut warnings) =
        init_system::ensure_agent_runs(plan, &systemd, &state, &wanted, &protect, until)
            .map_err(|error| failed(&error))?;
    warnings.extend(unkept);
    tracing::info!(machine = %enrolment.machine_id, revision = enrolment.revision, "enrolled");
    let success = wire::EnrollSuccess {
        request: Some(request),
        public_key: identity.public_key().to_vec(),
        warnings,
        boot_id: clock.boot_id(),
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        supervision: supervision.into(),
    };
    Ok(wire::EnrollResponse { result: Some(wire::enroll_response::Result::Success(success)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_request_gets_an_error_response() {
        let text = |bytes: &[u8]| decode_request(bytes).unwrap_err().to_string();
        assert_eq!(text(b""), "the enrolment request is malformed: it is empty");
        assert!(text(b"GET / HTTP/1.1").starts_with("the enrolment request is malformed: "));
        assert!(text(&vec![0; REQUEST_LIMIT_BYTES + 1]).ends_with("it has more than 1048576 bytes"));
    }
}
