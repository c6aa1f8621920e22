//! Colour by severity, on a terminal.
//!
//! A colour only repeats what a word says: the severities of issues, and the phases of machines that need somebody. So
//! output without colours has the same content, and nothing has to know about colours before it is printed.

use std::ffi::OsStr;
use std::fmt::Write as _;

use clap::ValueEnum;

/// When output is coloured by severity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ColorChoice {
    /// On a terminal, unless the environment has `NO_COLOR`.
    #[default]
    Auto,
    /// Always, also into a file.
    Always,
    /// Never, not even on a terminal.
    Never,
}

impl ColorChoice {
    /// Whether to colour. `no_color` and `term` are those variables of the environment.
    #[must_use]
    pub fn is_on(self, on_terminal: bool, no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            // See no-color.org: an empty value does not count.
            Self::Auto => {
                on_terminal && no_color.is_none_or(OsStr::is_empty) && term.is_none_or(|term| term != "dumb")
            }
        }
    }
}

/// Words that are coloured, each with the number of its colour.
const WORDS: [(&str, u8); 7] = [
    ("critical", RED),
    ("NeedsHuman", RED),
    ("warning", YELLOW),
    ("Quarantined", YELLOW),
    ("Recovering", YELLOW),
    ("Silent", YELLOW),
    ("notice", CYAN),
];

const RED: u8 = 31;
const YELLOW: u8 = 33;
const CYAN: u8 = 36;

/// Colours words that are severities, or phases of machines that need somebody.
#[must_use]
pub fn color_severities(text: &str) -> String {
    let mut colored = String::with_capacity(text.len());
    for piece in text.split_inclusive([' ', '\n']) {
        let word = piece.trim_end_matches([' ', '\n']);
        match WORDS.iter().find(|(known, _)| *known == word) {
            Some((_, color)) => {
                // Writing to a string cannot fail.
                let _ = write!(colored, "\u{1b}[{color}m{word}\u{1b}[0m{}", &piece[word.len()..]);
            }
            None => colored.push_str(piece),
        }
    }
    colored
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environment_and_flag_decide_whether_to_colour() {
        let value = |text: &'static str| Some(OsStr::new(text));
        for (choice, on_terminal, no_color, term, expected) in [
            (ColorChoice::Auto, true, None, value("xterm"), true),
            (ColorChoice::Auto, true, None, None, true),
            (ColorChoice::Auto, false, None, value("xterm"), false),
            (ColorChoice::Auto, true, value("1"), value("xterm"), false),
            (ColorChoice::Auto, true, value(""), value("xterm"), true),
            (ColorChoice::Auto, true, None, value("dumb"), false),
            (ColorChoice::Always, false, value("1"), value("dumb"), true),
            (ColorChoice::Never, true, None, value("xterm"), false),
        ] {
            assert_eq!(
                choice.is_on(on_terminal, no_color, term),
                expected,
                "{choice:?} {no_color:?} {term:?}"
            );
        }
    }

    #[test]
    fn whole_words_are_coloured_and_nothing_else_changes() {
        let text = "sim-1  NeedsHuman  2m\nsim-2  Ready       critical-path  warning\n";
        let colored = color_severities(text);
        assert!(colored.contains("\u{1b}[31mNeedsHuman\u{1b}[0m  2m\n"), "{colored}");
        assert!(colored.contains("  critical-path  \u{1b}[33mwarning\u{1b}[0m\n"), "{colored}");
        let plain = colored.replace("\u{1b}[31m", "").replace("\u{1b}[33m", "").replace("\u{1b}[0m", "");
        assert_eq!(plain, text);
    }
}
