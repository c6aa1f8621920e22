//! Tables, as wide as the terminal.
//!
//! A table is cut to the width of the terminal, at its last column first. It is never cut when standard output is no
//! terminal, so piped output is complete. Widths are columns of a terminal and not characters: `unicode-width` knows
//! which characters take two columns, and which none.

use std::fmt::Write as _;

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::output::zone::current_zone;

/// Columns of the terminal on standard output, or of `COLUMNS`; `None` if nothing needs to be cut.
#[must_use]
pub fn terminal_width() -> Option<usize> {
    let number = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    number
        .or_else(|| Some(usize::from(rustix::termios::tcgetwinsize(std::io::stdout()).ok()?.ws_col)))
        .filter(|columns| *columns > 0)
}

/// Formats rows under headers, as wide as necessary and as the terminal allows.
#[must_use]
pub fn format_table(headers: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
    let headers: Vec<String> = headers.iter().map(|header| (*header).to_owned()).collect();
    format_lines(std::iter::once(&headers).chain(rows), width)
}

/// Formats rows without headers, in the same way.
#[must_use]
pub fn format_rows(rows: &[Vec<String>], width: Option<usize>) -> String {
    format_lines(rows.iter(), width)
}

fn format_lines<'a>(rows: impl Iterator<Item = &'a Vec<String>>, width: Option<usize>) -> String {
    let lines: Vec<Vec<String>> = rows.map(|row| row.iter().map(|cell| one_line(cell)).collect()).collect();
    let mut widths = vec![0; lines.iter().map(Vec::len).max().unwrap_or_default()];
    for row in &lines {
        for (column, cell) in row.iter().enumerate() {
            widths[column] = widths[column].max(cell.width());
        }
    }
    let mut text = String::new();
    for row in &lines {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = write!(line, "{gap}{}", pad_right(cell, widths[column]));
        }
        text.push_str(&truncate_line(line.trim_end(), width));
        text.push('\n');
    }
    text
}

/// The text, followed by spaces up to this number of columns.
pub(crate) fn pad_right(text: &str, columns: usize) -> String {
    format!("{text}{:1$}", "", columns.saturating_sub(text.width()))
}

pub(crate) fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

/// A cell on one line, with its times in the zone of the user: a line that is cut may contain half of a time.
fn one_line(cell: &str) -> String {
    current_zone().localize(cell).replace(['\n', '\r', '\t'], " ")
}

fn truncate_line(line: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if line.width() > width => {
            // The ellipsis takes one column. What is kept is measured as a text, because some characters change the
            // width of the one before them; those without a width stay with it.
            let ends = line.char_indices().take_while(|(end, _)| line[..*end].width() < width);
            let end = ends.filter(|(_, next)| next.width() != Some(0)).last().map_or(0, |(end, _)| end);
            format!("{}…", line[..end].trim_end())
        }
        _ => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_cut_at_the_terminal_and_only_there() {
        let rows = vec![vec!["a".into(), "some long\nreason".into()], vec!["longer".into(), "b".into()]];
        let headers = ["NAME", "WHY"];
        assert_eq!(format_table(&headers, &rows, None), "NAME    WHY\na       some long reason\nlonger  b\n");
        assert_eq!(format_table(&headers, &rows, Some(16)), "NAME    WHY\na       some lo…\nlonger  b\n");
        assert_eq!(format_rows(&rows[..1], None), "a  some long reason\n");
        assert_eq!(format_rows(&[], None), "");
    }

    #[test]
    fn columns_are_those_of_the_terminal() {
        let rows = vec![vec!["東京".into(), "東京都".into()], vec!["e\u{301}".into(), "b".into()]];
        let headers = ["AT", "WHY"];
        assert_eq!(format_table(&headers, &rows, None), "AT    WHY\n東京  東京都\ne\u{301}     b\n");
        for (width, cut) in [(12, "東京  東京都"), (11, "東京  東京…"), (10, "東京  東…"), (9, "東京  東…")]
        {
            assert_eq!(format_table(&headers, &rows, Some(width)).lines().nth(1), Some(cut), "{width}");
        }
        // A heart takes one column, and two with the selector of the coloured form.
        let heart = "\u{2764}\u{fe0f}";
        let rows = vec![vec![heart.repeat(10)]];
        for (width, hearts) in [(20, 10), (19, 9), (15, 7), (14, 6), (2, 0)] {
            let cut = heart.repeat(hearts) + if hearts < 10 { "…" } else { "" };
            assert_eq!(format_table(&["A"], &rows, Some(width)).lines().nth(1), Some(&*cut), "{width}");
        }
    }
}
