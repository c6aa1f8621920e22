//! Tests of keys, signatures, decisions and rotations. The signatures were made with fixed keys: the seed of each key and
//! its id are one byte, repeated.

use std::collections::BTreeMap;

use super::*;
use crate::signed_artefact::signature::{FileVerification, SignatureParseError, VerificationError};
use crate::signed_artefact::signed_fields::FieldsError;
use crate::signed_artefact::signing_configuration::SigningConfiguration;
use crate::signed_artefact::signing_key::parse_signing_keys;
use crate::signed_artefact::signing_trust::KeyRotation;

pub(super) const FIRST_KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
pub(super) const SECOND_KEY: &str = "RWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU";
const THIRD_KEY: &str = "RWQDAwMDAwMDAO1JKMYo0cLG6ukDOJBZlWEpWSc6XGP5NjbBRhSshzfR";
/// The file that the signatures are of.
pub(super) const PROGRAM: &[u8] = b"the program\n";
const COMMENT: &str =
    "shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0";
/// Signature of the program with the first key.
pub(super) const BY_FIRST: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
    "trusted comment: shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0\n",
    "UDxDQF/pltTvw0F7zZ0LA1Qr1N1wKBod5Yj9i9OMOisddHng4NZceRcNYCguF12DBd3Savk11OYbrOd1NQUcAQ==\n",
);
/// The same with the second key.
const BY_SECOND: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQCAgICAgICAF1xVma3gMzqGiSOAINPpnzOkGIdK4p83xH9SpZ9CH0CrUkz7y3vTf0k2fFm5pJQFECE+QOWoUvC+WutvvVYpws=\n",
    "trusted comment: shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0\n",
    "azOpdn6oQ6iygtA/C7Fgu/+cy5OK7un903rZIVwBgSAinGE0oTmKb4gIoFBW94wisTPmoyVqgbTVDCU4FjvzAA==\n",
);
/// The older form.
const LEGACY: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RWQBAQEBAQEBAPcDFzrwDBgxSG5ySeIdiiR+eTlrHkQl7RtwZmvWi13g6Q2geC3E35oFmEpTvspfbDwMihrx67aKAOi4G9dQJw8=\n",
    "trusted comment: shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0\n",
    "r8IK9LMrfcjJEldgiQaisrNR4MEIylgiM0mXe/O3k1HoD0MQnNQe3TomM1x5ATbKs90eBsVXhqBUP1N6uDAxCw==\n",
);
/// A comment that lacks a field.
const WITHOUT_MINIMUM: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQBAQEBAQEBAPRGePB8+0YmPSNMS7hcj7NbQXhSPTLJVLHljZsnl6uz5JPj9bsQtpfVvej/ZLHmUjxor9FZDKo27zXPJ7gncQQ=\n",
    "trusted comment: shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64\n",
    "e08hwVBRpiMF/zXkADVSZYEMfC14dYpnZSe9GltRnGoc748rHCMHzYtDF9wsEgyzw+mXGrm1irlZoVFuTIUXCA==\n",
);
/// The second key and the third replace the first; the first one signed it.
const TO_SECOND: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQBAQEBAQEBAHUTAeN+lo7qMcbiGrzy5V+z1/YfX9YnBP9cCnUdUGvVsNJa0+tTb+dwOksxZ5x1ENdvsC7LFNQkOryeNGxSJAg=\n",
    "trusted comment: shepherd kind=keys name=signing-keys version=2.0.0 architecture=any minimum-version=1.0.0\n",
    "zfx3U/OXu+TopQEJ8P17pEHWGdz/6ZGQQrwgmM/XJlBHFiAlm5reGOLXaDHCrKIjzDwYbuSUhDGhRf91ytsyAg==\n",
);
/// The third key alone replaces the second; the second one signed it.
const TO_THIRD: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQCAgICAgICAGRdA/aTzKe8vLwS5rAhETkoihAp2adiA3SLdYLFqZ4QW75exWwcJVFjbmU9Qvxlx5U17ILSr+/LMTRF07KSFAw=\n",
    "trusted comment: shepherd kind=keys name=signing-keys version=3.0.0 architecture=any minimum-version=1.0.0\n",
    "ZZk9CZdxDZFeMERhjgY3MNRv/dU7skdyjFGNJHUw/t17m57HTYzhZMw1mGCbF2SYPBBAZFKJfwj2q2t87BAgCQ==\n",
);
/// The first key comes back; the third one signed it, as a rotation before the last.
const TO_FIRST: &str = concat!(
    "untrusted comment: signature from minisign secret key\n",
    "RUQDAwMDAwMDAFUlTsffv5fOiWfLtF0gLKeW8plDYJXgNmjNRUcD/HdeytjT7DKo9F6T88WJtL4P7QppI6VWcUQb9XlVFIrg5Qk=\n",
    "trusted comment: shepherd kind=keys name=signing-keys version=2.5.0 architecture=any minimum-version=1.0.0\n",
    "ekGG7j+lRMzaUwpOW9FdgQGa5J6+jEmqA645jGpDBZfr0OgSz3Tcgq+20vrKIEkGOCg4+2WaZ1Qq6TP8li4ADw==\n",
);

