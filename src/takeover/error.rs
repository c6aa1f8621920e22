//! What can go wrong between this host and an SSH host, told apart.
//!
//! A loop that sees only "SSH failed" can do nothing but try again. Whether the
//! machine is at fault (and a recovery may help), the network (and many
//! machines fail alike), or the configuration (and only a person can help)
//! decides what happens next, so every error says so in [`SshError::blame`].

use std::io;
use std::time::Duration;

use crate::model::host_key::HostKey;

/// Where the cause of a failure most likely lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blame {
    /// On the machine: trying again, or recovering it, may help.
    Machine,
    /// Between here and the machine.
    Network,
    /// In what we were told: an address, a user, a key. Trying again alone will not help.
    Configuration,
    /// Nobody's: the time that the caller could give ran out.
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
    list(expected)
)]
pub struct HostKeyChanged {
    /// Host and port.
    pub address: String,
    /// The pinned keys.
    pub expected: Vec<HostKey>,
    /// What the host presented.
    pub offered: HostKey,
}

/// Why an SSH connection, or a command on it, failed.
#[derive(Debug, thiserror::Error)]
pub enum SshError {
    /// The host's name has no address.
    #[error("the SSH host {address} has no address: {source}; check the address in the device list")]
    Unresolvable {
        /// Host and port.
        address: String,
        /// What the resolver said.
        source: io::Error,
    },
    /// The host answered that nothing listens on the port.
    #[error("{address} refused the SSH connection: nothing listens there, or a firewall rejects it")]
    Refused {
        /// Host and port.
        address: String,
    },
    /// The connection could not be made for another reason.
    #[error("cannot connect to {address} by SSH: {source}")]
    Unreachable {
        /// Host and port.
        address: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Nothing came back within the limit.
    #[error("{address} did not answer within {} ({flag}) while {doing}", seconds(*limit))]
    Timeout {
        /// Host and port.
        address: String,
        /// What was being done.
        doing: &'static str,
        /// The limit that passed.
        limit: Duration,
        /// The flag that sets it, for whoever has a slow line.
        flag: &'static str,
    },
    /// The two sides could not agree on a protocol.
    #[error("the SSH handshake with {address} failed: {reason}")]
    Handshake {
        /// Host and port.
        address: String,
        /// What happened.
        reason: String,
    },
    /// The host has only RSA host keys.
    #[error(
        "{address} offers only RSA host keys, which Shepherd does not accept; give it an Ed25519 host key \
         (run `ssh-keygen -A` on it and restart its SSH server)"
    )]
    RsaOnly {
        /// Host and port.
        address: String,
    },
    /// The host presented another key than the pinned one.
    #[error(transparent)]
    HostKeyChanged(Box<HostKeyChanged>),
    /// The host accepted none of the ways to log in that we have.
    #[error(
        "{address} refused to let {user} in by {}; it accepts {}. Add this line to that user's authorized_keys: {public_key}",
        words(tried, "nothing"),
        words(accepted, "nothing that it names")
    )]
    AuthenticationRefused {
        /// Host and port.
        address: String,
        /// The user that was tried.
        user: String,
        /// What was tried, in order.
        tried: Vec<&'static str>,
        /// What the host said could go on.
        accepted: Vec<String>,
        /// Our public key, as an `authorized_keys` line.
        public_key: String,
    },
    /// The host let us in but does not run commands.
    #[error("{address} refused to run a command while {doing}: is its user restricted to something else?")]
    ExecRefused {
        /// Host and port.
        address: String,
        /// What was being done.
        doing: &'static str,
    },
    /// The connection ended before the answer.
    #[error("the SSH connection to {address} was lost while {doing}: {reason}")]
    ConnectionLost {
        /// Host and port.
        address: String,
        /// What was being done.
        doing: &'static str,
        /// What is known of why.
        reason: String,
    },
    /// The caller's deadline passed.
    #[error("the time for this work ran out while {doing} ({address}); it is tried again with a new lease")]
    Deadline {
        /// Host and port.
        address: String,
        /// What was being done.
        doing: &'static str,
    },
}

