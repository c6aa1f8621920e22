//! Key namespaces and key selectors.
//!
//! Each user of etcd has a namespace to itself. A key begins with `/` and is a name within a namespace. On the wire the
//! namespace precedes it, as in `namespaced:curator/nodes/node-1`. A namespace contains neither `:` nor `/`, so that no
//! two of them can make the same key.

/// The part of etcd that one user has to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    prefix: String,
}

/// Why a namespace or a key is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Two namespaces could make the same key: the name is empty or has a separator in it.
    #[error("{0:?} cannot be the name of a namespace in etcd: it is empty or holds ':' or '/'")]
    Namespace(String),
    /// The key does not begin with `/`, so it would be outside its namespace.
    #[error("{0:?} cannot be a key in etcd: it does not begin with '/'")]
    Key(String),
}

impl Namespace {
    /// The namespace of this name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if name.is_empty() || name.contains([':', '/']) {
            return Err(NameError::Namespace(name.to_owned()));
        }
        Ok(Self { prefix: format!("namespaced:{name}") })
    }

    /// A key with its namespace, as etcd stores it.
    pub(super) fn to_etcd_key(&self, key: &str) -> Result<Vec<u8>, NameError> {
        if !key.starts_with('/') {
            return Err(NameError::Key(key.to_owned()));
        }
        // A new buffer for each call: two keys made of one prefix at once must not write into each other.
        Ok([self.prefix.as_bytes(), key.as_bytes()].concat())
    }

    /// A key of etcd without its namespace. Our keys are text. In a key that is not, which another program must have
    /// written, the invalid bytes are replaced.
    pub(super) fn decode_key(&self, key: &[u8]) -> String {
        String::from_utf8_lossy(key.strip_prefix(self.prefix.as_bytes()).unwrap_or(key)).into_owned()
    }
}

/// Selects one key, or all keys with a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySelector {
    /// This key and no other.
    One(String),
    /// All keys that begin with this.
    Prefix(String),
}

impl KeySelector {
    /// The key or the prefix, for messages.
    #[must_use]
    pub fn display_name(&self) -> &str {
        match self {
            Self::One(key) | Self::Prefix(key) => key,
        }
    }

    /// First key and exclusive end in etcd's encoding; an empty end selects the one key.
    pub(super) fn to_etcd_range(&self, namespace: &Namespace) -> Result<(Vec<u8>, Vec<u8>), NameError> {
        let first = namespace.to_etcd_key(self.display_name())?;
        let end = match self {
            Self::One(_) => Vec::new(),
            Self::Prefix(_) => prefix_end(&first),
        };
        Ok((first, end))
    }
}

/// The least key that is greater than all with this prefix.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // No such key exists: etcd encodes "everything from the first key on" as a zero byte.
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_prefixed_and_stripped() {
        let namespace = Namespace::new("curator").unwrap();
        let outside = namespace.to_etcd_key("/nodes/a").unwrap();
        assert_eq!(outside, b"namespaced:curator/nodes/a");
        assert_eq!(namespace.decode_key(&outside), "/nodes/a");
        assert_eq!(namespace.to_etcd_key("nodes"), Err(NameError::Key("nodes".to_owned())));
        for wrong in ["", "a:b", "a/b", "/"] {
            assert_eq!(Namespace::new(wrong), Err(NameError::Namespace(wrong.to_owned())));
        }
    }

    #[test]
    fn prefix_ends_before_the_next_key_that_does_not_begin_with_it() {
        let namespace = Namespace::new("a").unwrap();
        let under = KeySelector::Prefix("/nodes/".to_owned()).to_etcd_range(&namespace).unwrap();
        assert_eq!(under, (b"namespaced:a/nodes/".to_vec(), b"namespaced:a/nodes0".to_vec()));
        let one = KeySelector::One("/nodes/".to_owned()).to_etcd_range(&namespace).unwrap();
        assert_eq!(one, (b"namespaced:a/nodes/".to_vec(), Vec::new()));
        assert_eq!(prefix_end(b"a\xff\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
    }

    #[test]
    fn no_namespace_holds_keys_of_another() {
        let (short, long) = (Namespace::new("cur").unwrap(), Namespace::new("curator").unwrap());
        let (first, end) = KeySelector::Prefix("/".to_owned()).to_etcd_range(&short).unwrap();
        let other = long.to_etcd_key("/x").unwrap();
        assert!(!(first..end).contains(&other));
    }
}
