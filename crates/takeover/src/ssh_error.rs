//! SSH errors, and where to look for their cause.
//!
//! A loop that sees only "SSH failed" can only retry. The next action depends on where the cause lies: on the machine
//! (a recovery may help), in the network (many machines fail alike), in the configuration (only a person can help), or
//! nowhere (the time of the caller ran out). [`SshError::blame`] returns it for every error.

use std::io;
use std::time::Duration;

use model::excerpt::Excerpt;
use model::host_key::HostKey;

/// Where the cause of a failure most likely lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blame {
    /// On the machine: a retry or a recovery may help.
    Machine,
    /// Between this host and the machine.
    Network,
    /// In our configuration: an address, a user, a key. A retry alone does not help.
    Configuration,
    /// Nowhere: the caller's time ran out.
    Deadline,
}

/// An SSH host presented a key that is not the pinned one.
///
/// Nothing was sent to the host beyond the key exchange: no user name, no key,
/// no password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{address} presented the SSH host key {offered} where {} is pinned, so nothing was sent to it. Either the \
     machine was reinstalled or replaced, or something else answers at its address; a person who knows which \
     must allow the new key before Shepherd connects again",
    join_host_keys(expected)
)]
pub struct HostKeyChanged {
    /// Host and port of the machine.
    pub address: String,
    /// The keys that are pinned for the machine.
    pub expected: Vec<HostKey>,
    /// The key that the host presented.
    pub offered: HostKey,
}

/// Why an SSH connection, or a command on it, failed.
#[derive(Debug, thiserror::Error)]
pub enum SshError {
    /// The host's name has no address.
    #[error("the SSH host {address} has no address: {source}; check the address in the device list")]
    Unresolvable {
        /// Host and port of the machine.
        address: String,
        /// The error of the resolver.
        source: io::Error,
    },
    /// The host reported that nothing listens on the port.
    #[error("{address} refused the SSH connection: nothing listens there, or a firewall rejects it")]
    ConnectionRefused {
        /// Host and port of the machine.
        address: String,
    },
    /// The connection could not be made for another reason.
    #[error("cannot connect to {address} by SSH: {source}")]
    Unreachable {
        /// Host and port of the machine.
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// No response within the limit.
    #[error("{address} did not answer within {} ({flag}) while {operation}", format_limit(*limit))]
    Timeout {
        /// Host and port of the machine.
        address: String,
        /// The operation that timed out.
        operation: &'static str,
        /// The limit that passed.
        limit: Duration,
        /// The flag that sets the limit, for operators with a slow line.
        flag: &'static str,
    },
    /// The two sides could not agree on a protocol.
    #[error("the SSH handshake with {address} failed: {reason}")]
    Handshake {
        /// Host and port of the machine.
        address: String,
        /// The error of the SSH library.
        reason: String,
    },
    /// The host has only RSA host keys.
    #[error(
        "{address} offers only RSA host keys, which Shepherd does not accept; give it an Ed25519 host key \
         (run `ssh-keygen -A` on it and restart its SSH server)"
    )]
    RsaOnly {
        /// Host and port of the machine.
        address: String,
    },
    /// The host presented another key than the pinned one.
    #[error(transparent)]
    HostKeyChanged(Box<HostKeyChanged>),
    /// The login would send a password, and it is not known which key the host has.
    #[error(
        "{address} presented the SSH host key {offered}, and no host key of the machine is known, so the password was \
         not sent. Compare the key on the machine's console (ssh-keygen -lf), and write it into the device list as \
         HostKey, or let the machine accept Shepherd's SSH key"
    )]
    UnknownHostKey {
        /// Host and port of the machine.
        address: String,
        /// The key that the host presented.
        offered: HostKey,
    },
    /// The host rejected the login.
    #[error(
        "{address} refused to let {user} in by {}; it accepts {}{}. Add this line to that user's authorized_keys: {public_key}",
        join_or(tried, "nothing"),
        join_or(accepted, "nothing that it names"),
        format_message(message.as_deref())
    )]
    AuthenticationRejected {
        /// Host and port of the machine.
        address: String,
        /// The user that was tried.
        user: Box<str>,
        /// The methods that were tried, in order.
        tried: Vec<&'static str>,
        /// The methods that the host still accepts, by its own report.
        accepted: Vec<String>,
        /// The host's own words during the login.
        message: Option<Box<Excerpt>>,
        /// Our public key, as an `authorized_keys` line.
        public_key: Box<str>,
    },
    /// The host accepted a login method as one of several that it requires.
    #[error(
        "{address} accepted {} for {user}{}, and requires {} besides{}. Let the host require less of this user or of \
         Shepherd's address (Match and AuthenticationMethods in sshd_config){}",
        join_or(accepted, "nothing"),
        format_refused(refused),
        join_or(required, "something that it does not name"),
        format_message(message.as_deref()),
        password_hint(*has_password)
    )]
    SecondFactorRequired {
        /// Host and port of the machine.
        address: Box<str>,
        /// The user that was tried.
        user: Box<str>,
        /// The methods that the host accepted.
        accepted: Vec<&'static str>,
        /// The methods that were tried besides and that it rejected.
        refused: Box<[&'static str]>,
        /// The methods that it requires besides, by its own report.
        required: Vec<String>,
        /// The host's own words during the login.
        message: Option<Box<Excerpt>>,
        /// Whether a password is configured for the host.
        has_password: bool,
    },
    /// The login worked, but the host does not run commands.
    #[error(
        "{address} refused to run a command while {operation}: is its user restricted to something else?"
    )]
    ExecRejected {
        /// Host and port of the machine.
        address: String,
        /// The operation that failed.
        operation: &'static str,
    },
    /// The connection ended before the response.
    #[error("the SSH connection to {address} was lost while {operation}: {reason}")]
    ConnectionLost {
        /// Host and port of the machine.
        address: String,
        /// The operation that was interrupted.
        operation: &'static str,
        /// What is known about the cause.
        reason: String,
    },
    /// The caller's deadline passed.
    #[error(
        "the time for this work ran out while {operation} ({address}); it is tried again with a new lease"
    )]
    Deadline {
        /// Host and port of the machine.
        address: String,
        /// The operation that was interrupted.
        operation: &'static str,
    },
}

