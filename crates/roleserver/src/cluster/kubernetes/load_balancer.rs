//! A TCP load balancer on the loopback address for a worker's API servers (round robin).
//!
//! It does not look into the traffic, which is TLS from end to end. Each connection goes to the next server in turn. If
//! a server does not accept within two seconds, the connection goes to the one after it. When the set of servers
//! changes, connections to removed servers are closed, so that the clients reconnect to another one. A connection to a
//! host that has disappeared is closed after half a minute without traffic.
//!
//! Every process of the machine reaches the address, and each connection takes two files of the role server, which
//! needs files for its heartbeats. So the number of connections is bounded. It cannot be seen which ones are those of
//! components, so a newcomer beyond the bound is closed.
//!
//! The load balancer is a part of the role server and ends with it, unlike the components that use it. While a role
//! server is replaced their connections break, and nothing listens for a moment. They reconnect, as they have to
//! whenever an API server stops. Pods are not affected.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use transport::gate::limits::reserved_files;
use transport::gate::open_files::available_files;

/// Time after which a server that does not accept is skipped.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// TCP keepalive: idle time before the first probe, interval between probes, and number of unanswered probes that close
/// the connection.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Pause after an accept that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Most connections, for any number of files: the components of a worker have some dozens.
const MAX_CONNECTIONS: u64 = 4096;
/// How often the log says that there are more.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Addresses of API servers. The load balancer listens while it has a set, even an empty one.
pub type ApiServers = BTreeSet<SocketAddr>;

/// Parses the addresses that a curator sent; invalid ones are skipped.
#[must_use]
pub fn parse_servers<'t>(texts: impl IntoIterator<Item = &'t String>) -> ApiServers {
    texts.into_iter().filter_map(|text| text.parse().ok()).collect()
}

/// Most connections in a process that may open `files`. They take a tenth of the files that its listeners share; a
/// curator in the same process has half of these.
fn connection_limit(files: u64) -> usize {
    let shared = files.saturating_sub(reserved_files(files));
    usize::try_from((shared / 20).clamp(1, MAX_CONNECTIONS)).unwrap_or(usize::MAX)
}

/// Makes the runnable that listens at `address` while `servers` holds a set.
#[must_use]
pub fn run_load_balancer(address: SocketAddr, servers: WatchCell<Option<ApiServers>>) -> Runnable {
    run_limited(address, servers, connection_limit(available_files()))
}

/// As [`run_load_balancer`], with at most `limit` connections at once.
fn run_limited(address: SocketAddr, servers: WatchCell<Option<ApiServers>>, limit: usize) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let mut watcher = servers.watch();
        async move {
            let healthy = starting.mark_healthy();
            let scope = healthy.scope();
            loop {
                let first = scope
                    .until_cancelled(watcher.next_matching(|servers: &Option<ApiServers>| servers.is_some()))
                    .await?
                    .unwrap_or_default();
                let listener = TcpListener::bind(address).await.map_err(|error| {
                    RunnableError::msg(format!(
                        "listening at {address}, where a worker finds its API servers, failed: {error}"
                    ))
                })?;
                tracing::info!(%address, servers = ?first, "the load balancer for API servers is listening");
                let (sender, current) = watch::channel(first);
                let mut connections = JoinSet::new();
                let turn = Arc::new(Mutex::new(RoundRobin::default()));
                let mut logged_at: Option<Instant> = None;
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        next = watcher.next() => match next {
                            Some(next) => {
                                sender.send_if_modified(|now| {
                                    let changed = *now != next;
                                    if changed {
                                        tracing::info!(servers = ?next, "the API servers have changed");
                                        *now = next;
                                    }
                                    changed
                                });
                            }
                            None => break,
                        },
                        accepted = listener.accept() => match accepted {
                            Ok((stream, _)) if connections.len() >= limit => {
                                drop(stream);
                                if logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                                    tracing::warn!(limit, "connections to API servers are closed: there are too many");
                                    logged_at = Some(Instant::now());
                                }
                            }
                            Ok((stream, _)) => {
                                connections.spawn(forward_connection(stream, current.clone(), turn.clone()));
                            }
                            Err(error) => {
                                tracing::warn!(%error, "a connection to an API server was not accepted");
                                wait_for_retry(scope).await?;
                            }
                        },
                        Some(_) = connections.join_next() => {}
                    }
                }
                // Leaving the scope closes all open connections.
            }
        }
    })
}

