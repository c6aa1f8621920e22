//! An authenticated SSH session: connect, handshake, log in.
//!
//! # Limits
//!
//! `--agent_ssh_connect_timeout` (2 s) covers name resolution and the TCP connection, which distinguish a dead machine
//! from a living one. A hung machine still accepts connections, because its kernel does, and then sends nothing.
//! `--agent_ssh_greeting_timeout` (5 s) limits the wait for the first byte of the server's version line, so that such a
//! machine does not hold a worker for longer. Key exchange and login each have a longer limit
//! (`--agent_ssh_login_timeout`, 20 s), because healthy servers are slow there: an OpenSSH server looks up the client's
//! name, runs PAM, and waits 2 s after a wrong password. The caller's deadline bounds all of it.
//!
//! # Passwords
//!
//! A password is one for many machines, and a host that gets it knows it. So a password is a login method of its own
//! ([`LoginMethod`]), which the caller chooses by its configuration, never a second attempt because a host rejected the
//! key. It is sent only to a host with a key that was known before the connection: a key that is pinned on first use
//! may be that of anybody who answers at the address. A host that takes no password before a key gets the key first, and
//! the password only when it has accepted the key as the first of two factors.
//!
//! # Ending
//!
//! The SSH library runs a connection in a task of its own, which in the middle of a handshake would outlive the future
//! that started it. So the session has a second handle to the socket and shuts it down when it is dropped: whatever the
//! task was doing then fails at once, and no call outlives its lease.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use russh::client::{self, Handle};
use russh::keys::Algorithm;
use russh::{AlgorithmKind, Disconnect};
use secrecy::SecretString;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument as _;
use tracing::field::{Empty, display};

use crate::client_key::ClientKey;
use crate::first_byte::FirstByteDetector;
use crate::host_keys::{self, HostKeyExpectation};
use crate::ssh_error::{HostKeyChanged, SshError};
use crate::ssh_handler::{CloseReason, LoginMessage, SshHandler};
use crate::tcp_connection::{SocketGuard, connect_tcp};
use crate::time_limit::TimeLimit;
use model::excerpt::Excerpt;
use model::host_key::HostKey;
use model::program_versions::version::{ProgramVersion, parse_openssh_banner};
use model::traces::TRACE_TARGET;

mod login;

const GREETING_FLAG: &str = "--agent_ssh_greeting_timeout";
const LOGIN_FLAG: &str = "--agent_ssh_login_timeout";
/// Why a host may end a connection before it is set up.
const CLOSED: &str = "the host closed the connection; it may be too busy, or restrict who may connect";

/// How to log in to a host.
#[derive(Clone, Debug)]
pub enum LoginMethod {
    /// With the client key of the settings.
    Key,
    /// With this password, and only if the host's key was known beforehand.
    Password(SecretString),
}

/// The settings of a shepherd's SSH connections.
#[derive(Clone, Debug)]
pub struct SshSettings {
    /// The private key that shepherd logs in with.
    pub key: ClientKey,
    /// How to log in.
    pub login: LoginMethod,
    /// Limit of name resolution and TCP connection (`--agent_ssh_connect_timeout`).
    pub connect_timeout: Duration,
    /// Limit from then to the first byte of the host (`--agent_ssh_greeting_timeout`).
    pub greeting_timeout: Duration,
    /// Limit of the key exchange, and again of the login (`--agent_ssh_login_timeout`).
    pub login_timeout: Duration,
    /// Limit of each command (`--agent_ssh_exec_timeout`).
    pub exec_timeout: Duration,
    /// A host that is silent for this long gets a keepalive, and is given up after three of them without a response: a
    /// loss of power in the middle of a command shows in 20 s, not at the exec limit.
    pub keepalive_interval: Duration,
}

impl SshSettings {
    /// The default limits, and a login with this key.
    #[must_use]
    pub const fn new(key: ClientKey) -> Self {
        Self {
            key,
            login: LoginMethod::Key,
            connect_timeout: Duration::from_secs(2),
            greeting_timeout: Duration::from_secs(5),
            login_timeout: Duration::from_secs(20),
            exec_timeout: Duration::from_mins(1),
            keepalive_interval: Duration::from_secs(5),
        }
    }
}

/// One SSH host, and the user to log in as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SshTarget {
    /// A name or an address; an IPv6 address without brackets.
    pub host: String,
    /// The TCP port of the SSH server.
    pub port: u16,
    /// The user to log in as.
    pub user: String,
}

