//! This release's requirements: objects it needs, API servers its objects break.
//!
//! A change of the built-in objects may raise two numbers. Nothing else raises them:
//!
//! * [`NEEDS_OBJECTS_OF`], if a component needs objects that older releases did not create. Then no component of this
//!   release starts before they exist.
//! * [`BREAKS_API_SERVERS_BELOW`], if API servers of older releases cannot serve with the objects. Then no object is
//!   changed before all of those servers are gone.
//!
//! Neither may exceed the release itself, or no node would ever start.

use crate::release::Version;
use model::kubernetes::version::ReleaseVersion;

/// The oldest release whose objects are sufficient for this release's components.
pub const NEEDS_OBJECTS_OF: ReleaseVersion = ReleaseVersion::new(0, 1, 0);
/// The oldest release whose API servers can serve with this release's objects.
pub const BREAKS_API_SERVERS_BELOW: ReleaseVersion = ReleaseVersion::new(0, 1, 0);

/// The properties of a program that others have to agree with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its full version, which its nodes report.
    pub version: Version,
    /// The oldest release whose objects are sufficient for its components.
    pub needs_objects_of: ReleaseVersion,
    /// The oldest release whose API servers can serve with its objects.
    pub breaks_api_servers_below: ReleaseVersion,
}

impl Program {
    /// The properties of the running program.
    #[must_use]
    pub fn current() -> Self {
        Self {
            version: current_version(),
            needs_objects_of: NEEDS_OBJECTS_OF,
            breaks_api_servers_below: BREAKS_API_SERVERS_BELOW,
        }
    }

    /// The three numbers of its version.
    #[must_use]
    pub const fn release(&self) -> ReleaseVersion {
        self.version.release()
    }
}

/// The version that this program's nodes report.
fn current_version() -> Version {
    let numbers = ReleaseVersion::new(
        parse_number(env!("CARGO_PKG_VERSION_MAJOR")),
        parse_number(env!("CARGO_PKG_VERSION_MINOR")),
        parse_number(env!("CARGO_PKG_VERSION_PATCH")),
    );
    env!("CARGO_PKG_VERSION").parse().unwrap_or_else(|_| numbers.into())
}

/// Parses a number that cargo has already validated.
const fn parse_number(text: &str) -> u32 {
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
    fn requirements_do_not_exceed_this_release() {
        let own = Program::current();
        assert_eq!(own.version.as_str(), env!("CARGO_PKG_VERSION"));
        assert!(own.needs_objects_of <= own.release(), "no component would ever begin");
        assert!(own.breaks_api_servers_below <= own.release(), "it would break its own API server");
    }

    #[test]
    fn numbers_are_read_as_cargo_writes_them() {
        for (text, expected) in [("0", 0), ("7", 7), ("10", 10), ("4294967295", u32::MAX)] {
            assert_eq!(parse_number(text), expected);
        }
    }
}
