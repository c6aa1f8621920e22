//! Connections to servers that are not as they should be. Poolers in between are in `poolers`.
//!
//! Connections are planned, and direct URLs are checked, in the dialect of PostgreSQL alone, so those tests use it in each
//! run.

use std::time::Duration;

use anyhow::Context as _;
use model::process::Process;
use shepherd_bmdb::connection::Bmdb;
use shepherd_bmdb::connection::access::Access;
use shepherd_bmdb::connection::budget::ConnectionsBeside;
use shepherd_bmdb::connection::dialect::Dialect;
use shepherd_bmdb::connection::error::{BmdbError, describe_error};
use shepherd_bmdb::connection::private_postgres::PrivatePostgres;
use shepherd_bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use shepherd_bmdb::connection::settings::ConnectionSettings;
use shepherd_bmdb::engine::session::Session;
use shepherd_bmdb::engine::wakeup::WakeUps;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};
use tokio_util::sync::CancellationToken;

use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{SOON, Shepherd, ended, until};
use testkit::dialect;
use testkit::postgres::TestDatabase;

/// The database of a server of the test's own.
pub(crate) const OWN: &str = "own";
/// The name of the connections that a test counts.
const COUNTED: &str = "counted";

/// A connection of the superuser to the test's database.
async fn admin(database: &TestDatabase) -> anyhow::Result<PgConnection> {
    Ok(database.url().parse::<PgConnectOptions>()?.connect().await?)
}

/// A name of a role that no other test has.
fn role_name() -> String {
    format!("role_{}", uuid::Uuid::new_v4().simple())
}

/// Runs statements of the test itself.
pub(crate) async fn run(connection: &mut PgConnection, statements: String) -> anyhow::Result<()> {
    sqlx::raw_sql(AssertSqlSafe(statements)).execute(connection).await?;
    Ok(())
}

/// A server of the test's own with a migrated database, so that its configuration can change.
pub(crate) async fn own_server() -> anyhow::Result<PrivatePostgres> {
    own_server_in(ServerStorage::Temporary).await
}

/// The same, with its data in this storage.
pub(crate) async fn own_server_in(storage: ServerStorage) -> anyhow::Result<PrivatePostgres> {
    let server = PrivatePostgres::start(PrivatePostgresOptions { storage, max_connections: 60 }).await?;
    server.create_database(OWN).await?;
    let mut settings = ConnectionSettings::from_url(&server.url(OWN), "migrating")?;
    settings.dialect = dialect::of_this_run()?;
    let bmdb = Bmdb::connect(settings).await?;
    bmdb.migrate().await?;
    bmdb.close().await;
    Ok(server)
}

/// How many connections of the shepherd a server has.
async fn counted(server: &mut PgConnection) -> anyhow::Result<i64> {
    Ok(sqlx::query_scalar("SELECT count(*) FROM pg_stat_activity WHERE application_name = $1")
        .bind(COUNTED)
        .fetch_one(server)
        .await?)
}

/// The processes of the server that serve the connections of a role.
async fn backends(server: &mut PgConnection, role: &str) -> anyhow::Result<Vec<i32>> {
    Ok(sqlx::query_scalar("SELECT pid FROM pg_stat_activity WHERE usename = $1")
        .bind(role)
        .fetch_all(server)
        .await?)
}

/// Waits until a role has connections, and none of the old ones.
async fn until_replaced(server: &mut PgConnection, role: &str, old: &[i32]) -> anyhow::Result<()> {
    until("other connections replace the old ones", async || {
        let now = backends(&mut *server, role).await?;
        Ok(!now.is_empty() && now.iter().all(|pid| !old.contains(pid)))
    })
    .await
}

/// Waits until an open session was renewed.
async fn until_renewed(server: &mut PgConnection) -> anyhow::Result<()> {
    until("a session is renewed", async || {
        Ok(sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM session
                            WHERE deadline - started_at > (interval_ms + 1) * INTERVAL '1 millisecond')",
        )
        .fetch_one(&mut *server)
        .await?)
    })
    .await
}

