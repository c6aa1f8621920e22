//! Expiry flags: when something ends (`--until`), and how long it lasts (`--expires_after`).

use crate::error::CliError;
use bmdb::orders::credential::MAX_LIFETIME;
use bmdb::orders::order::{Expiry, parse_expiry};
use model::time::{Span, Timestamp};

/// Parses `--until`: a duration or a time.
pub(crate) fn parse_until(text: &str) -> Result<Expiry, CliError> {
    parse_expiry(text).ok_or_else(|| {
        CliError::Invalid(format!(
            "--until {text:?} is neither a duration (2h, 30m, 1d) nor a time (2026-11-20T18:00:00Z)"
        ))
    })
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
