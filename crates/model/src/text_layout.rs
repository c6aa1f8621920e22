//! Text layout: labelled lines, word wrap, and a text that fits a terminal.
//!
//! The width is a parameter, because the caller knows whether the output is a terminal. It is in columns of a terminal,
//! of which a character may take two or none. No word is ever split: a terminal does that with a line that is too wide,
//! and a line is too wide only if one of its words is.

use unicode_width::UnicodeWidthStr as _;

/// Lines of labels and values, one below the other, with the values aligned and wrapped.
#[must_use]
pub fn format_labelled(indent: usize, lines: &[(String, String)], width: Option<usize>) -> String {
    let widest = lines.iter().map(|(label, _)| label.width()).max().unwrap_or(0);
    let margin = indent + widest + 2;
    let mut text = String::new();
    for (label, value) in lines {
        let padding = widest - label.width();
        let mut left = format!("{:indent$}{label}{:padding$}", "", "");
        for line in wrap_text(value, width.map(|width| width.saturating_sub(margin))) {
            text.push_str(format!("{left}  {line}").trim_end());
            text.push('\n');
            left = format!("{:1$}", "", margin - 2);
        }
    }
    text
}

/// Wraps text at spaces into lines of at most `width` columns. A width below 20 is ignored.
#[must_use]
pub fn wrap_text(text: &str, width: Option<usize>) -> Vec<String> {
    let Some(width) = width.filter(|width| *width >= 20) else {
        return text.lines().map(str::to_owned).collect();
    };
    text.lines().flat_map(|paragraph| wrap_paragraph(paragraph, width)).collect()
}

