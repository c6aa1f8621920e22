//! The words of a command line, as shells pass them to a process that completes.
//!
//! A process gets `shepherdctl -- WORD…`. Bash and zsh pass all words of the line, and in `_CLAP_COMPLETE_INDEX` which of them
//! is completed. Fish passes the words up to that one. Words are passed as they are typed, with their quotes, and bash
//! makes three words of `--phase=Ready`.

use std::ffi::OsString;

use crate::completions::shell::{Candidate, CompletionShell, SHELL_VARIABLE};
use model::arguments::spell_flags_with_dashes;
use model::plain_text::is_hidden;

/// The index of the word to complete, in the environment.
const INDEX_VARIABLE: &str = "_CLAP_COMPLETE_INDEX";
/// What the shell expects between candidates, in the environment.
const SEPARATOR_VARIABLE: &str = "_CLAP_IFS";

/// A request of a shell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletionRequest {
    shell: CompletionShell,
    separator: String,
    /// The words before the one to complete, the program's own name first, and that word.
    words: Vec<String>,
    /// What the typed word has before the part that is completed, such as `--phase=`.
    prefix: String,
    /// Whether the typed word begins with a quote.
    is_quoted: bool,
}

impl CompletionRequest {
    /// The request that this process is started for; `None` for a command to run.
    #[must_use]
    pub fn of_process() -> Option<Self> {
        let variable = |name| std::env::var(name).ok();
        let shell = CompletionShell::find(&variable(SHELL_VARIABLE)?)?;
        let index = variable(INDEX_VARIABLE).and_then(|index| index.parse().ok());
        Self::from_arguments(shell, std::env::args_os(), index, variable(SEPARATOR_VARIABLE))
    }

    /// The request of these arguments of a process, its own name first. Without an `index` the last word is completed, and
    /// without a `separator` each candidate is on a line of its own. `None` for a command to run.
    #[must_use]
    pub fn from_arguments(
        shell: CompletionShell,
        arguments: impl IntoIterator<Item = OsString>,
        index: Option<usize>,
        separator: Option<String>,
    ) -> Option<Self> {
        let mut arguments = arguments.into_iter().skip(1);
        if arguments.next()? != "--" {
            return None;
        }
        let mut words: Vec<String> = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
        words.truncate(index.map_or(words.len(), |index| index.saturating_add(1)));
        // Zsh passes no empty word at the end of a line.
        if index.is_some_and(|index| index >= words.len()) {
            words.push(String::new());
        }
        let is_quoted = words.last().is_some_and(|word| word.starts_with(['\'', '"']));
        let mut words: Vec<String> = join_flags(words).iter().map(|word| unquote(word)).collect();
        let prefix = split_flag(&mut words);
        let separator = separator.unwrap_or_else(|| "\n".to_owned());
        Some(Self { shell, separator, words: spell_flags(words), prefix, is_quoted })
    }

    /// The words of the line up to the one to complete, which is the last. Flags before it have dashes, and a flag with a
    /// value to complete is a word of its own.
    #[must_use]
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// The candidates as the shell reads them. One that a shell would read as several is left out.
    #[must_use]
    pub fn format(&self, candidates: &[Candidate]) -> String {
        let is_line = |candidate: &&Candidate| !candidate.word.chars().any(is_hidden);
        let formatted = candidates.iter().filter(is_line).map(|candidate| {
            let word = format!("{}{}", self.prefix, candidate.word);
            self.shell.format(&Candidate { word, help: candidate.help.clone() }, self.is_quoted)
        });
        formatted.collect::<Vec<_>>().join(&self.separator)
    }
}

/// Leaves out the equals signs that bash makes words of, so that a flag is followed by its value.
fn join_flags(words: Vec<String>) -> Vec<String> {
    let mut joined: Vec<String> = Vec::with_capacity(words.len());
    for word in words {
        let follows_flag = joined.last().is_some_and(|flag| flag.len() > 1 && flag.starts_with('-'));
        if word != "=" || !follows_flag {
            joined.push(word);
        }
    }
    joined
}

/// A word as a program gets it. A quote that is still open ends with the word.
fn unquote(word: &str) -> String {
    let (mut text, mut quote, mut rest) = (String::new(), None, word.chars());
    while let Some(c) = rest.next() {
        match (quote, c) {
            (None, '\'' | '"') => quote = Some(c),
            (Some(open), _) if open == c => quote = None,
            (None | Some('"'), '\\') => text.extend(rest.next()),
            _ => text.push(c),
        }
    }
    text
}

