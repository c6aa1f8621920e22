//! Accept operators' TLS connections, limited in total and per source.
//!
//! The connections use TLS 1.3, with or without a client certificate. As for agents, the accept loop never waits for a
//! peer: each handshake is a task with a deadline, and the number of connections is bounded. Operators have far fewer
//! connections than agents, so one above the limit is rejected. A connection needs no credential, so one source gets
//! only a part of them and cannot lock out the others.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ring::digest;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::api::listener::auth::source_key;
use crate::tls::tracked_connection::TrackedConnection;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The inverse share of all connections that one source may have: a quarter.
const SOURCE_SHARE: usize = 4;

/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct ApiPeer {
    /// SHA-256 of the client certificate whose key the peer has proven, DER; `None` without one.
    pub certificate: Option<[u8; 32]>,
    /// The network address of the peer.
    pub address: SocketAddr,
}

/// A connection with its permit.
pub type ApiStream = TrackedConnection<ApiPeer, SourcePermit>;

/// Limits connections, or calls without a credential, in total and per source.
pub(super) struct SourceLimiter {
    permits: Arc<Semaphore>,
    by_source: Mutex<HashMap<[u8; 32], usize>>,
    max_per_source: usize,
}

/// A permit that is released when it is dropped.
pub struct SourcePermit {
    limiter: Arc<SourceLimiter>,
    source: [u8; 32],
    _permit: OwnedSemaphorePermit,
}

impl SourceLimiter {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
            by_source: Mutex::default(),
            max_per_source: most.div_ceil(SOURCE_SHARE),
        })
    }

    /// Acquires a permit for a source; `None` if it or the total is at the limit.
    pub(super) fn try_acquire(self: &Arc<Self>, source: [u8; 32]) -> Option<SourcePermit> {
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        let held = by_source.entry(source).or_default();
        if *held >= self.max_per_source {
            return None;
        }
        *held += 1;
        Some(SourcePermit { limiter: self.clone(), source, _permit: permit })
    }
}

impl Drop for SourcePermit {
    fn drop(&mut self) {
        let mut by_source = self.limiter.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = by_source.get_mut(&self.source) {
            *held -= 1;
            if *held == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

/// Accepts up to `most` connections at once until `stop`, and passes on those whose handshake succeeds.
pub async fn accept_operators(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    most: usize,
    accepted: mpsc::Sender<ApiStream>,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    let places = SourceLimiter::new(most);
    // Dropped at the end, which aborts every handshake in progress.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    let Some(place) = places.try_acquire(source_key(address.ip())) else {
                        tracing::warn!(%address, max_connections = most, "too many connections to the API; one was refused");
                        continue;
                    };
                    handshakes.spawn(handle_connection(acceptor.clone(), stream, address, place, accepted.clone()));
                }
                // Usually "too many open files". The pause lets some connections end.
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection to the API");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

async fn handle_connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    place: SourcePermit,
    accepted: mpsc::Sender<ApiStream>,
) {
    let shaken = tokio::time::timeout(HANDSHAKE_TIMEOUT, async {
        stream.set_nodelay(true)?;
        acceptor.accept(stream).await
    });
    match shaken.await {
        Ok(Ok(stream)) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer = ApiPeer { certificate: certificate.map(|der| certificate_fingerprint(der)), address };
            // The receiver is dropped when the server is stopping.
            drop(accepted.send(TrackedConnection::new(stream, peer, CancellationToken::new(), place)).await);
        }
        Ok(Err(error)) => tracing::debug!(%address, %error, "a handshake with an operator failed"),
        Err(_) => tracing::debug!(%address, "a handshake with an operator took too long"),
    }
}

/// SHA-256 of a certificate, DER.
#[must_use]
pub fn certificate_fingerprint(der: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_cannot_take_all_permits() {
        let places = SourceLimiter::new(8);
        let held = [places.try_acquire([1; 32]), places.try_acquire([1; 32])];
        assert!(held.iter().all(Option::is_some));
        assert!(places.try_acquire([1; 32]).is_none(), "a quarter is enough for one");
        let others: Vec<Option<SourcePermit>> =
            (2..10).map(|source| places.try_acquire([source; 32])).collect();
        assert_eq!(others.iter().flatten().count(), 6, "and there is an end to all of them");
        drop((held, others));
        assert!(places.try_acquire([1; 32]).is_some());
        assert!(places.by_source.lock().unwrap().is_empty(), "nothing is remembered of who has gone");
    }
}
