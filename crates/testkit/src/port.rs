//! Ports of the loopback address that a test owns while nothing listens on them.
//!
//! A port that was bound and released may belong to another program a moment later: to another test's server, or to the
//! near end of a connection. So each port is held by a socket that is bound and never listens. The system gives the
//! port to no other program and refuses connections to it. A server that sets `SO_REUSEADDR`, as all of ours do, can
//! start and stop there. Ports are held until the run ends.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;

use anyhow::{Context as _, Result};
use tokio::net::TcpSocket;

static RESERVED_SOCKETS: Mutex<Vec<TcpSocket>> = Mutex::new(Vec::new());

/// `127.0.0.1:PORT`, which is reserved for the servers that a test starts there.
pub fn reserved() -> Result<SocketAddr> {
    let socket = reserve_port(0).context("no port is free")?;
    let address = socket.local_addr()?;
    RESERVED_SOCKETS.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(socket);
    Ok(address)
}

/// Reserves a port, or any port for 0, for servers that start and stop there. Fails while a program listens on it.
pub fn reserve_port(port: u16) -> Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_port_refuses_and_is_listened_on_again_and_again() {
        let address = reserved().unwrap();
        for _ in 0..3 {
            assert!(std::net::TcpStream::connect(address).is_err(), "nobody listens");
            let server = std::net::TcpListener::bind(address).unwrap();
            let client = std::net::TcpStream::connect(address).unwrap();
            let (_accepted, from) = server.accept().unwrap();
            assert_eq!(from, client.local_addr().unwrap());
        }
        let others: Vec<SocketAddr> = (0..100).map(|_| reserved().unwrap()).collect();
        assert!(!others.contains(&address), "given twice");
    }
}