impl SshTarget {
    /// Host and port as people write them.
    #[must_use]
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// An authenticated connection. Dropping it closes it at once.
pub struct SshSession {
    pub(super) handle: Handle<SshHandler>,
    pub(super) address: String,
    pub(super) deadline: Instant,
    pub(super) exec_timeout: Duration,
    host_key: HostKey,
    close_reason: CloseReason,
    login_message: LoginMessage,
    version_line: Option<String>,
    _socket: SocketGuard,
}

impl SshSession {
    /// Connects, checks the host's key, and logs in.
    ///
    /// A host whose key is not accepted gets nothing beyond the key exchange.
    pub async fn connect(
        settings: &SshSettings,
        target: &SshTarget,
        expectation: &HostKeyExpectation,
        deadline: Instant,
    ) -> Result<Self, SshError> {
        let span = tracing::debug_span!(target: TRACE_TARGET, "ssh connect", address = target.address(), error = Empty);
        let connected =
            Self::connect_and_log_in(settings, target, expectation, deadline).instrument(span.clone()).await;
        if let Err(error) = &connected {
            span.record("error", display(error));
        }
        connected
    }

    async fn connect_and_log_in(
        settings: &SshSettings,
        target: &SshTarget,
        expectation: &HostKeyExpectation,
        deadline: Instant,
    ) -> Result<Self, SshError> {
        let mut session = match handshake(
            settings,
            target,
            expectation,
            expectation.offered_algorithms(),
            deadline,
        )
        .await
        {
            // The host has no key of the pinned kinds. A second handshake fetches the key that it has, so that the
            // operator who must decide sees it. That key is not pinned, so this handshake is rejected as well.
            Err(HandshakeError::NoCommonHostKey { .. }) if !expectation.pinned().is_empty() => {
                handshake(settings, target, expectation, host_keys::all_algorithms(), deadline).await
            }
            other => other,
        }
        .map_err(HandshakeError::into_ssh_error)?;
        if matches!(settings.login, LoginMethod::Password(_)) && expectation.pinned().is_empty() {
            return Err(SshError::UnknownHostKey {
                address: session.address.clone(),
                offered: session.host_key.clone(),
            });
        }
        session.log_in(settings, target).await?;
        Ok(session)
    }

    /// The key that the host proved; the caller pins it on first use.
    #[must_use]
    pub const fn host_key(&self) -> &HostKey {
        &self.host_key
    }

    /// The version of the host's OpenSSH, by its version line; `None` for another server.
    #[must_use]
    pub fn openssh_version(&self) -> Option<ProgramVersion> {
        parse_openssh_banner(self.version_line.as_deref()?)
    }

    /// Disconnects with a message, so that the host logs an orderly end, and waits for it for a moment.
    pub async fn close(self) {
        let until = self.deadline.min(Instant::now() + Duration::from_secs(1));
        let goodbye = async {
            if self.handle.disconnect(Disconnect::ByApplication, "", "").await.is_ok() {
                let _ended = self.handle.await;
            }
        };
        let _in_time = timeout_at(until, goodbye).await;
    }

