//! Which connection gives way, and when one ends.

use std::net::IpAddr;

use super::*;
use crate::gate::limits::ListenerKind;

fn source(last: u16) -> Source {
    let [high, low] = last.to_be_bytes();
    Source::from_address(IpAddr::from([127, 1, high, low]))
}

fn limits(unproven: usize, per_source: usize) -> GateLimits {
    GateLimits {
        total: unproven * 2,
        proven: unproven * 2 - 2,
        unproven,
        per_source,
        handshake: Some(Duration::from_secs(10)),
        first_request: Duration::from_secs(30),
        expectation: Expectation::Credential,
        after_deferral: Duration::from_mins(5),
        after_refusal: Duration::from_secs(5),
    }
}

fn ids(closed: &[Closed]) -> Vec<u64> {
    closed.iter().map(|closed| closed.id).collect()
}

/// A table and the moment it was made.
fn table(unproven: usize, per_source: usize) -> (GateTable, Instant) {
    (GateTable::new(limits(unproven, per_source)), Instant::now())
}

#[test]
fn newcomer_enters_and_the_oldest_of_the_busiest_source_gives_way() {
    let (mut table, now) = table(6, 10);
    let displaced = [1, 2, 2, 3, 3, 3].map(|from| ids(&table.admit(source(from), now).1));
    // Three of the six places are for connections that have sent nothing.
    assert_eq!(displaced, [vec![], vec![], vec![], vec![1], vec![3], vec![4]]);
    assert_eq!(table.counts(), GateCounts { handshakes: 3, unproven: 3, proven: 0 });
}

#[test]
fn source_above_its_limit_replaces_its_own_oldest() {
    let (mut table, now) = table(100, 2);
    table.admit(source(9), now);
    let displaced = [1, 1, 1, 1].map(|from| ids(&table.admit(source(from), now).1));
    assert_eq!(displaced, [vec![], vec![], vec![1], vec![2]]);
    for id in [3, 4] {
        assert!(table.record_bytes(id).is_empty());
    }
    let (fifth, _) = table.admit(source(1), now);
    assert_eq!(ids(&table.record_bytes(fifth)), [3], "the same limit for those that have spoken");
}

/// A TLS handshake takes long on a slow host: meanwhile thousands of others come.
#[test]
fn neither_flood_of_many_sources_reaches_a_handshake_of_the_other_class_or_of_a_quiet_source() {
    for (name, speaks) in [("silent", false), ("half-spoken", true)] {
        let (mut table, now) = table(500, 100);
        let (handshake, _) = table.admit(source(5000), now);
        table.record_bytes(handshake);
        for number in 0..5000 {
            let (id, mut displaced) = table.admit(source(number % 200), now);
            if speaks {
                displaced.extend(table.record_bytes(id));
            }
            assert!(!ids(&displaced).contains(&handshake), "{name}: the handshake gave way to {number}");
        }
        assert_eq!(table.counts().unproven, 250 + usize::from(!speaks), "{name}");
    }
}

#[test]
fn silent_flood_of_more_sources_than_places_leaves_those_that_have_spoken() {
    let (mut table, now) = table(20, 10);
    let (handshake, _) = table.admit(source(5000), now);
    table.record_bytes(handshake);
    for number in 0..1000 {
        assert!(!ids(&table.admit(source(number), now).1).contains(&handshake), "{number}");
    }
}

#[test]
fn connection_whose_request_is_answered_gives_way_last() {
    let (mut table, now) = table(8, 8);
    let spoken: Vec<u64> = (1..=4)
        .map(|from| {
            let (id, _) = table.admit(source(from), now);
            assert!(table.record_bytes(id).is_empty());
            id
        })
        .collect();
    table.begin_request(spoken[0]);
    table.begin_request(spoken[0]);
    let mut speak = |from| {
        let (id, _) = table.admit(source(from), now);
        ids(&table.record_bytes(id))
    };
    assert_eq!(speak(5), [spoken[1]], "the first one is older, and is being answered");
    assert_eq!(speak(6), [spoken[2]]);
    table.end_request(spoken[0]);
    table.end_request(spoken[0]);
    let (id, _) = table.admit(source(7), now);
    assert_eq!(ids(&table.record_bytes(id)), [spoken[0]], "it was answered");
}

