//! A logged-in SSH connection that ends with its owner.
//!
//! # Limits
//!
//! `--agent_ssh_connect_timeout` (2 s) covers finding the address and making
//! the TCP connection: that is what tells a dead machine from a living one. A
//! hanging one still makes connections, because its kernel does, and then says
//! nothing: `--agent_ssh_greeting_timeout` (5 s) is how long the first byte of
//! the server's version line may take, so that such a machine does not hold a
//! worker for longer. Agreeing on keys and logging in each have a longer limit
//! (`--agent_ssh_login_timeout`, 20 s), because healthy servers are slow there:
//! an OpenSSH server looks up the client's name, runs PAM, and waits 2 s after a
//! wrong password. The caller's deadline bounds all of it.
//!
//! # Ending
//!
//! The SSH library runs a connection in a task of its own, which in the middle
//! of a handshake would outlive the future that asked for it. So the session
//! keeps a second handle to the socket and shuts it down when it is dropped:
//! whatever the task was doing then fails at once, and no call outlives the
//! lease it was made under.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use russh::client::{self, AuthResult, Handle, KeyboardInteractiveAuthResponse};
use russh::keys::{Algorithm, PrivateKeyWithHashAlg};
use russh::{AlgorithmKind, Disconnect, MethodKind, MethodSet};
use secrecy::{ExposeSecret, SecretString};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::Instrument as _;
use tracing::field::{Empty, display};

use crate::model::host_key::HostKey;
use crate::model::traces::TRACES;
use crate::takeover::client_key::ClientKey;
use crate::takeover::connection::{Connection, Ending};
use crate::takeover::error::{HostKeyChanged, SshError};
use crate::takeover::heard::Heard;
use crate::takeover::host_keys::{self, HostKeyExpectation};

const GREETING_FLAG: &str = "--agent_ssh_greeting_timeout";
const LOGIN_FLAG: &str = "--agent_ssh_login_timeout";

/// How this shepherd connects to any machine.
#[derive(Clone, Debug)]
pub struct SshSettings {
    /// Tried first.
    pub key: ClientKey,
    /// Tried when the key is refused and the host takes passwords.
    pub password: Option<SecretString>,
    /// For the address and the TCP connection (`--agent_ssh_connect_timeout`).
    pub connect_timeout: Duration,
    /// From then to the first byte that the host says (`--agent_ssh_greeting_timeout`).
    pub greeting_timeout: Duration,
    /// For agreeing on keys, and again for logging in (`--agent_ssh_login_timeout`).
    pub login_timeout: Duration,
    /// For each command (`--agent_ssh_exec_timeout`).
    pub exec_timeout: Duration,
    /// A host that is silent for this long is asked whether it lives, and given up after three times without
    /// an answer: power lost in the middle of a command shows in 20 s, not at the exec limit.
    pub keepalive_interval: Duration,
}

impl SshSettings {
    /// The default limits with this key and no password.
    #[must_use]
    pub const fn new(key: ClientKey) -> Self {
        Self {
            key,
            password: None,
            connect_timeout: Duration::from_secs(2),
            greeting_timeout: Duration::from_secs(5),
            login_timeout: Duration::from_secs(20),
            exec_timeout: Duration::from_mins(1),
            keepalive_interval: Duration::from_secs(5),
        }
    }
}

/// One SSH host and the user to be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SshTarget {
    /// A name or an address; an IPv6 address without brackets.
    pub host: String,
    /// The TCP port.
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

/// A logged-in connection. Dropping it closes it at once.
pub struct SshSession {
    pub(super) handle: Handle<Connection>,
    pub(super) address: String,
    pub(super) deadline: Instant,
    pub(super) exec_timeout: Duration,
    host_key: HostKey,
    ending: Ending,
    _socket: SocketGuard,
}

