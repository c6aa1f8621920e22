//! One private PostgreSQL for the whole run, and a database of its own for each test.
//!
//! `tools/test` starts the server, gives its address in `SHEPHERD_TEST_POSTGRES`, and ends it. If there is no such
//! server, the first test that wants a database starts one, which ends with this process, however it ends: see
//! `bmdb::connection::private_postgres`. The first test also makes the template with the test clock and all migrations,
//! unless an earlier process of the same run has made it, and every test gets a copy (about 30 ms).
//!
//! One thread makes and drops the databases one after the other. PostgreSQL forbids connections to a template while it
//! is copied, and each test has an async runtime that ends with it, so tests cannot share a connection.

use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use bmdb::connection::Bmdb;
use bmdb::connection::dialect::Dialect;
use bmdb::connection::private_postgres::PrivatePostgres;
use bmdb::connection::private_postgres::options::{PrivatePostgresOptions, ServerStorage};
use bmdb::connection::schema::MIGRATIONS;
use bmdb::connection::settings::ConnectionSettings;
use sqlx::migrate::Migrator;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection, PgPool};
use tokio::sync::oneshot;

use crate::aloud::assertions_aloud;
use crate::dialect;

/// The number of connections that each test may use.
const CONNECTIONS_PER_TEST: usize = 60;
/// The server sizes the memory for predicate locks of SERIALIZABLE transactions by its number of connections, and keeps
/// these locks for as long as any of the transactions is open, in any database. Without enough memory it fails
/// transactions of one test because it summarized the locks of another, until the oldest transaction has ended.
const ROOM: usize = 4;
const TEMPLATE: &str = "shepherd_template";

/// The advisory lock of the program that prepares the server.
const PREPARATION_LOCK: i64 = 0x7465_6d70;
/// The variable with the address of the server that a run shares.
const SHARED: &str = "SHEPHERD_TEST_POSTGRES";
/// The variable that is `uncounted` for a server without `pg_stat_statements`: no test proves its dialect then.
const STATEMENTS: &str = "SHEPHERD_TEST_STATEMENTS";

static SERVER_OWNER: LazyLock<Result<mpsc::Sender<Request>, String>> = LazyLock::new(start_keeper);

enum Request {
    Create { name: String, answer: oneshot::Sender<anyhow::Result<Urls>> },
    Drop { name: String, answer: mpsc::Sender<anyhow::Result<Vec<String>>> },
}

/// The server of this run.
enum Server {
    /// Started by this process. It ends with this process.
    Own(PrivatePostgres),
    /// Shared by several processes: the address of its maintenance database.
    Shared(String),
}

impl Server {
    /// The address of a database.
    fn url(&self, database: &str) -> String {
        match self {
            Self::Own(postgres) => postgres.url(database),
            Self::Shared(url) => url.replacen("/postgres?", &format!("/{database}?"), 1),
        }
    }
}

struct Urls {
    plain: String,
    server: String,
}

/// A migrated database that belongs to one test. Dropping it drops the database.
pub struct TestDatabase {
    name: String,
    url: String,
    dialect: Dialect,
    server: String,
}

impl TestDatabase {
    /// Copies the template. `test_name` makes the database recognisable to a person with `psql`.
    pub async fn create(test_name: &str) -> anyhow::Result<Self> {
        assertions_aloud();
        let dialect = dialect::of_this_run()?;
        let name = database_name(test_name);
        let (answer, answered) = oneshot::channel();
        clone_request_sender()?.send(Request::Create { name: name.clone(), answer })?;
        let urls = answered.await.context("the keeper of the test databases ended")??;
        let url = with_session_settings(&urls.plain, dialect);
        Ok(Self { name, url, dialect, server: urls.server })
    }

    /// The address, with the run's dialect and the test clock in it: any process that connects with it has both.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The dialect of this run.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// The address of the server's maintenance database, for tests that inspect the server.
    #[must_use]
    pub fn server_url(&self) -> &str {
        &self.server
    }

    /// The BMDB as a program has it, with the policy read.
    pub async fn bmdb(&self) -> anyhow::Result<Bmdb> {
        let mut settings = ConnectionSettings::from_url(&self.url, "shepherd tests")?;
        settings.dialect = self.dialect;
        settings.search_path = Some("public, shim, pg_catalog".to_owned());
        let bmdb = Bmdb::connect(settings).await?;
        bmdb.read_policy().await?;
        Ok(bmdb)
    }

