//! Damage to a state file, as a loss of power, a disk error, another program or a newer release leaves it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// What is in the place of a state file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// A file without content.
    Empty,
    /// The first half of the file.
    Truncated,
    /// The file with the number of a later format. If it is no JSON object, such an object.
    Newer,
    /// The file with a byte in it that is in no text.
    NotUtf8,
    /// A directory with a file in it.
    Directory,
}

impl Damage {
    /// Every damage. A directory comes last, because other files may be written over the others.
    pub const ALL: [Self; 5] = [Self::Empty, Self::Truncated, Self::Newer, Self::NotUtf8, Self::Directory];

    /// Damages the file at this path, and returns its former content. A file that does not exist counts as `{}`. What is
    /// damaged belongs to its owner alone.
    pub fn inflict(self, path: &Path) -> Result<Vec<u8>> {
        let whole = match fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => b"{}".to_vec(),
            read => read?,
        };
        let half = whole.len() / 2;
        let content = match self {
            Self::Empty => Vec::new(),
            Self::Truncated => whole[..half].to_vec(),
            Self::Newer => raise_format(&whole),
            Self::NotUtf8 => [&whole[..half], b"\xff", &whole[half..]].concat(),
            Self::Directory => {
                put_directory(path)?;
                return Ok(whole);
            }
        };
        write_private(path, &content)?;
        Ok(whole)
    }
}

/// Puts a file with this content back in the place of any damage. It belongs to its owner alone.
pub fn restore(path: &Path, content: &[u8]) -> Result<()> {
    remove(path)?;
    write_private(path, content)
}

/// All files below a directory with their contents. A directory has none. Links and sockets are left out, and files that a
/// program removes meanwhile.
pub fn snapshot(directory: &Path) -> Result<BTreeMap<PathBuf, Option<Vec<u8>>>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            if kind.is_dir() {
                directories.push(path.clone());
                found.insert(path, None);
            } else if kind.is_file() {
                match fs::read(&path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    content => drop(found.insert(path, Some(content?))),
                }
            }
        }
    }
    Ok(found)
}

/// Puts a directory with a file in the place of a file. A program may write the file meanwhile.
fn put_directory(path: &Path) -> Result<()> {
    let beside = path.with_extension("directory");
    fs::create_dir(&beside)?;
    fs::write(beside.join("file"), "of a person")?;
    loop {
        remove(path)?;
        match fs::rename(&beside, path) {
            // The file was written again.
            Err(error) if error.kind() == ErrorKind::NotADirectory => {}
            renamed => return renamed,
        }
    }
}

fn raise_format(whole: &[u8]) -> Vec<u8> {
    let members = whole.trim_ascii_start().strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    match members.filter(|members| !members.starts_with(b"}")) {
        None => br#"{"format": 9}"#.to_vec(),
        Some(members) => [&br#"{"format": 9, "#[..], members].concat(),
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => fs::remove_dir_all(path),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn write_private(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_damage_leaves_what_its_name_says() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("state.json");
        let whole = b"{\n \"a\": 1}";
        for (damage, expected) in [
            (Damage::Empty, Some(Vec::new())),
            (Damage::Truncated, Some(b"{\n \"a".to_vec())),
            (Damage::Newer, Some(b"{\"format\": 9, \"a\": 1}".to_vec())),
            (Damage::NotUtf8, Some(b"{\n \"a\xff\": 1}".to_vec())),
            (Damage::Directory, None),
        ] {
            restore(&path, whole).unwrap();
            assert_eq!(damage.inflict(&path).unwrap(), whole, "{damage:?}");
            assert_eq!(snapshot(directory.path()).unwrap()[&path], expected, "{damage:?}");
        }
        restore(&path, whole).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let absent = directory.path().join("absent");
        assert_eq!(Damage::Newer.inflict(&absent).unwrap(), b"{}");
        assert_eq!(fs::read(&absent).unwrap(), br#"{"format": 9}"#);
        restore(&absent, b"\x30\x51").unwrap();
        Damage::Newer.inflict(&absent).unwrap();
        assert_eq!(fs::read(&absent).unwrap(), br#"{"format": 9}"#, "it was no text");
    }
}
