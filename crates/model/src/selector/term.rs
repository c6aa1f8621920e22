//! Terms of a selector: what they require, and which machines meet them.

use crate::byte_size::parse_bytes;
use crate::firmware_text::meaningful_text;
use crate::label::{Labels, check_label_key, check_label_value};
use crate::phase::Phase;
use crate::selector::error::{SelectorError, quote_excerpt};
use crate::selector::key::{KEYS_TEXT, SelectorKey};
use crate::selector::lexer::{Condition, RawTerm, RawValue};
use crate::selector::traits::MachineTraits;

/// Longest name of a fact.
const MAX_FACT_CHARS: usize = 60;

/// A term of a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Term {
    /// A text of the machine is among these values, or is none of them.
    Text(SelectorKey, ValueSet),
    Label(String, LabelRequirement),
    /// The machine is in one of these phases, or in none of them.
    Phase {
        phases: Vec<Phase>,
        is_negated: bool,
    },
    /// The machine has one of these facts, or none of them.
    Fact {
        names: Vec<String>,
        is_negated: bool,
    },
    /// A number of the machine is at least this.
    AtLeast(SelectorKey, u64),
}

/// What a term requires of a label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LabelRequirement {
    Present,
    Absent,
    Values(ValueSet),
}

/// Values and prefixes of which one must fit, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValueSet {
    values: Vec<RawValue>,
    is_negated: bool,
}

/// What is known of a text of a machine.
#[derive(Clone, Copy)]
enum KnownText<'a> {
    Unknown,
    /// The machine is known to have none.
    Absent,
    Text(&'a str),
}

impl RawValue {
    fn fits(&self, text: &str) -> bool {
        if self.is_prefix { text.starts_with(&self.text) } else { text == self.text }
    }
}

impl ValueSet {
    fn admits(&self, text: KnownText<'_>) -> bool {
        match text {
            KnownText::Unknown => false,
            KnownText::Absent => self.is_negated,
            KnownText::Text(text) => self.values.iter().any(|value| value.fits(text)) != self.is_negated,
        }
    }

    /// Whether it admits a machine by its id at its provider, or by both names together.
    fn admits_name(&self, provider: Option<&str>, id: Option<&str>) -> bool {
        let Some(id) = id else { return false };
        let fits_both = |value: &RawValue| {
            value.text.contains('/')
                && provider.is_some_and(|provider| value.fits(&format!("{provider}/{id}")))
        };
        self.values.iter().any(|value| value.fits(id) || fits_both(value)) != self.is_negated
    }
}

impl Term {
    /// What the term is about.
    pub(super) const fn key(&self) -> SelectorKey {
        match self {
            Self::Text(key, _) | Self::AtLeast(key, _) => *key,
            Self::Label(..) => SelectorKey::Label,
            Self::Phase { .. } => SelectorKey::Phase,
            Self::Fact { .. } => SelectorKey::Fact,
        }
    }

    /// The key of the label that it is about.
    pub(super) fn label_key(&self) -> Option<&str> {
        if let Self::Label(key, _) = self { Some(key) } else { None }
    }

    /// The facts that it is about.
    pub(super) fn facts(&self) -> &[String] {
        if let Self::Fact { names, .. } = self { names } else { &[] }
    }

    /// Whether it requires this phase or one of several with it.
    pub(super) fn requires_phase(&self, phase: Phase) -> bool {
        matches!(self, Self::Phase { phases, is_negated: false } if phases.contains(&phase))
    }

    /// Whether the machine meets the term.
    pub(super) fn matches(&self, machine: &MachineTraits<'_>) -> bool {
        match self {
            Self::Text(SelectorKey::Name, set) => set.admits_name(machine.provider, machine.provider_id),
            Self::Text(key, set) => set.admits(known_text(*key, machine)),
            Self::Label(key, requirement) => requirement.admits(machine.labels, key),
            Self::Phase { phases, is_negated } => machine.phase.is_some_and(|found| {
                phases.iter().any(|phase| phase.as_str().eq_ignore_ascii_case(found)) != *is_negated
            }),
            Self::Fact { names, is_negated: false } => names.iter().any(|name| machine.facts.contains(name)),
            Self::Fact { names, is_negated: true } => {
                names.iter().all(|name| machine.known_facts.contains(name) && !machine.facts.contains(name))
            }
            Self::AtLeast(key, least) => known_number(*key, machine).is_some_and(|found| found >= *least),
        }
    }
}