    /// A pool for the statements of the test itself. It ends with the test's runtime.
    ///
    /// Its statements must not fail because of what the engine does at that time, in any dialect.
    pub async fn pool(&self) -> anyhow::Result<PgPool> {
        let options: PgConnectOptions = self.url.parse()?;
        let options = options.options([("default_transaction_isolation", "read committed")]);
        Ok(PgPoolOptions::new().max_connections(10).connect_with(options).await?)
    }

    /// Moves the database's clock forward for all connections.
    pub async fn advance(&self, by: Duration) -> anyhow::Result<()> {
        let options: PgConnectOptions = self.url.parse()?;
        let mut connection = options.connect().await?;
        sqlx::query(
            "SELECT setval('shim.offset_microseconds', \
             pg_sequence_last_value('shim.offset_microseconds'::regclass) + $1)",
        )
        .bind(i64::try_from(by.as_micros())?)
        .execute(&mut connection)
        .await?;
        connection.close().await?;
        Ok(())
    }
}

impl Drop for TestDatabase {
    /// Fails the test if one of its statements is one that the dialect must not send.
    fn drop(&mut self) {
        let (answer, answered) = mpsc::channel();
        let sent = clone_request_sender()
            .map(|keeper| keeper.send(Request::Drop { name: self.name.clone(), answer }));
        let statements = sent.and_then(|_| answered.recv()?);
        let forbidden = statements.map(|statements| dialect::forbidden(self.dialect, statements));
        let proved = forbidden.as_ref().is_ok_and(Vec::is_empty);
        assert!(
            proved || thread::panicking(),
            "statements of another dialect than {:?}: {forbidden:#?}",
            self.dialect
        );
    }
}

fn clone_request_sender() -> anyhow::Result<mpsc::Sender<Request>> {
    SERVER_OWNER.clone().map_err(|reason| anyhow!("the tests' PostgreSQL: {reason}"))
}

fn start_keeper() -> Result<mpsc::Sender<Request>, String> {
    let (requests, received) = mpsc::channel();
    let (started, start) = mpsc::channel();
    let keep = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => return started.send(Err(anyhow!(error))),
        };
        let server = match runtime.block_on(prepare()) {
            Ok(server) => server,
            Err(error) => return started.send(Err(error)),
        };
        started.send(Ok(()))?;
        for request in received {
            runtime.block_on(serve(&server, request));
        }
        Ok(())
    };
    thread::Builder::new()
        .name("test-databases".to_owned())
        .spawn(keep)
        .map_err(|error| error.to_string())?;
    start.recv().map_err(|error| error.to_string())?.map_err(|error| format!("{error:#}"))?;
    Ok(requests)
}

async fn serve(server: &Server, request: Request) {
    match request {
        Request::Create { name, answer } => {
            let statement = format!("CREATE DATABASE \"{name}\" TEMPLATE {TEMPLATE}");
            let created = administer(server, statement).await;
            let urls = created.map(|()| Urls { plain: server.url(&name), server: server.url("postgres") });
            // Nobody receives it if the test was given up meanwhile. The end of the server removes the database.
            let _ = answer.send(urls);
        }
        Request::Drop { name, answer } => {
            // Somebody receives it, unless the process is ending.
            let _ = answer.send(sent_statements(server, &name).await);
            let statement = format!("DROP DATABASE \"{name}\" WITH (FORCE)");
            if let Err(error) = administer(server, statement).await {
                tracing::warn!(name, "a test database was not dropped: {error:#}");
            }
        }
    }
}

async fn prepare() -> anyhow::Result<Server> {
    let server = match std::env::var(SHARED) {
        Ok(url) if url.contains("/postgres?") => Server::Shared(url),
        Ok(url) => {
            bail!("{SHARED} is {url:?}: give the address of the database postgres, as tools/test does")
        }
        Err(_) => {
            let options = PrivatePostgresOptions {
                storage: ServerStorage::Temporary,
                max_connections: server_connections(),
            };
            Server::Own(PrivatePostgres::start(options).await?)
        }
    };
    // Programs of tests that share a server prepare it one after the other, and only the first makes the template. Even
    // `IF NOT EXISTS` fails when two make an extension at once.
    let mut lock = connect(&server).await?;
    sqlx::query("SELECT pg_advisory_lock($1)").bind(PREPARATION_LOCK).execute(&mut lock).await?;
    if counts_statements() {
        administer(&server, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements".to_owned()).await.context(
            "the module pg_stat_statements, which proves the dialect, is part of the server's package",
        )?;
    }
    if !has_template(&mut lock).await? {
        make_template(&server).await?;
    }
    // The lock ends with its connection.
    lock.close().await?;
    Ok(server)
}

