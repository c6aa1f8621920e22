//! Paths that no other user can change.
//!
//! The owner and mode of a file are not enough: a user who can write to a directory can replace what is in it. So every
//! directory on the way counts, and every symbolic link, which is followed step by step as the kernel does. A directory
//! in which everybody may write is safe if it is sticky (`/tmp`): there only the owner of an entry can rename or delete
//! it, and the owner of the entry is checked in turn.
//!
//! The result stays true after the check: when no other user can change any part of the path, no other user can
//! exchange the file between the check and its use.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// Permission bits that let the group or all others write.
const WRITABLE: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// As many links as Linux follows (`MAXSYMLINKS`).
const MAX_LINKS: usize = 40;

/// Why other users may be able to change a file.
#[derive(Debug, thiserror::Error)]
pub enum ChangeableError {
    /// A part of the path cannot be looked at.
    #[error("{} cannot be checked: {source}", path.display())]
    Read {
        /// The part of the path.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The path leads to something that is not a regular file.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path of what is not a file.
        path: PathBuf,
    },
    /// Another user owns a part of the path.
    #[error("{} belongs to another user (id {owner}), who can change it; run: chown {user} {}", path.display(), path.display())]
    ForeignOwner {
        /// The part of the path.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// The user id of this process.
        user: u32,
    },
    /// Other users can write to a part of the path.
    #[error("{} can be changed by other users (mode {mode:04o}); run: chmod go-w {}", path.display(), path.display())]
    Writable {
        /// The part of the path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
}

/// Checks that no other user can change the file at `path`, nor which file that is. Returns the metadata of the file.
pub fn check_unchangeable(path: &Path) -> Result<Metadata, ChangeableError> {
    let user = rustix::process::geteuid().as_raw();
    let read = |path: &Path| {
        std::fs::symlink_metadata(path)
            .map_err(|source| ChangeableError::Read { path: path.to_owned(), source })
    };
    let absolute = std::path::absolute(path)
        .map_err(|source| ChangeableError::Read { path: path.to_owned(), source })?;
    let mut rest: VecDeque<OsString> = names(&absolute).collect();
    let mut place = PathBuf::from("/");
    let mut metadata = read(&place)?;
    check_part(&place, &metadata, user)?;
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            // The parent was checked on the way here.
            place.pop();
            metadata = read(&place)?;
            continue;
        }
        let next = place.join(&name);
        let found = read(&next)?;
        check_part(&next, &found, user)?;
        if !found.is_symlink() {
            (place, metadata) = (next, found);
            continue;
        }
        links += 1;
        let failed = |source| ChangeableError::Read { path: next.clone(), source };
        if links > MAX_LINKS {
            return Err(failed(io::Error::other("too many symbolic links")));
        }
        let target = std::fs::read_link(&next).map_err(failed)?;
        if target.is_absolute() {
            place = PathBuf::from("/");
        }
        for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
            rest.push_front(name);
        }
    }
    if metadata.is_file() { Ok(metadata) } else { Err(ChangeableError::NotAFile { path: place }) }
}

/// Checks that no other user can change what is in a directory. The directories above it are not checked.
pub fn check_directory(path: &Path) -> Result<(), ChangeableError> {
    let metadata =
        std::fs::metadata(path).map_err(|source| ChangeableError::Read { path: path.to_owned(), source })?;
    check_part(path, &metadata, rustix::process::geteuid().as_raw())
}

/// The names of a path, `..` included.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_owned())
}

fn check_part(path: &Path, metadata: &Metadata, user: u32) -> Result<(), ChangeableError> {
    let kind = if metadata.is_dir() {
        PartKind::Directory
    } else if metadata.is_symlink() {
        PartKind::Link
    } else {
        PartKind::File
    };
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    match find_weakness(kind, owner, mode, user) {
        None => Ok(()),
        Some(Weakness::Owner) => Err(ChangeableError::ForeignOwner { path: path.to_owned(), owner, user }),
        Some(Weakness::Mode) => Err(ChangeableError::Writable { path: path.to_owned(), mode }),
    }
}

/// What a part of a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartKind {
    Directory,
    Link,
    File,
}

/// What lets other users change a part of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weakness {
    /// Another user owns it.
    Owner,
    /// Its permission bits.
    Mode,
}

