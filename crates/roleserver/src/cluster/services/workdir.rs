//! Prepare a service's working directory and files without following links.
//!
//! The directory belongs to the user of the service, who may put links to anywhere in it, while this process writes
//! into it as root. So no path is resolved through its content: each component of a path is opened relative to the one
//! before, and a link is an error. A file is written beside its place and renamed, which replaces a link instead of
//! following it.
//!
//! A service that runs as root never gets the directory of another user: that user could have left a program, a
//! configuration or a link for it. The former directory is set aside, as [`former_workdir`], until the service is removed.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::child::spec::User;

/// A file that is written into a directory.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct WorkdirFile {
    /// Path relative to the directory.
    pub path: String,
    /// Content of the file.
    pub contents: String,
    /// Permission bits, such as 0o600.
    pub mode: u32,
}

/// Why a file could not be written or removed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path:?} in {directory} failed: {source}")]
pub struct WorkdirError {
    operation: &'static str,
    path: String,
    directory: String,
    source: Error,
}

/// Creates the directory, accessible to this user alone, writes the files, and removes those of `before` that are not
/// among them. A directory of another user is set aside if this one is root. Blocks.
pub fn prepare_workdir(
    directory: &Path,
    owner: User,
    files: &[WorkdirFile],
    before: &BTreeSet<String>,
) -> Result<(), WorkdirError> {
    let failed = |doing: &'static str, path: &str| {
        let (path, directory) = (path.to_owned(), directory.display().to_string());
        move |source: Error| WorkdirError { operation: doing, path, directory, source }
    };
    let root = open_workdir(directory, owner).map_err(failed("making the directory", "."))?;
    for file in files {
        write_file(root.as_fd(), file, owner).map_err(failed("writing", &file.path))?;
    }
    let now: BTreeSet<&str> = files.iter().map(|file| file.path.as_str()).collect();
    for path in before.iter().filter(|path| !now.contains(path.as_str())) {
        remove_file(root.as_fd(), path).map_err(failed("removing", path))?;
    }
    Ok(())
}

/// Creates a hard link to a file in an existing directory, which the user of the service can execute but not change.
/// Blocks.
pub fn link_file(directory: &Path, name: &str, file: &Path) -> Result<(), WorkdirError> {
    let link = || -> Result<(), Error> {
        let root = rustix::fs::open(directory, directory_flags(), Mode::empty())?;
        match rustix::fs::unlinkat(&root, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(rustix::fs::linkat(rustix::fs::CWD, file, &root, name, AtFlags::empty())?)
    };
    link().map_err(|source| WorkdirError {
        operation: "linking",
        path: name.to_owned(),
        directory: directory.display().to_string(),
        source,
    })
}

/// Where a directory is set aside. The names of services have no second underscore, so it is the directory of no service.
#[must_use]
pub fn former_workdir(directory: &Path) -> PathBuf {
    let mut path = directory.as_os_str().to_owned();
    path.push("_former");
    PathBuf::from(path)
}

fn open_workdir(directory: &Path, owner: User) -> Result<OwnedFd, Error> {
    if let Some(above) = directory.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(above)?;
    }
    let mut root = create_workdir(directory)?;
    if must_set_aside(rustix::fs::fstat(&root)?.st_uid, owner.uid, rustix::process::geteuid().is_root()) {
        let former = former_workdir(directory);
        match fs::remove_dir_all(&former) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::rename(directory, &former)?;
        tracing::warn!(
            former = %former.display(),
            "the service runs as root now; the directory of its former user was set aside"
        );
        root = create_workdir(directory)?;
    }
    set_owner(root.as_fd(), owner)?;
    Ok(root)
}

fn create_workdir(directory: &Path) -> Result<OwnedFd, Error> {
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    Ok(rustix::fs::open(directory, directory_flags(), Mode::empty())?)
}

