//! Who may do what: roles, and what a credential is good for.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::model::process::UnknownName;

/// What somebody may do; each may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Looks.
    Viewer,
    /// Orders something about machines.
    Operator,
    /// Decides who may.
    Admin,
}

impl Role {
    /// All of them, the least first.
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Admin];

    /// The name used in the database and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Role {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|role| role.as_str() == name).ok_or_else(|| UnknownName {
            what: "role",
            name: name.to_owned(),
            known: "viewer, operator, admin",
        })
    }
}

/// Whose machines a credential is good for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everybody's, and what is the fleet's as a whole.
    Everything,
    /// Those of these providers, and nothing else.
    Providers(BTreeSet<String>),
}

impl Scope {
    /// The scope that a list of providers means: none named is everything.
    #[must_use]
    pub fn of(providers: impl IntoIterator<Item = String>) -> Self {
        let providers: BTreeSet<String> = providers.into_iter().collect();
        if providers.is_empty() { Self::Everything } else { Self::Providers(providers) }
    }

    /// Whether it holds a machine of this provider. One without provider is the fleet's.
    #[must_use]
    pub fn holds(&self, provider: Option<&str>) -> bool {
        match self {
            Self::Everything => true,
            Self::Providers(providers) => provider.is_some_and(|provider| providers.contains(provider)),
        }
    }

    /// The providers, none for everything.
    #[must_use]
    pub fn providers(&self) -> Vec<String> {
        match self {
            Self::Everything => Vec::new(),
            Self::Providers(providers) => providers.iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_grow() {
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        for role in Role::ALL {
            assert_eq!(role.as_str().parse::<Role>().unwrap(), role);
        }
        assert!("root".parse::<Role>().is_err());
    }

    #[test]
    fn scope_holds_the_machines_of_its_providers() {
        let scope = Scope::of(["rack".to_owned()]);
        for (provider, held) in [(Some("rack"), true), (Some("rack2"), false), (None, false)] {
            assert_eq!(scope.holds(provider), held, "{provider:?}");
            assert!(Scope::of([]).holds(provider));
        }
    }
}
