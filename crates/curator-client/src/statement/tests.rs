use super::*;
use crate::certificate::Validity;
use crate::testing::{at, authority, pkcs8, serial, statement};

/// Seconds that a clock may be wrong.
const TEN_YEARS: i64 = 10 * 365 * 86_400;

fn anchors(numbers: &[u8]) -> Vec<TrustAnchor> {
    numbers.iter().map(|number| authority(*number).anchor().clone()).collect()
}

#[test]
fn statement_round_trips_and_any_changed_byte_is_refused() {
    let signed = statement(2, 7).sign(&authority(1)).unwrap();
    assert_eq!(signed.statement, statement(2, 7));
    let sent = signed.to_wire();
    assert_eq!(SignedStatement::verify(&sent, &anchors(&[1])).unwrap(), signed);
    assert_eq!(SignedStatement::verify(&sent, &anchors(&[2, 1])).unwrap(), signed, "one of two");
    let refused = |changed: wire::SignedStatement| {
        let error = SignedStatement::verify(&changed, &anchors(&[1])).unwrap_err();
        assert!(matches!(error, StatementError::BadSignature), "{error}");
    };
    for position in 0..sent.statement.len() {
        let mut changed = sent.clone();
        changed.statement[position] ^= 1;
        refused(changed);
    }
    for position in 0..sent.signature.len() {
        let mut changed = sent.clone();
        changed.signature[position] ^= 1;
        refused(changed);
    }
    let between = after(at(0), Duration::from_micros(1_500));
    let rounded = Statement { issued_at: between, ..statement(2, 7) }.sign(&authority(1)).unwrap();
    assert_eq!(rounded.statement.issued_at, after(at(0), Duration::from_millis(1)));
    assert_eq!(SignedStatement::verify(&rounded.to_wire(), &anchors(&[1])).unwrap(), rounded);
}

#[test]
fn statement_of_an_untrusted_authority_is_refused_by_its_reason() {
    let cluster = authority(2).anchor().cluster;
    let elsewhere = Statement { cluster, authorities: anchors(&[2]), ..statement(0, 1) };
    let elsewhere = elsewhere.sign(&authority(2)).unwrap();
    let error = SignedStatement::verify(&elsewhere.to_wire(), &anchors(&[1])).unwrap_err();
    assert!(matches!(error, StatementError::OtherCluster { .. }), "{error}");
    let long = Validity { not_before: at(-1000), not_after: at(1_000_000) };
    let next = Authority::create(statement(0, 1).cluster, &pkcs8(9), serial(9), long).unwrap();
    let former = statement(0, 1).sign(&authority(1)).unwrap();
    let trusted = [next.anchor().clone()];
    let error = SignedStatement::verify(&former.to_wire(), &trusted).unwrap_err();
    assert!(matches!(error, StatementError::RetiredAuthority), "{error}");
    let error = statement(0, 1).sign(&next).unwrap_err();
    assert!(matches!(error, StatementError::Malformed(_)), "{error}");
}

#[test]
fn statement_lists_4096_certificates_and_no_more() {
    let serials = (0..=4096_u16).map(|number| {
        let mut bytes = [0x40; 16];
        bytes[14..].copy_from_slice(&number.to_be_bytes());
        (Serial::new(bytes), at(500))
    });
    let mut long = Statement { revoked: serials.collect(), ..statement(0, 1) };
    assert!(matches!(long.sign(&authority(1)), Err(StatementError::TooLong(4097))));
    long.revoked.pop_last();
    let longest = long.sign(&authority(1)).unwrap();
    assert_eq!(SignedStatement::verify(&longest.to_wire(), &anchors(&[1])).unwrap(), longest);
}

#[test]
fn statements_are_ordered_by_epoch_and_number() {
    let ordered = [(0, 1), (0, 2), (0, u64::MAX), (1, 1), (1, 3), (2, 2)];
    for pair in ordered.windows(2) {
        let [(epoch, number), (later_epoch, later_number)] = pair else { unreachable!() };
        let (former, later) = (statement(*epoch, *number), statement(*later_epoch, *later_number));
        assert!(former.order() < later.order(), "{pair:?}");
        assert!(accept_statement(Some(&former), 0, &later, at(0)).unwrap(), "{pair:?}");
        assert!(accept_statement(Some(&later), 0, &former, at(0)).is_err(), "{pair:?}");
    }
}

