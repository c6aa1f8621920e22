//! A flood of connections from many addresses of this host, which sends nothing or half of a request.
//!
//! Linux has all of `127.0.0.0/8`, so a connection on loopback can come from any of its addresses. A connection that
//! the server closes is opened again after a second, as an attacker would do.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;

/// How long a closed connection stays closed.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest time until most connections of a flood are open.
const PATIENCE: Duration = Duration::from_mins(5);
/// Most connections that are opened at once: a host has a short queue for each listener.
const AT_ONCE: usize = 64;

/// What a flood sends to a listener.
#[derive(Clone, Copy, Debug)]
pub struct FloodPlan {
    /// The address of the listener.
    pub target: SocketAddr,
    /// From how many addresses the connections come.
    pub sources: usize,
    /// Number of the first address. Zero is the address of everyone else on this host.
    pub first_source: usize,
    /// Connections that send nothing.
    pub silent: usize,
    /// Connections that send `half` and nothing more.
    pub half_spoken: usize,
    /// The beginning of a handshake or of a request.
    pub half: &'static [u8],
}

/// The beginning of a TLS record.
pub const HALF_A_RECORD: &[u8] = &[0x16, 0x03];
/// An HTTP request without its end.
pub const HALF_A_REQUEST: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: x\r\n";

/// A flood, until it is dropped.
pub struct Flood {
    opened: Arc<AtomicUsize>,
    _connections: JoinSet<()>,
}

impl Flood {
    /// Starts a flood, and waits until each of its connections was open once.
    pub async fn start(plans: &[FloodPlan]) -> Result<Self> {
        allow_files();
        let opened = Arc::new(AtomicUsize::new(0));
        let slots = Arc::new(tokio::sync::Semaphore::new(AT_ONCE));
        let mut connections = JoinSet::new();
        let mut wanted = 0;
        for &plan in plans {
            for number in 0..plan.silent + plan.half_spoken {
                let sent = if number < plan.silent { &[][..] } else { plan.half };
                let source = source_address(plan.first_source + number % plan.sources.max(1));
                let (opened, slots) = (opened.clone(), slots.clone());
                connections.spawn(async move {
                    let mut first = true;
                    loop {
                        let stream = {
                            let _slot = slots.acquire().await;
                            open(source, plan.target).await
                        };
                        if let Ok(mut stream) = stream {
                            if std::mem::take(&mut first) {
                                opened.fetch_add(1, Ordering::Relaxed);
                            }
                            if stream.write_all(sent).await.is_ok() {
                                let mut bytes = [0; 256];
                                while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
                            }
                        }
                        tokio::time::sleep(PAUSE).await;
                    }
                });
                wanted += 1;
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while opened.load(Ordering::Relaxed) < wanted {
            let open = opened.load(Ordering::Relaxed);
            ensure!(Instant::now() < deadline, "only {open} of {wanted} connections of a flood were opened");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { opened, _connections: connections })
    }

    /// How many connections were open.
    #[must_use]
    pub fn opened(&self) -> usize {
        self.opened.load(Ordering::Relaxed)
    }
}

/// Source zero is the address of everyone else on this host.
fn source_address(number: usize) -> IpAddr {
    match u32::try_from(number) {
        Ok(0) | Err(_) => Ipv4Addr::LOCALHOST.into(),
        Ok(number) => Ipv4Addr::from_bits(Ipv4Addr::new(127, 1, 0, 0).to_bits() + number).into(),
    }
}

async fn open(source: IpAddr, target: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(source, 0))?;
    socket.connect(target).await
}

/// Raises the limit of open files of this process to its hard limit.
fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it fails, so does the flood, with the number of connections that were opened.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
