//! What a program of this release asks of the others, and what they may rely on.
//!
//! Two numbers are raised by whoever changes the built-in objects, and by nobody else:
//!
//! * [`NEEDS_OBJECTS_OF`], when a component needs objects that older releases did not make. Then no component of this
//!   release begins before they are there.
//! * [`BREAKS_API_SERVERS_BELOW`], when the objects are such that API servers of older releases cannot serve with them.
//!   Then no object is changed before all of those are gone.
//!
//! Neither may exceed the release itself, or no node would ever begin.

use crate::reconciler::release::{Release, Version};

/// The oldest release whose objects this one's components can do with.
pub const NEEDS_OBJECTS_OF: Release = Release::new(0, 1, 0);
/// The oldest release whose API servers can do with this one's objects.
pub const BREAKS_API_SERVERS_BELOW: Release = Release::new(0, 1, 0);

/// A program, as far as others have to agree with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its version.
    pub version: Version,
    /// The oldest release whose objects its components can do with.
    pub needs_objects_of: Release,
    /// The oldest release whose API servers can do with its objects.
    pub breaks_api_servers_below: Release,
}

impl Program {
    /// This program.
    #[must_use]
    pub fn own() -> Self {
        Self {
            version: own_version(),
            needs_objects_of: NEEDS_OBJECTS_OF,
            breaks_api_servers_below: BREAKS_API_SERVERS_BELOW,
        }
    }

    /// Its release.
    #[must_use]
    pub const fn release(&self) -> Release {
        self.version.release()
    }
}

/// The version that this program's nodes report.
fn own_version() -> Version {
    let numbers = Release::new(
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
        number(env!("CARGO_PKG_VERSION_PATCH")),
    );
    env!("CARGO_PKG_VERSION").parse().unwrap_or_else(|_| numbers.into())
}

/// A number that cargo has checked to be one.
const fn number(text: &str) -> u32 {
    let (bytes, mut at, mut number) = (text.as_bytes(), 0, 0);
    while at < bytes.len() {
        number = number * 10 + (bytes[at] - b'0') as u32;
        at += 1;
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_asked_that_this_release_does_not_have() {
        let own = Program::own();
        assert_eq!(own.version.as_str(), env!("CARGO_PKG_VERSION"));
        assert!(own.needs_objects_of <= own.release(), "no component would ever begin");
        assert!(own.breaks_api_servers_below <= own.release(), "it would break its own API server");
    }

    #[test]
    fn numbers_are_read_as_cargo_writes_them() {
        for (text, expected) in [("0", 0), ("7", 7), ("10", 10), ("4294967295", u32::MAX)] {
            assert_eq!(number(text), expected);
        }
    }
}
