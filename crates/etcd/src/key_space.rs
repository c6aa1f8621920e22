//! The etcd key layout: prefixes and ranges of all records.
//!
//! All keys of the curator are below one root, so that a cluster's etcd can hold other things beside them (Kubernetes
//! has a root of its own) and a snapshot of the curator's records is one range. Each kind of record has a prefix that
//! ends with `/`; the key of a record is the prefix and one word. The word has no `/`. So the range from `…/nodes/` to
//! `…/nodes0` (`0` is the character after `/`) holds every node and nothing else, and a node has exactly one key.

use std::fmt;

/// The prefix of all keys.
pub const ROOT: &str = "/shepherd/curator/";

/// Node records, by node id.
pub const NODES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/nodes/");
/// Registration tickets, by ticket id.
pub const TICKETS: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/tickets/");
/// Declarations of operators' roles, by the name of the role.
pub const DECLARATIONS: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/declarations/");
/// Issued certificates, by serial number.
pub const CERTIFICATES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/certificates/");
/// Revoked certificates, by serial number.
pub const REVOKED_CERTIFICATES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/revoked-certificates/");
/// Nodes whose certificates are all revoked, by node id.
pub const REVOKED_NODES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/revoked-nodes/");
/// Keys of removed owners, by the key in hexadecimal digits.
pub const REVOKED_OWNERS: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/revoked-owners/");
/// Singleton records of the cluster's Kubernetes: `settings`, `keys`.
pub const KUBERNETES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/kubernetes/");
/// Kubernetes allocations of each node, by node id.
pub const KUBERNETES_NODES: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/kubernetes-nodes/");
/// Candidates for the leadership, by the lease of each in hexadecimal digits.
pub const LEADER: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/leader/");
/// Singleton records: `cluster`, `authority`, `statement`.
pub const GLOBAL: KeyPrefix = KeyPrefix::from_static("/shepherd/curator/global/");

/// The status of the reconciler of Kubernetes objects. It is outside the root, so that no snapshot has it: a restored
/// cluster begins without objects.
pub const RECONCILER_STATUS: &str = "/kubernetes/reconciler/status";
/// Candidates for the reconciler's leadership, by the lease of each in hexadecimal digits.
pub const RECONCILER_LEADER: KeyPrefix = KeyPrefix::from_static("/kubernetes/reconciler/leader/");
/// The lock of the consensus member that restarts its etcd. It is outside the root: a restored lock would have no lease,
/// and would never end.
pub const PEER_RESTART: &str = "/etcd/peer-restart";

/// The prefix of one kind of record: words between slashes, with a slash at either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPrefix(std::borrow::Cow<'static, str>);

/// Keys from `start`, included, to `end`, excluded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// The first key that may be in the range.
    pub start: String,
    /// The first key after the range.
    pub end: String,
}

/// Why a text is not a prefix, or not a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The prefix is malformed.
    #[error(
        "{0:?} is not a key prefix: a prefix begins and ends with a slash, and has a word between each two slashes"
    )]
    InvalidPrefix(String),
    /// The id cannot be the last word of a key.
    #[error("{id:?} cannot be a key below {prefix}: it must not be empty, nor have a slash in it")]
    InvalidId {
        /// The id that was rejected.
        id: String,
        /// The prefix of the key that was to be made.
        prefix: String,
    },
    /// The key belongs to another kind of record.
    #[error("the key {key:?} is not one of those below {prefix}")]
    OtherPrefix {
        /// The key that does not have the prefix.
        key: String,
        /// The prefix that was expected.
        prefix: String,
    },
}

impl KeyPrefix {
    /// A prefix in the source code; a test parses each.
    const fn from_static(text: &'static str) -> Self {
        Self(std::borrow::Cow::Borrowed(text))
    }

