//! A connection to a manager's private socket: handshake, calls and signals, within one deadline.
//!
//! The peer authenticates the user by the credentials of the socket (SASL mechanism EXTERNAL; D-Bus Specification,
//! "Authentication Protocol"). Without a message bus there is no `Hello` call and there are no unique names. systemd
//! sends its signals to every direct connection, so nothing has to be subscribed to.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::excerpt::Excerpt;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::systemd_manager::message::{FIXED_BYTES, Message, MessageKind, message_length};
use crate::systemd_manager::value::{DecodeError, Value};

/// Longest line of the handshake.
const MAX_LINE_BYTES: usize = 1024;
/// Signals that are kept until they are waited for; systemd sends a few for each unit that changes.
const MAX_SIGNALS: usize = 1024;

/// Why a call to systemd has no result.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// Nothing listens at the socket, or it belongs to somebody else.
    #[error("systemd cannot be reached at {}: {source}", path.display())]
    Unreachable {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// The connection failed after it was made.
    #[error("{doing}: the connection to systemd failed: {source}")]
    Broken {
        /// The call, or the handshake.
        doing: String,
        /// Error of the system call.
        source: std::io::Error,
    },
    /// systemd did not answer in time; the call may have been carried out.
    #[error("{doing}: systemd did not answer within {} s", limit.as_secs_f32())]
    NoAnswer {
        /// The call, or the handshake.
        doing: String,
        /// The time that it had.
        limit: Duration,
    },
    /// The caller has to end, so no call was made.
    #[error("no time is left for another call to systemd")]
    NoTime,
    /// systemd answered with bytes that are no D-Bus.
    #[error("{doing}: the answer of systemd is malformed: {source}")]
    Malformed {
        /// The call, or the handshake.
        doing: String,
        /// What is wrong with the bytes.
        source: DecodeError,
    },
    /// systemd refused the call.
    #[error("{doing}: systemd refused: {message} ({name})")]
    Refused {
        /// The call, or the handshake.
        doing: String,
        /// Name of the D-Bus error.
        name: String,
        /// Text of the D-Bus error.
        message: String,
    },
    /// The call succeeded, and what it started did not.
    #[error("{0}")]
    Failed(String),
}

impl ManagerError {
    /// Whether systemd gave no answer, so that another call would get none either, or there is no time for one.
    #[must_use]
    pub const fn is_silence(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Broken { .. } | Self::NoAnswer { .. } | Self::NoTime)
    }

    /// Whether systemd refused a call with this D-Bus error.
    #[must_use]
    pub fn is_refusal(&self, error: &str) -> bool {
        matches!(self, Self::Refused { name, .. } if name == error)
    }
}

/// One connection, for one operation.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    limit: Duration,
    deadline: Instant,
    last_serial: u32,
    signals: VecDeque<Message>,
}

impl Connection {
    /// Connects and authenticates. All calls on this connection together end within `limit`.
    pub fn open(path: &Path, limit: Duration) -> Result<Self, ManagerError> {
        let deadline = Instant::now() + limit;
        let unreachable =
            |source: std::io::Error| ManagerError::Unreachable { path: path.to_owned(), source };
        let stream = connect_within(path, limit).map_err(unreachable)?;
        let mut connection = Self { stream, limit, deadline, last_serial: 0, signals: VecDeque::new() };
        let uid = rustix::process::geteuid().as_raw().to_string();
        let doing = "authenticating to systemd";
        // `BEGIN` does not wait for the answer: systemd does not look at a call that it read together with `BEGIN` until more
        // arrives.
        connection.send(doing, format!("\0AUTH EXTERNAL {}\r\nBEGIN\r\n", hex::encode(uid)).as_bytes())?;
        let line = connection.read_line(doing)?;
        if !line.starts_with("OK ") {
            return Err(ManagerError::Refused {
                doing: doing.to_owned(),
                name: "SASL".to_owned(),
                message: line,
            });
        }
        Ok(connection)
    }

