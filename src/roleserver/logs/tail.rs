//! The last lines of a log, and what is added to it.
//!
//! A log that has grown too long is copied and cut short under its writer ([`crate::roleserver::child::log`]), so what is
//! read may begin in the file before it, and a file that is shorter than it was is read from its beginning. How old a line
//! is says the time at its beginning, where it has one with an offset from UTC; a line without belongs to the one before it.

use std::fs::File;
use std::io::{Read as _, Result, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::model::log_request::ANSWER_LIMIT;
use crate::model::telling::rough;

/// Most bytes of a log that are looked at for its last lines.
const LOOKED_AT: u64 = 2 << 20;
/// Most bytes that are read at a time of what is added. What is no text may become three times as long.
const ADDED: usize = 16 << 10;
/// Most bytes of one line.
const LONGEST_LINE: usize = 8 << 10;
/// How far into a line its time is looked for, where it is JSON.
const TIME_WITHIN: usize = 300;

/// The last lines of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// The lines.
    pub lines: Vec<String>,
    /// Something to know of them.
    pub note: Option<String>,
}

/// What is added to a file from a place on.
#[derive(Clone, Debug)]
pub struct Added {
    path: PathBuf,
    at: u64,
}

impl Added {
    /// Behind the last whole line of a file.
    pub fn behind(path: &Path) -> Result<Self> {
        let (bytes, end, _) = last_of(path, LONGEST_LINE as u64)?;
        let open = bytes.iter().rev().take_while(|byte| **byte != b'\n').count();
        Ok(Self { path: path.to_owned(), at: end.saturating_sub(open as u64) })
    }

    /// The next whole lines, some of them; none where nothing was added.
    pub fn more(&mut self) -> Result<Vec<String>> {
        let mut file = File::open(&self.path)?;
        if file.metadata()?.len() < self.at {
            // It was cut short, or is another one.
            self.at = 0;
        }
        file.seek(SeekFrom::Start(self.at))?;
        let mut bytes = Vec::new();
        file.take(ADDED as u64).read_to_end(&mut bytes)?;
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => last + 1,
            // A line without an end is told in pieces.
            None if bytes.len() >= ADDED => bytes.len(),
            None => 0,
        };
        self.at += whole as u64;
        Ok(lines_of(&bytes[..whole]))
    }
}

/// The last lines of the log in the file at `path`, at most so many, and none that is older than `since`.
///
/// `whole` leaves out a last line that has no end yet: it is told when it has.
pub fn tail(
    path: &Path,
    most: usize,
    since: Option<Duration>,
    whole: bool,
    now: DateTime<Utc>,
) -> Result<Tail> {
    let (mut bytes, _, begins) = last_of(path, LOOKED_AT)?;
    let mut cut = !begins;
    let left = LOOKED_AT.saturating_sub(bytes.len() as u64);
    if begins && left > 0 {
        // Where it was never cut short there is no file before it.
        if let Ok((before, _, begins)) = last_of(&path.with_extension("log.1"), left) {
            cut = !begins;
            bytes = [before, bytes].concat();
        }
    }
    if whole {
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        bytes.truncate(end);
    }
    let mut lines = lines_of(&bytes);
    if cut && !lines.is_empty() {
        // Its beginning is missing.
        lines.remove(0);
    }
    Ok(narrowed(lines, most, since, cut, now))
}

