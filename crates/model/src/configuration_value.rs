//! Values of a configuration file: what each flag takes, and the arguments that a value becomes.
//!
//! A flag has one type, which is read from its definition. Text of the file goes to the parser of the flag, as text of
//! the command line and of the environment does. A value of another TOML type is converted only where nothing of it can
//! be lost. A number for a flag that takes text is rejected: `0123` and `0x1f` are other texts than the numbers that
//! TOML reads. So no value of a file is dropped or changed.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::{Arg, ArgAction};
use toml::Value;
use toml::de::{DeTable, DeValue};

use crate::policy_flags::LadderFlag;

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagType {
    /// No value: the flag is given or not.
    Switch,
    /// The word `true` or `false`.
    Truth,
    /// A number without a fraction.
    WholeNumber,
    /// A number, with a fraction or not.
    Number,
    /// One text, and never a list.
    Text,
    /// A text that is itself a list with commas.
    JoinedTexts,
    /// Any number of texts: the flag may be repeated.
    Texts,
}

/// The type of a flag.
#[must_use]
pub fn flag_type(flag: &Arg) -> FlagType {
    match flag.get_action() {
        ArgAction::SetTrue => return FlagType::Switch,
        ArgAction::Append => return FlagType::Texts,
        _ => {}
    }
    let id = flag.get_value_parser().type_id();
    if id == TypeId::of::<bool>() {
        FlagType::Truth
    } else if id == TypeId::of::<u32>() || id == TypeId::of::<usize>() {
        FlagType::WholeNumber
    } else if id == TypeId::of::<f64>() {
        FlagType::Number
    } else if id == TypeId::of::<LadderFlag>() {
        FlagType::JoinedTexts
    } else {
        FlagType::Text
    }
}

impl FlagType {
    /// What a file has to give.
    const fn describe(self) -> &'static str {
        match self {
            Self::Switch | Self::Truth => "true or false",
            Self::WholeNumber => "a whole number",
            Self::Number => "a number",
            Self::Text => "one text in quotes",
            Self::JoinedTexts | Self::Texts => "a text in quotes, or a list of such texts",
        }
    }
}

/// The arguments that set a flag to the value of a file; none for a switch that is off. Fails with the name of the flag
/// if the value is of a type that the flag does not take.
pub fn arguments_of_value(flag: &Arg, value: &Value) -> Result<Vec<OsString>, String> {
    let name = flag.get_id().as_str();
    let flag_type = flag_type(flag);
    let wrong = |found: String| Err(format!("{name} takes {}, and {found}", flag_type.describe()));
    let argument = |text: &str| Ok(vec![OsString::from(format!("--{name}={text}"))]);
    match (flag_type, value) {
        (FlagType::Switch, Value::Boolean(false)) => Ok(Vec::new()),
        (FlagType::Switch, Value::Boolean(true)) => Ok(vec![OsString::from(format!("--{name}"))]),
        (FlagType::Truth, Value::Boolean(truth)) => argument(&truth.to_string()),
        (FlagType::WholeNumber | FlagType::Number, Value::Integer(number)) => argument(&number.to_string()),
        // This format keeps the fraction of a whole number.
        (FlagType::Number, Value::Float(number)) => argument(&format!("{number:?}")),
        (FlagType::Switch, _) => wrong(format!("this is {}", describe_type(value))),
        (_, Value::String(text)) => argument(text),
        (FlagType::Texts | FlagType::JoinedTexts, Value::Array(values)) => {
            let mut texts = Vec::new();
            for (number, value) in values.iter().enumerate() {
                let Value::String(text) = value else {
                    return wrong(format!("value {} of this list is {}", number + 1, describe_type(value)));
                };
                texts.push(text.as_str());
            }
            if texts.is_empty() {
                return wrong("this list is empty; leave the key out for the default".to_owned());
            }
            if flag_type == FlagType::JoinedTexts {
                return argument(&texts.join(","));
            }
            Ok(texts.iter().map(|text| OsString::from(format!("--{name}={text}"))).collect())
        }
        _ => wrong(format!("this is {}", describe_type(value))),
    }
}

