//! Shell quoting: argument vectors to one command line and back.
//!
//! SSH carries a command as a single string that the remote user's login shell parses. Everything this project runs on
//! a machine is an argument vector, so each word is quoted here and nowhere else: a device list's `RebootCommand` with
//! a space or a `$(…)` in it stays the word it was.
//!
//! Words for people are quoted by the library `shlex`. The two directions of an SSH command are not:
//!
//! * [`quote`] uses single quotes only, for every word, because every login shell in use reads them alike. `shlex`
//!   writes double quotes with backslashes around a word that has a single quote or a backslash, and csh does not read
//!   those.
//! * [`split`] returns `None` for what a shell would expand. `shlex` returns `$HOME`, `;` and `|` as parts of words,
//!   and takes a newline for a space.

use std::borrow::Cow;

/// A word that no shell command can carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the argument {word:?} holds a NUL character, which no command line can carry; remove it")]
pub struct NulInWord {
    /// The word as it was passed.
    pub word: String,
}

/// Quotes one word so that a POSIX shell reads it back unchanged.
///
/// # Errors
///
/// [`NulInWord`] when the word holds a NUL character.
pub fn quote(word: &str) -> Result<String, NulInWord> {
    if word.contains('\0') {
        return Err(NulInWord { word: word.to_owned() });
    }
    // The quote itself is outside the quoted run: 'it'\''s'.
    Ok(format!("'{}'", word.replace('\'', "'\\''")))
}

/// Quotes a word as a person would: bare where that is safe, quoted elsewhere.
#[must_use]
pub fn quote_if_needed(text: &str) -> String {
    // A word with a NUL cannot be typed. Without the NUL it can at least be read.
    shlex::try_quote(text).map_or_else(|_| text.replace('\0', ""), Cow::into_owned)
}

/// Quotes an argument vector into one command line.
///
/// # Errors
///
/// [`NulInWord`] for the first word that holds a NUL character.
pub fn join<W: AsRef<str>>(words: &[W]) -> Result<String, NulInWord> {
    let quoted: Vec<String> = words.iter().map(|word| quote(word.as_ref())).collect::<Result<_, _>>()?;
    Ok(quoted.join(" "))
}

/// Parses a command line made of bare words, single quotes and backslashes.
///
/// `None` for anything that a shell would expand, redirect or run as more than one command: the caller (a simulated
/// machine) must not guess.
#[must_use]
pub fn split(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        match c {
            ' ' | '\t' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match rest.next()? {
                        '\'' => break,
                        inner => word.push(inner),
                    }
                }
            }
            '\\' => match rest.next()? {
                '\n' => return None,
                escaped => word.get_or_insert_default().push(escaped),
            },
            '\n' | '"' | '$' | '`' | ';' | '&' | '|' | '<' | '>' | '(' | ')' | '*' | '?' | '[' | '#'
            | '~' => {
                return None;
            }
            plain => word.get_or_insert_default().push(plain),
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_odd_words_are_quoted() {
        for (text, expected) in [
            ("sim/sim-0007", "sim/sim-0007"),
            ("rack a/1", "'rack a/1'"),
            ("it's", "\"it's\""),
            ("+01:00", "+01:00"),
            ("$(reboot)", "'$(reboot)'"),
            ("", "''"),
        ] {
            assert_eq!(quote_if_needed(text), expected);
        }
    }

    fn sh_output(command: &str) -> Vec<u8> {
        let output = Command::new("/bin/sh").arg("-c").arg(command).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }

    #[test]
    fn the_words_that_break_naive_quoting_survive_a_real_shell() {
        for word in
            ["", "'", "''", "it's", "$(id)", "`id`", "a b", "\\", "\\'", "*", "~", "-n", "\n", "é", "!"]
        {
            let line = format!("printf '<%s>' {}", quote(word).unwrap());
            assert_eq!(sh_output(&line), format!("<{word}>").into_bytes());
            assert_eq!(split(&quote(word).unwrap()), Some(vec![word.to_owned()]));
        }
    }

    #[test]
    fn a_nul_is_refused_with_the_word_that_holds_it() {
        assert_eq!(join(&["a", "b\0c"]), Err(NulInWord { word: "b\0c".to_owned() }));
    }

    #[test]
    fn what_a_shell_would_expand_is_not_split() {
        for line in ["echo $HOME", "a; b", "a | b", "echo \"x\"", "a && b", "'open", "a\\"] {
            assert_eq!(split(line), None, "{line}");
        }
        assert_eq!(split("/sbin/reboot  -f"), Some(vec!["/sbin/reboot".to_owned(), "-f".to_owned()]));
        assert_eq!(split(""), Some(vec![]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_argument_vector_reaches_a_real_shell_unchanged(
            words in prop::collection::vec("[^\0]{0,24}", 0..6)
        ) {
            let mut vector = vec!["printf".to_owned(), "%s\\0".to_owned(), "first".to_owned()];
            vector.extend(words.iter().cloned());
            let line = join(&vector).unwrap();
            let mut expected = b"first\0".to_vec();
            for word in &words {
                expected.extend_from_slice(word.as_bytes());
                expected.push(0);
            }
            prop_assert_eq!(sh_output(&line), expected);
            prop_assert_eq!(split(&line), Some(vector));
        }
    }
}