/// Waits until a session starts, which takes a connection to a server that takes writes.
pub(crate) async fn until_session(shepherd: &Shepherd) -> anyhow::Result<Session> {
    let mut started = None;
    until("a session starts on the new primary", async || {
        started = shepherd.session().await.ok();
        Ok(started.is_some())
    })
    .await?;
    started.context("a session")
}

/// Waits until a notification of this server wakes a loop.
pub(crate) async fn until_notified(server: &mut PgConnection, wake_ups: &WakeUps) -> anyhow::Result<()> {
    until("a notification of the new primary arrives", async || {
        sqlx::query("SELECT pg_notify('shepherd_due', $1)")
            .bind(Process::AgentStart.as_str())
            .execute(&mut *server)
            .await?;
        let wakes = async |process: Process, limit: Duration| {
            tokio::time::timeout(limit, wake_ups.wait_for_wake(process)).await.is_ok()
        };
        // A new connection wakes all loops, and a notification one of them.
        let is_woken = wakes(Process::AgentStart, Duration::from_secs(1)).await;
        Ok(is_woken && !wakes(Process::Recovery, Duration::from_millis(1)).await)
    })
    .await
}

/// The old primary refuses writes and ends no connection; new connections reach the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn switch_over_that_cuts_no_connection_moves_all_of_them() -> TestResult {
    let (old, new) = (own_server().await?, own_server().await?);
    let mut old_server = old.url(OWN).parse::<PgConnectOptions>()?.connect().await?;
    let mut new_server = new.url(OWN).parse::<PgConnectOptions>()?.connect().await?;
    let proxy = Proxy::to(&old.url(OWN)).await?;
    let mut settings = ConnectionSettings::from_url(proxy.url(), COUNTED)?;
    let dialect = dialect::of_this_run()?;
    settings.dialect = dialect;
    settings.access = Access::ReadWrite;
    settings.max_connections = 6;
    // One without sessions has a connection for renewals, too.
    let idle = Shepherd::with(settings.clone(), SOON).await?;
    let shepherd = Shepherd::with(settings, SOON).await?;
    let stop = CancellationToken::new();
    let wake_ups = WakeUps::default();
    let listening = tokio::spawn(wake_ups.clone().listen(shepherd.bmdb.clone(), stop.clone()));
    let first = shepherd.session().await?;
    until_renewed(&mut old_server).await?;
    // Without notifications, none waits for them.
    let at_least = if dialect == Dialect::Postgres { 5 } else { 4 };
    assert!(counted(&mut old_server).await? >= at_least, "pools, renewals and wake-ups");

    proxy.redirect(&new.url(OWN))?;
    run(&mut old_server, "ALTER SYSTEM SET default_transaction_read_only = on".to_owned()).await?;
    run(&mut old_server, "SELECT pg_reload_conf()".to_owned()).await?;
    // Reads alone move the connections that nothing writes on.
    until("no connection is left at the reader", async || {
        // It fails while no connection was replaced.
        drop((shepherd.bmdb.schema_version().await, idle.bmdb.schema_version().await));
        Ok(counted(&mut old_server).await? == 0)
    })
    .await?;
    let second = until_session(&shepherd).await?;
    until_renewed(&mut new_server).await?;
    if dialect == Dialect::Postgres {
        until_notified(&mut new_server, &wake_ups).await?;
    }
    drop((first, second));
    stop.cancel();
    ended("listening", listening).await?;
    shepherd.stop().await?;
    idle.stop().await?;
    old_server.close().await?;
    new_server.close().await?;
    old.stop().await?;
    Ok(new.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_is_refused_by_a_sentence_where_writes_are_needed() -> TestResult {
    let database = TestDatabase::create("reader").await?;
    let mut server = admin(&database).await?;
    let name = database.url().parse::<PgConnectOptions>()?.get_database().map(str::to_owned);
    let name = name.ok_or_else(|| anyhow::anyhow!("the address names a database"))?;
    let mut settings = ConnectionSettings::from_url(database.url(), "reading")?;
    settings.dialect = database.dialect();
    settings.access = Access::ReadWrite;
    let writer = Bmdb::connect(settings.clone()).await?;
    run(&mut server, format!("ALTER DATABASE \"{name}\" SET default_transaction_read_only = on")).await?;
    // Its pool has no connection yet.
    let refused = writer.schema_version().await.expect_err("no connection takes writes");
    assert!(refused.is_transient() && refused.to_string().ends_with("the server is read-only"), "{refused}");
    writer.close().await;
    settings.access = Access::Any;
    let reader = Bmdb::connect(settings.clone()).await?;
    let refused = reader.migrate().await.expect_err("it takes no writes");
    assert!(refused.is_transient(), "{refused}");
    reader.close().await;
    settings.access = Access::ReadWrite;
    let refused = Bmdb::connect(settings).await.expect_err("it takes no writes");
    assert!(matches!(refused, BmdbError::ReadOnly { .. }), "{refused}");
    assert!(refused.to_string().contains("is read-only: the server is a standby"), "{refused}");
    Ok(server.close().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_is_reached_by_its_ipv6_address() -> TestResult {
    let database = TestDatabase::create("ipv6").await?;
    let proxy = Proxy::listen("[::1]:0", database.url()).await?;
    assert!(proxy.url().starts_with("postgres://[::1]:"), "{}", proxy.url());
    let mut settings = ConnectionSettings::from_url(proxy.url(), "by IPv6")?;
    settings.dialect = database.dialect();
    let bmdb = Bmdb::connect(settings).await?;
    bmdb.require_schema().await?;
    bmdb.close().await;
    Ok(())
}

/// A session that is renewed on another server ends on the server where its work is claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn direct_url_to_another_server_is_refused_at_the_start_and_after_reconnecting() -> TestResult {
    let (server, other) = (own_server().await?, own_server().await?);
    let proxy = Proxy::to(&server.url(OWN)).await?;
    let mut settings = ConnectionSettings::from_url(&server.url(OWN), "of the pool")?;
    settings.dialect = Dialect::Postgres;
    settings.direct = Some(Box::new(ConnectionSettings::from_url(proxy.url(), "direct")?));
    let shepherd = Shepherd::with(settings.clone(), Duration::from_secs(5)).await?;
    shepherd.bmdb.check_direct_url().await?;
    let mut admin = server.url(OWN).parse::<PgConnectOptions>()?.connect().await?;
    let session = shepherd.session().await?;
    until_renewed(&mut admin).await?;

    // The start of another shepherd.
    proxy.redirect(&other.url(OWN))?;
    let starting = Bmdb::connect(settings.clone()).await?;
    let refused = starting.check_direct_url().await.expect_err("it is another server");
    assert!(matches!(refused, BmdbError::DifferentServers(_)), "{refused}");
    assert!(refused.to_string().contains("(--bmdb_direct_url) is another server"), "{refused}");
    starting.close().await;
    assert!(!session.lost().is_cancelled(), "an open connection counts: {:?}", session.loss_reason());

    // The other server has no such session, and would end it by its answer.
    proxy.cut();
    proxy.heal();
    ended("the session", tokio::spawn(session.lost().clone().cancelled_owned())).await?;
    assert_eq!(session.loss_reason(), Some("it could not be renewed in time"), "another server was used");

    // Another database of the same server is another one, too.
    server.create_database("second").await?;
    settings.direct = Some(Box::new(ConnectionSettings::from_url(&server.url("second"), "direct")?));
    let starting = Bmdb::connect(settings).await?;
    let refused = starting.check_direct_url().await.expect_err("it is another database");
    assert!(matches!(refused, BmdbError::DifferentServers(_)), "{refused}");
    starting.close().await;

    proxy.redirect(&server.url(OWN))?;
    let session = shepherd.session().await?;
    until("a session is renewed when both lead to the same server", async || {
        Ok(sqlx::query_scalar(
            "SELECT deadline - started_at > (interval_ms + 1) * INTERVAL '1 millisecond'
             FROM session WHERE session_id = $1",
        )
        .bind(session.id().0)
        .fetch_one(&mut admin)
        .await?)
    })
    .await?;
    drop(session);
    shepherd.stop().await?;
    admin.close().await?;
    server.stop().await?;
    Ok(other.stop().await?)
}

/// The servers of tests have no `fsync`. `CockroachDB` has no such setting, so that it is not read there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_loses_answered_commits_is_warned_about() -> TestResult {
    let database = TestDatabase::create("durability").await?;
    for (dialect, start) in
        [(Dialect::Postgres, Some("the BMDB runs with fsync = off: ")), (Dialect::Cockroachdb, None)]
    {
        let mut settings = ConnectionSettings::from_url(database.url(), "durability")?;
        settings.dialect = dialect;
        let bmdb = Bmdb::connect(settings).await?;
        let warning = bmdb.durability_warning().await?;
        assert_eq!(warning.is_some(), start.is_some(), "warned of {warning:?}");
        assert!(warning.as_deref().unwrap_or_default().starts_with(start.unwrap_or_default()), "{warning:?}");
        bmdb.close().await;
    }
    Ok(())
}

/// The connection for renewals exists before a session does, so that no limit refuses it later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_with_few_connections_gets_a_small_pool_and_its_renewals() -> TestResult {
    let database = TestDatabase::create("few_connections").await?;
    let (mut server, role) = (admin(&database).await?, role_name());
    let statements = format!(
        "CREATE ROLE {role} LOGIN CONNECTION LIMIT 5; GRANT pg_read_all_data, pg_write_all_data TO {role}"
    );
    run(&mut server, statements).await?;
    let mut settings = ConnectionSettings::from_url(database.url(), COUNTED)?;
    settings.options = settings.options.username(&role);
    settings.dialect = Dialect::Postgres;
    let wanting = Bmdb::connect(settings.clone()).await?;
    let beside = ConnectionsBeside { wanted: 1, least: 1 };
    // A pooler keeps the connections of a former run, and gives them to this one.
    let open_as = async |name: &str| settings.options.clone().application_name(name).connect().await;
    let (former, other) = (open_as(COUNTED).await?, open_as("another program").await?);
    let budget = wanting.plan_connections(beside).await?;
    assert_eq!(budget.pool, 3, "the other program has one of them: {budget:?}");
    other.close().await?;
    let budget = wanting.plan_connections(beside).await?;
    former.close().await?;
    let shortage = budget.shortage.map(|shortage| shortage.to_string()).unwrap_or_default();
    assert_eq!(budget.pool, 4, "{shortage}");
    assert!(shortage.contains("its role (CONNECTION LIMIT) admits 5"), "{shortage}");
    assert!(shortage.contains("12 are missing"), "{shortage}");
    wanting.close().await;

    settings.max_connections = budget.pool;
    let shepherd = Shepherd::with(settings, SOON).await?;
    // The only connection of the pool until now.
    let mut pool = vec![shepherd.bmdb.pool().acquire().await?];
    let pooled: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *pool[0]).await?;
    until("renewals have their connection", async || {
        let open: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE application_name = $1 AND pid <> $2 AND query LIKE '-- Read what a session is%'",
        )
        .bind(COUNTED)
        .bind(pooled)
        .fetch_one(&mut server)
        .await?;
        Ok(open == 1)
    })
    .await?;
    // All connections of the pool at once.
    while pool.len() < 4 {
        pool.push(shepherd.bmdb.pool().acquire().await?);
    }
    drop(pool);
    let session = shepherd.session().await?;
    until_renewed(&mut server).await?;
    drop(session);
    shepherd.stop().await?;
    run(&mut server, format!("DROP OWNED BY {role}; DROP ROLE {role}")).await?;
    Ok(server.close().await?)
}

