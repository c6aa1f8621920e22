//! Parse `/proc/self/mountinfo` (proc(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// One mount of this process's mount namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount<'m> {
    /// The part of its file system that it shows; `/` for all of it.
    pub root: &'m str,
    /// The mount point, without escapes.
    pub point: PathBuf,
    /// The type of its file system.
    pub kind: &'m str,
    /// Options of the file system, in contrast to those of this mount.
    pub options: &'m str,
}

/// Reads the file: the mounts that this process sees now.
pub fn read_mountinfo() -> std::io::Result<String> {
    std::fs::read_to_string("/proc/self/mountinfo")
}

/// Parses the mounts of such a text, in its order: a later mount covers an earlier one. Malformed lines are skipped.
pub fn parse_mounts(text: &str) -> impl Iterator<Item = Mount<'_>> {
    // `ID PARENT DEVICE ROOT POINT OPTIONS OPTIONAL… - TYPE SOURCE SUPER_OPTIONS`
    text.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let (mut before, mut after) = (before.split(' ').skip(3), after.split(' '));
        let (root, point) = (before.next()?, unescape_path(before.next()?));
        let kind = after.next()?;
        Some(Mount { root, point, kind, options: after.nth(1).unwrap_or_default() })
    })
}

/// The mount that a path is on, and its options followed by those of its file system.
#[must_use]
pub fn find_mount_options(text: &str, path: &Path) -> Option<(PathBuf, String)> {
    let mut found: Option<(PathBuf, String)> = None;
    for line in text.lines() {
        let Some(mount) = parse_mounts(line).next() else { continue };
        let is_deeper = found.as_ref().is_none_or(|(point, _)| mount.point.starts_with(point));
        if path.starts_with(&mount.point) && is_deeper {
            let own = line.split(' ').nth(5).unwrap_or_default();
            found = Some((mount.point, format!("{own},{}", mount.options)));
        }
    }
    found
}

/// Unescapes a path: spaces, tabs, line ends and backslashes are written as octal numbers.
fn unescape_path(text: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let number = after
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(number.unwrap_or(*first));
        rest = if number.is_some() { &after[3..] } else { after };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_no_mounts_are_skipped() {
        let text = "\
20 1 8:1 / / rw - ext4 /dev/a rw,errors=remount-ro
22 20 0:6 /part /a\\040b rw shared:1 master:2 - tmpfs none
23 20 0:7 /
24 20 0:8 / /back\\134slash rw
25 20 0:9 / /end\\ rw - tmpfs tmpfs rw
";
        let of =
            |root, point: &str, kind, options| Mount { root, point: PathBuf::from(point), kind, options };
        let expected = [
            of("/", "/", "ext4", "rw,errors=remount-ro"),
            of("/part", "/a b", "tmpfs", ""),
            of("/", "/end\\", "tmpfs", "rw"),
        ];
        assert_eq!(parse_mounts(text).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn options_are_those_of_the_last_mount_above_a_path() {
        let text = "\
20 1 8:1 / / rw,relatime - ext4 /dev/a rw
21 20 8:2 / /usr ro - ext4 /dev/b rw
22 20 8:3 / /usr rw,noexec - ext4 /dev/c rw
23 20 8:4 / /usrlocal rw - ext4 /dev/d rw
";
        let find = |path: &str| find_mount_options(text, Path::new(path));
        assert_eq!(find("/usr/bin/a"), Some(("/usr".into(), "rw,noexec,rw".to_owned())));
        assert_eq!(find("/opt"), Some(("/".into(), "rw,relatime,rw".to_owned())));
        assert_eq!(find("relative"), None);
    }
}
