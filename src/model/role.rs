//! The names of roles: three that are built in, and those that operators declare.
//!
//! People and programs give and take roles by name, so that a role which an operator declares is asked for in
//! the same way as one that we know. A declared role may not have the name of a built-in one.

use std::fmt;
use std::str::FromStr;

/// Longest name of a role or a service, as a label of a host name is.
const LONGEST: usize = 63;

/// What a node may be told to do, in the order in which nodes are described.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Runs a member of etcd and a curator.
    ConsensusMember,
    /// Runs the Kubernetes control plane.
    KubernetesController,
    /// Runs Kubernetes workloads.
    KubernetesWorker,
    /// Runs the services of an operator's declaration.
    Declared(DeclaredRole),
}

/// The name of an operator's role.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeclaredRole(String);

/// Why a text names no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoleNameError {
    /// It is no word.
    #[error(
        "{0:?} names no role: a name has 1 to {LONGEST} lower-case letters, digits and dashes, begins with a letter \
         and does not end with a dash"
    )]
    Malformed(String),
    /// It is ours.
    #[error("{0:?} is a built-in role, which nobody declares: choose another name")]
    BuiltIn(String),
}

const BUILT_IN: [(&str, Role); 3] = [
    ("consensus-member", Role::ConsensusMember),
    ("kubernetes-controller", Role::KubernetesController),
    ("kubernetes-worker", Role::KubernetesWorker),
];

/// Whether this can name a role or a service.
#[must_use]
pub fn is_name(text: &str) -> bool {
    (1..=LONGEST).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && !text.ends_with('-')
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConsensusMember => BUILT_IN[0].0,
            Self::KubernetesController => BUILT_IN[1].0,
            Self::KubernetesWorker => BUILT_IN[2].0,
            Self::Declared(name) => &name.0,
        })
    }
}

impl FromStr for Role {
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
        if !is_name(text) {
            return Err(RoleNameError::Malformed(text.chars().take(100).collect()));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Names as people read them: `consensus-member, web`.
pub fn told<T: fmt::Display>(names: impl IntoIterator<Item = T>) -> String {
    names.into_iter().map(|name| name.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_reads_back_as_it_is_written() {
        for (name, role) in BUILT_IN {
            assert_eq!(name.parse::<Role>().unwrap(), role);
            assert_eq!(role.to_string(), name);
        }
        let web: Role = "web-2".parse().unwrap();
        assert_eq!(web, Role::Declared("web-2".parse().unwrap()));
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