/// A server at its limit refuses the successor of an old connection for renewals. The old one renews until there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_connection_renews_until_a_new_one_can_be_opened() -> TestResult {
    let database = TestDatabase::create("full_limit").await?;
    let (mut server, role) = (admin(&database).await?, role_name());
    let statements = format!("CREATE ROLE {role} LOGIN; GRANT pg_read_all_data, pg_write_all_data TO {role}");
    run(&mut server, statements).await?;
    let mut settings = ConnectionSettings::from_url(database.url(), "ageing")?;
    settings.options = settings.options.username(&role);
    settings.dialect = database.dialect();
    settings.connection_lifetime = Duration::from_secs(1);
    let shepherd = Shepherd::with(settings, SOON).await?;

    // Without a session it is replaced, too.
    let mut pooled = shepherd.bmdb.pool().acquire().await?;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *pooled).await?;
    let mut others = Vec::new();
    until("renewals have their connection", async || {
        others = backends(&mut server, &role).await?;
        others.retain(|other| *other != pid);
        Ok(!others.is_empty())
    })
    .await?;
    until_replaced(&mut server, &role, &others).await?;
    drop(pooled);

    let session = shepherd.session().await?;
    run(&mut server, format!("ALTER ROLE {role} CONNECTION LIMIT 0")).await?;
    until("the session is renewed for longer than a connection lives", async || {
        anyhow::ensure!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
        Ok(sqlx::query_scalar(
            "SELECT EXISTS (SELECT FROM session
                            WHERE deadline - started_at > interval_ms * INTERVAL '1 millisecond' + INTERVAL '16 seconds')",
        )
        .fetch_one(&mut server)
        .await?)
    })
    .await?;
    let old = backends(&mut server, &role).await?;
    run(&mut server, format!("ALTER ROLE {role} CONNECTION LIMIT -1")).await?;
    until_replaced(&mut server, &role, &old).await?;
    assert!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
    drop(session);
    shepherd.stop().await?;
    run(&mut server, format!("DROP OWNED BY {role}; DROP ROLE {role}")).await?;
    Ok(server.close().await?)
}

