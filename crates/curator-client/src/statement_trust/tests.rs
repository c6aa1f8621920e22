//! Tests of trusted statements: what counts, what is stored, and what replaces an authority.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::*;
use crate::node_id::PublicKey;
use crate::statement::Statement;
use crate::succession::Succession;
use crate::testing::{at, authority, authority_of, public, serial, statement, validity};

type Orders = Arc<Mutex<Vec<(u64, u64)>>>;
type StoredFile = Arc<Mutex<Result<Option<SignedStatement>, String>>>;

/// The second of the clock, the orders of the stored statements, and the trust that has both.
fn trust(second: i64) -> (Arc<AtomicI64>, Orders, StatementTrust) {
    let (second, stored) = (Arc::new(AtomicI64::new(second)), Orders::default());
    let now = second.clone();
    let clock = Clock::new(move || at(now.load(Ordering::Relaxed)), || Duration::ZERO);
    let orders = stored.clone();
    let persist = persist_by(move |signed| {
        if signed.statement.number == 9 {
            return Err("the disk is full".to_owned());
        }
        orders.lock().unwrap().push(signed.statement.order());
        Ok(())
    });
    let trust = StatementTrust::new(authority(1).anchor().clone(), None, persist, clock);
    (second, stored, trust)
}

fn sent(epoch: u64, number: u64) -> wire::SignedStatement {
    statement(epoch, number).sign(&authority(1)).unwrap().to_wire()
}

fn current_order(trust: &StatementTrust) -> Option<(u64, u64)> {
    trust.current().map(|current| current.statement.order())
}

#[tokio::test]
async fn statement_is_durable_before_it_counts() {
    let (_, stored, trust) = trust(0);
    let accepted = trust.subscribe();
    let error = trust.offer(&sent(0, 9), 0).await.unwrap_err().to_string();
    assert_eq!(error, "the new statement of the cluster could not be stored: the disk is full");
    assert_eq!((current_order(&trust), *accepted.borrow()), (None, 0));
    assert!(trust.offer(&sent(0, 2), 0).await.unwrap());
    assert_eq!((current_order(&trust), *accepted.borrow()), (Some((0, 2)), 1));
    assert!(trust.offer(&sent(1, 9), 0).await.is_err());
    let revoking = Statement { revoked: [(serial(5), at(600))].into(), ..statement(0, 9) };
    let revoking = revoking.sign(&authority(1)).unwrap().to_wire();
    assert!(trust.offer(&revoking, 0).await.is_err(), "it would be forgotten by a restart");
    assert!(trust.offer(&sent(0, 1), 0).await.is_err(), "a lower one");
    assert!(!trust.offer(&sent(0, 2), 0).await.unwrap(), "the same one");
    assert_eq!((current_order(&trust), *accepted.borrow()), (Some((0, 2)), 1));
    assert!(trust.clone().offer(&sent(1, 1), 1).await.unwrap());
    assert_eq!((current_order(&trust), *accepted.borrow()), (Some((1, 1)), 2));
    assert_eq!(*stored.lock().unwrap(), [(0, 2), (1, 1)]);
}

#[tokio::test]
async fn refresh_that_cannot_be_stored_counts_until_a_restart() {
    let (_, stored, trust) = trust(0);
    assert!(trust.offer(&sent(0, 2), 0).await.unwrap());
    assert!(trust.offer(&sent(0, 9), 0).await.unwrap(), "it revokes nothing further");
    assert_eq!(current_order(&trust), Some((0, 9)));
    assert_eq!(*stored.lock().unwrap(), [(0, 2)]);
}

#[tokio::test]
async fn curators_are_checked_by_the_newest_statement_until_it_is_stale() {
    let (second, _, trust) = trust(0);
    assert!(matches!(trust.curator_check().unwrap(), CuratorCheck::AnyNode));
    trust.offer(&sent(0, 2), 0).await.unwrap();
    let CuratorCheck::Curator { anchors, revocations } = trust.curator_check().unwrap() else {
        panic!("any node would be followed");
    };
    assert_eq!(anchors, [authority(1).anchor().clone()]);
    assert_eq!(revocations.serials, statement(0, 2).revoked);
    assert!(revocations.serials.contains_key(&serial(3)));
    second.store(90_000, Ordering::Relaxed);
    let error = (trust.check_provider())().unwrap_err();
    assert!(error.contains("no curator is followed until one sends a newer one"), "{error}");
    let newer = Statement { issued_at: at(90_000), ..statement(0, 3) };
    trust.offer(&newer.sign(&authority(1)).unwrap().to_wire(), 0).await.unwrap();
    assert!(trust.curator_check().is_ok());
}

