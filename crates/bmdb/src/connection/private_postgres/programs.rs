//! Finding PostgreSQL server programs and the user to run them as.
//!
//! Distributions install `initdb` and `postgres` outside the search path, in a directory per major version. A data
//! directory can only be served by the major version that made it, so the result is a list, newest last, from which the
//! caller chooses.
//!
//! `initdb` and `postgres` refuse to run as root. Root therefore runs them as another user: the one that the server's
//! package made, else `nobody`.

use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hardening::file_limit::UsualFileLimit as _;

/// A directory that contains `initdb` and `postgres`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PostgresPrograms {
    /// Path of that directory.
    pub directory: PathBuf,
    /// The server's major version, such as 15.
    pub major: u32,
}

/// The user that the server runs as when we are root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerUser {
    /// The login name, for messages.
    pub name: String,
    /// The numeric user id.
    pub uid: u32,
    /// The numeric id of the user's first group.
    pub gid: u32,
}

impl PostgresPrograms {
    /// The path of one program.
    #[must_use]
    pub fn path(&self, program: &str) -> PathBuf {
        self.directory.join(program)
    }

    /// Whether the server can load the module that counts statements.
    #[must_use]
    pub(crate) fn has_pg_stat_statements(&self) -> bool {
        let mut libraries = vec![
            self.directory.join("../lib"),
            self.directory.join("../lib/postgresql"),
            self.directory.join("../lib64/postgresql"),
        ];
        libraries.extend(output_of(&self.path("pg_config"), "--pkglibdir").map(PathBuf::from));
        libraries.iter().any(|library| library.join("pg_stat_statements.so").exists())
    }
}

/// Finds every usable directory of server programs, oldest version first.
///
/// If `SHEPHERD_POSTGRES_BIN` is set, no other place is searched, because a person who names a directory wants that one
/// or an error.
#[must_use]
pub fn find_programs() -> Vec<PostgresPrograms> {
    let mut found: Vec<PostgresPrograms> = Vec::new();
    for directory in search_directories() {
        let postgres = directory.join("postgres");
        if !directory.join("initdb").is_file() || !postgres.is_file() {
            continue;
        }
        let Some(major) = output_of(&postgres, "--version").as_deref().and_then(major_version) else {
            continue;
        };
        if !found.iter().any(|known| known.directory == directory) {
            found.push(PostgresPrograms { directory, major });
        }
    }
    found.sort_by_key(|programs| programs.major);
    found
}

/// The directories that [`find_programs`] searches.
#[must_use]
pub fn search_directories() -> Vec<PathBuf> {
    if let Some(named) = env::var_os("SHEPHERD_POSTGRES_BIN") {
        return vec![PathBuf::from(named)];
    }
    let mut places: Vec<PathBuf> =
        env::var_os("PATH").iter().flat_map(|path| env::split_paths(path).collect::<Vec<_>>()).collect();
    places.retain(|place| place.is_absolute());
    places.extend(output_of(Path::new("pg_config"), "--bindir").map(PathBuf::from));
    places
        .extend(version_directories(Path::new("/usr/lib/postgresql"), "").map(|version| version.join("bin")));
    places.extend(version_directories(Path::new("/usr"), "pgsql-").map(|version| version.join("bin")));
    places
}

/// The user to run the server as: `None` when we are an ordinary user and run it as ourselves.
///
/// Fails when we are root and no other user is known.
pub fn server_user() -> Result<Option<ServerUser>, NoServerUser> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    ["postgres", "nobody"]
        .iter()
        .find_map(|name| parse_passwd_user(&passwd, name))
        .map(Some)
        .ok_or(NoServerUser)
}

/// We are root and no other user is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoServerUser;

/// Prepares a program to run as `user`, with nothing of our environment but the search path: the
/// variables that PostgreSQL reads (`PGDATA`, `PGPORT`, …) would change what it does. It has the usual limit of open files,
/// which we may have raised for us.
#[must_use]
pub fn program_command(program: &Path, user: Option<&ServerUser>) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("LC_ALL", "C").env("TZ", "UTC").stdin(Stdio::null());
    command.env("PATH", env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into()));
    hardening::restore_core_limit(command.usual_file_limit());
    if let Some(user) = user {
        command.uid(user.uid).gid(user.gid);
    }
    command
}

fn version_directories(parent: &Path, prefix: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(parent).ok().into_iter().flatten().flatten();
    entries
        .filter(move |entry| {
            let name = entry.file_name();
            name.to_str().and_then(|name| name.strip_prefix(prefix)).is_some_and(|v| v.parse::<u32>().is_ok())
        })
        .map(|entry| entry.path())
}

fn output_of(program: &Path, argument: &str) -> Option<String> {
    let mut command = Command::new(program);
    command.arg(argument).stdin(Stdio::null()).stderr(Stdio::null());
    let output = hardening::restore_core_limit(command.usual_file_limit()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Reads `postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)` and `… 19beta1`.
fn major_version(text: &str) -> Option<u32> {
    let version = text.split_once("(PostgreSQL) ")?.1;
    let digits = version.find(|c: char| !c.is_ascii_digit()).map_or(version, |end| &version[..end]);
    digits.parse().ok()
}

fn parse_passwd_user(passwd: &str, name: &str) -> Option<ServerUser> {
    let fields: Vec<&str> =
        passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|f| f[0] == name)?;
    let uid = fields.get(2)?.parse().ok()?;
    let gid = fields.get(3)?.parse().ok()?;
    (uid != 0).then(|| ServerUser { name: name.to_owned(), uid, gid })
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// Of `initdb`, of the server and of the shells around them.
    #[test]
    fn program_has_the_usual_limit_of_open_files() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let output = program_command(Path::new("/bin/sh"), None).args(["-c", "ulimit -Sn"]).output().unwrap();
        let expected = maximum.map_or(1024, |most| most.min(1024)).to_string();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected);
    }

    #[test]
    fn major_version_is_read_from_what_distributions_print() {
        for (text, expected) in [
            ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", Some(15)),
            ("postgres (PostgreSQL) 18.4", Some(18)),
            ("postgres (PostgreSQL) 19beta1", Some(19)),
            ("postgres (PostgreSQL) devel", None),
            ("something else 15", None),
        ] {
            assert_eq!(major_version(text), expected, "{text}");
        }
    }

    #[test]
    fn a_user_is_taken_from_the_password_file_and_never_root() {
        let passwd = "root:x:0:0::/root:/bin/sh\npostgres:x:101:104::/var/lib/postgresql:/bin/bash\nshort\nodd:x:a:b\n";
        assert_eq!(
            parse_passwd_user(passwd, "postgres"),
            Some(ServerUser { name: "postgres".to_owned(), uid: 101, gid: 104 })
        );
        for name in ["root", "nobody", "short", "odd"] {
            assert_eq!(parse_passwd_user(passwd, name), None, "{name}");
        }
    }
}
