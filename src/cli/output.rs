//! How answers look: tables that fit, times as people say them.
//!
//! A table is cut to the terminal's width, at its last column first, and never
//! when nobody watches: what is piped is whole. There is no colour anywhere, so
//! that an answer reads the same in a terminal, a file and a chat.

use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use crate::model::time::{Timestamp, between};

/// What a command answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: fields are added, never renamed.
    Json,
}

/// Writes to standard output. A reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
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

/// Labels with what they say, each under the other.
#[must_use]
pub fn labelled(indent: usize, lines: &[(String, String)], width: Option<usize>) -> String {
    let widest = lines.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
    let margin = indent + widest + 2;
    let mut text = String::new();
    for (label, value) in lines {
        let mut left = format!("{:indent$}{label:<widest$}", "");
        for line in wrapped(value, width.map(|width| width.saturating_sub(margin))) {
            text.push_str(format!("{left}  {line}").trim_end());
            text.push('\n');
            left = format!("{:1$}", "", margin - 2);
        }
    }
    text
}

/// Text broken at spaces into lines of at most `width`, if that leaves room for words.
#[must_use]
pub fn wrapped(text: &str, width: Option<usize>) -> Vec<String> {
    let Some(width) = width.filter(|width| *width >= 20) else {
        return text.lines().map(str::to_owned).collect();
    };
    let mut lines = Vec::new();
    for paragraph in text.lines() {
        let mut line = String::new();
        for word in paragraph.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
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

/// A span in its two largest units: `12s`, `3m`, `2h05m`, `4d3h`.
#[must_use]
pub fn rough(span: Duration) -> String {
    let seconds = span.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    if minutes == 0 {
        format!("{seconds}s")
    } else if minutes < 10 && !seconds.is_multiple_of(60) {
        format!("{minutes}m{:02}s", seconds % 60)
    } else if hours == 0 {
        format!("{minutes}m")
    } else if days == 0 {
        format!("{hours}h{:02}m", minutes % 60)
    } else {
        format!("{days}d{}h", hours % 24)
    }
}

/// How far `at` is from `now`: `3m ago`, `in 5m`, `just now`.
#[must_use]
pub fn relative(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        match between(now, at) {
            moment if moment < Duration::from_secs(1) => "at once".to_owned(),
            span => format!("in {}", rough(span)),
        }
    } else {
        match between(at, now) {
            moment if moment < Duration::from_secs(1) => "just now".to_owned(),
            span => format!("{} ago", rough(span)),
        }
    }
}

/// A moment to the second, on the database's clock.
#[must_use]
pub fn absolute(at: Timestamp) -> String {
    at.format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// Both: `in 5m (2026-11-20 14:03:07 UTC)`.
#[must_use]
pub fn both(at: Timestamp, now: Timestamp) -> String {
    format!("{} ({})", relative(at, now), absolute(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn spans_are_said_in_two_units() {
        for (seconds, expected) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (61, "1m01s"),
            (599, "9m59s"),
            (601, "10m"),
            (3599, "59m"),
            (3600, "1h00m"),
            (7500, "2h05m"),
            (86_400 * 4 + 3 * 3600, "4d3h"),
        ] {
            assert_eq!(rough(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn moments_are_before_after_or_just_now() {
        assert_eq!(relative(at(-61), at(0)), "1m01s ago");
        assert_eq!(relative(at(300), at(0)), "in 5m");
        assert_eq!(relative(at(0), at(0)), "just now");
        assert_eq!(both(at(300), at(0)), "in 5m (2027-01-15 08:05:00 UTC)");
    }

    #[test]
    fn table_is_cut_at_the_terminal_and_only_there() {
        let rows = vec![vec!["a".into(), "some long\nreason".into()], vec!["longer".into(), "b".into()]];
        let headers = ["NAME", "WHY"];
        assert_eq!(table(&headers, &rows, None), "NAME    WHY\na       some long reason\nlonger  b\n");
        assert_eq!(table(&headers, &rows, Some(16)), "NAME    WHY\na       some lo…\nlonger  b\n");
    }

    #[test]
    fn labelled_text_wraps_under_itself() {
        let lines = [("a".to_owned(), "one two three four five".to_owned()), ("long".to_owned(), "x".into())];
        assert_eq!(labelled(2, &lines, None), "  a     one two three four five\n  long  x\n");
        assert_eq!(labelled(2, &lines, Some(28)), "  a     one two three four\n        five\n  long  x\n");
    }
}