    /// Reads a prefix such as `/a/b/`.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let refused = || KeyError::InvalidPrefix(text.to_owned());
        let inner = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')).ok_or_else(refused)?;
        if inner.split('/').any(str::is_empty) {
            return Err(refused());
        }
        Ok(Self(text.to_owned().into()))
    }

    /// The key of the record with this id.
    pub fn key(&self, id: impl fmt::Display) -> Result<String, KeyError> {
        let id = id.to_string();
        if id.is_empty() || id.contains('/') {
            return Err(KeyError::InvalidId { id, prefix: self.0.to_string() });
        }
        Ok(format!("{}{id}", self.0))
    }

    /// The range of all records with this prefix.
    #[must_use]
    pub fn range(&self) -> KeyRange {
        let start = self.0.to_string();
        // The character after '/': a prefix ends with one, so nothing else ends like this.
        let end = format!("{}0", start.trim_end_matches('/'));
        KeyRange { start, end }
    }

    /// The id in a key with this prefix.
    pub fn id_of<'key>(&self, key: &'key str) -> Result<&'key str, KeyError> {
        let elsewhere = || KeyError::OtherPrefix { key: key.to_owned(), prefix: self.0.to_string() };
        let id = key.strip_prefix(self.0.as_ref()).ok_or_else(elsewhere)?;
        if id.is_empty() || id.contains('/') {
            return Err(elsewhere());
        }
        Ok(id)
    }
}

impl fmt::Display for KeyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl KeyRange {
    /// Whether the key is in the range.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.start.as_str() <= key && key < self.end.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every prefix of the curator.
    const ALL_PREFIXES: [&KeyPrefix; 11] = [
        &NODES,
        &TICKETS,
        &DECLARATIONS,
        &CERTIFICATES,
        &REVOKED_CERTIFICATES,
        &REVOKED_NODES,
        &REVOKED_OWNERS,
        &KUBERNETES,
        &KUBERNETES_NODES,
        &LEADER,
        &GLOBAL,
    ];

    #[test]
    fn prefix_has_a_word_between_every_two_slashes() {
        for (text, fits) in [
            ("/foo/", true),
            ("/foo/bar/", true),
            ("", false),
            ("/", false),
            ("//", false),
            ("/foo", false),
            ("foo/", false),
            ("foo", false),
            ("//foo/", false),
            ("/foo//", false),
            ("/foo//bar/", false),
        ] {
            assert_eq!(KeyPrefix::parse(text).is_ok(), fits, "{text:?}");
        }
    }

    #[test]
    fn every_prefix_is_valid_and_below_the_root() {
        for prefix in ALL_PREFIXES {
            assert_eq!(&KeyPrefix::parse(&prefix.to_string()).unwrap(), prefix);
            assert!(prefix.to_string().starts_with(ROOT), "{prefix}");
        }
    }

    #[test]
    fn prefix_ranges_do_not_overlap() {
        for one in ALL_PREFIXES {
            for other in ALL_PREFIXES {
                let key = other.key("something").unwrap();
                assert_eq!(one.range().contains(&key), one == other, "{key} in {one}");
                assert_eq!(one.id_of(&key).is_ok(), one == other, "{key} of {one}");
            }
        }
    }

    #[test]
    fn keys_of_the_reconciler_and_locks_are_outside_snapshots() {
        assert!(!PEER_RESTART.starts_with(ROOT));
        let leader = RECONCILER_LEADER.key("1").unwrap();
        assert_eq!(&KeyPrefix::parse(&RECONCILER_LEADER.to_string()).unwrap(), &RECONCILER_LEADER);
        assert!(!leader.starts_with(ROOT) && !RECONCILER_STATUS.starts_with(ROOT));
        assert!(!RECONCILER_LEADER.range().contains(RECONCILER_STATUS));
    }

    #[test]
    fn range_contains_exactly_the_keys_below_the_prefix() {
        let prefix = KeyPrefix::parse("/foo/").unwrap();
        assert_eq!(prefix.range(), KeyRange { start: "/foo/".to_owned(), end: "/foo0".to_owned() });
        for (key, inside) in [
            ("/foo/a", true),
            ("/foo/~", true),
            ("/foo/\u{10ffff}", true),
            ("/foo/", true),
            ("/foo", false),
            ("/foo0", false),
            ("/fooa/a", false),
            ("/fo/a", false),
        ] {
            assert_eq!(prefix.range().contains(key), inside, "{key}");
        }
    }

    #[test]
    fn id_is_one_word() {
        let prefix = KeyPrefix::parse("/foo/").unwrap();
        assert_eq!(prefix.key("a").unwrap(), "/foo/a");
        assert_eq!(prefix.id_of("/foo/a"), Ok("a"));
        for wrong in ["", "a/b", "/", "/a", "a/"] {
            let error = prefix.key(wrong).unwrap_err();
            assert!(matches!(error, KeyError::InvalidId { .. }), "{wrong:?}: {error}");
        }
        for wrong in ["/foo/", "/foo/a/b", "/bar/a", "foo/a", "/foo"] {
            assert!(prefix.id_of(wrong).is_err(), "{wrong:?}");
        }
    }
}
