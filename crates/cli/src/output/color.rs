//! Colour by severity, on a terminal.
//!
//! A colour only repeats what a word says: the severities of issues, and the phases of machines that need somebody. So
//! output without colours has the same content, and nothing has to know about colours before it is printed.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::io::IsTerminal as _;

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

/// The colours of standard output: by severity, or none. A command that prints while it runs colours each part itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeverityColors {
    /// Text stays as it is.
    #[default]
    Off,
    /// Words that are severities have the colours of these.
    On,
}

impl SeverityColors {
    /// The colours that the flag, the environment and the kind of standard output lead to.
    #[must_use]
    pub fn of_stdout(choice: ColorChoice) -> Self {
        let variable = |name| std::env::var_os(name);
        let (no_color, term) = (variable("NO_COLOR"), variable("TERM"));
        let on_terminal = std::io::stdout().is_terminal();
        if choice.is_on(on_terminal, no_color.as_deref(), term.as_deref()) { Self::On } else { Self::Off }
    }

    /// The text for standard output.
    #[must_use]
    pub fn apply(self, text: String) -> String {
        match self {
            Self::Off => text,
            Self::On => color_severities(&text),
        }
    }
}

/// How much attention something needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// A person must act.
    Critical,
    /// Something is wrong, and may pass.
    Warning,
    /// Something is worth knowing.
    Notice,
}

/// Words that are coloured, each with its severity.
const WORDS: [(&str, Severity); 7] = [
    ("critical", Severity::Critical),
    ("NeedsHuman", Severity::Critical),
    ("warning", Severity::Warning),
    ("Quarantined", Severity::Warning),
    ("Recovering", Severity::Warning),
    ("Silent", Severity::Warning),
    ("notice", Severity::Notice),
];

impl Severity {
    /// The severity of a word that is one, or that is the phase of a machine that needs somebody; `None` for other words.
    #[must_use]
    pub fn of_word(word: &str) -> Option<Self> {
        WORDS.iter().find(|(known, _)| *known == word).map(|(_, severity)| *severity)
    }

    /// The number of its colour in an escape sequence of a terminal: red, yellow or cyan.
    const fn color(self) -> u8 {
        match self {
            Self::Critical => 31,
            Self::Warning => 33,
            Self::Notice => 36,
        }
    }
}

/// Colours words that are severities, or phases of machines that need somebody.
#[must_use]
pub fn color_severities(text: &str) -> String {
    let mut colored = String::with_capacity(text.len());
    for piece in text.split_inclusive([' ', '\n']) {
        let word = piece.trim_end_matches([' ', '\n']);
        match Severity::of_word(word) {
            Some(severity) => {
                let color = severity.color();
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
        assert_eq!(SeverityColors::On.apply(text.to_owned()), colored);
        assert_eq!(SeverityColors::Off.apply(text.to_owned()), text);
        let plain = colored.replace("\u{1b}[31m", "").replace("\u{1b}[33m", "").replace("\u{1b}[0m", "");
        assert_eq!(plain, text);
    }
}
