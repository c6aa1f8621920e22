//! Command-line arguments: treat a dash in a flag name as an underscore.
//!
//! Flags are declared with underscores, as existing users know them, but people type dashes. So the *name* of every
//! long flag is normalized before the arguments are parsed. Values, positional words (`allow host-key`) and everything
//! after a lone `--` stay as they are. A program that uses this must declare all of its long flags with underscores.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// Turns `--foo-bar` and `--foo-bar=x-y` into `--foo_bar` and `--foo_bar=x-y`.
#[must_use]
pub fn normalize_flag_dashes(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
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

    fn normalized(arguments: &[&str]) -> Vec<String> {
        normalize_flag_dashes(arguments.iter().map(OsString::from))
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
            assert_eq!(normalized(&["program", given]), ["program", expected]);
        }
    }

    #[test]
    fn arguments_after_a_double_dash_are_unchanged() {
        assert_eq!(normalized(&["p", "--a-b", "--", "--c-d", "--"]), ["p", "--a_b", "--", "--c-d", "--"]);
    }

    #[test]
    fn non_utf8_arguments_are_unchanged() {
        let odd = OsString::from_vec(b"--key-path=\xff-\xfe".to_vec());
        let expected = OsString::from_vec(b"--key_path=\xff-\xfe".to_vec());
        assert_eq!(normalize_flag_dashes([odd]), [expected]);
    }
}