    /// The error for a connection that ended by itself.
    pub(super) async fn connection_lost(&self, operation: &'static str) -> SshError {
        SshError::ConnectionLost {
            address: self.address.clone(),
            operation,
            reason: self.close_reason.reason().await,
        }
    }
}

enum HandshakeError {
    NoCommonHostKey { address: String, offered: Vec<String> },
    Ssh(SshError),
}

impl HandshakeError {
    fn into_ssh_error(self) -> SshError {
        match self {
            Self::Ssh(error) => error,
            Self::NoCommonHostKey { address, offered: theirs } => {
                if theirs.iter().all(|name| name.contains("rsa")) {
                    SshError::RsaOnly { address }
                } else {
                    let reason = format!("it offers only host keys of kinds {}", theirs.join(", "));
                    SshError::Handshake { address, reason }
                }
            }
        }
    }
}

impl From<SshError> for HandshakeError {
    fn from(error: SshError) -> Self {
        Self::Ssh(error)
    }
}

/// Everything up to the proof of the host's key; nothing in it identifies us to the host.
async fn handshake(
    settings: &SshSettings,
    target: &SshTarget,
    expectation: &HostKeyExpectation,
    algorithms: Vec<Algorithm>,
    deadline: Instant,
) -> Result<SshSession, HandshakeError> {
    const OPERATION: &str = "agreeing on keys";
    let address = target.address();
    let (stream, socket) =
        connect_tcp(&target.host, target.port, &address, settings.connect_timeout, deadline).await?;

    let connection = SshHandler::new(expectation.clone());
    let (offered, ending) = (connection.offered_key(), connection.close_reason());
    let login_message = connection.login_message();
    let (stream, receiver) = FirstByteDetector::new(stream);
    let first_words = stream.greeting();
    let limit = TimeLimit::new(settings.login_timeout, LOGIN_FLAG, deadline);
    let agreeing = limit.run(client::connect_stream(client_config(settings, algorithms), stream, connection));
    tokio::pin!(agreeing);
    let greeting = TimeLimit::new(settings.greeting_timeout, GREETING_FLAG, deadline);
    // Both sides may send first, so our side sends while it waits.
    let outcome = tokio::select! {
        outcome = &mut agreeing => outcome,
        () = receiver.wait_for_silence(greeting.expires_at) => {
            return Err(greeting.exceeded_error(&address, "waiting for its greeting").into());
        }
    };
    let refused = |offered: &HostKey| {
        SshError::HostKeyChanged(Box::new(HostKeyChanged {
            address: address.clone(),
            expected: expectation.pinned().to_vec(),
            offered: offered.clone(),
        }))
    };
    match (outcome, offered.get()) {
        (Err(_), _) => Err(limit.exceeded_error(&address, OPERATION).into()),
        (Ok(Ok(handle)), Some(host_key)) => Ok(SshSession {
            handle,
            address,
            deadline,
            exec_timeout: settings.exec_timeout,
            host_key: host_key.clone(),
            close_reason: ending,
            login_message,
            version_line: first_words.version_line(),
            _socket: socket,
        }),
        (Ok(Ok(_)), None) => {
            Err(SshError::Handshake { address, reason: "the host proved no key".to_owned() }.into())
        }
        (Ok(Err(russh::Error::NoCommonAlgo { kind: AlgorithmKind::Key, theirs, .. })), _) => {
            Err(HandshakeError::NoCommonHostKey { address, offered: theirs })
        }
        (Ok(Err(russh::Error::UnknownKey)), Some(key)) if !expectation.accepts(key) => {
            Err(refused(key).into())
        }
        (Ok(Err(error)), _) => {
            // The host's own words explain more than how the connection ended.
            let reason =
                ending.current().unwrap_or_else(|| handshake_reason(&error, first_words.words().as_ref()));
            Err(SshError::Handshake { address, reason }.into())
        }
    }
}

/// Why the handshake failed. `first_words` is what came instead of an SSH server's version line, or before it.
fn handshake_reason(error: &russh::Error, first_words: Option<&Excerpt>) -> String {
    let reason = match error {
        russh::Error::NoCommonAlgo { kind, theirs, .. } => {
            return format!("no {kind:?} algorithm in common; the host offers {}", theirs.join(", "));
        }
        russh::Error::Version => "what answers there is not an SSH server".to_owned(),
        russh::Error::HUP | russh::Error::Disconnect => CLOSED.to_owned(),
        russh::Error::IO(error) if error.kind() == io::ErrorKind::UnexpectedEof => CLOSED.to_owned(),
        other => other.to_string(),
    };
    match first_words {
        Some(words) => format!("{reason}; it sent {:?}", words.as_str()),
        None => reason,
    }
}

fn client_config(settings: &SshSettings, algorithms: Vec<Algorithm>) -> Arc<client::Config> {
    let mut config = client::Config {
        keepalive_interval: Some(settings.keepalive_interval),
        keepalive_max: 3,
        nodelay: true,
        ..client::Config::default()
    };
    config.preferred.key = algorithms.into();
    Arc::new(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_formatted_as_host_and_port() {
        let target = |host: &str| SshTarget { host: host.to_owned(), port: 22, user: "root".to_owned() };
        assert_eq!(target("192.0.2.7").address(), "192.0.2.7:22");
        assert_eq!(target("2001:db8::7").address(), "[2001:db8::7]:22");
    }

    #[test]
    fn settings_debug_output_leaks_no_secret() {
        let mut settings = SshSettings::new(ClientKey::generate().unwrap());
        settings.login = LoginMethod::Password("hunter2".into());
        let shown = format!("{settings:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("PRIVATE"), "{shown}");
    }
}
