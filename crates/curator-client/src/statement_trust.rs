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
mod tests;
