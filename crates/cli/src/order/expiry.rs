//! Expiry flags: when something ends (`--until`), and how long it lasts (`--expires_after`).

use crate::error::CliError;
use crate::output::zone::{Zone, current_zone};
use bmdb::orders::credential::MAX_LIFETIME;
use bmdb::orders::order::{Expiry, parse_expiry};
use model::time::{Span, Timestamp};

/// Parses `--until`: a duration or a time. A time without an offset is one of the zone of the user.
pub(crate) fn parse_until(text: &str) -> Result<Expiry, CliError> {
    parse_moment("until", text)
}

/// Parses the value of this flag: a duration or a time. A time without an offset is one of the zone of the user.
pub(crate) fn parse_moment(flag: &str, text: &str) -> Result<Expiry, CliError> {
    parse_moment_in(flag, text, current_zone())
}

fn parse_moment_in(flag: &str, text: &str, zone: &Zone) -> Result<Expiry, CliError> {
    if let Some(expiry) = parse_expiry(text) {
        return Ok(expiry);
    }
    match zone.parse_local_time(text) {
        Some(Ok(at)) => Ok(Expiry::At(at)),
        Some(Err(reason)) => Err(CliError::Invalid(format!("--{flag} {reason}"))),
        None => Err(CliError::Invalid(format!(
            "--{flag} {text:?} is neither a duration (2h, 30m, 1d) nor a time (2026-11-20T18:00, 2026-11-20T18:00:00Z)"
        ))),
    }
}

/// Parses a lifetime of at most ten years, for example `90d`.
pub fn parse_lifetime(text: &str) -> Result<Span, String> {
    let span: Span =
        text.parse().map_err(|_| format!("{text:?} is not a duration; write for example 90d or 12h"))?;
    if span > MAX_LIFETIME {
        return Err("that is longer than ten years; omit it for no expiry".to_owned());
    }
    Ok(span)
}

/// A time in a request.
pub(crate) fn encode_timestamp(moment: Timestamp) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: moment.timestamp(),
        nanos: i32::try_from(moment.timestamp_subsec_nanos()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit_code::ExitCode;

    #[test]
    fn time_without_an_offset_is_local() {
        let zone = Zone::find("CET-1CEST,M3.5.0,M10.5.0/3");
        let at = |text: &str| Expiry::At(text.parse().unwrap());
        for (text, expected) in [
            ("2h", Expiry::After(Span::hours(2))),
            ("2026-11-20T18:00:00Z", at("2026-11-20T18:00:00Z")),
            ("2026-11-20T18:00:00-05:00", at("2026-11-20T23:00:00Z")),
            ("2026-11-20T18:00", at("2026-11-20T17:00:00Z")),
            ("2026-11-20 18:00:30", at("2026-11-20T17:00:30Z")),
        ] {
            assert_eq!(parse_moment_in("until", text, &zone).unwrap(), expected, "{text}");
        }
        for (text, part) in [
            ("2026-10-25T02:30", "--until \"2026-10-25T02:30\" occurs twice in "),
            ("2026-03-29T02:30", "--until \"2026-03-29T02:30\" does not exist in "),
            ("soon", "--until \"soon\" is neither a duration "),
            ("2026-11-20", "nor a time "),
        ] {
            let error = parse_moment_in("until", text, &zone).unwrap_err();
            let sentence = error.to_string();
            assert!(sentence.contains(part) && !sentence.contains('\n'), "{sentence}");
            assert_eq!(error.exit_code(), ExitCode::WrongCommand);
        }
    }
}