/// Whether a directory of the user `former` is not for a service of the user `next`. A process that is not root gives
/// directories to nobody else.
const fn must_set_aside(former: u32, next: u32, is_root: bool) -> bool {
    is_root && next == 0 && former != 0
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// Changes the owner. A process that is not root owns what it creates, and cannot change that.
fn set_owner(what: impl AsFd, owner: User) -> Result<(), Error> {
    if rustix::process::geteuid().is_root() {
        rustix::fs::fchown(what, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?;
    }
    Ok(())
}

/// The directories of a path, and its file name.
fn split_path(path: &str) -> Result<(Vec<&str>, &str), Error> {
    let plain = path.split('/').all(|word| !matches!(word, "" | "." | "..")) && !path.contains('\0');
    let (above, name) = path.rsplit_once('/').map_or(("", path), |(above, name)| (above, name));
    if !plain {
        return Err(Error::new(ErrorKind::InvalidInput, "it leads out of the directory"));
    }
    Ok((above.split('/').filter(|word| !word.is_empty()).collect(), name))
}

fn open_subdirectory(into: impl AsFd, name: &str) -> Result<OwnedFd, Error> {
    rustix::fs::openat(into, name, directory_flags(), Mode::empty()).map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => {
            let why = format!("{name:?} on the way is a link or a file, and only directories are entered");
            Error::new(ErrorKind::NotADirectory, why)
        }
        other => other.into(),
    })
}

