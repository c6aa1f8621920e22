//! The ground itself: the run's mode is what it says, the test clock moves, databases are apart.

use std::path::Path;
use std::time::Duration;
use std::{fs, thread};

use chrono::{DateTime, Utc};
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;

use crate::harness::aloud::TestResult;
use crate::harness::mode::{Mode, without_database};
use crate::harness::postgres::TestDatabase;

#[tokio::test]
async fn the_address_carries_the_mode_and_the_clock() -> TestResult {
    let database = TestDatabase::create("the_mode").await?;
    let options: PgConnectOptions = database.url().parse()?;
    let mut connection = options.connect().await?;
    let bmdb = database.bmdb().await?;
    for (setting, expected) in [
        ("SHOW default_transaction_isolation", database.mode().isolation()),
        ("SHOW search_path", "shim, public, pg_catalog"),
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
    // Seen from this search path, the test clock's functions print bare and PostgreSQL's own do not.
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
fn an_unknown_mode_is_refused_by_name() {
    let said = "fast".parse::<Mode>().unwrap_err().to_string();
    assert_eq!(said, "\"fast\" is no test mode; give skip-locked, waiting or serializable");
    for mode in ["skip-locked", "waiting", "serializable"] {
        assert_eq!(mode.parse::<Mode>().unwrap().has_skip_locked_and_notify(), mode == "skip-locked");
    }
}

#[tokio::test]
async fn a_mode_is_proved_by_the_statements_that_were_sent() -> TestResult {
    let database = TestDatabase::create("proof").await?;
    let mode = database.mode();
    let pool = database.pool().await?;
    sqlx::raw_sql("CREATE TABLE public.one (x int)").execute(&pool).await?;
    sqlx::query("SELECT x FROM one -- skip locked, notify").execute(&pool).await?;
    sqlx::query("SELECT x FROM one FOR UPDATE\n SKIP  LOCKED").execute(&pool).await?;
    sqlx::query("NOTIFY somebody").execute(&pool).await?;
    let dropped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || drop(database)));
    assert_eq!(dropped.is_ok(), mode.has_skip_locked_and_notify());
    if let Err(said) = dropped {
        let said = said.downcast_ref::<String>().unwrap();
        assert!(said.contains("SKIP  LOCKED") && said.contains("NOTIFY somebody"), "{said}");
        assert!(!said.contains("skip locked, notify"), "{said}");
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

#[test]
fn modules_that_run_once_ask_for_no_database() {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all");
    let mains = fs::read_to_string(all.join("main.rs")).unwrap();
    let mut files = vec![all.clone()];
    let mut inner = Vec::new();
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.parent() != Some(&all) && path.extension().is_some_and(|end| end == "rs") {
            inner.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    for module in without_database() {
        assert!(mains.contains(&format!("\nmod {module};\n")), "{module} is no module of the suite");
        // `--skip fuzz::` would leave out the tests of `other::fuzz::`, too.
        assert!(!inner.iter().any(|name| name == module), "another module is called {module}, too");
        let source = fs::read_to_string(all.join(module).with_extension("rs"));
        let source = source.or_else(|_| fs::read_to_string(all.join(module).join("mod.rs"))).unwrap();
        if module != "harness" {
            for kit in ["bmdb_kit", "harness::fleet", "harness::postgres", "harness::rack", "harness::mode"] {
                assert!(!source.contains(kit), "{module} names {kit}");
            }
        }
    }
    // And who asks all the same is refused, whatever its source says.
    let asked = thread::Builder::new().name("fuzz::asks".to_owned()).spawn(Mode::of_this_run).unwrap();
    assert!(asked.join().unwrap().unwrap_err().to_string().starts_with("fuzz uses a database"));
}
