//! A private PostgreSQL server as a child process, for demo and tests.
//!
//! It also serves a small site that has no PostgreSQL. It listens on a UNIX socket in a directory that only its user
//! can enter, never on the network, and therefore trusts every process that can open that socket. A temporary server
//! skips `fsync` and removes its directory at the end; a persistent one retains its data and is started again the next
//! time.
//!
//! # Who ends it
//!
//! A parent that is killed outright runs no destructor. The server is therefore the child of a small shell script, the
//! guardian, which holds the other end of a pipe from us. When we exit, in whatever way, the pipe ends; the guardian
//! then ends the server, removes what has to be removed and exits too. (The kernel's parent-death signal was not
//! chosen: it fires when the *thread* that forked ends, which a thread pool does when it is idle, and it removes no
//! directory.) The guardian has a process group of its own, because Ctrl-C on a terminal reaches the whole group and
//! the server must be the last to stop.
//!
//! The guardian and the server inherit a lock file in a persistent server's directory: locked means served. A
//! `postmaster.pid` found without the lock is stale, whatever process has that number now.

use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};

use crate::connection::private_postgres::directory::{
    ServerPaths, acquire_lock, choose_programs, create_temporary_paths, io_error, last_lines,
    prepare_persistent_paths, remove_stale_pid, rotate_log, run_initdb,
};
use crate::connection::private_postgres::options::{
    POLL, PORT, PrivatePostgresError, PrivatePostgresOptions, READY_TIMEOUT, SUPERUSER, ServerStorage,
};
use crate::connection::private_postgres::programs::{PostgresPrograms, ServerUser};

mod directory;
pub mod options;
pub mod programs;

/// How long a fast shutdown may take before it becomes an immediate one.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);
const GUARDIAN: &str = include_str!("guardian.sh");

/// A running server.
///
/// End it with [`PrivatePostgres::stop`]. A dropped or forgotten one is ended by its guardian, at once
/// and without a checkpoint.
#[derive(Debug)]
pub struct PrivatePostgres {
    guardian: Child,
    /// Signals for the server; closing it means that we have exited.
    guardian_stdin: Option<ChildStdin>,
    sockets: PathBuf,
    log: PathBuf,
    remove_on_exit: Option<PathBuf>,
}

impl PrivatePostgres {
    /// Makes the data directory if absent, starts the server and waits until it accepts connections. A new one takes
    /// about a second.
    pub async fn start(options: PrivatePostgresOptions) -> Result<Self, PrivatePostgresError> {
        tokio::task::spawn_blocking(move || start(&options)).await?
    }

    /// The address of one of its databases, as libpq and sqlx read it.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let host = percent_encode(self.sockets.as_os_str().as_bytes());
        format!("postgres:///{database}?host={host}&port={PORT}&user={SUPERUSER}&sslmode=disable")
    }

    /// The file that the server logs to. A temporary server removes it when it ends.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Creates an empty database. The name consists of lower-case letters, digits and underscores.
    pub async fn create_database(&self, name: &str) -> Result<(), PrivatePostgresError> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if name.is_empty() || name.len() > 63 || !name.chars().all(plain) {
            return Err(PrivatePostgresError::InvalidName { name: name.to_owned() });
        }
        let statement =
            include_str!("../../../../../sql/private_postgres/create_database.sql").replace("{name}", name);
        let create = async {
            let options: PgConnectOptions = self.url("postgres").parse()?;
            let mut connection = options.connect().await?;
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await?;
            connection.close().await
        };
        create.await.map_err(|error| PrivatePostgresError::CreateDatabase { name: name.to_owned(), error })
    }

    /// Disconnects all clients, ends the server with a checkpoint and waits until process, sockets and (of a temporary
    /// one) directory are gone.
    pub async fn stop(mut self) -> Result<(), PrivatePostgresError> {
        tokio::task::spawn_blocking(move || {
            // A write error means that the guardian has ended already, which `wait` shows below.
            if let Some(hold) = &mut self.guardian_stdin {
                let _ = hold.write_all(b"INT\n");
            }
            if self.wait_for_exit(STOP_TIMEOUT).is_none() {
                tracing::warn!(log = %self.log.display(), "PostgreSQL is slow to stop; ending it at once");
            }
            drop(self);
        })
        .await?;
        Ok(())
    }

    fn wait_for_exit(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        loop {
            match self.guardian.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => thread::sleep(POLL),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        drop(self.guardian_stdin.take());
        // A little longer than the guardian waits before it kills the server.
        if self.wait_for_exit(Duration::from_secs(95)).is_none() {
            tracing::error!(log = %self.log.display(), "the guardian of PostgreSQL did not end");
        }
        // What its user could not remove: an empty directory in one that only we can write.
        if let Some(remove) = &self.remove_on_exit {
            let _ = fs::remove_dir_all(remove);
        }
    }
}

