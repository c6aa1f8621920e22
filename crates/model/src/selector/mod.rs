//! Selectors: terms that choose machines, for lists, watches, orders, updates and clusters.
//!
//! A selector is a text: `phase=Ready,location=ams*,label.row=7,memory>=64GiB`. There is one language and one evaluator.
//! So an operator who has listed machines gives an order to the same ones.
//!
//! # Syntax
//!
//! Terms are separated by commas, and a machine must meet all of them. A selector without terms matches every machine.
//!
//! * A term is a [`key::SelectorKey`], an operator and a value: `=` (also `==`), `!=`, `>=`. `in (a,b)` and `notin (a,b)`
//!   take several values. `label.KEY` requires a label with any value, and `!label.KEY` requires that it is missing.
//! * A value that ends in `*` is a prefix. Phases and facts have no prefixes, because a typing error would then match.
//! * A value in double quotes may have any character. A backslash takes the next comma, quote, star or backslash as it is,
//!   with and without quotes.
//! * Values come from device lists and from firmware, so they have commas: `Gigabyte Technology Co., Ltd.`. A comma before a
//!   space belongs to a value without quotes, unless another term follows. Any other comma ends the term.
//!
//! # Unknown values
//!
//! A term about a value that is not known, such as the memory before the first hardware report, is not met, with any
//! operator. So `location!=ams*` leaves out a machine without a location. A label that a machine does not have is known to
//! be missing, and so is the cluster of a machine that is in none: `!=` and `notin` match there.
//!
//! # Bounds
//!
//! The text has at most [`MAX_BYTES`], and all terms together at most [`MAX_VALUES`] values. The evaluation is a pure
//! function of [`MachineTraits`]. It reads nothing and is linear in the number of values.

pub mod compose;
pub mod error;
pub mod key;
mod lexer;
mod term;
pub mod traits;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::label::Labels;
use crate::phase::Phase;
use crate::selector::error::SelectorError;
use crate::selector::key::SelectorKey;
use crate::selector::lexer::split_terms;
use crate::selector::term::{Term, parse_term};
use crate::selector::traits::{Hardware, MachineTraits, NO_FACTS};

/// Longest text of a selector, in bytes.
pub const MAX_BYTES: usize = 16 << 10;
/// Most values of all terms. A term without a value counts as one.
pub const MAX_VALUES: usize = 500;
/// Most keys that [`correct_label_keys`] corrects.
const MAX_CORRECTIONS: usize = 32;

/// Terms that a machine must meet, all of them. A selector without terms matches every machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    terms: Vec<Term>,
    source: String,
}

impl Selector {
    /// Whether it has no terms, and so matches every machine.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.terms.is_empty()
    }

    /// Whether the machine meets all terms.
    #[must_use]
    pub fn matches(&self, machine: &MachineTraits<'_>) -> bool {
        self.matches_besides(machine, &[])
    }

    /// Whether the machine meets all terms but those about the `skipped` keys.
    #[must_use]
    pub fn matches_besides(&self, machine: &MachineTraits<'_>, skipped: &[SelectorKey]) -> bool {
        self.terms.iter().filter(|term| !skipped.contains(&term.key())).all(|term| term.matches(machine))
    }

    /// Whether a machine of this phase and provider may match: it meets the terms about these two.
    #[must_use]
    pub fn matches_class(&self, phase: &str, provider: Option<&str>) -> bool {
        let (hardware, labels) = (Hardware::default(), Labels::new());
        let machine = MachineTraits {
            provider,
            provider_id: None,
            location: None,
            hardware: &hardware,
            labels: &labels,
            phase: Some(phase),
            cluster: None,
            facts: &NO_FACTS,
            known_facts: &NO_FACTS,
        };
        self.terms.iter().filter(|term| CLASS_KEYS.contains(&term.key())).all(|term| term.matches(&machine))
    }

    /// Whether all terms are about the phase and the provider, so that [`Self::matches_class`] decides.
    #[must_use]
    pub fn is_about_class_alone(&self) -> bool {
        self.keys().all(|key| CLASS_KEYS.contains(&key))
    }

    /// The keys of its terms.
    pub fn keys(&self) -> impl Iterator<Item = SelectorKey> {
        self.terms.iter().map(Term::key)
    }

    /// The keys of the labels that it names. A change of one of them may change whether a machine matches.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        self.terms.iter().filter_map(Term::label_key)
    }

    /// The facts that it names, by the names of their tables without `machine_`.
    #[must_use]
    pub fn facts(&self) -> BTreeSet<&str> {
        self.terms.iter().flat_map(Term::facts).map(String::as_str).collect()
    }

    /// Whether a term requires one of some phases, and this is one of them. A term that only excludes phases names none.
    #[must_use]
    pub fn names_phase(&self, phase: Phase) -> bool {
        self.terms.iter().any(|term| term.requires_phase(phase))
    }
}

/// What a machine's class in lists consists of.
const CLASS_KEYS: [SelectorKey; 2] = [SelectorKey::Phase, SelectorKey::Provider];

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

impl FromStr for Selector {
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        if text.len() > MAX_BYTES {
            let bytes = text.len();
            return Err(SelectorError::new(format!(
                "the selector has {bytes} bytes, and at most {MAX_BYTES} are allowed; write fewer or shorter values"
            )));
        }
        let source = text.trim();
        if source.contains(char::is_control) {
            return Err(SelectorError::new(
                "the selector has a control character; write it as one line of visible text".to_owned(),
            ));
        }
        let raw_terms = split_terms(source)?;
        let values: usize = raw_terms.iter().map(|raw| raw.value_count().max(1)).sum();
        if values > MAX_VALUES {
            return Err(SelectorError::new(format!(
                "the selector has {values} values, and at most {MAX_VALUES} are allowed; use prefixes or labels"
            )));
        }
        let terms = raw_terms.into_iter().map(|raw| parse_term(raw, source));
        let terms = terms.collect::<Result<Vec<Term>, SelectorError>>()?;
        // Commas alone are no terms.
        let source = if terms.is_empty() { String::new() } else { source.to_owned() };
        Ok(Self { terms, source })
    }
}

/// The selector in which each key that does not exist is that of a label, as kubectl has it: `label.row=7` for `row=7`.
/// `None` if `text` is a selector already, or if something else is wrong with it.
#[must_use]
pub fn correct_label_keys(text: &str) -> Option<String> {
    let mut corrected = None;
    for _ in 0..MAX_CORRECTIONS {
        let parsed: Result<Selector, SelectorError> = corrected.as_deref().unwrap_or(text).parse();
        match parsed {
            Ok(_) => return corrected,
            Err(error) => corrected = Some(error.corrected?),
        }
    }
    None
}

#[cfg(test)]
mod tests;
