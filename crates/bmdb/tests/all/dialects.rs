//! Each dialect proves itself: the engine does everything it does, and the server's own record of what it was sent
//! shows which words were used.

use anyhow::Context as _;
use model::process::Process;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::dialect::Dialect;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use shepherd_bmdb::engine::claim::Claimed;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _};

use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, SOON, Shepherd, hold, until};
use testkit::dialect;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dialect_of_this_run_is_what_the_server_was_sent() -> TestResult {
    let kit = Kit::new("dialect_proof").await?;
    let machines = kit.provided(4, "rack").await?;
    let isolation: String =
        sqlx::query_scalar("SHOW default_transaction_isolation").fetch_one(kit.bmdb.pool()).await?;
    assert_eq!(isolation, dialect::isolation(kit.database.dialect()));

    // Every statement that has two forms, run through the engine as a loop runs it.
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let mut sessions = Vec::new();
    for _ in 0..4 {
        sessions.push(shepherd.session().await?);
    }
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    claimer.probe().await?;
    claimer.rearm_timers().await?;
    let claimed = claimer.claim(&sessions).await?;
    let Claimed::Work(work) = claimed else { panic!("{claimed:?}") };
    for (number, item) in work.into_iter().enumerate() {
        match number {
            0 => item.finish(Vec::new(), "done").await?,
            1 => item.fail(Vec::new(), "no route", None).await?,
            _ => item.cancel("not now").await?,
        }
    }
    kit.change(machines[0], vec![hold("disk swap")]).await?;
    kit.change(machines[0], vec![shepherd_bmdb::engine::fact_change::FactChange::HoldCleared]).await?;
    until("the sessions are renewed", async || {
        Ok(kit
            .count("SELECT count(*) FROM session WHERE deadline > started_at + INTERVAL '20.5 seconds'")
            .await?
            == 4)
    })
    .await?;
    kit.overdue(&sessions[0]).await?;
    kit.bmdb.reap().await?;
    kit.sweep().await?;

    let options: PgConnectOptions = kit.database.server_url().parse()?;
    let mut server = options.connect().await?;
    let name = kit.database.url().parse::<PgConnectOptions>()?;
    let sent = |word: &'static str| {
        sqlx::query_as::<_, (i64, Option<String>)>(
            "SELECT coalesce(sum(calls), 0)::INT8, min(query) FROM pg_stat_statements s
             JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = $1 AND query !~ 'pg_stat_statements'
               AND regexp_replace(query, '--[^\n]*', '', 'g') ~* $2",
        )
        .bind(name.get_database().map(str::to_owned))
        .bind(word)
    };
    for (word, expected) in [
        (r"skip\s+locked", true),
        (r"\m(pg_notify|notify|listen)\M", dialect::may_notify(kit.database.dialect())),
    ] {
        let (calls, example) = sent(word).fetch_one(&mut server).await?;
        assert_eq!(calls > 0, expected, "{word}: {calls} times, such as {example:?}");
    }
    // Without a recorded call the check above proves nothing.
    let (calls, _) = sent(r"for\s+key\s+share").fetch_one(&mut server).await?;
    assert!(calls > 0, "the server recorded nothing of this database");
    Ok(shepherd.stop().await?)
}

/// A pooler that drops connection options, or a server that replaces the level by another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_that_runs_at_another_isolation_level_is_refused() -> TestResult {
    let kit = Kit::new("isolation").await?;
    let proxy = Proxy::start(&kit.database).await?;
    // A placeholder of the same length: the server takes it and changes nothing by it.
    proxy.rewrite("default_transaction_isolation", "default.transaction.isolation");
    let options = kit.database.server_url().parse::<PgConnectOptions>()?;
    let mut server = options.connect().await?;
    let name = kit.database.url().parse::<PgConnectOptions>()?.get_database().map(str::to_owned);
    let name = name.context("the address names a database")?;
    let set = format!("ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'");
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut server).await?;
    for dialect in [Dialect::Postgres, Dialect::Cockroachdb] {
        let mut settings = ConnectionSettings::from_url(proxy.url(), "behind a pooler")?;
        settings.dialect = dialect;
        let refused =
            Bmdb::connect(settings).await.expect_err("the isolation level is another one").to_string();
        let sentence = format!(
            "runs transactions at REPEATABLE READ, and the dialect {} needs {}: a pooler in between drops connection \
             options (connect to the server itself), or the server is of another kind (see SHEPHERD_BMDB_DIALECT)",
            dialect.as_str(),
            dialect::isolation(dialect).to_uppercase()
        );
        assert!(refused.ends_with(&sentence), "{refused}");
    }
    Ok(())
}

/// A balancer or a pooler may lead each connection to another server than the first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_connection_at_another_isolation_level_is_refused() -> TestResult {
    let kit = Kit::new("later_isolation").await?;
    let mut server = kit.database.server_url().parse::<PgConnectOptions>()?.connect().await?;
    let name = kit.database.url().parse::<PgConnectOptions>()?.get_database().map(str::to_owned);
    let name = name.context("the address names a database")?;
    let set = format!("ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'");
    sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut server).await?;
    for (dialect, part) in [
        // A setting that cannot be set is found before its effect.
        (Dialect::Postgres, "default_transaction_isolation is "),
        (Dialect::Cockroachdb, "the server runs transactions at REPEATABLE READ"),
    ] {
        let proxy = Proxy::start(&kit.database).await?;
        let mut settings = ConnectionSettings::from_url(proxy.url(), "behind a balancer")?;
        settings.dialect = dialect;
        let bmdb = Bmdb::connect(settings).await?;
        proxy.rewrite("default_transaction_isolation", "default.transaction.isolation");
        let refused = bmdb.schema_version().await.expect_err("the pool has no connection yet").to_string();
        assert!(refused.contains(part), "of the pool: {refused}");
        bmdb.close().await;
    }
    Ok(())
}
