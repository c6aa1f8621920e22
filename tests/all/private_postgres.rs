//! A private PostgreSQL server: it works, the data of a persistent one stays, and it ends with its owner.

use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use shepherd::bmdb::connection::private_postgres::PrivatePostgres;
use shepherd::bmdb::connection::private_postgres::options::{
    PrivatePostgresError, PrivatePostgresOptions, ServerStorage,
};
use shepherd::bmdb::connection::private_postgres::programs;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};

use crate::harness::aloud::TestResult;
use crate::harness::child::guarded;
use crate::harness::program::PATIENCE;

const IN_CHILD: &str = "SHEPHERD_TEST_POSTGRES_OWNER";

#[tokio::test]
async fn a_throw_away_server_leaves_nothing() -> TestResult {
    let postgres = PrivatePostgres::start(throw_away()).await?;
    let directory = directory_of(&postgres)?;
    postgres.create_database("mine").await?;
    assert_eq!(scalar(&postgres.url("mine"), "SELECT current_database()").await?, "mine");
    assert_eq!(scalar(&postgres.url("mine"), "SHOW listen_addresses").await?, "");
    assert_eq!(scalar(&postgres.url("mine"), "SHOW max_connections").await?, "20");
    let pid = postmaster(&directory)?;

    postgres.stop().await?;
    assert!(!directory.exists(), "{} is left", directory.display());
    assert!(!is_running(&pid, &directory));
    Ok(())
}

#[tokio::test]
async fn a_dropped_server_leaves_nothing() -> TestResult {
    let postgres = PrivatePostgres::start(throw_away()).await?;
    let directory = directory_of(&postgres)?;
    let pid = postmaster(&directory)?;
    drop(postgres);
    assert!(!directory.exists(), "{} is left", directory.display());
    assert!(!is_running(&pid, &directory));
    Ok(())
}

#[tokio::test]
async fn a_server_whose_owner_is_killed_leaves_nothing() -> TestResult {
    if env::var_os(IN_CHILD).is_some() {
        let postgres = PrivatePostgres::start(throw_away()).await?;
        println!("\nserving in {}", directory_of(&postgres)?.display());
        // Until this process is killed.
        std::future::pending::<()>().await;
    }
    let mut owner = guarded(env::current_exe()?)
        .args(["--exact", "private_postgres::a_server_whose_owner_is_killed_leaves_nothing", "--nocapture"])
        .env(IN_CHILD, "yes")
        .stdout(Stdio::piped())
        .spawn()?;
    let output = BufReader::new(owner.stdout.take().context("no output")?);
    let mut serving = None;
    for line in output.lines() {
        if let Some(directory) = line?.strip_prefix("serving in ") {
            serving = Some(PathBuf::from(directory));
            break;
        }
    }
    let directory = serving.context("the owner never served")?;
    let pid = postmaster(&directory)?;
    assert!(is_running(&pid, &directory));

    owner.kill()?;
    owner.wait()?;
    Ok(eventually("the server and its directory are gone", || {
        !directory.exists() && !is_running(&pid, &directory)
    })?)
}

