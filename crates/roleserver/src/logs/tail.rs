//! The last lines of a log file, and the lines that are appended to it.
//!
//! A log that has grown too large is copied and truncated under its writer ([`crate::child::log`]). So
//! reading may begin in the file before it, and a file that has become shorter is read from its beginning. The age of a
//! line follows from the time at its beginning, if it has one with an offset from UTC; a line without a time belongs to
//! the one before it.

use std::fs::File;
use std::io::{Read as _, Result, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::{DateTime, Utc};
use model::humanize::humanize_duration;
use model::log_request::MAX_ANSWER_BYTES;

/// Most bytes of a log that are searched for its last lines.
const MAX_TAIL_BYTES: u64 = 2 << 20;
/// Most appended bytes that are read at a time. Bytes that are not text may become three times as long.
const MAX_READ_BYTES: usize = 16 << 10;
/// Most bytes of one line.
const MAX_LINE_BYTES: usize = 8 << 10;
/// How many bytes of a JSON line are searched for its time.
const TIME_SEARCH_BYTES: usize = 300;

/// The last lines of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogTail {
    /// The selected lines, oldest first.
    pub lines: Vec<String>,
    /// A remark about the lines, such as that older ones are missing; `None` without one.
    pub note: Option<String>,
}

/// A cursor in a file, from which appended lines are read.
#[derive(Clone, Debug)]
pub struct AppendedLines {
    path: PathBuf,
    at: u64,
}

impl AppendedLines {
    /// Begins behind the last whole line of a file.
    pub fn after_last_line(path: &Path) -> Result<Self> {
        let (bytes, end, _) = read_last_bytes(path, MAX_LINE_BYTES as u64)?;
        let open = bytes.iter().rev().take_while(|byte| **byte != b'\n').count();
        Ok(Self { path: path.to_owned(), at: end.saturating_sub(open as u64) })
    }

    /// The next whole lines, up to a limit; empty if nothing was appended.
    pub fn read_more(&mut self) -> Result<Vec<String>> {
        let mut file = File::open(&self.path)?;
        if file.metadata()?.len() < self.at {
            // The file was truncated, or is another one.
            self.at = 0;
        }
        file.seek(SeekFrom::Start(self.at))?;
        let mut bytes = Vec::new();
        file.take(MAX_READ_BYTES as u64).read_to_end(&mut bytes)?;
        let whole = match bytes.iter().rposition(|byte| *byte == b'\n') {
            Some(last) => last + 1,
            // A line that is longer than a read is returned in pieces.
            None if bytes.len() >= MAX_READ_BYTES => bytes.len(),
            None => 0,
        };
        self.at += whole as u64;
        Ok(printable_lines(&bytes[..whole]))
    }
}

/// The last lines of the log in the file at `path`, at most `most`, and none that is older than `since`.
///
/// `whole` leaves out a last line that has no end yet: the cursor returns it when it is complete.
pub fn read_tail(
    path: &Path,
    most: usize,
    since: Option<Duration>,
    whole: bool,
    now: DateTime<Utc>,
) -> Result<LogTail> {
    let (mut bytes, _, begins) = read_last_bytes(path, MAX_TAIL_BYTES)?;
    let mut cut = !begins;
    let left = MAX_TAIL_BYTES.saturating_sub(bytes.len() as u64);
    if begins && left > 0 {
        // A log that was never truncated has no file before it.
        if let Ok((before, _, begins)) = read_last_bytes(&path.with_extension("log.1"), left) {
            cut = !begins;
            bytes = [before, bytes].concat();
        }
    }
    if whole {
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        bytes.truncate(end);
    }
    let mut lines = printable_lines(&bytes);
    if cut && !lines.is_empty() {
        // The beginning of the first line is missing.
        lines.remove(0);
    }
    Ok(select_lines(lines, most, since, cut, now))
}

