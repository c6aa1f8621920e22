//! Machine selector: `location=ams,memory>=64GiB,label.rack=7`.
//!
//! A machine must meet all terms. A term about an unknown fact (such as the memory before the first hardware report) is
//! not met.
//!
//! Values come from device lists and from firmware, so they have commas: `Gigabyte Technology Co., Ltd.`. A comma ends a
//! term if another term follows, or nothing: `name=`, `name>=` or `label.`. Any other comma belongs to the value. A value
//! in quotes may have every comma. In both forms a backslash before a comma, a quote or a backslash takes it as it is.

use std::fmt;
use std::str::FromStr;

use crate::firmware_text::meaningful_text;
use crate::label::{self, Labels};

/// Hardware of a machine; `None` for what is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hardware {
    /// Manufacturer's name, from the hardware report.
    pub manufacturer: Option<String>,
    /// Product name, from the hardware report.
    pub product: Option<String>,
    /// Size of the memory in bytes.
    pub memory: Option<u64>,
    /// Number of processor threads.
    pub cpus: Option<u64>,
}

/// The facts of a machine that a selector can use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineTraits {
    /// Provider that the machine belongs to.
    pub provider: String,
    /// Location of the machine; `None` if unknown.
    pub location: Option<String>,
    /// Its hardware, as far as it is known.
    pub hardware: Hardware,
    /// Labels that operators set on it.
    pub labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    Text(TextKey, String),
    AtLeast(NumericKey, u64),
    Label(label::LabelFilter),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextKey {
    Provider,
    /// A prefix, as in every filter by location.
    Location,
    Manufacturer,
    Product,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumericKey {
    Memory,
    Cpus,
}

/// Terms that a machine must meet, all of them. A selector without terms matches every machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    terms: Vec<Term>,
    source: String,
}

impl Selector {
    /// Whether the machine meets all terms.
    #[must_use]
    pub fn matches(&self, machine: &MachineTraits) -> bool {
        self.terms.iter().all(|term| match term {
            Term::Text(TextKey::Provider, wanted) => machine.provider == *wanted,
            Term::Text(TextKey::Location, wanted) => {
                machine.location.as_ref().is_some_and(|found| found.starts_with(wanted.as_str()))
            }
            Term::Text(TextKey::Manufacturer, wanted) => {
                has_name(machine.hardware.manufacturer.as_deref(), wanted)
            }
            Term::Text(TextKey::Product, wanted) => has_name(machine.hardware.product.as_deref(), wanted),
            Term::AtLeast(NumericKey::Memory, least) => {
                machine.hardware.memory.is_some_and(|found| found >= *least)
            }
            Term::AtLeast(NumericKey::Cpus, least) => {
                machine.hardware.cpus.is_some_and(|found| found >= *least)
            }
            Term::Label(wanted) => wanted.matches(&machine.labels),
        })
    }
}

/// Whether a name in a hardware report is `wanted`. A placeholder is the name of nothing: agents of an earlier release
/// reported some.
fn has_name(found: Option<&str>, wanted: &str) -> bool {
    found.and_then(meaningful_text) == Some(wanted)
}

impl Selector {
    /// The keys of the labels that it requires.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().filter_map(|term| match term {
            Term::Label(wanted) => Some(wanted.key()),
            Term::Text(..) | Term::AtLeast(..) => None,
        })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let source = text.trim();
        let terms = split_terms(source)?.into_iter().map(parse_term);
        Ok(Self { terms: terms.collect::<Result<_, _>>()?, source: source.to_owned() })
    }
}

const SUPPORTED_TERMS: &str =
    "provider=, location=, manufacturer=, product=, label.KEY=, memory>= and cpus>=";

/// Splits a selector into its terms, without empty ones.
fn split_terms(text: &str) -> Result<Vec<&str>, String> {
    let separator = |c: char| c == ',' || c.is_whitespace();
    let mut terms = Vec::new();
    let mut rest = text.trim_start_matches(separator);
    while !rest.is_empty() {
        let (term, after) = rest.split_at(term_length(rest)?);
        terms.push(term.trim_end());
        rest = after.trim_start_matches(separator);
    }
    Ok(terms)
}

