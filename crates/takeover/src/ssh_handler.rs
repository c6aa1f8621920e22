//! The SSH client handler: checks the host key, rejects channels from the server.
//!
//! An SSH server may open channels to its client. The library accepts them by default, and a hostile machine could fill
//! a shepherd's memory with them; nothing here uses one.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use russh::Channel;
use russh::client::{self, ChannelOpenHandle, DisconnectReason, Msg, Session};
use russh::keys::PublicKeyOrCertificate;

use crate::host_keys::{self, HostKeyExpectation};
use model::host_key::HostKey;
use model::sanitize::sanitize_text;

/// How a connection ended, set by its task.
#[derive(Clone, Default)]
pub(super) struct CloseReason(Arc<Mutex<Option<String>>>);

impl CloseReason {
    fn set(&self, reason: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }

    /// The reason as the end of a sentence.
    pub(super) fn reason(&self) -> String {
        let reason = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reason.unwrap_or_else(|| "the host closed it".to_owned())
    }
}

/// The callbacks of the SSH library during a connection.
pub(super) struct SshHandler {
    expectation: HostKeyExpectation,
    offered_key: Arc<OnceLock<HostKey>>,
    close_reason: CloseReason,
}

impl SshHandler {
    pub(super) fn new(expectation: HostKeyExpectation) -> Self {
        Self { expectation, offered_key: Arc::default(), close_reason: CloseReason::default() }
    }

    /// A cell for the host's key; set once the key was presented, accepted or not.
    pub(super) fn offered_key(&self) -> Arc<OnceLock<HostKey>> {
        Arc::clone(&self.offered_key)
    }

    /// A cell for the reason; set once the connection has ended.
    pub(super) fn close_reason(&self) -> CloseReason {
        self.close_reason.clone()
    }
}

impl client::Handler for SshHandler {
    type Error = russh::Error;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        // Certificates are never offered in the negotiation, so a host that sends one is rejected.
        let PublicKeyOrCertificate::PublicKey { key, .. } = key else { return Ok(false) };
        let Some(key) = host_keys::from_public_key(key) else { return Ok(false) };
        // Stored also when it is rejected: the error reports it.
        let first = self.offered_key.get_or_init(|| key.clone());
        Ok(*first == key && self.expectation.accepts(&key))
    }

    async fn disconnected(&mut self, reason: DisconnectReason<russh::Error>) -> Result<(), russh::Error> {
        self.close_reason.set(match reason {
            DisconnectReason::ReceivedDisconnect(info) => {
                format!("the host disconnected with {:?}", sanitize_text(&info.message))
            }
            DisconnectReason::Error(russh::Error::KeepaliveTimeout) => {
                "the host stopped answering".to_owned()
            }
            DisconnectReason::Error(russh::Error::HUP | russh::Error::Disconnect) => {
                "the host closed it".to_owned()
            }
            DisconnectReason::Error(error) => error.to_string(),
        });
        Ok(())
    }

    // A reply that is dropped rejects the channel.

    async fn server_channel_open_session(
        &mut self,
        _: Channel<Msg>,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_agent_forward(
        &mut self,
        _: Channel<Msg>,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_forwarded_tcpip(
        &mut self,
        _: Channel<Msg>,
        _: &str,
        _: u32,
        _: &str,
        _: u32,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_direct_tcpip(
        &mut self,
        _: Channel<Msg>,
        _: &str,
        _: u32,
        _: &str,
        _: u32,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_forwarded_streamlocal(
        &mut self,
        _: Channel<Msg>,
        _: &str,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_direct_streamlocal(
        &mut self,
        _: Channel<Msg>,
        _: &str,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }

    async fn server_channel_open_x11(
        &mut self,
        _: Channel<Msg>,
        _: &str,
        _: u32,
        _: ChannelOpenHandle,
        _: &mut Session,
    ) -> Result<(), russh::Error> {
        Ok(())
    }
}