#[tokio::test]
async fn curator_is_proved_by_a_certificate_that_the_newest_statement_permits() {
    let (second, _, trust) = trust(0);
    let (key, node) = (public(7), NodeId::from_key(&public(7)));
    let issuer = authority(1);
    let curator = |number| issuer.issue_curator_certificate(&key, serial(number), validity()).unwrap();
    let (good, revoked) = (curator(5).certificate, curator(3).certificate);
    let of_node = issuer.issue_node_certificate(&key, serial(6), validity()).unwrap().certificate;
    assert_eq!(trust.identify_proved(&good), None, "any node could lead");
    trust.offer(&sent(0, 2), 0).await.unwrap();
    for (certificate, expected) in [(&good, Some(node)), (&revoked, None), (&of_node, None)] {
        assert_eq!(trust.identify_proved(certificate), expected);
    }
    second.store(90_000, Ordering::Relaxed);
    assert_eq!(trust.identify_proved(&good), None, "the statement is stale");
}

#[tokio::test]
async fn nobody_is_followed_until_the_stored_statement_can_be_read() {
    let file: StoredFile = Arc::new(Mutex::new(Err("the file is damaged".to_owned())));
    let anchor = authority(1).anchor().clone();
    let trust_in = |file: &StoredFile| {
        let (file, clock) = (file.clone(), Clock::new(|| at(0), || Duration::ZERO));
        let read: ReadStatement = Arc::new(move || file.lock().unwrap().clone());
        StatementTrust::reading(anchor.clone(), read, persist_by(|_| Ok(())), clock)
    };
    let trust = trust_in(&file);
    for _ in 0..2 {
        let error = trust.curator_check().unwrap_err().to_string();
        assert!(error.contains("cannot be read: the file is damaged"), "{error}");
        assert!(matches!(trust.offer(&sent(0, 3), 0).await, Err(StatementError::Unreadable(_))));
        assert!(trust.decides() && trust.current().is_none());
    }
    // Repaired: it continues there.
    *file.lock().unwrap() = Ok(Some(statement(0, 2).sign(&authority(1)).unwrap()));
    assert!(matches!(trust.curator_check(), Ok(CuratorCheck::Curator { .. })));
    assert_eq!(current_order(&trust), Some((0, 2)));
    assert!(trust.offer(&sent(0, 3), 0).await.unwrap());
    *file.lock().unwrap() = Err("the file is damaged".to_owned());
    assert!(trust.curator_check().is_ok(), "it is read once");
    // Removed: it begins as a new one does.
    let trust = trust_in(&file);
    *file.lock().unwrap() = Ok(None);
    assert!(matches!(trust.curator_check(), Ok(CuratorCheck::AnyNode)) && !trust.decides());
}

#[tokio::test]
async fn statement_of_another_authority_replaces_nothing() {
    let (_, stored, trust) = trust(0);
    trust.offer(&sent(0, 2), 0).await.unwrap();
    let anchor = authority(2).anchor().clone();
    let foreign = Statement { cluster: anchor.cluster, authorities: vec![anchor], ..statement(0, 3) };
    let foreign = foreign.sign(&authority(2)).unwrap().to_wire();
    assert!(matches!(trust.offer(&foreign, 0).await, Err(StatementError::OtherCluster { .. })));
    assert_eq!(*stored.lock().unwrap(), [(0, 2)]);
}

/// A statement of the first cluster by the authority with that key, which also lists another one.
fn by(number: u64, signer: u8, other: Option<u8>, chain: &[Vec<u8>]) -> wire::SignedStatement {
    let anchor = |key| authority_of(1, key).anchor().clone();
    let authorities = [signer].into_iter().chain(other).map(anchor).collect();
    let statement = Statement { authorities, ..statement(0, number) };
    statement.sign(&authority_of(1, signer)).unwrap().with_successors(chain.to_vec()).to_wire()
}

fn link(old: u8, new: u8) -> Vec<u8> {
    Succession::sign(&authority_of(1, old), authority_of(1, new).anchor()).unwrap()
}

