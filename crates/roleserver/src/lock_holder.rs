//! Finds the process that holds a lock file, by `/proc/locks`.
//!
//! The record of a process can be lost in a loss of power, or be that of another release. Its lock cannot: it ends with
//! the process.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::process::ProcessInstance;

/// The process that holds a lock on the file and has it open; `None` if there is none, or if it cannot be found out.
#[must_use]
pub fn find_lock_holder(path: &Path) -> Option<ProcessInstance> {
    // The kernel shows open files by their paths without links, and `/home` is one on some systems.
    let path = path.canonicalize().ok()?;
    let inode = std::fs::metadata(&path).ok()?.ino();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let holder = parse_holders(&locks, inode).into_iter().find(|pid| has_open(*pid, &path))?;
    ProcessInstance::of_pid(holder)
}

/// Pids that hold a lock of `flock` on a file with this inode: `1: FLOCK  ADVISORY  WRITE 4711 fd:00:1234 0 EOF`. The
/// device is not compared, because some file systems show another one there.
fn parse_holders(locks: &str, inode: u64) -> Vec<i32> {
    let holder = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = words.as_slice() else { return None };
        let of_file = file.rsplit(':').next()?.parse::<u64>().ok() == Some(inode);
        // A process of another pid namespace is shown as 0 or a negative number.
        pid.parse::<i32>().ok().filter(|pid| of_file && *pid > 0)
    };
    locks.lines().filter_map(holder).collect()
}

/// Whether the process has the file open. The files of a process that protects itself are closed to others, unless they
/// are root; then it counts if it is one of this user.
fn has_open(pid: i32, path: &Path) -> bool {
    let entries = match std::fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(entries) => entries,
        Err(error) => return error.kind() == ErrorKind::PermissionDenied && is_of_this_user(pid),
    };
    entries.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
}

fn is_of_this_user(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    effective_user(&status) == Some(rustix::process::geteuid().as_raw())
}

/// The effective user id in the text of `/proc/PID/status`.
fn effective_user(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effective_user_is_read_from_a_status() {
        assert_eq!(effective_user("Name:\tx\nUid:\t1000\t1001\t1000\t1000\nGid:\t7\t7\t7\t7\n"), Some(1001));
        assert_eq!(effective_user("Name:\tx\n"), None);
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(is_of_this_user(own) && !is_of_this_user(i32::MAX));
    }

    #[test]
    fn holder_is_read_from_the_table_of_locks() {
        let locks = "1: FLOCK  ADVISORY  WRITE 4711 fd:00:1234 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 4712 fd:00:1234 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 4713 fd:00:1234 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 0 fd:00:1234 0 EOF\n\
                     4: FLOCK  ADVISORY  READ  4714 00:2a:99 0 EOF\nnonsense\n";
        assert_eq!(parse_holders(locks, 1234), [4711]);
        assert_eq!(parse_holders(locks, 99), [4714]);
        assert_eq!(parse_holders(locks, 1), [0; 0]);
    }
}
