//! The etcd program of this host: its path, its version, and the flags that the version supports.
//!
//! etcd 3.4 to 3.7 are supported. They take the same flags except one, which 3.7 knows by another name only. So the
//! program's version is read before it is started.
//!
//! # What decides
//!
//! `flags_of` decides by the version alone, and [`running_flags`] by the process that already runs; both are pure. A
//! renamed flag on the command line changes the digest of the specification, and another digest restarts the process.
//! Hence:
//!
//! * Up to 3.6 the older name is used, although 3.6 knows both: an update of the role server restarts no etcd.
//! * A running etcd is adopted with either name, with or without the list of revoked peers, and the program's version is
//!   not read. Replacing the program does not restart anything either. The new program runs from the next start on. An
//!   etcd that does not read the list is restarted later, in turn ([`peer_restart`](super::peer_restart)).
//!
//! # The address of a peer
//!
//! A member that accepts a connection can compare the source with the addresses in the peer's certificate. This is turned
//! off, for every version, because it needs certificates that name all addresses of a member, and there is none of which
//! that is known:
//!
//! * A certificate names the one address at which the others connect to the member. Curators have a proof of that one, and
//!   of no other address of the host. What a host reports of its further addresses proves nothing.
//! * The route decides from which address a host with several of them connects. Only 3.6 and later can bind connections to
//!   the advertised address, by a gate for features, and not on the loopback interface. 3.4 cannot.
//! * The member that accepts decides, for all of its peers at once, and only at its start. Each change of the addresses
//!   of one host would restart all other members, and until then, that host would be cut off from the quorum.
//!
//! So a copied pair opens a member's port from any address. The comparison would change little about that: the disk of a
//! member has the key of the authority beside the pair, and that key signs pairs for any address. What ends a pair is the
//! list of revoked peers, and what ends the key is a replacement of the authority. The member that connects does compare
//! the address of the other end with its certificate, and no flag turns that off.
//!
//! # When the version is read
//!
//! Before each start of etcd, and before it is stopped for a restart. That is usually once in the life of a machine. A cache of the
//! version would save some milliseconds, and would be wrong if the program is a script that runs another file.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use hardening::file_limit::UsualFileLimit as _;
use model::excerpt::Excerpt;
use rustix::process::{Pid, Signal, kill_process_group};
use semver::Version;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

/// How long the program may take to print its version.
pub const VERSION_DEADLINE: Duration = Duration::from_secs(10);
/// Bytes that are read at most of each output of the program.
const VERSION_BYTES: u64 = 4096;
/// Characters of the output that an error quotes at most.
const QUOTED_CHARACTERS: usize = 120;
/// The oldest version that has the flag that a peer with several addresses needs.
const OLDEST: Version = Version::new(3, 4, 16);
/// The first version that no longer accepts the experimental name of that flag.
const NO_EXPERIMENTAL_FLAGS: Version = Version::new(3, 7, 0);

/// Names of the flags that differ between versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    /// The names that 3.4 to 3.6 accept.
    Experimental,
    /// The names that 3.6 and later accept.
    Stable,
}

impl Flags {
    /// All sets of flag names.
    pub const ALL: [Self; 2] = [Self::Experimental, Self::Stable];

    /// The flag by which a member does not compare the address of a peer with those in the peer's certificate.
    #[must_use]
    pub const fn skip_client_san_verification(self) -> &'static str {
        match self {
            Self::Experimental => "--experimental-peer-skip-client-san-verification",
            Self::Stable => "--peer-skip-client-san-verification",
        }
    }
}

