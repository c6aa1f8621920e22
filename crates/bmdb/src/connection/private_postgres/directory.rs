//! Data directory of the private PostgreSQL server: creating, locking, cleaning up after a crash.
//!
//! When root runs the server as another user, that user must own the data and be able to reach it, and must be able to
//! remove a temporary directory by itself: its guardian does so after we have exited.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::connection::private_postgres::options::{
    POLL, PORT, PrivatePostgresError, PrivatePostgresOptions, SUPERUSER, ServerStorage,
};
use crate::connection::private_postgres::programs::{self, PostgresPrograms, ServerUser};
use model::excerpt::Excerpt;

/// How long we wait for a server whose owner was killed a moment ago.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest path that fits into `sockaddr_un.sun_path` with its final zero.
const MAX_SOCKET_PATH: usize = 107;
/// Most characters of the output of a program that an error quotes.
const MAX_LAST_CHARS: usize = 1000;

/// The paths of one server.
pub(super) struct ServerPaths {
    pub(super) base: PathBuf,
    pub(super) data: PathBuf,
    pub(super) sockets: PathBuf,
    pub(super) log: PathBuf,
    pub(super) lock: PathBuf,
    pub(super) remove_on_exit: Option<PathBuf>,
}

pub(super) fn create_temporary_paths(user: Option<&ServerUser>) -> Result<ServerPaths, PrivatePostgresError> {
    let name = format!("shepherd-postgres-{}", &Uuid::new_v4().simple().to_string()[..12]);
    // The server's user makes its directory itself, so that it can also remove it.
    let mut last = None;
    for parent in [std::env::temp_dir(), PathBuf::from("/tmp")] {
        let base = parent.join(&name);
        if socket_path_length(&base.join("socket")) > MAX_SOCKET_PATH {
            continue;
        }
        let made =
            programs::program_command(Path::new("/bin/mkdir"), user).args(["-m", "700"]).arg(&base).output();
        match made {
            Ok(output) if output.status.success() => {
                let places = paths_in(&base, Some(base.clone()));
                create_directory(&places.sockets, user)?;
                return Ok(places);
            }
            Ok(output) => last = Some((base, io::Error::other(last_lines(&output.stderr)))),
            Err(error) => last = Some((base, error)),
        }
    }
    let (path, error) =
        last.unwrap_or_else(|| (std::env::temp_dir(), io::Error::other("its path is too long for a socket")));
    Err(PrivatePostgresError::Io { operation: "making the directory", path, error })
}

pub(super) fn prepare_persistent_paths(
    directory: &Path,
    user: Option<&ServerUser>,
) -> Result<ServerPaths, PrivatePostgresError> {
    let is_new = !directory.exists();
    if is_new {
        if let Some(parent) = directory.parent() {
            fs::create_dir_all(parent).map_err(io_error("making the directory", parent))?;
        }
        create_directory(directory, user)?;
    }
    let base = fs::canonicalize(directory).map_err(io_error("opening the directory", directory))?;
    if let Some(user) = user {
        // The operating system itself decides: permission bits alone do not show it.
        let entered = programs::program_command(Path::new("/bin/sh"), Some(user))
            .args(["-c", "cd -- \"$1\"", "sh"])
            .arg(&base)
            .stderr(Stdio::null())
            .status()
            .map_err(io_error("entering", &base))?;
        if !entered.success() {
            if is_new {
                let _ = fs::remove_dir(&base);
            }
            return Err(PrivatePostgresError::Inaccessible { directory: base, user: user.name.clone() });
        }
    }
    let mut places = paths_in(&base, None);
    if socket_path_length(&places.sockets) > MAX_SOCKET_PATH {
        let short = create_temporary_paths(user)?;
        places.sockets = short.sockets;
        places.remove_on_exit = short.remove_on_exit;
    } else if !places.sockets.exists() {
        create_directory(&places.sockets, user)?;
    }
    Ok(places)
}

fn paths_in(base: &Path, remove: Option<PathBuf>) -> ServerPaths {
    ServerPaths {
        base: base.to_owned(),
        data: base.join("data"),
        sockets: base.join("socket"),
        log: base.join("server.log"),
        lock: base.join("lock"),
        remove_on_exit: remove,
    }
}

fn create_directory(path: &Path, user: Option<&ServerUser>) -> Result<(), PrivatePostgresError> {
    DirBuilder::new().mode(0o700).create(path).map_err(io_error("making the directory", path))?;
    if let Some(user) = user {
        chown(path, Some(user.uid), Some(user.gid)).map_err(io_error("giving away the directory", path))?;
    }
    Ok(())
}