#[test]
fn offered_statement_is_accepted_or_refused_in_one_sentence() {
    let stored = statement(2, 7);
    let signed_at = |issued_at| Statement { issued_at, ..statement(2, 8) };
    let other = Statement { revoked: BTreeMap::new(), ..statement(2, 7) };
    let elsewhere = Statement { cluster: Uuid::from_u128(5), ..statement(2, 8) };
    for (stored, epoch, offered, expected) in [
        (None, 0, statement(0, 1), Ok(true)),
        (None, 2, statement(2, 1), Ok(true)),
        (None, 2, statement(1, 9), Err("statement 9 of epoch 1 is lower than what is known here: epoch 2")),
        (None, 0, statement(1_000, 1), Ok(true)),
        (None, 0, statement(1_001, 1), Err("epoch 1001 of the statement is too far beyond 0")),
        (None, 2, signed_at(at(1_800)), Ok(true)),
        (None, 2, signed_at(at(1_801)), Err("was signed at")),
        (Some(&stored), 2, stored.clone(), Ok(false)),
        (Some(&stored), 3, stored.clone(), Ok(false)),
        (Some(&stored), 2, statement(2, 8), Ok(true)),
        (Some(&stored), 2, statement(3, 1), Ok(true)),
        (Some(&stored), 3, statement(2, 8), Err("lower than what is known here: epoch 3")),
        (Some(&stored), 2, statement(2, 6), Err("lower than what is known here: epoch 2, number 7")),
        (Some(&stored), 2, statement(1, 99), Err("lower than what is known here: epoch 2, number 7")),
        (Some(&stored), 2, other, Err("there are two different statements with number 7 of epoch 2")),
        (Some(&stored), 2, signed_at(at(1_801)), Err("is one of the two clocks wrong?")),
        (Some(&stored), 2, signed_at(at(TEN_YEARS)), Err("is one of the two clocks wrong?")),
        // It is stale, and yet newer than the stored one: its revocations count.
        (Some(&stored), 2, signed_at(at(-200_000)), Ok(true)),
        (Some(&stored), 2, elsewhere, Err("is about cluster 00000000-0000-0000-0000-000000000005")),
    ] {
        let accepted = accept_statement(stored, epoch, &offered, at(0)).map_err(|error| error.to_string());
        match (&accepted, expected) {
            (Ok(accepted), Ok(expected)) => assert_eq!(*accepted, expected, "{epoch} {offered:?}"),
            (Err(error), Err(text)) => {
                assert!(error.contains(text) && !error.contains(". "), "{text}: {error}");
            }
            _ => panic!("{epoch} {offered:?}: {accepted:?}, and {expected:?} was expected"),
        }
    }
}

/// Its clock is as far ahead as that of a leader that does not step down.
#[test]
fn revocation_by_a_leader_29_minutes_ahead_counts_at_once() {
    let ahead = at(29 * 60);
    let stored = Statement { revoked: BTreeMap::new(), ..statement(2, 7) };
    let revoked = BTreeMap::from([(serial(4), at(600))]);
    let offered = Statement { issued_at: ahead, revoked, ..statement(2, 8) };
    assert!(accept_statement(Some(&stored), 2, &offered, at(0)).unwrap());
    // It is stale a day after its own time, and a leader with the right clock replaces it at once.
    assert!(offered.is_fresh(at(86_400 + 29 * 60 - 1)) && !offered.is_fresh(at(86_400 + 29 * 60)));
    let next = Statement { issued_at: at(1), number: 9, ..offered.clone() };
    assert!(accept_statement(Some(&offered), 2, &next, at(1)).unwrap());
}

#[test]
fn statement_is_fresh_for_as_long_as_a_curators_certificate_lives() {
    for (second, fresh) in
        [(-90_000, true), (0, true), (86_399, true), (86_400, false), (999_999, false), (TEN_YEARS, false)]
    {
        assert_eq!(statement(0, 1).is_fresh(at(second)), fresh, "{second}");
    }
}

#[test]
fn refresh_alone_ends_no_connection() {
    let former = statement(2, 7);
    let refreshed = Statement { issued_at: at(3_600), ..statement(2, 8) };
    assert!(!refreshed.ends_connections_of(Some(&former)));
    let shorter = Statement { revoked: BTreeMap::from([(serial(4), at(600))]), ..statement(2, 8) };
    assert!(!shorter.ends_connections_of(Some(&former)), "an expired certificate left the list");
    let further = Statement { revoked: BTreeMap::from([(serial(5), at(600))]), ..statement(2, 8) };
    assert!(further.ends_connections_of(Some(&former)));
    assert!(statement(3, 8).ends_connections_of(Some(&former)), "the cluster was restored");
    let rotated = Statement { authorities: anchors(&[1, 2]), ..statement(2, 8) };
    assert!(rotated.ends_connections_of(Some(&former)));
    assert!(former.ends_connections_of(None), "any node could be at the other end");
}
