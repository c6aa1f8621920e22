//! Typed identifiers of machines, sessions, intents and processes.
//!
//! A machine's id cannot be passed where a session's is expected.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Declares one identifier type. It is a macro because the types differ only in name and documentation, and a generic
/// `Id<Tag>` would show its tag in every error.
macro_rules! typed_id {
    ($(#[$doc:meta])* $name:ident, $new:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// Makes a new identifier.
            #[must_use]
            pub fn generate() -> Self {
                Self($new)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Ok(Self(Uuid::parse_str(text)?))
            }
        }
    };
}

typed_id!(
    /// One physical server, for as long as it exists. Random, so that its value spreads machines
    /// over buckets and shards.
    MachineId,
    Uuid::new_v4()
);
typed_id!(
    /// One lease of the right to work, kept alive by the process that owns it.
    SessionId,
    Uuid::now_v7()
);
typed_id!(
    /// One outward action, recorded before it is taken.
    IntentId,
    Uuid::now_v7()
);
typed_id!(
    /// One running `shepherd`; all its sessions carry it.
    ProcessId,
    Uuid::now_v7()
);
