//! Suggestions for what users of kubectl and systemctl type: the command of `shepherdctl` that does it.
//!
//! A user who types `cordon` wants to stop work on a machine, and the edit distance to our commands does not help. So
//! each verb of those tools that has another name here is a row of `SUGGESTIONS`, and the words for kinds are in the table
//! of kinds ([`crate::object::kind`]). A verb that exists in some group only is found there. A test parses each command
//! that is suggested.
//!
//! The names that the user typed are in the suggested command, as far as the parser takes it then. So it can be run as it
//! is, except for reasons and other words in capitals.

use std::ffi::OsString;

use clap::Command;

use crate::object::kind::{KINDS, KindRow, ObjectKind};
use crate::selector_hint::quote_word;
use model::plain_text::is_hidden;

/// Words in the commands of suggestions for the names of what a command is about.
const NAME_PLACEHOLDERS: [&str; 4] = ["M", "NAME", "UPDATE", "CREDENTIAL"];
/// The word in a command for the labels to set.
const LABEL_PLACEHOLDER: &str = "KEY=VALUE";

/// What a user may type, and what to run in its place.
struct Suggestion {
    /// The words: a command, or a command with the kind or the subcommand after it.
    typed: &'static [&'static str],
    /// What the user wants, to follow "to".
    purpose: &'static str,
    /// The command that does it. Words in capitals are to be replaced.
    command: &'static str,
}

const fn suggestion(
    typed: &'static [&'static str],
    purpose: &'static str,
    command: &'static str,
) -> Suggestion {
    Suggestion { typed, purpose, command }
}

/// For the deletion of a machine. No row has `delete` alone: what `delete pod` wants is no retirement.
const RETIRE_MACHINE: Suggestion = suggestion(
    &["delete", "machine"],
    "give a machine back to its provider",
    "shepherdctl retire M --reason TEXT",
);