#[tokio::test]
async fn authority_is_replaced_by_its_successor_alone() {
    let (_, _, trust) = trust(0);
    let chain = [link(1, 5)];
    let trusted = |trust: &StatementTrust| -> Vec<PublicKey> {
        trust.authorities().into_iter().map(|authority| authority.key).collect()
    };
    assert_eq!(trusted(&trust), [public(1)]);
    for (what, sent, keys) in [
        ("another authority begins", by(1, 5, None, &[]), None),
        ("the authority itself", by(2, 1, None, &[]), Some(vec![1])),
        ("the next one is trusted", by(3, 1, Some(5), &chain), Some(vec![1, 5])),
        ("it signs, and nothing names it", by(4, 5, Some(1), &[]), None),
        ("it signs", by(4, 5, Some(1), &chain), Some(vec![5, 1])),
        ("the former one signs again", by(5, 1, Some(5), &chain), None),
        ("the former one names another", by(5, 6, None, &[link(1, 6)]), None),
        ("the former one is dropped", by(5, 5, None, &chain), Some(vec![5])),
        ("the former one comes back", by(6, 1, None, &chain), None),
    ] {
        let before = trusted(&trust);
        let accepted = trust.offer(&sent, 0).await;
        assert_eq!(accepted.is_ok(), keys.is_some(), "{what}: {accepted:?}");
        if let Err(error) = accepted {
            assert!(matches!(error, StatementError::RetiredAuthority), "{what}: {error}");
        }
        let keys = keys.map(|keys| keys.into_iter().map(public).collect());
        assert_eq!(trusted(&trust), keys.unwrap_or(before), "{what}");
    }
}

#[tokio::test]
async fn stored_statement_is_verified_by_the_anchor_after_a_restart() {
    let (_, _, trust) = trust(0);
    let chain = [link(1, 5), link(5, 6)];
    // The node was off during the first replacement, and received each step of the second.
    for sent in [by(2, 5, Some(1), &chain[..1]), by(3, 5, Some(6), &chain), by(4, 6, None, &chain)] {
        assert!(trust.offer(&sent, 0).await.unwrap());
        let stored = trust.current().unwrap().to_wire();
        let verified = SignedStatement::verify(&stored, slice::from_ref(&trust.anchor())).unwrap();
        assert_eq!(verified.to_wire(), stored);
    }
    assert_eq!(trust.current().unwrap().to_wire().successors, chain);
}

#[tokio::test]
async fn authority_after_a_theft_counts_whatever_the_stolen_one_has_stated() {
    let (_, _, trust) = trust(0);
    let accepted = trust.subscribe();
    // The thief has stated as much as anybody can.
    assert!(trust.offer(&sent(900, 7_000), 0).await.unwrap());
    let (thief, heir) = (authority(1), authority_of(1, 5));
    let by_heir = |number| {
        let authorities = vec![heir.anchor().clone()];
        Statement { authorities, ..statement(0, number) }.sign(&heir).unwrap()
    };
    trust.adopt(heir.anchor().clone(), Some(by_heir(1)));
    assert_eq!((current_order(&trust), *accepted.borrow()), (Some((0, 1)), 2));
    assert_eq!((trust.anchor(), trust.authorities()), (heir.anchor().clone(), vec![heir.anchor().clone()]));
    let link = Succession::sign(&thief, authority_of(1, 6).anchor()).unwrap();
    let authorities = vec![authority_of(1, 6).anchor().clone()];
    let by_another = Statement { authorities, ..statement(900, 7_002) }.sign(&authority_of(1, 6)).unwrap();
    for (what, offered) in [
        ("a statement", sent(900, 7_001)),
        ("a successor of its own", by_another.with_successors(vec![link]).to_wire()),
    ] {
        let error = trust.offer(&offered, 900).await.unwrap_err();
        assert!(matches!(error, StatementError::RetiredAuthority), "{what}: {error}");
    }
    assert!(trust.offer(&by_heir(2).to_wire(), 0).await.unwrap());
    assert_eq!(current_order(&trust), Some((0, 2)));
    trust.adopt(authority_of(1, 7).anchor().clone(), None);
    assert!(trust.current().is_none() && trust.offer(&by_heir(3).to_wire(), 0).await.is_err());
}
