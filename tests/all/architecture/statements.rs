//! SQL: where it may be, how it is sent, which clock it reads, and that each statement has its record.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::harness::aloud::TestResult;
use crate::harness::source::{self, Source};
use crate::harness::statement::{self, Statement};

/// How many lines a statement in code may have.
const LINES: usize = 3;

#[test]
fn every_statement_file_is_used() -> TestResult {
    let mut literals = String::new();
    for path in source::rust_files()? {
        for (_, literal) in source::take_apart(&source::read(&path)?).strings {
            literals.push_str(&literal);
            literals.push('\n');
        }
    }
    let mut files = source::files("sql", "sql")?;
    let unused = unused_files(&files, &literals);
    assert!(unused.is_empty(), "no program sends these; remove them: {unused:#?}");
    files.push("sql/session/planted.sql".into());
    assert_eq!(unused_files(&files, &literals), ["sql/session/planted.sql"]);
    Ok(())
}

/// Statement files that none of these literals names.
fn unused_files(files: &[PathBuf], literals: &str) -> Vec<String> {
    let files = files.iter().map(|path| path.to_string_lossy().into_owned());
    files.filter(|path| !literals.contains(path) && !folder_is_embedded(literals, path)).collect()
}

#[test]
fn sql_is_only_in_bmdb_and_long_statements_are_in_files() -> TestResult {
    let (mut wrong, mut in_code) = (Vec::new(), 0);
    for path in source::rust_files()? {
        let source = source::take_apart(&source::read(&path)?);
        in_code += statement::checked_texts(&source).len();
        wrong.extend(misplaced_sql(&path, &source));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(in_code > 100, "only {in_code} statements were found in the code");
    Ok(())
}

#[test]
fn misplaced_sql_is_found() {
    let bmdb = "crates/bmdb/src/engine/claim.rs";
    for (path, text, expected) in [
        (bmdb, r#"sqlx::query!("DELETE FROM session")"#, None),
        (bmdb, "\nsqlx::query_scalar!(\n\"SELECT a\n FROM b\n WHERE c = $1\", c)", None),
        (bmdb, r#"sqlx::query_as!(Row, r"SELECT a FROM b")"#, None),
        (
            bmdb,
            "\nsqlx::query!(\n\"SELECT a\n FROM b\n WHERE c\n ORDER BY d\")",
            Some("3: it has more than three lines; put it into sql/<subject>/<verb>_<object>.sql"),
        ),
        (
            bmdb,
            r#"sqlx::query!("SELECT a \\n FROM b")"#,
            Some("1: it has a backslash; write it as a raw string, without one"),
        ),
        (
            bmdb,
            r#"const DELETE: &str = "DELETE FROM session";"#,
            Some("1: send it with sqlx::query!, query_as! or query_scalar!, or from a file below sql"),
        ),
        (
            bmdb,
            r#"sqlx::query("SELECT 1")"#,
            Some("1: send it with sqlx::query!, query_as! or query_scalar!, or from a file below sql"),
        ),
        (
            "src/manager/retirer.rs",
            r#"sqlx::query!("DELETE FROM session")"#,
            Some("1: only crates/bmdb may have SQL"),
        ),
        (
            "crates/server/src/api.rs",
            r#"sqlx::query_scalar!("TABLE a")"#,
            Some("1: only crates/bmdb may have SQL"),
        ),
        (
            "crates/cli/src/why.rs",
            r#"const A: &str = "SELECT a FROM b";"#,
            Some("1: only crates/bmdb may have SQL"),
        ),
    ] {
        let expected: Vec<_> = expected.iter().map(|expected| format!("{path}:{expected}")).collect();
        assert_eq!(misplaced_sql(path.as_ref(), &source::take_apart(text)), expected, "{text}");
    }
}

#[test]
fn sql_in_a_string_is_distinguished_from_english() {
    for (text, found) in [
        (r#"sqlx::query!("SELECT 1")"#, true),
        (r#"sqlx::query("SELECT 1")"#, true),
        (r#"sqlx::query_scalar::<_, i64>("SHOW fsync")"#, true),
        (r##"let s = r#"insert into work values ($1)"#;"##, true),
        ("let s = \"\n  WITH due AS (SELECT 1)\";", true),
        (r#"let s = "update machine_due set lease_session = null";"#, true),
        (r#"let s = "UPDATE machine SET x = 1";"#, true),
        (r#"let s = "delete from session";"#, true),
        (r#"let s = "Select the machine to look at";"#, false),
        (r#"let s = "update the agent, then set it free";"#, false),
        (r#"let s = "with deadline";"#, false),
        (r#"query_file!("../../sql/session/open.sql")"#, false),
        (r#"url.query("name")"#, false),
    ] {
        assert_eq!(!lines_with_sql(&source::take_apart(text)).is_empty(), found, "{text}");
    }
}

/// A statement that is sent to the pool directly is not counted, and not given up when no response arrives.
#[test]
fn statements_go_the_counted_and_bounded_way() -> TestResult {
    // A migration may take any time.
    let may = ["crates/bmdb/src/connection/schema.rs"];
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for path in source::rust_files()? {
        let code = source::take_apart(&source::read(&path)?).code;
        for (number, line) in code.lines().enumerate().filter(|(_, line)| line.contains(".pool()")) {
            match may.iter().find(|may| path.ends_with(may)) {
                Some(file) => drop(seen.insert(*file)),
                None => wrong.push(format!("{}:{}: {}", path.display(), number + 1, line.trim())),
            }
        }
    }
    assert!(seen.into_iter().eq(may), "those that may, and no more, are found to");
    assert!(wrong.is_empty(), "use Bmdb::statement or Bmdb::transact:\n{}", wrong.join("\n"));
    Ok(())
}

/// The test clock replaces `now()` and `clock_timestamp()`. Other functions read the server's own clock, so a test of a
/// thirty-minute limit would have to wait for thirty minutes.
#[test]
fn statements_ask_only_the_clock_that_tests_can_move() -> TestResult {
    let mut statements = [statement::all()?, statement::in_files("migrations")?].concat();
    let wrong = other_clocks(&statements);
    assert!(wrong.is_empty(), "write now() or clock_timestamp():\n{}", wrong.join("\n"));
    let planted = "sqlx::query!(\"UPDATE session\n SET deadline = CURRENT_TIMESTAMP -- localtimestamp\")";
    statements.extend(statement::in_code("crates/bmdb/src/a.rs".as_ref(), &source::take_apart(planted)));
    assert_eq!(other_clocks(&statements), ["crates/bmdb/src/a.rs:1: current_timestamp"]);
    Ok(())
}

/// Where these statements read a clock that tests cannot move.
fn other_clocks(statements: &[Statement]) -> Vec<String> {
    let others = [
        "current_timestamp",
        "localtimestamp",
        "transaction_timestamp",
        "statement_timestamp",
        "pg_catalog.now",
    ];
    let mut found = Vec::new();
    for statement in statements {
        let code = statement.words().to_ascii_lowercase();
        let clocks = others.iter().filter(|other| code.contains(*other));
        found.extend(clocks.map(|clock| format!("{}: {clock}", statement.place)));
    }
    found
}

/// `tools/sqlx-check --names` knows the statements of files and those of macros.
#[test]
fn every_statement_has_its_record() -> TestResult {
    let check = |tree: &Path| -> anyhow::Result<(bool, String)> {
        let mut tool = Command::new(source::root().join("tools/sqlx-check"));
        let output = tool.args(["--names", "--tree"]).arg(tree).output()?;
        Ok((output.status.success(), String::from_utf8([output.stdout, output.stderr].concat())?))
    };
    let (passes, printed) = check(source::root())?;
    assert!(passes, "{printed}");
    let tree = tempfile::tempdir()?;
    let write = |path: &str, text: &str| -> anyhow::Result<()> {
        let path = tree.path().join(path);
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(std::fs::write(path, text)?)
    };
    // The digest of `SELECT 1`.
    let recorded = ".sqlx/query-e004ebd5b5532a4b85984a62f8ad48a81aa3460c1ca07701f386135d72cdecf5.json";
    write("sql/a/b.sql", "SELECT 2\n")?;
    write(
        "crates/bmdb/src/lib.rs",
        "fn f() {
    sqlx::query_file!(\"../../sql/a/b.sql\");
    sqlx::query_scalar!(
        \"SELECT 1\",
    );
    sqlx::query_as!(Row, r#\"SELECT 3 AS \"n!\"\"#);
}
",
    )?;
    write(recorded, "{}")?;
    write(".sqlx/query-00.json", "{}")?;
    let (passes, printed) = check(tree.path())?;
    assert!(!passes, "{printed}");
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(
        lines[..3],
        [
            "sql/a/b.sql has no record",
            "crates/bmdb/src/lib.rs:6 has no record",
            ".sqlx/query-00.json is of no statement",
        ],
        "{printed}"
    );
    assert!(lines.len() == 4 && lines[3].contains("make sqlx-data"), "{printed}");
    Ok(())
}

fn folder_is_embedded(sources: &str, path: &str) -> bool {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    sources.lines().any(|literal| literal.trim_start_matches("./") == folder)
}

/// SQL that may not be where it is, with what to do about it.
fn misplaced_sql(path: &Path, source: &Source) -> Vec<String> {
    let may_have_sql = path.starts_with("crates/bmdb/src");
    let checked: BTreeMap<usize, &str> = statement::checked_texts(source).into_iter().collect();
    let lines: BTreeSet<usize> = lines_with_sql(source).into_iter().chain(checked.keys().copied()).collect();
    let mut wrong = Vec::new();
    for line in lines {
        let remedy = match checked.get(&line) {
            _ if !may_have_sql => "only crates/bmdb may have SQL",
            None => "send it with sqlx::query!, query_as! or query_scalar!, or from a file below sql",
            Some(text) if text.lines().count() > LINES => {
                "it has more than three lines; put it into sql/<subject>/<verb>_<object>.sql"
            }
            Some(text) if text.contains('\\') => "it has a backslash; write it as a raw string, without one",
            Some(_) => continue,
        };
        wrong.push(format!("{}:{line}: {remedy}", path.display()));
    }
    wrong
}

fn lines_with_sql(source: &Source) -> Vec<usize> {
    // For each string, the code has one quotation mark.
    let before: Vec<&str> = source.code.split('"').collect();
    let strings = source.strings.iter().zip(before);
    strings
        .filter(|((_, literal), before)| is_sql(literal) || (is_sent(before) && starts_a_statement(literal)))
        .map(|((line, _), _)| *line)
        .collect()
}

/// Whether the code before a string passes it to the database.
fn is_sent(before: &str) -> bool {
    let line = before.trim_end().rsplit(['\n', ';']).next().unwrap_or_default();
    line.ends_with('(')
        && ["query(", "query_as", "query_scalar", "raw_sql(", "query!("]
            .iter()
            .any(|call| line.contains(call))
}

fn starts_a_statement(literal: &str) -> bool {
    const WORDS: &[&str] = &[
        "select", "insert", "update", "delete", "with", "create", "drop", "alter", "listen", "notify", "set",
        "show", "begin", "commit", "lock", "truncate", "explain", "analyze", "vacuum",
    ];
    let word = literal.split_whitespace().next().unwrap_or_default().to_ascii_lowercase();
    WORDS.contains(&word.trim_end_matches(';'))
}

/// Whether a text is a statement by itself, without a look at what the code does with it.
fn is_sql(literal: &str) -> bool {
    let words: Vec<String> = literal.split_whitespace().map(str::to_ascii_lowercase).collect();
    let word = |at: usize| words.get(at).map_or("", String::as_str);
    let objects = ["table", "index", "view", "database", "schema", "function", "role", "extension"];
    match word(0) {
        "insert" => word(1) == "into",
        "delete" => word(1) == "from",
        "update" => word(2) == "set" || word(3) == "set" && word(2).len() == 1,
        "with" => word(2) == "as" && word(3).starts_with(['(', 'm', 'n']),
        "select" => words.iter().any(|word| word == "from") && !literal.contains(" the "),
        "create" | "drop" | "alter" => objects.contains(&word(1)),
        _ => false,
    }
}
