//! Output log of a child, truncated when it grows too large (copy and truncate).
//!
//! A program outlives the role server that started it, so it writes to a file instead of a pipe. Both append to the
//! file. A file that has grown too large is copied and truncated under its writer, and a few last lines may be in both
//! files or lost.
//!
//! On a full disk there is no space for the copy, and a log that nobody truncates keeps the disk full. Then the rotated
//! file goes first, and the log is truncated to its end.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Result, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use model::plain_text::replace_hidden;

/// Size in bytes above which a file is truncated.
pub const MAX_LOG_BYTES: u64 = 4 << 20;
/// Bytes at the end of a log that stay in it when there is no space for a copy.
const REMAINING_BYTES: u64 = 64 << 10;
/// Bytes at the end of a file that are read for its last lines.
const TAIL_BYTES: u64 = 2000;

/// Opens a log for appending, creating it with mode 0600.
pub fn open_log(path: &Path) -> Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Truncates a log longer than [`MAX_LOG_BYTES`]; its content stays in `….1` until the next time. Without space for that
/// file, only the end of the log stays.
pub fn truncate_if_large(path: &Path) -> Result<()> {
    truncate_with(path, |from, to| std::fs::copy(from, to).map(drop))
}

fn truncate_with(path: &Path, copy: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<()> {
    if !std::fs::metadata(path).is_ok_and(|data| data.size() > MAX_LOG_BYTES) {
        return Ok(());
    }
    let rotated = path.with_extension("log.1");
    let end = match copy(path, &rotated) {
        Ok(()) => Vec::new(),
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            // Half a copy is of no use, and takes the space of what is written next.
            match std::fs::remove_file(&rotated) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => read_end(path, REMAINING_BYTES)?,
            }
        }
        Err(error) => return Err(error),
    };
    OpenOptions::new().write(true).open(path)?.set_len(0)?;
    // Another program may have taken the space. The log is short in any case.
    let _ = open_log(path).and_then(|mut file| file.write_all(&end));
    Ok(())
}

/// The last bytes of a file, at most `most`.
fn read_end(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The last lines of a log, at most `most`, joined into one; empty if there is nothing to read.
#[must_use]
pub fn last_lines(path: &Path, most: usize) -> String {
    let bytes = read_end(path, TAIL_BYTES).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    replace_hidden(&lines[lines.len().saturating_sub(most)..].join(" / "), &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_cut_short_under_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        let mut writer = open_log(&path).unwrap();
        writer.write_all(&vec![b'x'; 4 << 20]).unwrap();
        truncate_if_large(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MAX_LOG_BYTES, "not longer than it may be");
        writer.write_all(b"more").unwrap();
        truncate_if_large(&path).unwrap();
        writer.write_all(b"after\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        assert_eq!(
            std::fs::metadata(directory.path().join("output.log.1")).unwrap().len(),
            MAX_LOG_BYTES + 4
        );
    }

    #[test]
    fn file_is_cut_to_its_end_where_there_is_no_space_for_a_copy() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        let rotated = directory.path().join("output.log.1");
        let mut writer = open_log(&path).unwrap();
        writer.write_all(&vec![b'x'; 5 << 20]).unwrap();
        writer.write_all(b"the last line\n").unwrap();
        let fail = |kind: ErrorKind| {
            move |_: &Path, to: &Path| -> Result<()> {
                std::fs::write(to, "half a copy")?;
                Err(kind.into())
            }
        };
        let refused = truncate_with(&path, fail(ErrorKind::PermissionDenied)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(std::fs::metadata(&path).unwrap().len() > MAX_LOG_BYTES, "nothing was lost");
        truncate_with(&path, fail(ErrorKind::StorageFull)).unwrap();
        writer.write_all(b"after\n").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("xthe last line\nafter\n"));
        assert_eq!(text.len() as u64, REMAINING_BYTES + 6);
        assert!(!rotated.exists(), "half a copy stays");
    }

    #[test]
    fn last_lines_are_joined_into_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        assert_eq!(last_lines(&path, 3), "");
        std::fs::write(&path, format!("{}\none\n\n  two\u{1b}[0m\nthree", "x".repeat(5000))).unwrap();
        assert_eq!(last_lines(&path, 2), "two [0m / three");
        assert!(last_lines(&path, 9).len() < 2100);
    }
}