/// Length of the first term, in bytes: up to the comma before the next term.
fn term_length(text: &str) -> Result<usize, String> {
    let Some(sign) = text.find(['=', ',']).filter(|at| text[*at..].starts_with('=')) else {
        return Ok(text.find(',').unwrap_or(text.len()));
    };
    let value = text[sign + 1..].trim_start();
    let value_at = text.len() - value.len();
    let mut escaped = false;
    if let Some(quoted) = value.strip_prefix('"') {
        for (at, c) in quoted.char_indices() {
            if c == '"' && !escaped {
                let after = quoted[at + 1..].trim_start();
                if !after.is_empty() && !after.starts_with(',') {
                    return Err(format!("{text:?} has more text after a quoted value; a comma ends a term"));
                }
                return Ok(value_at + at + 2);
            }
            escaped = c == '\\' && !escaped;
        }
        return Err(format!("{text:?} has a quote that is not closed"));
    }
    for (at, c) in value.char_indices() {
        if c == ',' && !escaped && begins_term(&value[at + 1..]) {
            return Ok(value_at + at);
        }
        escaped = c == '\\' && !escaped;
    }
    Ok(text.len())
}

/// Whether a term begins here, or nothing follows.
fn begins_term(text: &str) -> bool {
    let text = text.trim_start();
    let name = text.find(|c: char| !c.is_ascii_alphanumeric() && !matches!(c, '_' | '.' | '-' | '/'));
    let after = text[name.unwrap_or(text.len())..].trim_start();
    text.is_empty()
        || text.starts_with(',')
        || text.starts_with("label.")
        || (name != Some(0) && (after.starts_with('=') || after.starts_with(">=")))
}

/// A value without its quotes and backslashes.
fn unquote(value: &str) -> String {
    let value = value.trim();
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    let mut plain = String::with_capacity(value.len());
    let mut characters = value.chars().peekable();
    while let Some(c) = characters.next() {
        let escaped =
            (c == '\\').then(|| characters.next_if(|next| matches!(next, ',' | '"' | '\\'))).flatten();
        plain.push(escaped.unwrap_or(c));
    }
    plain
}

fn parse_term(text: &str) -> Result<Term, String> {
    let at_least = text.split_once(">=").filter(|(name, _)| !name.contains('='));
    if let Some((name, least)) = at_least {
        let number = match name.trim() {
            "memory" => NumericKey::Memory,
            "cpus" => NumericKey::Cpus,
            other => {
                return Err(format!(
                    "{other:?} cannot be used with >=; the supported terms are {SUPPORTED_TERMS}"
                ));
            }
        };
        let least = unquote(least);
        let count = match number {
            NumericKey::Memory => parse_bytes(&least)
                .ok_or_else(|| format!("{least:?} is not an amount of memory; write it as 64GiB"))?,
            NumericKey::Cpus => least.parse().map_err(|_| format!("{least:?} is not a number of threads"))?,
        };
        return Ok(Term::AtLeast(number, count));
    }
    if let Some(wanted) = text.strip_prefix("label.") {
        let plain = match wanted.split_once('=') {
            Some((key, value)) => format!("{}={}", key.trim_end(), unquote(value)),
            None => wanted.to_owned(),
        };
        return Ok(Term::Label(label::LabelFilter::parse(&plain)?));
    }
    let unknown = || {
        format!(
            "{text:?} is not a term of a selector; the supported terms are {SUPPORTED_TERMS}; write a value that has an \
             equals sign after a comma in quotes"
        )
    };
    let (name, wanted) = text.split_once('=').ok_or_else(unknown)?;
    let word = match name.trim() {
        "provider" => TextKey::Provider,
        "location" => TextKey::Location,
        "manufacturer" => TextKey::Manufacturer,
        "product" => TextKey::Product,
        "memory" | "cpus" => {
            return Err(format!("{text:?} would hardly ever match a machine; write >= for ="));
        }
        _ => return Err(unknown()),
    };
    let wanted = unquote(wanted);
    if wanted.is_empty() || wanted.chars().any(char::is_control) {
        return Err(format!("{text:?} has no value to compare with"));
    }
    Ok(Term::Text(word, wanted))
}

