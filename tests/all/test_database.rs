//! The foundations of tests with a database: the run's dialect is the stated one, the test clock moves, databases are
//! separate, and every test is in a list.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, thread};

use anyhow::Context as _;
use chrono::{DateTime, Utc};
use shepherd::bmdb::connection::dialect::Dialect;
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

use crate::harness::aloud::TestResult;
use crate::harness::dialect::{self, Listed, entries, full_name, listed};
use crate::harness::postgres::TestDatabase;
use crate::harness::source;

#[tokio::test]
async fn address_carries_the_dialect_and_the_clock() -> TestResult {
    let database = TestDatabase::create("the_dialect").await?;
    let options: PgConnectOptions = database.url().parse()?;
    let mut connection = options.connect().await?;
    let bmdb = database.bmdb().await?;
    for (setting, expected) in [
        ("SHOW default_transaction_isolation", dialect::isolation(database.dialect())),
        ("SHOW search_path", "public, shim, pg_catalog"),
    ] {
        let value: String = sqlx::query_scalar(setting).fetch_one(&mut connection).await?;
        assert_eq!(value.replace(',', ", ").replace("  ", " "), expected);
        let value: String = sqlx::query_scalar(setting).fetch_one(bmdb.pool()).await?;
        assert_eq!(value, expected);
    }
    Ok(())
}

#[tokio::test]
async fn the_clock_moves_for_one_database_and_not_for_another() -> TestResult {
    let (moved, still) = (TestDatabase::create("moved").await?, TestDatabase::create("still").await?);
    let (moved_pool, still_pool) = (moved.pool().await?, still.pool().await?);
    moved.advance(Duration::from_hours(1)).await?;
    moved.advance(Duration::from_mins(30)).await?;
    for function in ["now()", "clock_timestamp()"] {
        let text = match function {
            "now()" => "SELECT now() - pg_catalog.now() > '89 min', now() - pg_catalog.now() < '91 min'",
            _ => {
                "SELECT clock_timestamp() - pg_catalog.now() > '89 min', clock_timestamp() - pg_catalog.now() < '91 min'"
            }
        };
        let in_moved: (bool, bool) = sqlx::query_as(text).fetch_one(&moved_pool).await?;
        assert_eq!(in_moved, (true, true), "{function}");
        let in_still: (bool, bool) = sqlx::query_as(text).fetch_one(&still_pool).await?;
        assert_eq!(in_still, (false, true), "{function}");
    }
    Ok(())
}

#[tokio::test]
async fn the_clock_is_read_once_for_an_index_scan() -> TestResult {
    let database = TestDatabase::create("index_scan").await?;
    let pool = database.pool().await?;
    sqlx::raw_sql(
        "CREATE TABLE public.due (at timestamptz NOT NULL DEFAULT now());
         INSERT INTO public.due SELECT pg_catalog.now() + n * interval '1 min' FROM generate_series(1, 10000) n;
         CREATE INDEX ON public.due (at);
         ANALYZE public.due",
    )
    .execute(&pool)
    .await?;
    let plan: Vec<String> =
        sqlx::query_scalar("EXPLAIN SELECT at FROM due WHERE at <= now()").fetch_all(&pool).await?;
    assert!(plan.iter().any(|line| line.contains("Index Cond: (at <= now())")), "{plan:#?}");
    Ok(())
}

#[tokio::test]
async fn what_the_migrations_bind_for_good_follows_the_clock() -> TestResult {
    let database = TestDatabase::create("defaults").await?;
    let pool = database.pool().await?;
    // With this search path, the test clock's functions are printed without a schema, and PostgreSQL's own are not.
    let bound_to_the_server = || {
        sqlx::query_scalar(
            "WITH texts AS (
                 SELECT d.adrelid::regclass::text AS name, pg_get_expr(d.adbin, d.adrelid) AS body FROM pg_attrdef d
                 UNION ALL
                 SELECT c.oid::regclass::text, pg_get_viewdef(c.oid) FROM pg_class c
                 WHERE c.relkind = 'v' AND c.relnamespace = 'public'::regnamespace)
             SELECT name FROM texts
             WHERE body ~ 'pg_catalog\\.(now|clock_timestamp)|CURRENT_TIMESTAMP|transaction_timestamp'",
        )
        .fetch_all(&pool)
    };
    let unbound: Vec<String> = bound_to_the_server().await?;
    assert_eq!(unbound, Vec::<String>::new(), "these would not follow the test clock");

    sqlx::raw_sql("CREATE TABLE public.planted (at timestamptz DEFAULT pg_catalog.now())")
        .execute(&pool)
        .await?;
    let unbound: Vec<String> = bound_to_the_server().await?;
    assert_eq!(unbound, ["planted"]);
    Ok(())
}

