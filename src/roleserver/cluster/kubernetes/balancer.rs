//! The way of a worker's components to whatever API server answers: one address of the loopback, behind which are all.
//!
//! It knows nothing of what goes through it, which is TLS from end to end. Each connection goes to the next server in turn;
//! one that does not accept is passed over, and the connection goes to the one after it. When another set of servers is
//! told, connections to those that are none any more are closed, so that whoever has them comes to another one. What is
//! silent for half a minute, because its host is gone, is closed as well.
//!
//! It is a part of the role server and ends with it, unlike the components that use it. While a role server is replaced
//! their connections break, and for a moment nothing listens; they try again, as they have to whenever an API server goes,
//! and pods notice nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::value::Value;

/// After which a server that does not accept is passed over.
const CONNECTING: Duration = Duration::from_secs(2);
/// After which a connection on which nothing comes is asked whether anybody is there, how often, and how many answers may
/// be missing.
const SILENCE: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(5), 3);
/// Between two looks when nothing could be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Servers to choose from. It listens while there is such a set, even if it is empty.
pub type Servers = BTreeSet<SocketAddr>;

/// The addresses of what a curator tells; what is none is left out.
#[must_use]
pub fn servers<'t>(texts: impl IntoIterator<Item = &'t String>) -> Servers {
    texts.into_iter().filter_map(|text| text.parse().ok()).collect()
}

/// The runnable: listens at `address` while `servers` has a set.
#[must_use]
pub fn balancer(address: SocketAddr, servers: Value<Option<Servers>>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let mut told = servers.watch();
        async move {
            let healthy = starting.healthy();
            let scope = healthy.scope();
            loop {
                let first = scope
                    .until_cancelled(told.next_where(|servers: &Option<Servers>| servers.is_some()))
                    .await?
                    .unwrap_or_default();
                let listener = TcpListener::bind(address).await.map_err(|error| {
                    Stop::because(format!(
                        "listening at {address}, where a worker finds its API servers, failed: {error}"
                    ))
                })?;
                tracing::info!(%address, servers = ?first, "a worker's components find API servers here");
                let (sender, current) = watch::channel(first);
                let mut connections = JoinSet::new();
                let turn = Arc::new(Mutex::new(Turn::default()));
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        next = told.next() => match next {
                            Some(next) => {
                                sender.send_if_modified(|now| {
                                    let changed = *now != next;
                                    if changed {
                                        tracing::info!(servers = ?next, "other API servers are told");
                                        *now = next;
                                    }
                                    changed
                                });
                            }
                            None => break,
                        },
                        accepted = listener.accept() => match accepted {
                            Ok((stream, _)) => {
                                connections.spawn(carry(stream, current.clone(), turn.clone()));
                            }
                            Err(error) => {
                                tracing::warn!(%error, "a connection to an API server was not accepted");
                                pause(scope).await?;
                            }
                        },
                        Some(_) = connections.join_next() => {}
                    }
                }
                // Those that are open end with it.
            }
        }
    })
}

async fn pause(scope: &Scope) -> Result<(), Stop> {
    Ok(scope.until_cancelled(tokio::time::sleep(PAUSE)).await?)
}

/// Whose turn it is.
#[derive(Debug, Default)]
struct Turn {
    last: Option<SocketAddr>,
}

impl Turn {
    /// All servers in the order in which they are tried, beginning after the one that was begun with before.
    fn order(&mut self, servers: &Servers) -> Vec<SocketAddr> {
        let after = |server: &&SocketAddr| self.last.is_none_or(|last| **server > last);
        let mut order: Vec<SocketAddr> = servers.iter().filter(after).copied().collect();
        order.extend(servers.iter().filter(|server| !after(server)));
        self.last = order.first().copied();
        order
    }
}

/// Carries one connection to a server until either side closes it or the server is none any more.
async fn carry(mut stream: TcpStream, mut servers: watch::Receiver<Servers>, turn: Arc<Mutex<Turn>>) {
    let order = {
        let servers = servers.borrow_and_update();
        turn.lock().unwrap_or_else(PoisonError::into_inner).order(&servers)
    };
    let Some((server, mut upstream)) = connect(&order).await else {
        tracing::debug!(servers = ?order, "no API server accepts connections");
        return;
    };
    for stream in [&stream, &upstream] {
        if let Err(error) = watch_over(stream) {
            tracing::debug!(%error, "a connection that goes silent stays open");
        }
    }
    let gone = async {
        // What sends it ends with us.
        let _ = servers.wait_for(|servers| !servers.contains(&server)).await;
    };
    tokio::select! {
        // How it ended is told to whoever has it, by its end.
        _ = tokio::io::copy_bidirectional(&mut stream, &mut upstream) => {}
        () = gone => tracing::info!(%server, "a connection to what is no API server any more is closed"),
    }
}