impl SshError {
    /// Where the cause most likely lies.
    #[must_use]
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Refused { .. } | Self::Handshake { .. } => Blame::Machine,
            Self::Unreachable { .. } | Self::Timeout { .. } | Self::ConnectionLost { .. } => Blame::Network,
            Self::Unresolvable { .. }
            | Self::RsaOnly { .. }
            | Self::HostKeyChanged(_)
            | Self::AuthenticationRefused { .. }
            | Self::ExecRefused { .. } => Blame::Configuration,
            Self::Deadline { .. } => Blame::Deadline,
        }
    }
}

fn list(keys: &[HostKey]) -> String {
    words(&keys.iter().map(ToString::to_string).collect::<Vec<_>>(), "none")
}

fn words<W: AsRef<str>>(words: &[W], none: &str) -> String {
    if words.is_empty() {
        return none.to_owned();
    }
    words.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

fn seconds(limit: Duration) -> String {
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
    fn a_changed_key_is_told_with_both_fingerprints_and_what_to_do() {
        let error = SshError::HostKeyChanged(Box::new(HostKeyChanged {
            address: address(),
            expected: vec![key(1)],
            offered: key(2),
        }));
        insta::assert_snapshot!(error, @"192.0.2.7:22 presented the SSH host key ssh-ed25519 SHA256:u3K05Osp3FkyhmjzLgUR46wOXOQCaxWRllIW5Jyh9dc where ssh-ed25519 SHA256:J+zQpZjnb4ov0mTUJ98KEZkD6OrjhOR4kCVBdW8IndE is pinned, so nothing was sent to it. Either the machine was reinstalled or replaced, or something else answers at its address; a person who knows which must allow the new key before Shepherd connects again");
        assert_eq!(error.blame(), Blame::Configuration);
    }

    #[test]
    fn a_refused_login_says_what_was_tried_and_what_would_work() {
        let error = SshError::AuthenticationRefused {
            address: address(),
            user: "root".to_owned(),
            tried: vec!["publickey", "password"],
            accepted: vec!["publickey".to_owned(), "keyboard-interactive".to_owned()],
            public_key: "ssh-ed25519 AAAA shepherd".to_owned(),
        };
        insta::assert_snapshot!(error, @"192.0.2.7:22 refused to let root in by publickey, password; it accepts publickey, keyboard-interactive. Add this line to that user's authorized_keys: ssh-ed25519 AAAA shepherd");
    }

    #[test]
    fn an_address_without_an_answer_is_told_by_what_was_missing() {
        let refused = SshError::Refused { address: address() };
        insta::assert_snapshot!(refused, @"192.0.2.7:22 refused the SSH connection: nothing listens there, or a firewall rejects it");
        let unresolvable =
            SshError::Unresolvable { address: address(), source: io::Error::other("no such name") };
        insta::assert_snapshot!(unresolvable, @"the SSH host 192.0.2.7:22 has no address: no such name; check the address in the device list");
        let timeout = SshError::Timeout {
            address: address(),
            doing: "connecting",
            limit: Duration::from_secs(2),
            flag: "--agent_ssh_connect_timeout",
        };
        insta::assert_snapshot!(timeout, @"192.0.2.7:22 did not answer within 2 s (--agent_ssh_connect_timeout) while connecting");
        let lost = SshError::ConnectionLost {
            address: address(),
            doing: "uploading",
            reason: "it closed".to_owned(),
        };
        insta::assert_snapshot!(lost, @"the SSH connection to 192.0.2.7:22 was lost while uploading: it closed");
        let deadline = SshError::Deadline { address: address(), doing: "probing" };
        insta::assert_snapshot!(deadline, @"the time for this work ran out while probing (192.0.2.7:22); it is tried again with a new lease");
        let rsa = SshError::RsaOnly { address: address() };
        insta::assert_snapshot!(rsa, @"192.0.2.7:22 offers only RSA host keys, which Shepherd does not accept; give it an Ed25519 host key (run `ssh-keygen -A` on it and restart its SSH server)");
    }

    #[test]
    fn each_failure_says_where_its_cause_lies() {
        assert_eq!(SshError::Refused { address: address() }.blame(), Blame::Machine);
        assert_eq!(SshError::RsaOnly { address: address() }.blame(), Blame::Configuration);
        assert_eq!(SshError::Deadline { address: address(), doing: "x" }.blame(), Blame::Deadline);
        let unreachable = SshError::Unreachable { address: address(), source: io::Error::other("no route") };
        assert_eq!(unreachable.blame(), Blame::Network);
    }
}
