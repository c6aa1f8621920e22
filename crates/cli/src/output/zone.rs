//! The time zone of the user: times in texts, and times that the user types.
//!
//! Texts of this program and of servers have absolute times in UTC, all in one form: `2026-11-20T18:00:00+00:00`
//! ([`model::humanize::absolute_time`]). [`Zone::localize`][] puts them into the zone of the user where a text is printed.
//! The form and the length stay the same, so a table keeps its columns, and a time that was printed can be typed. JSON
//! has another form (`Z` in place of the offset) and is not changed.
//!
//! The zone is that of the variable `TZ`, as in other programs: a name below `/usr/share/zoneinfo`, the path of such a
//! file, or a rule of POSIX. Without `TZ` it is the zone of the host, and with `--utc` it is UTC.

use std::borrow::Cow;
use std::fs::File;
use std::io::Read as _;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, Offset, TimeZone};

use model::humanize::absolute_time;
use model::time::Timestamp;

/// Directory of the files of time zones, by their names.
const ZONE_DIRECTORY: &str = "/usr/share/zoneinfo";
/// File of the host's own time zone.
const HOST_ZONE: &str = "/etc/localtime";
/// Longest file of a time zone that is read, in bytes; usual ones have less than 4 KiB.
const MAX_ZONE_BYTES: u64 = 256 << 10;
/// Length of a time to the second, without its offset.
const TIME_LENGTH: usize = 19;
/// Offset of the times in texts.
const UTC_OFFSET: &str = "+00:00";

static CURRENT: OnceLock<Zone> = OnceLock::new();

/// The zone of this process; UTC before `set_current_zone`.
#[must_use]
pub fn current_zone() -> &'static Zone {
    CURRENT.get_or_init(Zone::utc)
}

/// Sets the zone of this process. The first call counts.
pub(crate) fn set_current_zone(zone: Zone) {
    // Ignored: a process has one command line.
    let _ = CURRENT.set(zone);
}

/// A time zone that times are shown in.
#[derive(Clone, Debug)]
pub struct Zone {
    rules: TimeZone,
    /// The zone in a sentence.
    name: String,
    /// Whether the zone is what the user named; without it, times are shown in UTC.
    is_known: bool,
}

impl Zone {
    /// The zone UTC, which has no clock changes.
    #[must_use]
    pub fn utc() -> Self {
        Self { rules: TimeZone::UTC, name: "UTC".to_owned(), is_known: true }
    }

    /// The zone of the variable `TZ`, or of the host.
    #[must_use]
    pub fn of_environment() -> Self {
        match std::env::var_os("TZ") {
            Some(text) => Self::find(&text.to_string_lossy()),
            None => Self::of_host(),
        }
    }

    /// The zone of the host; UTC if it has none.
    fn of_host() -> Self {
        let zone = read_zone(Path::new(HOST_ZONE)).unwrap_or(TimeZone::UTC);
        Self { rules: zone, name: "the time zone of this host".to_owned(), is_known: true }
    }

    /// The zone that a value of `TZ` names.
    #[must_use]
    pub fn find(text: &str) -> Self {
        let name = text.strip_prefix(':').unwrap_or(text);
        if matches!(name, "" | "UTC" | "UTC0") {
            return Self::utc();
        }
        let file = zone_path(name).and_then(|path| read_zone(&path));
        let zone = file.or_else(|| TimeZone::posix(name).ok());
        let is_known = zone.is_some();
        Self { rules: zone.unwrap_or(TimeZone::UTC), name: format!("the time zone {name}"), is_known }
    }

    /// The text with each absolute time in this zone.
    #[must_use]
    pub fn localize<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let (mut local, mut copied) = (String::new(), 0);
        for (end, _) in text.match_indices(UTC_OFFSET) {
            let Some((begin, civil, fraction)) = find_time_before(&text[copied..end]) else { continue };
            let Ok(at) = Offset::UTC.to_timestamp(civil) else { continue };
            let offset = self.rules.to_offset(at);
            local.push_str(&text[copied..copied + begin]);
            local.push_str(&format_civil(offset.to_datetime(at)));
            local.push_str(fraction);
            local.push_str(&format_offset(offset));
            copied = end + UTC_OFFSET.len();
        }
        if copied == 0 {
            return Cow::Borrowed(text);
        }
        local.push_str(&text[copied..]);
        Cow::Owned(local)
    }

    /// A time in this zone, to the second and with its offset.
    #[must_use]
    pub fn format_time(&self, at: Timestamp) -> String {
        self.localize(&absolute_time(at)).into_owned()
    }

    /// Parses a time without an offset, such as `2026-11-20T18:00` or `2026-11-20 18:00:00`, as one of this zone. `None`
    /// if the text is no such time. The error is a sentence that begins with the text.
    #[must_use]
    pub fn parse_local_time(&self, text: &str) -> Option<Result<Timestamp, String>> {
        let civil = parse_civil(text)?;
        let with_offset = |offset| format!("{}{}", format_civil(civil), format_offset(offset));
        if !self.is_known {
            return Some(Err(format!(
                "{text:?} has no offset, and {} is unknown on this host: write {}, or another offset",
                self.name,
                with_offset(Offset::UTC)
            )));
        }
        let (event, change, before, after) = match self.rules.to_ambiguous_timestamp(civil).offset() {
            AmbiguousOffset::Unambiguous { offset } => {
                let at = offset.to_timestamp(civil).ok();
                return at.and_then(|at| Timestamp::from_timestamp(at.as_second(), 0)).map(Ok);
            }
            AmbiguousOffset::Gap { before, after } => ("does not exist", "forward", before, after),
            AmbiguousOffset::Fold { before, after } => ("occurs twice", "back", before, after),
        };
        Some(Err(format!(
            "{text:?} {event} in {}, where the clock is set {change}: write {} or {}",
            self.name,
            with_offset(before),
            with_offset(after)
        )))
    }
}

