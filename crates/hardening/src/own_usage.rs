//! What this process uses of its limits: open files, and space and inodes of the file systems that it writes to.
//!
//! It reads and decides nothing: each program has its own thresholds.

use std::path::Path;

use model::storage_level::FileSystemUsage;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// A file system, as statvfs(3) has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The device number that identifies it.
    pub device: u64,
    /// Its size, and what of it is available to this user.
    pub usage: FileSystemUsage,
}

/// Reads the file system that a path is on. Waits for a disk that does not answer.
pub fn read_file_system(path: &Path) -> std::io::Result<FileSystem> {
    let device = rustix::fs::stat(path)?.st_dev;
    let read = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(read.f_frsize);
    let usage = FileSystemUsage {
        bytes: bytes(read.f_blocks),
        available_bytes: bytes(read.f_bavail),
        inodes: read.f_files,
        available_inodes: read.f_favail,
    };
    Ok(FileSystem { device, usage })
}

/// The open files of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFiles {
    /// How many are open.
    pub used: u64,
    /// How many may be open; `None` without a limit.
    pub limit: Option<u64>,
}

/// Counts the open files of this process. Counting opens one more, and at the limit that fails: all are open then.
pub fn count_open_files() -> std::io::Result<OpenFiles> {
    // The directory that is read is one of them.
    let counted =
        std::fs::read_dir("/proc/self/fd").map(|directory| directory.count().saturating_sub(1) as u64);
    interpret_count(counted, getrlimit(Resource::Nofile).current)
}

/// The open files, where the attempt to count them had this result. *Pure.*
fn interpret_count(counted: std::io::Result<u64>, limit: Option<u64>) -> std::io::Result<OpenFiles> {
    match (counted, limit) {
        (Err(error), Some(most)) if Errno::from_io_error(&error) == Some(Errno::MFILE) => {
            Ok(OpenFiles { used: most, limit })
        }
        (counted, _) => Ok(OpenFiles { used: counted?, limit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_counted() {
        let before = count_open_files().unwrap();
        let files: Vec<_> = (0..50).map(|_| std::fs::File::open("/dev/null").unwrap()).collect();
        let after = count_open_files().unwrap();
        // Other tests of this process open files, too.
        assert!(after.used >= before.used.saturating_sub(20) + files.len() as u64, "{before:?} {after:?}");
        assert!(after.limit.is_none_or(|limit| limit >= after.used));
    }

    #[test]
    fn at_the_limit_all_files_are_open_and_another_error_remains() {
        let read = |counted, limit| interpret_count(counted, limit).map(|files| (files.used, files.limit));
        let failed = |errno: Errno| Err(std::io::Error::from(errno));
        assert_eq!(read(Ok(7), Some(1024)).unwrap(), (7, Some(1024)));
        assert_eq!(read(Ok(7), None).unwrap(), (7, None));
        assert_eq!(read(failed(Errno::MFILE), Some(1024)).unwrap(), (1024, Some(1024)));
        for (errno, limit) in [(Errno::MFILE, None), (Errno::NFILE, Some(1024)), (Errno::NOENT, Some(1024))] {
            let error = read(failed(errno), limit).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(errno));
        }
    }

    #[test]
    fn file_system_is_read_and_a_missing_path_is_an_error() {
        let read = read_file_system(Path::new("/proc/self")).unwrap().usage;
        assert_eq!(read.bytes, 0, "it has no size: {read:?}");
        let temporary = read_file_system(&std::env::temp_dir()).unwrap().usage;
        assert!(temporary.bytes > 0 && temporary.available_bytes <= temporary.bytes, "{temporary:?}");
        assert!(read_file_system(Path::new("/no/such/path")).is_err());
    }
}
