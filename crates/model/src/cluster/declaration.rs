//! Role declarations of a cluster: what is stored, its digest, and how it is shown.
//!
//! The desired declarations are in the BMDB. A digest identifies a declaration without its revision, because only the
//! curators count revisions. [`plan`][crate::cluster::plan] compares these digests with those of the curators. The digest
//! covers the signature, so that a declaration that is signed later replaces the unsigned one.

use std::collections::BTreeMap;

use prost::Message as _;
use proto::curator::v1 as wire;
use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// Most roles that can be declared to one cluster.
pub const MAX_DECLARED_ROLES: usize = 64;

/// Largest encoded declaration in bytes that the fleet stores: the API, which carries it, limits requests to 64 KiB.
pub const MAX_DECLARATION_BYTES: usize = 60 << 10;

/// Identifies a declaration: SHA-256 of its encoding without a revision.
pub type Digest = [u8; 32];

/// The desired declaration of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesiredDeclaration {
    /// Name of the declared role.
    pub role: String,
    /// Digest of the desired declaration.
    pub digest: Digest,
    /// Whether the curators have to forget the role.
    pub withdrawn: bool,
}

/// Encodes a declaration for the BMDB, without its revision: only the curators count revisions.
#[must_use]
pub fn encode_declaration(declared: &wire::Declaration) -> Vec<u8> {
    wire::Declaration { revision: 0, ..declared.clone() }.encode_to_vec()
}

/// Encodes what is signed of a declaration: all of it but its revision and its signature.
#[must_use]
pub fn encode_signed_content(declared: &wire::Declaration) -> Vec<u8> {
    encode_declaration(&attach_signature(declared, ""))
}

/// The declaration with this signature in place of its own. An empty text is none.
#[must_use]
pub fn attach_signature(declared: &wire::Declaration, signature: &str) -> wire::Declaration {
    wire::Declaration { signature: signature.to_owned(), ..declared.clone() }
}

/// Checks that the fleet can store the declaration; the error is a sentence.
pub fn check_declaration_size(declared: &wire::Declaration) -> Result<(), String> {
    match declared.encoded_len() {
        size if size > MAX_DECLARATION_BYTES => Err(format!(
            "role {} was not declared: it has {size} bytes, and {MAX_DECLARATION_BYTES} is the maximum; upload its files as artefacts",
            declared.role
        )),
        _ => Ok(()),
    }
}

/// The digest that identifies a declaration.
#[must_use]
pub fn declaration_digest(declared: &wire::Declaration) -> Digest {
    let digest = ring::digest::digest(&ring::digest::SHA256, &encode_declaration(declared));
    let mut known = Digest::default();
    known.copy_from_slice(digest.as_ref());
    known
}

/// Digests of the declarations that the curators have, by role.
#[must_use]
pub fn digests_by_role(declarations: &[wire::Declaration]) -> BTreeMap<String, Digest> {
    declarations.iter().map(|declared| (declared.role.clone(), declaration_digest(declared))).collect()
}

/// A declared role as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeclarationView {
    /// Name of the declared role.
    pub role: String,
    /// Names of its services.
    pub services: Vec<String>,
    /// SHA-256 of the declaration, in hexadecimal digits.
    pub digest: String,
    /// When it was declared.
    pub declared_at: Timestamp,
    /// Operator who declared the role.
    pub declared_by: String,
    /// Whether an operator has withdrawn it.
    pub withdrawn: bool,
}

/// A service of a node, from the node's last report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceView {
    /// The role that the service belongs to.
    pub role: String,
    /// Name of the service within the role.
    pub service: String,
    /// Its state: `waiting`, `starting`, `healthy`, `unhealthy`, `backing off`, `ended` or `stopping`.
    pub state: String,
    /// When the state began, by the node's clock.
    pub since: Option<Timestamp>,
    /// How often it was restarted.
    pub restarts: u32,
    /// Why it is not running or not healthy; empty if it is healthy.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversized_declaration_is_rejected_with_a_reason() {
        let just = wire::Declaration { role: "x".repeat(MAX_DECLARATION_BYTES - 4), ..Default::default() };
        let more = wire::Declaration { revision: 1, ..just.clone() };
        assert_eq!(just.encoded_len(), MAX_DECLARATION_BYTES);
        assert_eq!(check_declaration_size(&just), Ok(()));
        assert!(check_declaration_size(&more).unwrap_err().contains("upload its files as artefacts"));
    }

    #[test]
    fn digest_covers_everything_but_the_revision() {
        let declared = wire::Declaration { role: "web".to_owned(), revision: 7, ..Default::default() };
        let again = wire::Declaration { revision: 8, ..declared.clone() };
        let other = wire::Declaration { services: vec![wire::Service::default()], ..declared.clone() };
        assert_eq!(declaration_digest(&declared), declaration_digest(&again));
        assert_ne!(declaration_digest(&declared), declaration_digest(&other));
        assert_eq!(digests_by_role(&[again])["web"], declaration_digest(&declared));
    }

    #[test]
    fn signature_counts_for_the_digest_and_is_no_part_of_what_is_signed() {
        let declared = wire::Declaration { role: "web".to_owned(), revision: 7, ..Default::default() };
        let signed = attach_signature(&declared, "signed");
        assert_ne!(declaration_digest(&declared), declaration_digest(&signed));
        assert_eq!(encode_signed_content(&declared), encode_declaration(&declared));
        assert_eq!(encode_signed_content(&signed), encode_declaration(&declared));
        assert_eq!(attach_signature(&signed, ""), declared);
    }
}
