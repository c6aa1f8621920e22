//! The terminals on standard output and standard error: how wide they are, and how text is laid out for them.
//!
//! What goes to a file or to another program is neither cut nor wrapped nor coloured. The user can set the width of a
//! terminal by `COLUMNS`; a value that is no width is passed over.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use model::text_layout::{fit_text, join_paragraphs};

/// Width of help for a reader that is no terminal, in columns.
const HELP_COLUMNS: usize = 100;

/// Columns of a terminal; `None` if the stream is none, or does not know its width.
#[must_use]
pub fn terminal_columns(stream: &(impl IsTerminal + AsFd)) -> Option<usize> {
    if !stream.is_terminal() {
        return None;
    }
    let size = || rustix::termios::tcgetwinsize(stream).ok().map(|size| usize::from(size.ws_col));
    environment_columns().or_else(size).filter(|columns| *columns > 0)
}

/// The width that the environment names.
fn environment_columns() -> Option<usize> {
    parse_columns(std::env::var("COLUMNS").ok().as_deref())
}

fn parse_columns(text: Option<&str>) -> Option<usize> {
    text?.parse::<usize>().ok().filter(|columns| *columns > 0)
}

/// Help as the parser renders it, in paragraphs that fit the terminal or the width that the environment names.
#[must_use]
pub fn format_help(rendered: &str) -> String {
    let width = terminal_columns(&std::io::stdout()).or_else(environment_columns);
    wrap_help(rendered, width.unwrap_or(HELP_COLUMNS))
}

fn wrap_help(rendered: &str, width: usize) -> String {
    fit_text(&join_paragraphs(rendered), Some(width))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use unicode_width::UnicodeWidthStr as _;

    use super::*;
    use crate::command::grammar;
    use model::shell_words;

    /// The help of a command and of those below it, short and long.
    fn add_help(command: &mut clap::Command, found: &mut Vec<String>) {
        found.push(command.render_help().to_string());
        found.push(command.render_long_help().to_string());
        for below in command.get_subcommands_mut() {
            add_help(below, found);
        }
    }

    /// Whether a line is one word, or one word of a shell: a quoted argument of an example is not broken.
    fn is_one_word(line: &str) -> bool {
        let line = line.trim_end_matches(" \\");
        line.split_whitespace().count() == 1 || shell_words::split(line).is_some_and(|words| words.len() == 1)
    }

    #[test]
    fn help_fits_every_width_and_no_word_is_split() {
        let (mut command, mut help) = (grammar(), Vec::new());
        command.build();
        add_help(&mut command, &mut help);
        assert!(help.len() > 100, "{}", help.len());
        for text in help {
            let words: HashSet<&str> = text.split_whitespace().collect();
            for width in [40, 80, 120, 200] {
                for line in wrap_help(&text, width).lines() {
                    let is_one_word = is_one_word(line);
                    assert!(line.width() <= width || is_one_word, "{width}: {line}");
                    let mut parts = line.split_whitespace().filter(|word| *word != "\\");
                    assert!(parts.all(|word| words.contains(word)), "{width}: {line}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_width_is_passed_over() {
        for (text, expected) in
            [(Some("80"), Some(80)), (Some("0"), None), (Some("x"), None), (Some("-1"), None), (None, None)]
        {
            assert_eq!(parse_columns(text), expected, "{text:?}");
        }
    }
}
