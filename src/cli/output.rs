//! How answers look: as tables that fit, or as JSON.
//!
//! A table is cut to the terminal's width, at its last column first, and never
//! when nobody watches: what is piped is whole. There is no colour anywhere, so
//! that an answer reads the same in a terminal, a file and a chat.

use std::fmt::Write as _;
use std::io::Write as _;

/// How an answer is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs: fields are added, never renamed.
    Json,
    /// The same fields as YAML.
    Yaml,
}

impl Output {
    /// What a command answers with, to be written so.
    #[must_use]
    pub const fn format(self) -> Format {
        match self {
            Self::Table => Format::Table,
            Self::Json | Self::Yaml => Format::Json,
        }
    }
}

/// What a command answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: fields are added, never renamed.
    Json,
}

/// Writes to standard output. A reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> std::io::Result<()> {
    print_on(text).map(drop)
}

/// Writes a part of an answer that goes on; whether somebody still reads it.
pub fn print_on(text: &str) -> std::io::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Says a sentence on standard error.
pub fn say(sentence: &str) {
    // Without standard error there is nobody to tell; the exit code still does.
    let _ = writeln!(std::io::stderr().lock(), "{sentence}");
}

/// Columns of the terminal on standard output, or as `COLUMNS` says; `None` when nothing is to be cut.
#[must_use]
pub fn width() -> Option<usize> {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    told.or_else(|| Some(usize::from(rustix::termios::tcgetwinsize(std::io::stdout()).ok()?.ws_col)))
        .filter(|columns| *columns > 0)
}

/// Rows under headers, as wide as they need and the terminal allows.
#[must_use]
pub fn table(headers: &[&str], rows: &[Vec<String>], width: Option<usize>) -> String {
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
        text.push_str(&cut(line.trim_end(), width));
        text.push('\n');
    }
    text
}

fn one_line(cell: &str) -> String {
    cell.replace(['\n', '\r', '\t'], " ")
}

fn cut(line: &str, width: Option<usize>) -> String {
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
        assert_eq!(table(&headers, &rows, None), "NAME    WHY\na       some long reason\nlonger  b\n");
        assert_eq!(table(&headers, &rows, Some(16)), "NAME    WHY\na       some lo…\nlonger  b\n");
    }
}