pub(super) fn key(text: &str) -> SigningKey {
    SigningKey::parse(text).unwrap()
}

pub(super) fn signature(text: &str) -> ArtefactSignature {
    ArtefactSignature::parse(text).unwrap()
}

/// Keys as minisign writes them, one file after the other.
fn key_files(keys: &[&str]) -> String {
    let file = |line: &&str| format!("untrusted comment: minisign public key {}\n{line}\n", key(line).id());
    keys.iter().map(file).collect()
}

#[test]
fn keys_are_read_as_minisign_writes_them() {
    let files = key_files(&[FIRST_KEY, SECOND_KEY]) + "\n" + &key_files(&[FIRST_KEY]).replace('\n', "\r\n");
    let keys = parse_signing_keys(&files).unwrap();
    assert_eq!(keys, [key(FIRST_KEY), key(SECOND_KEY)], "a doubled key counts once");
    assert_eq!(keys[0].id().to_string(), "0001010101010101");
    assert_eq!(keys[0].as_str(), FIRST_KEY);
    for line in [
        "RWQBAQEBAQEBAIqI4910CfGV",
        BY_FIRST.lines().nth(1).unwrap(),
        "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29d!",
        "a secret",
        "",
    ] {
        assert!(SigningKey::parse(line).unwrap_err().contains("is no public key of minisign"), "{line}");
    }
    assert!(parse_signing_keys("untrusted comment: x\n").unwrap_err().contains("has no public key"));
    // Another key under the id of the first one.
    let same_id = FIRST_KEY.replace("CfGV", "CfGW");
    assert!(
        parse_signing_keys(&format!("{FIRST_KEY}\n{same_id}\n"))
            .unwrap_err()
            .contains("two keys have the id")
    );
}

fn is_wrong(error: &FieldsError, name: &str) -> bool {
    matches!(error, FieldsError::WrongValue { field, .. } if *field == name)
}

type IsExpected = fn(&FieldsError) -> bool;

