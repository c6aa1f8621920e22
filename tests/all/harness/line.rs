//! A network line between two programs with a fault: slow, narrow, or interrupted.
//!
//! It is a proxy in front of a real server on loopback. It delays data as a long cable does: nothing is dropped,
//! reordered or repeated, and bytes that were sent together arrive together. Opening the connection takes no time here,
//! because the kernel answers for the listening server. `takeover/deadlines.rs` tests hosts that do not answer in time.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::harness::aloud::TestResult;

/// Bytes read at one time; few compared with what a narrow line transports in a second.
const PIECE: usize = 16 << 10;
/// Pieces on the line at one time; more than an SSH window.
const PIECES: usize = 4096;

/// The quality of a line.
#[derive(Clone, Copy)]
pub(crate) struct Quality {
    /// The delay in each direction.
    pub(crate) lag: Duration,
    /// Bytes that it transports from client to server in a second.
    pub(crate) upward: u64,
    /// Bytes from client to server after which a connection is reset.
    pub(crate) cut_after: u64,
}

impl Quality {
    /// No delay and no limits.
    pub(crate) const PERFECT: Self = Self { lag: Duration::ZERO, upward: u64::MAX, cut_after: u64::MAX };
}

/// The line; it ends when dropped, and its connections with it.
pub(crate) struct Line {
    port: u16,
    to: Arc<AtomicU16>,
    forwarded_bytes: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Line {
    /// A line to a port of `127.0.0.1`.
    pub(crate) async fn to(port: u16, quality: Quality) -> Result<Self> {
        Self::watched(port, quality, || {}).await
    }

    /// The same. Nothing of a new connection is transported before `on_connection` has returned.
    pub(crate) async fn watched(
        port: u16,
        quality: Quality,
        on_connection: impl Fn() + Send + 'static,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let here = listener.local_addr()?.port();
        let (to, carried) = (Arc::new(AtomicU16::new(port)), Arc::<AtomicU64>::default());
        let (leading, counter) = (Arc::clone(&to), Arc::clone(&carried));
        let task = tokio::spawn(async move {
            // The connections end with this task.
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                while connections.try_join_next().is_some() {}
                on_connection();
                let to = leading.load(Ordering::Relaxed);
                connections.spawn(connect(client, to, quality, Arc::clone(&counter)));
            }
        });
        Ok(Self { port: here, to, forwarded_bytes: carried, task })
    }

    /// The port that clients connect to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Connects to another port from the next connection on.
    pub(crate) fn lead_to(&self, port: u16) {
        self.to.store(port, Ordering::Relaxed);
    }

    /// Bytes transported from clients to the server.
    pub(crate) fn forwarded_bytes(&self) -> u64 {
        self.forwarded_bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Transports data in both directions until both have ended. If one breaks, the other one ends.
async fn connect(client: TcpStream, to: u16, quality: Quality, carried: Arc<AtomicU64>) -> io::Result<()> {
    let server = TcpStream::connect(("127.0.0.1", to)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let downward = Quality { upward: u64::MAX, cut_after: u64::MAX, ..quality };
    let uncounted = AtomicU64::new(0);
    // A socket that is dropped with unread bytes is reset.
    tokio::try_join!(
        carry(from_client, to_server, quality, &carried),
        carry(from_server, to_client, downward, &uncounted),
    )?;
    Ok(())
}

async fn carry(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    quality: Quality,
    carried: &AtomicU64,
) -> io::Result<()> {
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(PIECES);
    let taking = async move {
        let mut piece = vec![0; PIECE];
        loop {
            let taken = from.read(&mut piece).await?;
            let due = Instant::now() + quality.lag;
            if taken == 0 || sender.send((due, piece[..taken].to_vec())).await.is_err() {
                return Ok(());
            }
        }
    };
    let giving = async move {
        let (mut free, mut passed) = (Instant::now(), 0);
        while let Some((due, piece)) = receiver.recv().await {
            sleep_until(due.max(free)).await;
            let length = piece.len() as u64;
            passed += length;
            if passed > quality.cut_after {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            to.write_all(&piece).await?;
            carried.fetch_add(length, Ordering::Relaxed);
            free = Instant::now() + Duration::from_micros(length * 1_000_000 / quality.upward);
        }
        to.shutdown().await
    };
    tokio::try_join!(taking, giving)?;
    Ok(())
}

#[tokio::test]
async fn a_line_is_as_long_and_as_thin_as_configured_and_changes_nothing() -> TestResult {
    let server = TcpListener::bind("127.0.0.1:0").await?;
    let lag = Duration::from_millis(50);
    let quality = Quality { lag, upward: 1 << 20, cut_after: 300_000 };
    let line = Line::to(server.local_addr()?.port(), quality).await?;
    let sent: Vec<u8> = (0..200_000_u32).map(|number| number.to_le_bytes()[0]).collect();
    let began = Instant::now();
    let mut client = TcpStream::connect(("127.0.0.1", line.port())).await?;
    let (mut accepted, _) = server.accept().await?;
    client.write_all(&sent).await?;
    let mut arrived = vec![0; sent.len()];
    accepted.read_exact(&mut arrived).await?;
    accepted.write_all(b"yes").await?;
    let mut answer = [0; 3];
    client.read_exact(&mut answer).await?;
    // The test waited for all pieces but the last one.
    assert!(began.elapsed() >= lag * 2 + Duration::from_millis(150), "{:?}", began.elapsed());
    assert!(arrived == sent && &answer == b"yes");
    assert_eq!(line.forwarded_bytes(), 200_000);

    client.write_all(&sent).await?;
    let mut rest = Vec::new();
    let read = accepted.read_to_end(&mut rest).await;
    assert!(rest.len() <= 100_000 && read.is_ok_and(|read| read == rest.len()), "it was cut");
    let broken = client.read(&mut answer).await;
    assert!(broken.is_err() || broken.is_ok_and(|read| read == 0));
    Ok(())
}
