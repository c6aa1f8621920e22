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
//! Shepherds verify these signatures. A machine verifies that of a role once more, if it has pinned that it requires one
//! ([`SigningTrust::requires_signed_declarations`]): a person who writes to the database or to the curators of a cluster is
//! then not root on it. What a second admin approved is not signed, and is refused there. The version of each signed
//! declaration that a machine accepts becomes the lowest one that it accepts of that role, so nobody declares an older one
//! again. From then on the machine takes no unsigned declaration of that role, also none that gives no root: its service could
//! leave files in the work directory of the signed service that follows. Machines verify no add-on: its objects reach them as
//! pods of Kubernetes.

use crate::cluster::declaration::encode_signed_content;
use crate::kubernetes::version::ReleaseVersion;
use crate::role_declaration::RoleDeclaration;
use crate::signed_artefact::signature::ArtefactSignature;
use crate::signed_artefact::signed_fields::{ANY_ARCHITECTURE, ArtefactKind};
use crate::signed_artefact::signing_key::SigningKey;
use crate::signed_artefact::signing_trust::SigningTrust;
use crate::signed_artefact::{ExpectedFields, SignatureRejection, decide_acceptance};

/// What to do about a declaration that a machine refused.
const SIGN_IT: &str = "sign the declaration with a pinned key, in a version that is not lower than the last one, and declare \
                       it again with its signature (the approval of a second admin does not count here)";
/// How many privileges of a declaration the sentence about its refusal names.
const MAX_NAMED_PRIVILEGES: usize = 3;

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

/// Verifies the signature of a declared role with the keys of a shepherd or a machine. `content` is the encoding of the
/// declaration without its revision and its signature. The error is a sentence.
pub fn verify_declaration(
    signature: &ArtefactSignature,
    role: &str,
    content: &[u8],
    trust: &SigningTrust,
) -> Result<(), String> {
    let key = find_declaration_key(signature, role, trust).map_err(|error| error.to_string())?;
    signature.verify(key, content).map_err(|error| error.to_string())
}

/// Decides whether a machine runs the services of a declaration. Returns the version of a valid signature, below which the
/// machine accepts no declaration of the role any more; `None` if no signature is needed and there is no valid one.
///
/// The error is a sentence. It names the services that give root, or that a signed version was accepted before, and what to do.
/// `trust` is what the machine has pinned, or why that cannot be read: then nothing that gives root is accepted.
pub fn decide_machine_declaration(
    declaration: &RoleDeclaration,
    trust: Result<&SigningTrust, &str>,
) -> Result<Option<ReleaseVersion>, String> {
    if trust.is_ok_and(|trust| !trust.requires_signed_declarations()) {
        return Ok(None);
    }
    let verified = match trust {
        Ok(trust) => verify_signed_version(declaration, trust).map_err(|flaw| format!("{flaw}; {SIGN_IT}")),
        Err(unreadable) => Err(unreadable.to_owned()),
    };
    let reason = match verified {
        Ok(version) => return Ok(Some(version)),
        Err(reason) => reason,
    };
    let (role, privileges) = (declaration.role(), declaration.list_privileges());
    let accepted =
        trust.ok().and_then(|trust| trust.minimum_version(ArtefactKind::Declaration, &role.to_string()));
    let flaw = match accepted {
        _ if !privileges.is_empty() => {
            format!("{}, which gives root on this machine", list_some(&privileges))
        }
        Some(version) => format!("this machine has accepted its signed version {version}"),
        None => return Ok(None),
    };
    Err(format!("role {role} was refused: {flaw}, and {reason}; what ran before continues to run"))
}

/// Verifies the signature that a declaration carries, with the keys of a machine, and returns its version. The error is the
/// end of a sentence.
fn verify_signed_version(
    declaration: &RoleDeclaration,
    trust: &SigningTrust,
) -> Result<ReleaseVersion, String> {
    let declared = declaration.to_wire();
    if declared.signature.is_empty() {
        return Err("nobody signed it".to_owned());
    }
    if trust.keys().is_empty() {
        return Err("this machine has pinned no signing keys".to_owned());
    }
    let signature = ArtefactSignature::parse(&declared.signature).map_err(|error| error.to_string())?;
    let role = declaration.role().to_string();
    verify_declaration(&signature, &role, &encode_signed_content(declared), trust)?;
    Ok(signature.fields().version)
}

