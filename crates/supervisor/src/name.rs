//! Validated names of runnables.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// Longest name, in characters.
const MAX_LENGTH: usize = 64;

/// The name of one runnable, unique among its siblings: 1 to 64 lower-case letters, digits, dashes and underscores.
///
/// It has no dot, because dots separate the names of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunnableName(Arc<str>);

/// A text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid name of a runnable: it has 1 to 64 lower-case letters, digits, dashes and underscores"
)]
pub struct RunnableNameError(String);

impl RunnableName {
    /// Validates a text as a name.
    pub fn new(name: &str) -> Result<Self, RunnableNameError> {
        let fits = (1..=MAX_LENGTH).contains(&name.len())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_'));
        fits.then(|| Self(name.into())).ok_or_else(|| RunnableNameError(name.to_owned()))
    }
}

impl fmt::Display for RunnableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Borrow<str> for RunnableName {
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
            assert_eq!(RunnableName::new(name).unwrap().to_string(), *name);
        }
        for name in ["", "a.b", "A", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert_eq!(RunnableName::new(name), Err(RunnableNameError(name.to_owned())), "{name}");
        }
    }
}
