//! Tests: requests for logs, from validation to their end.

use super::*;

const INTERVAL: Duration = Duration::from_secs(30);

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn log_request(follow: bool) -> LogRequestRecord {
    LogRequestRecord {
        query: LogQuery { log: "etcd".to_owned(), lines: 100, since: None, follow },
        requested_at: at(0),
        requested_by: "kim".to_owned(),
        read_at: at(0),
        delivered: None,
        last_part_at: None,
        parts: 0,
        bytes: 0,
        outcome: None,
    }
}

#[test]
fn invalid_queries_are_rejected_by_field() {
    let good = LogQuery { log: "web/server".to_owned(), lines: 1, since: Some(Span::hours(2)), follow: true };
    assert_eq!(good.validate(), Ok(()));
    for (field, odd) in [
        ("log", LogQuery { log: "a b".to_owned(), ..good.clone() }),
        ("log", LogQuery { log: "\n".to_owned(), ..good.clone() }),
        ("log", LogQuery { log: "x".repeat(MAX_NAME_CHARS + 1), ..good.clone() }),
        ("lines", LogQuery { lines: 0, ..good.clone() }),
        ("lines", LogQuery { lines: MAX_LINES + 1, ..good.clone() }),
        ("since", LogQuery { since: Some(Span::seconds(0)), ..good.clone() }),
        ("since", LogQuery { since: Some(Span::hours(1_000_000)), ..good.clone() }),
        ("follow", LogQuery { log: String::new(), ..good.clone() }),
    ] {
        assert_eq!(odd.validate().unwrap_err().0, field, "{odd:?}");
    }
}

#[test]
fn silent_machine_gets_no_request() {
    for (received, retired, now, expected) in [
        (None, false, 0, Some("has never reported")),
        (Some(0), false, 90, None),
        (Some(0), false, 91, Some("is silent: it last reported 1m31s ago")),
        (Some(0), true, 1, Some("is retired")),
    ] {
        let text = unreachable_reason(received.map(at), retired, INTERVAL, at(now));
        match (&text, expected) {
            (Some(text), Some(expected)) => assert!(text.starts_with(expected), "{text}"),
            (text, expected) => assert_eq!(text.as_deref(), expected),
        }
    }
    assert_eq!(unreachable_reason(Some(at(0)), false, Duration::from_secs(1), at(15)), None, "a busy host");
}

#[test]
fn waiting_has_a_reason_and_a_limit() {
    let handed = |seconds| Some((at(seconds), "i".to_owned()));
    let with = |change: &dyn Fn(&mut LogRequestRecord)| {
        let mut request = log_request(false);
        change(&mut request);
        request
    };
    let follow = |brought| LogRequestRecord {
        delivered: handed(1),
        last_part_at: Some(at(brought)),
        ..log_request(true)
    };
    for (name, request, received, now, expected) in [
        ("not called yet", log_request(false), Some(-5), 90, "waits: it receives the request with"),
        (
            "never called",
            log_request(false),
            Some(-5),
            91,
            "ended: the machine has not reported since the request was made; it last reported",
        ),
        ("passed over", log_request(false), Some(60), 91, "ended: it has reported since, but did not"),
        ("sent", with(&|request| request.delivered = handed(20)), Some(20), 80, "comes"),
        (
            "brings nothing",
            with(&|request| request.delivered = handed(20)),
            Some(20),
            81,
            "ended: the request was sent to it, and it has",
        ),
        ("brings", follow(600), Some(600), 650, "comes"),
        ("stopped bringing", follow(600), Some(600), 661, "ended: the request was sent to it, and"),
        ("followed for long", follow(3600), Some(3600), 3601, "ended: a log is followed for 1h"),
        ("brought", with(&|request| request.outcome = Some(None)), None, 9999, "ended: all"),
        ("failed", with(&|request| request.outcome = Some(Some("no".to_owned()))), None, 9999, "ended: no"),
    ] {
        let text = match request_state(&request, received.map(at), INTERVAL, at(now)) {
            LogRequestState::Waiting(text) => format!("waits: {text}"),
            LogRequestState::Receiving => "comes".to_owned(),
            LogRequestState::Ended(text) => {
                format!("ended: {}", text.unwrap_or_else(|| "all".to_owned()))
            }
        };
        assert!(text.starts_with(expected), "{name}: {text}");
    }
}

#[test]
fn heartbeat_delivers_a_request_or_ends_it() {
    let handed = |to: &str, parts| LogRequestRecord {
        delivered: Some((at(1), to.to_owned())),
        parts,
        ..log_request(false)
    };
    for (name, request, brings, now, expected) in [
        ("new", log_request(false), true, 5, Some(Delivery::First)),
        ("sent to it before", handed("i", 2), true, 5, Some(Delivery::Repeat)),
        ("restarted before it began", handed("other", 0), true, 5, Some(Delivery::First)),
        ("restarted in the middle", handed("other", 1), true, 5, None),
        ("does not know how", log_request(false), false, 5, None),
        ("nobody reads it", log_request(false), true, 61, None),
    ] {
        let is = decide_delivery(&request, "i", brings, "0.9", at(now));
        match expected {
            Some(expected) => assert_eq!(is, expected, "{name}"),
            None => assert!(matches!(is, Delivery::End(_)), "{name}: {is:?}"),
        }
    }
    let Delivery::End(text) = decide_delivery(&log_request(false), "i", false, "0.9", at(5)) else {
        panic!()
    };
    assert!(text.starts_with("its role server (0.9) cannot send logs; update it"), "{text}");
}

#[test]
fn stored_bytes_are_bounded() {
    let limit = i64::try_from(MAX_ANSWER_BYTES).unwrap();
    let reported = |follow, parts, bytes| LogRequestRecord {
        delivered: Some((at(1), "i".to_owned())),
        parts,
        bytes,
        ..log_request(follow)
    };
    let part = |number| LogPart {
        incarnation: "i".to_owned(),
        number,
        lines: "1234567890".to_owned(),
        ..LogPart::default()
    };
    for (name, request, number, unread, now, expected) in [
        ("the next", reported(false, 3, limit - 10), 3, limit, 5, Some(PartDecision::Store)),
        ("more than may be", reported(false, 3, limit - 9), 3, 0, 5, None),
        ("once more", reported(false, 3, 0), 2, 0, 5, Some(PartDecision::Duplicate)),
        ("with a gap", reported(false, 3, 0), 4, 0, 5, None),
        ("followed, taken", reported(true, 3, limit * 9), 3, limit - 10, 5, Some(PartDecision::Store)),
        ("followed, not taken", reported(true, 3, limit * 9), 3, limit - 9, 5, Some(PartDecision::Defer)),
        ("of nobody", log_request(false), 0, 0, 5, Some(PartDecision::Discard)),
        ("nobody reads it", reported(false, 0, 0), 0, 0, 61, None),
    ] {
        let is = decide_part(&request, &part(number), unread, at(now));
        match expected {
            Some(expected) => assert_eq!(is, expected, "{name}"),
            None => assert!(matches!(is, PartDecision::End(_)), "{name}: {is:?}"),
        }
    }
    let other = LogPart { incarnation: "j".to_owned(), ..part(0) };
    assert_eq!(
        decide_part(&reported(false, 0, 0), &other, 0, at(5)),
        PartDecision::Discard,
        "of another start"
    );
    let ended = LogRequestRecord { outcome: Some(None), ..reported(false, 0, 0) };
    assert_eq!(decide_part(&ended, &part(0), 0, at(5)), PartDecision::Discard);
}