#[test]
fn trusted_comment_has_each_field_once_and_nothing_else() {
    let fields: SignedFields = COMMENT.parse().unwrap();
    assert_eq!(fields.to_string(), COMMENT);
    assert_eq!(
        (fields.version, fields.minimum_version),
        (ReleaseVersion::new(1, 4, 0), ReleaseVersion::new(1, 2, 0))
    );
    let cases: [(&str, &str, IsExpected); 15] = [
        ("shepherd kind", "timestamp:1\tfile:x\tkind", |error| *error == FieldsError::OtherFirstWord),
        ("shepherd kind", "Shepherd kind", |error| *error == FieldsError::OtherFirstWord),
        (" kind=release", "", |error| *error == FieldsError::Missing("kind")),
        (" minimum-version=1.2.0", "", |error| *error == FieldsError::Missing("minimum-version")),
        (" name=", " name=x name=", |error| *error == FieldsError::Doubled("name")),
        (" name=", " colour=red name=", |error| *error == FieldsError::Unknown("colour".to_owned())),
        (" name=", "  name=", |error| matches!(error, FieldsError::Malformed(_))),
        ("name=roleserver", "name=", |error| matches!(error, FieldsError::Malformed(_))),
        ("name=roleserver", "name=a/b", |error| matches!(error, FieldsError::Malformed(_))),
        ("name=roleserver", "name=a=b", |error| matches!(error, FieldsError::Malformed(_))),
        ("name=roleserver", "roleserver", |error| matches!(error, FieldsError::Malformed(_))),
        ("kind=release", "kind=Release", |error| is_wrong(error, "kind")),
        (" version=1.4.0", " version=1.4", |error| is_wrong(error, "version")),
        ("minimum-version=1.2.0", "minimum-version=1.2.0-rc1", |error| is_wrong(error, "minimum-version")),
        ("minimum-version=1.2.0", "minimum-version=1.4.1", |error| is_wrong(error, "minimum-version")),
    ];
    for (from, to, is_expected) in cases {
        let comment = COMMENT.replace(from, to);
        assert_ne!(comment, COMMENT, "{from}");
        let error = comment.parse::<SignedFields>().unwrap_err();
        assert!(is_expected(&error), "{comment}: {error:?}");
    }
    let other_spelling = COMMENT.replace(" version=1.4.0", " version=v1.4.0");
    assert!(is_wrong(&other_spelling.parse::<SignedFields>().unwrap_err(), "version"));
    let long = COMMENT.replace("roleserver", &"x".repeat(101));
    assert!(matches!(long.parse::<SignedFields>(), Err(FieldsError::Malformed(_))));
}

#[test]
fn signature_is_four_lines_of_minisign() {
    let by_first = signature(BY_FIRST);
    assert_eq!(by_first.key_id(), key(FIRST_KEY).id());
    assert_eq!(by_first.as_str(), BY_FIRST);
    assert_eq!(signature(BY_FIRST.trim_end()).fields(), by_first.fields());
    assert_eq!(ArtefactSignature::parse(LEGACY), Err(SignatureParseError::Legacy));
    let error = ArtefactSignature::parse(WITHOUT_MINIMUM).unwrap_err();
    assert_eq!(error, SignatureParseError::Fields(FieldsError::Missing("minimum-version")));
    assert!(
        error
            .to_string()
            .starts_with("the trusted comment of the signature lacks the field minimum-version; ")
    );
    for text in [
        String::new(),
        BY_FIRST.lines().take(3).collect::<Vec<_>>().join("\n"),
        format!("{BY_FIRST}more\n"),
        BY_FIRST.replace("untrusted comment:", "comment:"),
        BY_FIRST.replace("trusted comment: shepherd", "trusted comment:shepherd"),
        BY_FIRST.replace("RUQB", "RUQB!"),
        BY_FIRST.replace("RUQB", "UUQB"),
        format!("{}{BY_FIRST}", " ".repeat(5000)),
    ] {
        assert_eq!(ArtefactSignature::parse(&text), Err(SignatureParseError::Malformed), "{text}");
    }
}

#[test]
fn only_the_signed_bytes_with_the_signed_comment_are_valid() {
    let by_first = signature(BY_FIRST);
    let first_key = key(FIRST_KEY);
    let mut verification = FileVerification::begin(&by_first, &first_key).unwrap();
    for piece in PROGRAM.chunks(5) {
        verification.update(piece);
    }
    assert_eq!(verification.finish(), Ok(()));
    for content in [&PROGRAM[1..], &PROGRAM[..5], b"", b"the program\n\n", b"another file"] {
        assert_eq!(by_first.verify(&key(FIRST_KEY), content), Err(VerificationError), "{content:?}");
    }
    assert_eq!(by_first.verify(&key(SECOND_KEY), PROGRAM), Err(VerificationError));
    // The first part is still valid: it covers only the file. The second covers the comment.
    let other_comment = signature(&BY_FIRST.replace("version=1.4.0", "version=1.5.0"));
    assert_eq!(other_comment.verify(&key(FIRST_KEY), PROGRAM), Err(VerificationError));
    // The comment of the signature with another key.
    let lines: Vec<&str> = BY_FIRST.lines().take(3).chain(BY_SECOND.lines().skip(3)).collect();
    assert_eq!(signature(&lines.join("\n")).verify(&key(FIRST_KEY), PROGRAM), Err(VerificationError));
}