impl SshSession {
    /// Connects, checks the host's key, and logs in.
    ///
    /// Nothing is sent to a host whose key is not accepted beyond the key exchange.
    pub async fn connect(
        settings: &SshSettings,
        target: &SshTarget,
        expectation: &HostKeyExpectation,
        deadline: Instant,
    ) -> Result<Self, SshError> {
        let span =
            tracing::debug_span!(target: TRACES, "ssh connect", address = target.address(), error = Empty);
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
        let mut session =
            match handshake(settings, target, expectation, expectation.algorithms(), deadline).await {
                // The host has none of the kinds that are pinned. Ask what it has instead, so that the person who
                // must decide sees the key; it is not pinned, so the second handshake is refused as well.
                Err(HandshakeError::NoCommonHostKey { .. }) if !expectation.pinned().is_empty() => {
                    handshake(settings, target, expectation, host_keys::all_algorithms(), deadline).await
                }
                other => other,
            }
            .map_err(HandshakeError::into_ssh_error)?;
        session.log_in(settings, target).await?;
        Ok(session)
    }

    /// The key that the host proved; to be pinned on first use.
    #[must_use]
    pub const fn host_key(&self) -> &HostKey {
        &self.host_key
    }

    /// Says goodbye, so that the host logs an orderly end, and waits for it for a moment.
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
    pub(super) fn lost(&self, doing: &'static str) -> SshError {
        SshError::ConnectionLost { address: self.address.clone(), doing, reason: self.ending.reason() }
    }

    async fn log_in(&mut self, settings: &SshSettings, target: &SshTarget) -> Result<(), SshError> {
        const DOING: &str = "logging in";
        let limit = Limit::new(settings.login_timeout, LOGIN_FLAG, self.deadline);
        let outcome = timeout_at(limit.until, self.authenticate(settings, &target.user)).await;
        match outcome {
            Err(_) => Err(limit.error(&self.address, DOING)),
            Ok(Err(error)) => Err(error),
            Ok(Ok(Attempt { success: true, .. })) => Ok(()),
            Ok(Ok(Attempt { tried, remaining, .. })) => {
                if remaining.is_empty() && self.handle.is_closed() {
                    return Err(self.lost(DOING));
                }
                Err(SshError::AuthenticationRefused {
                    address: self.address.clone(),
                    user: target.user.clone(),
                    tried,
                    accepted: remaining.iter().map(String::from).collect(),
                    public_key: settings.key.authorized_keys_line(),
                })
            }
        }
    }

    /// Key, then password, then the same password as the answer to a single hidden question.
    async fn authenticate(&mut self, settings: &SshSettings, user: &str) -> Result<Attempt, SshError> {
        let mut tried = vec!["publickey"];
        let key = PrivateKeyWithHashAlg::new(settings.key.private(), None);
        let answer = self.handle.authenticate_publickey(user, key).await;
        let mut remaining = match self.settle(answer)? {
            Ok(()) => return Ok(Attempt::success(tried)),
            Err(remaining) => remaining,
        };
        if let Some(password) = &settings.password {
            if remaining.contains(&MethodKind::Password) {
                tried.push("password");
                let answer = self.handle.authenticate_password(user, password.expose_secret()).await;
                remaining = match self.settle(answer)? {
                    Ok(()) => return Ok(Attempt::success(tried)),
                    Err(remaining) => remaining,
                };
            }
            if remaining.contains(&MethodKind::KeyboardInteractive) {
                tried.push("keyboard-interactive");
                let answer = self.answer_questions(user, password).await;
                remaining = match self.settle(answer)? {
                    Ok(()) => return Ok(Attempt::success(tried)),
                    Err(remaining) => remaining,
                };
            }
        }
        Ok(Attempt { success: false, tried, remaining })
    }

    async fn answer_questions(
        &mut self,
        user: &str,
        password: &SecretString,
    ) -> Result<AuthResult, russh::Error> {
        let mut answer = self.handle.authenticate_keyboard_interactive_start(user, None).await?;
        // PAM asks once, then sends an empty round; a host that goes on asking is not asking for this password.
        for _ in 0..4 {
            match answer {
                KeyboardInteractiveAuthResponse::Success => return Ok(AuthResult::Success),
                KeyboardInteractiveAuthResponse::Failure { remaining_methods, partial_success } => {
                    return Ok(AuthResult::Failure { remaining_methods, partial_success });
                }
                KeyboardInteractiveAuthResponse::InfoRequest { prompts, .. } => {
                    let answers =
                        prompts
                            .iter()
                            .map(|prompt| {
                                if prompt.echo { String::new() } else { password.expose_secret().to_owned() }
                            })
                            .collect();
                    answer = self.handle.authenticate_keyboard_interactive_respond(answers).await?;
                }
            }
        }
        Ok(AuthResult::Failure { remaining_methods: MethodSet::empty(), partial_success: false })
    }

