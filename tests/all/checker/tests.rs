//! Tests of the checker: it finds each planted fault, and nothing in good records.

use chrono::TimeDelta;
use serde_json::json;

use super::*;

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds)
}

/// Two machines. The first one was lost by a session that died, and another session took it over.
fn good() -> Records {
    let (dead, living) = (Uuid::from_u128(1), Uuid::from_u128(2));
    let machines = [Uuid::from_u128(10), Uuid::from_u128(11)];
    let edge = |machine: usize, fence, event: &str, session_id, seconds| Edge {
        machine_id: machines[machine],
        lane: "access".to_owned(),
        fence,
        event: event.to_owned(),
        session_id,
        at: at(seconds),
    };
    let call = |start, end, what: &str, arguments, result| Call {
        start,
        end,
        what: what.to_owned(),
        machine: Some("sim-0000".to_owned()),
        intent: None,
        arguments,
        outcome: "ok".to_owned(),
        result,
    };
    let creation = |number: u128| Creation {
        intent_id: Uuid::from_u128(20 + number),
        outcome: Some(format!("machine {}", Uuid::from_u128(10 + number))),
    };
    let create = |number: u128, start| Call {
        machine: None,
        intent: Some(Uuid::from_u128(20 + number).to_string()),
        ..call(
            start,
            start + 1,
            "create",
            json!({}),
            json!({ "answer": { "id": format!("sim-{number:04}") } }),
        )
    };
    let session = |session_id, pid, seconds| SessionRow { session_id, pid, closed_at: Some(at(seconds)) };
    let provided = |number: u128| Provided {
        machine_id: Uuid::from_u128(10 + number),
        provider_id: format!("sim-{number:04}"),
    };
    let order = |fence| json!({ "machine_id": machines[0].to_string(), "fence": fence });
    Records {
        edges: vec![
            edge(0, 1, "Started", dead, 10),
            edge(0, 1, "Expired", dead, 21),
            edge(0, 2, "Started", living, 30),
            edge(0, 2, "Finished", living, 31),
            edge(1, 1, "Started", living, 10),
            edge(1, 1, "Failed", living, 11),
        ],
        creations: vec![creation(0), creation(1)],
        sessions: vec![session(dead, 100, 20), session(living, 101, 40)],
        provided: vec![provided(0), provided(1)],
        live_work: 0,
        calls: vec![
            create(0, 1),
            create(1, 3),
            call(5, 6, "upload", json!({}), json!({})),
            call(7, 10, "enroll-command", json!({}), json!({})),
            call(8, 9, "enroll", order(1), json!({})),
            call(11, 14, "enroll-command", json!({}), json!({})),
            call(12, 13, "enroll", order(2), json!({})),
        ],
    }
}

fn judged(change: impl FnOnce(&mut Records)) -> Vec<Violation> {
    let mut records = good();
    change(&mut records);
    check(&records)
}

#[test]
fn a_good_record_is_not_complained_of() {
    assert_eq!(check(&good()), []);
    assert_eq!(check(&planted::nothing(&good()).unwrap()), []);
}

#[test]
fn each_planted_fault_is_found_and_nothing_else() {
    let found = check(&planted::overlapping_work(&good()).unwrap());
    assert!(matches!(found.as_slice(), [Violation::Overlap(_)]), "{found:?}");
    let found = check(&planted::machine_twice(&good()).unwrap());
    assert!(
        matches!(found.as_slice(), [Violation::Twice(made), Violation::Twice(intent)]
            if made.contains("made under 2 intents") || intent.contains("made under 2 intents")),
        "{found:?}"
    );
    let found = check(&planted::missing_expired(&good()).unwrap());
    assert!(matches!(found.as_slice(), [Violation::LostUntold(_)]), "{found:?}");
}

#[test]
fn every_other_promise_is_looked_after_too() {
    let found = judged(|records| records.edges[2].at = at(15));
    assert!(matches!(found.as_slice(), [Violation::Overlap(_)]), "{found:?}");
    let found = judged(|records| records.edges.push(records.edges[1].clone()));
    assert!(matches!(found.as_slice(), [Violation::LostUntold(_)]), "{found:?}");
    let found = judged(|records| records.edges.push(records.edges[3].clone()));
    assert!(matches!(found.as_slice(), [Violation::Fence(_)]), "{found:?}");
    let found = judged(|records| records.edges[3].at = at(41));
    assert!(matches!(found.as_slice(), [Violation::AfterClose(_)]), "{found:?}");
    let found = judged(|records| records.calls[4].arguments["fence"] = json!(3));
    assert!(found.iter().all(|one| matches!(one, Violation::WentBack(_))) && found.len() == 2);
    // A caller that died before the response has created a machine nevertheless, and no other caller did.
    let dropped = |call: &mut Call| {
        call.outcome = "dropped".to_owned();
        call.result["done"] = json!(true);
    };
    assert_eq!(judged(|records| dropped(&mut records.calls[0])), []);
    let found = judged(|records| {
        dropped(&mut records.calls[4]);
        records.calls[4].arguments["fence"] = json!(3);
    });
    assert!(found.iter().all(|one| matches!(one, Violation::WentBack(_))) && found.len() == 2);
    let found = judged(|records| records.provided.push(records.provided[0].clone()));
    assert!(matches!(found.as_slice(), [Violation::Twice(_)]), "{found:?}");
    let found = judged(|records| drop(records.provided.pop()));
    assert!(matches!(found.as_slice(), [Violation::Twice(_)]), "{found:?}");
    let found = judged(|records| records.live_work = 1);
    assert!(matches!(found.as_slice(), [Violation::LeftBehind(_)]), "{found:?}");
}

#[test]
fn a_creation_whose_response_nobody_received_counts_as_made_for_its_own_intent_alone() {
    let unanswered = |records: &mut Records| {
        records.calls[0].outcome = "dropped".to_owned();
        records.calls[0].result = Value::Null;
    };
    assert_eq!(judged(unanswered), []);
    let found = judged(|records| {
        unanswered(records);
        records.creations[0].outcome = Some("nothing was made".to_owned());
    });
    assert!(matches!(found.as_slice(), [Violation::Twice(what)] if what.contains("never made")), "{found:?}");
}

#[test]
fn a_call_that_never_ended_overlaps_what_comes_after_it() {
    let found = judged(|records| records.calls[2].end = u64::MAX);
    assert!(matches!(found.as_slice(), [Violation::Overlap(_)]), "{found:?}");
}
