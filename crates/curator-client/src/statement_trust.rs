//! The newest verified statement of a cluster, shared by all connections to its curators and stored durably.
//!
//! A statement is stored before it counts: a program that was interrupted continues with the statement that its last
//! decisions were based on, or with a newer one. Nothing is locked meanwhile, because a disk may be slow. There is one
//! exception: a statement that revokes nothing further counts also if it cannot be stored. It permits what the stored one
//! permits, and without it a node with a full disk would follow nobody within the hour.
//!
//! A statement that is stored and cannot be read permits nobody: it may revoke what this side would follow without it. It is
//! read again at each attempt, so that a repaired or removed file needs no restart.
//!
//! # After a theft of the authority's key
//!
//! No statement leads from a stolen authority to the next one: the thief could sign it. So `StatementTrust::adopt`
//! replaces the authority and the statement together, by an order that came another way. Their numbers do not count. A
//! statement of the former authority that was being stored meanwhile counts no more.
//!
//! # Where curators are
//!
//! The trust also remembers where curators have proved themselves by the newest statement
//! ([`proved_curators`](crate::proved_curators)): they are the way to the next one, and outlive each connection.
//!
//! Several of these may share one file, such as those of a node's connection and of its enrolment. Each of them is
//! durable by itself: [`PersistStatement`] leaves a higher statement alone.

use std::fmt;
use std::pin::Pin;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use proto::curator::v1 as wire;
use tokio::sync::watch;

use crate::clock::Clock;
use crate::curator_role::identify_curator;
use crate::node_id::NodeId;
use crate::peer_identity::Revocations;
use crate::pki::TrustAnchor;
use crate::proved_curators::ProvedCurators;
use crate::statement::{SignedStatement, StatementError, accept_statement};
use crate::tls::{CuratorCheck, CuratorCheckProvider};

/// The storing of a statement, which may take a database's time; the error is a sentence.
pub type StatementWrite = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

/// Stores a statement durably, unless a higher one is stored already.
pub type PersistStatement = Arc<dyn Fn(SignedStatement) -> StatementWrite + Send + Sync>;

/// Reads the stored statement, if there is one; the error is a sentence.
pub type ReadStatement = Arc<dyn Fn() -> Result<Option<SignedStatement>, String> + Send + Sync>;

/// Stores statements by a function that is done when it returns.
pub fn persist_by(
    write: impl Fn(&SignedStatement) -> Result<(), String> + Send + Sync + 'static,
) -> PersistStatement {
    Arc::new(move |signed: SignedStatement| -> StatementWrite {
        Box::pin(std::future::ready(write(&signed)))
    })
}

/// The newest verified statement of one cluster. Clones share it.
#[derive(Clone)]
pub struct StatementTrust(Arc<TrustInner>);

struct TrustInner {
    anchor: Mutex<TrustAnchor>,
    persist: PersistStatement,
    clock: Clock,
    current: watch::Sender<Option<Arc<SignedStatement>>>,
    /// Number of statements that were accepted since the start.
    accepted: watch::Sender<u64>,
    /// Reads the stored statement; `None` once it was read.
    unread: Mutex<Option<ReadStatement>>,
    curators: ProvedCurators,
}

impl StatementTrust {
    /// Starts with the stored statement. `anchor` is trusted as long as there is none.
    #[must_use]
    pub fn new(
        anchor: TrustAnchor,
        stored: Option<SignedStatement>,
        persist: PersistStatement,
        clock: Clock,
    ) -> Self {
        Self(Arc::new(TrustInner {
            anchor: Mutex::new(anchor),
            persist,
            clock,
            current: watch::Sender::new(stored.map(Arc::new)),
            accepted: watch::Sender::new(0),
            unread: Mutex::default(),
            curators: ProvedCurators::default(),
        }))
    }

    /// Starts with the statement that `read` returns. As long as it fails, no curator is followed.
    #[must_use]
    pub fn reading(
        anchor: TrustAnchor,
        read: ReadStatement,
        persist: PersistStatement,
        clock: Clock,
    ) -> Self {
        let trust = Self::new(anchor, None, persist, clock);
        *trust.lock_unread() = Some(read);
        if let Err(error) = trust.load() {
            tracing::error!(%error, "the stored statement of the cluster");
        }
        trust
    }

    fn lock_unread(&self) -> MutexGuard<'_, Option<ReadStatement>> {
        self.0.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the stored statement, unless it was read before.
    pub(super) fn load(&self) -> Result<(), StatementError> {
        let mut unread = self.lock_unread();
        let Some(read) = unread.as_ref() else { return Ok(()) };
        if let Some(stored) = read().map_err(StatementError::Unreadable)? {
            self.0.current.send_replace(Some(Arc::new(stored)));
        }
        *unread = None;
        Ok(())
    }

    /// Whether statements decide about curators: there is one, or the stored one cannot be read.
    pub(super) fn decides(&self) -> bool {
        self.current().is_some() || self.lock_unread().is_some()
    }

    /// Starts without a statement, and stores none.
    #[must_use]
    pub fn in_memory(anchor: TrustAnchor, clock: Clock) -> Self {
        Self::new(anchor, None, persist_by(|_| Ok(())), clock)
    }

    /// The newest verified statement; `None` as long as there is none.
    #[must_use]
    pub fn current(&self) -> Option<Arc<SignedStatement>> {
        self.0.current.borrow().clone()
    }

