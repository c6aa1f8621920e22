//! The SQL statements of the tree: each file below `sql`, and each text that a checked macro of sqlx has in Rust code.

use std::path::Path;

use crate::source::{self, Source};

/// One SQL statement, and its place.
#[derive(Clone, Debug)]
pub struct Statement {
    /// Its file; in Rust, also the line.
    pub place: String,
    /// The text that is sent.
    pub text: String,
}

impl Statement {
    /// Its words, without comments and layout.
    #[must_use]
    pub fn words(&self) -> String {
        let lines = self.text.lines().map(|line| line.split("--").next().unwrap_or_default());
        lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    }
}

/// The statement of each file with the extension `sql` in a folder.
pub fn in_files(folder: &str) -> anyhow::Result<Vec<Statement>> {
    let files = source::files(folder, "sql")?.into_iter();
    files
        .map(|path| Ok(Statement { place: path.display().to_string(), text: source::read(&path)? }))
        .collect()
}

/// Every statement that a program sends.
pub fn all() -> anyhow::Result<Vec<Statement>> {
    let mut found = in_files("sql")?;
    for path in source::rust_files()? {
        found.extend(in_code(&path, &source::take_apart(&source::read(&path)?)));
    }
    Ok(found)
}

/// The statements of a file of Rust.
#[must_use]
pub fn in_code(path: &Path, source: &Source) -> Vec<Statement> {
    let texts = checked_texts(source).into_iter();
    texts
        .map(|(line, text)| Statement { place: format!("{}:{line}", path.display()), text: text.to_owned() })
        .collect()
}

/// The statements of `sqlx::query!`, `query_as!` and `query_scalar!`, each with its line.
#[must_use]
pub fn checked_texts(source: &Source) -> Vec<(usize, &str)> {
    // For each string, the code has one quotation mark.
    let strings = source.strings.iter().zip(source.code.split('"'));
    strings
        .filter(|(_, before)| opens_checked_macro(before))
        .map(|((line, text), _)| (*line, text.as_str()))
        .collect()
}

/// Whether the next argument after this code is the statement of a checked macro.
fn opens_checked_macro(before: &str) -> bool {
    let Some((_, call)) = before.rsplit_once("sqlx::query") else { return false };
    match call.split_once("!(") {
        Some(("" | "_scalar", rest)) => rest.trim().is_empty(),
        Some(("_as", row)) => row.trim_end().ends_with(',') && !row.contains([')', ';']),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_of_checked_macros_are_found_and_other_strings_are_none() {
        let text = r##"
            let rows = sqlx::query!("DELETE FROM a", "not this");
            sqlx::query_scalar!(
                r#"SELECT count(*) AS "n!" -- of b
                   FROM b"#,
                c
            );
            sqlx::query_as!(Row::<'_>, "SELECT * FROM c", c).fetch_all("d");
            sqlx::query_file!("../../sql/a/b.sql"); sqlx::query_file_as!(Row, "../../sql/a/c.sql");
            sqlx::query("SELECT 1"); sqlx::query_as!(f("g"), "h"); // sqlx::query!("SELECT 2")
        "##;
        let found = in_code(Path::new("a.rs"), &source::take_apart(text));
        let found: Vec<_> = found.iter().map(|found| (found.place.as_str(), found.words())).collect();
        assert_eq!(
            found,
            [
                ("a.rs:2", "DELETE FROM a".to_owned()),
                ("a.rs:4", r#"SELECT count(*) AS "n!" FROM b"#.to_owned()),
                ("a.rs:8", "SELECT * FROM c".to_owned()),
            ]
        );
    }
}
