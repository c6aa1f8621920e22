//! Texts of requests: what no database can hold and no terminal should be shown is refused by its field.
//!
//! Whatever an operator says is kept, and shown to others: a reason in a history, a name in a list. What it
//! may hold is therefore decided where it comes in. A NUL cannot be stored at all, and control characters
//! would move the cursor of whoever reads them.

use tonic::Status;

use crate::server::api::refusal::wrong;

/// A text of one line, without the space around it, of `most` characters at the most. It may be empty.
pub fn line<'a>(field: &str, said: &'a str, most: usize) -> Result<&'a str, Status> {
    let said = said.trim();
    if said.chars().count() > most {
        return Err(wrong(field, format!("{field} is longer than {most} characters")));
    }
    if said.chars().any(char::is_control) {
        return Err(wrong(field, format!("{field} must be one line, without control characters")));
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_shown_is_taken() {
        assert_eq!(line("f", " é b ", 3).unwrap(), "é b");
        assert_eq!(line("f", "", 3).unwrap(), "");
        for odd in ["abcd", "a\nb", "a\0", "\u{1b}[2J"] {
            assert!(line("f", odd, 3).is_err(), "{odd:?}");
        }
    }
}
