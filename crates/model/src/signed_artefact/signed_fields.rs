//! The trusted comment of a signature: its grammar, and its fields.
//!
//! ```text
//! comment = "shepherd" 5( " " field )
//! field   = name "=" value
//! name    = "kind" / "name" / "version" / "architecture" / "minimum-version"
//! value   = 1*100( letter / digit / "." / "-" / "_" / "+" / "~" )
//! ```
//!
//! The fields are in any order, and each of them is there once. Nothing else is in the comment, so two readers never
//! understand it differently. A later release that needs another field gives the comment another first word.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::kubernetes::version::{ReleaseVersion, VersionError};

/// First word of a trusted comment.
const FIRST_WORD: &str = "shepherd";
/// Longest value of a field, in characters.
const MAX_VALUE_CHARS: usize = 100;
/// The architecture of files that run on every one, or on none.
pub const ANY_ARCHITECTURE: &str = "any";
/// Names of the fields.
const FIELDS: [&str; 5] = ["kind", "name", "version", "architecture", "minimum-version"];

/// What a signed file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ArtefactKind {
    /// A release of the role server.
    Release,
    /// A bundle of Kubernetes programs.
    Bundle,
    /// An image of an operating system.
    Image,
    /// A list of the signing keys that replace the pinned ones.
    Keys,
    /// What gives root on the nodes of a cluster: the services of a declared role, or the objects of an add-on.
    Declaration,
}

impl ArtefactKind {
    /// All kinds, in the order of their declaration.
    pub const ALL: [Self; 5] = [Self::Release, Self::Bundle, Self::Image, Self::Keys, Self::Declaration];

    /// The kind as the trusted comment and the database have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Bundle => "bundle",
            Self::Image => "image",
            Self::Keys => "keys",
            Self::Declaration => "declaration",
        }
    }
}

impl fmt::Display for ArtefactKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The fields of a trusted comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedFields {
    /// What the file is for.
    pub kind: ArtefactKind,
    /// The name among files of its kind, such as `roleserver`.
    pub name: String,
    /// The version of the file.
    pub version: ReleaseVersion,
    /// The architecture that it runs on, as Rust names it, or [`ANY_ARCHITECTURE`].
    pub architecture: String,
    /// The lowest version that is accepted once this one has proved itself.
    pub minimum_version: ReleaseVersion,
}

/// Why a trusted comment is not of the grammar, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldsError {
    /// The first word is another one.
    #[error("does not begin with the word shepherd")]
    OtherFirstWord,
    /// A word is no field with a valid value.
    #[error(
        "has the word {0:?}; write each field as name=value, with letters, digits and . - _ + ~ in the value, and one space \
         between fields"
    )]
    Malformed(String),
    /// A field that no signature has.
    #[error("has the field {0:?}, which is none of kind, name, version, architecture, minimum-version")]
    Unknown(String),
    /// A field is there twice.
    #[error("has the field {0} twice")]
    Doubled(&'static str),
    /// A field is not there.
    #[error("lacks the field {0}")]
    Missing(&'static str),
    /// A value does not fit its field.
    #[error("has a wrong {field}: {reason}")]
    WrongValue {
        /// Name of the field.
        field: &'static str,
        /// What is wrong, as a sentence.
        reason: String,
    },
}

impl fmt::Display for SignedFields {
    /// Writes the trusted comment.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{FIRST_WORD} kind={} name={} version={} architecture={} minimum-version={}",
            self.kind, self.name, self.version, self.architecture, self.minimum_version
        )
    }
}

impl FromStr for SignedFields {
    type Err = FieldsError;

    fn from_str(comment: &str) -> Result<Self, FieldsError> {
        let mut words = comment.split(' ');
        if words.next() != Some(FIRST_WORD) {
            return Err(FieldsError::OtherFirstWord);
        }
        let mut values = BTreeMap::new();
        for word in words {
            let malformed = || FieldsError::Malformed(shorten(word));
            let (name, value) = word.split_once('=').ok_or_else(malformed)?;
            let field = FIELDS.into_iter().find(|field| *field == name);
            let field = field.ok_or_else(|| FieldsError::Unknown(shorten(name)))?;
            if !is_value(value) {
                return Err(malformed());
            }
            if values.insert(field, value).is_some() {
                return Err(FieldsError::Doubled(field));
            }
        }
        let value = |field: &'static str| values.get(field).copied().ok_or(FieldsError::Missing(field));
        let version = |field: &'static str| {
            let (text, wrong) = (value(field)?, |reason| FieldsError::WrongValue { field, reason });
            let version: ReleaseVersion =
                text.parse().map_err(|error: VersionError| wrong(error.to_string()))?;
            // A version is written in one way here.
            if version.to_string() != text {
                return Err(wrong(format!("write {version} in place of {text}")));
            }
            Ok(version)
        };
        let fields = Self {
            kind: parse_kind(value("kind")?)?,
            name: value("name")?.to_owned(),
            version: version("version")?,
            architecture: value("architecture")?.to_owned(),
            minimum_version: version("minimum-version")?,
        };
        if fields.minimum_version > fields.version {
            let reason = format!("{} is higher than the version, {}", fields.minimum_version, fields.version);
            return Err(FieldsError::WrongValue { field: "minimum-version", reason });
        }
        Ok(fields)
    }
}

fn parse_kind(text: &str) -> Result<ArtefactKind, FieldsError> {
    ArtefactKind::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| FieldsError::WrongValue {
        field: "kind",
        reason: format!("{text} is none of release, bundle, image, keys, declaration"),
    })
}

fn is_value(text: &str) -> bool {
    (1..=MAX_VALUE_CHARS).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+' | '~'))
}

/// The beginning of a text that came from elsewhere.
fn shorten(text: &str) -> String {
    text.chars().take(60).collect()
}
