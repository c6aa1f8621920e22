//! Reserved loopback port of a simulated machine.
//!
//! The SSH port stays reserved while nothing listens on it. A port that is merely closed may be given to another
//! process while its machine is off. Each machine therefore holds a second socket, bound to the port and never
//! listening: the kernel keeps the port from other processes and still refuses connections (`SO_REUSEADDR` on both
//! sockets lets the listening one come and go).
//!
//! # At once
//!
//! A machine must not be reported as up while its port refuses connections, nor as off while it accepts them. Opening
//! and closing therefore take effect within the call, and not when some task is scheduled. A listening socket is shut
//! down, which ends its listening in the kernel even if another task still has it open. The next listener is a new
//! socket, so that no connection reaches an earlier server.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::net::{Shutdown, shutdown};
use tokio::net::{TcpListener, TcpSocket};

/// Most connections that may wait to be accepted.
const BACKLOG: u32 = 128;

/// A port of the loopback address.
pub(crate) struct Port {
    _reservation: TcpSocket,
    number: u16,
    listening: Option<OwnedFd>,
}

impl Port {
    /// Reserves that port, or any free one for 0.
    pub(crate) fn reserve(number: u16) -> std::io::Result<Self> {
        let reservation = bind(number)?;
        let number = reservation.local_addr()?.port();
        Ok(Self { _reservation: reservation, number, listening: None })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Listens on a new socket. Must be called in a tokio runtime.
    pub(crate) fn open(&mut self) -> std::io::Result<TcpListener> {
        self.close();
        let listener = bind(self.number)?.listen(BACKLOG)?;
        self.listening = Some(listener.as_fd().try_clone_to_owned()?);
        Ok(listener)
    }

    /// Refuses connections from now on. Connections that were not accepted yet are reset.
    pub(crate) fn close(&mut self) {
        if let Some(listening) = self.listening.take() {
            // This fails only if the socket does not listen any more.
            let _ = shutdown(&listening, Shutdown::Both);
        }
    }
}

fn bind(port: u16) -> std::io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn port_opens_and_closes_at_once() {
        let mut port = Port::reserve(0).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
        let mut kept = Vec::new();
        for _ in 0..3 {
            assert!(TcpStream::connect(address).is_err(), "nothing listens");
            let listener = port.open().unwrap();
            let client = TcpStream::connect(address).unwrap();
            let (server, _) = listener.accept().await.unwrap();
            assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
            kept.push((listener, client, server));
            port.close();
        }
        assert!(TcpStream::connect(address).is_err(), "three listeners are kept, and none listens");
    }

    #[tokio::test]
    async fn reopened_port_is_not_served_by_the_old_server() {
        let mut port = Port::reserve(0).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
        let before = port.open().unwrap();
        let after = port.open().unwrap();
        let client = TcpStream::connect(address).unwrap();
        assert!(before.accept().await.is_err());
        let (server, _) = after.accept().await.unwrap();
        assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
    }

    #[tokio::test]
    async fn reserved_port_is_exclusive() {
        let port = Port::reserve(0).unwrap();
        let others: Vec<_> = (0..200).map(|_| Port::reserve(0).unwrap()).collect();
        assert!(others.iter().all(|other| other.number() != port.number()));
    }
}