#[tokio::test]
async fn a_staying_server_is_found_again_with_its_data() -> TestResult {
    let parent = directory_with_mode(0o755)?;
    let options = PrivatePostgresOptions {
        storage: ServerStorage::Persistent(parent.path().join("new/bmdb")),
        max_connections: 20,
    };

    let first = PrivatePostgres::start(options.clone()).await?;
    first.create_database("kept").await?;
    assert_eq!(scalar(&first.url("kept"), "SHOW fsync").await?, "on");
    let refused = PrivatePostgres::start(options.clone()).await.map(|_| ()).unwrap_err();
    assert!(matches!(refused, PrivatePostgresError::InUse { .. }), "{refused}");
    first.stop().await?;

    // The files that a host leaves that lost power, with a pid that another process has now.
    let directory = parent.path().join("new/bmdb");
    fs::write(directory.join("data/postmaster.pid"), format!("{}\n", std::process::id()))?;
    let second = PrivatePostgres::start(options).await?;
    assert_eq!(scalar(&second.url("kept"), "SELECT current_database()").await?, "kept");
    second.stop().await?;
    Ok(())
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_is_served_all_the_same() -> TestResult {
    let parent = directory_with_mode(0o755)?;
    let directory = parent.path().join("d".repeat(90));
    let options =
        PrivatePostgresOptions { storage: ServerStorage::Persistent(directory.clone()), max_connections: 20 };
    let postgres = PrivatePostgres::start(options).await?;
    let url = postgres.url("postgres");
    assert_eq!(scalar(&url, "SELECT current_database()").await?, "postgres");
    let sockets = url.split("host=").nth(1).and_then(|rest| rest.split('&').next()).context("no host")?;
    let sockets = PathBuf::from(sockets);
    assert!(sockets.exists());
    postgres.stop().await?;
    assert!(directory.exists());
    assert!(!sockets.parent().context("no parent")?.exists(), "{} is left", sockets.display());
    Ok(())
}

#[tokio::test]
async fn a_directory_of_another_version_is_refused_in_words() -> TestResult {
    let parent = directory_with_mode(0o755)?;
    let data = parent.path().join("data");
    fs::create_dir(&data)?;
    fs::write(data.join("PG_VERSION"), "9\n")?;
    let options = PrivatePostgresOptions {
        storage: ServerStorage::Persistent(parent.path().to_owned()),
        max_connections: 20,
    };
    let text = PrivatePostgres::start(options).await.map(|_| ()).unwrap_err().to_string();
    let start = format!("{} was made by PostgreSQL 9, and only ", fs::canonicalize(&data)?.display());
    assert!(text.starts_with(&start), "{text}");
    assert!(text.ends_with("install the package postgresql-9, or give another directory"), "{text}");
    Ok(())
}

#[tokio::test]
async fn a_directory_that_the_server_cannot_enter_is_refused_in_words() -> TestResult {
    let closed = directory_with_mode(0o700)?;
    let directory = closed.path().join("bmdb");
    let options =
        PrivatePostgresOptions { storage: ServerStorage::Persistent(directory.clone()), max_connections: 20 };
    let started = PrivatePostgres::start(options).await;
    match programs::server_user() {
        Ok(None) => started?.stop().await?,
        Ok(Some(user)) => {
            let text = started.map(|_| ()).unwrap_err().to_string();
            let expected = format!(
                "{} cannot be entered by the user {}, as whom PostgreSQL runs because it refuses to run as \
                 root; give a directory that this user can reach, such as one below /var/lib",
                directory.display(),
                user.name
            );
            assert_eq!(text, expected);
            assert!(!directory.exists(), "half-done work is left");
        }
        Err(error) => panic!("{error:?}"),
    }
    Ok(())
}

#[tokio::test]
async fn error_on_a_host_without_server_programs_names_what_to_install() -> TestResult {
    if env::var_os(IN_CHILD).is_some() {
        let error = PrivatePostgres::start(throw_away()).await.map(|_| ()).unwrap_err();
        println!("\nrefused: {error}");
        return Ok(());
    }
    let output = Command::new(env::current_exe()?)
        .args([
            "--exact",
            "private_postgres::error_on_a_host_without_server_programs_names_what_to_install",
            "--nocapture",
        ])
        .env(IN_CHILD, "yes")
        .env("SHEPHERD_POSTGRES_BIN", "/nowhere")
        .stdin(Stdio::null())
        .output()?;
    let output = String::from_utf8(output.stdout)?;
    let printed = output.lines().find_map(|line| line.strip_prefix("refused: "));
    assert_eq!(
        printed,
        Some(
            "no PostgreSQL server programs (initdb, postgres) were found in /nowhere; install them with \
             `apt-get install postgresql`, or name their directory in SHEPHERD_POSTGRES_BIN"
        )
    );
    Ok(())
}

#[tokio::test]
async fn a_name_that_is_no_identifier_is_refused() -> TestResult {
    let postgres = PrivatePostgres::start(throw_away()).await?;
    for name in ["", "Upper", "a\"b", "a b", &"x".repeat(64)] {
        let error = postgres.create_database(name).await.unwrap_err();
        assert!(matches!(error, PrivatePostgresError::InvalidName { .. }), "{error}");
    }
    postgres.create_database("twice").await?;
    let text = postgres.create_database("twice").await.unwrap_err().to_string();
    assert!(text.starts_with("the database twice could not be created: "), "{text}");
    postgres.stop().await?;
    Ok(())
}

fn throw_away() -> PrivatePostgresOptions {
    PrivatePostgresOptions { storage: ServerStorage::Temporary, max_connections: 20 }
}

/// With mode 0755 the server's user can enter too.
fn directory_with_mode(mode: u32) -> anyhow::Result<tempfile::TempDir> {
    let directory = tempfile::tempdir()?;
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode))?;
    Ok(directory)
}

fn directory_of(postgres: &PrivatePostgres) -> anyhow::Result<PathBuf> {
    Ok(postgres.log().parent().context("a log has a directory")?.to_owned())
}

fn postmaster(directory: &Path) -> anyhow::Result<String> {
    let text = fs::read_to_string(directory.join("data/postmaster.pid"))?;
    Ok(text.lines().next().context("no process id")?.to_owned())
}

/// A server works in its data directory. The pid alone may belong to another process by now.
fn is_running(pid: &str, directory: &Path) -> bool {
    fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|works_in| works_in.starts_with(directory))
}

async fn scalar(url: &str, statement: &'static str) -> anyhow::Result<String> {
    let options: PgConnectOptions = url.parse()?;
    let mut connection = options.connect().await?;
    let value = sqlx::query_scalar(statement).fetch_one(&mut connection).await?;
    connection.close().await?;
    Ok(value)
}

fn eventually(what: &str, condition: impl Fn() -> bool) -> anyhow::Result<()> {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        if Instant::now() >= until {
            bail!("not within {PATIENCE:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
