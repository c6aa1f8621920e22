//! Paths that no other user can change.
//!
//! The owner and mode of a file are not enough: a user who can write to a directory can replace what is in it. So every
//! directory on the way counts, and every symbolic link, which is followed step by step as the kernel does. A directory
//! in which everybody may write is safe if it is sticky (`/tmp`): there only the owner of an entry can rename or delete
//! it, and the owner of the entry is checked in turn.
//!
//! The result stays true after the check: when no other user can change any part of the path, no other user can
//! exchange the file between the check and its use.
//!
//! A configuration ([`FileUse::Configuration`]), with the programs, keys and certificates that belong to it, is often
//! kept where permission bits say less than is true. Two cases
//! are accepted, which are safe although the bits let others write:
//!
//! * A part on a mount that is read-only. Kubernetes mounts a `ConfigMap` like this: its directory has mode 0777, and
//!   nobody who reaches it by this path can write.
//! * A part that a [private group](crate::private_group) may change, as a umask of 002 makes it: the user of this
//!   process is the group. A part with an access list of its own is not among them: there, the bits of the group are the
//!   most that any user or group of the list may do (acl(5)).
//!
//! Files with commands are checked by the bits alone. A read-only mount can be writable elsewhere on the host, and there
//! is a better way to trust such a file: its digest.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::access_list::has_access_list;
use crate::private_group::read_private_group;

/// Permission bits that let the group or all others write.
const WRITABLE: u32 = 0o022;
/// Permission bit that lets all others write.
const WRITABLE_BY_ALL: u32 = 0o002;
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
    /// Another user owns a directory on the way. It may be a home, which must stay that user's.
    #[error("{} belongs to another user (id {owner}), who can change what is in it; keep the file in a directory that only root or user {user} can change", path.display())]
    ForeignDirectory {
        /// The directory that can be changed.
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
        /// Its permission bits, without the type of the file.
        mode: u32,
    },
}

/// What a program believes of a file, and so how strictly its path is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// Commands that are run as they are written.
    Commands,
    /// What an operator installs for the program: its flags, the agent, signing keys, certificates of authorities.
    Configuration,
}

/// Checks that no other user can change the file at `path`, nor which file that is. Returns the metadata of the file.
pub fn check_unchangeable(path: &Path, file_use: FileUse) -> Result<Metadata, ChangeableError> {
    let user = rustix::process::geteuid().as_raw();
    // Only a configuration may be writable for a private group.
    let private_group = match file_use {
        FileUse::Configuration => read_private_group(user),
        FileUse::Commands => None,
    };
    let user = User { id: user, private_group };
    PathCheck { file_use, user, is_read_only: is_on_read_only_mount, has_access_list }.walk(path)
}

/// Checks that no other user can change what is in a directory. The directories above it are not checked.
pub fn check_directory(path: &Path) -> Result<(), ChangeableError> {
    let metadata =
        std::fs::metadata(path).map_err(|source| ChangeableError::Read { path: path.to_owned(), source })?;
    let user = User { id: rustix::process::geteuid().as_raw(), private_group: None };
    PathCheck { file_use: FileUse::Commands, user, is_read_only: is_on_read_only_mount, has_access_list }
        .check_part(path, &metadata)
}

/// A check of the parts of one path.
struct PathCheck {
    file_use: FileUse,
    user: User,
    /// Whether a path is on a mount that is read-only.
    is_read_only: fn(&Path) -> bool,
    /// Whether what is at a path has an access list.
    has_access_list: fn(&Path) -> bool,
}

impl PathCheck {
    fn walk(&self, path: &Path) -> Result<Metadata, ChangeableError> {
        let read = |path: &Path| {
            std::fs::symlink_metadata(path)
                .map_err(|source| ChangeableError::Read { path: path.to_owned(), source })
        };
        let absolute = std::path::absolute(path)
            .map_err(|source| ChangeableError::Read { path: path.to_owned(), source })?;
        let mut rest: VecDeque<OsString> = names(&absolute).collect();
        let mut place = PathBuf::from("/");
        let mut metadata = read(&place)?;
        self.check_part(&place, &metadata)?;
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
            self.check_part(&next, &found).map_err(|error| match error {
                ChangeableError::ForeignOwner { path, owner, user } if found.is_dir() => {
                    ChangeableError::ForeignDirectory { path, owner, user }
                }
                other => other,
            })?;
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

    fn check_part(&self, path: &Path, metadata: &Metadata) -> Result<(), ChangeableError> {
        let kind = if metadata.is_dir() {
            PartKind::Directory
        } else if metadata.is_symlink() {
            PartKind::Link
        } else {
            PartKind::File
        };
        let part = Part {
            kind,
            owner: metadata.uid(),
            group: metadata.gid(),
            mode: metadata.mode() & 0o7777,
            // The mount of a link does not matter, and the question would follow the link.
            is_read_only: kind != PartKind::Link && (self.is_read_only)(path),
            has_access_list: kind != PartKind::Link && (self.has_access_list)(path),
        };
        let (owner, mode) = (part.owner, part.mode);
        match find_weakness(&part, self.user, self.file_use) {
            None => Ok(()),
            Some(Weakness::Owner) => {
                Err(ChangeableError::ForeignOwner { path: path.to_owned(), owner, user: self.user.id })
            }
            Some(Weakness::Mode) => Err(ChangeableError::Writable { path: path.to_owned(), mode }),
        }
    }
}

/// Whether a path is on a mount that is read-only. One that cannot be looked at counts as writable.
fn is_on_read_only_mount(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// The names of a path, `..` included.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_owned())
}

/// The user of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct User {
    id: u32,
    /// The group that only this user is in.
    private_group: Option<u32>,
}

