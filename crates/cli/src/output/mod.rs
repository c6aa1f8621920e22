//! Output formats: text for people, JSON and YAML for programs; standard output and standard error.
//!
//! A command renders its result as text or as JSON ([`Format`][]). What else `--output` selects is made from the JSON: YAML
//! ([`yaml`][]), the text of a template ([`json_path`][]), columns ([`custom_columns`][]), and names. Times in text are in the
//! zone of the user ([`zone`][]).
//!
//! A terminal gets text that fits it ([`terminal`][], [`table`][]), and colours ([`color`][]), which only repeat what a word
//! says. So output reads the same in a terminal, a file and a chat.

use std::ffi::OsString;
use std::io::Write as _;

use serde::Serialize;
use serde_json::Value;

use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::output::custom_columns::CustomColumns;
use crate::output::json_path::JsonPathTemplate;
use crate::output::terminal::terminal_columns;
use crate::output::zone::current_zone;
use crate::target_flags::TargetFlags;
use model::text_layout::{fit_command, fit_text};

pub mod color;
pub mod custom_columns;
pub mod file;
pub mod json_path;
pub mod table;
pub mod terminal;
pub mod yaml;
pub mod zone;

/// Indent of a command below the sentence that names it.
const COMMAND_INDENT: usize = 2;

/// Format of a command's answer, as `--output` selects it.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// For people: tables and text.
    Table,
    /// The same, and more columns in lists.
    Wide,
    /// For programs: fields are added, never renamed.
    Json,
    /// The same fields as YAML.
    Yaml,
    /// The name of each object, as other commands accept it.
    Name,
    /// The text of a template for the JSON.
    JsonPath(JsonPathTemplate),
    /// A table with these columns of the JSON.
    CustomColumns(CustomColumns),
}

impl Output {
    /// Parses a value of `--output`. The error is a sentence.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (format, argument) =
            text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        match (format.to_ascii_lowercase().as_str(), argument) {
            ("table", None) => Ok(Self::Table),
            ("wide", None) => Ok(Self::Wide),
            ("json", None) => Ok(Self::Json),
            ("yaml", None) => Ok(Self::Yaml),
            ("name", None) => Ok(Self::Name),
            ("jsonpath", Some(template)) => JsonPathTemplate::parse(template).map(Self::JsonPath),
            ("custom-columns", Some(columns)) => CustomColumns::parse(columns).map(Self::CustomColumns),
            _ => Err("give table, wide, json, yaml, name, jsonpath=TEMPLATE or custom-columns=HEADER:PATH,…"
                .to_owned()),
        }
    }

    /// The output that arguments request which the parser refuses: an error has to be printed, too. JSON, or a table.
    #[must_use]
    pub fn requested_by(arguments: &[OsString]) -> Self {
        let mut words = arguments.iter().skip(1).filter_map(|argument| argument.to_str());
        let mut output = Self::Table;
        while let Some(word) = words.next() {
            let value = match word {
                "-o" | "--output" => words.next(),
                _ => word.strip_prefix("--output=").or_else(|| {
                    word.strip_prefix("-o").map(|value| value.strip_prefix('=').unwrap_or(value))
                }),
            };
            if let Some(value) = value {
                output = if value.eq_ignore_ascii_case("json") { Self::Json } else { Self::Table };
            }
        }
        output
    }

    /// The format in which a command renders its result; the rest is made from JSON.
    #[must_use]
    pub const fn format(&self) -> Format {
        match self {
            Self::Table | Self::Wide => Format::Table,
            Self::Json | Self::Yaml | Self::Name | Self::JsonPath(_) | Self::CustomColumns(_) => Format::Json,
        }
    }

    /// Converts what a command rendered in [`Output::format`].
    pub fn convert(&self, rendered: String) -> Result<String, CliError> {
        match self {
            Self::Table | Self::Wide | Self::Json => Ok(rendered),
            Self::Yaml | Self::Name | Self::JsonPath(_) | Self::CustomColumns(_) => {
                self.convert_json(&serde_json::from_str(&rendered)?)
            }
        }
    }

    /// A document in this output. A table is made of the objects in it.
    pub fn convert_json(&self, document: &Value) -> Result<String, CliError> {
        match self {
            Self::Table | Self::Wide | Self::Json => format_json(document),
            Self::Yaml => yaml::format_document(document),
            Self::JsonPath(template) => Ok(template.render(document)),
            Self::CustomColumns(columns) => Ok(columns.format(objects_of(document), true)),
            Self::Name => match machine_name_of(document) {
                Some(name) => Ok(format!("{name}\n")),
                None => Err(CliError::Failed("the answer has no name of an object".to_owned())),
            },
        }
    }

    /// A document of an output without an end: a line of JSON, or a document of a stream of YAML.
    pub(crate) fn format_line(&self, document: &Value) -> Result<String, CliError> {
        Ok(match self {
            Self::Yaml => format!("---\n{}", yaml::format_document(document)?),
            Self::JsonPath(template) => template.render(document),
            _ => format!("{}\n", serde_json::to_string(document)?),
        })
    }

    /// Rejects an output that is not possible without an end.
    pub(crate) fn require_endless(&self) -> Result<(), CliError> {
        if matches!(self, Self::CustomColumns(_)) {
            return Err(CliError::Invalid(
                "a watch cannot align columns, because it has no end; use -o jsonpath=TEMPLATE".to_owned(),
            ));
        }
        Ok(())
    }
}

