//! Validate text fields of requests.
//!
//! Text of an operator is stored and shown to others: a reason in a history, a name in a list. So it is validated
//! where it enters, and the error names the field. A NUL cannot be stored at all, control characters would move the
//! cursor of the reader's terminal, and hidden characters would make two texts look alike ([`model::plain_text`]).

use tonic::Status;

use crate::api::api_error::invalid_argument;
use model::plain_text::{check_visible, visible_text};

/// One line of text without surrounding white space, of at most `most` characters. It may be empty.
pub fn single_line<'a>(field: &str, text: &'a str, most: usize) -> Result<&'a str, Status> {
    let text = text.trim();
    if text.chars().count() > most {
        return Err(invalid_argument(field, format!("{field} is longer than {most} characters")));
    }
    check_visible(text).map_err(|reason| invalid_argument(field, format!("{field} {reason}")))?;
    Ok(text)
}

/// One line of text as [`single_line`] accepts it, in the canonical form in which it is stored.
pub fn canonical_line(field: &str, text: &str, most: usize) -> Result<String, Status> {
    let canonical = visible_text(single_line(field, text, most)?);
    Ok(single_line(field, &canonical, most)?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_printable_text_is_accepted() {
        assert_eq!(single_line("f", " é b ", 3).unwrap(), "é b");
        assert_eq!(single_line("f", "", 3).unwrap(), "");
        for odd in ["abcd", "a\nb", "a\0", "\u{1b}[2J", "a\u{200b}", "\u{202e}a"] {
            assert!(single_line("f", odd, 3).is_err() && canonical_line("f", odd, 3).is_err(), "{odd:?}");
        }
    }

    #[test]
    fn stored_text_is_canonical_and_no_longer_than_its_limit() {
        assert_eq!(canonical_line("f", " e\u{301} ", 3).unwrap(), "\u{e9}");
        assert_eq!(canonical_line("f", "\u{fb03}", 3).unwrap(), "ffi");
        assert!(canonical_line("f", "\u{fb03}\u{fb03}", 3).is_err(), "it is longer in its canonical form");
    }
}
