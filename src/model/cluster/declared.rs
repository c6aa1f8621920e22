//! Roles that operators declare to a cluster: what is wanted, what its curators have, and what follows.
//!
//! What is wanted stands in the BMDB. The curators are told when they have something else, and again when they lost it, so
//! that nobody has to remember what they were told. A role that somebody declared to the curators themselves, and nobody
//! here, is theirs and left alone.

use std::collections::BTreeMap;

use prost::Message as _;
use serde::{Deserialize, Serialize};

use crate::model::cluster::plan::Step;
use crate::model::cluster::state::Seen;
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// Most roles that one cluster can have declared.
pub const MOST_DECLARED: usize = 64;

/// Largest declaration, encoded, that the fleet keeps: it goes through the API, whose requests are not larger than 64 KiB.
pub const MOST_BYTES: usize = 60 << 10;

/// By what a declaration is known: SHA-256 of its encoding without a revision.
pub type Digest = [u8; 32];

/// A role as it is to be declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declared {
    /// Its name.
    pub role: String,
    /// What it is to be.
    pub digest: Digest,
    /// Whether it is to be forgotten.
    pub withdrawn: bool,
}

/// As it is kept: the revision is the curators' to count.
#[must_use]
pub fn encoded(declared: &wire::Declaration) -> Vec<u8> {
    wire::Declaration { revision: 0, ..declared.clone() }.encode_to_vec()
}

/// Whether the fleet keeps it; if not, a sentence.
pub fn check_size(declared: &wire::Declaration) -> Result<(), String> {
    match declared.encoded_len() {
        size if size > MOST_BYTES => Err(format!(
            "role {} was not declared: it has {size} bytes, and {MOST_BYTES} can be kept; make its files artefacts",
            declared.role
        )),
        _ => Ok(()),
    }
}

/// By what it is known.
#[must_use]
pub fn digest(declared: &wire::Declaration) -> Digest {
    let digest = ring::digest::digest(&ring::digest::SHA256, &encoded(declared));
    let mut known = Digest::default();
    known.copy_from_slice(digest.as_ref());
    known
}

/// What the curators are to be told, and what is waited for, sentences.
#[must_use]
pub fn next(declared: &[Declared], seen: &Seen) -> (Vec<Step>, Vec<String>) {
    let (mut steps, mut waits) = (Vec::new(), Vec::new());
    for Declared { role, digest, withdrawn } in declared {
        let role = role.clone();
        match (withdrawn, seen.declared.get(&role)) {
            (false, Some(known)) if known == digest => {}
            (false, _) => steps.push(Step::Declare { role }),
            (true, None) => steps.push(Step::ForgetDeclaration { role }),
            (true, Some(_)) => {
                let with = seen.nodes.iter().filter(|node| node.roles.contains(&role)).count();
                match with {
                    0 => steps.push(Step::Undeclare { role }),
                    _ => {
                        waits
                            .push(format!("role {role} is withdrawn, and {with} of its nodes have it still"));
                    }
                }
            }
        }
    }
    (steps, waits)
}

/// What the curators have, by role.
#[must_use]
pub fn known(declarations: &[wire::Declaration]) -> BTreeMap<String, Digest> {
    declarations.iter().map(|declared| (declared.role.clone(), digest(declared))).collect()
}

/// A declared role as people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclarationView {
    /// Its name.
    pub role: String,
    /// Its services.
    pub services: Vec<String>,
    /// SHA-256 of the declaration, in hexadecimal digits.
    pub digest: String,
    /// When it was declared.
    pub declared_at: Timestamp,
    /// By whom.
    pub declared_by: String,
    /// Whether it is withdrawn.
    pub withdrawn: bool,
}

/// A service of a node, as the node said last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceView {
    /// The role that it is of.
    pub role: String,
    /// Its name in the role.
    pub service: String,
    /// What it does: `waiting`, `starting`, `healthy`, `unhealthy`, `backing off`, `ended` or `stopping`.
    pub state: String,
    /// Since when, by the node's clock.
    pub since: Option<Timestamp>,
    /// How often it was started again.
    pub restarts: u32,
    /// Why it is not running, or not well; empty when it is.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cluster::state::{Health, Node, NodeState};

    fn declared(role: &str, digest: u8, withdrawn: bool) -> Declared {
        Declared { role: role.to_owned(), digest: [digest; 32], withdrawn }
    }

    fn seen(declared: &[(&str, u8)], node_has: &[&str]) -> Seen {
        let node = Node {
            id: "node-1".to_owned(),
            key: [1; 32],
            machine: None,
            state: NodeState::Up,
            roles: node_has.iter().map(|&role| role.to_owned()).collect(),
            health: Health::Healthy,
            services: Vec::new(),
            kubernetes: None,
        };
        Seen {
            nodes: vec![node],
            declared: declared.iter().map(|(role, digest)| ((*role).to_owned(), [*digest; 32])).collect(),
            ..Seen::default()
        }
    }

    #[test]
    fn curators_are_told_what_they_do_not_have_and_forget_what_nobody_has() {
        let role = || "web".to_owned();
        let told = || vec![Step::Declare { role: role() }];
        for (wanted, has, node_has, steps, waits) in [
            (declared("web", 1, false), vec![], vec![], told(), 0),
            (declared("web", 1, false), vec![("web", 1)], vec!["web"], vec![], 0),
            (declared("web", 1, false), vec![("web", 2)], vec!["web"], told(), 0),
            (declared("web", 1, true), vec![("web", 1)], vec!["web"], vec![], 1),
            (declared("web", 1, true), vec![("web", 2)], vec![], vec![Step::Undeclare { role: role() }], 0),
            (declared("web", 1, true), vec![], vec![], vec![Step::ForgetDeclaration { role: role() }], 0),
        ] {
            let (planned, waited) = next(std::slice::from_ref(&wanted), &seen(&has, &node_has));
            assert_eq!((planned, waited.len()), (steps, waits), "{wanted:?} {has:?} {node_has:?}");
        }
    }

    #[test]
    fn what_others_declared_is_left_alone() {
        assert_eq!(next(&[], &seen(&[("theirs", 1)], &[])), (vec![], vec![]));
    }

    #[test]
    fn declaration_that_is_too_large_is_refused_in_words() {
        let just = wire::Declaration { role: "x".repeat(MOST_BYTES - 4), ..Default::default() };
        let more = wire::Declaration { revision: 1, ..just.clone() };
        assert_eq!(just.encoded_len(), MOST_BYTES);
        assert_eq!(check_size(&just), Ok(()));
        assert!(check_size(&more).unwrap_err().contains("make its files artefacts"));
    }

    #[test]
    fn revision_is_no_part_of_what_is_declared_and_all_else_is() {
        let declared = wire::Declaration { role: "web".to_owned(), revision: 7, ..Default::default() };
        let again = wire::Declaration { revision: 8, ..declared.clone() };
        let other = wire::Declaration { services: vec![wire::Service::default()], ..declared.clone() };
        assert_eq!(digest(&declared), digest(&again));
        assert_ne!(digest(&declared), digest(&other));
        assert_eq!(known(&[again])["web"], digest(&declared));
    }
}