#[test]
fn signature_is_compared_with_what_is_expected_and_pinned() {
    let pinned = SigningTrust::pinning(vec![key(FIRST_KEY), key(THIRD_KEY)]);
    let release = ExpectedFields::release("x86_64");
    let by_first = signature(BY_FIRST);
    let decide = |signature: Option<&ArtefactSignature>, expected: &ExpectedFields, trust: &SigningTrust| {
        decide_acceptance(signature, expected, trust)
            .map(|key| key.map(SigningKey::id))
            .map_err(|error| error.to_string())
    };
    let id = key(FIRST_KEY).id();
    assert_eq!(decide(Some(&by_first), &release, &pinned), Ok(Some(id)));
    assert_eq!(decide(None, &release, &SigningTrust::default()), Ok(None), "nothing is pinned yet");
    assert_eq!(
        decide(None, &release, &pinned),
        Err("it is not signed; sign it with minisign, and add it again with its signature".to_owned())
    );
    assert_eq!(
        decide(Some(&signature(BY_SECOND)), &release, &pinned),
        Err(
            "it is signed with key 0002020202020202, which is not one of the pinned keys (0001010101010101, \
             0003030303030303)"
                .to_owned()
        )
    );
    let expected = |change: &dyn Fn(&mut ExpectedFields)| {
        let mut expected = release.clone();
        change(&mut expected);
        expected
    };
    for (expected, text) in [
        (
            expected(&|e| e.kind = ArtefactKind::Bundle),
            "its signature is for kind release, and bundle is expected",
        ),
        (
            expected(&|e| e.name = Some("other".to_owned())),
            "its signature is for name roleserver, and other is expected",
        ),
        (
            expected(&|e| e.version = Some(ReleaseVersion::new(1, 4, 1))),
            "its signature is for version 1.4.0, and 1.4.1 is expected",
        ),
        (
            ExpectedFields::release("aarch64"),
            "its signature is for architecture x86_64, and aarch64 is expected",
        ),
    ] {
        assert_eq!(decide(Some(&by_first), &expected, &pinned), Err(text.to_owned()));
    }
    let minimum =
        |patch| pinned.with_minimum(ArtefactKind::Release, "roleserver", ReleaseVersion::new(1, 4, patch));
    assert_eq!(decide(Some(&by_first), &release, &minimum(0)), Ok(Some(id)));
    assert_eq!(
        decide(Some(&by_first), &release, &minimum(1)),
        Err("its version is 1.4.0, and 1.4.1 is the lowest that is accepted".to_owned())
    );
}

#[test]
fn shepherd_takes_what_one_of_its_keys_signed_for_what_it_is() {
    let trust = SigningTrust::pinning(vec![key(FIRST_KEY)]);
    let upload = |text: &str, trust: &SigningTrust| {
        decide_upload(&signature(text), trust).map(SigningKey::id).map_err(|error| error.to_string())
    };
    assert_eq!(upload(BY_FIRST, &trust), Ok(key(FIRST_KEY).id()));
    assert!(upload(BY_SECOND, &trust).unwrap_err().contains("not one of the pinned keys"));
    assert!(upload(BY_FIRST, &SigningTrust::default()).unwrap_err().contains("--signing_keys_path"));
    let keys = upload(TO_SECOND, &trust).unwrap_err();
    assert_eq!(keys, "its signature is for kind keys, and release, bundle, image or declaration is expected");

    let release: SignedFields = COMMENT.parse().unwrap();
    let bundle = SignedFields { kind: ArtefactKind::Bundle, name: "k".to_owned(), ..release.clone() };
    let compare = |fields, content| compare_content(fields, content).map_err(|error| error.to_string());
    let version = ReleaseVersion::new(1, 4, 0);
    assert_eq!(compare(&release, None), Ok(()));
    assert_eq!(compare(&bundle, Some(("k", version))), Ok(()));
    for (fields, content, text) in [
        (&bundle, None, "kind bundle, and release"),
        (&release, Some(("k", version)), "kind release, and bundle"),
        (&bundle, Some(("l", version)), "name k, and l"),
        (&bundle, Some(("k", ReleaseVersion::new(1, 4, 1))), "version 1.4.0, and 1.4.1"),
    ] {
        assert_eq!(compare(fields, content), Err(format!("its signature is for {text} is expected")));
    }
}

