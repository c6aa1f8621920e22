//! Access control: roles of credentials and the providers they may see.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::process::UnknownName;

/// What a credential may do. Each role may also do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AccessRole {
    /// Reads, and changes nothing.
    Viewer,
    /// Gives orders about machines that exist and about what they run already: power, holds, retries, retirement.
    Operator,
    /// Also decides what runs on machines and in clusters: releases, declarations, Kubernetes. That is root.
    Deployer,
    /// Also decides who has access.
    Admin,
}

impl AccessRole {
    /// All roles, the least powerful first.
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Operator, Self::Deployer, Self::Admin];

    /// The name used in the database and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Deployer => "deployer",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for AccessRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for AccessRole {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|role| role.as_str() == name).ok_or_else(|| UnknownName {
            what: "role",
            name: name.to_owned(),
            known: "viewer, operator, deployer, admin",
        })
    }
}

/// The machines that a credential covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AccessScope {
    /// All machines, and what belongs to the fleet as a whole.
    Fleet,
    /// The machines of these providers, and nothing else.
    Providers(BTreeSet<String>),
}

impl AccessScope {
    /// The scope that a list of providers means. An empty list means everything.
    #[must_use]
    pub fn from_providers(providers: impl IntoIterator<Item = String>) -> Self {
        let providers: BTreeSet<String> = providers.into_iter().collect();
        if providers.is_empty() { Self::Fleet } else { Self::Providers(providers) }
    }

    /// Whether the scope includes a machine of this provider. A machine without a provider belongs to the fleet.
    #[must_use]
    pub fn includes_provider(&self, provider: Option<&str>) -> bool {
        match self {
            Self::Fleet => true,
            Self::Providers(providers) => provider.is_some_and(|provider| providers.contains(provider)),
        }
    }

    /// The providers of the scope; empty for the whole fleet.
    #[must_use]
    pub fn providers(&self) -> Vec<String> {
        match self {
            Self::Fleet => Vec::new(),
            Self::Providers(providers) => providers.iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_ordered_by_privilege() {
        assert!(AccessRole::ALL.is_sorted_by(|less, more| less < more));
        assert_eq!(AccessRole::ALL.map(AccessRole::as_str), ["viewer", "operator", "deployer", "admin"]);
        for role in AccessRole::ALL {
            assert_eq!(role.as_str().parse::<AccessRole>().unwrap(), role);
        }
        assert!("root".parse::<AccessRole>().is_err());
    }

    #[test]
    fn scope_includes_machines_of_its_providers() {
        let scope = AccessScope::from_providers(["rack".to_owned()]);
        for (provider, held) in [(Some("rack"), true), (Some("rack2"), false), (None, false)] {
            assert_eq!(scope.includes_provider(provider), held, "{provider:?}");
            assert!(AccessScope::from_providers([]).includes_provider(provider));
        }
    }
}
