//! Hints about selectors: for one as kubectl has it, where each key is that of a label, and for an order without one.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::command::grammar;
use crate::error::CliError;
use crate::order::idempotency_key::mask_url_password;
use model::excerpt::Excerpt;
use model::selector::correct_label_keys;
use model::shell_words;
use model::usage_error::format_usage_error;

/// The machines of an order, as the parser names them.
const MACHINES: &str = "<M>...";
/// Most characters of the selector that the sentence repeats.
const MAX_SHOWN_CHARS: usize = 100;

/// The error for a selector in which only the words before the keys of labels are missing, with the command that has
/// them. `arguments` are those of the process, its own name first.
#[must_use]
pub fn suggest_label_selector(error: &clap::Error, arguments: &[OsString]) -> Option<CliError> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    text(ContextKind::InvalidArg)
        .filter(|flag| error.kind() == ErrorKind::ValueValidation && flag.starts_with("--selector"))?;
    let typed = text(ContextKind::InvalidValue)?;
    let corrected = replace_selector(arguments, typed, &correct_label_keys(typed)?)?;
    let command: Vec<String> = corrected.iter().map(|word| quote_word(&mask_url_password(word))).collect();
    let message = format!(
        "{:?} has no key that exists; to select by labels, run the line below",
        Excerpt::within(typed, MAX_SHOWN_CHARS)?.as_str()
    );
    Some(CliError::Corrected { message, command: format!("shepherdctl {}", command.join(" ")) })
}

/// The sentence for an order without machines and without filters: the parser names only the machines. `arguments` are
/// those of the process, its own name first.
#[must_use]
pub fn suggest_selection(error: &clap::Error, arguments: &[OsString]) -> Option<String> {
    let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else { return None };
    let lacks_machines = error.kind() == ErrorKind::MissingRequiredArgument
        && missing.iter().any(|argument| argument == MACHINES);
    let sentence = lacks_machines.then(|| format_usage_error(error, &grammar(), arguments))?;
    Some(sentence.replacen(MACHINES, &format!("{MACHINES} (or -l <SELECTOR>)"), 1))
}

/// A word for a shell. An equals sign within a word needs no quotes there.
pub(crate) fn quote_word(word: &str) -> String {
    let plain = word.replace('=', "_");
    let is_plain = !word.starts_with('=') && shell_words::quote_if_needed(&plain) == plain;
    if is_plain { word.to_owned() } else { shell_words::quote_if_needed(word) }
}

/// The arguments after the name of the program, with another selector. `None` if `typed` is the value of no flag.
fn replace_selector(arguments: &[OsString], typed: &str, corrected: &str) -> Option<Vec<String>> {
    let mut words: Vec<String> =
        arguments.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    for place in 0..words.len() {
        let follows_flag = place > 0 && matches!(words[place - 1].as_str(), "-l" | "--selector");
        if follows_flag && words[place] == typed {
            corrected.clone_into(&mut words[place]);
            return Some(words);
        }
        let flag = words[place].strip_suffix(typed).unwrap_or_default();
        if matches!(flag, "-l" | "-l=" | "--selector=") {
            words[place] = format!("{flag}{corrected}");
            return Some(words);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_without_machines_is_answered_with_both_ways_to_give_them() {
        for (line, names_both) in [
            (&["hold", "--yes-count", "3", "--reason", "r"][..], true),
            (&["hold"], true),
            (&["retry"], true),
            (&["--context", "prod", "quarantine", "--reason", "r"], true),
            (&["why"], false),
            (&["hold", "sim-0007"], false),
            (&["hold", "-l", "phase=Redy", "--reason", "r"], false),
        ] {
            let line: Vec<OsString> = ["shepherdctl"].iter().chain(line).map(OsString::from).collect();
            let error = grammar().try_get_matches_from(&line).unwrap_err();
            let found = suggest_selection(&error, &line);
            assert_eq!(found.is_some(), names_both, "{line:?}: {found:?}");
            let sentence = found.unwrap_or_default();
            assert_eq!(sentence.contains("<M>... (or -l <SELECTOR>)"), names_both, "{line:?}: {sentence}");
        }
        let line = ["shepherdctl", "retry"].map(OsString::from);
        let error = grammar().try_get_matches_from(&line).unwrap_err();
        let expected = "give <M>... (or -l <SELECTOR>); see `shepherdctl retry --help`";
        assert_eq!(suggest_selection(&error, &line).as_deref(), Some(expected));
    }

    #[test]
    fn selector_of_kubectl_is_answered_with_the_command_that_selects_by_labels() {
        for (line, expected) in [
            (&["get", "machines", "-l", "row=7"][..], Some("shepherdctl get machines -l label.row=7")),
            (&["get", "machines", "-lrow=7"], Some("shepherdctl get machines -llabel.row=7")),
            (
                &["--context", "prod", "get", "machines", "--selector=row in (7,8)"],
                Some("shepherdctl --context prod get machines '--selector=label.row in (7,8)'"),
            ),
            (
                &["hold", "-l", "row=7,!rack", "--reason", "a disk"],
                Some("shepherdctl hold -l 'label.row=7,!label.rack' --reason 'a disk'"),
            ),
            (&["watch", "-l", "row"], Some("shepherdctl watch -l label.row")),
            (
                &["update", "-l", "row=7", "--release", "1.4", "--reason", "r"],
                Some("shepherdctl update -l label.row=7 --release 1.4 --reason r"),
            ),
            (
                &["get", "machines", "-l", "row=7", "--bmdb-url", "postgres://kim:secret@db/b"],
                Some("shepherdctl get machines -l label.row=7 --bmdb-url 'postgres://kim:***@db/b'"),
            ),
            (&["get", "machines", "-l", "memory=64GiB"], None),
            (&["get", "machines", "-l", "row=7,phase=Redy"], None),
            (&["get", "machines", "--limit", "row=7"], None),
        ] {
            let line: Vec<OsString> = ["shepherdctl"].iter().chain(line).map(OsString::from).collect();
            let error = grammar().try_get_matches_from(&line).unwrap_err();
            let found = suggest_label_selector(&error, &line);
            assert_eq!(found.is_some(), expected.is_some(), "{line:?}: {found:?}");
            if let (Some(error), Some(command)) = (found, expected) {
                assert!(error.to_string().ends_with("; to select by labels, run the line below"), "{error}");
                assert_eq!(error.next_command(), Some(command));
                let words = shell_words::split(command).unwrap();
                let parsed = grammar().try_get_matches_from(words);
                assert!(parsed.is_ok(), "{command}: {:?}", parsed.err());
            }
        }
    }
}