#[test]
fn bundle_of_a_cluster_is_signed_with_a_key_of_the_shepherd() {
    let trust = SigningTrust::pinning(vec![key(FIRST_KEY)]);
    let (none, release) = (SigningTrust::default(), "kind release, and bundle is expected");
    for (signature, trust, allows_unsigned, expected) in [
        (None, &none, false, None),
        (None, &trust, true, None),
        (None, &trust, false, Some("it is not signed")),
        (Some(BY_SECOND), &trust, false, Some("which is not one of the pinned keys")),
        (Some(BY_FIRST), &trust, false, Some(release)),
        (Some("x"), &trust, false, Some("the signature is no file")),
    ] {
        let decided = decide_assignment(signature, trust, allows_unsigned);
        match expected {
            None => assert_eq!(decided, Ok(()), "{signature:?}"),
            Some(text) => assert!(decided.as_ref().is_err_and(|error| error.contains(text)), "{decided:?}"),
        }
    }
}

#[test]
fn configuration_needs_keys_beside_rotations() {
    let rotation = KeyRotation::parse(&key_files(&[SECOND_KEY, THIRD_KEY]), TO_SECOND).unwrap();
    let keys = key_files(&[SECOND_KEY, THIRD_KEY]);
    let configured = SigningConfiguration::parse(Some(&keys), vec![rotation.clone()]).unwrap();
    assert_eq!(configured.key_lines(), [SECOND_KEY, THIRD_KEY]);
    assert_eq!(configured.rotations(), std::slice::from_ref(&rotation));
    assert!(configured.trust().has_keys(&[key(SECOND_KEY), key(THIRD_KEY)]));
    assert_eq!(SigningConfiguration::parse(None, Vec::new()), Ok(SigningConfiguration::default()));
    assert!(SigningConfiguration::parse(None, vec![rotation.clone()]).unwrap_err().contains("present keys"));
    assert!(
        SigningConfiguration::parse(Some(&keys), vec![rotation; 33])
            .unwrap_err()
            .contains("32 is the maximum")
    );
    assert!(SigningConfiguration::parse(Some("x"), Vec::new()).is_err());
}

/// Its name, the configured keys, the lists, and what the error contains.
type RotationCase<'a> = (&'a str, &'a [&'a str], Vec<KeyRotation>, Option<&'a str>);

