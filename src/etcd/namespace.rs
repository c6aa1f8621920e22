//! Names of keys: each user of etcd has a part of it to itself.
//!
//! A key begins with `/` and is a name within a namespace; on the wire the namespace stands before it, as in
//! `namespaced:curator/nodes/node-1`. A namespace holds neither `:` nor `/`, so that no two of them can make the same
//! key.

/// The part of etcd that one user has to itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    before: String,
}

/// Why a namespace, or keys in it, cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Two namespaces could make the same key.
    #[error("{0:?} cannot be the name of a namespace in etcd: it is empty or holds ':' or '/'")]
    Namespace(String),
    /// It would be outside of its namespace.
    #[error("{0:?} cannot be a key in etcd: it does not begin with '/'")]
    Key(String),
}

impl Namespace {
    /// The namespace of this name.
    pub fn new(name: &str) -> Result<Self, NameError> {
        if name.is_empty() || name.contains([':', '/']) {
            return Err(NameError::Namespace(name.to_owned()));
        }
        Ok(Self { before: format!("namespaced:{name}") })
    }

    /// A key as etcd has it.
    pub(super) fn outside(&self, key: &str) -> Result<Vec<u8>, NameError> {
        if !key.starts_with('/') {
            return Err(NameError::Key(key.to_owned()));
        }
        // A new buffer for each: two keys made of one prefix at once must not write into each other.
        Ok([self.before.as_bytes(), key.as_bytes()].concat())
    }

    /// A key of etcd's as it is called here. Keys of ours are text; in one that is not, which somebody else must have
    /// put there, what is no text is replaced.
    pub(super) fn inside(&self, key: &[u8]) -> String {
        String::from_utf8_lossy(key.strip_prefix(self.before.as_bytes()).unwrap_or(key)).into_owned()
    }
}

/// Which keys are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// This one.
    One(String),
    /// All that begin with this.
    Under(String),
}

impl Keys {
    /// The name, for sentences.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::One(key) | Self::Under(key) => key,
        }
    }

    /// First key and exclusive end as etcd wants them; an empty end is the one key.
    pub(super) fn outside(&self, namespace: &Namespace) -> Result<(Vec<u8>, Vec<u8>), NameError> {
        let first = namespace.outside(self.name())?;
        let end = match self {
            Self::One(_) => Vec::new(),
            Self::Under(_) => after_all_under(&first),
        };
        Ok((first, end))
    }
}

/// The least key that is greater than all with this prefix.
fn after_all_under(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // There is none: etcd's sign for everything from the first on.
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_stand_behind_their_namespace_and_come_back_without_it() {
        let namespace = Namespace::new("curator").unwrap();
        let outside = namespace.outside("/nodes/a").unwrap();
        assert_eq!(outside, b"namespaced:curator/nodes/a");
        assert_eq!(namespace.inside(&outside), "/nodes/a");
        assert_eq!(namespace.outside("nodes"), Err(NameError::Key("nodes".to_owned())));
        for wrong in ["", "a:b", "a/b", "/"] {
            assert_eq!(Namespace::new(wrong), Err(NameError::Namespace(wrong.to_owned())));
        }
    }

    #[test]
    fn prefix_ends_before_the_next_key_that_does_not_begin_with_it() {
        let namespace = Namespace::new("a").unwrap();
        let under = Keys::Under("/nodes/".to_owned()).outside(&namespace).unwrap();
        assert_eq!(under, (b"namespaced:a/nodes/".to_vec(), b"namespaced:a/nodes0".to_vec()));
        let one = Keys::One("/nodes/".to_owned()).outside(&namespace).unwrap();
        assert_eq!(one, (b"namespaced:a/nodes/".to_vec(), Vec::new()));
        assert_eq!(after_all_under(b"a\xff\xff"), b"b");
        assert_eq!(after_all_under(b"\xff"), b"\0");
    }

    #[test]
    fn no_namespace_holds_keys_of_another() {
        let (short, long) = (Namespace::new("cur").unwrap(), Namespace::new("curator").unwrap());
        let (first, end) = Keys::Under("/".to_owned()).outside(&short).unwrap();
        let other = long.outside("/x").unwrap();
        assert!(!(first..end).contains(&other));
    }
}
