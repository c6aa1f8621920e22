//! The curator's TLS listener: its gate, handshakes, cutting connections on a role change.
//!
//! Anyone in the cluster's network reaches a curator. So its connections pass a [gate](transport::gate), which lasts
//! longer than a role. A connection is proven once a certificate of the cluster was accepted on it.
//!
//! When a curator changes its role, every connection to it ends: a call that came before must not be served in the new
//! role, and every client must find the leader again. So calls under way get the response that the leadership has
//! ended, and a moment later the connections are cut, whatever is still going on in them.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::Server;
use tonic::transport::server::Connected;
use transport::accept::{ACCEPT_ERROR_PAUSE, accept_tls};
use transport::gate::limits::{GateLimits, ListenerKind};
use transport::gate::stream::GatedStream;
use transport::gate::{Gate, Place};

use crate::service::auth_router::AuthRouter;
use crate::service::gate_monitor::GateMonitor;
use crate::service::leader_context::PeerCertificates;

/// How often the log says that connections are turned away.
const PRESSURE_LOG_INTERVAL: Duration = Duration::from_mins(1);
const SHUTDOWN_GRACE: Duration = Duration::from_millis(500);
/// A dead connection is noticed after interval plus timeout, no later than a node counts as silent.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_CALLS_PER_CONNECTION: u32 = 256;
const MAX_HEADER_BYTES: u32 = 16 << 10;

/// The peer of a connection.
#[derive(Clone, Debug)]
pub(super) struct CuratorPeer {
    /// The certificates that it showed, with proof of their keys.
    pub(super) certificates: PeerCertificates,
    /// Its place in the gate.
    pub(super) place: Place,
    /// The source of the connection.
    pub(super) remote: SocketAddr,
}

/// The gate of a curator in a process that may open `files`.
pub(super) fn open_gate(files: u64, monitor: GateMonitor) -> Gate {
    let limits = GateLimits::for_listener(ListenerKind::Curator, files);
    monitor.open(limits.total);
    let turned_away = Mutex::new((0_u64, None::<Instant>));
    Gate::new(limits, move |event| {
        if !monitor.record(event, Instant::now()) {
            return;
        }
        let mut turned_away = turned_away.lock().unwrap_or_else(PoisonError::into_inner);
        let (count, logged) = &mut *turned_away;
        *count += 1;
        if logged.is_none_or(|at| at.elapsed() >= PRESSURE_LOG_INTERVAL) {
            tracing::warn!(
                count = *count,
                total = limits.total,
                "too many connections to the curator: some without a certificate of the cluster were closed, or some \
                 with one were refused"
            );
            (*count, *logged) = (0, Some(Instant::now()));
        }
    })
}

/// Serves `router` until `over` is cancelled. All connections have ended when it returns.
pub(super) async fn serve_connections(
    listener: Arc<TcpListener>,
    gate: Gate,
    config: Arc<ServerConfig>,
    router: AuthRouter,
    over: CancellationToken,
) {
    let cut = CancellationToken::new();
    // If this future is dropped, all connections end too.
    let _cut_at_the_end = cut.clone().drop_guard();
    let acceptor = TlsAcceptor::from(config);
    let handshake = |stream: GatedStream| accept_connection(acceptor.clone(), stream, cut.clone());
    let connections = futures::stream::unfold((listener, gate), |(listener, gate)| async {
        let stream = gate.accept(&listener).await;
        Some((stream, (listener, gate)))
    });
    let connections = connections
        .map(handshake)
        // The gate bounds their number. A bound here would let silent connections keep others out.
        .buffer_unordered(usize::MAX)
        .filter_map(std::future::ready)
        .map(Ok::<_, Infallible>);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .max_concurrent_streams(MAX_CALLS_PER_CONNECTION)
        .http2_max_header_list_size(MAX_HEADER_BYTES);
    let serving = server.serve_with_incoming_shutdown(router, connections, over.cancelled());
    let cutting = async {
        over.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
        cut.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = serving => if let Err(error) = ended {
            tracing::error!(%error, "the curator's server ended");
        },
        () = cutting => {}
    }
}

/// Closes every new connection: this curator knows no leader, and clients need not wait for it.
pub(super) async fn reject_connections(listener: &TcpListener) {
    loop {
        match listener.accept().await {
            Ok(connection) => drop(connection),
            Err(error) => pause_after_accept_error(&error).await,
        }
    }
}

async fn pause_after_accept_error(error: &io::Error) {
    tracing::warn!(%error, "cannot take a connection to the curator");
    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
}

async fn accept_connection(
    acceptor: TlsAcceptor,
    stream: GatedStream,
    cut: CancellationToken,
) -> Option<SeverableConnection> {
    let (place, remote) = (stream.place().clone(), stream.peer_address());
    match accept_tls(&acceptor, stream).await {
        Ok(stream) => {
            let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let shown = shown.iter().map(|certificate| certificate.to_vec()).collect();
            Some(SeverableConnection {
                stream,
                peer: CuratorPeer { certificates: shown, place, remote },
                severed: Box::pin(cut.cancelled_owned()),
            })
        }
        Err(error) => {
            tracing::debug!(%error, "a handshake with the curator failed");
            None
        }
    }
}

/// A TLS connection that can be cut.
struct SeverableConnection {
    stream: TlsStream<GatedStream>,
    peer: CuratorPeer,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl SeverableConnection {
    fn is_severed(&mut self, context: &mut Context<'_>) -> bool {
        use std::future::Future as _;
        self.severed.as_mut().poll(context).is_ready()
    }
}

impl Connected for SeverableConnection {
    type ConnectInfo = CuratorPeer;

    fn connect_info(&self) -> CuratorPeer {
        self.peer.clone()
    }
}

impl AsyncRead for SeverableConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_severed(context) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for SeverableConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_severed(context) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_severed(context) {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
