//! Our side of what a host may ask of a connection: its key is judged, and
//! everything else it asks for is refused.
//!
//! An SSH server may open channels to its client. The library accepts them
//! unless told otherwise, and a hostile machine could fill a shepherd's memory
//! with them; nothing here has a use for one.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use russh::Channel;
use russh::client::{self, ChannelOpenHandle, DisconnectReason, Msg, Session};
use russh::keys::PublicKeyOrCertificate;

use crate::model::host_key::HostKey;
use crate::model::readable::readable;
use crate::takeover::host_keys::{self, HostKeyExpectation};

/// How a connection ended, told by its task.
#[derive(Clone, Default)]
pub(super) struct Ending(Arc<Mutex<Option<String>>>);

impl Ending {
    fn set(&self, reason: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
    }

    /// The reason as the end of a sentence.
    pub(super) fn reason(&self) -> String {
        let reason = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reason.unwrap_or_else(|| "the host closed it".to_owned())
    }
}

/// What the SSH library asks us while a connection lives.
pub(super) struct Connection {
    expectation: HostKeyExpectation,
    offered: Arc<OnceLock<HostKey>>,
    ending: Ending,
}

impl Connection {
    pub(super) fn new(expectation: HostKeyExpectation) -> Self {
        Self { expectation, offered: Arc::default(), ending: Ending::default() }
    }

    /// Where the host's key will stand once it was shown, accepted or not.
    pub(super) fn offered(&self) -> Arc<OnceLock<HostKey>> {
        Arc::clone(&self.offered)
    }

    /// Where the reason will stand once the connection has ended.
    pub(super) fn ending(&self) -> Ending {
        self.ending.clone()
    }
}

impl client::Handler for Connection {
    type Error = russh::Error;

    async fn check_server_key(&mut self, key: &PublicKeyOrCertificate) -> Result<bool, russh::Error> {
        // Certificates are never offered in the negotiation, so a host that sends one is refused.
        let PublicKeyOrCertificate::PublicKey { key, .. } = key else { return Ok(false) };
        let Some(key) = host_keys::from_public_key(key) else { return Ok(false) };
        // Kept also when it is refused: it is what the refusal tells.
        let first = self.offered.get_or_init(|| key.clone());
        Ok(*first == key && self.expectation.accepts(&key))
    }

    async fn disconnected(&mut self, reason: DisconnectReason<russh::Error>) -> Result<(), russh::Error> {
        self.ending.set(match reason {
            DisconnectReason::ReceivedDisconnect(info) => {
                format!("the host said {:?}", readable(&info.message))
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

    // A reply that is dropped refuses.

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
