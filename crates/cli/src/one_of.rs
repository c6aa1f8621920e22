//! Parser of an argument that has a fixed set of values: case does not count.
//!
//! Every such argument of a `String` uses it, so that the code behind the parser sees one spelling. An argument of an
//! enum that derives `ValueEnum` has `ignore_case` in its place.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// Accepts one of a set of values, in any case. The result has the spelling of the set.
#[derive(Clone, Debug)]
pub struct OneOf {
    values: Vec<&'static str>,
}

/// A parser that accepts these values.
#[must_use]
pub fn one_of<const N: usize>(values: [&'static str; N]) -> OneOf {
    OneOf { values: values.to_vec() }
}

impl OneOf {
    fn find(&self, text: &str) -> Option<&'static str> {
        self.values.iter().copied().find(|value| value.eq_ignore_ascii_case(text))
    }
}

impl TypedValueParser for OneOf {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        if let Some(value) = value.to_str().and_then(|text| self.find(text)) {
            return Ok(value.to_owned());
        }
        // The error of the library, which lists the values.
        PossibleValuesParser::new(self.values.clone()).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values.iter().copied().map(PossibleValue::new)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_does_not_count_and_the_result_has_one_spelling() {
        let command = clap::Command::new("p");
        let parser = one_of(["automatic", "NeedsHuman"]);
        let parse = |text: &str| parser.parse_ref(&command, None, OsStr::new(text));
        for (text, expected) in [
            ("automatic", "automatic"),
            ("AUTOMATIC", "automatic"),
            ("needshuman", "NeedsHuman"),
            ("NEEDSHUMAN", "NeedsHuman"),
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        for text in ["", "auto", "automatic ", "ÄUTOMATIC"] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
