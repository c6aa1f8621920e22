//! Flags as they are typed: a dash works wherever an underscore does.
//!
//! Flags are declared with underscores, as existing users know them. Hands write
//! dashes. So before the arguments are parsed, the *name* of every long flag is
//! brought to the one form; values, positional words (`allow host-key`) and
//! whatever follows a lone `--` stay as they are. A program that uses this must
//! declare all of its long flags with underscores.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// Turns `--foo-bar` and `--foo-bar=x-y` into `--foo_bar` and `--foo_bar=x-y`.
#[must_use]
pub fn accept_dashes(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut flags_are_over = false;
    arguments
        .into_iter()
        .map(|argument| {
            flags_are_over |= argument == "--";
            if flags_are_over { argument } else { with_underscores(argument) }
        })
        .collect()
}

fn with_underscores(argument: OsString) -> OsString {
    let Some(flag) = argument.as_bytes().strip_prefix(b"--") else { return argument };
    let end = flag.iter().position(|&byte| byte == b'=').unwrap_or(flag.len());
    if !flag[..end].contains(&b'-') {
        return argument;
    }
    let mut bytes = b"--".to_vec();
    bytes.extend(flag[..end].iter().map(|&byte| if byte == b'-' { b'_' } else { byte }));
    bytes.extend_from_slice(&flag[end..]);
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(arguments: &[&str]) -> Vec<String> {
        accept_dashes(arguments.iter().map(OsString::from))
            .into_iter()
            .map(|argument| argument.into_string().unwrap())
            .collect()
    }

    #[test]
    fn names_of_long_flags_get_underscores_and_nothing_else_does() {
        for (given, expected) in [
            ("--bmdb-url", "--bmdb_url"),
            ("--bmdb_url", "--bmdb_url"),
            ("--bmdb-url=postgres://my-host/b-c", "--bmdb_url=postgres://my-host/b-c"),
            ("--reason=--not-a-flag", "--reason=--not-a-flag"),
            ("--limit", "--limit"),
            ("-o", "-o"),
            ("-", "-"),
            ("host-key", "host-key"),
            ("rack-a/sim-0007", "rack-a/sim-0007"),
            ("", ""),
        ] {
            assert_eq!(accepted(&["program", given]), ["program", expected]);
        }
    }

    #[test]
    fn what_follows_a_lone_pair_of_dashes_is_not_touched() {
        assert_eq!(accepted(&["p", "--a-b", "--", "--c-d", "--"]), ["p", "--a_b", "--", "--c-d", "--"]);
    }

    #[test]
    fn bytes_that_are_no_text_pass_through() {
        let odd = OsString::from_vec(b"--key-path=\xff-\xfe".to_vec());
        let expected = OsString::from_vec(b"--key_path=\xff-\xfe".to_vec());
        assert_eq!(accept_dashes([odd]), [expected]);
    }
}