/// The last of these lines that match the request. `cut` is whether older lines exist before them.
#[must_use]
pub fn select_lines(
    mut lines: Vec<String>,
    most: usize,
    since: Option<Duration>,
    cut: bool,
    now: DateTime<Utc>,
) -> LogTail {
    let mut notes = Vec::new();
    if let Some(since) = since {
        let from = now - since;
        let times: Vec<_> = lines.iter().map(|line| parse_line_time(line)).collect();
        if times.iter().all(Option::is_none) && !lines.is_empty() {
            notes.push(format!(
                "no line says when it was written, with its offset from UTC, so lines older than {} are among them",
                humanize_duration(since)
            ));
        } else {
            let first = times.iter().position(|time| time.is_some_and(|time| time >= from));
            let first = first.unwrap_or(lines.len());
            if first == 0 && cut {
                notes.push("older lines of that time exist, but are too far back to be uploaded".to_owned());
            }
            lines.drain(..first);
        }
    }
    lines.drain(..lines.len().saturating_sub(most));
    let mut bytes = 0;
    let fit = lines.iter().rev().take_while(|line| {
        bytes += line.len() + 1;
        bytes <= MAX_ANSWER_BYTES
    });
    let fit = fit.count();
    if fit < lines.len() || (cut && since.is_none() && lines.len() < most) {
        notes.push(format!("of the requested lines, only the last {fit} can be uploaded"));
        lines.drain(..lines.len() - fit);
    }
    LogTail { lines, note: Some(notes.join("; ")).filter(|note| !note.is_empty()) }
}

/// The last bytes of a file, its length, and whether the bytes are all of it.
fn read_last_bytes(path: &Path, most: u64) -> Result<(Vec<u8>, u64, bool)> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(most);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(length - from).read_to_end(&mut bytes)?;
    let end = from + bytes.len() as u64;
    Ok((bytes, end, from == 0))
}

/// Converts bytes to printable lines.
fn printable_lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(bytes);
    text.lines().map(|line| truncate_line(&strip_ansi(line))).collect()
}

/// Truncates a line to at most [`MAX_LINE_BYTES`] bytes.
fn truncate_line(line: &str) -> String {
    if line.len() <= MAX_LINE_BYTES {
        return line.to_owned();
    }
    let end = (0..=MAX_LINE_BYTES - 50).rev().find(|end| line.is_char_boundary(*end)).unwrap_or(0);
    format!("{}… ({} more bytes)", &line[..end], line.len() - end)
}