async fn wait_for_retry(scope: &Scope) -> Result<(), RunnableError> {
    Ok(scope.until_cancelled(tokio::time::sleep(RETRY_INTERVAL)).await?)
}

/// The server that the last connection was first offered to.
#[derive(Debug, Default)]
struct RoundRobin {
    last: Option<SocketAddr>,
}

impl RoundRobin {
    /// All servers in the order in which a connection tries them, starting after the one that was first last time.
    fn next_order(&mut self, servers: &ApiServers) -> Vec<SocketAddr> {
        let after = |server: &&SocketAddr| self.last.is_none_or(|last| **server > last);
        let mut order: Vec<SocketAddr> = servers.iter().filter(after).copied().collect();
        order.extend(servers.iter().filter(|server| !after(server)));
        self.last = order.first().copied();
        order
    }
}

/// Forwards one connection to a server until either side closes it or the server is removed from the set.
async fn forward_connection(
    mut stream: TcpStream,
    mut servers: watch::Receiver<ApiServers>,
    turn: Arc<Mutex<RoundRobin>>,
) {
    let order = {
        let servers = servers.borrow_and_update();
        turn.lock().unwrap_or_else(PoisonError::into_inner).next_order(&servers)
    };
    let Some((server, mut upstream)) = connect_first(&order).await else {
        tracing::debug!(servers = ?order, "no API server accepts connections");
        return;
    };
    for stream in [&stream, &upstream] {
        if let Err(error) = set_keepalive(stream) {
            tracing::debug!(%error, "a connection that goes silent stays open");
        }
    }
    let gone = async {
        // An error means that the sender is gone, and this task ends with it.
        let _ = servers.wait_for(|servers| !servers.contains(&server)).await;
    };
    tokio::select! {
        // The result needs no report: closing the streams ends both sides.
        _ = tokio::io::copy_bidirectional(&mut stream, &mut upstream) => {}
        () = gone => tracing::info!(%server, "a connection to a removed API server is closed"),
    }
}

/// Connects to the first server that accepts, and returns its address; `None` if no server accepts.
async fn connect_first(order: &[SocketAddr]) -> Option<(SocketAddr, TcpStream)> {
    for server in order {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(server)).await {
            Ok(Ok(stream)) => return Some((*server, stream)),
            Ok(Err(error)) => tracing::debug!(%server, %error, "an API server does not accept"),
            Err(_) => tracing::debug!(%server, "an API server does not accept in time"),
        }
    }
    None
}

