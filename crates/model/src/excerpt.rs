//! Excerpts: what the other side of a connection answered, for an error that an operator reads.
//!
//! An SSH server, a provider, etcd, systemd or a command often states the cause itself, and by another way than the
//! expected one: a banner, standard output, the body of an HTTP response. An error without these words makes the operator
//! search on the other side. So each place that gives up because of an answer quotes it, and this type is the one form
//! of the quotation: one line, without control and other hidden characters, of limited length, never empty.
//!
//! An excerpt is for people. Nothing is decided by it.

use std::fmt;

use crate::plain_text::is_hidden;

/// The longest excerpt, in characters.
const MAX_CHARS: usize = 300;
/// Bytes of a long answer that are looked at.
const MAX_BYTES: usize = 4096;

/// Words of the other side, safe to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt(String);

impl Excerpt {
    /// The beginning of a text; `None` if it has no visible character.
    #[must_use]
    pub fn from_start(text: &str) -> Option<Self> {
        Self::within(text, MAX_CHARS)
    }

    /// As [`Self::from_start`], with so many characters at most.
    #[must_use]
    pub fn within(text: &str, most: usize) -> Option<Self> {
        let visible: String = text.chars().map(|c| if is_hidden(c) { ' ' } else { c }).collect();
        let mut words = String::new();
        for word in visible.split_whitespace() {
            if !words.is_empty() {
                words.push(' ');
            }
            words.push_str(word);
        }
        if words.is_empty() {
            return None;
        }
        if words.chars().count() > most {
            words = words.chars().take(most).chain(['…']).collect();
        }
        Some(Self(words))
    }

    /// The beginning of a body or another answer in bytes.
    #[must_use]
    pub fn from_body(body: &[u8]) -> Option<Self> {
        Self::from_start(&String::from_utf8_lossy(&body[..body.len().min(MAX_BYTES)]))
    }

    /// The last line of an output that has visible characters. Programs name the cause last.
    #[must_use]
    pub fn last_line(output: &str) -> Option<Self> {
        output.lines().rev().find_map(Self::from_start)
    }

    /// The words as a text, for a quotation with `{:?}`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `sentence`, and after a colon the words of the other side if there are any.
#[must_use]
pub fn with_excerpt(sentence: impl fmt::Display, excerpt: Option<&Excerpt>) -> String {
    excerpt.map_or_else(|| sentence.to_string(), |words| format!("{sentence}: {words}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quoted(text: &str) -> String {
        Excerpt::from_start(text).map_or_else(|| "none".to_owned(), |excerpt| excerpt.to_string())
    }

    #[test]
    fn excerpt_is_one_visible_line_of_limited_length() {
        assert_eq!(quoted("no\u{1b}[31m  space\r\n\tleft\n"), "no [31m space left");
        assert_eq!(quoted("right\u{202e}to left\u{200b}"), "right to left");
        assert_eq!(quoted(" \n\u{7f}\u{feff} "), "none");
        assert_eq!(quoted(&"x".repeat(1000)).chars().count(), MAX_CHARS + 1);
        assert_eq!(quoted(&"é".repeat(MAX_CHARS)), "é".repeat(MAX_CHARS));
    }

    #[test]
    fn body_may_be_binary_and_long() {
        assert_eq!(Excerpt::from_body(b""), None);
        assert_eq!(Excerpt::from_body(&[0; 10]), None);
        let long = [b"busy ".to_vec(), vec![b'x'; 1 << 20]].concat();
        assert!(Excerpt::from_body(&long).is_some_and(|words| words.as_str().starts_with("busy x")));
        // The limit may cut a character in two.
        let cut = [vec![b' '; MAX_BYTES - 1], "é".as_bytes().to_vec()].concat();
        assert_eq!(Excerpt::from_body(&cut).unwrap().as_str(), "\u{fffd}");
    }

    #[test]
    fn last_line_is_the_last_one_with_words() {
        let last = |text: &str| Excerpt::last_line(text).map(|words| words.to_string());
        assert_eq!(last("one\ntwo\n\n \u{1b}\n").as_deref(), Some("two"));
        assert_eq!(last("\n\n"), None);
    }

    #[test]
    fn sentence_ends_with_the_words() {
        let words = Excerpt::from_start("full");
        assert_eq!(with_excerpt("it answered 507", words.as_ref()), "it answered 507: full");
        assert_eq!(with_excerpt("it answered 507", None), "it answered 507");
    }
}
