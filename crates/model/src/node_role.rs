//! Names of node roles: built-in ones and those that operators declare.
//!
//! Operators and programs assign and remove roles by name, so a declared role is requested in the same way as a
//! built-in one. A declared role may not have the name of a built-in one.

use std::fmt;
use std::str::FromStr;

/// Longest name of a role or a service: that of a label in a host name.
const MAX_NAME_CHARS: usize = 63;

/// A role of a node. The order of the variants is the order in which nodes are described.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeRole {
    /// Runs a member of etcd and a curator.
    ConsensusMember,
    /// Runs the Kubernetes control plane.
    KubernetesController,
    /// Runs workloads of Kubernetes.
    KubernetesWorker,
    /// Runs the services of an operator's declaration.
    Declared(DeclaredRole),
}

/// The name of a declared role.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeclaredRole(String);

/// Why a text is not the name of a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleNameError {
    /// It does not have the form of a name.
    #[error(
        "{0:?} is not a valid name of a role: a name has 1 to {MAX_NAME_CHARS} lower-case letters, digits and \
         dashes, begins with a letter and does not end with a dash"
    )]
    Malformed(String),
    /// It is the name of a built-in role.
    #[error("{0:?} is a built-in role, which nobody declares: choose another name")]
    BuiltIn(String),
}

const BUILT_IN: [(&str, NodeRole); 3] = [
    ("consensus-member", NodeRole::ConsensusMember),
    ("kubernetes-controller", NodeRole::KubernetesController),
    ("kubernetes-worker", NodeRole::KubernetesWorker),
];

/// Whether this can be the name of a role or a service.
#[must_use]
pub fn is_role_name(text: &str) -> bool {
    (1..=MAX_NAME_CHARS).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && !text.ends_with('-')
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

impl fmt::Display for NodeRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConsensusMember => BUILT_IN[0].0,
            Self::KubernetesController => BUILT_IN[1].0,
            Self::KubernetesWorker => BUILT_IN[2].0,
            Self::Declared(name) => &name.0,
        })
    }
}

impl FromStr for NodeRole {
    type Err = RoleNameError;

    fn from_str(text: &str) -> Result<Self, RoleNameError> {
        match BUILT_IN.iter().find(|(name, _)| *name == text) {
            Some((_, role)) => Ok(role.clone()),
            None => text.parse().map(Self::Declared),
        }
    }
}

impl fmt::Display for DeclaredRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for DeclaredRole {
    type Err = RoleNameError;

    fn from_str(text: &str) -> Result<Self, RoleNameError> {
        if BUILT_IN.iter().any(|(name, _)| *name == text) {
            return Err(RoleNameError::BuiltIn(text.to_owned()));
        }
        if !is_role_name(text) {
            return Err(RoleNameError::Malformed(text.chars().take(100).collect()));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Joins names for people: `consensus-member, web`.
pub fn join_names<T: fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    names.into_iter().map(|name| name.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_reads_back_as_it_is_written() {
        for (name, role) in BUILT_IN {
            assert_eq!(name.parse::<NodeRole>().unwrap(), role);
            assert_eq!(role.to_string(), name);
        }
        let web: NodeRole = "web-2".parse().unwrap();
        assert_eq!(web, NodeRole::Declared("web-2".parse().unwrap()));
        assert_eq!(web.to_string(), "web-2");
    }

    #[test]
    fn name_is_a_word_of_lower_case_letters() {
        for (text, fits) in [
            ("w", true),
            ("web-server-2", true),
            ("", false),
            ("2web", false),
            ("-web", false),
            ("web-", false),
            ("Web", false),
            ("web/server", false),
            ("web server", false),
            ("wéb", false),
        ] {
            assert_eq!(text.parse::<DeclaredRole>().is_ok(), fits, "{text:?}");
        }
        assert!("w".repeat(63).parse::<DeclaredRole>().is_ok());
        assert!("w".repeat(64).parse::<DeclaredRole>().is_err());
    }

    #[test]
    fn built_in_role_cannot_be_declared() {
        let error = "kubernetes-worker".parse::<DeclaredRole>().unwrap_err();
        assert_eq!(error, RoleNameError::BuiltIn("kubernetes-worker".to_owned()));
    }
}
