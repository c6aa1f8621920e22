//! Responses of a hosting company's API, to any request.
//!
//! An input is a line with the status, and then the body. Each request gets each response, because an API may also mix
//! up its responses.

use reqwest::StatusCode;
use shepherd::model::ids::IntentId;
use shepherd::providers::field_checks::check_address;
use shepherd::providers::provider::{ErrorClass, ProviderMachine};
use shepherd::providers::simulated::responses::{
    ResponseError, parse_accepted, parse_created, parse_found, parse_list, parse_machine, parse_power_state,
};
use uuid::Uuid;

/// The machine of the request, and its intent, in the corpus.
const ID: &str = "sim-0001";
const INTENT: IntentId = IntentId(Uuid::from_u128(0x5a0c_2c4e_0000_4000_8000_0000_0000_0001));

/// Makes every request; the error is that no request accepted the response.
pub(super) fn decode(bytes: &[u8]) -> Result<(), String> {
    let (first, body) = match bytes.iter().position(|byte| *byte == b'\n') {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (&[][..], bytes),
    };
    let status = StatusCode::from_bytes(first).unwrap_or(StatusCode::OK);
    let one = |machine: Option<ProviderMachine>| Vec::from_iter(machine);
    let mut refusals = Vec::new();
    let mut answers = 0;
    let mut observed = |answer: Result<Vec<ProviderMachine>, ResponseError>| match answer {
        Ok(machines) => {
            answers += 1;
            machines.iter().for_each(fit);
        }
        Err(refusal) => refusals.push(refusal),
    };
    observed(parse_list(status, body).inspect(|machines| {
        let mut ids: Vec<_> = machines.iter().map(|machine| &machine.id).collect();
        ids.sort();
        assert!(ids.is_sorted_by(|a, b| a < b), "an id is listed twice");
    }));
    observed(parse_machine(status, body, ID).map(|machine| {
        assert!(machine.as_ref().is_none_or(|machine| machine.id == ID), "another machine is believed");
        one(machine)
    }));
    for answer in [parse_created(status, body, INTENT), parse_found(status, body, INTENT)] {
        observed(answer.map(|machine| {
            assert!(machine.as_ref().is_none_or(|machine| machine.intent == Some(INTENT)), "another intent");
            one(machine)
        }));
    }
    observed(parse_power_state(status, body).map(|state| {
        assert!(state.is_none_or(|state| printable(state.as_str())), "the power cannot be shown");
        Vec::new()
    }));
    observed(parse_accepted(status, body).map(|_| Vec::new()));
    for refusal in &refusals {
        // Only a 404 with an error sentence proves that a machine does not exist.
        assert_ne!(refusal.class, ErrorClass::NotFound);
        assert!(printable(&refusal.message), "{refusal:?}");
        assert!(refusal.message.chars().count() < 1000, "nobody reads so much: {refusal:?}");
    }
    match refusals.pop() {
        Some(refusal) if answers == 0 => Err(refusal.message),
        _ => Ok(()),
    }
}

/// A machine that can be stored, shown and called.
fn fit(machine: &ProviderMachine) {
    let ProviderMachine { id, usage, address, ssh_port, ssh_user, location, status, host_keys, intent: _ } =
        machine;
    let texts = [Some(id.as_str()), usage.reservation(), ssh_user.as_deref(), location.as_deref()];
    let texts = texts.into_iter().flatten().chain([status.as_str()]);
    let kinds = host_keys.iter().map(|key| key.algorithm.as_str());
    assert!(texts.chain(kinds).all(printable), "{machine:?}");
    assert!(address.as_deref().is_none_or(|address| check_address(address).is_ok()), "{machine:?}");
    assert_ne!(*ssh_port, Some(0), "{machine:?}");
}

fn printable(text: &str) -> bool {
    !text.is_empty() && text.len() <= 8192 && !text.chars().any(char::is_control)
}