async fn make_template(server: &Server) -> anyhow::Result<()> {
    // The template has another name until it is complete, so a process that is killed leaves no half of it.
    let unfinished = format!("{TEMPLATE}_unfinished");
    administer(server, format!("DROP DATABASE IF EXISTS {unfinished} WITH (FORCE)")).await?;
    administer(server, format!("CREATE DATABASE {unfinished}")).await?;
    // `public` comes first, so that tables are created there. Names that the migrations resolve for good (defaults,
    // views) still find the test clock before PostgreSQL's own.
    let mut settings = ConnectionSettings::from_url(&server.url(&unfinished), "shepherd tests")?;
    settings.search_path = Some("public, shim, pg_catalog".to_owned());
    let template = Bmdb::connect(settings).await?;
    sqlx::raw_sql(include_str!("shim.sql")).execute(template.pool()).await.context("shim.sql")?;
    template.migrate().await?;
    // A database with connections cannot be copied.
    template.close().await;
    administer(server, format!("ALTER DATABASE {unfinished} RENAME TO {TEMPLATE}")).await
}

async fn connect(server: &Server) -> anyhow::Result<PgConnection> {
    let options: PgConnectOptions = server.url("postgres").parse()?;
    Ok(options.connect().await?)
}

async fn has_template(connection: &mut PgConnection) -> anyhow::Result<bool> {
    Ok(sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)")
        .bind(TEMPLATE)
        .fetch_one(connection)
        .await?)
}

/// Enough for as many tests as run at once: libtest has a thread per processor by default. With a semaphore instead, a
/// test that needs two databases might never get its second.
fn server_connections() -> u16 {
    let number = std::env::var("RUST_TEST_THREADS").ok().and_then(|threads| threads.parse::<usize>().ok());
    let at_once = number.or_else(|| thread::available_parallelism().ok().map(Into::into)).unwrap_or(4);
    u16::try_from((at_once + 2) * CONNECTIONS_PER_TEST * ROOM).unwrap_or(u16::MAX).min(5000)
}

/// Whether the server counts statements.
fn counts_statements() -> bool {
    std::env::var(STATEMENTS).as_deref() != Ok("uncounted")
}

/// Every statement that was sent to a database, or none if the server does not count them. The server then forgets them, because it counts 5,000 in all.
async fn sent_statements(server: &Server, name: &str) -> anyhow::Result<Vec<String>> {
    if !counts_statements() {
        return Ok(Vec::new());
    }
    let mut connection = connect(server).await?;
    let statements = sqlx::query_scalar(
        "SELECT s.query FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = $1",
    )
    .bind(name)
    .fetch_all(&mut connection)
    .await?;
    sqlx::query("SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = $1")
        .bind(name)
        .execute(&mut connection)
        .await?;
    connection.close().await?;
    Ok(statements)
}

async fn administer(server: &Server, statement: String) -> anyhow::Result<()> {
    let mut connection = connect(server).await?;
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}

fn with_session_settings(url: &str, dialect: Dialect) -> String {
    let isolation = dialect::isolation(dialect).replace(' ', "\\ ");
    let settings =
        format!("-c search_path=public,shim,pg_catalog -c default_transaction_isolation={isolation}");
    format!("{url}&options={}", settings.replace('\\', "%5C").replace(' ', "%20"))
}

/// Every migration, without sqlx's own lock.
#[must_use]
pub fn migrator() -> Migrator {
    let mut migrator = Migrator { migrations: MIGRATIONS.migrations.clone(), ..Migrator::DEFAULT };
    migrator.set_locking(false);
    migrator
}

/// A unique plain identifier within PostgreSQL's 63 bytes that begins with the test's name.
fn database_name(test_name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    let name: String = test_name.chars().map(plain).take(40).collect();
    let unique = uuid::Uuid::new_v4().simple().to_string();
    format!("t_{name}_{}", &unique[..12])
}
