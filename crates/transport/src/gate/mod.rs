//! The gate of a listener: how many connections it has, and which one gives way.
//!
//! # The threat
//!
//! Anyone who reaches a port can open connections, from many addresses, and each is an open file of ours. A limit that
//! rejects newcomers helps the attacker: a sender that fills the places first keeps everyone out. No limit is worse: the
//! process can then open no file, so it loses its database too.
//!
//! # The rules
//!
//! * A connection is *proven* once a credential of it was accepted. Proven connections never give way, and the places
//!   that others may not take are reserved for them.
//! * A few places are never for proven connections. So a newcomer with a credential is refused in words when there is no
//!   place for it, and the connection is closed after the answer.
//! * A newcomer always enters. When there are too many unproven connections, an older one gives way: the oldest of the
//!   source that has most. A sender with a few connections is only reached when every source of the flood has as few.
//! * Unproven connections are of two classes, with half of the places each: those that have sent nothing, and those
//!   that have spoken. On a slow host, a TLS handshake takes longer than a flood needs to fill a class. Its connection
//!   has spoken, so no silent flood reaches it. A flood that speaks reaches it only with more sources than places.
//! * A connection gives way last while its request is answered, unless such connections are more than half of their
//!   class.
//! * The handshake and the first request have a deadline.
//!
//! A [`Source`] is an IPv4 address, or an IPv6 network of 64 bits.
//!
//! # How it works
//!
//! [`table`][] decides, and knows no sockets and no clock. [`limits`][] derives all numbers from the files that
//! the process may open. [`open_files`][] raises that limit. [`Gate::accept`] accepts connections and enforces
//! deadlines. [`GatedStream`] reports what a connection sends, and fails once it must end.
//!
//! # Notes for the next implementor
//!
//! A new listener gets a kind and a share in [`limits`][]. It accepts with [`Gate::accept`], and calls the methods of
//! [`Place`] when a handshake has finished, when a request begins, and when a credential is accepted. It answers the
//! request with an error if there is no place then. It needs no limit on connections of its own.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::accept::ACCEPT_ERROR_PAUSE;
use crate::gate::limits::GateLimits;
use crate::gate::source::Source;
use crate::gate::stream::GatedStream;
use crate::gate::table::{Closed, GateCounts, GateTable};

pub mod limits;
pub mod open_files;
mod queue;
pub mod source;
pub mod stream;
pub mod table;

/// What has happened at a gate.
#[derive(Clone, Copy, Debug)]
pub enum GateEvent {
    /// The numbers of connections have changed.
    Counts(GateCounts),
    /// The gate has closed a connection, or one that was refused has ended.
    Closed(Closed),
    /// The operating system gave no connection; usually the process has too many open files.
    AcceptFailed,
}

/// The gate of one listener; cheap to clone.
#[derive(Clone)]
pub struct Gate(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    observe: Box<dyn Fn(GateEvent) + Send + Sync>,
}

struct State {
    table: GateTable,
    closers: HashMap<u64, CancellationToken>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

/// The place of a connection in its gate; cheap to clone. Requests of the connection report by it.
#[derive(Clone, Debug)]
pub struct Place {
    gate: Gate,
    id: u64,
    closed: CancellationToken,
}

/// A listener has no place for another connection with a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "all places of this listener for clients with a credential are taken; try another server, or again later"
)]
pub struct NoPlace;

/// A request that is being answered, until it is dropped.
#[derive(Debug)]
pub struct OpenRequest(Place);

impl Gate {
    /// A gate with these limits. `observe` is called for each event, in order, and must not block or call the gate.
    #[must_use]
    pub fn new(limits: GateLimits, observe: impl Fn(GateEvent) + Send + Sync + 'static) -> Self {
        let state = State { table: GateTable::new(limits), closers: HashMap::new() };
        Self(Arc::new(Shared { state: Mutex::new(state), observe: Box::new(observe) }))
    }

    /// Accepts the next connection, and closes others at their deadlines meanwhile. Can be cancelled at any time.
    pub async fn accept(&self, listener: &TcpListener) -> GatedStream {
        loop {
            let wait = self.change(|table| (table.until_deadline(Instant::now()), Vec::new()));
            let deadline = async {
                match wait {
                    Some(wait) => tokio::time::sleep(wait).await,
                    None => std::future::pending().await,
                }
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = deadline => {
                    self.change(|table| ((), table.expire(Instant::now())));
                    continue;
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    // A failure costs only time: small messages wait for each other.
                    let _ = stream.set_nodelay(true);
                    return GatedStream::new(stream, peer, self.admit(Source::from_address(peer.ip())));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection");
                    (self.0.observe)(GateEvent::AcceptFailed);
                    self.change(|table| ((), table.relieve().into_iter().collect()));
                    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                }
            }
        }
    }

    /// The numbers of connections.
    #[must_use]
    pub fn counts(&self) -> GateCounts {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).table.counts()
    }

    fn admit(&self, source: Source) -> Place {
        let closed = CancellationToken::new();
        let id = {
            let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (id, displaced) = state.table.admit(source, Instant::now());
            state.closers.insert(id, closed.clone());
            self.close(&mut state, &displaced);
            id
        };
        Place { gate: self.clone(), id, closed }
    }

    /// Changes the table, and closes the connections that must end.
    fn change<T>(&self, change: impl FnOnce(&mut GateTable) -> (T, Vec<Closed>)) -> T {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (result, closed) = change(&mut state.table);
        self.close(&mut state, &closed);
        result
    }

    /// Observers are called with the lock held, so that they see events in order.
    fn close(&self, state: &mut State, closed: &[Closed]) {
        for closed in closed {
            if let Some(closer) = state.closers.remove(&closed.id) {
                closer.cancel();
            }
            (self.0.observe)(GateEvent::Closed(*closed));
        }
        (self.0.observe)(GateEvent::Counts(state.table.counts()));
    }
}

impl Place {
    /// Records that the TLS handshake has succeeded.
    pub fn finish_handshake(&self) {
        self.gate.change(|table| (table.finish_handshake(self.id, Instant::now()), Vec::new()));
    }

    /// Records that a request is being answered until the result is dropped.
    #[must_use]
    pub fn begin_request(&self) -> OpenRequest {
        self.gate.change(|table| (table.begin_request(self.id), Vec::new()));
        OpenRequest(self.clone())
    }

    /// Records that the credential of the connection was accepted. If connections with one occupy all their places, the
    /// caller answers with this error, and the connection ends soon after.
    pub fn prove(&self) -> Result<(), NoPlace> {
        let has_place = self.gate.change(|table| (table.prove(self.id, Instant::now()), Vec::new()));
        if has_place { Ok(()) } else { Err(NoPlace) }
    }

    /// Records that the credential could not be checked, through no fault of the peer.
    pub fn defer(&self) {
        self.gate.change(|table| (table.defer(self.id, Instant::now()), Vec::new()));
    }

    /// Whether the gate has closed the connection.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    fn record_bytes(&self) {
        self.gate.change(|table| ((), table.record_bytes(self.id)));
    }

    fn remove(&self) {
        let mut state = self.gate.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let refused = state.table.remove(self.id);
        state.closers.remove(&self.id);
        self.gate.close(&mut state, refused.as_slice());
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let place = &self.0;
        place.gate.change(|table| (table.end_request(place.id), Vec::new()));
    }
}
