//! The fleet that a command line names, repeated in each command that a message prints.
//!
//! A person pastes such a command. Without the `--context prod` of the command before, it would reach another fleet.
//! Messages come from the server too, which does not know how it was reached, so the flags are added where a text is
//! printed. A fleet that the environment names needs no flag: the pasted command has the same environment.

use std::ffi::OsString;

use clap::Command;

use crate::order::idempotency_key::mask_url_password;
use model::shell_words::quote_if_needed;

const PROGRAM: &str = "shepherdctl";
/// Commands that call no API: a context would not help them, or they would refuse it.
const WITHOUT_API: [&[&str]; 8] = [
    &["completions"],
    &["contexts"],
    &["declare"],
    &["explain"],
    &["manual"],
    &["options"],
    &["policy", "disable-two-person-rule"],
    &["tokens", "bootstrap"],
];

/// The flags of a command line that name its fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetFlags {
    /// The flags as they are typed; empty without any.
    flags: String,
    /// Whether they name a context.
    name_context: bool,
    /// The first word of every command.
    commands: Vec<String>,
}

impl TargetFlags {
    /// The flags of these arguments, the program's own name first. The password of a database is masked.
    #[must_use]
    pub fn from_arguments(arguments: &[OsString], grammar: &Command) -> Self {
        let mut words =
            arguments.iter().skip(1).filter_map(|word| word.to_str()).take_while(|word| *word != "--");
        let (mut context, mut is_direct, mut database) = (None, false, Vec::new());
        while let Some(word) = words.next() {
            let (flag, value) =
                word.split_once('=').map_or((word, None), |(flag, value)| (flag, Some(value)));
            match flag {
                "--direct" => is_direct = true,
                "--context" => context = context.or(value.or_else(|| words.next())),
                "--bmdb-url" | "--bmdb-dialect" => {
                    let value = value.or_else(|| words.next()).map(mask_url_password);
                    database.extend(value.map(|value| format!("{flag} {}", quote_if_needed(&value))));
                }
                _ => {}
            }
        }
        // A command that names a context uses no database.
        let flags = match context {
            Some(name) => vec![format!("--context {}", quote_if_needed(name))],
            None => is_direct.then(|| "--direct".to_owned()).into_iter().chain(database).collect(),
        };
        if flags.is_empty() {
            return Self::default();
        }
        let commands = grammar.get_subcommands().map(|command| command.get_name().to_owned());
        Self { flags: flags.join(" "), name_context: context.is_some(), commands: commands.collect() }
    }

    /// A text in which each command of `shepherdctl` has these flags. A line may have been broken between two words.
    #[must_use]
    pub fn qualify(&self, text: &str) -> String {
        if self.flags.is_empty() {
            return text.to_owned();
        }
        let mut output = String::with_capacity(text.len());
        let mut rest = text;
        while let Some((before, after)) = rest.split_once(PROGRAM) {
            output.push_str(before);
            output.push_str(PROGRAM);
            if !before.ends_with(is_word_char) && self.applies_to(after) {
                output.push(' ');
                output.push_str(&self.flags);
            }
            rest = after;
        }
        output.push_str(rest);
        output
    }

    /// Whether this text, which follows the name of the program, is a command that has no such flags yet.
    fn applies_to(&self, after: &str) -> bool {
        if !after.starts_with(char::is_whitespace) {
            return false;
        }
        let mut words =
            after.split_whitespace().map(|word| word.trim_end_matches(|c: char| !is_word_char(c)));
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let is_local = WITHOUT_API.iter().any(|command| [first, second].starts_with(command));
        self.commands.iter().any(|command| command == first) && !(self.name_context && is_local)
    }
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::grammar;

    fn flags(line: &str) -> TargetFlags {
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        TargetFlags::from_arguments(&arguments, &grammar())
    }

    #[test]
    fn fleet_is_found_wherever_the_command_line_names_it() {
        for (line, expected) in [
            ("shepherdctl why m", ""),
            ("shepherdctl --context prod why m", "--context prod"),
            ("shepherdctl why m --context=prod", "--context prod"),
            ("shepherdctl why m --direct", "--direct"),
            (
                "shepherdctl --direct --bmdb-url postgres://kim:secret@db/b why m --bmdb-dialect=cockroachdb",
                "--direct --bmdb-url 'postgres://kim:***@db/b' --bmdb-dialect cockroachdb",
            ),
            (
                "shepherdctl why m --bmdb-url=postgres:///b?host=/run&password=secret",
                "--bmdb-url 'postgres:///b?host=/run&password=***'",
            ),
            ("shepherdctl --context prod why m --bmdb-url postgres://db/b", "--context prod"),
            ("shepherdctl why m --bmdb-url", ""),
            ("shepherdctl why --context", ""),
            ("shepherdctl why -- --direct", ""),
            // Also of a line that the parser refuses.
            ("shepherdctl --context it's cordon m", "--context \"it's\""),
        ] {
            assert_eq!(flags(line).flags, expected, "{line}");
        }
    }

    #[test]
    fn every_printed_command_reaches_the_same_fleet() {
        let prod = flags("shepherdctl --context prod why m");
        for (text, expected) in [
            ("run: shepherdctl get updates", "run: shepherdctl --context prod get updates"),
            (
                "`shepherdctl why m` says it; then `shepherdctl retry m`",
                "`shepherdctl --context prod why m` says it; then `shepherdctl --context prod retry m`",
            ),
            ("run shepherdctl\n    hold m", "run shepherdctl --context prod\n    hold m"),
            ("/usr/bin/shepherdctl issues.", "/usr/bin/shepherdctl --context prod issues."),
            ("see `shepherdctl top`", "see `shepherdctl --context prod top`"),
            // What has flags already, what is no command, and what needs no fleet.
            ("shepherdctl --direct get machines", "shepherdctl --direct get machines"),
            ("shepherdctl: no", "shepherdctl: no"),
            ("update shepherdctl", "update shepherdctl"),
            ("the shepherdctl of another release", "the shepherdctl of another release"),
            ("my-shepherdctl why m", "my-shepherdctl why m"),
            ("shepherdctl contexts use NAME", "shepherdctl contexts use NAME"),
            ("shepherdctl declare restored", "shepherdctl declare restored"),
            ("shepherdctl explain Ready", "shepherdctl explain Ready"),
            ("shepherdctl tokens bootstrap", "shepherdctl tokens bootstrap"),
            ("shepherdctl tokens create", "shepherdctl --context prod tokens create"),
        ] {
            assert_eq!(prod.qualify(text), expected);
            assert_eq!(TargetFlags::default().qualify(text), text, "no flag was given");
        }
        let direct = flags("shepherdctl why m --direct");
        assert_eq!(direct.qualify("shepherdctl declare restored"), "shepherdctl --direct declare restored");
        let twice = prod.qualify(&prod.qualify("shepherdctl why m"));
        assert_eq!(twice, "shepherdctl --context prod why m");
    }
}