    /// Where curators have proved themselves.
    #[must_use]
    pub fn curators(&self) -> &ProvedCurators {
        &self.0.curators
    }

    /// The node that proves by this certificate to be a curator now. Without a statement nothing proves that.
    pub(super) fn identify_proved(&self, certificate: &[u8]) -> Option<NodeId> {
        let Ok(CuratorCheck::Curator { anchors, revocations }) = self.curator_check() else { return None };
        identify_curator(&[certificate], &anchors, &revocations, self.0.clock.now()).ok()
    }

    /// Watches how many statements were accepted.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.accepted.subscribe()
    }

    /// Trusts another authority from now on, and its statement if there is one. Nothing that was trusted before counts.
    /// The caller has stored both.
    pub(super) fn adopt(&self, anchor: TrustAnchor, statement: Option<SignedStatement>) {
        *self.lock_unread() = None;
        // In this order: a statement of the former authority is published only while that one is trusted.
        *self.lock_anchor() = anchor;
        self.0.current.send_replace(statement.map(Arc::new));
        self.0.accepted.send_modify(|count| *count += 1);
    }

    fn lock_anchor(&self) -> MutexGuard<'_, TrustAnchor> {
        self.0.anchor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verifies a statement, and stores and publishes it if it is newer. `epoch` is the highest proved epoch. Returns
    /// whether the statement was newer.
    pub async fn offer(&self, wire: &wire::SignedStatement, epoch: u64) -> Result<bool, StatementError> {
        self.load()?;
        let anchor = self.anchor();
        let former = self.current();
        let former = former.as_deref();
        let current = former.map(|former| &former.statement);
        // Certificates of the other authority count, and its statements do not: it is retired, or does not sign yet.
        let signer = current.and_then(|statement| statement.authorities.first()).unwrap_or(&anchor);
        let mut offered = SignedStatement::verify(wire, slice::from_ref(signer))?;
        // A stored statement is verified by the anchor again.
        if let Some(former) = former {
            offered = offered.continuing(former);
        }
        if !accept_statement(current, epoch, &offered.statement, self.0.clock.now())? {
            return Ok(false);
        }
        if let Err(reason) = (self.0.persist)(offered.clone()).await {
            // After a restart, the stored one permits the same. A refresh is signed each hour, and a node with a full
            // disk would follow nobody from the next one on.
            if offered.statement.ends_connections_of(current) {
                return Err(StatementError::NotPersisted(reason));
            }
            tracing::warn!(
                reason,
                "a newer statement that revokes nothing was not stored, and counts until the next start"
            );
        }
        let order = offered.statement.order();
        let published = self.0.current.send_if_modified(|current| {
            // Another task may have published a higher one meanwhile, or the authority was replaced after a theft.
            let newer = current.as_ref().is_none_or(|current| current.statement.order() < order)
                && self.lock_anchor().key == anchor.key;
            if newer {
                *current = Some(Arc::new(offered));
            }
            newer
        });
        if published {
            tracing::info!(
                epoch = order.0,
                number = order.1,
                "a statement of the cluster's authority counts"
            );
            self.0.accepted.send_modify(|count| *count += 1);
        }
        Ok(published)
    }

    /// The trusted authorities: those of the newest statement, or without one the anchor.
    #[must_use]
    pub fn authorities(&self) -> Vec<TrustAnchor> {
        match self.current() {
            Some(current) => current.statement.authorities.clone(),
            None => vec![self.anchor()],
        }
    }

    /// How the certificate of a curator is checked now. Fails while the newest statement is stale, or cannot be read.
    pub fn curator_check(&self) -> Result<CuratorCheck, StatementError> {
        self.load()?;
        let Some(current) = self.current() else { return Ok(CuratorCheck::AnyNode) };
        let statement = &current.statement;
        if !statement.is_fresh(self.0.clock.now()) {
            return Err(StatementError::Stale { issued_at: statement.issued_at });
        }
        let revocations = Revocations { serials: statement.revoked.clone(), ..Revocations::default() };
        Ok(CuratorCheck::Curator {
            anchors: statement.authorities.clone(),
            revocations: Arc::new(revocations),
        })
    }

    /// [`StatementTrust::curator_check`], evaluated for each handshake.
    pub(super) fn check_provider(&self) -> CuratorCheckProvider {
        let trust = self.clone();
        Arc::new(move || trust.curator_check().map_err(|error| error.to_string()))
    }

    /// The authority that is trusted without a statement.
    #[must_use]
    pub fn anchor(&self) -> TrustAnchor {
        self.lock_anchor().clone()
    }

    /// The clock that decides about ages.
    pub(super) fn clock(&self) -> &Clock {
        &self.0.clock
    }
}

impl fmt::Debug for StatementTrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = self.current().map(|current| current.statement.order());
        f.debug_struct("StatementTrust").field("order", &order).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!(
            (trust.anchor(), trust.authorities()),
            (heir.anchor().clone(), vec![heir.anchor().clone()])
        );
        let link = Succession::sign(&thief, authority_of(1, 6).anchor()).unwrap();
        let authorities = vec![authority_of(1, 6).anchor().clone()];
        let by_another =
            Statement { authorities, ..statement(900, 7_002) }.sign(&authority_of(1, 6)).unwrap();
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
}