    /// `Ok(Err(…))`: refused, with what the host says could go on.
    fn settle(&self, answer: Result<AuthResult, russh::Error>) -> Result<Result<(), MethodSet>, SshError> {
        match answer {
            Ok(AuthResult::Success) => Ok(Ok(())),
            Ok(AuthResult::Failure { remaining_methods, .. }) => Ok(Err(remaining_methods)),
            Err(_) => Err(self.lost("logging in")),
        }
    }
}

struct Attempt {
    success: bool,
    tried: Vec<&'static str>,
    remaining: MethodSet,
}

impl Attempt {
    fn success(tried: Vec<&'static str>) -> Self {
        Self { success: true, tried, remaining: MethodSet::empty() }
    }
}

/// A limit of ours, cut short by the caller's deadline; it remembers which of the two it is.
#[derive(Clone, Copy)]
pub(super) struct Limit {
    pub(super) until: Instant,
    duration: Duration,
    flag: &'static str,
    by_deadline: bool,
}

impl Limit {
    /// `flag` is the one that sets `duration`.
    pub(super) fn new(duration: Duration, flag: &'static str, deadline: Instant) -> Self {
        let until = Instant::now() + duration;
        Self { until: until.min(deadline), duration, flag, by_deadline: deadline <= until }
    }

    pub(super) fn error(&self, address: &str, doing: &'static str) -> SshError {
        let address = address.to_owned();
        if self.by_deadline {
            SshError::Deadline { address, doing }
        } else {
            SshError::Timeout { address, doing, limit: self.duration, flag: self.flag }
        }
    }
}

/// Shuts the socket down when dropped, whatever the connection's task is doing.
struct SocketGuard(std::net::TcpStream);

impl Drop for SocketGuard {
    fn drop(&mut self) {
        // An error means that it is closed already.
        let _closed = self.0.shutdown(Shutdown::Both);
    }
}

enum HandshakeError {
    NoCommonHostKey { address: String, theirs: Vec<String> },
    Ssh(SshError),
}