/// Opens the lock file and takes its lock, which the guardian and the server then inherit.
pub(super) fn acquire_lock(places: &ServerPaths) -> Result<File, PrivatePostgresError> {
    let path = &places.lock;
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .map_err(io_error("opening the lock file", path))?;
    let until = Instant::now() + LOCK_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(POLL),
            Err(TryLockError::WouldBlock) => {
                return Err(PrivatePostgresError::InUse { directory: places.base.clone() });
            }
            Err(TryLockError::Error(error)) => return Err(io_error("locking", path)(error)),
        }
    }
}

/// The programs of the version that made `data`, or the newest when there is no data yet.
pub(super) fn choose_programs<'a>(
    data: &Path,
    found: &'a [PostgresPrograms],
) -> Result<&'a PostgresPrograms, PrivatePostgresError> {
    let made_by = fs::read_to_string(data.join("PG_VERSION")).ok().map(|text| text.trim().to_owned());
    let chosen = match &made_by {
        Some(version) => found.iter().rfind(|programs| programs.major.to_string() == *version),
        None => found.last(),
    };
    chosen.ok_or_else(|| PrivatePostgresError::OtherVersion {
        directory: data.to_owned(),
        made_by: made_by.unwrap_or_default(),
        found: found.iter().map(|programs| programs.major.to_string()).collect::<Vec<_>>().join(", "),
    })
}

/// Makes the data directory under another name first, so that an interrupted attempt is not taken for a complete one.
pub(super) fn run_initdb(
    places: &ServerPaths,
    options: &PrivatePostgresOptions,
    programs: &PostgresPrograms,
    user: Option<&ServerUser>,
) -> Result<(), PrivatePostgresError> {
    let unfinished = places.base.join("data.new");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(io_error("removing", &unfinished))?;
    }
    create_directory(&unfinished, user)?;
    let initdb = programs.path("initdb");
    let mut command = programs::program_command(&initdb, user);
    command.args(["--auth=trust", "--locale=C", "--encoding=UTF8", "--username", SUPERUSER, "--pgdata"]);
    command.arg(&unfinished).current_dir(&places.base);
    if options.storage == ServerStorage::Temporary {
        command.arg("--no-sync");
    }
    let output = command.output().map_err(io_error("running", &initdb))?;
    if !output.status.success() {
        return Err(PrivatePostgresError::Failed {
            program: "initdb",
            directory: places.data.clone(),
            output: last_lines(&output.stderr),
        });
    }
    fs::rename(&unfinished, &places.data).map_err(io_error("renaming", &unfinished))
}

/// Removes the process file of a server that has ended. We hold the lock, so no server of ours serves this directory;
/// one that a person started by hand still works in it.
pub(super) fn remove_stale_pid(data: &Path) -> Result<(), PrivatePostgresError> {
    let path = data.join("postmaster.pid");
    let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
    if let Some(pid) = text.lines().next().and_then(|line| line.trim().parse::<u32>().ok())
        && fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|works_in| works_in == data)
    {
        return Err(PrivatePostgresError::ServedByOther { directory: data.to_owned(), pid });
    }
    fs::remove_file(&path).map_err(io_error("removing", &path))
}

/// Retains one older log, so that the messages of a server that crashed survive its restart.
pub(super) fn rotate_log(path: &Path) -> Result<File, PrivatePostgresError> {
    if path.exists() {
        let older = path.with_extension("log.1");
        fs::rename(path, &older).map_err(io_error("renaming", path))?;
    }
    OpenOptions::new().create(true).append(true).open(path).map_err(io_error("opening the log", path))
}

pub(super) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PrivatePostgresError {
    move |error| PrivatePostgresError::Io { operation: doing, path: path.to_owned(), error }
}

fn socket_path_length(sockets: &Path) -> usize {
    sockets.as_os_str().len() + "/.s.PGSQL.".len() + PORT.to_string().len()
}

/// The last three lines of a program of PostgreSQL, as one line of limited length.
pub(super) fn last_lines(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" / ");
    let words = Excerpt::within(&last, MAX_LAST_CHARS);
    words.map_or_else(|| "it printed nothing".to_owned(), |words| words.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_of_a_program_are_one_line() {
        for (output, expected) in [
            ("", "it printed nothing"),
            ("\n \n", "it printed nothing"),
            ("one\ntwo\n\nthree\nfour\n", "two / three / four"),
            ("initdb: error: \u{1b}[31mno space\u{1b}[0m\n", "initdb: error: [31mno space [0m"),
        ] {
            assert_eq!(last_lines(output.as_bytes()), expected, "{output:?}");
        }
        assert_eq!(last_lines(&vec![b'x'; 100_000]).chars().count(), MAX_LAST_CHARS + 1);
    }
}