/// The path of the file of a zone with this name; `None` for a name that leads out of the directory of zones.
fn zone_path(name: &str) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.is_absolute() {
        return Some(path.to_owned());
    }
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    is_below.then(|| Path::new(ZONE_DIRECTORY).join(path))
}

fn read_zone(path: &Path) -> Option<TimeZone> {
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_ZONE_BYTES).read_to_end(&mut bytes).ok()?;
    TimeZone::tzif(&path.to_string_lossy(), &bytes).ok()
}

/// The absolute time at the end of a text, without its offset: where it begins, the time, and its fraction of a second.
fn find_time_before(text: &str) -> Option<(usize, DateTime, &str)> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_digit());
    let seconds = digits.strip_suffix('.').unwrap_or(text);
    let begin = seconds.len().checked_sub(TIME_LENGTH)?;
    let civil = parse_civil(seconds.get(begin..)?)?;
    let is_alone = !text[..begin].ends_with(|letter: char| letter.is_ascii_alphanumeric());
    is_alone.then_some((begin, civil, &text[seconds.len()..]))
}

/// Parses `2026-11-20T18:00:00`, also with a space in place of the T, or without the seconds.
fn parse_civil(text: &str) -> Option<DateTime> {
    let is_separator = |(place, letter): (usize, u8)| match place {
        4 | 7 => letter == b'-',
        10 => matches!(letter, b'T' | b't' | b' '),
        13 | 16 => letter == b':',
        _ => letter.is_ascii_digit(),
    };
    let has_form = matches!(text.len(), 16 | TIME_LENGTH) && text.bytes().enumerate().all(is_separator);
    if has_form { text.parse().ok() } else { None }
}

fn format_civil(civil: DateTime) -> String {
    format!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}",
        civil.year(),
        civil.month(),
        civil.day(),
        civil.hour(),
        civil.minute(),
        civil.second()
    )
}

