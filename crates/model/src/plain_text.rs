//! Canonical form of the text that people give: names, reasons, keys.
//!
//! People compare such text by its look: an admin reads a name in a list and approves an order because of it. So two
//! texts that look alike are stored alike, and what cannot be seen is not stored:
//!
//! * The form is NFKC of Unicode: a full-width letter becomes the usual one, and an accent and its letter one character.
//! * Hidden characters are rejected: control characters, format characters (category Cf, among them those that change
//!   the direction of writing), separators of lines, and other characters that show nothing.
//!
//! Letters of different alphabets that look alike, as the Latin and the Cyrillic a, stay different.

use unicode_normalization::UnicodeNormalization as _;

/// Characters that show nothing or change how others are shown, besides control characters: the category Cf of Unicode
/// 16, separators of lines and paragraphs, what else has the property `Default_Ignorable_Code_Point`, and the Braille
/// pattern without dots. Sorted, both ends included.
const HIDDEN: [(char, char); 26] = [
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{600}', '\u{605}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{6dd}', '\u{6dd}'),
    ('\u{70f}', '\u{70f}'),
    ('\u{890}', '\u{891}'),
    ('\u{8e2}', '\u{8e2}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{2800}', '\u{2800}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{110bd}', '\u{110bd}'),
    ('\u{110cd}', '\u{110cd}'),
    ('\u{13430}', '\u{1343f}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    // Tags, and further selectors of variants.
    ('\u{e0000}', '\u{e0fff}'),
];

/// Whether a character is hidden: it shows nothing, or changes how others are shown.
#[must_use]
pub fn is_hidden(c: char) -> bool {
    c.is_control() || HIDDEN.iter().any(|(first, last)| (*first..=*last).contains(&c))
}

/// Checks that a text is one line without hidden characters. The error is the rest of a sentence about the text.
pub fn check_visible(text: &str) -> Result<(), String> {
    match text.chars().find(|c| is_hidden(*c)) {
        None => Ok(()),
        Some(c) if c.is_control() => Err("must be one line, without control characters".to_owned()),
        Some(c) => Err(format!(
            "has the hidden character U+{:04X}, with which it looks like another text; type it without that character",
            u32::from(c)
        )),
    }
}

/// The canonical form of one line: NFKC, without space around it. The error is the rest of a sentence about the text.
pub fn canonical_line(text: &str) -> Result<String, String> {
    check_visible(text.trim())?;
    Ok(visible_text(text))
}

/// The canonical form of a text that is not rejected: hidden characters are left out.
#[must_use]
pub fn visible_text(text: &str) -> String {
    text.nfkc().filter(|c| !is_hidden(*c)).collect::<String>().trim().to_owned()
}

/// A text of a machine, a provider or a file, in which each hidden character is a space. Those in `kept` stay, such as the
/// ends of lines.
#[must_use]
pub fn replace_hidden(text: &str, kept: &[char]) -> String {
    text.chars().map(|c| if is_hidden(c) && !kept.contains(&c) { ' ' } else { c }).collect()
}

/// The canonical form of a name: as that of a line, and words are one space apart. The error is the rest of a sentence
/// about the name.
pub fn canonical_name(text: &str) -> Result<String, String> {
    Ok(join_words(&canonical_line(text)?))
}

/// A name as names are compared: canonical, in lower case. Names that an earlier release stored may have hidden
/// characters, which do not count.
#[must_use]
pub fn fold_name(name: &str) -> String {
    join_words(&visible_text(name)).to_lowercase()
}

fn join_words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_line_has_one_form_and_nothing_hidden() {
        for (text, expected) in [
            ("", Ok("")),
            (" kim ", Ok("kim")),
            ("Kim  Lee", Ok("Kim  Lee")),
            ("jose\u{301}", Ok("jos\u{e9}")),
            ("\u{ff4b}\u{ff49}\u{ff4d}", Ok("kim")),
            ("row\u{a0}7", Ok("row 7")),
            ("\u{fb01}rmware", Ok("firmware")),
            // Another alphabet is another text.
            ("\u{43a}im", Ok("\u{43a}im")),
            ("\u{1f600}", Ok("\u{1f600}")),
            ("a\nb", Err("must be one line, without control characters")),
            ("a\0", Err("must be one line, without control characters")),
            ("\u{1b}[2J", Err("must be one line, without control characters")),
            ("ad\u{200b}min", Err("has the hidden character U+200B")),
            ("r \u{202e}egninnalp si eno on\u{202c}", Err("has the hidden character U+202E")),
            ("\u{feff}kim", Err("has the hidden character U+FEFF")),
            ("ki\u{ad}m", Err("has the hidden character U+00AD")),
            ("kim\u{e0041}", Err("has the hidden character U+E0041")),
            ("kim\u{3164}", Err("has the hidden character U+3164")),
            ("kim\u{fe0f}", Err("has the hidden character U+FE0F")),
            ("ki\u{2028}m", Err("has the hidden character U+2028")),
            ("\u{2800}", Err("has the hidden character U+2800")),
        ] {
            let found = canonical_line(text);
            match expected {
                Ok(canonical) => assert_eq!(found.as_deref(), Ok(canonical), "{text:?}"),
                Err(start) => {
                    let refused = found.expect_err(text);
                    assert!(refused.starts_with(start), "{text:?}: {refused}");
                }
            }
        }
    }

    #[test]
    fn canonical_form_of_visible_characters_is_visible_and_final() {
        for c in (char::MIN..=char::MAX).filter(|c| !is_hidden(*c)) {
            let form: String = c.nfkc().collect();
            assert!(form.chars().all(|c| !is_hidden(c)), "{c:?}");
            assert_eq!(form.nfkc().collect::<String>(), form, "{c:?}");
        }
    }

    #[test]
    fn hidden_characters_of_others_become_spaces() {
        assert_eq!(replace_hidden("a\u{202e}b\u{200b}c\n\u{1b}[2J", &[]), "a b c  [2J");
        assert_eq!(replace_hidden("a\tb\r\n", &['\n', '\t']), "a\tb \n");
        assert_eq!(replace_hidden("\u{645}\u{e9}\u{1f600}", &[]), "\u{645}\u{e9}\u{1f600}");
    }

    #[test]
    fn ranges_of_hidden_characters_are_sorted() {
        assert!(HIDDEN.iter().all(|(first, last)| first <= last));
        assert!(HIDDEN.windows(2).all(|pair| pair[0].1 < pair[1].0));
    }

    #[test]
    fn names_that_look_alike_are_equal() {
        for (one, other, expected) in [
            ("kim", "Kim", true),
            ("kim lee", " kim\u{a0} lee", true),
            ("admin", "ad\u{200b}min", true),
            ("admin", "\u{202a}admin\u{202c}", true),
            ("\u{ff2b}im", "kim", true),
            ("jos\u{e9}", "JOSE\u{301}", true),
            ("kim", "kim2", false),
            ("kim", "\u{43a}im", false),
        ] {
            assert_eq!(fold_name(one) == fold_name(other), expected, "{one:?} {other:?}");
        }
        assert_eq!(canonical_name(" kim \u{a0} lee").as_deref(), Ok("kim lee"));
        assert!(canonical_name("ad\u{200b}min").is_err());
        assert_eq!(visible_text(" r\u{202e}x\n "), "rx");
    }
}
