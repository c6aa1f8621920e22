//! Which machines may be chosen for a cluster: `location=ams,memory>=64GiB,label.rack=7`.
//!
//! All terms must hold. A machine of which something is not known (its memory, before it sent a hardware report) is not
//! chosen by a term about it.

use std::fmt;
use std::str::FromStr;

use crate::model::cluster::hardware::Hardware;
use crate::model::label::{self, Labels};

/// A machine, as far as it can be chosen by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    /// Whose it is.
    pub provider: String,
    /// Where it stands, if that is known.
    pub location: Option<String>,
    /// Its hardware, as far as it is known.
    pub hardware: Hardware,
    /// Its labels.
    pub labels: Labels,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    Word(Word, String),
    AtLeast(Number, u64),
    Label(label::Wanted),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Provider,
    /// As everywhere a location is filtered by: whatever begins so.
    Location,
    Manufacturer,
    Product,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Memory,
    Cpus,
}

/// Terms that a machine must meet, all of them. None is met by every machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    terms: Vec<Term>,
    said: String,
}

impl Selector {
    /// Whether the machine may be chosen.
    #[must_use]
    pub fn holds(&self, machine: &Traits) -> bool {
        self.terms.iter().all(|term| match term {
            Term::Word(Word::Provider, wanted) => machine.provider == *wanted,
            Term::Word(Word::Location, wanted) => {
                machine.location.as_ref().is_some_and(|found| found.starts_with(wanted.as_str()))
            }
            Term::Word(Word::Manufacturer, wanted) => machine.hardware.manufacturer.as_ref() == Some(wanted),
            Term::Word(Word::Product, wanted) => machine.hardware.product.as_ref() == Some(wanted),
            Term::AtLeast(Number::Memory, least) => {
                machine.hardware.memory.is_some_and(|found| found >= *least)
            }
            Term::AtLeast(Number::Cpus, least) => machine.hardware.cpus.is_some_and(|found| found >= *least),
            Term::Label(wanted) => wanted.holds(&machine.labels),
        })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.said)
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let said = text.trim();
        let terms = said.split(',').map(str::trim).filter(|term| !term.is_empty()).map(term);
        Ok(Self { terms: terms.collect::<Result<_, _>>()?, said: said.to_owned() })
    }
}

const KNOWN: &str = "provider=, location=, manufacturer=, product=, label.KEY=, memory>= and cpus>=";

fn term(text: &str) -> Result<Term, String> {
    if let Some((name, least)) = text.split_once(">=") {
        let number = match name.trim() {
            "memory" => Number::Memory,
            "cpus" => Number::Cpus,
            other => return Err(format!("{other:?} cannot be chosen by with >=; known are {KNOWN}")),
        };
        let least = least.trim();
        let count = match number {
            Number::Memory => {
                bytes(least).ok_or_else(|| format!("{least:?} is no amount of memory; write it as 64GiB"))?
            }
            Number::Cpus => least.parse().map_err(|_| format!("{least:?} is no number of threads"))?,
        };
        return Ok(Term::AtLeast(number, count));
    }
    if let Some(wanted) = text.strip_prefix("label.") {
        return Ok(Term::Label(label::Wanted::read(wanted)?));
    }
    let unknown = || format!("{text:?} is nothing to choose machines by; known are {KNOWN}");
    let (name, wanted) = text.split_once('=').ok_or_else(unknown)?;
    let word = match name.trim() {
        "provider" => Word::Provider,
        "location" => Word::Location,
        "manufacturer" => Word::Manufacturer,
        "product" => Word::Product,
        "memory" | "cpus" => return Err(format!("{text:?} would hardly ever be met; write >= for =")),
        _ => return Err(unknown()),
    };
    let wanted = wanted.trim();
    if wanted.is_empty() || wanted.chars().any(char::is_control) {
        return Err(format!("{text:?} says nothing that a machine could be"));
    }
    Ok(Term::Word(word, wanted.to_owned()))
}

/// Reads `64GiB`, `512MiB`, `1TiB` or a number of bytes; none where it is neither.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    let (number, shift) = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
        .unwrap_or((text, 0));
    number.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Traits {
        Traits {
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
    fn machine_is_chosen_when_every_term_holds() {
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
            assert_eq!(selector.holds(&machine()), expected, "{text}");
            assert_eq!(selector.to_string().parse::<Selector>().unwrap(), selector, "{text}");
        }
        let unknown = Traits { hardware: Hardware::default(), ..machine() };
        assert!(!"memory>=1KiB".parse::<Selector>().unwrap().holds(&unknown));
    }

    #[test]
    fn what_cannot_be_chosen_by_is_said() {
        for (text, part) in [
            ("colour=red", "is nothing to choose machines by; known are provider=, location="),
            ("memory=64GiB", "write >= for ="),
            ("memory>=lots", "\"lots\" is no amount of memory"),
            ("memory>=99999999999TiB", "is no amount of memory"),
            ("cpus>=x", "\"x\" is no number of threads"),
            ("disks>=2", "\"disks\" cannot be chosen by with >="),
            ("location=", "says nothing"),
            ("label.=x", "is no key of a label"),
            ("location", "is nothing to choose machines by"),
        ] {
            let said = text.parse::<Selector>().unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