/// The objects of a document: those in its only list of objects, or the document itself. A document with a name is such
/// an object, and its lists are parts of it.
fn objects_of(document: &Value) -> Vec<&Value> {
    if document.get("name").is_some_and(|name| !name.is_null()) {
        return vec![document];
    }
    let fields = document.as_object().into_iter().flat_map(serde_json::Map::values);
    let mut lists = fields.filter_map(Value::as_array).filter(|list| list.iter().any(Value::is_object));
    match (lists.next(), lists.next()) {
        (Some(list), None) => list.iter().collect(),
        _ => vec![document],
    }
}

/// The name of the machine that a document is about, as commands accept it.
fn machine_name_of(document: &Value) -> Option<String> {
    let names = document.get("name")?;
    let field = |name: &str| names.get(name).and_then(Value::as_str);
    match (field("provider"), field("providerId"), field("machine")) {
        (Some(provider), Some(id), _) => Some(format!("{provider}/{id}")),
        (_, _, machine) => machine.map(str::to_owned),
    }
}

/// The format in which a command renders its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Tables and text for people.
    Table,
    /// For programs: fields are added, never renamed.
    Json,
}

/// Output of a command as indented JSON.
pub fn format_json(answer: &impl Serialize) -> Result<String, CliError> {
    let mut text = serde_json::to_string_pretty(answer)?;
    text.push('\n');
    Ok(text)
}

/// Writes to standard output. A closed pipe (`| head`) is not an error.
pub fn print_text(text: &str) -> std::io::Result<()> {
    print_chunk(text).map(drop)
}

/// Writes a part of a continuous output, and returns whether standard output is still open.
pub fn print_chunk(text: &str) -> std::io::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Reports an error on standard error: as a sentence, or as an object for programs. Commands in it have the flags that
/// name the fleet.
pub fn report_error(error: &CliError, output: &Output, target_flags: &TargetFlags) {
    if *output == Output::Json {
        write_stderr(&error_document(error, target_flags).to_string());
        return;
    }
    print_stderr(&format!("shepherdctl: {}", target_flags.qualify(&error.to_string())));
    if let Some(command) = error.next_command() {
        print_command(command);
    }
}

/// The error for programs. Commands in its sentences have the flags that name the fleet, as those for people have. The
/// command that confirms an order repeats the whole command line, so it has them already.
fn error_document(error: &CliError, target_flags: &TargetFlags) -> Value {
    let mut document = error.to_json();
    if let Some(sentences) = document.get_mut("error") {
        qualify_strings(sentences, target_flags);
    }
    document
}