#[tokio::test]
async fn moving_the_clock_makes_no_serializable_transaction_fail() -> TestResult {
    let database = TestDatabase::create("no_conflict").await?;
    let pool = database.pool().await?;
    let mut transaction = pool.begin().await?;
    sqlx::query("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE").execute(&mut *transaction).await?;
    let before: DateTime<Utc> = sqlx::query_scalar("SELECT now()").fetch_one(&mut *transaction).await?;
    database.advance(Duration::from_secs(5)).await?;
    let after: DateTime<Utc> = sqlx::query_scalar("SELECT now()").fetch_one(&mut *transaction).await?;
    transaction.commit().await?;
    assert_eq!((after - before).num_seconds(), 5);
    Ok(())
}

#[test]
fn unknown_dialect_is_refused_by_name() {
    let refused = dialect::parse("skip-locked").unwrap_err().to_string();
    assert_eq!(refused, "\"skip-locked\" is no dialect; give postgres or cockroachdb");
    assert_eq!(dialect::parse("postgres").unwrap(), Dialect::Postgres);
    assert_eq!(dialect::parse("cockroachdb").unwrap(), Dialect::Cockroachdb);
}

#[tokio::test]
async fn dialect_is_proved_by_the_statements_that_were_sent() -> TestResult {
    let database = TestDatabase::create("proof").await?;
    let dialect = database.dialect();
    let pool = database.pool().await?;
    sqlx::raw_sql("CREATE TABLE public.one (x int)").execute(&pool).await?;
    sqlx::query("SELECT x FROM one -- listen, notify").execute(&pool).await?;
    sqlx::query("NOTIFY somebody").execute(&pool).await?;
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || drop(database)));
    assert_eq!(dropped.is_ok(), dialect::may_notify(dialect));
    if let Err(panic) = dropped {
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("NOTIFY somebody") && !text.contains("listen, notify"), "{text}");
    }
    Ok(())
}

#[tokio::test]
async fn the_server_counts_statements() -> TestResult {
    let database = TestDatabase::create("statements").await?;
    let pool = database.pool().await?;
    sqlx::query("SELECT 'once' AS only_in_this_test").execute(&pool).await?;
    let options: PgConnectOptions = database.server_url().parse()?;
    let mut connection = options.connect().await?;
    let calls: i64 = sqlx::query_scalar(
        "SELECT calls FROM pg_stat_statements WHERE query = 'SELECT $1 AS only_in_this_test'",
    )
    .fetch_one(&mut connection)
    .await?;
    assert_eq!(calls, 1);
    Ok(())
}

/// All tests of a module of a test program, by their names in that program.
fn tests_of(path: &Path, module: &str, found: &mut Vec<String>) -> anyhow::Result<()> {
    let mut source = fs::read_to_string(path.with_extension("rs")).unwrap_or_default();
    for entry in fs::read_dir(path).into_iter().flatten() {
        let path = entry?.path();
        let stem = path.file_stem().context("no name")?.to_string_lossy().into_owned();
        if stem == "mod" {
            source += &fs::read_to_string(path)?;
        } else if path.is_dir() || path.extension().is_some_and(|end| end == "rs") {
            tests_of(&path.with_extension(""), &format!("{module}::{stem}"), found)?;
        }
    }
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let attribute = line.trim_start();
        if attribute.starts_with("#[test") || attribute.starts_with("#[tokio::test") {
            let function = lines.find_map(|line| line.split_once("fn ")).context("no function")?.1;
            let name = function.split(['(', '<']).next().context("no name")?;
            // Indented tests are in the file's own module of tests.
            let inner = if line.starts_with('#') { "" } else { "tests::" };
            let name = format!("{module}::{inner}{name}");
            if !found.contains(&name) {
                found.push(name);
            }
        }
    }
    Ok(())
}

/// The packages with integration tests, each with the folder that has them.
fn programs() -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut programs = vec![("shepherd".to_owned(), source::root().join("tests/all"))];
    for entry in fs::read_dir(source::root().join("crates"))? {
        let folder = entry?.path();
        let tests = folder.join("tests/all");
        if tests.is_dir() {
            let name = folder.file_name().context("no name")?.to_string_lossy();
            programs.push((format!("shepherd-{name}"), tests));
        }
    }
    Ok(programs)
}