/// The first privileges of a declaration, and how many more there are.
fn list_some(privileges: &[String]) -> String {
    let some = privileges.iter().take(MAX_NAMED_PRIVILEGES).cloned().collect::<Vec<_>>().join(", ");
    match privileges.len().saturating_sub(MAX_NAMED_PRIVILEGES) {
        0 => some,
        more => format!("{some}, and {more} more"),
    }
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
    use proto::curator::v1 as wire;

    use super::*;
    use crate::role_declaration::tests::rootfs;
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

    /// The signature of [`declared`] for the user `root`, with the version 1.4.0.
    const OF_ROOT: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBALACN7DK57YKqtVeI7AfVMkelM48VNZAE5U9+W4YvfWwWGkvQoL9KpI73QWR2YIIneddUlp3o++TnlvokplpMAI=\n",
        "trusted comment: shepherd kind=declaration name=web version=1.4.0 architecture=any minimum-version=1.2.0\n",
        "567PDagns1iWuZOfprb+qoGnSYoUezjhxhSwweu0owrzF+l6tXZ2ieGptqJMUdlju/v+hQaMc9xsQpfm/r26Dg==\n",
    );
    /// The same for the user `1000`.
    const OF_1000: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBAA0TDDNKTC7ytmD5l0f7QqlGCyaD2m56DQjsLE6mzZeRr0nLGVAahV4vzBjtruygLkCBAxnicPx1fDinvQll5QA=\n",
        "trusted comment: shepherd kind=declaration name=web version=1.4.0 architecture=any minimum-version=1.2.0\n",
        "seLA3UUIv9UOtxdF7AwcRb2qlbDt2uk+dy7ABxLL+RVCmN43nzfA9+vaxjn7OnahLtI0eYuL8q8X7rV2xu6pDA==\n",
    );

    fn declared(user: &str, signature: &str) -> RoleDeclaration {
        let service = wire::Service {
            name: "server".to_owned(),
            run: Some(rootfs()),
            user: user.to_owned(),
            ..wire::Service::default()
        };
        RoleDeclaration::new(wire::Declaration {
            role: "web".to_owned(),
            services: vec![service],
            revision: 7,
            signature: signature.to_owned(),
        })
        .unwrap()
    }

    #[test]
    fn machine_runs_what_gives_root_only_if_a_pinned_key_signed_it() {
        let lenient = trust(FIRST_KEY);
        let strict = lenient.with_signed_declarations(true);
        let other = trust(SECOND_KEY).with_signed_declarations(true);
        let none = SigningTrust::default().with_signed_declarations(true);
        let lowest = |patch| {
            let minimum = ReleaseVersion::new(1, 4, patch);
            strict.with_minimum(ArtefactKind::Declaration, "web", minimum)
        };
        let of_other_role =
            strict.with_minimum(ArtefactKind::Declaration, "db", ReleaseVersion::new(9, 0, 0));
        let version = Some(ReleaseVersion::new(1, 4, 0));
        let forged = OF_ROOT.replace("version=1.4.0", "version=9.4.0");
        for (what, user, signature, trust, expected) in [
            ("nothing is required", "root", "", &lenient, Ok(None)),
            ("nothing is required", "root", "x", &lenient, Ok(None)),
            ("it gives no root", "1000", "", &strict, Ok(None)),
            ("it gives no root", "1000", OF_ROOT, &strict, Ok(None)),
            ("it gives no root and is signed", "1000", OF_1000, &strict, Ok(version)),
            ("it is signed", "root", OF_ROOT, &strict, Ok(version)),
            ("it is the last one again", "root", OF_ROOT, &lowest(0), Ok(version)),
            ("another role is newer", "root", OF_ROOT, &of_other_role, Ok(version)),
            ("nobody signed it", "root", "", &strict, Err("nobody signed it")),
            (
                "an older one",
                "root",
                OF_ROOT,
                &lowest(1),
                Err("its version is 1.4.0, and 1.4.1 is the lowest"),
            ),
            ("of another content", "root", OF_1000, &strict, Err("its signature is not valid")),
            ("another version", "root", forged.as_str(), &strict, Err("its signature is not valid")),
            (
                "of another role",
                "root",
                BY_FIRST,
                &strict,
                Err("for kind release, and declaration is expected"),
            ),
            ("no signature", "root", "x", &strict, Err("the signature is no file")),
            ("by another key", "root", OF_ROOT, &other, Err("which is not one of the pinned keys")),
            ("without keys", "root", OF_ROOT, &none, Err("this machine has pinned no signing keys")),
        ] {
            let decided = decide_machine_declaration(&declared(user, signature), Ok(trust));
            match expected {
                Ok(version) => assert_eq!(decided, Ok(version), "{what}"),
                Err(text) => {
                    let error = decided.unwrap_err();
                    let names =
                        "role web was refused: server runs as root, which gives root on this machine, and ";
                    assert!(error.starts_with(names) && error.contains(text), "{what}: {error}");
                    assert!(error.contains("declare it again with its signature"), "{what}: {error}");
                }
            }
        }
        let unreadable = "signing.json is damaged; look at it";
        let error = decide_machine_declaration(&declared("root", OF_ROOT), Err(unreadable)).unwrap_err();
        assert!(error.ends_with(&format!("and {unreadable}; what ran before continues to run")), "{error}");
        assert_eq!(decide_machine_declaration(&declared("1000", ""), Err(unreadable)), Ok(None));
    }

    #[test]
    fn role_of_which_a_signed_version_was_accepted_takes_no_unsigned_one() {
        let minimum = ReleaseVersion::new(1, 4, 0);
        let lenient = trust(FIRST_KEY).with_minimum(ArtefactKind::Declaration, "web", minimum);
        let strict = lenient.with_signed_declarations(true);
        for (signature, text) in [("", "nobody signed it"), (OF_ROOT, "its signature is not valid")] {
            let error = decide_machine_declaration(&declared("1000", signature), Ok(&strict)).unwrap_err();
            let names = "role web was refused: this machine has accepted its signed version 1.4.0, and ";
            assert!(error.starts_with(names) && error.contains(text), "{error}");
            assert_eq!(decide_machine_declaration(&declared("1000", signature), Ok(&lenient)), Ok(None));
        }
        assert_eq!(decide_machine_declaration(&declared("1000", OF_1000), Ok(&strict)), Ok(Some(minimum)));
        let of_other_role = trust(FIRST_KEY)
            .with_minimum(ArtefactKind::Declaration, "db", minimum)
            .with_signed_declarations(true);
        assert_eq!(decide_machine_declaration(&declared("1000", ""), Ok(&of_other_role)), Ok(None));
    }

    #[test]
    fn refusal_names_some_privileges_and_counts_the_rest() {
        let privileges: Vec<String> = ["a", "b", "c", "d", "e"].map(str::to_owned).into();
        assert_eq!(list_some(&privileges[..3]), "a, b, c");
        assert_eq!(list_some(&privileges), "a, b, c, and 2 more");
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
