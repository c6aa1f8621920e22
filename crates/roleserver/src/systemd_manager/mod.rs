//! A client of systemd's manager: transient scopes, the state of units, and their limits.
//!
//! systemd serves its D-Bus interface on a private socket too, without a message bus: `/run/systemd/private` for the
//! system, `systemd/private` in the runtime directory of a user for that user's manager. A small server has no
//! `dbus-daemon`, and a role server needs six calls. So they are written by hand (D-Bus Specification 0.43,
//! `org.freedesktop.systemd1(5)`), instead of linking a library that makes the static program larger.
//!
//! # How the files fit
//!
//! * [`value`][]: typed values and their encoding (pure). [`message`][]: messages with their header (pure).
//! * [`connection`][]: the socket, the handshake, a call and its reply, within a deadline.
//! * [`manager`][]: the calls.
//!
//! # Invariants
//!
//! * No call outlasts its deadline, also if systemd accepts a connection and never answers.
//! * Each call has a connection of its own. A call that was given up cannot confuse the next one.
//! * What is received is bounded in size and depth, and malformed bytes are an error with a sentence.
//! * The path of the socket is a value, so no test connects to the systemd of its host.

pub mod connection;
pub mod manager;
pub mod message;
pub mod value;
