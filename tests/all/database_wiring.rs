//! What `shepherd --check` and a start do with a database that can be reached: each verdict of the crate `bmdb` about its
//! server must reach the operator, from both.
//!
//! A proxy between the program and the server changes what they send, as a pooler or a server of another version would.
//! What the verdicts are is tested in the crate.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use shepherd::bmdb::connection::dialect::Dialect;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};

use crate::bad_input::dialect_flag;
use crate::harness::aloud::TestResult;
use crate::harness::port::reserved;
use crate::harness::postgres::TestDatabase;
use crate::harness::program::{PATIENCE, Place, ProgramOutput};

/// How long a start may take until it refuses its database.
const START_LIMIT: Duration = Duration::from_mins(1);

/// Bytes that one side sends, and what the other side gets in their place.
type Change = fn(&mut [u8]);

/// The URL of a proxy to a test's database.
fn start_proxy(database: &TestDatabase, to_server: Change, to_client: Change) -> Result<String> {
    let url = database.url();
    let options: PgConnectOptions = url.parse()?;
    let socket = options.get_socket().context("the server listens on a socket")?.join(".s.PGSQL.5432");
    let (_, query) = url.split_once('?').context("no query in the URL")?;
    let rest: Vec<&str> =
        query.split('&').filter(|part| !part.starts_with("host=") && !part.starts_with("port=")).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    // It ends with the process of the tests.
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&socket) else { continue };
            let (Ok(from_client), Ok(from_server)) = (client.try_clone(), server.try_clone()) else {
                continue;
            };
            let (client_end, server_end) = (client.try_clone(), server.try_clone());
            std::thread::spawn(move || {
                forward(from_client, server, to_server);
                drop(server_end.map(|end| end.shutdown(Shutdown::Both)));
            });
            std::thread::spawn(move || {
                forward(from_server, client, to_client);
                drop(client_end.map(|end| end.shutdown(Shutdown::Both)));
            });
        }
    });
    let name = options.get_database().context("no database in the URL")?;
    Ok(format!("postgres://{address}/{name}?{}", rest.join("&")))
}

fn forward(mut from: impl Read, mut to: impl Write, change: Change) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut sent = buffer[..count].to_vec();
        change(&mut sent);
        if to.write_all(&sent).is_err() {
            break;
        }
    }
}

const fn leave(_: &mut [u8]) {}

/// Writes `by` over each `what`, which is as long.
fn replace(sent: &mut [u8], what: &[u8], by: &[u8]) {
    for start in 0..sent.len().saturating_sub(what.len() - 1) {
        if sent[start..].starts_with(what) {
            sent[start..start + by.len()].copy_from_slice(by);
        }
    }
}

/// Both connections of a probe have one process, as behind a pooler that gives sessions to transactions.
fn share_backends(sent: &mut [u8]) {
    replace(sent, b"pg_backend_pid()", b"abs(00000000007)");
}

/// The server reports that it is PostgreSQL 14, with the minor version that it has.
fn report_version_14(sent: &mut [u8]) {
    const NAME: &[u8] = b"server_version\0";
    let found = sent.windows(NAME.len()).position(|window| window == NAME);
    if let Some(version) = found.and_then(|at| sent.get_mut(at + NAME.len()..at + NAME.len() + 2)) {
        version.copy_from_slice(b"14");
    }
}

/// Flags of a service that reads from the database alone.
fn flags(place: &Place) -> Result<Vec<String>> {
    let list = place.write("devices.json", "[]")?;
    Ok(vec![
        "--components=updater".to_owned(),
        "--provider=static".to_owned(),
        format!("--static_device_list_url=file://{}", list.display()),
        format!("--secrets_key_path={}", place.path("secrets.key").display()),
        dialect_flag(Dialect::Postgres),
    ])
}

