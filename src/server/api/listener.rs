//! Taking operators' connections: TLS 1.3, with a client certificate or without.
//!
//! As for agents, the loop that takes connections never waits for a peer: each handshake is a task with a
//! deadline, and there is an end to how many connections there may be. Far fewer come here, so whoever is
//! one too many is refused; and because a connection needs no credential, one source has only a part of
//! them, and can keep nobody else out.

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

use crate::server::api::door::key_of_address;
use crate::server::carried::Carried;

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// Which part of all connections one source may have: a quarter.
const PART_OF_ONE: usize = 4;

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub struct ApiPeer {
    /// SHA-256 of the certificate it showed and proved, DER.
    pub certificate: Option<[u8; 32]>,
    /// Where it connects from.
    pub address: SocketAddr,
}

/// A connection, with its place.
pub type ApiStream = Carried<ApiPeer, Place>;

/// How many connections, or calls that need no credential, there are, of all and of each source.
pub(super) struct Places {
    permits: Arc<Semaphore>,
    by_source: Mutex<HashMap<[u8; 32], usize>>,
    of_one: usize,
}

/// A place among those there may be, until it is dropped.
pub struct Place {
    places: Arc<Places>,
    source: [u8; 32],
    _permit: OwnedSemaphorePermit,
}

impl Places {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
            by_source: Mutex::default(),
            of_one: most.div_ceil(PART_OF_ONE),
        })
    }

    /// A place for somebody from there, if there is one.
    pub(super) fn take(self: &Arc<Self>, source: [u8; 32]) -> Option<Place> {
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        let held = by_source.entry(source).or_default();
        if *held >= self.of_one {
            return None;
        }
        *held += 1;
        Some(Place { places: self.clone(), source, _permit: permit })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut by_source = self.places.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = by_source.get_mut(&self.source) {
            *held -= 1;
            if *held == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

/// Takes connections until `stop`, `most` at once, and hands on those whose handshake succeeds.
pub async fn accept(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    most: usize,
    accepted: mpsc::Sender<ApiStream>,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    let places = Places::new(most);
    // Dropped at the end, and with it every handshake still under way.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    let Some(place) = places.take(key_of_address(address.ip())) else {
                        tracing::warn!(%address, most, "too many connections to the API; one was refused");
                        continue;
                    };
                    handshakes.spawn(let_in(acceptor.clone(), stream, address, place, accepted.clone()));
                }
                // Mostly "too many open files": the pause lets some of them end.
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection to the API");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

async fn let_in(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    place: Place,
    accepted: mpsc::Sender<ApiStream>,
) {
    let shaken = tokio::time::timeout(HANDSHAKE_LIMIT, async {
        stream.set_nodelay(true)?;
        acceptor.accept(stream).await
    });
    match shaken.await {
        Ok(Ok(stream)) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer = ApiPeer { certificate: certificate.map(|der| fingerprint(der)), address };
            // The receiver is gone when the server is being stopped.
            drop(accepted.send(Carried::new(stream, peer, CancellationToken::new(), place)).await);
        }
        Ok(Err(error)) => tracing::debug!(%address, %error, "a handshake with an operator failed"),
        Err(_) => tracing::debug!(%address, "a handshake with an operator took too long"),
    }
}

/// SHA-256 of a certificate, DER.
#[must_use]
pub fn fingerprint(der: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_keeps_nobody_else_out() {
        let places = Places::new(8);
        let held = [places.take([1; 32]), places.take([1; 32])];
        assert!(held.iter().all(Option::is_some));
        assert!(places.take([1; 32]).is_none(), "a quarter is enough for one");
        let others: Vec<Option<Place>> = (2..10).map(|source| places.take([source; 32])).collect();
        assert_eq!(others.iter().flatten().count(), 6, "and there is an end to all of them");
        drop((held, others));
        assert!(places.take([1; 32]).is_some());
        assert!(places.by_source.lock().unwrap().is_empty(), "nothing is remembered of who has gone");
    }
}
