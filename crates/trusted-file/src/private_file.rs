//! Key and password files: readable and writable by their owner alone.
//!
//! A file that root owns may be readable for a group if another user reads it (`root:shepherd 0640`): that is how a user
//! who must not change a key is allowed to read it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Permission bits of the group and of all others.
const OTHERS: u32 = 0o077;
/// Permission of the group to read.
const GROUP_READ: u32 = 0o040;
/// Larger than any key or password; a larger file, such as a disk image, is a mistake.
const MAX_BYTES: u64 = 1 << 20;

/// Why a private file is not used. `what` names it for people: `the SSH key`.
#[derive(Debug, thiserror::Error)]
pub enum PrivateFileError {
    /// The file cannot be read.
    #[error("{what} {} cannot be read: {source}", path.display())]
    Read {
        /// The name of the file for people.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The path leads to a directory, a device, a pipe, ….
    #[error("{what} {} is not a regular file", path.display())]
    NotAFile {
        /// The name of the file for people.
        what: &'static str,
        /// The path of what is not a file.
        path: PathBuf,
    },
    /// The file has more bytes than a key or a password can have.
    #[error("{what} {} is larger than {} bytes; name the right file", path.display(), MAX_BYTES)]
    TooLarge {
        /// The name of the file for people.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
    },
    /// Another user owns the file, and can read and change it.
    #[error("{what} {} belongs to another user (id {owner}), who can read and change it; run: chown {user} {}", path.display(), path.display())]
    ForeignOwner {
        /// The name of the file for people.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// The user id of the owner.
        owner: u32,
        /// The user id of this process.
        user: u32,
    },
    /// The permission bits let other users read or write the file.
    #[error("{what} {} can be {} by other users (mode {mode:04o}); run: chmod {remedy} {}", path.display(), describe_access(*mode), path.display())]
    OpenToOthers {
        /// The name of the file for people.
        what: &'static str,
        /// The path of the file.
        path: PathBuf,
        /// Its permission bits, without the type of the file.
        mode: u32,
        /// Permission bits that are safe, as `chmod` reads them.
        remedy: &'static str,
    },
}

impl PrivateFileError {
    /// Whether there is no such file.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Reads a private file whole. `what` names it in errors.
pub fn read_private_file(what: &'static str, path: &Path) -> Result<Vec<u8>, PrivateFileError> {
    let failed = |source| PrivateFileError::Read { what, path: path.to_owned(), source };
    // Without `NONBLOCK` opening a named pipe would wait for its writer.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    // Of the opened file: the path may lead to another one by now.
    check_permissions(what, path, &file.metadata().map_err(failed)?)?;
    read_bounded(&file)
        .map_err(failed)?
        .ok_or_else(|| PrivateFileError::TooLarge { what, path: path.to_owned() })
}

/// The content of a file; `None` if it is too large.
fn read_bounded(file: &File) -> io::Result<Option<Vec<u8>>> {
    let mut content = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut content)?;
    Ok((content.len() as u64 <= MAX_BYTES).then_some(content))
}

fn check_permissions(what: &'static str, path: &Path, metadata: &Metadata) -> Result<(), PrivateFileError> {
    let path = || path.to_owned();
    if !metadata.is_file() {
        return Err(PrivateFileError::NotAFile { what, path: path() });
    }
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    let user = rustix::process::geteuid().as_raw();
    match find_exposure(owner, mode, user) {
        None => Ok(()),
        Some(Exposure::Owner) => Err(PrivateFileError::ForeignOwner { what, path: path(), owner, user }),
        Some(Exposure::Mode) => {
            let remedy = if owner == user { "600" } else { "640" };
            Err(PrivateFileError::OpenToOthers { what, path: path(), mode, remedy })
        }
    }
}

/// What exposes a private file to other users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exposure {
    /// Another user owns it.
    Owner,
    /// Its permission bits let other users read or change it.
    Mode,
}

/// Decides whether `user` may trust a private file with this owner and these permission bits.
fn find_exposure(owner: u32, mode: u32, user: u32) -> Option<Exposure> {
    if owner != user && owner != 0 {
        Some(Exposure::Owner)
    } else if mode & (if owner == user { OTHERS } else { OTHERS & !GROUP_READ }) != 0 {
        Some(Exposure::Mode)
    } else {
        None
    }
}

/// Names what others can do with a file of this mode.
fn describe_access(mode: u32) -> &'static str {
    match (mode & 0o044 != 0, mode & 0o022 != 0) {
        (true, true) => "read and written",
        (false, true) => "written",
        (true, false) => "read",
        (false, false) => "executed",
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_the_owner_and_root_may_have_access() {
        for (owner, mode, user, expected) in [
            (7, 0o600, 7, None),
            (7, 0o400, 7, None),
            (0, 0o600, 7, None),
            (0, 0o600, 0, None),
            (8, 0o600, 7, Some(Exposure::Owner)),
            (8, 0o600, 0, Some(Exposure::Owner)),
            (7, 0o640, 7, Some(Exposure::Mode)),
            (7, 0o620, 7, Some(Exposure::Mode)),
            (7, 0o604, 7, Some(Exposure::Mode)),
            (7, 0o602, 7, Some(Exposure::Mode)),
            (7, 0o610, 7, Some(Exposure::Mode)),
            (0, 0o644, 7, Some(Exposure::Mode)),
            (0, 0o640, 7, None),
            (0, 0o440, 7, None),
            (0, 0o660, 7, Some(Exposure::Mode)),
            (0, 0o640, 0, Some(Exposure::Mode)),
        ] {
            assert_eq!(find_exposure(owner, mode, user), expected, "{owner} {mode:o} {user}");
        }
    }

    fn refusal(path: &Path) -> String {
        let error = read_private_file("the SSH key", path).unwrap_err().to_string();
        error.replace(path.to_str().unwrap(), "KEY")
    }

    #[test]
    fn exposed_file_is_refused_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, "secret").unwrap();
        for (mode, expected) in [
            (0o644, "the SSH key KEY can be read by other users (mode 0644); run: chmod 600 KEY"),
            (0o622, "the SSH key KEY can be written by other users (mode 0622); run: chmod 600 KEY"),
            (0o666, "the SSH key KEY can be read and written by other users (mode 0666); run: chmod 600 KEY"),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(refusal(&path), expected);
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_private_file("the SSH key", &path).unwrap(), b"secret");
    }

    #[test]
    fn what_is_no_key_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(refusal(directory.path()), "the SSH key KEY is not a regular file");
        let pipe = directory.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(refusal(&pipe), "the SSH key KEY is not a regular file");
        let absent = directory.path().join("absent");
        let error = read_private_file("the SSH key", &absent).unwrap_err();
        assert!(error.is_not_found(), "{error}");
        let large = directory.path().join("large");
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&large).unwrap();
        // A sparse file: it has this size without using space.
        file.set_len(1 << 40).unwrap();
        assert_eq!(refusal(&large), "the SSH key KEY is larger than 1048576 bytes; name the right file");
    }
}
