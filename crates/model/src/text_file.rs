//! Text files that people write: device lists, certificates, keys, passwords, tokens, declarations, manifests.
//!
//! They come from editors and shells of other systems. Some write a byte order mark in front of the text, which no editor
//! shows: a parser that does not know it refuses a right list at its first character, and one that looks for lines passes
//! over the first certificate of a chain. So every reader of such a file takes its content from here, and has one rule:
//!
//! * The mark of UTF-8 in front is passed over (RFC 8259, section 8.1, permits it for JSON).
//! * UTF-16 is named: its text looks right in every editor, and nothing here reads it.
//! * Ends of lines may be those of Windows. The parsers of JSON, TOML and PEM take both, and what is one line is trimmed.
//!
//! A file of another program's format, such as an archive or a certificate in DER, has no mark and is not changed.

/// The mark that some editors write in front of UTF-8.
const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";
/// The marks in front of UTF-16, in both orders of bytes.
const UTF16_MARKS: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];

/// Why the content of a file is not used as text. The sentence continues one about the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The text has two bytes for each character.
    #[error("it is UTF-16, as some editors of Windows save text; save it as UTF-8")]
    Utf16,
    /// The bytes are in no encoding that is read.
    #[error("it is not UTF-8 from byte {position} on; save it as UTF-8")]
    NotUtf8 {
        /// Position of the first byte that does not fit; the first byte of the file is 1.
        position: usize,
    },
}

/// The content without a byte order mark, for files that may have other bytes than text, such as PEM with comments.
pub fn skip_mark(content: &[u8]) -> Result<&[u8], TextError> {
    if is_utf16(content) {
        return Err(TextError::Utf16);
    }
    Ok(content.strip_prefix(UTF8_MARK).unwrap_or(content))
}

/// The text of a file, without a byte order mark.
pub fn decode_text(content: &[u8]) -> Result<&str, TextError> {
    let text = skip_mark(content)?;
    let skipped = content.len() - text.len();
    std::str::from_utf8(text)
        .map_err(|error| TextError::NotUtf8 { position: skipped + error.valid_up_to() + 1 })
}

/// Whether this is UTF-16, by its mark or, without one, by the zero bytes of its first two characters.
fn is_utf16(content: &[u8]) -> bool {
    UTF16_MARKS.iter().any(|mark| content.starts_with(mark))
        || matches!(content, [first, 0, third, 0, ..] if *first != 0 && *third != 0)
        || matches!(content, [0, second, 0, fourth, ..] if *second != 0 && *fourth != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_editors_save_it() {
        let utf16 = |text: &str, mark: &[u8], bytes: fn(u16) -> [u8; 2]| {
            let mut content = mark.to_vec();
            content.extend(text.encode_utf16().flat_map(bytes));
            content
        };
        for (content, expected) in [
            (b"".to_vec(), Ok("")),
            (b"[]\r\n".to_vec(), Ok("[]\r\n")),
            (b"\xef\xbb\xbf[]".to_vec(), Ok("[]")),
            ("caf\u{e9}".as_bytes().to_vec(), Ok("caf\u{e9}")),
            (b"caf\xe9\n".to_vec(), Err(TextError::NotUtf8 { position: 4 })),
            (b"\xef\xbb\xbf\xe9".to_vec(), Err(TextError::NotUtf8 { position: 4 })),
            (utf16("[]", b"\xff\xfe", u16::to_le_bytes), Err(TextError::Utf16)),
            (utf16("[]", b"\xfe\xff", u16::to_be_bytes), Err(TextError::Utf16)),
            (utf16("[]", b"", u16::to_le_bytes), Err(TextError::Utf16)),
            (utf16("[]", b"", u16::to_be_bytes), Err(TextError::Utf16)),
        ] {
            assert_eq!(decode_text(&content), expected, "{content:?}");
        }
        assert!(TextError::Utf16.to_string().contains("UTF-16"));
    }

    #[test]
    fn other_bytes_stay_as_they_are() {
        for content in [&b"\x30\x82\x01\x0a"[..], b"\0\0\0\0", b"\xff\xff\xff\xff", b"# caf\xe9\n-----BEGIN"]
        {
            assert_eq!(skip_mark(content), Ok(content));
        }
        assert_eq!(skip_mark(b"\xef\xbb\xbf-----BEGIN"), Ok(&b"-----BEGIN"[..]));
    }
}