/// Why etcd cannot be started. The text of each error is a sentence that names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The file does not exist.
    #[error(
        "there is no program {}: install etcd, 3.4.16 or later, where the role server finds it",
        .0.display()
    )]
    Missing(PathBuf),
    /// The file exists, but could not be executed.
    #[error("{} cannot be started ({source}): install etcd, 3.4.16 or later, in its place", program.display())]
    NotStarted {
        /// Path of the program etcd.
        program: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// It did not end before the deadline, and was killed.
    #[error(
        "{} --version did not end within {} s and was killed: find out what it waits for, or install etcd, 3.4.16 or \
         later, in its place",
        program.display(), within.as_secs_f64()
    )]
    Hangs {
        /// Path of the program etcd.
        program: PathBuf,
        /// The deadline that it missed.
        within: Duration,
    },
    /// It printed no version, or failed.
    #[error(
        "{} --version printed no version of etcd ({status}, {printed:?}): install etcd, 3.4.16 or later, in its place",
        program.display()
    )]
    NoVersion {
        /// Path of the program etcd.
        program: PathBuf,
        /// Exit status of the program.
        status: ExitStatus,
        /// The beginning of its output, up to 120 characters.
        printed: String,
    },
    /// It is older than 3.4.16 and lacks a required flag.
    #[error("{} is etcd {version}, which is too old: install 3.4.16 or later", program.display())]
    TooOld {
        /// Path of the program etcd.
        program: PathBuf,
        /// The version that it printed.
        version: Version,
    },
}

/// Path of the program etcd: the first one in `PATH`, or else `/usr/bin/etcd`.
#[must_use]
pub fn program() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|directory| directory.join("etcd"));
    let mut found = found.filter(|file| file.is_absolute() && file.is_file());
    found.next().unwrap_or_else(|| PathBuf::from("/usr/bin/etcd"))
}

/// The flags for a version; `None` if the version is too old. A version newer than the last supported one gets the
/// flags of that one. A suffix such as `-rc.1` in `3.7.0-rc.1` is ignored, because a pre-release has the flags of its
/// release.
fn flags_of(version: &Version) -> Option<Flags> {
    let release = Version::new(version.major, version.minor, version.patch);
    if release < OLDEST {
        None
    } else if release < NO_EXPERIMENTAL_FLAGS {
        Some(Flags::Experimental)
    } else {
        Some(Flags::Stable)
    }
}

/// The flags that an etcd already runs with, and whether it reads a list of revoked peers; `None` if its specification
/// differs otherwise, so that it has to be restarted.
///
/// `running` is the digest of the running child, and `digest` computes the digest of the specification with these
/// flags, with or without the list.
#[must_use]
pub fn running_flags(running: &str, digest: impl Fn(Flags, bool) -> String) -> Option<(Flags, bool)> {
    let mut forms = Flags::ALL.into_iter().flat_map(|flags| [(flags, true), (flags, false)]);
    forms.find(|(flags, revocation_list)| digest(*flags, *revocation_list) == running)
}

/// Parses the output of `etcd --version`: `etcd Version: 3.7.3` and further lines. The suffix of a pre-release or of a
/// distribution is kept, because it decides about faults; one that is no semantic version is left out.
fn parse_version(printed: &str) -> Option<Version> {
    let version = printed.lines().find_map(|line| line.strip_prefix("etcd Version:"))?.trim();
    let numbers = version.split(['-', '+']).next()?;
    Version::parse(version).or_else(|_| Version::parse(numbers)).ok()
}

/// Reads the program's version and returns the flags for it.
pub async fn ask_flags(program: &Path, deadline: Duration) -> Result<Flags, ProgramError> {
    ask_program(program, deadline).await.map(|(_, flags)| flags)
}

/// Reads the program's version, and returns it with the flags for it.
pub async fn ask_program(program: &Path, deadline: Duration) -> Result<(Version, Flags), ProgramError> {
    let version = ask_version(program, deadline).await?;
    let flags = flags_of(&version);
    tracing::info!(program = %program.display(), %version, ?flags, "the program etcd");
    match flags {
        Some(flags) => Ok((version, flags)),
        None => Err(ProgramError::TooOld { program: program.to_owned(), version }),
    }
}

