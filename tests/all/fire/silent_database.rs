//! A stop while the network to the database swallows every packet: no statement is answered, and none fails.
//!
//! The shepherd has one deadline for the whole stop, so it ends within its grace period and the documented time after
//! that, although each of the things that it waits for has a limit of its own.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use shepherd::service::stop_deadline::longest_stop;
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::fire::{ALL_KNOWN_READY, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, endpoint};
use crate::harness::postgres::TestDatabase;

/// The grace period of the shepherd that is stopped.
const GRACE: Duration = Duration::from_secs(1);
/// For a busy host, on top of the documented time. What is tested takes half a minute longer without the deadline.
const SLACK: Duration = Duration::from_secs(3);

/// A network between shepherds and the database. It forwards until it swallows, and then no side gets an error.
struct Network {
    url: String,
    swallows: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Network {
    async fn start(database: &TestDatabase) -> Result<Self> {
        let options: PgConnectOptions = database.url().parse()?;
        let socket = options.get_socket().context("the server listens on a socket")?.join(".s.PGSQL.5432");
        let name = options.get_database().context("no database in the address")?;
        let (_, query) = database.url().split_once('?').context("no query in the address")?;
        let is_place = |part: &&str| part.starts_with("host=") || part.starts_with("port=");
        let query: Vec<&str> = query.split('&').filter(|part| !is_place(part)).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("postgres://{}/{name}?{}", listener.local_addr()?, query.join("&"));
        let swallows = watch::Sender::new(false);
        let task = tokio::spawn(accept(listener, socket, swallows.clone()));
        Ok(Self { url, swallows, task })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, socket: PathBuf, swallows: watch::Sender<bool>) {
    // The connections end with this task.
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let (socket, up, down) = (socket.clone(), swallows.subscribe(), swallows.subscribe());
        connections.spawn(async move {
            let server = UnixStream::connect(socket).await?;
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::select! {
                ended = pump(from_client, to_server, up) => ended,
                ended = pump(from_server, to_client, down) => ended,
            }
        });
    }
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    swallows: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let length = from.read(&mut bytes).await?;
        if *swallows.borrow() {
            std::future::pending::<()>().await;
        }
        if length == 0 {
            return Ok(());
        }
        to.write_all(&bytes[..length]).await?;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_ends_in_the_documented_time_when_the_database_swallows_packets() -> TestResult {
    let flags = ["--machine_count", "3", "--boot_seconds", "0.1", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("fire_silent_database", &flags).await?;
    let network = Network::start(&fleet.database).await?;
    let cut = fleet.with_bmdb(network.url.clone()).await?;
    let endpoints = [endpoint()?];
    let brief = format!("--shutdown_grace={}s", GRACE.as_secs());
    let mut shepherd =
        cut.shepherd("cut", &endpoints, &["--provisioner_max_machines=3", "--session_interval=2m", &brief])?;
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    let open = "SELECT count(*) > 0 FROM session WHERE closed_at IS NULL";
    fleet.until("it has sessions", open).await?;

    network.swallows.send_replace(true);
    let began = Instant::now();
    shepherd.signal(Signal::TERM)?;
    let status = loop {
        if let Some(status) = shepherd.ended()? {
            break status;
        }
        assert!(began.elapsed() < PATIENCE, "it does not stop\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let took = began.elapsed();
    let longest = longest_stop(GRACE);
    assert!(took <= longest + SLACK, "the stop took {took:?}, and {longest:?} are documented");
    assert_eq!(status.code(), Some(0), "{}", fleet.explain().await?);

    // What it left behind expires, and the next shepherd continues.
    fleet.database.advance(Duration::from_mins(3)).await?;
    let next = fleet.shepherd("next", &endpoints, &["--provisioner_max_machines=3"])?;
    let alone = format!(
        "SELECT count(*) > 0 AND bool_and(runtime_info->>'pid' = '{}') FROM session WHERE closed_at IS NULL",
        next.pid()
    );
    fleet.until("the next has sessions, and those of the first are over", alone.leak()).await?;
    end(&fleet, next).await?;
    counted("stop of a shepherd with a silent database", format!("{took:.1?} of {longest:.0?} documented"))?;
    Ok(())
}
