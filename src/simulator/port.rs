//! The SSH port of one machine, which stays its own while nothing listens on it.
//!
//! A port that is merely closed may be given to another process while its
//! machine is off. Each machine therefore holds a second socket, bound to the
//! port and never listening: the kernel keeps the port away from everyone and
//! still refuses connections (`SO_REUSEADDR` on both lets the listening one come
//! and go).
//!
//! # At once
//!
//! A machine must not be said to be up while its port refuses, nor to be off
//! while it accepts. Opening and closing therefore take effect in the call, and
//! not when some task gets its turn: a listening socket is shut down, which ends
//! its listening in the kernel whoever still has it open, and the next one is a
//! socket of its own, so that no connection reaches a server of before.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::net::{Shutdown, shutdown};
use tokio::net::{TcpListener, TcpSocket};

/// Connections a machine's SSH server lets wait.
const BACKLOG: u32 = 128;

/// A port of the loopback address.
pub(crate) struct Port {
    _reservation: TcpSocket,
    number: u16,
    listening: Option<OwnedFd>,
}

impl Port {
    /// Takes that port, or any for 0.
    pub(crate) fn take(number: u16) -> std::io::Result<Self> {
        let reservation = bind(number)?;
        let number = reservation.local_addr()?.port();
        Ok(Self { _reservation: reservation, number, listening: None })
    }

    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Listens, on a socket of its own. Must be called in a tokio runtime.
    pub(crate) fn open(&mut self) -> std::io::Result<TcpListener> {
        self.close();
        let listener = bind(self.number)?.listen(BACKLOG)?;
        self.listening = Some(listener.as_fd().try_clone_to_owned()?);
        Ok(listener)
    }

    /// Refuses connections from now on. Those that nobody has accepted yet are reset.
    pub(crate) fn close(&mut self) {
        if let Some(listening) = self.listening.take() {
            // Fails only where it does not listen any more.
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
    async fn a_port_opens_and_closes_at_once_whoever_still_has_its_listener() {
        let mut port = Port::take(0).unwrap();
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
    async fn a_port_opened_anew_is_not_served_by_the_server_of_before() {
        let mut port = Port::take(0).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()));
        let before = port.open().unwrap();
        let after = port.open().unwrap();
        let client = TcpStream::connect(address).unwrap();
        assert!(before.accept().await.is_err());
        let (server, _) = after.accept().await.unwrap();
        assert_eq!(server.peer_addr().unwrap(), client.local_addr().unwrap());
    }

    #[tokio::test]
    async fn a_port_is_chosen_for_nobody_else() {
        let port = Port::take(0).unwrap();
        let others: Vec<_> = (0..200).map(|_| Port::take(0).unwrap()).collect();
        assert!(others.iter().all(|other| other.number() != port.number()));
    }
}