/// Runs `etcd --version` and parses the output.
pub async fn ask_version(program: &Path, deadline: Duration) -> Result<Version, ProgramError> {
    let named = || program.to_owned();
    let mut command = Command::new(program);
    // In its own process group, which is killed at the deadline. With an empty environment, like the real start.
    command.arg("--version").env_clear().current_dir("/").process_group(0).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    hardening::restore_core_limit(command.as_std_mut().usual_file_limit());
    let mut child = command.spawn().map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ProgramError::Missing(named()),
        _ => ProgramError::NotStarted { program: named(), source },
    })?;
    let group = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let answer = async {
        let (output, errors) = tokio::join!(read_text(output), read_text(errors));
        child.wait().await.map(|status| (status, output, errors))
    };
    let answered = tokio::time::timeout(deadline, answer).await;
    let Ok(answered) = answered else {
        if let Some(group) = group {
            // The group leader has not been waited for yet, so its number has not been reused.
            let _ = kill_process_group(group, Signal::KILL);
        }
        return Err(ProgramError::Hangs { program: named(), within: deadline });
    };
    let (status, output, errors) =
        answered.map_err(|source| ProgramError::NotStarted { program: named(), source })?;
    match parse_version(&output) {
        Some(version) if status.success() => Ok(version),
        _ => {
            let printed = if output.trim().is_empty() { errors } else { output };
            let printed = Excerpt::within(&printed, QUOTED_CHARACTERS)
                .map_or_else(String::new, |words| words.to_string());
            Err(ProgramError::NoVersion { program: named(), status, printed })
        }
    }
}