/// The TOML type of a value, with its article.
#[must_use]
pub fn describe_type(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number with a fraction",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date or time",
        Value::Array(values) if !values.is_empty() && values.iter().all(Value::is_table) => {
            "a list of tables"
        }
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

/// A problem with a key of a file, with its line if that is known.
#[must_use]
pub fn locate_problem(lines: &BTreeMap<String, usize>, key: &str, problem: &str) -> String {
    lines.get(key).map_or_else(|| problem.to_owned(), |line| format!("line {line}: {problem}"))
}

/// Adds a key of a file to the keys that are read already, and returns the name of its flag. Fails for a second key of
/// the same flag: with dashes and with underscores it is one flag, and one of the two values would be lost.
pub fn claim_key(read: &mut BTreeMap<String, String>, key: &str) -> Result<String, String> {
    let name = key.replace('-', "_");
    match read.insert(name.clone(), key.to_owned()) {
        None => Ok(name),
        Some(other) => Err(format!("{key} is the same key as {other}; keep one of them")),
    }
}

/// The line of each key, counted from 1. The key of a table in a list is named `provider[0].name`, and the table
/// itself `provider[0]`. Empty for a text that is no TOML.
#[must_use]
pub fn key_lines(text: &str) -> BTreeMap<String, usize> {
    let line = |at: usize| text.get(..at).unwrap_or_default().matches('\n').count() + 1;
    let mut lines = BTreeMap::new();
    let Ok(table) = DeTable::parse(text) else { return lines };
    for (key, value) in table.get_ref() {
        let name = key.get_ref().to_string();
        if let DeValue::Array(values) = value.get_ref() {
            for (number, value) in values.iter().enumerate() {
                let DeValue::Table(table) = value.get_ref() else { continue };
                lines.insert(format!("{name}[{number}]"), line(value.span().start));
                for key in table.keys() {
                    lines.insert(format!("{name}[{number}].{}", key.get_ref()), line(key.span().start));
                }
            }
        }
        lines.insert(name, line(key.span().start));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flag: &Arg, value: &str) -> Result<String, String> {
        let table: toml::Table = format!("x = {value}").parse().unwrap();
        let arguments = arguments_of_value(flag, &table["x"])?;
        Ok(arguments
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect::<Vec<_>>()
            .join(" "))
    }

    #[test]
    fn value_is_converted_without_loss_or_rejected_by_name() {
        let one = |id: &'static str| Arg::new(id).long(id);
        let switch = one("x").action(ArgAction::SetTrue);
        let truth = one("x").value_parser(clap::value_parser!(bool));
        let whole = one("x").value_parser(clap::value_parser!(u32));
        let number = one("x").value_parser(clap::value_parser!(f64));
        let text = one("x");
        let texts = one("x").action(ArgAction::Append);
        for (flag, value, expected) in [
            (&switch, "true", Ok("--x")),
            (&switch, "false", Ok("")),
            (&switch, "\"true\"", Err("x takes true or false, and this is a text")),
            (&truth, "true", Ok("--x=true")),
            (&truth, "false", Ok("--x=false")),
            (&truth, "1", Err("x takes true or false, and this is a whole number")),
            (&whole, "7", Ok("--x=7")),
            (&whole, "\"7\"", Ok("--x=7")),
            (&whole, "7.0", Err("x takes a whole number, and this is a number with a fraction")),
            (&whole, "true", Err("x takes a whole number, and this is true or false")),
            (&number, "1", Ok("--x=1")),
            (&number, "0.25", Ok("--x=0.25")),
            (&number, "1979-05-27", Err("x takes a number, and this is a date or time")),
            (&text, "\"a b\"", Ok("--x=a b")),
            (&text, "5", Err("x takes one text in quotes, and this is a whole number")),
            (&text, "[\"a\", \"b\"]", Err("x takes one text in quotes, and this is a list")),
            (&text, "{}", Err("x takes one text in quotes, and this is a table")),
            (&texts, "\"a\"", Ok("--x=a")),
            (&texts, "[\"a\", \"b\"]", Ok("--x=a --x=b")),
            (
                &texts,
                "[\"a\", 1]",
                Err(
                    "x takes a text in quotes, or a list of such texts, and value 2 of this list is a whole number",
                ),
            ),
            (
                &texts,
                "[{}]",
                Err("x takes a text in quotes, or a list of such texts, and value 1 of this list is a table"),
            ),
            (
                &texts,
                "[]",
                Err(
                    "x takes a text in quotes, or a list of such texts, and this list is empty; leave the key out for \
                     the default",
                ),
            ),
        ] {
            let found = read(flag, value);
            assert_eq!(found.as_deref().map_err(String::as_str), expected, "{flag:?} {value}");
        }
    }

    #[test]
    fn line_is_that_of_the_key() {
        let text = "# first\na = 1\nb-c = [\n  \"x\",\n]\n\n[[p]]\nname = \"n\"\n[[p]]\n\nname = \"m\"\n";
        let lines = key_lines(text);
        let found: Vec<_> = lines.iter().map(|(key, line)| (key.as_str(), *line)).collect();
        let expected =
            [("a", 2), ("b-c", 3), ("p", 7), ("p[0]", 7), ("p[0].name", 8), ("p[1]", 9), ("p[1].name", 11)];
        assert_eq!(found, expected);
        assert!(key_lines("a = ").is_empty());
    }
}