#[test]
fn answers_that_last_take_half_of_their_class_at_most() {
    let (mut table, now) = table(8, 8);
    let mut answered = Vec::new();
    for from in [1, 1, 1, 2] {
        let (id, _) = table.admit(source(from), now);
        table.record_bytes(id);
        table.begin_request(id);
        answered.push(id);
    }
    let (newcomer, _) = table.admit(source(3), now);
    assert_eq!(ids(&table.record_bytes(newcomer)), [answered[0]]);
}

#[test]
fn connection_with_a_credential_never_gives_way_and_has_a_place_reserved() {
    let (mut table, now) = table(4, 4);
    for _ in 0..6 {
        let (id, _) = table.admit(source(1), now);
        table.record_bytes(id);
        assert!(table.prove(id, now));
        assert!(table.prove(id, now), "again");
    }
    for from in 2..40 {
        let (id, displaced) = table.admit(source(from), now);
        assert!(displaced.iter().chain(&table.record_bytes(id)).all(|closed| closed.id >= 6));
    }
    // Eight places, six with a credential: one of each class is left for others.
    assert_eq!(table.counts(), GateCounts { handshakes: 7, unproven: 1, proven: 6 });
}

#[test]
fn credential_beyond_all_places_is_refused_and_has_time_for_the_answer() {
    let second = Duration::from_secs(1);
    for expectation in [Expectation::Credential, Expectation::Request] {
        let now = Instant::now();
        let mut table = GateTable::new(GateLimits { expectation, ..limits(3, 3) });
        let mut last = 0;
        for expected in [true, true, true, true, false] {
            let (id, _) = table.admit(source(1), now);
            table.record_bytes(id);
            table.finish_handshake(id, now);
            table.begin_request(id);
            assert_eq!(table.prove(id, now), expected, "{id}");
            last = id;
        }
        assert_eq!((table.counts().proven, table.counts().unproven), (4, 1));
        assert!(table.expire(now + 20 * second).is_empty(), "the refusal is being written");
        table.end_request(last);
        assert!(table.expire(now + 4 * second).is_empty(), "the refusal is being read");
        // Another request or another refusal gives it no more time.
        table.begin_request(last);
        assert!(!table.prove(last, now + 4 * second));
        table.defer(last, now + 4 * second);
        table.end_request(last);
        let expired = table.expire(now + 5 * second);
        assert_eq!(
            expired.iter().map(|closed| (closed.id, closed.reason)).collect::<Vec<_>>(),
            [(last, CloseReason::Full)]
        );
        assert_eq!((table.counts().proven, table.counts().unproven), (4, 0));
    }
}

#[test]
fn refused_connection_counts_once_however_it_ends_and_takes_a_place_that_becomes_free() {
    let (mut table, now) = table(3, 3);
    let mut enter = |expected: bool| {
        let (id, _) = table.admit(source(1), now);
        table.record_bytes(id);
        assert_eq!(table.prove(id, now), expected);
        id
    };
    let first = [true, true, true, true].map(&mut enter)[0];
    let (left, displaced, waiting) = (enter(false), enter(false), enter(false));
    assert_eq!(table.counts().unproven, 1, "one place of the class is left");
    assert!(table.remove(displaced).is_none() && table.remove(left).is_none(), "they gave way");
    assert_eq!(table.remove(first), None, "it was not refused");
    assert!(table.prove(waiting, now));
    assert_eq!(table.remove(waiting), None);
    let (refused, _) = table.admit(source(2), now);
    table.record_bytes(refused);
    assert!(table.prove(refused, now));
    let (refused, _) = table.admit(source(2), now);
    assert!(!table.prove(refused, now));
    assert_eq!(table.remove(refused).map(|closed| closed.reason), Some(CloseReason::Full));
    assert_eq!(table.remove(refused), None);
}

