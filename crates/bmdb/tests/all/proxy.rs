//! A network between the engine and PostgreSQL that fails on demand.
//!
//! It forwards bytes from a TCP port to the server's socket, and can swallow everything for a while
//! (as a partition does), refuse and cut connections (as a restart does), let one statement
//! through and drop the connection instead of its answer, drop a connection's options (as a pooler does), or lead new
//! connections to another server and leave those that exist.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use testkit::postgres::TestDatabase;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Network {
    Good,
    Swallows,
    Refuses,
}

pub(crate) struct Proxy {
    url: String,
    network: watch::Sender<Network>,
    state: Arc<State>,
    stop: CancellationToken,
}

#[derive(Default)]
struct State {
    /// Where new connections lead.
    socket: Mutex<PathBuf>,
    marker: Mutex<Option<Vec<u8>>>,
    /// Pings to answer still, and nothing from then on.
    pings: Mutex<Option<u32>>,
    /// What clients send, and what reaches the server in its place.
    rewritten: Mutex<Option<(&'static str, &'static str)>>,
    /// The same in the first message of a connection alone, which has its options.
    rewritten_at_start: Mutex<Option<(&'static str, &'static str)>>,
    connections: Mutex<Vec<CancellationToken>>,
}

fn socket_of(options: &PgConnectOptions) -> anyhow::Result<PathBuf> {
    Ok(options.get_socket().context("the server listens on a socket")?.join(".s.PGSQL.5432"))
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Proxy {
    pub(crate) async fn start(database: &TestDatabase) -> anyhow::Result<Self> {
        Self::to(database.url()).await
    }

    /// One in front of the server of this URL.
    pub(crate) async fn to(server: &str) -> anyhow::Result<Self> {
        Self::listen("127.0.0.1:0", server).await
    }

    /// One at this address, in front of the server of this URL.
    pub(crate) async fn listen(address: &str, server: &str) -> anyhow::Result<Self> {
        let options: PgConnectOptions = server.parse()?;
        let listener = TcpListener::bind(address).await?;
        let name = options.get_database().context("no database in the address")?;
        let (_, query) = server.split_once('?').context("no query in the address")?;
        let kept: Vec<&str> = query
            .split('&')
            .filter(|part| !part.starts_with("host=") && !part.starts_with("port="))
            .collect();
        let url = format!("postgres://{}/{name}?{}", listener.local_addr()?, kept.join("&"));
        let proxy = Self {
            url,
            network: watch::Sender::new(Network::Good),
            state: Arc::new(State { socket: Mutex::new(socket_of(&options)?), ..State::default() }),
            stop: CancellationToken::new(),
        };
        tokio::spawn(accept(listener, proxy.network.clone(), proxy.state.clone(), proxy.stop.clone()));
        Ok(proxy)
    }

    /// From now on new connections lead to the server of this URL. Those that exist stay where they are.
    pub(crate) fn redirect(&self, server: &str) -> anyhow::Result<()> {
        *locked(&self.state.socket) = socket_of(&server.parse()?)?;
        Ok(())
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The next message that contains `marker` reaches the server, but its answer is dropped.
    pub(crate) fn lose_the_answer_to(&self, marker: &str) {
        *locked(&self.state.marker) = Some(marker.as_bytes().to_owned());
    }

    /// From now on `by` reaches the server wherever a client sends `what`, which is as long.
    pub(crate) fn rewrite(&self, what: &'static str, by: &'static str) {
        assert_eq!(what.len(), by.len());
        *locked(&self.state.rewritten) = Some((what, by));
    }

    /// The same in the options of new connections alone: the server takes what is set later.
    pub(crate) fn rewrite_options(&self, what: &'static str, by: &'static str) {
        assert_eq!(what.len(), by.len());
        *locked(&self.state.rewritten_at_start) = Some((what, by));
    }

    /// Whether the answer to the marked message was dropped.
    pub(crate) fn answer_was_lost(&self) -> bool {
        locked(&self.state.marker).is_none()
    }

    /// Drops the `number`-th ping from now on, and everything after it.
    pub(crate) fn swallow_from_ping(&self, number: u32) {
        *locked(&self.state.pings) = Some(number);
    }

    /// Whether nothing gets through.
    pub(crate) fn is_swallowing(&self) -> bool {
        *self.network.borrow() == Network::Swallows
    }

    /// From now on nothing gets through, and neither side gets an error.
    pub(crate) fn swallow(&self) {
        self.network.send_replace(Network::Swallows);
    }

    /// From now on connections are cut and refused.
    pub(crate) fn refuse(&self) {
        self.network.send_replace(Network::Refuses);
        self.cut();
    }

    /// Cuts every connection there is.
    pub(crate) fn cut(&self) {
        for connection in locked(&self.state.connections).drain(..) {
            connection.cancel();
        }
    }

    /// All is well for new connections; what was swallowed stays lost.
    pub(crate) fn heal(&self) {
        // A partition that ends leaves connections whose packets are gone: they stay silent.
        self.network.send_replace(Network::Good);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.cancel();
        self.cut();
    }
}

async fn accept(
    listener: TcpListener,
    network: watch::Sender<Network>,
    state: Arc<State>,
    stop: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((client, _)) = accepted else { return };
        if *network.borrow() == Network::Refuses {
            continue;
        }
        let cut = CancellationToken::new();
        locked(&state.connections).push(cut.clone());
        let (socket, network, state) = (locked(&state.socket).clone(), network.clone(), state.clone());
        tokio::spawn(async move {
            let forward = serve(client, socket, network, state);
            tokio::select! {
                () = cut.cancelled() => {}
                _ = forward => {}
            }
        });
    }
}

async fn serve(
    client: TcpStream,
    socket: PathBuf,
    network: watch::Sender<Network>,
    state: Arc<State>,
) -> std::io::Result<()> {
    let server = UnixStream::connect(socket).await?;
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    let losing = CancellationToken::new();
    let is_at_start = AtomicBool::new(true);
    let up = pump(client_reads, server_writes, network.subscribe(), |bytes| {
        let at_start = *locked(&state.rewritten_at_start);
        let at_start = at_start.filter(|_| is_at_start.swap(false, Ordering::Relaxed));
        let everywhere = *locked(&state.rewritten);
        for (what, by) in at_start.into_iter().chain(everywhere) {
            let end = (bytes.len() + 1).saturating_sub(what.len());
            for start in 0..end {
                if bytes[start..].starts_with(what.as_bytes()) {
                    bytes[start..start + by.len()].copy_from_slice(by.as_bytes());
                }
            }
        }
        if bytes == PING && last_ping(&state) {
            network.send_replace(Network::Swallows);
        }
        let mut marker = locked(&state.marker);
        if marker.as_ref().is_some_and(|marker| bytes.windows(marker.len()).any(|part| part == marker)) {
            *marker = None;
            losing.cancel();
        }
        true
    });
    let down = pump(server_reads, client_writes, network.subscribe(), |_| !losing.is_cancelled());
    tokio::select! {
        ended = up => ended,
        ended = down => ended,
    }
}

/// `Sync` and nothing else: what a pool sends to see whether anybody answers.
const PING: &[u8] = b"S\x00\x00\x00\x04";

/// Counts a ping; returns whether it is the one to drop.
fn last_ping(state: &State) -> bool {
    let mut pings = locked(&state.pings);
    *pings = pings.map(|left| left.saturating_sub(1));
    let last = *pings == Some(0);
    if last {
        *pings = None;
    }
    last
}

/// Forwards until one side ends or `pass` says no. What was swallowed once is never sent later.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    network: watch::Receiver<Network>,
    pass: impl Fn(&mut [u8]) -> bool,
) -> std::io::Result<()> {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut bytes).await?;
        if length == 0 || !pass(&mut bytes[..length]) {
            return Ok(());
        }
        if *network.borrow() == Network::Swallows {
            // This connection has a hole in it from now on.
            std::future::pending::<()>().await;
        }
        to.write_all(&bytes[..length]).await?;
    }
}
