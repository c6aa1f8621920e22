//! Text layout: labelled lines and word wrap.
//!
//! The width is a parameter, because the caller knows whether the output is a terminal. It is in columns of a terminal,
//! of which a character may take two or none.

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
    let mut lines = Vec::new();
    for paragraph in text.lines() {
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
    }
    lines
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
}
