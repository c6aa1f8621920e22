//! Where in etcd everything of a cluster's own stands.
//!
//! All keys of the curator are below one root, so that a cluster's etcd can hold other things beside (Kubernetes has a
//! root of its own) and a snapshot of ours is one range. A kind of thing has a prefix that ends with `/`; a thing
//! of it has the prefix and one word. Because the word has no `/`, the range from `…/nodes/` to `…/nodes0`
//! (`0` is the character after `/`) holds every node and nothing else, and a key names its node in one way
//! only.

use std::fmt;

/// What all keys begin with.
pub const ROOT: &str = "/shepherd/curator/";

/// Node records, by node id.
pub const NODES: Prefix = Prefix::fixed("/shepherd/curator/nodes/");
/// Registration tickets, by ticket id.
pub const TICKETS: Prefix = Prefix::fixed("/shepherd/curator/tickets/");
/// Declarations of operators' roles, by the name of the role.
pub const DECLARATIONS: Prefix = Prefix::fixed("/shepherd/curator/declarations/");
/// Certificates that were issued, by serial number.
pub const CERTIFICATES: Prefix = Prefix::fixed("/shepherd/curator/certificates/");
/// Certificates that are refused, by serial number.
pub const REVOKED_CERTIFICATES: Prefix = Prefix::fixed("/shepherd/curator/revoked-certificates/");
/// Nodes whose certificates are all refused, by node id.
pub const REVOKED_NODES: Prefix = Prefix::fixed("/shepherd/curator/revoked-nodes/");
/// Keys of owners that were removed, by the key in hexadecimal digits.
pub const REVOKED_OWNERS: Prefix = Prefix::fixed("/shepherd/curator/revoked-owners/");
/// What there is one of in Kubernetes of the cluster: `settings`, `keys`.
pub const KUBERNETES: Prefix = Prefix::fixed("/shepherd/curator/kubernetes/");
/// What each node has of Kubernetes, by node id.
pub const KUBERNETES_NODES: Prefix = Prefix::fixed("/shepherd/curator/kubernetes-nodes/");
/// Candidates for leading, by the lease of each in hexadecimal digits.
pub const LEADER: Prefix = Prefix::fixed("/shepherd/curator/leader/");
/// What there is one of: `cluster`, `authority`.
pub const GLOBAL: Prefix = Prefix::fixed("/shepherd/curator/global/");

/// What the reconciler of Kubernetes' objects says of them. Outside of the root, so that no snapshot has it: who restores
/// one begins with no objects.
pub const RECONCILER_STATUS: &str = "/kubernetes/reconciler/status";
/// Candidates for reconciling, by the lease of each in hexadecimal digits.
pub const RECONCILER_LEADER: Prefix = Prefix::fixed("/kubernetes/reconciler/leader/");

/// Every prefix of the curator.
pub const ALL: [&Prefix; 11] = [
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

/// What the keys of one kind of thing begin with: words between slashes, with one at either end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefix(std::borrow::Cow<'static, str>);

/// Keys from `start`, included, to `end`, excluded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first key.
    pub start: String,
    /// The first key after it.
    pub end: String,
}

/// Why a text is no prefix, or no key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The prefix is malformed.
    #[error("{0:?} is no prefix of keys: it begins and ends with a slash and has a word between every two")]
    Prefix(String),
    /// The id cannot be the last word of a key.
    #[error("{id:?} cannot be a key below {prefix}: it must not be empty, nor have a slash in it")]
    Id {
        /// What was to be stored.
        id: String,
        /// Below what.
        prefix: String,
    },
    /// The key belongs to something else.
    #[error("the key {key:?} is not one of those below {prefix}")]
    Elsewhere {
        /// The key.
        key: String,
        /// Where it was looked for.
        prefix: String,
    },
}

impl Prefix {
    /// A prefix that stands in the code; a test parses each.
    const fn fixed(text: &'static str) -> Self {
        Self(std::borrow::Cow::Borrowed(text))
    }

    /// Reads a prefix such as `/a/b/`.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let refused = || KeyError::Prefix(text.to_owned());
        let inner = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')).ok_or_else(refused)?;
        if inner.split('/').any(str::is_empty) {
            return Err(refused());
        }
        Ok(Self(text.to_owned().into()))
    }

    /// The key of one thing.
    pub fn key(&self, id: impl fmt::Display) -> Result<String, KeyError> {
        let id = id.to_string();
        if id.is_empty() || id.contains('/') {
            return Err(KeyError::Id { id, prefix: self.0.to_string() });
        }
        Ok(format!("{}{id}", self.0))
    }

    /// The keys of all things.
    #[must_use]
    pub fn range(&self) -> Range {
        let start = self.0.to_string();
        // The character after '/': a prefix ends with one, so nothing else ends like this.
        let end = format!("{}0", start.trim_end_matches('/'));
        Range { start, end }
    }

    /// Whose key this is.
    pub fn id<'key>(&self, key: &'key str) -> Result<&'key str, KeyError> {
        let elsewhere = || KeyError::Elsewhere { key: key.to_owned(), prefix: self.0.to_string() };
        let id = key.strip_prefix(self.0.as_ref()).ok_or_else(elsewhere)?;
        if id.is_empty() || id.contains('/') {
            return Err(elsewhere());
        }
        Ok(id)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Range {
    /// Whether the key is in it.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.start.as_str() <= key && key < self.end.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(Prefix::parse(text).is_ok(), fits, "{text:?}");
        }
    }

    #[test]
    fn every_prefix_of_the_house_is_one_and_is_below_the_root() {
        for prefix in ALL {
            assert_eq!(&Prefix::parse(&prefix.to_string()).unwrap(), prefix);
            assert!(prefix.to_string().starts_with(ROOT), "{prefix}");
        }
    }

    #[test]
    fn no_range_of_the_house_holds_a_key_of_another() {
        for one in ALL {
            for other in ALL {
                let key = other.key("something").unwrap();
                assert_eq!(one.range().contains(&key), one == other, "{key} in {one}");
                assert_eq!(one.id(&key).is_ok(), one == other, "{key} of {one}");
            }
        }
    }

    #[test]
    fn what_is_of_the_reconciler_is_in_no_snapshot() {
        let leader = RECONCILER_LEADER.key("1").unwrap();
        assert_eq!(&Prefix::parse(&RECONCILER_LEADER.to_string()).unwrap(), &RECONCILER_LEADER);
        assert!(!leader.starts_with(ROOT) && !RECONCILER_STATUS.starts_with(ROOT));
        assert!(!RECONCILER_LEADER.range().contains(RECONCILER_STATUS));
    }

    #[test]
    fn range_holds_what_is_below_the_prefix_and_nothing_beside_it() {
        let prefix = Prefix::parse("/foo/").unwrap();
        assert_eq!(prefix.range(), Range { start: "/foo/".to_owned(), end: "/foo0".to_owned() });
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
        let prefix = Prefix::parse("/foo/").unwrap();
        assert_eq!(prefix.key("a").unwrap(), "/foo/a");
        assert_eq!(prefix.id("/foo/a"), Ok("a"));
        for wrong in ["", "a/b", "/", "/a", "a/"] {
            let error = prefix.key(wrong).unwrap_err();
            assert!(matches!(error, KeyError::Id { .. }), "{wrong:?}: {error}");
        }
        for wrong in ["/foo/", "/foo/a/b", "/bar/a", "foo/a", "/foo"] {
            assert!(prefix.id(wrong).is_err(), "{wrong:?}");
        }
    }
}
