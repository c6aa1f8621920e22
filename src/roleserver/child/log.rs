//! What a program writes, in a file that does not grow for ever.
//!
//! A program outlives the role server that started it, so it writes to a file and not to that one. Both add to its end: a
//! file that has grown too long is copied and cut short under its writer, and a few last lines may be in both or lost.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Result, Seek as _, SeekFrom};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Bytes after which a file is cut short.
pub const LIMIT: u64 = 4 << 20;
/// Bytes of a last part that may be shown to somebody.
const TAIL: u64 = 2000;

/// Opens it for writing at its end.
pub fn open(path: &Path) -> Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Cuts it short if it is longer than [`LIMIT`]; what was in it stays in `….1` until the next time.
pub fn limit(path: &Path) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|data| data.size() > LIMIT) {
        std::fs::copy(path, path.with_extension("log.1"))?;
        OpenOptions::new().write(true).open(path)?.set_len(0)?;
    }
    Ok(())
}

/// Its last lines, at most `most`, on one line; nothing where there is nothing to read.
#[must_use]
pub fn last_lines(path: &Path, most: usize) -> String {
    let read = || -> Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
        let mut bytes = Vec::new();
        file.take(TAIL).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let shown = |text: &str| text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>();
    shown(&lines[lines.len().saturating_sub(most)..].join(" / "))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write as _;

    #[test]
    fn file_is_cut_short_under_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        let mut writer = open(&path).unwrap();
        writer.write_all(&vec![b'x'; 4 << 20]).unwrap();
        limit(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), LIMIT, "not longer than it may be");
        writer.write_all(b"more").unwrap();
        limit(&path).unwrap();
        writer.write_all(b"after\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        assert_eq!(std::fs::metadata(directory.path().join("output.log.1")).unwrap().len(), LIMIT + 4);
    }

    #[test]
    fn last_lines_are_told_on_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("output.log");
        assert_eq!(last_lines(&path, 3), "");
        std::fs::write(&path, format!("{}\none\n\n  two\u{1b}[0m\nthree", "x".repeat(5000))).unwrap();
        assert_eq!(last_lines(&path, 2), "two [0m / three");
        assert!(last_lines(&path, 9).len() < 2100);
    }
}