/// Runs `--check`, and then a start that is expected to fail.
fn check_and_start(place: &Place, own: &[String]) -> Result<[ProgramOutput; 2]> {
    let flags = flags(place)?;
    let checked = place.run(["--check"].into_iter().chain(flags.iter().chain(own).map(String::as_str)))?;
    let mut started = place.program(flags.iter().chain(own)).spawn()?;
    let end = Instant::now() + START_LIMIT;
    while started.try_wait()?.is_none() {
        if Instant::now() > end {
            // It serves, and was expected to refuse.
            kill_process(Pid::from_child(&started), Signal::KILL)?;
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok([checked, Place::finish(started)?])
}

fn last_line(output: &ProgramOutput) -> &str {
    output.stderr.lines().last().unwrap_or_default()
}

async fn admin(database: &TestDatabase) -> Result<PgConnection> {
    Ok(database.url().parse::<PgConnectOptions>()?.connect().await?)
}

/// The value of a metric without labels that a program serves.
fn read_metric(address: SocketAddr, name: &str) -> Result<Option<String>> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(value.map(str::to_owned))
}

/// A service that was started, with its log. It is killed when this is dropped.
struct Service {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Service {
    fn start(place: &Place, flags: &[String]) -> Result<Self> {
        let mut child = place.program(flags).spawn()?;
        drop(child.stdout.take());
        let stderr = child.stderr.take().context("its errors were taken")?;
        let log = Arc::new(Mutex::new(String::new()));
        let lines = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(std::result::Result::ok) {
                let mut text = lines.lock().unwrap_or_else(PoisonError::into_inner);
                text.push_str(&line);
                text.push('\n');
            }
        });
        Ok(Self { child, log })
    }

    fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The value of a metric, as soon as it is served.
    async fn wait_for_metric(&mut self, address: SocketAddr, name: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Ok(Some(value)) = read_metric(address, name) {
                return Ok(value);
            }
            ensure!(Instant::now() < end, "it serves no metrics: {}", self.log());
            ensure!(self.child.try_wait()?.is_none(), "it ended: {}", self.log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn direct_url_to_another_database_is_refused_by_the_check_and_by_the_start() -> TestResult {
    let (database, other) =
        (TestDatabase::create("wired_pool").await?, TestDatabase::create("wired_direct").await?);
    let place = Place::new()?;
    let urls = |direct: &TestDatabase| {
        [format!("--bmdb_url={}", database.url()), format!("--bmdb_direct_url={}", direct.url())]
    };
    for refused in check_and_start(&place, &urls(&other))? {
        assert_ne!(refused.code, Some(0), "it is another database: {refused:?}");
        let sentence = "(--bmdb_direct_url) is another server or another database than ";
        assert!(last_line(&refused).contains(sentence), "it is another database: {refused:?}");
    }
    let flags = flags(&place)?;
    let own = urls(&database);
    let accepted = place.run(["--check"].into_iter().chain(flags.iter().chain(&own).map(String::as_str)))?;
    assert!(
        accepted.code == Some(0) && accepted.stdout.contains("the direct URL leads to the same server"),
        "{accepted:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pooler_of_transactions_is_refused_by_the_check_and_by_the_start() -> TestResult {
    let database = TestDatabase::create("wired_pooler").await?;
    let place = Place::new()?;
    let url = start_proxy(&database, share_backends, leave)?;
    for refused in check_and_start(&place, &[format!("--bmdb_url={url}")])? {
        assert_ne!(refused.code, Some(0), "there is a pooler in between: {refused:?}");
        let sentence = "is behind a pooler that pools transactions";
        assert!(last_line(&refused).contains(sentence), "there is a pooler in between: {refused:?}");
    }
    Ok(())
}

/// The role has fewer connections than are wanted, and the server a version that is not supported.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_and_start_report_the_version_and_do_with_few_connections() -> TestResult {
    let database = TestDatabase::create("wired_limits").await?;
    let mut server = admin(&database).await?;
    let role = format!("role_{}", uuid::Uuid::new_v4().simple());
    let create = format!(
        "CREATE ROLE {role} LOGIN CONNECTION LIMIT 5; GRANT pg_read_all_data, pg_write_all_data TO {role}; \
         GRANT CREATE ON SCHEMA public TO {role}"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut server).await?;
    let place = Place::new()?;
    let proxied = start_proxy(&database, leave, report_version_14)?;
    let url = proxied.replace("user=postgres", &format!("user={role}"));
    assert_ne!(url, proxied, "the URL of a test's database names its user");
    let mut flags = flags(&place)?;
    flags.push(format!("--bmdb_url={url}"));
    let unsupported = "is not supported; ";

    let checked = place.run(["--check".to_owned()].into_iter().chain(flags.iter().cloned()))?;
    assert_eq!(checked.code, Some(0), "{checked:?}");
    assert!(checked.stderr.contains(unsupported), "the version is a warning of the check: {checked:?}");
    assert!(
        checked.stdout.contains("too few connections, so that the pool does with 3: "),
        "the limit is in the report: {checked:?}"
    );

    let metrics = reserved()?;
    flags.push(format!("--metrics_listen_address={metrics}"));
    let mut service = Service::start(&place, &flags)?;
    let most = service.wait_for_metric(metrics, "shepherd_bmdb_pool_connections_limit").await?;
    // The metrics need a connection, too.
    assert_eq!(most, "2", "the pool has the connections that are left: {}", service.log());
    let log = service.log();
    assert!(log.contains("the pool does with 2 connections"), "{log}");
    assert!(log.contains(unsupported), "the version is a warning of the start: {log}");
    drop(service);
    let remove = format!("DROP OWNED BY {role}; DROP ROLE {role}");
    sqlx::raw_sql(AssertSqlSafe(remove)).execute(&mut server).await?;
    Ok(server.close().await?)
}
