//! Reads our own source code: code apart from comments and strings.
//!
//! This is a small lexer and no parser. Its questions ("which modules does this file name", "does a string contain
//! SQL") need no more, and a syntax tree would be one more dependency.

use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::Context as _;

/// The text of one file, split into code and strings.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The code, with every comment and string blanked; lines keep their numbers.
    pub code: String,
    /// Every string literal with the number of the line on which it begins.
    pub strings: Vec<(usize, String)>,
}

/// The root of the checkout.
#[must_use]
pub fn root() -> &'static Path {
    // This crate is `crates/testkit`.
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("/"))
}

/// Every file below a folder of the checkout with this extension, sorted, as paths from the root.
pub fn files(folder: &str, extension: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path.strip_prefix(root())?.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Every Rust file of the programs: those of the root package's `src` and of each crate, without integration tests and
/// this kit.
pub fn rust_files() -> anyhow::Result<Vec<PathBuf>> {
    let mut crates = files("crates", "rs")?;
    crates.retain(|path| {
        // `crates/NAME/FOLDER/…`
        let part = |number: usize| path.components().nth(number).map(Component::as_os_str);
        part(1) != Some(OsStr::new("testkit")) && part(2) != Some(OsStr::new("tests"))
    });
    Ok([crates, files("src", "rs")?].concat())
}

/// The text of a file of the checkout.
pub fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(root().join(path)).with_context(|| path.display().to_string())
}

/// Splits Rust text into code, comments and literals.
#[must_use]
pub fn take_apart(text: &str) -> Source {
    let characters: Vec<char> = text.chars().collect();
    let mut source = Source::default();
    let (mut at, mut line) = (0, 1);
    while at < characters.len() {
        let rest = &characters[at..];
        let (length, literal) = match rest {
            ['/', '/', ..] => (rest.iter().position(|&c| c == '\n').unwrap_or(rest.len()), None),
            ['/', '*', ..] => (block_comment(rest), None),
            ['"', ..] => string(rest),
            ['r', '"' | '#', ..] if !after_word(&characters, at) => raw_string(rest),
            ['\'', '\\', _, tail @ ..] => {
                (3 + tail.iter().position(|&c| c == '\'').map_or(0, |end| end + 1), None)
            }
            ['\'', _, '\'', ..] => (3, None),
            _ => (0, None),
        };
        if length == 0 {
            source.code.push(rest[0]);
            line += usize::from(rest[0] == '\n');
            at += 1;
            continue;
        }
        if let Some(literal) = literal {
            source.strings.push((line, literal));
            source.code.push('"');
        }
        let newlines = rest[..length].iter().filter(|&&c| c == '\n').count();
        source.code.extend(std::iter::repeat_n('\n', newlines));
        source.code.push(' ');
        line += newlines;
        at += length;
    }
    source
}

fn after_word(characters: &[char], at: usize) -> bool {
    at > 0 && (characters[at - 1].is_alphanumeric() || characters[at - 1] == '_')
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn string(rest: &[char]) -> (usize, Option<String>) {
    let mut at = 1;
    while at < rest.len() && rest[at] != '"' {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    let end = at.min(rest.len());
    ((end + 1).min(rest.len()), Some(rest[1..end].iter().collect()))
}

/// `r"…"` and `r#"…"#`; a raw identifier (`r#type`) is no string.
fn raw_string(rest: &[char]) -> (usize, Option<String>) {
    let hashes = rest[1..].iter().take_while(|&&c| c == '#').count();
    let begin = hashes + 2;
    if rest.get(hashes + 1) != Some(&'"') {
        return (0, None);
    }
    let closes = |at: &usize| {
        rest[*at] == '"' && rest[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes
    };
    let end = (begin..rest.len()).find(closes).unwrap_or(rest.len());
    ((end + 1 + hashes).min(rest.len()), Some(rest[begin..end].iter().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_no_code_and_lines_keep_their_numbers() {
        let text = "// crate::a\nuse crate::b; /* crate::c /* \n */ */ let x = \"crate::d \\\" e\n\";\nlet y = r#\"f \"g\" h\"#; let z: &'static str = '\"'; r#type";
        let source = take_apart(text);
        assert!(source.code.contains("use crate::b;"), "{}", source.code);
        for hidden in ["crate::a", "crate::c", "crate::d", "f ", "\"g"] {
            assert!(!source.code.contains(hidden), "{hidden} in {}", source.code);
        }
        assert!(source.code.contains("&'static str") && source.code.ends_with("r#type"), "{}", source.code);
        assert_eq!(source.code.matches('\n').count(), text.matches('\n').count());
        assert_eq!(source.strings, [(3, "crate::d \\\" e\n".to_owned()), (5, "f \"g\" h".to_owned())]);
    }
}
