//! Machine selector: `location=ams,memory>=64GiB,label.rack=7`.
//!
//! A machine must meet all terms. A term about an unknown fact (such as the memory before the first hardware report) is
//! not met.

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
        let message = text.trim();
        let terms = message.split(',').map(str::trim).filter(|term| !term.is_empty()).map(parse_term);
        Ok(Self { terms: terms.collect::<Result<_, _>>()?, source: message.to_owned() })
    }
}

const SUPPORTED_TERMS: &str =
    "provider=, location=, manufacturer=, product=, label.KEY=, memory>= and cpus>=";

fn parse_term(text: &str) -> Result<Term, String> {
    if let Some((name, least)) = text.split_once(">=") {
        let number = match name.trim() {
            "memory" => NumericKey::Memory,
            "cpus" => NumericKey::Cpus,
            other => {
                return Err(format!(
                    "{other:?} cannot be used with >=; the supported terms are {SUPPORTED_TERMS}"
                ));
            }
        };
        let least = least.trim();
        let count = match number {
            NumericKey::Memory => parse_bytes(least)
                .ok_or_else(|| format!("{least:?} is not an amount of memory; write it as 64GiB"))?,
            NumericKey::Cpus => least.parse().map_err(|_| format!("{least:?} is not a number of threads"))?,
        };
        return Ok(Term::AtLeast(number, count));
    }
    if let Some(wanted) = text.strip_prefix("label.") {
        return Ok(Term::Label(label::LabelFilter::parse(wanted)?));
    }
    let unknown =
        || format!("{text:?} is not a term of a selector; the supported terms are {SUPPORTED_TERMS}");
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
    let wanted = wanted.trim();
    if wanted.is_empty() || wanted.chars().any(char::is_control) {
        return Err(format!("{text:?} has no value to compare with"));
    }
    Ok(Term::Text(word, wanted.to_owned()))
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
        ] {
            let message = text.parse::<Selector>().unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }
}