/// The last of these lines that are wanted. `cut` is whether there are more before them.
#[must_use]
pub fn narrowed(
    mut lines: Vec<String>,
    most: usize,
    since: Option<Duration>,
    cut: bool,
    now: DateTime<Utc>,
) -> Tail {
    let mut notes = Vec::new();
    if let Some(since) = since {
        let from = now - since;
        let times: Vec<_> = lines.iter().map(|line| time_of(line)).collect();
        if times.iter().all(Option::is_none) && !lines.is_empty() {
            notes.push(format!(
                "no line says when it was written, with its offset from UTC, so lines older than {} are among them",
                rough(since)
            ));
        } else {
            let first = times.iter().position(|time| time.is_some_and(|time| time >= from));
            let first = first.unwrap_or(lines.len());
            if first == 0 && cut {
                notes.push(
                    "there are older lines of that time, which are too far back to be brought".to_owned(),
                );
            }
            lines.drain(..first);
        }
    }
    lines.drain(..lines.len().saturating_sub(most));
    let mut bytes = 0;
    let fit = lines.iter().rev().take_while(|line| {
        bytes += line.len() + 1;
        bytes <= ANSWER_LIMIT
    });
    let fit = fit.count();
    if fit < lines.len() || (cut && since.is_none() && lines.len() < most) {
        notes.push(format!("of the lines that were asked for, only the last {fit} can be brought"));
        lines.drain(..lines.len() - fit);
    }
    Tail { lines, note: Some(notes.join("; ")).filter(|note| !note.is_empty()) }
}

/// The last bytes of a file, how long it is, and whether they are all of it.
fn last_of(path: &Path, most: u64) -> Result<(Vec<u8>, u64, bool)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(most);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(length - from).read_to_end(&mut bytes)?;
    let end = from + bytes.len() as u64;
    Ok((bytes, end, from == 0))
}

/// Bytes as lines that can be shown.
fn lines_of(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(|line| shortened(&without_colours(line))).collect()
}

/// A line of no more than so many bytes.
fn shortened(line: &str) -> String {
    if line.len() <= LONGEST_LINE {
        return line.to_owned();
    }
    let end = (0..=LONGEST_LINE - 50).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
    format!("{}… ({} more bytes)", &line[..end], line.len() - end)
}

/// A line without what colours it on a terminal (ECMA-48, 5.4: control sequences).
fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, sequence)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        let end = sequence.find(|c: char| ('\u{40}'..='\u{7e}').contains(&c));
        rest = end.map_or("", |end| &sequence[end + 1..]);
    }
    plain.push_str(rest);
    plain
}