/// Parses `64GiB`, `512MiB`, `1TiB` or a number of bytes; `None` for any other text, or on overflow.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let (number, shift) = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .unwrap_or((text, 0));
    number.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> MachineTraits {
        MachineTraits {
            provider: "rack".to_owned(),
            location: Some("ams-1/r7".to_owned()),
            hardware: Hardware {
                manufacturer: Some("Dell Inc.".to_owned()),
                product: None,
                memory: Some(64 << 30),
                cpus: Some(32),
            },
            labels: Labels::from([("row".to_owned(), "7".to_owned())]),
        }
    }

    #[test]
    fn machine_matches_when_every_term_does() {
        for (text, expected) in [
            ("", true),
            (" , ", true),
            ("location=ams", true),
            ("location=ams-1/r7,memory>=64GiB", true),
            ("location=fra", false),
            ("memory>=65GiB", false),
            ("memory>=65536MiB,cpus>=32", true),
            ("cpus>=33", false),
            ("provider=rack,manufacturer=Dell Inc.", true),
            ("provider=other", false),
            ("product=R640", false),
            ("label.row=7", true),
            ("label.row", true),
            ("label.row=8", false),
            ("label.rack", false),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(selector.matches(&machine()), expected, "{text}");
            assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector, "{text}");
        }
        let unknown = MachineTraits { hardware: Hardware::default(), ..machine() };
        assert!(!"memory>=1KiB".parse::<Selector>().unwrap().matches(&unknown));
    }

    #[test]
    fn every_value_can_be_written() {
        for (text, manufacturer, product, location) in [
            ("manufacturer=Gigabyte Technology Co., Ltd.", Some("Gigabyte Technology Co., Ltd."), None, None),
            (
                r#"manufacturer="Gigabyte Technology Co., Ltd.""#,
                Some("Gigabyte Technology Co., Ltd."),
                None,
                None,
            ),
            (
                "manufacturer=Acme, Inc., product=X570 AORUS, rev. 1.0,cpus>=1",
                Some("Acme, Inc."),
                Some("X570 AORUS, rev. 1.0"),
                None,
            ),
            ("location=Hall A, row 7", None, None, Some("Hall A, row 7")),
            ("location=Halle \u{4e2d}, \u{540d},label.row", None, None, Some("Halle \u{4e2d}, \u{540d}")),
            (
                r#"product="A, memory>=1 \"x\" \\" , location=a"#,
                None,
                Some(r#"A, memory>=1 "x" \"#),
                Some("a"),
            ),
            (r"product=A\,memory=1,location=a", None, Some("A,memory=1"), Some("a")),
            (r"product=A\B", None, Some(r"A\B"), None),
            (r#"product=24" screen"#, None, Some(r#"24" screen"#), None),
            (r#"memory>="1GiB",label.row="7",location=a,"#, None, None, Some("a")),
        ] {
            let selector: Selector = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            let named = MachineTraits {
                location: location.map(str::to_owned),
                hardware: Hardware {
                    manufacturer: manufacturer.map(str::to_owned),
                    product: product.map(str::to_owned),
                    ..machine().hardware
                },
                ..machine()
            };
            assert!(selector.matches(&named), "{text}");
            let count = [manufacturer, product, location].iter().flatten().count();
            let texts = selector.terms.iter().filter(|term| matches!(term, Term::Text(..))).count();
            assert_eq!(texts, count, "{text}: {selector:?}");
            assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector, "{text}");
        }
    }

    #[test]
    fn placeholder_is_the_name_of_no_machine() {
        let hardware = Hardware {
            manufacturer: Some("Default string".to_owned()),
            product: Some("Unknown".to_owned()),
            ..Hardware::default()
        };
        let unnamed = MachineTraits { hardware, ..machine() };
        for text in ["manufacturer=Default string", "product=Unknown"] {
            assert!(!text.parse::<Selector>().unwrap().matches(&unnamed), "{text}");
        }
    }

    #[test]
    fn invalid_terms_are_reported() {
        for (text, part) in [
            ("colour=red", "is not a term of a selector; the supported terms are provider=, location="),
            ("memory=64GiB", "write >= for ="),
            ("memory>=lots", "\"lots\" is not an amount of memory"),
            ("memory>=99999999999TiB", "is not an amount of memory"),
            ("cpus>=x", "\"x\" is not a number of threads"),
            ("disks>=2", "\"disks\" cannot be used with >="),
            ("location=", "has no value"),
            ("label.=x", "is not a valid key of a label"),
            ("location", "is not a term of a selector"),
            ("location=ams,colour=red", "\"colour=red\" is not a term of a selector"),
            ("product=\"A, B", "has a quote that is not closed"),
            ("product=\"A\" B", "has more text after a quoted value"),
            ("product=\"\"", "has no value"),
        ] {
            let message = text.parse::<Selector>().unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