fn write_file(root: impl AsFd, file: &WorkdirFile, owner: User) -> Result<(), Error> {
    let (directories, name) = split_path(&file.path)?;
    let mut at = root.as_fd().try_clone_to_owned()?;
    for directory in directories {
        let made = match rustix::fs::mkdirat(&at, directory, Mode::from_raw_mode(0o700)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        at = open_subdirectory(&at, directory)?;
        if made {
            set_owner(&at, owner)?;
        }
    }
    let beside = format!(".roleserver-{:016x}", rand::random::<u64>());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut written = File::from(rustix::fs::openat(&at, &beside, flags, Mode::from_raw_mode(0o600))?);
    let done = written
        .write_all(file.contents.as_bytes())
        .and_then(|()| set_owner(&written, owner))
        .and_then(|()| Ok(rustix::fs::fchmod(&written, Mode::from_raw_mode(file.mode))?))
        .and_then(|()| Ok(rustix::fs::renameat(&at, &beside, &at, name)?));
    done.inspect_err(|_| {
        // A failure to clean up adds nothing to the first error.
        let _ = rustix::fs::unlinkat(&at, &beside, AtFlags::empty());
    })
}

fn remove_file(root: impl AsFd, path: &str) -> Result<(), Error> {
    let (directories, name) = split_path(path)?;
    let mut at = root.as_fd().try_clone_to_owned()?;
    for directory in directories {
        at = match open_subdirectory(&at, directory) {
            Ok(next) => next,
            // If something else is there now, the service's user has removed the file.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
    }
    match rustix::fs::unlinkat(&at, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR | Errno::PERM) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    fn owner() -> User {
        let root = rustix::process::geteuid().is_root();
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        if root { User { uid: 65_533, gid: 65_534 } } else { User { uid: own.0, gid: own.1 } }
    }

    fn file(path: &str, contents: &str, mode: u32) -> WorkdirFile {
        WorkdirFile { path: path.to_owned(), contents: contents.to_owned(), mode }
    }

    #[test]
    fn files_are_written_as_declared_and_belong_to_the_user() {
        let above = tempfile::tempdir().unwrap();
        let directory = above.path().join("services/web");
        let files = [file("a", "one", 0o600), file("etc/web/conf", "two", 0o644)];
        prepare_workdir(&directory, owner(), &files, &BTreeSet::new()).unwrap();
        for (path, contents, mode) in [("a", "one", 0o600), ("etc/web/conf", "two", 0o644)] {
            let path = directory.join(path);
            let data = fs::metadata(&path).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), contents);
            assert_eq!(
                (data.permissions().mode() & 0o777, data.uid(), data.gid()),
                (mode, owner().uid, owner().gid)
            );
        }
        assert_eq!(fs::metadata(directory.join("etc/web")).unwrap().uid(), owner().uid);
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);

        // Written again: replaced. Not declared any more: removed. The service's own file: kept.
        fs::write(directory.join("own"), "data").unwrap();
        let before = BTreeSet::from(["a".to_owned(), "etc/web/conf".to_owned(), "was/never".to_owned()]);
        prepare_workdir(&directory, owner(), &[file("a", "three", 0o400)], &before).unwrap();
        assert_eq!(fs::read_to_string(directory.join("a")).unwrap(), "three");
        assert!(!directory.join("etc/web/conf").exists() && directory.join("own").exists());
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 3, "nothing half-done");
    }

    #[test]
    fn links_lead_nowhere() {
        let above = tempfile::tempdir().unwrap();
        let (directory, outside) = (above.path().join("web"), above.path().join("outside"));
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("passwd"), "of the host").unwrap();
        prepare_workdir(&directory, owner(), &[], &BTreeSet::new()).unwrap();
        symlink(&outside, directory.join("etc")).unwrap();
        symlink(outside.join("passwd"), directory.join("conf")).unwrap();
        let error = prepare_workdir(&directory, owner(), &[file("etc/passwd", "x", 0o600)], &BTreeSet::new())
            .unwrap_err();
        assert!(error.to_string().contains("is a link or a file"), "{error}");
        prepare_workdir(&directory, owner(), &[file("conf", "ours", 0o600)], &BTreeSet::new()).unwrap();
        assert_eq!(fs::read_to_string(directory.join("conf")).unwrap(), "ours");
        assert!(!fs::symlink_metadata(directory.join("conf")).unwrap().is_symlink());
        prepare_workdir(&directory, owner(), &[], &BTreeSet::from(["etc/passwd".to_owned()])).unwrap();
        assert_eq!(fs::read_to_string(outside.join("passwd")).unwrap(), "of the host");
        fs::remove_dir_all(&directory).unwrap();
        symlink(&outside, &directory).unwrap();
        assert!(prepare_workdir(&directory, owner(), &[file("a", "x", 0o600)], &BTreeSet::new()).is_err());
        assert!(!outside.join("a").exists());
    }

    #[test]
    fn root_gets_no_directory_of_another_user() {
        for (former, next, is_root, expected) in [
            (0, 0, true, false),
            (0, 65_533, true, false),
            (65_533, 65_533, true, false),
            (65_533, 0, true, true),
            (65_533, 0, false, false),
        ] {
            assert_eq!(must_set_aside(former, next, is_root), expected, "{former} {next} {is_root}");
        }
        if !testkit::skip::runs_as_root() {
            return;
        }
        let above = tempfile::tempdir().unwrap();
        let directory = above.path().join("web_server");
        let former = former_workdir(&directory);
        let root = User { uid: 0, gid: 0 };
        for round in ["first", "second"] {
            prepare_workdir(&directory, owner(), &[], &BTreeSet::new()).unwrap();
            fs::write(directory.join("plugin"), round).unwrap();
            prepare_workdir(&directory, root, &[file("a", "x", 0o600)], &BTreeSet::new()).unwrap();
            assert!(!directory.join("plugin").exists(), "{round}");
            assert_eq!(fs::metadata(&directory).unwrap().uid(), 0);
            assert_eq!(fs::read_to_string(former.join("plugin")).unwrap(), round);
        }
        // Root's own directory stays.
        fs::write(directory.join("own"), "data").unwrap();
        prepare_workdir(&directory, root, &[], &BTreeSet::new()).unwrap();
        assert_eq!(fs::read_to_string(directory.join("own")).unwrap(), "data");
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        let above = tempfile::tempdir().unwrap();
        for path in ["../a", "/a", "a/../../b", "a//b", ".", "", "a/."] {
            let files = [file(path, "x", 0o600)];
            assert!(
                prepare_workdir(&above.path().join("web"), owner(), &files, &BTreeSet::new()).is_err(),
                "{path:?}"
            );
        }
        assert_eq!(fs::read_dir(above.path()).unwrap().count(), 1);
    }
}