/// Splits a last word such as `--phase=Re` at its equals sign. Returns what precedes the value, which is empty for other
/// words.
fn split_flag(words: &mut Vec<String>) -> String {
    let is_over = words.iter().rev().skip(1).any(|word| word == "--");
    let Some((flag, value)) = words.last().and_then(|word| word.split_once('=')) else {
        return String::new();
    };
    if is_over || !flag.starts_with("--") {
        return String::new();
    }
    let (flag, value) = (flag.to_owned(), value.to_owned());
    words.pop();
    words.extend([flag.clone(), value]);
    format!("{flag}=")
}

/// Spells the flags before the last word with dashes: the engine knows no flag before it by an alias.
fn spell_flags(mut words: Vec<String>) -> Vec<String> {
    let last = words.pop();
    let before = spell_flags_with_dashes(words.into_iter().map(OsString::from));
    let before = before.into_iter().map(|word| word.to_string_lossy().into_owned());
    before.chain(last).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(shell: CompletionShell, line: &[&str], index: Option<usize>) -> Option<CompletionRequest> {
        let arguments = ["shepherdctl"].iter().chain(line).map(OsString::from);
        CompletionRequest::from_arguments(shell, arguments, index, None)
    }

    #[test]
    fn words_of_each_shell_are_the_words_of_the_line() {
        use CompletionShell::{Bash, Fish, Zsh};
        for (shell, line, index, expected) in [
            (Fish, &["--", "shepherdctl", "hold", "si"][..], None, &["shepherdctl", "hold", "si"][..]),
            // Behind the cursor there may be more.
            (
                Bash,
                &["--", "shepherdctl", "hold", "si", "--dry-run"],
                Some(2),
                &["shepherdctl", "hold", "si"],
            ),
            (Zsh, &["--", "shepherdctl", "hold"], Some(2), &["shepherdctl", "hold", ""]),
            // An index that cannot be.
            (Zsh, &["--", "shepherdctl"], Some(9), &["shepherdctl", ""]),
            (
                Bash,
                &["--", "s", "get", "machines", "--phase", "=", "Re"],
                Some(5),
                &["s", "get", "machines", "--phase", "Re"],
            ),
            (
                Bash,
                &["--", "s", "get", "machines", "--phase", ""],
                Some(4),
                &["s", "get", "machines", "--phase", ""],
            ),
            (Bash, &["--", "s", "label", "m", "row", "="], Some(4), &["s", "label", "m", "row", "="]),
            (
                Zsh,
                &["--", "s", "get", "machines", "--sort_by=na"],
                Some(3),
                &["s", "get", "machines", "--sort-by", "na"],
            ),
            (
                Bash,
                &["--", "s", "describe", "artefact", "roleserver\\ 1"],
                Some(3),
                &["s", "describe", "artefact", "roleserver 1"],
            ),
            (
                Bash,
                &["--", "s", "describe", "artefact", "'roleserver 1"],
                Some(3),
                &["s", "describe", "artefact", "roleserver 1"],
            ),
            (
                Fish,
                &["--", "s", "--bmdb_url", "a_b", "--sort_by=a_b", "--no_h"],
                None,
                &["s", "--bmdb-url", "a_b", "--sort-by=a_b", "--no_h"],
            ),
            (Fish, &["--", "s", "--", "--a_b", ""], None, &["s", "--", "--a_b", ""]),
        ] {
            let found = request(shell, line, index).unwrap();
            assert_eq!(found.words(), expected, "{shell:?}: {line:?}");
        }
    }

    #[test]
    fn command_to_run_is_no_request() {
        for line in [&[][..], &["get", "machines"], &["hold", "m", "--", "--reason", "r"]] {
            assert_eq!(request(CompletionShell::Bash, line, Some(1)), None, "{line:?}");
        }
    }

    #[test]
    fn value_is_offered_with_the_flag_that_it_is_typed_behind() {
        let names = [Candidate::of_word("Ready".to_owned()), Candidate::of_word("a\nb".to_owned())];
        for (shell, line, index, expected) in [
            (
                CompletionShell::Zsh,
                &["--", "s", "get", "machines", "--phase=Re"][..],
                Some(3),
                "--phase=Ready",
            ),
            (CompletionShell::Fish, &["--", "s", "get", "machines", "--phase=Re"], None, "--phase=Ready"),
            (CompletionShell::Bash, &["--", "s", "get", "machines", "--phase", "=", "Re"], Some(5), "Ready"),
        ] {
            assert_eq!(request(shell, line, index).unwrap().format(&names), expected, "{shell:?}");
        }
        let arguments = ["s", "--", "s", ""].map(OsString::from);
        let separated = Some("\u{b}".to_owned());
        let request =
            CompletionRequest::from_arguments(CompletionShell::Bash, arguments, Some(1), separated).unwrap();
        let names = ["a", "b"].map(|name| Candidate::of_word(name.to_owned()));
        assert_eq!(request.format(&names), "a\u{b}b");
        assert_eq!(request.format(&[]), "");
    }
}