#[test]
fn rotations_of_a_configuration_lead_to_its_keys() {
    let rotation = |keys: &[&str], signature: &str| KeyRotation::parse(&key_files(keys), signature).unwrap();
    let to_second = rotation(&[SECOND_KEY, THIRD_KEY], TO_SECOND);
    let to_third = rotation(&[THIRD_KEY], TO_THIRD);
    let to_first = rotation(&[FIRST_KEY], TO_FIRST);
    let changed = rotation(&[FIRST_KEY, SECOND_KEY], TO_SECOND);
    let cases: [RotationCase<'_>; 7] = [
        ("none", &[FIRST_KEY], Vec::new(), None),
        ("a chain in any order", &[THIRD_KEY], vec![to_third.clone(), to_second.clone()], None),
        ("its end alone", &[THIRD_KEY], vec![to_third.clone()], None),
        ("other keys", &[SECOND_KEY], vec![to_second.clone()], Some("version 2.0.0, has other keys")),
        (
            "twice",
            &[SECOND_KEY, THIRD_KEY],
            vec![to_second.clone(), to_second.clone()],
            Some("two lists of new keys have the version 2.0.0"),
        ),
        (
            "a broken chain",
            &[THIRD_KEY],
            vec![to_second.clone(), to_first, to_third],
            Some("version 3.0.0 has no valid signature of a key in the list before it, 2.5.0"),
        ),
        (
            "a changed list",
            &[FIRST_KEY, SECOND_KEY],
            vec![changed],
            Some("version 2.0.0 is not valid for key 0001"),
        ),
    ];
    for (what, keys, rotations, expected) in cases {
        let configured = SigningConfiguration::parse(Some(&key_files(keys)), rotations).unwrap();
        let checked = configured.check_rotations();
        match expected {
            None => assert_eq!(checked, Ok(()), "{what}"),
            Some(text) => {
                assert!(checked.as_ref().is_err_and(|error| error.contains(text)), "{what}: {checked:?}");
            }
        }
    }
    // Nothing that the shepherd has verifies the first list.
    let keys = key_files(&[SECOND_KEY, THIRD_KEY]);
    let configured = SigningConfiguration::parse(Some(&keys), vec![to_second.clone()]).unwrap();
    let unverified = configured.unverified_rotation();
    assert_eq!(unverified, Some((ReleaseVersion::new(2, 0, 0), key(FIRST_KEY).id())));
    assert_eq!(SigningConfiguration::default().unverified_rotation(), None);
    // A machine with other keys ignores it, and one that has applied it does not.
    let pinned = SigningTrust::pinning(vec![key(THIRD_KEY)]);
    assert_eq!(pinned.ignored_rotations(std::slice::from_ref(&to_second)), [&to_second]);
    let applied =
        SigningTrust::pinning(vec![key(FIRST_KEY)]).with_offer(&[], std::slice::from_ref(&to_second));
    assert!(applied.ignored_rotations(std::slice::from_ref(&to_second)).is_empty());
    assert!(SigningTrust::default().ignored_rotations(&[to_second]).is_empty());
}

#[test]
fn keys_that_another_process_pinned_stay() {
    let (none, version) = (SigningTrust::default(), ReleaseVersion::new(1, 2, 0));
    let raised = |trust: &SigningTrust| trust.with_minimum(ArtefactKind::Release, "a", version);
    let strict = |trust: &SigningTrust| trust.with_signed_declarations(true);
    let first = SigningTrust::pinning(vec![key(FIRST_KEY)]);
    let second = SigningTrust::pinning(vec![key(SECOND_KEY)]);
    for (what, own, before, stored, expected) in [
        ("nobody else wrote", &second, &first, &first, second.clone()),
        ("it pinned keys", &second, &none, &first, first.clone()),
        ("and this one raised a version", &raised(&second), &none, &first, raised(&first)),
        ("it raised a version", &second, &second, &raised(&second), raised(&second)),
        ("it has no keys", &second, &none, &raised(&none), raised(&second)),
        ("root has removed the file", &raised(&first), &raised(&first), &none, raised(&first)),
        (
            "it requires signed declarations",
            &raised(&first),
            &first,
            &strict(&first),
            strict(&raised(&first)),
        ),
        ("this one requires them", &strict(&first), &first, &raised(&first), strict(&raised(&first))),
        ("an order has ended that", &strict(&first), &strict(&first), &second, second.clone()),
    ] {
        assert_eq!(own.merged_with(before, stored), expected, "{what}");
    }
}

#[test]
fn replaced_keys_bring_no_former_key_or_version_back() {
    let rotation = |keys: &[&str], signature: &str| KeyRotation::parse(&key_files(keys), signature).unwrap();
    let (to_second, to_third) =
        (rotation(&[SECOND_KEY, THIRD_KEY], TO_SECOND), rotation(&[THIRD_KEY], TO_THIRD));
    let pinned = SigningTrust::pinning(vec![key(FIRST_KEY)]);
    let rotated = pinned.with_offer(&[], std::slice::from_ref(&to_second));
    let raised = rotated.with_minimum(ArtefactKind::Release, "a", ReleaseVersion::new(1, 2, 0));
    let replaced = raised.with_replaced_keys(&[key(FIRST_KEY)], &[]);
    assert!(replaced.has_keys(&[key(FIRST_KEY)]));
    assert_eq!(replaced.minimum_versions(), raised.minimum_versions());
    assert_eq!(replaced.with_offer(&[], std::slice::from_ref(&to_second)), replaced, "it was applied before");
    let third = raised.with_replaced_keys(&[key(THIRD_KEY)], &[to_third.clone(), to_second]);
    assert_eq!((third.keys(), third.rotation()), (&[key(THIRD_KEY)][..], Some(to_third.version())));
}