/// All suggestions. Of two rows that match, the one with more words counts.
const SUGGESTIONS: &[Suggestion] = &[
    // What is no kind here.
    suggestion(&["get", "events"], "show what happened to a machine", "shepherdctl timeline M"),
    suggestion(&["get", "logs"], "read a machine's logs", "shepherdctl logs M"),
    suggestion(&["get", "all"], "show the fleet on one page", "shepherdctl top --once"),
    // Verbs of kubectl.
    suggestion(&["cordon"], "stop work on a machine", "shepherdctl hold M --reason TEXT"),
    suggestion(&["drain"], "stop work on a machine", "shepherdctl hold M --reason TEXT"),
    suggestion(&["uncordon"], "end a hold on a machine", "shepherdctl release M"),
    RETIRE_MACHINE,
    Suggestion { typed: &["delete", "machines"], ..RETIRE_MACHINE },
    Suggestion { typed: &["delete", "node"], ..RETIRE_MACHINE },
    Suggestion { typed: &["delete", "nodes"], ..RETIRE_MACHINE },
    suggestion(&["delete", "cluster"], "delete a cluster", "shepherdctl cluster delete NAME --reason TEXT"),
    suggestion(&["delete", "artefact"], "delete a file", "shepherdctl artefacts delete NAME --reason TEXT"),
    suggestion(
        &["delete", "token"],
        "revoke a credential",
        "shepherdctl tokens revoke CREDENTIAL --reason TEXT",
    ),
    suggestion(&["delete", "update"], "end an update", "shepherdctl update abort UPDATE --reason TEXT"),
    suggestion(&["config"], "list contexts", "shepherdctl contexts"),
    suggestion(&["config", "use-context"], "use another context", "shepherdctl contexts use NAME"),
    suggestion(&["config", "delete-context"], "delete a context", "shepherdctl contexts delete NAME"),
    suggestion(&["config", "get-contexts"], "list contexts", "shepherdctl get contexts"),
    suggestion(&["config", "current-context"], "list contexts", "shepherdctl get contexts"),
    suggestion(&["config", "view"], "list contexts", "shepherdctl get contexts"),
    suggestion(&["auth"], "list credentials and their roles", "shepherdctl get tokens"),
    suggestion(&["auth", "whoami"], "show who calls", "shepherdctl whoami"),
    suggestion(&["auth", "can-i"], "show who calls, and with which role", "shepherdctl whoami"),
    suggestion(&["api-versions"], "show the versions of the servers", "shepherdctl version"),
    suggestion(&["rollout"], "list updates of the role server", "shepherdctl get updates"),
    suggestion(&["rollout", "status"], "show an update", "shepherdctl describe update UPDATE"),
    suggestion(&["rollout", "history"], "list updates of the role server", "shepherdctl get updates"),
    suggestion(&["rollout", "pause"], "pause an update", "shepherdctl update pause UPDATE --reason TEXT"),
    suggestion(&["rollout", "resume"], "resume an update", "shepherdctl update resume UPDATE --reason TEXT"),
    suggestion(
        &["rollout", "undo"],
        "roll a cluster back",
        "shepherdctl cluster upgrade NAME --rollback --reason TEXT",
    ),
    suggestion(&["rollout", "restart"], "reboot a machine", "shepherdctl reboot M --reason TEXT"),
    suggestion(
        &["scale"],
        "change a cluster's size",
        "shepherdctl cluster scale NAME --workers 3 --reason TEXT",
    ),
    suggestion(&["apply"], "create a cluster", "shepherdctl cluster create NAME --workers 3 --reason TEXT"),
    suggestion(&["create"], "create a cluster", "shepherdctl cluster create NAME --workers 3 --reason TEXT"),
    suggestion(
        &["create", "token"],
        "create a credential",
        "shepherdctl tokens create NAME --role viewer --reason TEXT",
    ),
    suggestion(
        &["edit"],
        "change a cluster's size",
        "shepherdctl cluster scale NAME --workers 3 --reason TEXT",
    ),
    suggestion(&["annotate"], "set a label", "shepherdctl label M KEY=VALUE"),
    suggestion(&["exec"], "read a machine's logs", "shepherdctl logs M"),
    suggestion(&["events"], "show what happened to a machine", "shepherdctl timeline M"),
    suggestion(&["cluster-info"], "show the fleet on one page", "shepherdctl top --once"),
    // Verbs of systemctl.
    suggestion(&["restart"], "reboot a machine", "shepherdctl reboot M --reason TEXT"),
    suggestion(&["start"], "switch a machine on", "shepherdctl power on M --reason TEXT"),
    suggestion(&["stop"], "switch a machine off", "shepherdctl power off M --reason TEXT"),
    suggestion(&["poweroff"], "switch a machine off", "shepherdctl power off M --reason TEXT"),
    suggestion(&["status"], "explain the state of a machine", "shepherdctl why M"),
    suggestion(&["is-active"], "explain the state of a machine", "shepherdctl why M"),
    suggestion(&["is-failed"], "list problems of the fleet", "shepherdctl issues"),
    suggestion(&["list-units"], "list machines", "shepherdctl get machines"),
    suggestion(&["list"], "list machines", "shepherdctl get machines"),
    suggestion(&["mask"], "leave a machine alone", "shepherdctl quarantine M --reason TEXT"),
];

/// The sentence for a command that does not exist here and has another name. `word` is the word that the parser does
/// not know, and `arguments` are those of the process, its own name first.
#[must_use]
pub fn suggest_command(grammar: &Command, word: &str, arguments: &[OsString]) -> Option<String> {
    let words: Vec<&str> = arguments.iter().skip(1).filter_map(|argument| argument.to_str()).collect();
    let place = words.iter().position(|found| *found == word)?;
    let before = place.checked_sub(1).and_then(|place| words.get(place)).copied();
    let after = words.get(place + 1).copied();
    let names_from = |place: usize| typed_names(words.get(place..).unwrap_or_default());
    match before.filter(|before| grammar.find_subcommand(before).is_some()) {
        Some(before) => {
            let names = names_from(place + 1);
            find_suggestion(grammar, &[before, word], &names)
                .or_else(|| suggest_kind(grammar, before, word, &names))
        }
        None => after
            .and_then(|after| find_suggestion(grammar, &[word, after], &names_from(place + 2)))
            .or_else(|| find_suggestion(grammar, &[word], &names_from(place + 1)))
            .or_else(|| suggest_group(grammar, word, after, &names_from(place + 2)))
            .or_else(|| suggest_verb_of_groups(grammar, word)),
    }
}