/// Makes the kernel close the connection when the peer has disappeared (tcp(7)).
fn set_keepalive(stream: &TcpStream) -> std::io::Result<()> {
    let (after, between, missing) = KEEPALIVE;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, after)?;
    sockopt::set_tcp_keepintvl(stream, between)?;
    sockopt::set_tcp_keepcnt(stream, missing)?;
    // The same limit for data that was sent and is not acknowledged.
    let all = after + between * missing;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(all.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use supervisor::supervise::{Supervisor, SupervisorSettings};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn servers_rotate_as_the_set_changes() {
        let [one, two, three] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"].map(address);
        let mut turn = RoundRobin::default();
        let all = ApiServers::from([one, two, three]);
        assert_eq!(turn.next_order(&all), [one, two, three]);
        assert_eq!(turn.next_order(&all), [two, three, one]);
        assert_eq!(
            turn.next_order(&ApiServers::from([one, two])),
            [one, two],
            "after the last comes the first"
        );
        assert_eq!(turn.next_order(&all), [two, three, one]);
        assert!(turn.next_order(&ApiServers::new()).is_empty());
        assert_eq!(turn.next_order(&all), [one, two, three]);
    }

    #[test]
    fn invalid_addresses_are_skipped() {
        let texts = ["10.0.0.1:6443", "[fd00::4]:6443", "x", ""].map(str::to_owned);
        assert_eq!(
            parse_servers(&texts),
            ApiServers::from([address("10.0.0.1:6443"), address("[fd00::4]:6443")])
        );
    }

    #[test]
    fn connections_leave_files_for_the_role_server() {
        for (files, limit) in
            [(0, 1), (1024, 38), (4096, 153), (65_536, 2867), (1_048_576, 4096), (u64::MAX, 4096)]
        {
            assert_eq!(connection_limit(files), limit, "{files}");
        }
    }

    #[tokio::test]
    async fn newcomer_beyond_the_limit_is_closed_until_another_one_ends() {
        let (at, watch_cell) = (unused_address().await, WatchCell::new());
        let tree = Supervisor::start(run_limited(at, watch_cell.clone(), 2), SupervisorSettings::default());
        watch_cell.set(Some(ApiServers::from([server(b'a').await])));
        let mut first = connect_and_read(at).await.unwrap();
        let _second = connect_and_read(at).await.unwrap();
        assert!(connect_and_read(at).await.is_none(), "it was forwarded");
        first.0.write_all(b"x").await.unwrap();
        assert_eq!(first.0.read_u8().await.unwrap(), b'x', "the others go on");
        drop(first);
        while connect_and_read(at).await.is_none() {}
        tree.stop().await;
    }

    /// A server that sends its letter to each client, and then echoes what it receives.
    async fn server(letter: u8) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    stream.write_all(&[letter]).await.unwrap();
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        address
    }

    /// An address that no server listens at.
    async fn unused_address() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
    }

    /// Connects and reads the letter of the server; `None` if the connection was closed without one.
    async fn connect_and_read(at: SocketAddr) -> Option<(TcpStream, u8)> {
        loop {
            // Retry until the load balancer listens.
            let Ok(mut stream) = TcpStream::connect(at).await else {
                tokio::task::yield_now().await;
                continue;
            };
            return stream.read_u8().await.ok().map(|letter| (stream, letter));
        }
    }

    #[tokio::test]
    async fn connections_rotate_over_servers_and_follow_updates() {
        let (a, b) = (server(b'a').await, server(b'b').await);
        let (at, watch_cell) = (unused_address().await, WatchCell::new());
        let tree =
            Supervisor::start(run_load_balancer(at, watch_cell.clone()), SupervisorSettings::default());
        watch_cell.set(Some(ApiServers::from([a, b])));
        let (mut first, one) = connect_and_read(at).await.unwrap();
        let (mut second, two) = connect_and_read(at).await.unwrap();
        assert_eq!(BTreeSet::from([one, two]), BTreeSet::from([b'a', b'b']));
        let (_third, three) = connect_and_read(at).await.unwrap();
        assert_eq!(three, one, "in turn");
        first.write_all(b"x").await.unwrap();
        assert_eq!(first.read_u8().await.unwrap(), b'x', "both ways");

        // Connections to a removed server close; the others stay open.
        let (left, leaving, staying) =
            if one == b'a' { (a, &mut second, &mut first) } else { (a, &mut first, &mut second) };
        watch_cell.set(Some(ApiServers::from([left])));
        assert!(leaving.read_u8().await.is_err(), "it is closed");
        staying.write_all(b"y").await.unwrap();
        assert_eq!(staying.read_u8().await.unwrap(), b'y');

        // A server that does not accept is skipped.
        watch_cell.set(Some(ApiServers::from([left, unused_address().await])));
        for _ in 0..4 {
            assert_eq!(connect_and_read(at).await.unwrap().1, b'a');
        }
        watch_cell.set(Some(ApiServers::new()));
        assert!(staying.read_u8().await.is_err());
        assert!(connect_and_read(at).await.is_none(), "there is nobody to go to");
        watch_cell.set(None);
        // Without a set it stops listening, and listens again once it gets one.
        while TcpStream::connect(at).await.is_ok() {
            tokio::task::yield_now().await;
        }
        watch_cell.set(Some(ApiServers::from([b])));
        assert_eq!(connect_and_read(at).await.unwrap().1, b'b');
        tree.stop().await;
    }
}