fn start(options: &PrivatePostgresOptions) -> Result<PrivatePostgres, PrivatePostgresError> {
    let found = programs::find_programs();
    let user = programs::server_user().map_err(|_| PrivatePostgresError::NoServerUser)?;
    let user = user.as_ref();
    if found.is_empty() {
        let looked: Vec<String> =
            programs::search_directories().iter().map(|place| place.display().to_string()).collect();
        return Err(PrivatePostgresError::NoPrograms { searched: looked.join(", ") });
    }

    let places = match &options.storage {
        ServerStorage::Temporary => create_temporary_paths(user)?,
        ServerStorage::Persistent(directory) => prepare_persistent_paths(directory, user)?,
    };
    // From here on we must tidy up when a step fails.
    let result = start_in_directory(&places, options, &found, user);
    if result.is_err()
        && let Some(remove) = &places.remove_on_exit
    {
        let _ = fs::remove_dir_all(remove);
    }
    result
}

fn start_in_directory(
    places: &ServerPaths,
    options: &PrivatePostgresOptions,
    found: &[PostgresPrograms],
    user: Option<&ServerUser>,
) -> Result<PrivatePostgres, PrivatePostgresError> {
    let lock = acquire_lock(places)?;
    let programs = choose_programs(&places.data, found)?;
    if !places.data.join("PG_VERSION").exists() {
        run_initdb(places, options, programs, user)?;
    }
    remove_stale_pid(&places.data)?;
    let log = rotate_log(&places.log)?;

    let at_end = if options.storage == ServerStorage::Temporary { "QUIT" } else { "INT" };
    let mut command = programs::program_command(Path::new("/bin/sh"), user);
    command.arg("-c").arg(strip_comments(GUARDIAN)).arg("shepherd-postgres-guardian").arg(at_end);
    command.arg(places.remove_on_exit.as_deref().unwrap_or(Path::new("")));
    command.arg(programs.path("postgres")).args(server_arguments(places, options, programs));
    command.current_dir(&places.base).process_group(0);
    command.stdin(Stdio::piped()).stdout(lock).stderr(log);
    let mut guardian = command.spawn().map_err(io_error("starting", &programs.path("postgres")))?;
    let hold = guardian.stdin.take();
    let mut server = PrivatePostgres {
        guardian,
        guardian_stdin: hold,
        sockets: places.sockets.clone(),
        log: places.log.clone(),
        remove_on_exit: places.remove_on_exit.clone(),
    };
    wait_until_ready(&mut server, &places.data)?;
    tracing::debug!(data = %places.data.display(), version = programs.major, "private PostgreSQL is ready");
    Ok(server)
}

fn server_arguments(
    places: &ServerPaths,
    options: &PrivatePostgresOptions,
    programs: &PostgresPrograms,
) -> Vec<String> {
    let mut settings = vec![
        "listen_addresses=".to_owned(),
        format!("port={PORT}"),
        "unix_socket_permissions=0700".to_owned(),
        format!("max_connections={}", options.max_connections),
        "timezone=UTC".to_owned(),
        "log_timezone=UTC".to_owned(),
        "jit=off".to_owned(),
    ];
    if programs.has_pg_stat_statements() {
        settings.push("shared_preload_libraries=pg_stat_statements".to_owned());
    }
    if options.storage == ServerStorage::Temporary {
        settings.extend(["fsync=off", "full_page_writes=off", "synchronous_commit=off"].map(str::to_owned));
        // Read with the limits of the server, so that what is intended here is no issue.
        settings.push("shepherd.throw_away=on".to_owned());
    }
    let mut arguments = vec![
        "-D".to_owned(),
        places.data.to_string_lossy().into_owned(),
        "-k".to_owned(),
        places.sockets.to_string_lossy().into_owned(),
    ];
    for setting in settings {
        arguments.extend(["-c".to_owned(), setting]);
    }
    arguments
}

/// The last line of `postmaster.pid` says `ready` once connections are accepted.
fn wait_until_ready(server: &mut PrivatePostgres, data: &Path) -> Result<(), PrivatePostgresError> {
    let until = Instant::now() + READY_TIMEOUT;
    loop {
        let text = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
        if text.lines().nth(7).is_some_and(|status| status.trim() == "ready") {
            return Ok(());
        }
        let reported = || last_lines(&fs::read(&server.log).unwrap_or_default());
        if server.guardian.try_wait().is_ok_and(|status| status.is_some()) {
            return Err(PrivatePostgresError::Failed {
                program: "postgres",
                directory: data.to_owned(),
                output: reported(),
            });
        }
        if Instant::now() >= until {
            return Err(PrivatePostgresError::NotReady { output: reported() });
        }
        thread::sleep(POLL);
    }
}

/// The script without comments, as a process list should show it.
fn strip_comments(script: &str) -> String {
    let code = script.lines().filter(|line| !line.trim_start().starts_with('#'));
    code.collect::<Vec<_>>().join("\n")
}

fn percent_encode(bytes: &[u8]) -> String {
    let mut encoded = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.extend([char::from(b'%'), hex_digit(byte >> 4), hex_digit(byte & 15)]);
        }
    }
    encoded
}

fn hex_digit(value: u8) -> char {
    char::from(b"0123456789ABCDEF"[usize::from(value)])
}
