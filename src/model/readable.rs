//! Words of a machine or of a provider, made fit for a person's terminal and a log line.
//!
//! Neither is trusted: what they say must not move a cursor, forge a second log line, or fill a page.

/// Text from outside as it may be shown to a person: one line, no control characters, not endless.
#[must_use]
pub fn readable(text: &str) -> String {
    const LONGEST: usize = 300;
    let flat: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(LONGEST + 1)
        .collect::<String>()
        .trim()
        .to_owned();
    if flat.chars().count() > LONGEST { flat.chars().take(LONGEST).chain(['…']).collect() } else { flat }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_is_one_bounded_line() {
        assert_eq!(readable("no\u{1b}[31m space\nleft\n"), "no [31m space left");
        assert_eq!(readable(&"x".repeat(1000)).chars().count(), 301);
    }
}