impl HandshakeError {
    fn into_ssh_error(self) -> SshError {
        match self {
            Self::Ssh(error) => error,
            Self::NoCommonHostKey { address, theirs } => {
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

/// Everything up to the proof of the host's key, and nothing that tells the host who we are.
async fn handshake(
    settings: &SshSettings,
    target: &SshTarget,
    expectation: &HostKeyExpectation,
    algorithms: Vec<Algorithm>,
    deadline: Instant,
) -> Result<SshSession, HandshakeError> {
    const DOING: &str = "agreeing on keys";
    let address = target.address();
    let (stream, socket) = open(settings, target, &address, deadline).await?;

    let connection = Connection::new(expectation.clone());
    let (offered, ending) = (connection.offered(), connection.ending());
    let (stream, heard) = Heard::new(stream);
    let limit = Limit::new(settings.login_timeout, LOGIN_FLAG, deadline);
    let agreeing =
        timeout_at(limit.until, client::connect_stream(config(settings, algorithms), stream, connection));
    tokio::pin!(agreeing);
    let greeting = Limit::new(settings.greeting_timeout, GREETING_FLAG, deadline);
    // Both sides may speak first, so that we do while we wait.
    let outcome = tokio::select! {
        outcome = &mut agreeing => outcome,
        () = heard.nothing_by(greeting.until) => {
            return Err(greeting.error(&address, "waiting for its greeting").into());
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
        (Err(_), _) => Err(limit.error(&address, DOING).into()),
        (Ok(Ok(handle)), Some(host_key)) => Ok(SshSession {
            handle,
            address,
            deadline,
            exec_timeout: settings.exec_timeout,
            host_key: host_key.clone(),
            ending,
            _socket: socket,
        }),
        (Ok(Ok(_)), None) => {
            Err(SshError::Handshake { address, reason: "the host proved no key".to_owned() }.into())
        }
        (Ok(Err(russh::Error::NoCommonAlgo { kind: AlgorithmKind::Key, theirs, .. })), _) => {
            Err(HandshakeError::NoCommonHostKey { address, theirs })
        }
        (Ok(Err(russh::Error::UnknownKey)), Some(key)) if !expectation.accepts(key) => {
            Err(refused(key).into())
        }
        (Ok(Err(error)), _) => Err(SshError::Handshake { address, reason: handshake_reason(&error) }.into()),
    }
}

fn handshake_reason(error: &russh::Error) -> String {
    match error {
        russh::Error::NoCommonAlgo { kind, theirs, .. } => {
            format!("no {kind:?} algorithm in common; the host offers {}", theirs.join(", "))
        }
        russh::Error::Version => "what answers there is not an SSH server".to_owned(),
        russh::Error::HUP | russh::Error::Disconnect => {
            "the host closed the connection; it may be too busy, or restrict who may connect".to_owned()
        }
        russh::Error::IO(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "the host closed the connection; it may be too busy, or restrict who may connect".to_owned()
        }
        other => other.to_string(),
    }
}

fn config(settings: &SshSettings, algorithms: Vec<Algorithm>) -> Arc<client::Config> {
    let mut config = client::Config {
        keepalive_interval: Some(settings.keepalive_interval),
        keepalive_max: 3,
        nodelay: true,
        ..client::Config::default()
    };
    config.preferred.key = algorithms.into();
    Arc::new(config)
}

/// Finds the address and connects; several addresses share the limit, so that one dead one leaves time for the next.
async fn open(
    settings: &SshSettings,
    target: &SshTarget,
    address: &str,
    deadline: Instant,
) -> Result<(TcpStream, SocketGuard), SshError> {
    const DOING: &str = "connecting";
    let limit = Limit::new(settings.connect_timeout, "--agent_ssh_connect_timeout", deadline);
    if Instant::now() >= deadline {
        return Err(limit.error(address, DOING));
    }
    let resolved =
        timeout_at(limit.until, tokio::net::lookup_host((target.host.as_str(), target.port))).await;
    let candidates: Vec<SocketAddr> = match resolved {
        Err(_) => return Err(limit.error(address, "looking up its address")),
        Ok(Err(source)) => return Err(SshError::Unresolvable { address: address.to_owned(), source }),
        Ok(Ok(candidates)) => candidates.collect(),
    };
    let mut last = SshError::Unresolvable {
        address: address.to_owned(),
        source: io::Error::new(io::ErrorKind::NotFound, "the name exists without an address"),
    };
    for (index, candidate) in candidates.iter().enumerate() {
        let left = u32::try_from(candidates.len() - index).unwrap_or(u32::MAX);
        let share = limit.until.saturating_duration_since(Instant::now()) / left;
        last = match timeout(share, TcpStream::connect(candidate)).await {
            Err(_) => limit.error(address, DOING),
            Ok(Err(source)) if source.kind() == io::ErrorKind::ConnectionRefused => {
                SshError::Refused { address: address.to_owned() }
            }
            Ok(Err(source)) => SshError::Unreachable { address: address.to_owned(), source },
            Ok(Ok(stream)) => {
                return guarded(stream)
                    .map_err(|source| SshError::Unreachable { address: address.to_owned(), source });
            }
        };
    }
    Err(last)
}

fn guarded(stream: TcpStream) -> io::Result<(TcpStream, SocketGuard)> {
    stream.set_nodelay(true)?;
    let stream = stream.into_std()?;
    let guard = SocketGuard(stream.try_clone()?);
    Ok((TcpStream::from_std(stream)?, guard))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_people_write_it() {
        let target = |host: &str| SshTarget { host: host.to_owned(), port: 22, user: "root".to_owned() };
        assert_eq!(target("192.0.2.7").address(), "192.0.2.7:22");
        assert_eq!(target("2001:db8::7").address(), "[2001:db8::7]:22");
    }

    #[test]
    fn settings_show_no_secret() {
        let mut settings = SshSettings::new(ClientKey::generate().unwrap());
        settings.password = Some("hunter2".into());
        let shown = format!("{settings:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("PRIVATE"), "{shown}");
    }
}