/// The first of these that accepts.
async fn connect(order: &[SocketAddr]) -> Option<(SocketAddr, TcpStream)> {
    for server in order {
        match tokio::time::timeout(CONNECTING, TcpStream::connect(server)).await {
            Ok(Ok(stream)) => return Some((*server, stream)),
            Ok(Err(error)) => tracing::debug!(%server, %error, "an API server does not accept"),
            Err(_) => tracing::debug!(%server, "an API server does not accept in time"),
        }
    }
    None
}

/// Has the kernel close it when nobody is there any more (tcp(7)).
fn watch_over(stream: &TcpStream) -> std::io::Result<()> {
    let (after, between, missing) = SILENCE;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, after)?;
    sockopt::set_tcp_keepintvl(stream, between)?;
    sockopt::set_tcp_keepcnt(stream, missing)?;
    // Also what was sent and that nobody takes note of.
    let all = after + between * missing;
    sockopt::set_tcp_user_timeout(stream, u32::try_from(all.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use crate::supervisor::supervise::{Settings, Supervisor};

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn servers_take_turns_whichever_there_are() {
        let [one, two, three] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"].map(address);
        let mut turn = Turn::default();
        let all = Servers::from([one, two, three]);
        assert_eq!(turn.order(&all), [one, two, three]);
        assert_eq!(turn.order(&all), [two, three, one]);
        assert_eq!(turn.order(&Servers::from([one, two])), [one, two], "after the last comes the first");
        assert_eq!(turn.order(&all), [two, three, one]);
        assert!(turn.order(&Servers::new()).is_empty());
        assert_eq!(turn.order(&all), [one, two, three]);
    }

    #[test]
    fn what_is_no_address_is_left_out() {
        let texts = ["10.0.0.1:6443", "[fd00::4]:6443", "x", ""].map(str::to_owned);
        assert_eq!(servers(&texts), Servers::from([address("10.0.0.1:6443"), address("[fd00::4]:6443")]));
    }

    /// A server that says its letter to whoever comes, and then says back what it is told.
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

    /// Nobody listens there.
    async fn nobody() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
    }

    /// A connection, and which server it came to; none where it was closed without a word.
    async fn come(at: SocketAddr) -> Option<(TcpStream, u8)> {
        loop {
            // Until it listens.
            let Ok(mut stream) = TcpStream::connect(at).await else {
                tokio::task::yield_now().await;
                continue;
            };
            return stream.read_u8().await.ok().map(|letter| (stream, letter));
        }
    }

    #[tokio::test]
    async fn connections_go_to_servers_in_turn_and_follow_what_is_told() {
        let (a, b) = (server(b'a').await, server(b'b').await);
        let (at, told) = (nobody().await, Value::new());
        let tree = Supervisor::start(balancer(at, told.clone()), Settings::default());
        told.set(Some(Servers::from([a, b])));
        let (mut first, one) = come(at).await.unwrap();
        let (mut second, two) = come(at).await.unwrap();
        assert_eq!(BTreeSet::from([one, two]), BTreeSet::from([b'a', b'b']));
        let (_third, three) = come(at).await.unwrap();
        assert_eq!(three, one, "in turn");
        first.write_all(b"x").await.unwrap();
        assert_eq!(first.read_u8().await.unwrap(), b'x', "both ways");

        // Who is none any more loses what it has; the others keep theirs.
        let (left, leaving, staying) =
            if one == b'a' { (a, &mut second, &mut first) } else { (a, &mut first, &mut second) };
        told.set(Some(Servers::from([left])));
        assert!(leaving.read_u8().await.is_err(), "it is closed");
        staying.write_all(b"y").await.unwrap();
        assert_eq!(staying.read_u8().await.unwrap(), b'y');

        // One that does not accept is passed over.
        told.set(Some(Servers::from([left, nobody().await])));
        for _ in 0..4 {
            assert_eq!(come(at).await.unwrap().1, b'a');
        }
        told.set(Some(Servers::new()));
        assert!(staying.read_u8().await.is_err());
        assert!(come(at).await.is_none(), "there is nobody to go to");
        told.set(None);
        // It listens no more, and again when it is asked to.
        while TcpStream::connect(at).await.is_ok() {
            tokio::task::yield_now().await;
        }
        told.set(Some(Servers::from([b])));
        assert_eq!(come(at).await.unwrap().1, b'b');
        tree.stop().await;
    }
}