/// Wraps one paragraph at spaces. A line is wider than `width` only if it is one word.
fn wrap_paragraph(paragraph: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in paragraph.split(' ') {
        if !line.is_empty() && line.width() + 1 + word.width() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

/// Joins lines that belong to one paragraph: one that begins without a space continues the line before it, unless that is
/// indented, empty, or ends with a colon.
#[must_use]
pub fn join_paragraphs(text: &str) -> String {
    let mut joined = String::new();
    let mut is_open = false;
    for line in text.lines() {
        let is_prose = !line.is_empty() && !line.starts_with(' ');
        if !joined.is_empty() {
            joined.push(if is_open && is_prose { ' ' } else { '\n' });
        }
        joined.push_str(line);
        is_open = is_prose && !line.ends_with(':');
    }
    joined.push('\n');
    joined
}

/// The text in lines of at most `width` columns. A line that is wider is wrapped at spaces, and what follows is indented
/// as its text is. A command in a line of its own is continued by backslashes, so that it can be pasted.
#[must_use]
pub fn fit_text(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    let mut fitted = String::new();
    for line in text.split_inclusive('\n') {
        let content = line.strip_suffix('\n').unwrap_or(line);
        if content.width() <= width {
            fitted.push_str(content);
        } else {
            fitted.push_str(&fit_line(content, width).join("\n"));
        }
        fitted.push_str(&line[content.len()..]);
    }
    fitted
}

/// A command of a shell in lines of at most `width` columns, all but the last with a backslash at the end, so that it can
/// be pasted. The lines are indented by `indent`, and those after the first by four more.
#[must_use]
pub fn fit_command(command: &str, indent: usize, width: Option<usize>) -> String {
    match width {
        Some(width) if indent + command.width() > width => wrap_command(command, indent, width).join("\n"),
        _ => format!("{:indent$}{command}", ""),
    }
}

/// A line in lines of at most `width` columns.
fn fit_line(line: &str, width: usize) -> Vec<String> {
    let body = line.trim_start_matches(' ');
    let indent = line.len() - body.len();
    let is_command = COMMANDS.iter().any(|command| body.starts_with(command));
    // Within the quotes of a command, two spaces separate nothing.
    let gap = if is_command { find_gap(body) } else { body.find("  ") };
    let parts = gap.map(|place| body.split_at(place)).filter(|(_, value)| !value.trim().is_empty());
    if let Some((label, value)) = parts {
        let value = value.trim();
        let column = line.width() - value.width() - (line.width() - line.trim_end().width());
        if column <= width / 2 {
            return hang(&line[..line.trim_end().len() - value.len()], value, column, width);
        }
        let mut lines = fit_line(&line[..indent + label.len()], width);
        let margin = " ".repeat(indent + 4);
        lines.extend(hang(&margin, value, indent + 4, width));
        return lines;
    }
    if is_command {
        return wrap_command(body, indent, width);
    }
    let marker = if body.starts_with("* ") || body.starts_with("- ") { 2 } else { 0 };
    hang(&line[..indent + marker], &body[marker..], indent + marker, width)
}

/// How a line begins that is a command.
const COMMANDS: [&str; 2] = ["shepherdctl ", "export "];

/// Wraps a text behind what begins its first line; the others are indented by `margin`.
fn hang(first: &str, text: &str, margin: usize, width: usize) -> Vec<String> {
    let wrapped = wrap_paragraph(text, width.saturating_sub(margin)).into_iter().enumerate();
    let line = |(number, line): (usize, String)| {
        if number == 0 { format!("{first}{line}") } else { format!("{:margin$}{line}", "") }
    };
    wrapped.map(line).collect()
}

/// Wraps a command of a shell between its words.
fn wrap_command(command: &str, indent: usize, width: usize) -> Vec<String> {
    let (mut lines, mut line, mut has_word) = (Vec::new(), " ".repeat(indent), false);
    for word in split_command(command) {
        // The space and the backslash behind it take two columns.
        if has_word && line.width() + 1 + word.width() + 2 > width {
            line.push_str(" \\");
            lines.push(std::mem::replace(&mut line, " ".repeat(indent + 4)));
            has_word = false;
        }
        if has_word {
            line.push(' ');
        }
        line.push_str(word);
        has_word = true;
    }
    lines.push(line);
    lines
}

/// The words of a command, as they are typed: quotes stay, and a space between them separates nothing.
fn split_command(command: &str) -> Vec<&str> {
    let (mut words, mut start) = (Vec::new(), 0);
    for place in separating_spaces(command) {
        words.push(&command[start..place]);
        start = place + 1;
    }
    words.push(&command[start..]);
    words.retain(|word| !word.is_empty());
    words
}

/// Where two spaces separate a command from what is written behind it.
fn find_gap(command: &str) -> Option<usize> {
    let spaces = separating_spaces(command);
    spaces.windows(2).find(|pair| pair[0] + 1 == pair[1]).map(|pair| pair[0])
}

/// The places of the spaces that separate words in a shell: those without a quote around them and a backslash before
/// them. A backslash within single quotes is a character as any other.
fn separating_spaces(command: &str) -> Vec<usize> {
    let (mut spaces, mut quote, mut is_escaped) = (Vec::new(), None, false);
    for (place, c) in command.char_indices() {
        if is_escaped {
            is_escaped = false;
            continue;
        }
        match (quote, c) {
            (None | Some('"'), '\\') => is_escaped = true,
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, ' ') => spaces.push(place),
            _ => {}
        }
    }
    spaces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labelled_text_wraps_under_itself() {
        let lines = [("a".to_owned(), "one two three four five".to_owned()), ("long".to_owned(), "x".into())];
        assert_eq!(format_labelled(2, &lines, None), "  a     one two three four five\n  long  x\n");
        assert_eq!(
            format_labelled(2, &lines, Some(28)),
            "  a     one two three four\n        five\n  long  x\n"
        );
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let lines =
            [("東京".to_owned(), "東京 東京 東京 東京 東京".to_owned()), ("a".to_owned(), "x".into())];
        let expected = "東京  東京 東京 東京 東京\n      東京\na     x\n";
        assert_eq!(format_labelled(0, &lines, Some(26)), expected);
    }

    #[test]
    fn text_fits_the_width_without_splitting_a_word() {
        for (text, width, expected) in [
            ("short\n", 20, "short\n"),
            ("one two three four\n", 9, "one two\nthree\nfour\n"),
            ("  one two three\n", 11, "  one two\n  three\n"),
            ("* one two three", 9, "* one two\n  three"),
            ("internationalization is long\n", 10, "internationalization\nis long\n"),
            // A description stays beside its label if it has half of the width.
            ("  -o  the output of it\n", 16, "  -o  the output\n      of it\n"),
            ("  --a-long-flag  the output\n", 16, "  --a-long-flag\n      the output\n"),
            ("give --dry-run first\n", 11, "give\n--dry-run\nfirst\n"),
            ("東京 東京 東京\n", 9, "東京 東京\n東京\n"),
            ("שלום עולם טוב\n", 9, "שלום עולם\nטוב\n"),
            ("👩 👩 👩 👩\n", 8, "👩 👩 👩\n👩\n"),
            (
                "  shepherdctl hold sim-1 --reason 'a new disk'\n",
                30,
                "  shepherdctl hold sim-1 \\\n      --reason 'a new disk'\n",
            ),
        ] {
            assert_eq!(fit_text(text, Some(width)), expected, "{text} {width}");
            assert_eq!(fit_text(text, None), text);
        }
    }

    #[test]
    fn two_spaces_within_quotes_of_a_command_separate_nothing() {
        for (text, width, expected) in [
            (
                "  shepherdctl hold sim-1 --reason 'old  disk'",
                30,
                "  shepherdctl hold sim-1 \\\n      --reason 'old  disk'",
            ),
            (
                "  shepherdctl hold sim-1 --reason 'old  disk'  stops its work",
                48,
                "  shepherdctl hold sim-1 --reason 'old  disk'\n      stops its work",
            ),
            (
                "  shepherdctl issues  what is wrong with the fleet",
                40,
                "  shepherdctl issues\n      what is wrong with the fleet",
            ),
        ] {
            assert_eq!(fit_text(text, Some(width)), expected, "{text}");
        }
    }

    #[test]
    fn command_is_wrapped_however_its_program_is_named() {
        let command = "/usr/local/bin/shepherdctl retire 'sim-1' --reason 'old  disk' --yes";
        let expected = "  /usr/local/bin/shepherdctl \\\n      retire 'sim-1' \\\n      --reason 'old  disk' \\\n      --yes";
        assert_eq!(fit_command(command, 2, Some(29)), expected);
        for width in [None, Some(80)] {
            assert_eq!(fit_command(command, 2, width), format!("  {command}"));
        }
    }

    #[test]
    fn words_of_a_command_are_those_of_a_shell() {
        for (words, typed) in [
            (&["a", "b  c", "d"][..], "a 'b  c' d"),
            (&["it's a disk", "x"], "\"it's a disk\" x"),
            (&["it's \"so\" $x", "y z"], r#""it's \"so\" \$x" 'y z'"#),
            (&["a b", "c"], r"a\ b c"),
            (&["\"", "b"], r#"\" b"#),
            (&["a\\", "b"], r"'a\' b"),
        ] {
            assert_eq!(shlex::split(typed).unwrap(), words, "{typed}");
            assert_eq!(split_command(typed).len(), words.len(), "{typed}");
            let quoted: Vec<String> =
                words.iter().map(|word| crate::shell_words::quote_if_needed(word)).collect();
            assert_eq!(split_command(&quoted.join(" ")), quoted, "{words:?}");
        }
    }

    #[test]
    fn paragraphs_are_joined_and_other_lines_are_not() {
        let text = "one\ntwo\n\nExamples:\n  a\n  b\nthree\nfour\n";
        assert_eq!(join_paragraphs(text), "one two\n\nExamples:\n  a\n  b\nthree four\n");
    }
}
