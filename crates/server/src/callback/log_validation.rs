//! Log validation: checks and sanitizes the parts of logs that machines upload. The code is pure.
//!
//! A service may write any text. It is shown on a terminal and stored in a text column, so control characters are
//! replaced by spaces here, for every reader alike. Only the line feed and the tab stay.

use uuid::Uuid;

use crate::callback::heartbeat_validation::parse_uuid;
use model::ids::MachineId;
use model::log_request::{
    AvailableLog, LogPart, MAX_LOG_NAMES, MAX_MESSAGE_CHARS, MAX_NAME_CHARS, MAX_PART_BYTES,
};
use model::plain_text::replace_hidden;
use proto::agent::v1::UploadLogRequest;

/// A validated log part with its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedLogPart {
    /// The machine that the request names; not verified yet.
    pub machine: MachineId,
    /// The log request that it answers.
    pub request_id: Uuid,
    /// The part with sanitized text.
    pub part: LogPart,
}

/// Parses the part of a request. The error names the malformed field.
pub fn parse_log_part(request: UploadLogRequest) -> Result<ParsedLogPart, String> {
    let id = |field, text: &str| parse_uuid(field, text).map_err(|malformed| malformed.to_string());
    let machine = MachineId(id("machine_id", &request.machine_id)?);
    let reported = id("request_id", &request.request_id)?;
    id("incarnation", &request.incarnation)?;
    let number = i64::try_from(request.part_number).map_err(|_| "part_number is too large".to_owned())?;
    let lines = request.lines.unwrap_or_default().text;
    if lines.len() > MAX_PART_BYTES {
        return Err(format!("lines is larger than {} KiB", MAX_PART_BYTES >> 10));
    }
    let mut lines = replace_hidden(&lines, &['\n', '\t']);
    if !lines.is_empty() && !lines.ends_with('\n') {
        lines.push('\n');
    }
    if request.available_logs.len() > MAX_LOG_NAMES {
        return Err(format!("available_logs has more than {MAX_LOG_NAMES} entries"));
    }
    let there = request
        .available_logs
        .into_iter()
        .map(|there| AvailableLog { log: shown_text(&there.log, MAX_NAME_CHARS), bytes: there.bytes })
        .collect();
    let sentence = |text: &str| Some(shown_text(text, MAX_MESSAGE_CHARS)).filter(|text| !text.is_empty());
    Ok(ParsedLogPart {
        machine,
        request_id: reported,
        part: LogPart {
            incarnation: request.incarnation,
            number,
            lines,
            available: there,
            note: sentence(&request.note),
            error: sentence(&request.error),
            last: request.is_last,
        },
    })
}

fn shown_text(text: &str, most: usize) -> String {
    let start: String = text.chars().take(most).collect();
    replace_hidden(&start, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::agent::v1::{self as wire, LogLines};

    fn request() -> UploadLogRequest {
        UploadLogRequest {
            machine_id: "0b1c9a52-7d3a-4a35-9f0a-0242ac120002".to_owned(),
            request_id: "11111111-2222-4333-8444-555555555555".to_owned(),
            incarnation: "66666666-7777-4888-8999-aaaaaaaaaaaa".to_owned(),
            part_number: 2,
            lines: Some(LogLines { text: "a\tb\u{1b}[31mc\u{0}\r\nsecond".to_owned() }),
            available_logs: vec![wire::AvailableLog { log: "web/ser\nver".to_owned(), bytes: 7 }],
            note: "n\n".to_owned(),
            error: String::new(),
            is_last: true,
        }
    }

    #[test]
    fn control_characters_are_replaced() {
        let part = parse_log_part(request()).unwrap();
        assert_eq!(part.part.lines, "a\tb [31mc  \nsecond\n");
        assert_eq!(part.part.available, [AvailableLog { log: "web/ser ver".to_owned(), bytes: 7 }]);
        assert_eq!((part.part.note.as_deref(), part.part.error), (Some("n "), None));
        assert_eq!((part.part.number, part.part.last), (2, true));
    }

    #[test]
    fn malformed_field_is_named() {
        let text = |length| Some(LogLines { text: "x".repeat(length) });
        let there = vec![wire::AvailableLog::default(); MAX_LOG_NAMES + 1];
        for (field, odd) in [
            ("machine_id", UploadLogRequest { machine_id: "m".to_owned(), ..request() }),
            ("request_id", UploadLogRequest { request_id: String::new(), ..request() }),
            ("incarnation", UploadLogRequest { incarnation: "1".to_owned(), ..request() }),
            ("part_number", UploadLogRequest { part_number: u64::MAX, ..request() }),
            ("lines", UploadLogRequest { lines: text(MAX_PART_BYTES + 1), ..request() }),
            ("available_logs", UploadLogRequest { available_logs: there, ..request() }),
        ] {
            let message = parse_log_part(odd).unwrap_err();
            assert!(message.starts_with(field), "{message}");
        }
        assert!(parse_log_part(UploadLogRequest { lines: text(MAX_PART_BYTES), ..request() }).is_ok());
    }
}