fn format_offset(offset: Offset) -> String {
    let minutes = offset.seconds() / 60;
    let sign = if minutes < 0 { '-' } else { '+' };
    format!("{sign}{:02}:{:02}", minutes.abs() / 60, minutes.abs() % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules of POSIX, so that the test needs no files of zones.
    const BERLIN: &str = "CET-1CEST,M3.5.0,M10.5.0/3";
    const NEW_YORK: &str = "EST5EDT,M3.2.0,M11.1.0";
    const KATHMANDU: &str = "<+0545>-5:45";

    #[test]
    fn times_are_shown_in_the_zone_before_and_after_a_clock_change() {
        for (zone, utc, expected) in [
            (BERLIN, "2026-11-20T18:00:00", "2026-11-20T19:00:00+01:00"),
            (BERLIN, "2026-12-31T23:30:00", "2027-01-01T00:30:00+01:00"),
            (BERLIN, "2026-03-29T00:59:59", "2026-03-29T01:59:59+01:00"),
            (BERLIN, "2026-03-29T01:00:00", "2026-03-29T03:00:00+02:00"),
            (BERLIN, "2026-10-25T00:30:00", "2026-10-25T02:30:00+02:00"),
            (BERLIN, "2026-10-25T01:30:00", "2026-10-25T02:30:00+01:00"),
            (NEW_YORK, "2026-11-20T18:00:00", "2026-11-20T13:00:00-05:00"),
            (NEW_YORK, "2026-03-08T07:00:00", "2026-03-08T03:00:00-04:00"),
            (NEW_YORK, "2026-11-01T05:30:00", "2026-11-01T01:30:00-04:00"),
            (NEW_YORK, "2026-11-01T06:30:00", "2026-11-01T01:30:00-05:00"),
            (KATHMANDU, "2026-11-20T18:00:00", "2026-11-20T23:45:00+05:45"),
            ("UTC", "2026-11-20T18:00:00", "2026-11-20T18:00:00+00:00"),
            ("", "2026-11-20T18:00:00", "2026-11-20T18:00:00+00:00"),
            ("Mars/Phobos", "2026-11-20T18:00:00", "2026-11-20T18:00:00+00:00"),
        ] {
            assert_eq!(Zone::find(zone).localize(&format!("{utc}{UTC_OFFSET}")), expected, "{zone}");
        }
    }

    #[test]
    fn every_absolute_time_of_a_text_is_localized_and_nothing_else() {
        let zone = Zone::find(BERLIN);
        for (text, expected) in [
            (
                "in 5m (2026-11-20T18:00:00+00:00), until 2026-11-20T20:00:00.125+00:00; end",
                "in 5m (2026-11-20T19:00:00+01:00), until 2026-11-20T21:00:00.125+01:00; end",
            ),
            ("2026-11-20T18:00:00+00:00", "2026-11-20T19:00:00+01:00"),
            // Of another form, or no time.
            ("2026-11-20T18:00:00Z", "2026-11-20T18:00:00Z"),
            ("2026-11-20T18:00:00+01:00", "2026-11-20T18:00:00+01:00"),
            ("2026-11-20T18:00+00:00", "2026-11-20T18:00+00:00"),
            ("2026-11-20 18:00+00:00", "2026-11-20 18:00+00:00"),
            ("12026-11-20T18:00:00+00:00", "12026-11-20T18:00:00+00:00"),
            ("2026-13-20T18:00:00+00:00", "2026-13-20T18:00:00+00:00"),
            ("é:26-11-20T18:00:00+00:00", "é:26-11-20T18:00:00+00:00"),
            ("+00:00", "+00:00"),
            ("+00:00+00:00 2026-11-20T18:00:00+00:00", "+00:00+00:00 2026-11-20T19:00:00+01:00"),
            ("", ""),
        ] {
            assert_eq!(zone.localize(text), expected);
            // It is printed through several layers.
            assert_eq!(zone.localize(&zone.localize(text)), expected);
        }
    }

    #[test]
    fn typed_time_is_one_of_the_zone() {
        for (zone, text, expected) in [
            (BERLIN, "2026-11-20T18:00", "2026-11-20T17:00:00Z"),
            (BERLIN, "2026-11-20 18:00:05", "2026-11-20T17:00:05Z"),
            (BERLIN, "2026-07-01T18:00", "2026-07-01T16:00:00Z"),
            (BERLIN, "2026-03-29T01:59:59", "2026-03-29T00:59:59Z"),
            (BERLIN, "2026-03-29T03:00", "2026-03-29T01:00:00Z"),
            (BERLIN, "2026-10-25T03:00", "2026-10-25T02:00:00Z"),
            (NEW_YORK, "2026-11-20T18:00", "2026-11-20T23:00:00Z"),
            (KATHMANDU, "2026-11-20T18:00", "2026-11-20T12:15:00Z"),
            ("UTC", "2026-10-25T02:30", "2026-10-25T02:30:00Z"),
        ] {
            let at: Timestamp = expected.parse().unwrap();
            assert_eq!(Zone::find(zone).parse_local_time(text), Some(Ok(at)), "{zone} {text}");
        }
        for text in [
            "",
            "2h",
            "2026-11-20",
            "2026-11-20T18",
            "2026-13-20T18:00",
            "2026-02-30T18:00",
            "2026-11-20T18:00Z",
            "2026-11-20T18:00:00+01:00",
            "tomorrow at noon",
            "2026-11-20T1é:00",
        ] {
            assert_eq!(Zone::find(BERLIN).parse_local_time(text), None, "{text}");
        }
    }

    #[test]
    fn time_that_a_clock_change_makes_ambiguous_is_refused_in_one_sentence() {
        for (zone, text, expected) in [
            (
                BERLIN,
                "2026-10-25T02:30",
                "\"2026-10-25T02:30\" occurs twice in the time zone CET-1CEST,M3.5.0,M10.5.0/3, where the clock is set \
                 back: write 2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00",
            ),
            (
                BERLIN,
                "2026-03-29 02:30:00",
                "\"2026-03-29 02:30:00\" does not exist in the time zone CET-1CEST,M3.5.0,M10.5.0/3, where the clock is \
                 set forward: write 2026-03-29T02:30:00+01:00 or 2026-03-29T02:30:00+02:00",
            ),
            (
                NEW_YORK,
                "2026-11-01T01:00",
                "\"2026-11-01T01:00\" occurs twice in the time zone EST5EDT,M3.2.0,M11.1.0, where the clock is set back: \
                 write 2026-11-01T01:00:00-04:00 or 2026-11-01T01:00:00-05:00",
            ),
            (
                "Mars/Phobos",
                "2026-11-20T18:00",
                "\"2026-11-20T18:00\" has no offset, and the time zone Mars/Phobos is unknown on this host: write \
                 2026-11-20T18:00:00+00:00, or another offset",
            ),
        ] {
            assert_eq!(Zone::find(zone).parse_local_time(text), Some(Err(expected.to_owned())), "{zone}");
        }
    }

    #[test]
    fn name_of_a_zone_does_not_lead_out_of_its_directory() {
        for (name, expected) in [
            ("Europe/Berlin", Some("/usr/share/zoneinfo/Europe/Berlin")),
            ("/etc/localtime", Some("/etc/localtime")),
            ("../../../etc/localtime", None),
            ("Europe/../../secret", None),
        ] {
            assert_eq!(zone_path(name).as_deref(), expected.map(Path::new), "{name}");
        }
        assert!(read_zone(Path::new("/")).is_none() && read_zone(Path::new("/etc/passwd")).is_none());
    }
}
