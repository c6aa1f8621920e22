//! Ports of a demo: each listener has one, which stays the same in a persistent demo.
//!
//! Agents know the address of the callback server, a saved context that of the API, and printed commands the others. So a
//! persistent directory has a file with each address, and the next demo listens there if the port is still free.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use tokio::net::TcpSocket;

use crate::service::failure::ExitFailure;

/// A listener of a demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DemoListener {
    /// The callback server, to which agents report.
    Agents,
    /// The fleet API, which `shepherdctl` calls.
    Api,
    /// The metrics of the service.
    Metrics,
    /// The provider API of the simulator.
    Provider,
}

impl DemoListener {
    /// The file with its address in a persistent directory.
    pub(super) const fn file_name(self) -> &'static str {
        match self {
            Self::Agents => "agent_address",
            Self::Api => "api_address",
            Self::Metrics => "metrics_address",
            Self::Provider => "provider_address",
        }
    }
}

/// A port that no other process gets while this exists: bound, and never listened on. A port that was bound and closed
/// may be the local end of another connection a moment later.
pub(super) struct ReservedPort {
    /// The loopback address with the port.
    pub(super) address: SocketAddr,
    _socket: TcpSocket,
}

impl ReservedPort {
    /// Reserves the port that the listener had last in this directory, or another one if that is taken. Without a
    /// directory it is any free port.
    pub(super) fn reserve(listener: DemoListener, directory: Option<&Path>) -> Result<Self, ExitFailure> {
        let failed = |error| {
            ExitFailure::failed(format!("cannot find a free port for {}: {error}", listener.file_name()))
        };
        let file = directory.map(|directory| directory.join(listener.file_name()));
        let last = file.as_deref().and_then(|file| std::fs::read_to_string(file).ok());
        if let Some(reserved) = last.and_then(|last| Self::bind(last.trim().parse().ok()?).ok()) {
            return Ok(reserved);
        }
        let reserved = Self::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).map_err(failed)?;
        if let Some(file) = file {
            std::fs::write(file, reserved.address.to_string()).map_err(failed)?;
        }
        Ok(reserved)
    }

    fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A server that sets this too may listen on the port meanwhile, as all our servers do.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { address: socket.local_addr()?, _socket: socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reserved_port_is_exclusive_and_can_be_listened_on() {
        let reserved = ReservedPort::reserve(DemoListener::Agents, None).unwrap();
        assert!(std::net::TcpStream::connect(reserved.address).is_err(), "nobody listens");
        let listener = tokio::net::TcpListener::bind(reserved.address).await.unwrap();
        assert_eq!(listener.local_addr().unwrap(), reserved.address);
        let other = ReservedPort::reserve(DemoListener::Agents, None).unwrap();
        assert_ne!(other.address, reserved.address);
    }

    #[tokio::test]
    async fn persistent_demo_reuses_its_ports_if_free() {
        let directory = tempfile::tempdir().unwrap();
        let listeners =
            [DemoListener::Agents, DemoListener::Api, DemoListener::Metrics, DemoListener::Provider];
        let reserve = |listener| ReservedPort::reserve(listener, Some(directory.path())).unwrap();
        let addresses = || listeners.map(reserve).map(|reserved| reserved.address);
        let first = addresses();
        assert_eq!(addresses(), first);
        let [agents, others @ ..] = first;
        let taken = tokio::net::TcpListener::bind(agents).await.unwrap();
        let second = addresses();
        assert_ne!(second[0], agents, "somebody listens there");
        assert_eq!(second[1..], others, "each listener has its own port");
        drop(taken);
        assert_eq!(addresses(), second);
    }
}