#[test]
fn minimum_version_only_rises() {
    let trust = SigningTrust::pinning(vec![key(FIRST_KEY)]);
    let raised = trust.with_minimum(ArtefactKind::Release, "a", ReleaseVersion::new(1, 2, 0));
    let raised = raised.with_minimum(ArtefactKind::Release, "a", ReleaseVersion::new(1, 1, 0));
    assert_eq!(raised.minimum_version(ArtefactKind::Release, "a"), Some(ReleaseVersion::new(1, 2, 0)));
    assert_eq!(raised.minimum_version(ArtefactKind::Release, "b"), None);
    assert_eq!(raised.minimum_version(ArtefactKind::Bundle, "a"), None);
    let keys = vec![FIRST_KEY.to_owned()];
    assert_eq!(SigningTrust::restore(&keys, None, raised.minimum_versions().clone()), Ok(raised));
    assert_eq!(SigningTrust::restore(&[], None, BTreeMap::new()), Ok(SigningTrust::default()));
    assert!(SigningTrust::restore(&["x".to_owned()], None, BTreeMap::new()).is_err());
}

#[test]
fn pinned_keys_are_replaced_only_by_a_chain_of_rotations() {
    let rotation = |keys: &[&str], signature: &str| KeyRotation::parse(&key_files(keys), signature).unwrap();
    let to_second = rotation(&[SECOND_KEY, THIRD_KEY], TO_SECOND);
    let to_third = rotation(&[THIRD_KEY], TO_THIRD);
    let to_first = rotation(&[FIRST_KEY], TO_FIRST);
    let pinned = SigningTrust::default().with_offer(&[key(FIRST_KEY)], &[]);
    assert_eq!(pinned, SigningTrust::pinning(vec![key(FIRST_KEY)]), "what is sent first is pinned");
    assert_eq!(
        pinned.with_offer(&[key(SECOND_KEY)], &[]),
        pinned,
        "another key without a rotation is ignored"
    );
    assert_eq!(pinned.with_offer(&[], &[]), pinned, "and so is none");
    assert_eq!(
        pinned.with_offer(&[], std::slice::from_ref(&to_third)),
        pinned,
        "the second key is not pinned"
    );

    let second = pinned.with_offer(&[], std::slice::from_ref(&to_second));
    assert_eq!(
        (second.keys(), second.rotation()),
        (&[key(SECOND_KEY), key(THIRD_KEY)][..], Some(ReleaseVersion::new(2, 0, 0)))
    );
    let third = pinned.with_offer(&[key(THIRD_KEY)], &[to_third.clone(), to_second.clone()]);
    assert!(third.has_keys(&[key(THIRD_KEY)]), "a chain of two: {third:?}");
    // The third key signed it, and it is older than the rotation that named the third key.
    assert_eq!(third.with_offer(&[key(FIRST_KEY)], &[to_first.clone(), to_second.clone()]), third);
    assert!(
        second.with_offer(&[], &[to_first]).has_keys(&[key(FIRST_KEY)]),
        "it is newer than the second one"
    );

    // A machine that pins late takes the newest keys, and no rotation before them.
    let late = SigningTrust::default().with_offer(&[key(THIRD_KEY)], &[to_second.clone(), to_third]);
    assert_eq!(late, third);

    let error = KeyRotation::parse(&key_files(&[FIRST_KEY]), BY_FIRST).unwrap_err();
    assert_eq!(error, "the list of keys: its signature is for kind release, and keys is expected");
    let changed = rotation(&[THIRD_KEY], TO_SECOND);
    assert_eq!(pinned.with_offer(&[], &[changed]), pinned, "another list than the signed one");
    assert!(!second.has_keys(&[key(SECOND_KEY)]) && second.has_keys(&[key(THIRD_KEY), key(SECOND_KEY)]));
}