/// When a line was written, if it says so at its beginning or in the usual field of JSON.
fn time_of(line: &str) -> Option<DateTime<Utc>> {
    let read = |text: &str| {
        DateTime::parse_from_rfc3339(text)
            .or_else(|_| DateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S%.f%z"))
            .ok()
            .map(|time| time.to_utc())
    };
    if line.starts_with('{') {
        let end = (0..=TIME_WITHIN.min(line.len())).rev().find(|end| line.is_char_boundary(*end))?;
        let head = &line[..end];
        return ["\"ts\":", "\"time\":", "\"timestamp\":"].iter().find_map(|field| {
            let (_, value) = head.split_once(field)?;
            read(value.trim_start().strip_prefix('"')?.split('"').next()?)
        });
    }
    let word = line.split_whitespace().next()?;
    read(word.trim_matches(['[', ']']))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write as _;

    fn at(text: &str) -> DateTime<Utc> {
        text.parse().unwrap()
    }

    const NOW: &str = "2026-11-24T12:00:00Z";
    const HOUR: Option<Duration> = Some(Duration::from_hours(1));

    #[test]
    fn time_of_a_line_is_found_where_it_says_its_offset() {
        let noon = Some(at(NOW));
        for (line, expected) in [
            ("2026-11-24T12:00:00.000000Z  INFO shepherd: the agent runs", noon),
            ("[2026-11-24T13:00:00+01:00] GET /", noon),
            ("{\"level\":\"info\",\"ts\":\"2026-11-24T12:00:00.000Z\",\"msg\":\"x\"}", noon),
            ("{\"level\":\"info\",\"ts\":\"2026-11-24T11:00:00.000-0100\",\"msg\":\"x\"}", noon),
            ("{\"timestamp\": \"2026-11-24T12:00:00Z\"}", noon),
            ("2026-11-24 12:00:00 the zone is not said", None),
            ("{\"ts\":1764000000.1}", None),
            ("  at main.rs:7", None),
            ("", None),
        ] {
            assert_eq!(time_of(line), expected, "{line}");
        }
    }

    #[test]
    fn last_lines_are_those_that_are_asked_for() {
        let lines: Vec<String> = [
            "2026-11-24T10:00:00Z old",
            "  its second line",
            "2026-11-24T11:30:00Z new",
            "  its second line, too",
            "2026-11-24T11:59:00Z newest",
        ]
        .map(str::to_owned)
        .into();
        for (most, since, cut, expected, noted) in [
            (9, None, false, 0, false),
            (2, None, false, 3, false),
            (9, HOUR, false, 2, false),
            (1, HOUR, false, 4, false),
            (9, Some(Duration::from_secs(1)), false, 5, false),
            (9, Some(Duration::from_hours(99)), true, 0, true),
            (9, None, true, 0, true),
        ] {
            let tail = narrowed(lines.clone(), most, since, cut, at(NOW));
            assert_eq!(tail.lines, lines[expected..], "{most} {since:?}");
            assert_eq!(tail.note.is_some(), noted, "{:?}", tail.note);
        }
        let untimed = narrowed(vec!["a".to_owned(), "b".to_owned()], 9, HOUR, false, at(NOW));
        assert_eq!(untimed.lines.len(), 2, "nothing is left out by a time that nobody knows");
        assert!(untimed.note.unwrap().starts_with("no line says when it was written"));
        let long = narrowed(vec!["x".repeat(ANSWER_LIMIT / 2); 3], 9, None, false, at(NOW));
        assert_eq!(long.lines.len(), 1);
        assert!(long.note.unwrap().contains("only the last 1 can be brought"));
    }

    #[test]
    fn log_that_was_cut_short_begins_in_the_file_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        assert!(tail(&path, 9, None, false, at(NOW)).is_err());
        std::fs::write(path.with_extension("log.1"), "one\ntwo\n").unwrap();
        std::fs::write(&path, "three\n\u{1b}[32mfour\u{1b}[0m").unwrap();
        let read = |most, whole| tail(&path, most, None, whole, at(NOW)).unwrap().lines;
        assert_eq!(read(9, false), ["one", "two", "three", "four"]);
        assert_eq!(read(3, true), ["one", "two", "three"]);
        // More than is looked at: its first line is no whole one.
        let mut file = File::create(&path).unwrap();
        for number in 0..40_000 {
            writeln!(file, "line {number} {}", "x".repeat(90)).unwrap();
        }
        let last = read(3, false);
        assert!(last.len() == 3 && last[2].starts_with("line 39999 "), "{last:?}");
        let all = tail(&path, 100_000, None, false, at(NOW)).unwrap();
        assert!(all.lines.iter().map(|line| line.len() + 1).sum::<usize>() <= ANSWER_LIMIT);
        assert!(all.lines[0].starts_with("line ") && all.note.is_some());
        std::fs::write(&path, vec![b'x'; 20_000]).unwrap();
        let long = read(1, false);
        assert!(long[0].len() <= LONGEST_LINE && long[0].ends_with("more bytes)"), "{}", long[0].len());
    }

    #[test]
    fn what_is_added_is_told_once_and_in_whole_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        std::fs::write(&path, "one\nhalf").unwrap();
        let mut added = Added::behind(&path).unwrap();
        assert!(added.more().unwrap().is_empty());
        let mut file = crate::roleserver::child::log::open(&path).unwrap();
        file.write_all(b" and half\ntwo\nth").unwrap();
        assert_eq!(added.more().unwrap(), ["half and half", "two"]);
        assert!(added.more().unwrap().is_empty());
        // It is cut short under its writer, as it is when it has grown too long.
        file.set_len(0).unwrap();
        file.write_all(b"new\n").unwrap();
        assert_eq!(added.more().unwrap(), ["new"]);
        file.write_all(&vec![b'x'; 40_000]).unwrap();
        let lengths: Vec<_> = (0..3).map(|_| added.more().unwrap().len()).collect();
        assert_eq!(lengths, [1, 1, 0], "a line without an end is told in pieces");
        std::fs::remove_file(&path).unwrap();
        assert!(added.more().is_err());
    }
}