/// Reads the output up to the limit. A read error counts as the end.
async fn read_text(from: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        let _ = from.take(VERSION_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn version(text: &str) -> Version {
        parse_version(&format!("etcd Version: {text}")).unwrap()
    }

    #[test]
    fn flags_follow_from_the_version() {
        for (text, flags) in [
            ("2.3.8", None),
            ("3.3.27", None),
            ("3.4.15", None),
            ("3.4.16", Some(Flags::Experimental)),
            ("3.4.23", Some(Flags::Experimental)),
            ("3.5.0", Some(Flags::Experimental)),
            ("3.5.21", Some(Flags::Experimental)),
            ("3.6.0", Some(Flags::Experimental)),
            ("3.6.99", Some(Flags::Experimental)),
            ("3.7.0-rc.1", Some(Flags::Stable)),
            ("3.7.3", Some(Flags::Stable)),
            ("3.10.0", Some(Flags::Stable)),
            ("4.0.0", Some(Flags::Stable)),
        ] {
            assert_eq!(flags_of(&version(text)), flags, "{text}");
        }
    }

    #[test]
    fn version_is_read_and_nothing_is_guessed() {
        let debian = "etcd Version: 3.4.23\nGit SHA: Not provided (use ./build instead of go build)\nGo Version: go1.19.8\n";
        assert_eq!(parse_version(debian).unwrap().to_string(), "3.4.23");
        assert_eq!(
            parse_version("a warning\netcd Version: 3.7.0-rc.1+dfsg").unwrap().to_string(),
            "3.7.0-rc.1+dfsg"
        );
        assert_eq!(parse_version("etcd Version: 3.4.23-4+deb12u1~x").unwrap().to_string(), "3.4.23");
        for text in ["", "etcd", "3.7.3", "etcd Version: ", "etcd Version: 3.7", "etcd Version: 3.7.3.1"] {
            assert_eq!(parse_version(text), None, "{text}");
        }
        for text in ["etcd Version: three", "etcd Version: 3.-7.3", "etcdctl version: 3.7.3"] {
            assert_eq!(parse_version(text), None, "{text}");
        }
    }

    #[test]
    fn etcd_that_runs_is_known_by_either_name() {
        let digest =
            |flags: Flags, listed: bool| format!("{} {listed}", flags.skip_client_san_verification());
        for flags in Flags::ALL {
            for listed in [true, false] {
                assert_eq!(running_flags(&digest(flags, listed), digest), Some((flags, listed)));
            }
        }
        assert_eq!(running_flags("another", digest), None);
    }

    /// Creates an executable script in its own directory.
    fn script(text: &str) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("etcd");
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        (directory, path)
    }

    async fn ask(text: &str, deadline: Duration) -> Result<Flags, String> {
        let (_directory, path) = script(text);
        // Another test may fork while this file is open for writing, and the kernel executes no file that is open for
        // writing.
        loop {
            match ask_flags(&path, deadline).await {
                Err(ProgramError::NotStarted { source, .. })
                    if source.kind() == io::ErrorKind::ExecutableFileBusy => {}
                answered => return answered.map_err(|error| error.to_string()),
            }
        }
    }

    #[tokio::test]
    async fn program_is_queried_and_its_failure_is_a_sentence() {
        let long = Duration::from_mins(5);
        let says = |text: &str| format!("#!/bin/sh\n[ \"$*\" = --version ] || exit 9\necho '{text}'\n");
        assert_eq!(ask(&says("etcd Version: 3.6.1"), long).await, Ok(Flags::Experimental));
        assert_eq!(ask(&says("etcd Version: 3.7.3"), long).await, Ok(Flags::Stable));
        let message = ask(&says("etcd Version: 3.3.1"), long).await.unwrap_err();
        assert!(message.ends_with("is etcd 3.3.1, which is too old: install 3.4.16 or later"), "{message}");
        let message = ask(&says("hello"), long).await.unwrap_err();
        assert!(
            message.contains("printed no version of etcd (exit status: 0, \"hello\"): install"),
            "{message}"
        );
        let message =
            ask("#!/bin/sh\necho etcd Version: 3.7.3\necho broken >&2\nexit 3\n", long).await.unwrap_err();
        assert!(message.contains("(exit status: 3, \"etcd Version: 3.7.3\")"), "{message}");
        let message = ask("#!/bin/sh\necho broken >&2\nexit 3\n", long).await.unwrap_err();
        assert!(message.contains("(exit status: 3, \"broken\")"), "{message}");
        let message = ask("#!/nowhere/sh\n", long).await.unwrap_err();
        assert!(message.contains("there is no program"), "{message}");
        let (directory, path) = script("");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let message = ask_flags(&path, long).await.unwrap_err().to_string();
        assert!(message.contains("cannot be started (Permission denied"), "{message}");
        let message = ask_flags(&directory.path().join("no"), long).await.unwrap_err().to_string();
        assert!(
            message.starts_with("there is no program /") && message.contains("/no: install etcd"),
            "{message}"
        );
    }

    #[tokio::test]
    async fn program_that_hangs_is_killed_with_all_that_it_started_and_one_that_floods_is_cut_off() {
        let place = tempfile::tempdir().unwrap();
        let pid = place.path().join("pid");
        let hangs =
            format!("#!/bin/sh\nsleep 600 &\necho $! > {0}.new; mv {0}.new {0}\nwait\n", pid.display());
        let text = ask(&hangs, Duration::from_secs(2)).await.unwrap_err();
        assert!(text.contains("--version did not end within 2 s and was killed"), "{text}");
        // If the deadline came first, the script has not started anything.
        if let Ok(pid) = std::fs::read_to_string(&pid) {
            let stat = format!("/proc/{}/stat", pid.trim());
            let runs = || std::fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z "));
            for _ in 0..30_000 {
                if !runs() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert!(!runs(), "it goes on");
        }
        let floods = ask("#!/bin/sh\nwhile :; do echo no version; done\n", Duration::from_mins(5)).await;
        let text = floods.unwrap_err();
        assert!(text.contains("printed no version of etcd"), "{text}");
    }
}
