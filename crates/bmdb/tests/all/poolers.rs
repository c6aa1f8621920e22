//! Connections through a pooler that drops options, or that gives a session to several connections.
//!
//! Settings are verified one by one and poolers are looked for in the dialect of PostgreSQL alone, so these tests use it in
//! each run.

use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::dialect::Dialect;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::postgres::TestDatabase;

/// A pooler that ignores connection options takes no limit away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_a_pooler_drops_are_set_by_statements() -> TestResult {
    let database = TestDatabase::create("dropped_settings").await?;
    let proxy = Proxy::start(&database).await?;
    // A placeholder of the same length: the server takes it and changes nothing by it.
    proxy.rewrite_options("lock_timeout", "lock.timeout");
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind a pooler")?;
    settings.dialect = Dialect::Postgres;
    let bmdb = Bmdb::connect(settings.clone()).await?;
    let in_force: String = sqlx::query_scalar("SHOW lock_timeout").fetch_one(bmdb.pool()).await?;
    assert_eq!(in_force, "5s");
    bmdb.refuse_poolers().await?;
    bmdb.close().await;

    proxy.rewrite("lock_timeout", "lock.timeout");
    let refused = Bmdb::connect(settings).await.expect_err("the limit cannot be set").to_string();
    assert!(
        refused.contains("runs with lock_timeout = ") && refused.contains("a pooler in between"),
        "{refused}"
    );
    Ok(())
}

/// A pooler of transactions serves two connections by one process of the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_of_transactions_is_refused_by_name() -> TestResult {
    let database = TestDatabase::create("pooled_transactions").await?;
    let proxy = Proxy::start(&database).await?;
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind a pooler")?;
    settings.dialect = Dialect::Postgres;
    let bmdb = Bmdb::connect(settings).await?;
    bmdb.refuse_poolers().await?;
    proxy.rewrite("pg_backend_pid()", "abs(00000000007)");
    let refused = bmdb.refuse_poolers().await.expect_err("both connections have one process");
    assert!(matches!(refused, BmdbError::TransactionPooling { .. }), "{refused}");
    assert!(refused.to_string().contains("set pool_mode = session (PgBouncer)"), "{refused}");
    // PostgreSQL answers this only when it is rewritten, and knows no `PGPOOL SHOW`.
    proxy.rewrite("SHOW pool_version", "SELECT 'x'::text ");
    let refused = bmdb.refuse_poolers().await.expect_err("it answers as Pgpool-II does");
    assert!(matches!(refused, BmdbError::ReadsSpread { .. }), "{refused}");
    bmdb.close().await;
    Ok(())
}

/// What is prepared or set in a session that others get would stay there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_of_transactions_that_drops_options_is_refused_before_anything_is_set() -> TestResult {
    let database = TestDatabase::create("untouched_sessions").await?;
    let proxy = Proxy::start(&database).await?;
    proxy.rewrite_options("lock_timeout", "lock.timeout");
    proxy.rewrite("pg_backend_pid()", "abs(00000000007)");
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind a pooler")?;
    settings.dialect = Dialect::Postgres;
    let refused = Bmdb::connect(settings).await.expect_err("both connections have one process");
    assert!(matches!(refused, BmdbError::TransactionPooling { .. }), "{refused}");
    let mut server = database.server_url().parse::<PgConnectOptions>()?.connect().await?;
    let name = database.url().parse::<PgConnectOptions>()?.get_database().map(str::to_owned);
    let sent = "SELECT count(*) FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
                WHERE d.datname = $1 AND query ~ $2";
    for (word, expected) in [("pg_settings", true), ("set_config", false)] {
        let count: i64 = sqlx::query_scalar(sent).bind(&name).bind(word).fetch_one(&mut server).await?;
        assert_eq!(count > 0, expected, "{word} was sent {count} times");
    }
    Ok(server.close().await?)
}