#[test]
fn every_test_is_in_one_list() -> TestResult {
    let mut tests = Vec::new();
    for (package, folder) in programs()? {
        let main = fs::read_to_string(folder.join("main.rs"))?;
        let modules = main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        let mut found = Vec::new();
        for module in modules {
            tests_of(&folder.join(module), module, &mut found)?;
        }
        assert!(!found.is_empty(), "{package} has no tests in {}", folder.display());
        tests.extend(found.iter().map(|test| full_name(&package, test)));
    }
    assert!(tests.len() > 500, "the tests are not found: {}", tests.len());
    assert!(tests.iter().any(|test| test.starts_with("supervisor/tree::")), "those of crates are not found");
    let unlisted: Vec<&String> = tests.iter().filter(|test| listed(test).is_none()).collect();
    assert!(
        unlisted.is_empty(),
        "add these tests to tests/all/same_in_both_dialects.txt or tests/all/can_differ_by_dialect.txt, with the \
         reason, or their module to tests/all/without_database.txt: {unlisted:#?}"
    );
    let entries = entries();
    for (entry, list) in &entries {
        assert_eq!(entries.iter().filter(|(other, _)| other == entry).count(), 1, "{entry} is listed twice");
        assert!(tests.iter().any(|test| dialect::names(entry, test)), "{entry} in {list:?} names no test");
        let is_module = entry.ends_with("::") || entry.ends_with('/');
        assert!(
            *list != Listed::WithoutDatabase || is_module,
            "{entry}: only whole modules run without a database"
        );
    }
    Ok(())
}

#[test]
fn modules_without_a_database_name_nothing_that_gives_one() {
    for (entry, list) in entries() {
        if list != Listed::WithoutDatabase || entry == "harness::" {
            continue;
        }
        // Without its feature `postgres`, the kit has no database.
        if let Some(name) = entry.strip_suffix('/') {
            let manifest = source::read(&Path::new("crates").join(name).join("Cargo.toml")).unwrap();
            assert!(!manifest.contains("\"postgres\""), "the tests of {name} can use a database");
            continue;
        }
        let (folder, module) = match entry.split_once('/') {
            Some((name, module)) => (format!("crates/{name}/tests/all"), module),
            None => ("tests/all".to_owned(), entry),
        };
        let all = source::root().join(folder);
        let module = module.trim_end_matches("::");
        let mut files = vec![all.join(module).with_extension("rs")];
        files.retain(|file| file.exists());
        files.extend(files_below(&all.join(module)).unwrap());
        assert!(!files.is_empty(), "{module} has no source");
        for file in files {
            let path =
                file.strip_prefix(&all).unwrap().with_extension("").display().to_string().replace('/', "::");
            // A list for databases may have a part of the module.
            if listed(&format!("{path}::")) != Some(Listed::WithoutDatabase) {
                continue;
            }
            let source = fs::read_to_string(&file).unwrap();
            for name in DATABASE_NAMES {
                // The checker reads databases that other tests give it; its own tests have none.
                let is_given = module == "checker" && *name == "sqlx::";
                // The rules on Rust code that sends statements are about these names.
                let is_about = module == "architecture" && path == "architecture::statements";
                assert!(!source.contains(name) || is_given || is_about, "{path} names {name}");
            }
        }
    }
}

/// What gives a test a database, or a connection to one.
const DATABASE_NAMES: &[&str] = &[
    "PrivatePostgres",
    "bmdb_kit",
    "harness::dialect",
    "harness::fleet",
    "harness::postgres",
    "harness::rack",
    "sqlx::",
    "testkit::dialect",
    "testkit::postgres",
];

/// The files of Rust below a folder; none if it does not exist.
fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.is_dir() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files_below(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// In any form of its source, a test that requests a database fails unless a list for databases has it.
#[test]
fn database_is_refused_to_a_test_that_no_list_has() {
    let dialect_for = |package: &'static str, test: &str| {
        let thread = thread::Builder::new().name(test.to_owned());
        thread.spawn(move || dialect::of_run_in(Some(package))).unwrap().join().unwrap()
    };
    for (package, test, refusal) in [
        (
            "shepherd",
            "fuzz::asks",
            "fuzz::asks uses the database, and tests/all/without_database.txt has its module",
        ),
        (
            "shepherd-supervisor",
            "tree::asks",
            "supervisor/tree::asks uses the database, and tests/all/without_database.txt has its module",
        ),
        ("shepherd", "planted::asks", "planted::asks uses the database: add it or its module to"),
        // The list has the module of that name in the root package.
        ("shepherd-model", "api::asks", "model/api::asks uses the database: add it or its module to"),
    ] {
        let error = dialect_for(package, test).unwrap_err().to_string();
        assert!(error.starts_with(refusal), "{error}");
    }
    assert!(dialect_for("shepherd", "api::asks").is_ok());
    assert!(dialect_for("shepherd-bmdb", "work::asks").is_ok());
}
