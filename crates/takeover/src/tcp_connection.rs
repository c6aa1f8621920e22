//! TCP connection to an SSH server: name resolution, connect, and a guard that shuts the socket down.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::ssh_error::SshError;
use crate::time_limit::TimeLimit;

const CONNECT_FLAG: &str = "--agent_ssh_connect_timeout";

/// Shuts the socket down when dropped, whatever the connection's task is doing.
pub(super) struct SocketGuard(std::net::TcpStream);

impl Drop for SocketGuard {
    fn drop(&mut self) {
        // An error means that it is closed already.
        let _closed = self.0.shutdown(Shutdown::Both);
    }
}

/// Looks up `host` and connects to it. Several addresses share the limit, so that a dead one leaves time for the next.
/// `address` is host and port for messages.
pub(super) async fn connect_tcp(
    host: &str,
    port: u16,
    address: &str,
    connect_timeout: Duration,
    deadline: Instant,
) -> Result<(TcpStream, SocketGuard), SshError> {
    const OPERATION: &str = "connecting";
    let limit = TimeLimit::new(connect_timeout, CONNECT_FLAG, deadline);
    if Instant::now() >= deadline {
        return Err(limit.exceeded_error(address, OPERATION));
    }
    let resolved = limit.run(tokio::net::lookup_host((host, port))).await;
    let candidates: Vec<SocketAddr> = match resolved {
        Err(_) => return Err(limit.exceeded_error(address, "looking up its address")),
        Ok(Err(source)) => return Err(SshError::Unresolvable { address: address.to_owned(), source }),
        Ok(Ok(candidates)) => candidates.collect(),
    };
    let mut last = SshError::Unresolvable {
        address: address.to_owned(),
        source: io::Error::new(io::ErrorKind::NotFound, "the name exists without an address"),
    };
    for (index, candidate) in candidates.iter().enumerate() {
        let left = u32::try_from(candidates.len() - index).unwrap_or(u32::MAX);
        let share = limit.expires_at.saturating_duration_since(Instant::now()) / left;
        last = match timeout(share, TcpStream::connect(candidate)).await {
            Err(_) => limit.exceeded_error(address, OPERATION),
            Ok(Err(source)) if source.kind() == io::ErrorKind::ConnectionRefused => {
                SshError::ConnectionRefused { address: address.to_owned() }
            }
            Ok(Err(source)) => SshError::Unreachable { address: address.to_owned(), source },
            Ok(Ok(stream)) => {
                return guard_socket(stream)
                    .map_err(|source| SshError::Unreachable { address: address.to_owned(), source });
            }
        };
    }
    Err(last)
}

fn guard_socket(stream: TcpStream) -> io::Result<(TcpStream, SocketGuard)> {
    stream.set_nodelay(true)?;
    let stream = stream.into_std()?;
    let guard = SocketGuard(stream.try_clone()?);
    Ok((TcpStream::from_std(stream)?, guard))
}
