//! Signed declarations: what gives root on the nodes of a cluster, and who answers for it.
//!
//! Two kinds of declaration give root there: the services of a role, if they run as root, run a program of the node or
//! request privileges; and the objects of an add-on of Kubernetes, which may ask for paths, the network and capabilities
//! of the host. A token alone must not be enough for either. Where the two-person rule is on, a second admin approves it.
//! A signature with a key of the shepherd takes the place of that approval, and is required where the rule is off. The key
//! is in no database.
//!
//! A role is signed in the encoding that the bare metal database stores, an add-on as the file of its objects. The trusted
//! comment has the kind `declaration`, the name of the role or the add-on, and the architecture `any`.
//!
//! Shepherds verify these signatures, and machines do not: they receive neither.

use crate::signed_artefact::signature::ArtefactSignature;
use crate::signed_artefact::signed_fields::{ANY_ARCHITECTURE, ArtefactKind};
use crate::signed_artefact::signing_key::SigningKey;
use crate::signed_artefact::signing_trust::SigningTrust;
use crate::signed_artefact::{ExpectedFields, SignatureRejection, decide_acceptance};

/// Who answers for a declaration that gives root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclarationProof {
    /// The holder of a signing key.
    Signed,
    /// The two-person rule decides: a second admin where it is on, and nobody else where it is off.
    TwoPersonRule,
    /// Nobody yet: the holder of a signing key has to.
    SignatureRequired,
}

/// Decides who answers for a declaration that gives root.
///
/// `is_signed` is whether a key in `trust` signed it. `requires_two` is whether the two-person rule is on. A shepherd
/// without keys requires no signature.
#[must_use]
pub fn decide_declaration(
    is_signed: bool,
    trust: &SigningTrust,
    requires_two: bool,
    allows_unsigned: bool,
) -> DeclarationProof {
    if is_signed {
        DeclarationProof::Signed
    } else if requires_two || allows_unsigned || trust.keys().is_empty() {
        DeclarationProof::TwoPersonRule
    } else {
        DeclarationProof::SignatureRequired
    }
}

/// Verifies the signature of a declared role with the keys of a shepherd. `content` is the encoding of the declaration. The
/// error is a sentence.
pub fn verify_declaration(
    signature: &ArtefactSignature,
    role: &str,
    content: &[u8],
    trust: &SigningTrust,
) -> Result<(), String> {
    let key = find_declaration_key(signature, role, trust).map_err(|error| error.to_string())?;
    signature.verify(key, content).map_err(|error| error.to_string())
}

/// Whether a key of a shepherd signed the objects of this add-on. A shepherd verified the signature when the file was
/// added.
#[must_use]
pub fn is_signed_add_on(signature: Option<&str>, add_on: &str, trust: &SigningTrust) -> bool {
    let signature = signature.and_then(|text| ArtefactSignature::parse(text).ok());
    signature.is_some_and(|signature| find_declaration_key(&signature, add_on, trust).is_ok())
}

/// The key to verify the signature of a declaration with, if its fields are right.
fn find_declaration_key<'t>(
    signature: &ArtefactSignature,
    name: &str,
    trust: &'t SigningTrust,
) -> Result<&'t SigningKey, SignatureRejection> {
    let expected = ExpectedFields {
        kind: ArtefactKind::Declaration,
        name: Some(name.to_owned()),
        version: None,
        architecture: Some(ANY_ARCHITECTURE.to_owned()),
    };
    decide_acceptance(Some(signature), &expected, trust)?.ok_or(SignatureRejection::NoKeys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signed_artefact::tests::{BY_FIRST, FIRST_KEY, PROGRAM, SECOND_KEY, key, signature};

    /// Signature of the program with the first key, as the declaration of a role.
    const SIGNATURE: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
        "trusted comment: shepherd kind=declaration name=web version=1.4.0 architecture=any minimum-version=1.2.0\n",
        "OAoZ6EjE9UohPBZvKwZO6UUzQYcvWgZFrIM34IC/WwTisLr7JwAAG0/dS4EzbDHcb+DGT7IXb/Hl1SBQGT9/Dw==\n",
    );

    fn trust(text: &str) -> SigningTrust {
        SigningTrust::pinning(vec![key(text)])
    }

    #[test]
    fn declaration_is_signed_or_the_two_person_rule_decides() {
        use DeclarationProof::{SignatureRequired, Signed, TwoPersonRule};
        let (keys, none) = (trust(FIRST_KEY), SigningTrust::default());
        for (is_signed, trust, requires_two, allows_unsigned, expected) in [
            (true, &keys, false, false, Signed),
            (true, &keys, true, false, Signed),
            (false, &keys, true, false, TwoPersonRule),
            (false, &keys, false, true, TwoPersonRule),
            (false, &none, false, false, TwoPersonRule),
            (false, &keys, false, false, SignatureRequired),
        ] {
            let decided = decide_declaration(is_signed, trust, requires_two, allows_unsigned);
            assert_eq!(decided, expected, "{is_signed} {requires_two} {allows_unsigned}");
        }
    }

    #[test]
    fn signature_of_a_role_is_of_this_declaration_by_a_key_of_the_shepherd() {
        let verify = |text: &str, role: &str, content: &[u8], key: &str| {
            verify_declaration(&signature(text), role, content, &trust(key))
        };
        assert_eq!(verify(SIGNATURE, "web", PROGRAM, FIRST_KEY), Ok(()));
        for (signed, role, content, key, text) in [
            (SIGNATURE, "web", PROGRAM, SECOND_KEY, "which is not one of the pinned keys"),
            (SIGNATURE, "db", PROGRAM, FIRST_KEY, "its signature is for name web, and db is expected"),
            (SIGNATURE, "web", b"another".as_slice(), FIRST_KEY, "its signature is not valid"),
            (BY_FIRST, "roleserver", PROGRAM, FIRST_KEY, "for kind release, and declaration is expected"),
        ] {
            let error = verify(signed, role, content, key).unwrap_err();
            assert!(error.contains(text), "{text}: {error}");
        }
        let error =
            verify_declaration(&signature(SIGNATURE), "web", PROGRAM, &SigningTrust::default()).unwrap_err();
        assert!(error.contains("--signing_keys_path"), "{error}");
    }

    #[test]
    fn add_on_is_signed_under_its_own_name() {
        for (signed, add_on, key, expected) in [
            (Some(SIGNATURE), "web", FIRST_KEY, true),
            (Some(SIGNATURE), "dns", FIRST_KEY, false),
            (Some(SIGNATURE), "web", SECOND_KEY, false),
            (Some(BY_FIRST), "roleserver", FIRST_KEY, false),
            (Some("x"), "web", FIRST_KEY, false),
            (None, "web", FIRST_KEY, false),
        ] {
            assert_eq!(is_signed_add_on(signed, add_on, &trust(key)), expected, "{add_on}");
        }
    }
}