/// The names that a user typed: the words before the first flag, because a word after a flag may be its value. The word
/// for a kind in front of them, as in `edit cluster prod`, is none. Words with hidden characters are not repeated.
fn typed_names<'a>(rest: &[&'a str]) -> Vec<&'a str> {
    let mut names: Vec<&str> = rest.iter().copied().take_while(|word| !word.starts_with('-')).collect();
    if names.iter().any(|name| name.is_empty() || name.contains(is_hidden)) {
        return Vec::new();
    }
    let is_kind =
        |word: &str| ObjectKind::find(word).is_some() || KINDS.iter().any(|row| row.foreign.contains(&word));
    if names.len() > 1 && is_kind(names[0]) {
        names.remove(0);
    }
    names
}

/// The command with these names in the place of the word for them, or at its end if it has none. It stays as it is if the
/// parser does not take it with all of them: one of `scale deployment web` is no name.
fn fill_command(grammar: &Command, command: &str, names: &[&str]) -> String {
    let words = with_names(command, names);
    if names.is_empty() || grammar.clone().try_get_matches_from(&words).is_err() {
        return command.to_owned();
    }
    words.into_iter().map(quote_word).collect::<Vec<_>>().join(" ")
}

/// The words of the command, with the names.
fn with_names<'a>(command: &'a str, names: &[&'a str]) -> Vec<&'a str> {
    let has_labels = names.iter().any(|name| name.contains('='));
    let words = command.split(' ').filter(|word| !has_labels || *word != LABEL_PLACEHOLDER);
    let mut words: Vec<&str> = words.collect();
    match words.iter().position(|word| NAME_PLACEHOLDERS.contains(word)) {
        Some(place) => drop(words.splice(place..=place, names.iter().copied())),
        None => words.extend_from_slice(names),
    }
    words
}

fn find_suggestion(grammar: &Command, typed: &[&str], names: &[&str]) -> Option<String> {
    let found = SUGGESTIONS.iter().find(|known| known.typed == typed)?;
    let has_place = found.command.split(' ').any(|word| NAME_PLACEHOLDERS.contains(&word));
    let command =
        if has_place { fill_command(grammar, found.command, names) } else { found.command.to_owned() };
    Some(sentence(&typed.join(" "), found.purpose, &command))
}

fn sentence(typed: &str, purpose: &str, command: &str) -> String {
    format!("there is no command {typed:?}; to {purpose}, run: {command}")
}

/// For `get` or `describe` with another tool's word for a kind, and for a group of ours with a verb that reads.
fn suggest_kind(grammar: &Command, before: &str, word: &str, names: &[&str]) -> Option<String> {
    let typed = format!("{before} {word}");
    if let Some(kind) = ObjectKind::find(before) {
        return match word {
            "get" | "list" | "ls" => Some(list_sentence(grammar, &typed, kind.row(), names)),
            "describe" | "show" => Some(page_sentence(grammar, &typed, kind.row(), names)),
            _ => None,
        };
    }
    let row = KINDS.iter().find(|row| row.foreign.contains(&word))?;
    match before {
        "get" => Some(list_sentence(grammar, &typed, row, names)),
        "describe" => Some(page_sentence(grammar, &typed, row, names)),
        _ => None,
    }
}

fn list_sentence(grammar: &Command, typed: &str, row: &KindRow, names: &[&str]) -> String {
    let command = format!("shepherdctl get {}", row.plural);
    sentence(typed, &format!("list {}", row.plural), &fill_command(grammar, &command, names))
}

fn page_sentence(grammar: &Command, typed: &str, row: &KindRow, names: &[&str]) -> String {
    let name = if row.kind == ObjectKind::Policy { "" } else { " NAME" };
    let command = format!("shepherdctl describe {}{name}", row.singular);
    sentence(typed, "show all of it", &fill_command(grammar, &command, names))
}

/// For the word of a kind in the place of a verb: the group of that kind if it has the next word, or its list.
fn suggest_group(grammar: &Command, word: &str, after: Option<&str>, names: &[&str]) -> Option<String> {
    let row = ObjectKind::find(word)?.row();
    let groups = [row.singular, row.plural].into_iter().filter(|group| *group != word);
    let found = groups.filter_map(|group| grammar.find_subcommand(group)).find_map(|group| {
        let verb = group.find_subcommand(after?)?;
        Some((group.get_name(), verb.get_name()))
    });
    Some(match found {
        Some((group, verb)) => {
            let command = fill_command(grammar, &format!("shepherdctl {group} {verb}"), names);
            sentence(&format!("{word} {verb}"), "do that", &command)
        }
        None => list_sentence(grammar, word, row, &[]),
    })
}

/// For a verb that only groups have, such as `revoke`: all commands with that verb.
fn suggest_verb_of_groups(grammar: &Command, word: &str) -> Option<String> {
    let mut found = Vec::new();
    add_commands(grammar, "shepherdctl", word, &mut found);
    if found.is_empty() {
        return None;
    }
    Some(sentence(word, &format!("{word} something"), &found.join(", or ")))
}

/// Adds the path of each command below `command` that has this name.
fn add_commands(command: &Command, path: &str, name: &str, found: &mut Vec<String>) {
    for below in command.get_subcommands() {
        let path = format!("{path} {}", below.get_name());
        // The words of kinds are no verbs.
        if below.get_name() == name && ObjectKind::find(name).is_none() {
            found.push(path.clone());
        }
        add_commands(below, &path, name, found);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::error::ErrorKind;

    use super::*;
    use crate::command::grammar;

    #[test]
    fn every_suggestion_names_a_command_that_exists() {
        let kinds = KINDS.iter().flat_map(|row| {
            let name = if row.kind == ObjectKind::Policy { "" } else { " NAME" };
            [
                format!("shepherdctl get {}", row.plural),
                format!("shepherdctl describe {}{name}", row.singular),
            ]
        });
        for command in kinds {
            assert!(grammar().try_get_matches_from(command.split(' ')).is_ok(), "{command}");
        }
        for found in SUGGESTIONS {
            let fill = |word: &'static str| {
                if word == "CREDENTIAL" { "0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10" } else { word }
            };
            let words: Vec<&str> = found.command.split(' ').map(fill).collect();
            let parsed = grammar().try_get_matches_from(&words);
            assert!(parsed.is_ok(), "{:?}: {}: {:?}", found.typed, found.command, parsed.err());
        }
    }

    #[test]
    fn every_suggestion_is_for_what_the_parser_does_not_know() {
        let mut seen = BTreeSet::new();
        for found in SUGGESTIONS {
            assert!(seen.insert(found.typed), "{:?} is there twice", found.typed);
            let line = [&["shepherdctl"][..], found.typed].concat();
            let error = grammar().try_get_matches_from(&line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidSubcommand, "{:?}: {error}", found.typed);
        }
    }

    #[test]
    fn every_word_of_another_tool_is_none_of_ours() {
        for row in &KINDS {
            for (verb, word) in
                row.foreign.iter().copied().flat_map(|word| [("get", word), ("describe", word)])
            {
                let error = grammar().try_get_matches_from(["shepherdctl", verb, word]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidSubcommand, "{verb} {word}: {error}");
                let arguments = ["shepherdctl", verb, word].map(OsString::from);
                let found = suggest_command(&grammar(), word, &arguments);
                assert!(found.is_some_and(|found| found.contains(", run: shepherdctl ")), "{verb} {word}");
            }
        }
    }

    #[test]
    fn command_is_suggested_by_the_words_around_the_unknown_one() {
        for (line, word, expected) in [
            ("cordon", "cordon", Some("shepherdctl hold M --reason TEXT")),
            ("cordon sim-0007", "cordon", Some("shepherdctl hold sim-0007 --reason TEXT")),
            ("cordon sim-0007 sim-0008", "cordon", Some("shepherdctl hold sim-0007 sim-0008 --reason TEXT")),
            ("cordon it's", "cordon", Some("shepherdctl hold \"it's\" --reason TEXT")),
            // Hidden characters are not repeated, and a word after a flag may be its value.
            ("cordon sim\u{200b}", "cordon", Some("shepherdctl hold M --reason TEXT")),
            ("drain --timeout 5m", "drain", Some("shepherdctl hold M --reason TEXT")),
            ("drain sim-0007 --ignore-daemonsets", "drain", Some("shepherdctl hold sim-0007 --reason TEXT")),
            ("--context prod cordon sim-0007", "cordon", Some("shepherdctl hold sim-0007 --reason TEXT")),
            ("status sim-0007", "status", Some("shepherdctl why sim-0007")),
            ("status sim-0007 sim-0008", "status", Some("shepherdctl why M")),
            (
                "scale deployment web",
                "scale",
                Some("shepherdctl cluster scale NAME --workers 3 --reason TEXT"),
            ),
            ("annotate node sim-0007 a=b", "annotate", Some("shepherdctl label sim-0007 a=b")),
            ("delete machine sim-0007", "delete", Some("shepherdctl retire sim-0007 --reason TEXT")),
            ("delete cluster prod", "delete", Some("shepherdctl cluster delete prod --reason TEXT")),
            ("delete node sim-0007", "delete", Some("shepherdctl retire sim-0007 --reason TEXT")),
            ("delete update u1", "delete", Some("shepherdctl update abort u1 --reason TEXT")),
            // No kind of ours, and no kind at all: what can be deleted.
            (
                "delete pod web",
                "delete",
                Some("shepherdctl artefacts delete, or shepherdctl contexts delete"),
            ),
            (
                "delete sim-0007",
                "delete",
                Some("shepherdctl artefacts delete, or shepherdctl contexts delete"),
            ),
            (
                "revoke lee",
                "revoke",
                Some("shepherdctl tokens revoke, or shepherdctl cluster credentials revoke"),
            ),
            ("create token", "create", Some("shepherdctl tokens create NAME --role viewer --reason TEXT")),
            ("create -f prod.toml", "create", Some("cluster create NAME --workers 3 --reason TEXT")),
            ("apply -f prod.toml", "apply", Some("cluster create NAME --workers 3 --reason TEXT")),
            ("edit cluster prod", "edit", Some("cluster scale prod --workers 3 --reason TEXT")),
            ("config use-context prod", "config", Some("shepherdctl contexts use prod")),
            ("auth whoami", "auth", Some("shepherdctl whoami")),
            ("context use prod", "context", Some("shepherdctl contexts use prod")),
            ("config get-contexts", "config", Some("shepherdctl get contexts")),
            ("rollout status prod", "rollout", Some("shepherdctl describe update prod")),
            ("get nodes -o wide", "nodes", Some("shepherdctl get machines")),
            ("get nodes sim-0007", "nodes", Some("shepherdctl get machines sim-0007")),
            ("describe pod web", "pod", Some("shepherdctl describe machine web")),
            ("tokens get", "get", Some("shepherdctl get tokens")),
            ("update describe u1", "describe", Some("shepherdctl describe update u1")),
            ("policy get", "get", Some("shepherdctl get policy")),
            ("machines", "machines", Some("shepherdctl get machines")),
            ("token create lee", "token", Some("shepherdctl tokens create")),
            ("budgets set", "budgets", Some("shepherdctl budget set")),
            ("get frobs", "frobs", None),
            // `status` of something else than a machine.
            ("cluster status prod", "status", None),
            ("frobnicate", "frobnicate", None),
        ] {
            let arguments: Vec<OsString> =
                std::iter::once("shepherdctl").chain(line.split(' ')).map(OsString::from).collect();
            let found = suggest_command(&grammar(), word, &arguments);
            assert_eq!(found.is_some(), expected.is_some(), "{line}: {found:?}");
            let (found, expected) = (found.unwrap_or_default(), expected.unwrap_or_default());
            assert!(found.ends_with(expected), "{line}: {found}");
        }
    }
}