/// Decides whether other users than `user` and root can change a part of a path with this owner and these bits.
fn find_weakness(kind: PartKind, owner: u32, mode: u32, user: u32) -> Option<Weakness> {
    if owner != user && owner != 0 {
        return Some(Weakness::Owner);
    }
    let writable = match kind {
        PartKind::Directory => mode & WRITABLE != 0 && mode & STICKY == 0,
        // The bits of a link mean nothing: it is replaced by who may write to its directory, or by its owner.
        PartKind::Link => false,
        PartKind::File => mode & WRITABLE != 0,
    };
    writable.then_some(Weakness::Mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn part_is_safe_when_no_other_user_can_change_it() {
        use PartKind::{Directory, File, Link};
        for (kind, owner, mode, user, expected) in [
            (File, 7, 0o644, 7, None),
            (File, 0, 0o644, 7, None),
            (File, 8, 0o644, 7, Some(Weakness::Owner)),
            (File, 8, 0o644, 0, Some(Weakness::Owner)),
            (File, 7, 0o664, 7, Some(Weakness::Mode)),
            (File, 7, 0o646, 7, Some(Weakness::Mode)),
            (File, 7, 0o1646, 7, Some(Weakness::Mode)),
            (Directory, 0, 0o755, 7, None),
            (Directory, 0, 0o1777, 7, None),
            (Directory, 0, 0o777, 7, Some(Weakness::Mode)),
            (Directory, 7, 0o775, 7, Some(Weakness::Mode)),
            (Directory, 8, 0o1777, 7, Some(Weakness::Owner)),
            (Link, 7, 0o777, 7, None),
            (Link, 8, 0o777, 7, Some(Weakness::Owner)),
        ] {
            assert_eq!(find_weakness(kind, owner, mode, user), expected, "{kind:?} {owner} {mode:o} {user}");
        }
    }

    /// A directory whose path has no links, so that errors show the same path.
    fn directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap();
        (directory, path)
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn each_directory_on_the_way_counts() {
        let (_directory, root) = directory();
        let file = root.join("a/b/list.json");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "[]").unwrap();
        let parts = [root.join("a"), root.join("a/b"), file.clone()];
        for part in &parts {
            set_mode(part, 0o755);
        }
        assert_eq!(check_unchangeable(&file).unwrap().len(), 2);
        for part in &parts {
            for mode in [0o775, 0o757] {
                set_mode(part, mode);
                assert_eq!(
                    check_unchangeable(&file).unwrap_err().to_string(),
                    format!(
                        "{0} can be changed by other users (mode {mode:04o}); run: chmod go-w {0}",
                        part.display()
                    )
                );
            }
            set_mode(part, 0o755);
        }
        assert!(
            check_unchangeable(&root.join("a")).unwrap_err().to_string().ends_with("is not a regular file")
        );
        let absent = check_unchangeable(&root.join("absent")).unwrap_err().to_string();
        assert!(absent.contains("absent cannot be checked: No such file"), "{absent}");
    }

    #[test]
    fn link_is_followed_through_every_directory() {
        let (_directory, root) = directory();
        for name in ["open", "closed"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        set_mode(&root.join("open"), 0o777);
        set_mode(&root.join("closed"), 0o755);
        fs::write(root.join("closed/list"), "[]").unwrap();
        symlink("../closed/list", root.join("open/to_closed")).unwrap();
        symlink(root.join("open/to_closed"), root.join("closed/to_open")).unwrap();
        symlink("list", root.join("closed/to_list")).unwrap();
        symlink("to_itself", root.join("closed/to_itself")).unwrap();
        check_unchangeable(&root.join("closed/to_list")).unwrap();
        check_unchangeable(&root.join("closed/../closed/list")).unwrap();
        for path in ["open/to_closed", "closed/to_open", "open/../closed/list"] {
            let error = check_unchangeable(&root.join(path)).unwrap_err().to_string();
            assert!(error.contains("open can be changed by other users"), "{path}: {error}");
        }
        let error = check_unchangeable(&root.join("closed/to_itself")).unwrap_err().to_string();
        assert!(error.ends_with("too many symbolic links"), "{error}");
    }

    /// Only root can give files away.
    #[test]
    fn file_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let (_directory, root) = directory();
        let file = root.join("list");
        fs::write(&file, "[]").unwrap();
        set_mode(&file, 0o600);
        std::os::unix::fs::chown(&file, Some(1234), None).unwrap();
        let error = check_unchangeable(&file).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{0} belongs to another user (id 1234), who can change it; run: chown 0 {0}",
                file.display()
            )
        );
    }
}
