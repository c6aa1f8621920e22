//! Tables, as wide as the terminal.
//!
//! A table is cut to the width of the terminal, at its last column first. It is never cut when standard output is no
//! terminal, so piped output is complete.

use std::fmt::Write as _;

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
    let mut widths: Vec<usize> = headers.iter().map(|header| header.chars().count()).collect();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            widths[column] = widths[column].max(cell.chars().count());
        }
    }
    let headers = headers.iter().map(|header| (*header).to_owned()).collect::<Vec<_>>();
    let mut text = String::new();
    for row in std::iter::once(&headers).chain(rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let _ = write!(line, "{gap}{:<1$}", one_line(cell), widths[column]);
        }
        text.push_str(&truncate_line(line.trim_end(), width));
        text.push('\n');
    }
    text
}

pub(crate) fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

fn one_line(cell: &str) -> String {
    cell.replace(['\n', '\r', '\t'], " ")
}

fn truncate_line(line: &str, width: Option<usize>) -> String {
    match width {
        Some(width) if line.chars().count() > width => {
            let kept: String = line.chars().take(width.saturating_sub(1)).collect();
            format!("{}…", kept.trim_end())
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
    }
}