fn qualify_strings(value: &mut Value, target_flags: &TargetFlags) {
    match value {
        Value::String(text) => *text = target_flags.qualify(text),
        Value::Array(items) => {
            for item in items {
                qualify_strings(item, target_flags);
            }
        }
        Value::Object(fields) => {
            for field in fields.values_mut() {
                qualify_strings(field, target_flags);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The error for names that no object has. People get a line for each problem: all but the last are printed here.
/// Programs get one error with all of them. `None` without problems.
pub(crate) fn unresolved_error(
    problems: &[String],
    output: &Output,
    target_flags: &TargetFlags,
) -> Option<CliError> {
    let (last, others) = problems.split_last()?;
    let message = if *output == Output::Json {
        problems.join("; ")
    } else {
        for problem in others {
            print_stderr(&format!("shepherdctl: {}", target_flags.qualify(problem)));
        }
        last.clone()
    };
    Some(CliError::Ended { exit: ExitCode::NotFound, message })
}

/// Writes sentences to standard error, with times in the zone of the user, in lines that fit its terminal.
pub fn print_stderr(sentences: &str) {
    write_stderr(&fit_text(&current_zone().localize(sentences), terminal_columns(&std::io::stderr())));
}

/// Writes a command to standard error, indented and in lines that fit its terminal, which can be pasted together. Its times
/// stay as the user wrote them.
pub(crate) fn print_command(command: &str) {
    write_stderr(&fit_command(command, COMMAND_INDENT, terminal_columns(&std::io::stderr())));
}

fn write_stderr(text: &str) {
    // Ignored: without standard error the exit code still reports the failure.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use server::api::api_error::error_status;
    use tonic::Code;

    use super::*;
    use crate::command::grammar;

    #[test]
    fn output_is_parsed_by_its_name_in_any_case() {
        for (text, expected) in [
            ("table", Some(Output::Table)),
            ("Wide", Some(Output::Wide)),
            ("JSON", Some(Output::Json)),
            ("yaml", Some(Output::Yaml)),
            ("name", Some(Output::Name)),
            ("jsonpath={.phase}", JsonPathTemplate::parse("{.phase}").ok().map(Output::JsonPath)),
            ("custom-columns=P:.phase", CustomColumns::parse("P:.phase").ok().map(Output::CustomColumns)),
            ("xml", None),
            ("json=x", None),
            ("jsonpath", None),
            ("jsonpath=", None),
            ("jsonpath=.phase", None),
            ("custom-columns=", None),
            ("custom-columns=PHASE", None),
            ("", None),
        ] {
            assert_eq!(Output::parse(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn output_of_a_refused_command_line_is_found() {
        for (line, expected) in [
            ("shepherdctl get nodes -o json", Output::Json),
            ("shepherdctl -ojson get nodes", Output::Json),
            ("shepherdctl get -o=JSON nodes", Output::Json),
            ("shepherdctl get nodes --output=json", Output::Json),
            ("shepherdctl --output json get nodes", Output::Json),
            ("shepherdctl get nodes -o", Output::Table),
            ("shepherdctl get nodes -o yaml", Output::Table),
            ("shepherdctl get json", Output::Table),
        ] {
            let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(Output::requested_by(&arguments), expected, "{line}");
        }
    }

    #[test]
    fn programs_get_one_error_for_all_names() {
        let (problems, flags) = (["no a", "no b"].map(str::to_owned), TargetFlags::default());
        for (output, expected) in [(Output::Json, "no a; no b"), (Output::Table, "no b")] {
            let error = unresolved_error(&problems, &output, &flags).unwrap();
            assert_eq!((error.exit_code(), error.to_string().as_str()), (ExitCode::NotFound, expected));
        }
        assert!(unresolved_error(&[], &Output::Table, &flags).is_none());
    }

    #[test]
    fn commands_in_an_error_for_programs_reach_the_same_fleet() {
        let arguments = ["shepherdctl", "--context", "prod", "why", "m"].map(OsString::from);
        let flags = TargetFlags::from_arguments(&arguments, &grammar());
        let sentence = "no m; run: shepherdctl get machines";
        let found = error_document(
            &CliError::Ended { exit: ExitCode::NotFound, message: sentence.to_owned() },
            &flags,
        );
        assert_eq!(found["error"]["message"], "no m; run: shepherdctl --context prod get machines");
        let status = error_status(Code::NotFound, "NO_SUCH_MACHINE", sentence);
        let error = CliError::Api {
            exit: ExitCode::NotFound,
            message: sentence.to_owned(),
            status: Box::new(status),
        };
        let found = error_document(&error, &flags);
        assert!(!found.to_string().contains("shepherdctl get"), "{found}");
        assert_eq!(error_document(&error, &TargetFlags::default()), error.to_json(), "no flag was given");
        let command = "shepherdctl retire m --context prod --yes";
        let error =
            CliError::Unconfirmed { message: "nothing undoes it".to_owned(), command: command.to_owned() };
        assert_eq!(error_document(&error, &flags)["command"], command, "it is repeated as it was typed");
    }

    #[test]
    fn rendered_json_is_converted() {
        let response =
            json!({ "name": { "machine": "u", "provider": "sim", "providerId": "7" }, "events": [{}] });
        for (output, expected) in [
            ("name", "sim/7\n"),
            ("jsonpath={.name.provider}", "sim"),
            ("custom-columns=ID:.name.providerId", "ID\n7\n"),
        ] {
            assert_eq!(Output::parse(output).unwrap().convert(response.to_string()).unwrap(), expected);
        }
        let unlisted = json!({ "name": { "machine": "u" } });
        assert_eq!(Output::Name.convert_json(&unlisted).unwrap(), "u\n");
        // The response to an order about no machine has no name.
        let order = json!({ "name": null, "outcomes": [{ "changed": true }] });
        let changed = Output::parse("custom-columns=CHANGED:.changed").unwrap();
        assert_eq!(changed.convert_json(&order).unwrap(), "CHANGED\ntrue\n");
        let list = json!({ "rows": [{ "at": 1 }, { "at": 2 }], "notes": ["n"] });
        let columns = Output::parse("custom-columns=AT:.at").unwrap();
        assert_eq!(columns.convert_json(&list).unwrap(), "AT\n1\n2\n");
        assert!(Output::Name.convert_json(&list).is_err());
        assert_eq!(Output::Table.convert("a table\n".to_owned()).unwrap(), "a table\n");
    }
}
