//! What a runnable is called among its siblings.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// Longest name, in characters.
const LONGEST: usize = 64;

/// The name of one runnable: 1 to 64 lower-case letters, digits, dashes and underscores.
///
/// A dot stands between the names of a path, so that there is none in a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Arc<str>);

/// Why a name is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no name of a runnable: it has 1 to 64 lower-case letters, digits, dashes and underscores")]
pub struct NameError(String);

impl Name {
    /// Takes a name if it is one.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let fits = (1..=LONGEST).contains(&name.len())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_'));
        fits.then(|| Self(name.into())).ok_or_else(|| NameError(name.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_a_short_word_without_a_dot() {
        for name in ["a", "control-plane", "web_2", &"x".repeat(64)] {
            assert_eq!(Name::new(name).unwrap().to_string(), *name);
        }
        for name in ["", "a.b", "A", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert_eq!(Name::new(name), Err(NameError(name.to_owned())), "{name}");
        }
    }
}