    /// Calls a method of an object and returns the values of its reply.
    pub fn call(
        &mut self,
        path: &str,
        interface: &str,
        member: &str,
        body: Vec<Value>,
    ) -> Result<Vec<Value>, ManagerError> {
        self.last_serial += 1;
        let serial = self.last_serial;
        let call = Message {
            path: path.to_owned(),
            interface: interface.to_owned(),
            member: member.to_owned(),
            destination: "org.freedesktop.systemd1".to_owned(),
            ..Message::new(MessageKind::Call, serial, body)
        };
        self.send(member, &call.encode())?;
        loop {
            let message = self.read_message(member)?;
            match message.kind {
                MessageKind::Reply if message.reply_to == serial => return Ok(message.body),
                MessageKind::Error if message.reply_to == serial => {
                    let words = message.body.first().and_then(Value::as_text).and_then(Excerpt::from_start);
                    let text = words.as_ref().map_or("it gave no reason", Excerpt::as_str);
                    return Err(ManagerError::Refused {
                        doing: member.to_owned(),
                        message: text.to_owned(),
                        name: message.error,
                    });
                }
                MessageKind::Signal => self.keep_signal(message),
                _ => {}
            }
        }
    }

    /// Waits for a signal that matches, also one that arrived before the reply to a call.
    pub fn wait_for_signal(
        &mut self,
        doing: &str,
        matches: impl Fn(&Message) -> bool,
    ) -> Result<Message, ManagerError> {
        loop {
            while let Some(signal) = self.signals.pop_front() {
                if matches(&signal) {
                    return Ok(signal);
                }
            }
            let message = self.read_message(doing)?;
            if message.kind == MessageKind::Signal {
                self.keep_signal(message);
            }
        }
    }

    fn keep_signal(&mut self, signal: Message) {
        self.signals.push_back(signal);
        if self.signals.len() > MAX_SIGNALS {
            self.signals.pop_front();
        }
    }

    fn failure(&self, doing: &str, source: std::io::Error) -> ManagerError {
        let doing = doing.to_owned();
        match source.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                ManagerError::NoAnswer { doing, limit: self.limit }
            }
            _ => ManagerError::Broken { doing, source },
        }
    }

    /// The time that is left; an error if there is none. The system call treats zero as no limit.
    fn remaining(&self, doing: &str) -> Result<Duration, ManagerError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ManagerError::NoAnswer { doing: doing.to_owned(), limit: self.limit });
        }
        Ok(left)
    }

    fn send(&mut self, doing: &str, bytes: &[u8]) -> Result<(), ManagerError> {
        let left = self.remaining(doing)?;
        self.stream
            .set_write_timeout(Some(left))
            .and_then(|()| self.stream.write_all(bytes))
            .map_err(|error| self.failure(doing, error))
    }

    /// Fills the buffer. The deadline is checked before each read, because a peer may send byte by byte.
    fn read_exact(&mut self, doing: &str, mut buffer: &mut [u8]) -> Result<(), ManagerError> {
        while !buffer.is_empty() {
            let left = self.remaining(doing)?;
            let read = self.stream.set_read_timeout(Some(left)).and_then(|()| self.stream.read(buffer));
            match read {
                Ok(0) => return Err(self.failure(doing, ErrorKind::UnexpectedEof.into())),
                Ok(count) => buffer = &mut buffer[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failure(doing, error)),
            }
        }
        Ok(())
    }

    fn read_line(&mut self, doing: &str) -> Result<String, ManagerError> {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            if line.len() >= MAX_LINE_BYTES {
                let source = DecodeError("its greeting does not end".to_owned());
                return Err(ManagerError::Malformed { doing: doing.to_owned(), source });
            }
            // One byte at a time: nothing behind the line may be read.
            let mut byte = [0];
            self.read_exact(doing, &mut byte)?;
            line.extend(byte);
        }
        Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
    }

    fn read_message(&mut self, doing: &str) -> Result<Message, ManagerError> {
        let malformed = |source| ManagerError::Malformed { doing: doing.to_owned(), source };
        let mut bytes = vec![0; FIXED_BYTES];
        self.read_exact(doing, &mut bytes)?;
        let length = message_length(&bytes).map_err(malformed)?;
        let mut rest = vec![0; length - FIXED_BYTES];
        self.read_exact(doing, &mut rest)?;
        bytes.extend(rest);
        Message::decode(&bytes).map_err(malformed)
    }
}

/// Connects to a socket. A listener with a full queue would otherwise block the caller without a limit.
fn connect_within(path: &Path, limit: Duration) -> std::io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}