/// What a part of a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartKind {
    Directory,
    Link,
    File,
}

/// What decides who can change a part of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    kind: PartKind,
    owner: u32,
    group: u32,
    /// Permission bits.
    mode: u32,
    /// Whether it is on a mount that is read-only.
    is_read_only: bool,
    /// Whether it has an access list.
    has_access_list: bool,
}

/// What lets other users change a part of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weakness {
    /// Another user owns it.
    Owner,
    /// Its permission bits let other users change it.
    Mode,
}

/// Decides whether other users than `user` and root can change a part of the path of a file.
fn find_weakness(part: &Part, user: User, file_use: FileUse) -> Option<Weakness> {
    if part.owner != user.id && part.owner != 0 {
        return Some(Weakness::Owner);
    }
    let is_writable = match part.kind {
        PartKind::Directory => part.mode & WRITABLE != 0 && part.mode & STICKY == 0,
        // The bits of a link mean nothing: it is replaced by who may write to its directory, or by its owner.
        PartKind::Link => false,
        PartKind::File => part.mode & WRITABLE != 0,
    };
    let is_harmless = match file_use {
        FileUse::Commands => false,
        FileUse::Configuration => {
            let is_of_private_group = user.private_group == Some(part.group) && !part.has_access_list;
            part.is_read_only || part.mode & WRITABLE_BY_ALL == 0 && is_of_private_group
        }
    };
    (is_writable && !is_harmless).then_some(Weakness::Mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    /// A part that group 50 owns, on a mount that can be written.
    fn part(kind: PartKind, owner: u32, mode: u32) -> Part {
        Part { kind, owner, group: 50, mode, is_read_only: false, has_access_list: false }
    }

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
            for file_use in [FileUse::Commands, FileUse::Configuration] {
                let found = find_weakness(
                    &part(kind, owner, mode),
                    User { id: user, private_group: Some(51) },
                    file_use,
                );
                assert_eq!(found, expected, "{file_use:?} {kind:?} {owner} {mode:o} {user}");
            }
        }
    }

    #[test]
    fn bits_that_let_nobody_write_are_accepted_for_a_configuration_alone() {
        use PartKind::{Directory, File};
        let (own, other) = (Some(50), Some(51));
        for (kind, owner, mode, private_group, is_read_only, expected) in [
            // Files and directories that a umask of 002 makes.
            (File, 7, 0o664, own, false, None),
            (Directory, 7, 0o775, own, false, None),
            (Directory, 7, 0o2775, own, false, None),
            (File, 7, 0o664, other, false, Some(Weakness::Mode)),
            (File, 7, 0o664, None, false, Some(Weakness::Mode)),
            // All others can write, too.
            (File, 7, 0o666, own, false, Some(Weakness::Mode)),
            (Directory, 7, 0o777, own, false, Some(Weakness::Mode)),
            // The volume of a ConfigMap, and the same with `fsGroup`.
            (Directory, 0, 0o777, None, true, None),
            (Directory, 0, 0o2777, None, true, None),
            (File, 0, 0o666, None, true, None),
            // The owner may have another mount of it.
            (Directory, 8, 0o755, None, true, Some(Weakness::Owner)),
        ] {
            let part = Part { is_read_only, ..part(kind, owner, mode) };
            let user = User { id: 7, private_group };
            assert_eq!(find_weakness(&part, user, FileUse::Configuration), expected, "{part:?} {user:?}");
            let strict = expected.or(Some(Weakness::Mode));
            assert_eq!(find_weakness(&part, user, FileUse::Commands), strict, "{part:?} {user:?}");
        }
    }

    #[test]
    fn bits_of_a_private_group_are_not_believed_beside_an_access_list() {
        use PartKind::{Directory, File};
        let user = User { id: 7, private_group: Some(50) };
        for (kind, mode, is_read_only, expected) in [
            (File, 0o664, false, Some(Weakness::Mode)),
            (Directory, 0o775, false, Some(Weakness::Mode)),
            // The mask of the list lets nobody write.
            (File, 0o644, false, None),
            (Directory, 0o755, false, None),
            (File, 0o664, true, None),
        ] {
            let part = Part { is_read_only, has_access_list: true, ..part(kind, 7, mode) };
            assert_eq!(find_weakness(&part, user, FileUse::Configuration), expected, "{part:?}");
        }
    }

    #[test]
    fn configuration_in_a_config_map_is_accepted() {
        let (_directory, root) = directory();
        let volume = root.join("volume");
        fs::create_dir_all(volume.join("..2026_11_27")).unwrap();
        fs::write(volume.join("..2026_11_27/shepherd.toml"), "").unwrap();
        symlink("..2026_11_27", volume.join("..data")).unwrap();
        symlink("..data/shepherd.toml", volume.join("shepherd.toml")).unwrap();
        set_mode(&volume, 0o777);
        set_mode(&volume.join("..2026_11_27"), 0o755);
        set_mode(&volume.join("..2026_11_27/shepherd.toml"), 0o644);
        let user = User { id: rustix::process::geteuid().as_raw(), private_group: None };
        let check = |file_use, is_read_only| {
            let check = PathCheck { file_use, user, is_read_only, has_access_list: |_| false };
            check.walk(&volume.join("shepherd.toml")).map(|_| ()).map_err(|error| error.to_string())
        };
        let writable: fn(&Path) -> bool = |_| false;
        let read_only: fn(&Path) -> bool = |_| true;
        assert_eq!(check(FileUse::Configuration, read_only), Ok(()));
        let refusal =
            format!("{0} can be changed by other users (mode 0777); run: chmod go-w {0}", volume.display());
        for (file_use, is_read_only) in [
            (FileUse::Configuration, writable),
            (FileUse::Commands, writable),
            (FileUse::Commands, read_only),
        ] {
            assert_eq!(check(file_use, is_read_only), Err(refusal.clone()), "{file_use:?}");
        }
    }

    /// A directory with a path without links, so that errors show the same path.
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
        assert_eq!(check_unchangeable(&file, FileUse::Commands).unwrap().len(), 2);
        for part in &parts {
            for mode in [0o775, 0o757] {
                set_mode(part, mode);
                assert_eq!(
                    check_unchangeable(&file, FileUse::Commands).unwrap_err().to_string(),
                    format!(
                        "{0} can be changed by other users (mode {mode:04o}); run: chmod go-w {0}",
                        part.display()
                    )
                );
            }
            set_mode(part, 0o755);
        }
        assert!(
            check_unchangeable(&root.join("a"), FileUse::Commands)
                .unwrap_err()
                .to_string()
                .ends_with("is not a regular file")
        );
        let absent = check_unchangeable(&root.join("absent"), FileUse::Commands).unwrap_err().to_string();
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
        check_unchangeable(&root.join("closed/to_list"), FileUse::Commands).unwrap();
        check_unchangeable(&root.join("closed/../closed/list"), FileUse::Commands).unwrap();
        for path in ["open/to_closed", "closed/to_open", "open/../closed/list"] {
            let error = check_unchangeable(&root.join(path), FileUse::Commands).unwrap_err().to_string();
            assert!(error.contains("open can be changed by other users"), "{path}: {error}");
        }
        let error =
            check_unchangeable(&root.join("closed/to_itself"), FileUse::Commands).unwrap_err().to_string();
        assert!(error.ends_with("too many symbolic links"), "{error}");
    }

    /// Only root can give files away.
    #[test]
    fn file_of_another_user_is_refused() {
        if !testkit::skip::runs_as_root() {
            return;
        }
        let (_directory, root) = directory();
        let file = root.join("list");
        fs::write(&file, "[]").unwrap();
        set_mode(&file, 0o600);
        std::os::unix::fs::chown(&file, Some(1234), None).unwrap();
        let error = check_unchangeable(&file, FileUse::Commands).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{0} belongs to another user (id 1234), who can change it; run: chown 0 {0}",
                file.display()
            )
        );
        std::os::unix::fs::chown(&file, Some(0), None).unwrap();
        std::os::unix::fs::chown(&root, Some(1234), None).unwrap();
        // A home that is given to root shuts its user out.
        assert_eq!(
            check_unchangeable(&file, FileUse::Commands).unwrap_err().to_string(),
            format!(
                "{} belongs to another user (id 1234), who can change what is in it; keep the file in a directory that \
                 only root or user 0 can change",
                root.display()
            )
        );
    }
}
