//! Sanitize text from machines and providers for terminals and logs.
//!
//! Both are not trusted: their text must not move a cursor, forge a second log line, look like another text, or fill a page.

use crate::plain_text::replace_hidden;

/// External text in a form that is safe to show: one line, no hidden characters, limited length.
#[must_use]
pub fn sanitize_text(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    let start: String = text.chars().take(MAX_CHARS + 1).collect();
    let flat = replace_hidden(&start, &[]).trim().to_owned();
    if flat.chars().count() > MAX_CHARS {
        flat.chars().take(MAX_CHARS).chain(['…']).collect()
    } else {
        flat
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn external_text_becomes_one_bounded_line() {
        assert_eq!(sanitize_text("no\u{1b}[31m space\nleft\n"), "no [31m space left");
        assert_eq!(sanitize_text("fdp.exe\u{202e}txt\u{200b}"), "fdp.exe txt");
        assert_eq!(sanitize_text(&"x".repeat(1000)).chars().count(), 301);
    }
}