/// Since PostgreSQL 15 a role that does not own the database cannot create tables in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_may_not_create_tables_is_given_the_grant_it_lacks() -> TestResult {
    let database = TestDatabase::create("no_create").await?;
    let (mut server, role) = (admin(&database).await?, role_name());
    let statements = format!(
        "CREATE ROLE {role} LOGIN; DROP SCHEMA public CASCADE; CREATE SCHEMA public; \
         GRANT USAGE ON SCHEMA public TO {role}"
    );
    run(&mut server, statements).await?;
    let mut settings = ConnectionSettings::from_url(database.url(), "without rights")?;
    settings.options = settings.options.username(&role);
    settings.dialect = database.dialect();
    settings.search_path = Some("public".to_owned());
    let bmdb = Bmdb::connect(settings).await?;
    let refused = bmdb.migrate().await.expect_err("it may not create tables").to_string();
    assert_eq!(
        refused,
        "creating the migration lock failed: the database refused it: permission denied for schema public; make the \
         user of the URL the owner of the database, or run `GRANT USAGE, CREATE ON SCHEMA public TO USER` in it"
    );
    bmdb.close().await;
    run(&mut server, format!("DROP OWNED BY {role}; DROP ROLE {role}")).await?;
    Ok(server.close().await?)
}

#[tokio::test]
async fn hint_of_the_server_is_a_part_of_the_error() -> TestResult {
    let database = TestDatabase::create("server_hint").await?;
    let pool = database.pool().await?;
    let refused = sqlx::query("SELECT no_such_function(1)").execute(&pool).await;
    let text = describe_error(&refused.expect_err("there is no such function"));
    assert!(
        text.contains("no_such_function(integer) does not exist (its hint: No function matches"),
        "{text}"
    );
    Ok(())
}
