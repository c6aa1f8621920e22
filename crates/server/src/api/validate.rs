//! Validate text fields of requests.
//!
//! Text of an operator is stored and shown to others: a reason in a history, a name in a list. So it is validated
//! where it enters, and the error names the field. A NUL cannot be stored at all, and control characters would move
//! the cursor of the reader's terminal.

use tonic::Status;

use crate::api::api_error::invalid_argument;

/// One line of text without surrounding white space, of at most `most` characters. It may be empty.
pub fn single_line<'a>(field: &str, text: &'a str, most: usize) -> Result<&'a str, Status> {
    let text = text.trim();
    if text.chars().count() > most {
        return Err(invalid_argument(field, format!("{field} is longer than {most} characters")));
    }
    if text.chars().any(char::is_control) {
        return Err(invalid_argument(field, format!("{field} must be one line, without control characters")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_printable_text_is_accepted() {
        assert_eq!(single_line("f", " é b ", 3).unwrap(), "é b");
        assert_eq!(single_line("f", "", 3).unwrap(), "");
        for odd in ["abcd", "a\nb", "a\0", "\u{1b}[2J"] {
            assert!(single_line("f", odd, 3).is_err(), "{odd:?}");
        }
    }
}
