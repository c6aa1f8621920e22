//! Whether a part of a log that a machine brings has the form it must have, and what is kept of it. Pure.
//!
//! What a service wrote is anybody's text. It ends on a terminal and in a text column, so control characters become spaces
//! here, for every reader alike; the end of a line and the tabulator are the only ones that stay.

use uuid::Uuid;

use crate::model::ids::MachineId;
use crate::model::log_request::{Brought, LONGEST_NAME, LONGEST_SENTENCE, MOST_NAMES, PART_LIMIT, There};
use crate::proto::agent::v1::BringLogRequest;
use crate::server::heartbeat_form::uuid;

/// A part, and what it is brought for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Whose it says it is.
    pub machine: MachineId,
    /// The request.
    pub request: Uuid,
    /// What is brought.
    pub brought: Brought,
}

/// The part in a request; the error names the field that is malformed.
pub fn read_part(request: BringLogRequest) -> Result<Part, String> {
    let id = |field, text: &str| uuid(field, text).map_err(|malformed| malformed.to_string());
    let machine = MachineId(id("machine_id", &request.machine_id)?);
    let asked = id("request", &request.request)?;
    id("incarnation", &request.incarnation)?;
    let number = i64::try_from(request.number).map_err(|_| "number is larger than it can be".to_owned())?;
    let lines = request.lines.unwrap_or_default().text;
    if lines.len() > PART_LIMIT {
        return Err(format!("lines is larger than {} KiB", PART_LIMIT >> 10));
    }
    let mut lines: String =
        lines.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { ' ' } else { c }).collect();
    if !lines.is_empty() && !lines.ends_with('\n') {
        lines.push('\n');
    }
    if request.there.len() > MOST_NAMES {
        return Err(format!("there has more than {MOST_NAMES} logs"));
    }
    let there = request
        .there
        .into_iter()
        .map(|there| There { log: shown(&there.log, LONGEST_NAME), bytes: there.bytes })
        .collect();
    let sentence = |text: &str| Some(shown(text, LONGEST_SENTENCE)).filter(|text| !text.is_empty());
    Ok(Part {
        machine,
        request: asked,
        brought: Brought {
            incarnation: request.incarnation,
            number,
            lines,
            there,
            note: sentence(&request.note),
            error: sentence(&request.error),
            last: request.last,
        },
    })
}

fn shown(text: &str, most: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::agent::v1::{LogLines, LogThere};

    fn request() -> BringLogRequest {
        BringLogRequest {
            machine_id: "0b1c9a52-7d3a-4a35-9f0a-0242ac120002".to_owned(),
            request: "11111111-2222-4333-8444-555555555555".to_owned(),
            incarnation: "66666666-7777-4888-8999-aaaaaaaaaaaa".to_owned(),
            number: 2,
            lines: Some(LogLines { text: "a\tb\u{1b}[31mc\u{0}\r\nsecond".to_owned() }),
            there: vec![LogThere { log: "web/ser\nver".to_owned(), bytes: 7 }],
            note: "n\n".to_owned(),
            error: String::new(),
            last: true,
        }
    }

    #[test]
    fn what_could_drive_a_terminal_is_not_kept() {
        let part = read_part(request()).unwrap();
        assert_eq!(part.brought.lines, "a\tb [31mc  \nsecond\n");
        assert_eq!(part.brought.there, [There { log: "web/ser ver".to_owned(), bytes: 7 }]);
        assert_eq!((part.brought.note.as_deref(), part.brought.error), (Some("n "), None));
        assert_eq!((part.brought.number, part.brought.last), (2, true));
    }

    #[test]
    fn malformed_field_is_named() {
        let text = |length| Some(LogLines { text: "x".repeat(length) });
        let there = vec![LogThere::default(); MOST_NAMES + 1];
        for (field, odd) in [
            ("machine_id", BringLogRequest { machine_id: "m".to_owned(), ..request() }),
            ("request", BringLogRequest { request: String::new(), ..request() }),
            ("incarnation", BringLogRequest { incarnation: "1".to_owned(), ..request() }),
            ("number", BringLogRequest { number: u64::MAX, ..request() }),
            ("lines", BringLogRequest { lines: text(PART_LIMIT + 1), ..request() }),
            ("there", BringLogRequest { there, ..request() }),
        ] {
            let said = read_part(odd).unwrap_err();
            assert!(said.starts_with(field), "{said}");
        }
        assert!(read_part(BringLogRequest { lines: text(PART_LIMIT), ..request() }).is_ok());
    }
}
