//! `--until` of all that expires, and the other flags with a duration or a time.

use crate::error::CliError;
use crate::output::zone::{Zone, current_zone};
use bmdb::orders::credential::{LIFETIME_TOO_LONG, MAX_LIFETIME};
use bmdb::orders::order::{Expiry, parse_expiry};
use model::time::{Span, Timestamp, between};

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

/// Parses `--until` of a credential or a certificate. `check` refuses a duration. A time is checked by the server, because
/// the clock of the database counts.
pub(crate) fn parse_end(
    text: Option<&str>,
    check: fn(Span) -> Result<(), String>,
) -> Result<Option<Expiry>, CliError> {
    let until = text.map(parse_until).transpose()?;
    if let Some(Expiry::After(span)) = until {
        check(span).map_err(|reason| CliError::Invalid(format!("--until: {reason}")))?;
    }
    Ok(until)
}

/// Checks the lifetime of a credential for the API; the error is a sentence.
pub(crate) fn check_credential_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime > MAX_LIFETIME { Err(LIFETIME_TOO_LONG.to_owned()) } else { Ok(()) }
}

/// Parses a flag that is a duration, or a time before `now`: how long ago that is, in whole seconds and rounded up. A time
/// after `now` is an error.
pub(crate) fn parse_age(flag: &str, text: &str, now: Timestamp) -> Result<Span, CliError> {
    match parse_moment(flag, text)? {
        Expiry::After(span) => Ok(span),
        Expiry::At(moment) if moment <= now => Ok(Span::seconds(between(moment, now).as_secs() + 1)),
        Expiry::At(_) => Err(CliError::Invalid(format!("--{flag} {text:?} is in the future"))),
    }
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
    fn end_is_a_duration_within_the_limit_or_a_time() {
        let parse = |text: &str| parse_end(Some(text), check_credential_lifetime);
        assert_eq!(parse_end(None, check_credential_lifetime).unwrap(), None);
        assert_eq!(parse("90d").unwrap(), Some(Expiry::After(Span::hours(90 * 24))));
        let moment = "2099-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(parse("2099-01-01T00:00:00Z").unwrap(), Some(Expiry::At(moment)));
        for (text, part) in
            [("9999d", "--until: that is longer than ten years"), ("soon", "--until \"soon\" is")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.to_string().starts_with(part), "{error}");
            assert_eq!(error.exit_code(), ExitCode::WrongCommand);
        }
    }

    #[test]
    fn age_is_a_duration_or_counted_from_a_time() {
        let now = "2026-11-20T18:00:00Z".parse().unwrap();
        for (text, expected) in [
            ("10m", Some(Span::minutes(10))),
            ("2026-11-20T17:59:30Z", Some(Span::seconds(31))),
            ("2026-11-20T18:00:00Z", Some(Span::seconds(1))),
            ("2026-11-20T18:00:01Z", None),
            ("soon", None),
        ] {
            assert_eq!(parse_age("since", text, now).ok(), expected, "{text}");
        }
    }

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