/// Removes terminal control sequences, such as colours, from a line (ECMA-48, 5.4).
fn strip_ansi(line: &str) -> String {
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

/// When a line was written, from the time at its beginning or in the usual field of JSON.
fn parse_line_time(line: &str) -> Option<DateTime<Utc>> {
    let read = |text: &str| {
        DateTime::parse_from_rfc3339(text)
            .or_else(|_| DateTime::parse_from_str(text, "%Y-%m-%dT%H:%M:%S%.f%z"))
            .ok()
            .map(|time| time.to_utc())
    };
    if line.starts_with('{') {
        let end = (0..=TIME_SEARCH_BYTES.min(line.len())).rev().find(|end| line.is_char_boundary(*end))?;
        let head = &line[..end];
        return ["\"ts\":", "\"time\":", "\"timestamp\":", "\"@timestamp\":"].iter().find_map(|field| {
            let value = head.split_once(field)?.1.trim_start();
            match value.strip_prefix('"') {
                Some(text) => {
                    let text = text.split('"').next()?;
                    read(text).or_else(|| parse_epoch(text))
                }
                None => parse_epoch(value),
            }
        });
    }
    let word = line.split_whitespace().next()?;
    read(word.trim_matches(['[', ']']))
}

/// A time as a number since 1970 at the beginning of a text. Its size gives the unit: seconds, as most programs write it,
/// or milliseconds, microseconds or nanoseconds. Seconds of the years before 1973 are none.
fn parse_epoch(text: &str) -> Option<DateTime<Utc>> {
    const BILLION: i64 = 1_000_000_000;
    let number = text.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    // Nine digits of the fraction: billionths of the unit.
    let fraction: i64 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    let digits = whole.trim_start_matches('0').len();
    let unit = match digits {
        9..=11 => BILLION,
        12..=14 => 1_000_000,
        15..=17 => 1_000,
        18..=19 => 1,
        _ => return None,
    };
    let nanoseconds = whole.parse::<i64>().ok()?.checked_mul(unit)?;
    Some(DateTime::from_timestamp_nanos(nanoseconds.checked_add(fraction * unit / BILLION)?))
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
    fn line_time_is_parsed_where_it_has_an_offset_from_utc() {
        let noon = Some(at(NOW));
        for (line, expected) in [
            ("2026-11-24T12:00:00.000000Z  INFO shepherd: the agent runs", noon),
            ("[2026-11-24T13:00:00+01:00] GET /", noon),
            ("{\"level\":\"info\",\"ts\":\"2026-11-24T12:00:00.000Z\",\"msg\":\"x\"}", noon),
            ("{\"level\":\"info\",\"ts\":\"2026-11-24T11:00:00.000-0100\",\"msg\":\"x\"}", noon),
            ("{\"timestamp\": \"2026-11-24T12:00:00Z\"}", noon),
            ("2026-11-24 12:00:00 the zone is missing", None),
            ("{\"@timestamp\":\"2026-11-24T12:00:00Z\"}", noon),
            ("{\"level\":\"info\",\"ts\":1795521600.0,\"msg\":\"x\"}", noon),
            ("{\"ts\": 1795521600}", noon),
            ("{\"time\":1795521600000}", noon),
            ("{\"time\":\"1795521600000000\"}", noon),
            ("{\"time\":1795521600000000000}", noon),
            ("{\"ts\":1795521600.25}", Some(at("2026-11-24T12:00:00.25Z"))),
            ("{\"ts\":1795521600000.5}", Some(at("2026-11-24T12:00:00.0005Z"))),
            ("{\"ts\":17}", None),
            ("{\"ts\":1.795e9}", None),
            ("{\"ts\":99999999999999999999}", None),
            ("{\"ts\":-1795521600}", None),
            ("  at main.rs:7", None),
            ("", None),
        ] {
            assert_eq!(parse_line_time(line), expected, "{line}");
        }
    }

    #[test]
    fn last_lines_match_the_request() {
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
            let tail = select_lines(lines.clone(), most, since, cut, at(NOW));
            assert_eq!(tail.lines, lines[expected..], "{most} {since:?}");
            assert_eq!(tail.note.is_some(), noted, "{:?}", tail.note);
        }
        let untimed = select_lines(vec!["a".to_owned(), "b".to_owned()], 9, HOUR, false, at(NOW));
        assert_eq!(untimed.lines.len(), 2, "nothing is left out by a time that nobody knows");
        assert!(untimed.note.unwrap().starts_with("no line says when it was written"));
        let long = select_lines(vec!["x".repeat(MAX_ANSWER_BYTES / 2); 3], 9, None, false, at(NOW));
        assert_eq!(long.lines.len(), 1);
        assert!(long.note.unwrap().contains("only the last 1 can be uploaded"));
    }

    #[test]
    fn log_that_was_cut_short_begins_in_the_file_before() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        assert!(read_tail(&path, 9, None, false, at(NOW)).is_err());
        std::fs::write(path.with_extension("log.1"), "one\ntwo\n").unwrap();
        std::fs::write(&path, "three\n\u{1b}[32mfour\u{1b}[0m").unwrap();
        let read = |most, whole| read_tail(&path, most, None, whole, at(NOW)).unwrap().lines;
        assert_eq!(read(9, false), ["one", "two", "three", "four"]);
        assert_eq!(read(3, true), ["one", "two", "three"]);
        // More than is searched: its first line is not a whole one.
        let mut file = File::create(&path).unwrap();
        for number in 0..40_000 {
            writeln!(file, "line {number} {}", "x".repeat(90)).unwrap();
        }
        let last = read(3, false);
        assert!(last.len() == 3 && last[2].starts_with("line 39999 "), "{last:?}");
        let all = read_tail(&path, 100_000, None, false, at(NOW)).unwrap();
        assert!(all.lines.iter().map(|line| line.len() + 1).sum::<usize>() <= MAX_ANSWER_BYTES);
        assert!(all.lines[0].starts_with("line ") && all.note.is_some());
        std::fs::write(&path, vec![b'x'; 20_000]).unwrap();
        let long = read(1, false);
        assert!(long[0].len() <= MAX_LINE_BYTES && long[0].ends_with("more bytes)"), "{}", long[0].len());
    }

    #[test]
    fn appended_lines_are_returned_once_and_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        std::fs::write(&path, "one\nhalf").unwrap();
        let mut added = AppendedLines::after_last_line(&path).unwrap();
        assert!(added.read_more().unwrap().is_empty());
        let mut file = crate::child::log::open_log(&path).unwrap();
        file.write_all(b" and half\ntwo\nth").unwrap();
        assert_eq!(added.read_more().unwrap(), ["half and half", "two"]);
        assert!(added.read_more().unwrap().is_empty());
        // It is cut short under its writer, as it is when it has grown too long.
        file.set_len(0).unwrap();
        file.write_all(b"new\n").unwrap();
        assert_eq!(added.read_more().unwrap(), ["new"]);
        file.write_all(&vec![b'x'; 40_000]).unwrap();
        let lengths: Vec<_> = (0..3).map(|_| added.read_more().unwrap().len()).collect();
        assert_eq!(lengths, [1, 1, 0], "a line without an end is read in pieces");
        std::fs::remove_file(&path).unwrap();
        assert!(added.read_more().is_err());
    }
}