impl LabelRequirement {
    fn admits(&self, labels: &Labels, key: &str) -> bool {
        let found = labels.get(key);
        match self {
            Self::Present => found.is_some(),
            Self::Absent => found.is_none(),
            Self::Values(set) => {
                set.admits(found.map_or(KnownText::Absent, |value| KnownText::Text(value.as_str())))
            }
        }
    }
}

/// The text of a machine that a term is about. A placeholder of firmware is the name of nothing: agents of an earlier
/// release reported some.
fn known_text<'a>(key: SelectorKey, machine: &MachineTraits<'a>) -> KnownText<'a> {
    let firmware = |text: Option<&'a str>| text.and_then(meaningful_text);
    let found = match key {
        SelectorKey::Cluster => return machine.cluster.map_or(KnownText::Absent, KnownText::Text),
        SelectorKey::Provider => machine.provider,
        SelectorKey::Location => machine.location,
        SelectorKey::Manufacturer => firmware(machine.hardware.manufacturer.as_deref()),
        SelectorKey::Product => firmware(machine.hardware.product.as_deref()),
        // The other keys have terms of their own.
        _ => None,
    };
    found.map_or(KnownText::Unknown, KnownText::Text)
}

/// The number of a machine that a term is about.
const fn known_number(key: SelectorKey, machine: &MachineTraits<'_>) -> Option<u64> {
    match key {
        SelectorKey::Memory => machine.hardware.memory,
        SelectorKey::Cpus => machine.hardware.cpus,
        _ => None,
    }
}

/// Checks a term of the selector `source`.
pub(super) fn parse_term(raw: RawTerm<'_>, source: &str) -> Result<Term, SelectorError> {
    if let Some(key) = raw.key.strip_prefix("label.") {
        return Ok(Term::Label(key.to_owned(), parse_label(key, &raw)?));
    }
    let key = SelectorKey::find(raw.key).ok_or_else(|| unknown_key(&raw, source))?;
    let text = raw.text;
    if raw.is_negated {
        return Err(SelectorError::new(format!(
            "{} is no term of a selector, because only a label can be missing; write {}!=VALUE",
            quote_excerpt(text),
            key.as_str()
        )));
    }
    if matches!(key, SelectorKey::Memory | SelectorKey::Cpus) {
        return parse_least(key, &raw);
    }
    let (values, is_negated) = match raw.condition {
        Condition::Equal(value) => (vec![value], false),
        Condition::NotEqual(value) => (vec![value], true),
        Condition::In(values) => (values, false),
        Condition::NotIn(values) => (values, true),
        Condition::Present => {
            let key = key.as_str();
            return Err(SelectorError::new(format!(
                "{key:?} has no value to compare with; write {key}=VALUE"
            )));
        }
        Condition::AtLeast(_) => {
            return Err(SelectorError::new(format!(
                "{} cannot be compared with >=; only memory and cpus can, and {} has =, !=, in and notin",
                quote_excerpt(text),
                key.as_str()
            )));
        }
    };
    match key {
        SelectorKey::Phase => {
            let phases = values.iter().map(parse_phase).collect::<Result<_, _>>()?;
            Ok(Term::Phase { phases, is_negated })
        }
        SelectorKey::Fact => {
            let names = values.into_iter().map(parse_fact).collect::<Result<_, _>>()?;
            Ok(Term::Fact { names, is_negated })
        }
        _ if values.iter().any(|value| value.text.is_empty() && !value.is_prefix) => {
            Err(SelectorError::new(format!(
                "{} has no value to compare with; write {1}=VALUE, or {1}=* for any value",
                quote_excerpt(text),
                key.as_str()
            )))
        }
        _ => Ok(Term::Text(key, ValueSet { values, is_negated })),
    }
}

/// The error for a key that does not exist. kubectl selects by labels without a word before them.
fn unknown_key(raw: &RawTerm<'_>, source: &str) -> SelectorError {
    let key = quote_excerpt(raw.key);
    if raw.key == SelectorKey::Label.as_str() || check_label_key(raw.key).is_err() {
        return SelectorError::new(format!(
            "{key} is no key of a selector; the keys are {KEYS_TEXT}, and a value with a comma is written in quotes"
        ));
    }
    let label = if raw.is_negated { format!("!label.{}", raw.key) } else { format!("label.{}", raw.text) };
    let message = format!(
        "{key} is no key of a selector; a label is written {}, a value with a comma is written in quotes, and the keys \
         are {KEYS_TEXT}",
        quote_excerpt(&label)
    );
    let (before, after) = source.split_at(raw.key_at);
    SelectorError::new(message).with_correction(format!("{before}label.{after}"))
}

