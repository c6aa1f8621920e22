//! The SSH client handler: checks the host key, rejects channels from the server.
//!
//! An SSH server may open channels to its client. The library accepts them by default, and a hostile machine could fill
//! a shepherd's memory with them; nothing here uses one.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use russh::Channel;
use russh::client::{self, ChannelOpenHandle, DisconnectReason, Msg, Session};
use russh::keys::PublicKeyOrCertificate;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::host_keys::{self, HostKeyExpectation};
use model::excerpt::Excerpt;
use model::host_key::HostKey;

/// How long a lost connection may take to report why it ended. Its task closes the queues of calls before it reports.
const REPORT_GRACE: Duration = Duration::from_millis(100);

/// How a connection ended, set by its task.
#[derive(Clone)]
pub(super) struct CloseReason(watch::Sender<Option<String>>);

impl CloseReason {
    fn new() -> Self {
        Self(watch::channel(None).0)
    }

    fn set(&self, reason: String) {
        self.0.send_replace(Some(reason));
    }

    /// The reason, if it is known already.
    pub(super) fn current(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// The reason as the end of a sentence, for a connection that has ended. Waits for the report for a moment.
    pub(super) async fn reason(&self) -> String {
        let mut reports = self.0.subscribe();
        let _reported = timeout(REPORT_GRACE, reports.wait_for(Option::is_some)).await.is_ok();
        self.current().unwrap_or_else(|| "the host closed it".to_owned())
    }
}

/// What the host last sent during the login for the person who logs in: a banner, or the instructions of a prompt.
#[derive(Clone, Default)]
pub(super) struct LoginMessage(Arc<Mutex<Option<Excerpt>>>);

impl LoginMessage {
    /// Stores the words, if there are any.
    pub(super) fn set(&self, text: &str) {
        if let Some(words) = Excerpt::from_start(text) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(words);
        }
    }

    pub(super) fn get(&self) -> Option<Excerpt> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The callbacks of the SSH library during a connection.
pub(super) struct SshHandler {
    expectation: HostKeyExpectation,
    offered_key: Arc<OnceLock<HostKey>>,
    close_reason: CloseReason,
    login_message: LoginMessage,
}

impl SshHandler {
    pub(super) fn new(expectation: HostKeyExpectation) -> Self {
        Self {
            expectation,
            offered_key: Arc::default(),
            close_reason: CloseReason::new(),
            login_message: LoginMessage::default(),
        }
    }

    /// A cell for the host's key; set once the key was presented, accepted or not.
    pub(super) fn offered_key(&self) -> Arc<OnceLock<HostKey>> {
        Arc::clone(&self.offered_key)
    }

    /// A cell for the reason; set once the connection has ended.
    pub(super) fn close_reason(&self) -> CloseReason {
        self.close_reason.clone()
    }

    /// A cell for the words of the host during the login.
    pub(super) fn login_message(&self) -> LoginMessage {
        self.login_message.clone()
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

    async fn auth_banner(&mut self, banner: &str, _: &mut Session) -> Result<(), russh::Error> {
        self.login_message.set(banner);
        Ok(())
    }

    async fn disconnected(&mut self, reason: DisconnectReason<russh::Error>) -> Result<(), russh::Error> {
        self.close_reason.set(match reason {
            DisconnectReason::ReceivedDisconnect(info) => match Excerpt::from_start(&info.message) {
                Some(words) => format!("the host disconnected with {:?}", words.as_str()),
                None => format!("the host disconnected ({:?})", info.reason_code),
            },
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
