//! Command-line arguments: spell the names of long flags in one way.
//!
//! Flags of several words are accepted with dashes and with underscores. `shepherd` declares its flags with underscores,
//! because they are also keys of its configuration. `shepherdctl` declares its own with dashes, as other tools for
//! operators do. The *name* of every long flag is spelled as the program declares it before the arguments are parsed. So
//! the parser, and a message that repeats the arguments, have one spelling. Values, positional words (`allow host-key`) and
//! everything after a lone `--` stay as they are.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

/// Turns `--foo-bar` and `--foo-bar=x-y` into `--foo_bar` and `--foo_bar=x-y`.
#[must_use]
pub fn spell_flags_with_underscores(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    spell_flags(arguments, b'-', b'_')
}

/// Turns `--foo_bar` and `--foo_bar=x_y` into `--foo-bar` and `--foo-bar=x_y`.
#[must_use]
pub fn spell_flags_with_dashes(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    spell_flags(arguments, b'_', b'-')
}

fn spell_flags(arguments: impl IntoIterator<Item = OsString>, from: u8, to: u8) -> Vec<OsString> {
    let mut flags_are_over = false;
    arguments
        .into_iter()
        .map(|argument| {
            flags_are_over |= argument == "--";
            if flags_are_over { argument } else { spell_flag(argument, from, to) }
        })
        .collect()
}

fn spell_flag(argument: OsString, from: u8, to: u8) -> OsString {
    let Some(flag) = argument.as_bytes().strip_prefix(b"--") else { return argument };
    let end = flag.iter().position(|&byte| byte == b'=').unwrap_or(flag.len());
    if !flag[..end].contains(&from) {
        return argument;
    }
    let mut bytes = b"--".to_vec();
    bytes.extend(flag[..end].iter().map(|&byte| if byte == from { to } else { byte }));
    bytes.extend_from_slice(&flag[end..]);
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(spell: fn(Vec<OsString>) -> Vec<OsString>, arguments: &[&str]) -> Vec<String> {
        let arguments = spell(arguments.iter().map(OsString::from).collect());
        arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect()
    }

    #[test]
    fn names_of_long_flags_are_spelled_in_one_way_and_nothing_else_is() {
        for (given, underscores, dashes) in [
            ("--bmdb-url", "--bmdb_url", "--bmdb-url"),
            ("--bmdb_url", "--bmdb_url", "--bmdb-url"),
            ("--no-such_flag", "--no_such_flag", "--no-such-flag"),
            (
                "--bmdb-url=postgres://my-host/b_c",
                "--bmdb_url=postgres://my-host/b_c",
                "--bmdb-url=postgres://my-host/b_c",
            ),
            (
                "--bmdb_url=postgres://my-host/b_c",
                "--bmdb_url=postgres://my-host/b_c",
                "--bmdb-url=postgres://my-host/b_c",
            ),
            ("--reason=--not-a_flag", "--reason=--not-a_flag", "--reason=--not-a_flag"),
            ("--limit", "--limit", "--limit"),
            ("-o", "-o", "-o"),
            ("-", "-", "-"),
            ("host-key", "host-key", "host-key"),
            ("rack_a/sim-0007", "rack_a/sim-0007", "rack_a/sim-0007"),
            ("", "", ""),
        ] {
            assert_eq!(spelled(spell_flags_with_underscores, &["program", given]), ["program", underscores]);
            assert_eq!(spelled(spell_flags_with_dashes, &["program", given]), ["program", dashes]);
        }
    }

    #[test]
    fn arguments_after_a_double_dash_are_unchanged() {
        let after = ["--", "--c-d", "--e_f", "--"];
        let given = [&["p", "--a-b", "--g_h"][..], &after].concat();
        let underscores = [&["p", "--a_b", "--g_h"][..], &after].concat();
        assert_eq!(spelled(spell_flags_with_underscores, &given), underscores);
        let dashes = [&["p", "--a-b", "--g-h"][..], &after].concat();
        assert_eq!(spelled(spell_flags_with_dashes, &given), dashes);
    }

    #[test]
    fn non_utf8_arguments_are_unchanged() {
        let dashed = [OsString::from_vec(b"--key-path=\xff-\xfe".to_vec())];
        let underscored = [OsString::from_vec(b"--key_path=\xff-\xfe".to_vec())];
        assert_eq!(spell_flags_with_underscores(dashed.clone()), underscored);
        assert_eq!(spell_flags_with_dashes(underscored), dashed);
    }
}