impl SshError {
    /// Where the cause most likely lies.
    #[must_use]
    pub const fn blame(&self) -> Blame {
        match self {
            Self::ConnectionRefused { .. } | Self::Handshake { .. } => Blame::Machine,
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::ConnectionLost { .. } => Blame::Network,
            Self::Unresolvable { .. }
            | Self::RsaOnly { .. }
            | Self::HostKeyChanged(_)
            | Self::UnknownHostKey { .. }
            | Self::AuthenticationRejected { .. }
            | Self::SecondFactorRequired { .. }
            | Self::ExecRejected { .. } => Blame::Configuration,
            Self::Deadline { .. } => Blame::Deadline,
        }
    }
}

fn join_host_keys(keys: &[HostKey]) -> String {
    join_or(&keys.iter().map(ToString::to_string).collect::<Vec<_>>(), "none")
}

fn join_or<W: AsRef<str>>(words: &[W], none: &str) -> String {
    if words.is_empty() {
        return none.to_owned();
    }
    words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

fn format_refused(methods: &[&'static str]) -> String {
    if methods.is_empty() { String::new() } else { format!(" and refused {}", methods.join(", ")) }
}

const fn password_hint(has_password: bool) -> &'static str {
    if has_password { "" } else { ", or give the user's password by --ssh_password_path" }
}

/// The host's words as an insertion into a sentence.
fn format_message(message: Option<&Excerpt>) -> String {
    message.map_or_else(String::new, |words| format!(" (it sent the message {:?})", words.as_str()))
}

fn format_limit(limit: Duration) -> String {
    if limit.subsec_nanos() == 0 { format!("{} s", limit.as_secs()) } else { format!("{limit:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> String {
        "192.0.2.7:22".to_owned()
    }

    fn key(byte: u8) -> HostKey {
        HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![byte; 4] }
    }

    #[test]
    fn changed_host_key_error_names_both_fingerprints() {
        let error = SshError::HostKeyChanged(Box::new(HostKeyChanged {
            address: address(),
            expected: vec![key(1)],
            offered: key(2),
        }));
        insta::assert_snapshot!(error, @"192.0.2.7:22 presented the SSH host key ssh-ed25519 SHA256:u3K05Osp3FkyhmjzLgUR46wOXOQCaxWRllIW5Jyh9dc where ssh-ed25519 SHA256:J+zQpZjnb4ov0mTUJ98KEZkD6OrjhOR4kCVBdW8IndE is pinned, so nothing was sent to it. Either the machine was reinstalled or replaced, or something else answers at its address; a person who knows which must allow the new key before Shepherd connects again");
        assert_eq!(error.blame(), Blame::Configuration);
    }

    #[test]
    fn rejected_login_names_tried_and_accepted_methods() {
        let error = SshError::AuthenticationRejected {
            address: address(),
            user: "root".into(),
            tried: vec!["password", "keyboard-interactive"],
            accepted: vec!["publickey".to_owned(), "keyboard-interactive".to_owned()],
            message: None,
            public_key: "ssh-ed25519 AAAA shepherd".into(),
        };
        insta::assert_snapshot!(error, @"192.0.2.7:22 refused to let root in by password, keyboard-interactive; it accepts publickey, keyboard-interactive. Add this line to that user's authorized_keys: ssh-ed25519 AAAA shepherd");
    }

    #[test]
    fn accepted_key_is_not_to_be_added_again() {
        let error = |message: Option<&str>, has_password| SshError::SecondFactorRequired {
            address: address().into(),
            user: "root".into(),
            accepted: vec!["publickey"],
            refused: if has_password { Box::new(["keyboard-interactive"]) } else { Box::new([]) },
            required: vec!["keyboard-interactive".to_owned()],
            message: message.and_then(Excerpt::from_start).map(Box::new),
            has_password,
        };
        insta::assert_snapshot!(error(None, false), @"192.0.2.7:22 accepted publickey for root, and requires keyboard-interactive besides. Let the host require less of this user or of Shepherd's address (Match and AuthenticationMethods in sshd_config), or give the user's password by --ssh_password_path");
        insta::assert_snapshot!(error(Some("One-time\u{1b} code\n"), true), @r#"192.0.2.7:22 accepted publickey for root and refused keyboard-interactive, and requires keyboard-interactive besides (it sent the message "One-time code"). Let the host require less of this user or of Shepherd's address (Match and AuthenticationMethods in sshd_config)"#);
        assert_eq!(error(None, false).blame(), Blame::Configuration);
    }

    #[test]
    fn timeout_error_names_what_was_missing() {
        let refused = SshError::ConnectionRefused { address: address() };
        insta::assert_snapshot!(refused, @"192.0.2.7:22 refused the SSH connection: nothing listens there, or a firewall rejects it");
        let unresolvable =
            SshError::Unresolvable { address: address(), source: io::Error::other("no such name") };
        insta::assert_snapshot!(unresolvable, @"the SSH host 192.0.2.7:22 has no address: no such name; check the address in the device list");
        let timeout = SshError::Timeout {
            address: address(),
            operation: "connecting",
            limit: Duration::from_secs(2),
            flag: "--agent_ssh_connect_timeout",
        };
        insta::assert_snapshot!(timeout, @"192.0.2.7:22 did not answer within 2 s (--agent_ssh_connect_timeout) while connecting");
        let lost = SshError::ConnectionLost {
            address: address(),
            operation: "uploading",
            reason: "it closed".to_owned(),
        };
        insta::assert_snapshot!(lost, @"the SSH connection to 192.0.2.7:22 was lost while uploading: it closed");
        let deadline = SshError::Deadline { address: address(), operation: "probing" };
        insta::assert_snapshot!(deadline, @"the time for this work ran out while probing (192.0.2.7:22); it is tried again with a new lease");
        let rsa = SshError::RsaOnly { address: address() };
        insta::assert_snapshot!(rsa, @"192.0.2.7:22 offers only RSA host keys, which Shepherd does not accept; give it an Ed25519 host key (run `ssh-keygen -A` on it and restart its SSH server)");
    }

    #[test]
    fn each_error_has_a_blame() {
        assert_eq!(SshError::ConnectionRefused { address: address() }.blame(), Blame::Machine);
        assert_eq!(SshError::RsaOnly { address: address() }.blame(), Blame::Configuration);
        assert_eq!(SshError::Deadline { address: address(), operation: "x" }.blame(), Blame::Deadline);
        let unreachable = SshError::Unreachable { address: address(), source: io::Error::other("no route") };
        assert_eq!(unreachable.blame(), Blame::Network);
    }
}