/// The last places are never for connections with a credential, so one that comes beside a flood has its answer.
#[test]
fn newcomer_at_a_full_listener_keeps_its_place_until_it_is_answered() {
    let now = Instant::now();
    for (kind, files) in [
        (ListenerKind::Callback, 1024),
        (ListenerKind::Api, 512),
        (ListenerKind::Curator, 256),
        (ListenerKind::Curator, 4096),
    ] {
        let limits = GateLimits::for_listener(kind, files);
        let mut table = GateTable::new(limits);
        let enter = |table: &mut GateTable, from| {
            let (id, mut closed) = table.admit(source(from), now);
            closed.extend(table.record_bytes(id));
            (id, closed)
        };
        for number in 0..limits.proven {
            let (id, _) = enter(&mut table, u16::try_from(number).unwrap());
            assert!(table.prove(id, now), "{kind:?} {files}: {number}");
        }
        let (newcomer, _) = enter(&mut table, 9000);
        table.begin_request(newcomer);
        for from in 10_000..12_000 {
            let (_, closed) = enter(&mut table, from);
            assert!(
                closed.iter().all(|closed| closed.id != newcomer),
                "{kind:?} {files}: it gave way to {from}"
            );
        }
        assert!(!table.prove(newcomer, now), "{kind:?} {files}");
        assert_eq!(table.counts().proven, limits.proven, "{kind:?} {files}");
    }
}

#[test]
fn deadlines_are_those_of_the_stage() {
    let second = Duration::from_secs(1);
    for (expectation, left_after_a_request) in [(Expectation::Credential, 0), (Expectation::Request, 1)] {
        let now = Instant::now();
        let mut table = GateTable::new(GateLimits { expectation, ..limits(100, 100) });
        let (silent, _) = table.admit(source(1), now);
        let (waiting, _) = table.admit(source(1), now);
        let (deferred, _) = table.admit(source(1), now);
        let (asking, _) = table.admit(source(1), now);
        for id in [waiting, deferred, asking] {
            table.finish_handshake(id, now + second);
        }
        assert_eq!(table.until_deadline(now), Some(second), "a second at most");
        assert!(table.expire(now + 9 * second).is_empty());
        let expired = table.expire(now + 10 * second);
        assert_eq!(ids(&expired), [silent]);
        assert!(expired[0].in_handshake && expired[0].reason == CloseReason::TimedOut);
        table.defer(deferred, now + 20 * second);
        table.begin_request(asking);
        assert_eq!(ids(&table.expire(now + 31 * second)), [waiting], "answered requests have time");
        table.end_request(asking);
        table.expire(now + 31 * second);
        assert_eq!(table.counts().unproven, 1 + left_after_a_request);
        table.expire(now + 320 * second);
        assert_eq!(table.counts().unproven, left_after_a_request);
    }
}

#[test]
fn process_without_files_closes_one_of_the_larger_class() {
    let (mut table, now) = table(100, 100);
    assert_eq!(table.relieve(), None);
    let silent = [1, 1, 2].map(|from| table.admit(source(from), now).0);
    table.record_bytes(silent[2]);
    assert_eq!(table.relieve().map(|closed| closed.id), Some(silent[0]));
    table.record_bytes(silent[1]);
    assert_eq!(table.relieve().map(|closed| closed.id), Some(silent[1]));
}

#[test]
fn nothing_is_left_of_connections_that_ended() {
    let (mut table, now) = table(100, 100);
    for stage in 0..4 {
        let (id, _) = table.admit(source(1), now);
        if stage > 0 {
            table.record_bytes(id);
        }
        if stage > 1 {
            table.begin_request(id);
        }
        if stage > 2 {
            assert!(table.prove(id, now));
        }
        table.remove(id);
        table.remove(id);
    }
    assert_eq!(table.counts(), GateCounts::default());
    assert!(table.deadlines.is_empty() && table.connections.is_empty());
    assert_eq!(table.silent.count() + table.spoken.count() + table.answered.count(), 0);
}