fn parse_label(key: &str, raw: &RawTerm<'_>) -> Result<LabelRequirement, SelectorError> {
    check_part_of_label(key, check_label_key)?;
    let (values, is_negated) = match &raw.condition {
        Condition::Present if raw.is_negated => return Ok(LabelRequirement::Absent),
        Condition::Present => return Ok(LabelRequirement::Present),
        _ if raw.is_negated => {
            return Err(SelectorError::new(format!(
                "{} has an exclamation mark and a value; write label.{key}!=VALUE, or !label.{key} for a missing label",
                quote_excerpt(raw.text)
            )));
        }
        Condition::Equal(value) => (std::slice::from_ref(value), false),
        Condition::NotEqual(value) => (std::slice::from_ref(value), true),
        Condition::In(values) => (values.as_slice(), false),
        Condition::NotIn(values) => (values.as_slice(), true),
        Condition::AtLeast(_) => {
            return Err(SelectorError::new(format!(
                "{} cannot be compared with >=, because the value of a label is a text; write label.{key}=VALUE",
                quote_excerpt(raw.text)
            )));
        }
    };
    for value in values {
        check_part_of_label(&value.text, check_label_value)?;
    }
    Ok(LabelRequirement::Values(ValueSet { values: values.to_vec(), is_negated }))
}

/// Checks a key or a value of a label. The error does not repeat a text that is far too long.
fn check_part_of_label(text: &str, check: fn(&str) -> Result<(), String>) -> Result<(), SelectorError> {
    const MAX_REPEATED_BYTES: usize = 100;
    check(text).map_err(|reason| {
        SelectorError::new(if text.len() > MAX_REPEATED_BYTES {
            format!("{} is too long for a part of a label", quote_excerpt(text))
        } else {
            reason
        })
    })
}

fn parse_least(key: SelectorKey, raw: &RawTerm<'_>) -> Result<Term, SelectorError> {
    let (word, example) = match key {
        SelectorKey::Memory => ("memory", "memory>=64GiB"),
        _ => ("cpus", "cpus>=32"),
    };
    let value = match &raw.condition {
        Condition::AtLeast(value) => value,
        Condition::Present => {
            return Err(SelectorError::new(format!(
                "{word:?} has no value; a shell takes the > of {example} for a redirection, so write the selector in \
                 quotes: '{example}'"
            )));
        }
        Condition::Equal(value) => {
            return Err(SelectorError::new(format!(
                "{} would hardly ever match a machine; write {word}>={}",
                quote_excerpt(raw.text),
                quote_excerpt(&value.text).trim_matches('"')
            )));
        }
        _ => {
            return Err(SelectorError::new(format!(
                "{} cannot be used, because {word} has only >=; write for example {example}",
                quote_excerpt(raw.text)
            )));
        }
    };
    let text = quote_excerpt(&value.text);
    let wrong = |kind: &str| SelectorError::new(format!("{text} is no {kind}; write for example {example}"));
    let least = match key {
        SelectorKey::Memory => parse_bytes(&value.text),
        _ => value.text.parse().ok(),
    };
    let kind = if key == SelectorKey::Memory { "amount of memory" } else { "number of threads" };
    least.filter(|_| !value.is_prefix).map(|least| Term::AtLeast(key, least)).ok_or_else(|| wrong(kind))
}

fn parse_phase(value: &RawValue) -> Result<Phase, SelectorError> {
    Phase::find_by_name(&value.text).filter(|_| !value.is_prefix).ok_or_else(|| {
        let star = if value.is_prefix { "*" } else { "" };
        SelectorError::new(format!(
            "{} is not a phase; the phases are {}",
            quote_excerpt(&format!("{}{star}", value.text)),
            Phase::list_names()
        ))
    })
}

fn parse_fact(value: RawValue) -> Result<String, SelectorError> {
    let text = &value.text;
    let fits = !value.is_prefix
        && (1..=MAX_FACT_CHARS).contains(&text.len())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if fits {
        return Ok(value.text);
    }
    let star = if value.is_prefix { "*" } else { "" };
    Err(SelectorError::new(format!(
        "{} is not the name of a fact; names of facts are, for example, hold or agent_started",
        quote_excerpt(&format!("{text}{star}"))
    )))
}
