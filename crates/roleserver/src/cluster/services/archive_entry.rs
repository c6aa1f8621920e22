//! What an entry of an archive means, and whether this program can carry it out. *Pure.*
//!
//! Tar has grown extensions that change what an entry is: a sparse file in an extended header (PAX) has another name,
//! another size and a map in front of its data; other types of entries are devices or pieces of a file. A reader that
//! does not know an extension would unpack something else than was packed, and the library unpacks every type that it
//! does not know as a file. So an entry is either carried out as a whole or refused, with its name. What is added to
//! this list must be unpacked, not only permitted.
//!
//! Two things are left out, because the service would not see them: records of the packing program for itself, and
//! devices in the directories that are mounted over the archive's.

use std::path::{Component, Path};

use tar::EntryType;

/// Records of an extended header that the library carries out, or that say nothing about the entry.
const KEYS: [&str; 13] = [
    "path",
    "linkpath",
    "size",
    "uid",
    "gid",
    "uname",
    "gname",
    "mtime",
    "atime",
    "ctime",
    "comment",
    "charset",
    "hdrcharset",
];
/// Beginnings of records that packing programs write for themselves, and of attributes that a service cannot see or
/// does not need: security labels are those of the node.
const IGNORED_PREFIXES: [&str; 13] = [
    "SCHILY.dev",
    "SCHILY.ino",
    "SCHILY.nlink",
    "SCHILY.fflags",
    "SCHILY.xattr.user.",
    "SCHILY.xattr.com.apple.",
    "SCHILY.xattr.security.selinux",
    "SCHILY.xattr.security.ima",
    "LIBARCHIVE.creationtime",
    "LIBARCHIVE.xattr.user.",
    "LIBARCHIVE.xattr.com.apple.",
    "LIBARCHIVE.xattr.security.",
    "RHT.security.selinux",
];
/// Directories over which the container has its own.
const MOUNTED_OVER: [&str; 3] = ["dev", "run", "tmp"];
/// Beginning of the names by which a layer of an image deletes files of the layers below.
const WHITEOUT: &str = ".wh.";

/// What is done with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryUse {
    /// It is unpacked, with its owner and its permissions.
    Unpack,
    /// It is left out: the service would not see it.
    LeaveOut,
}

/// Decides about an entry by its path, its type, and the keys of its extended header. The error is a sentence that
/// names the entry.
pub(super) fn decide_use(path: &Path, kind: EntryType, keys: &[String]) -> Result<EntryUse, String> {
    // Somebody else wrote the name, so control characters in it are escaped.
    let name = path.to_string_lossy();
    if kind == EntryType::XGlobalHeader {
        // It would be about all entries after it, and the library passes over it.
        return match keys.iter().find(|key| *key != "comment") {
            None => Ok(EntryUse::LeaveOut),
            Some(key) => Err(format!(
                "the archive has the record {key} for all its entries, which is not supported; pack it without it"
            )),
        };
    }
    if let Some(key) = keys.iter().find(|key| !is_supported(key)) {
        return Err(format!("{name:?} has the extension {key}, which is not supported; {}", remedy(key)));
    }
    if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(WHITEOUT)) {
        return Err(format!(
            "{name:?} is the mark of a deleted file in a layer of an image; pack the whole file system, as `docker export` \
             does"
        ));
    }
    match kind {
        EntryType::Regular
        | EntryType::Continuous
        | EntryType::GNUSparse
        | EntryType::Link
        | EntryType::Symlink
        | EntryType::Directory => Ok(EntryUse::Unpack),
        EntryType::Char | EntryType::Block | EntryType::Fifo if is_mounted_over(path) => {
            Ok(EntryUse::LeaveOut)
        }
        EntryType::Char | EntryType::Block | EntryType::Fifo => Err(format!(
            "{name:?} is a device or a named pipe, which a root filesystem has only in /dev, /run and /tmp; pack it \
             without it"
        )),
        other => Err(format!(
            "{name:?} is an entry of the type {:?}, which is not supported; pack it in the format ustar, pax or gnu",
            char::from(other.as_byte())
        )),
    }
}

fn is_supported(key: &str) -> bool {
    KEYS.contains(&key) || IGNORED_PREFIXES.iter().any(|prefix| key.starts_with(prefix))
}

fn remedy(key: &str) -> &'static str {
    if key.starts_with("GNU.sparse.") {
        "pack it without --sparse, or with --format=gnu"
    } else if key.contains("xattr") || key.contains("acl") {
        "pack it without --xattrs and --acls: capabilities are requested in the declaration of the service"
    } else {
        "pack it with --format=ustar or --format=gnu"
    }
}

fn is_mounted_over(path: &Path) -> bool {
    let first = path.components().find_map(|component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    });
    first.is_some_and(|name| MOUNTED_OVER.iter().any(|directory| name == *directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_carried_out_or_refused_by_name() {
        use EntryType as T;
        let unpack = Ok(EntryUse::Unpack);
        let leave_out = Ok(EntryUse::LeaveOut);
        for (path, kind, keys, expected) in [
            ("etc/a", T::Regular, "", unpack),
            ("etc/a", T::Regular, "path mtime SCHILY.ino SCHILY.xattr.user.mime", unpack),
            ("etc/a", T::GNUSparse, "", unpack),
            ("etc/a", T::Link, "linkpath", unpack),
            ("./dev/null", T::Char, "", leave_out),
            ("dev/sda", T::Block, "", leave_out),
            ("run/pipe", T::Fifo, "", leave_out),
            ("pax_global_header", T::XGlobalHeader, "comment", leave_out),
            ("x", T::XGlobalHeader, "path", Err("the record path for all its entries")),
            ("etc/a", T::Regular, "GNU.sparse.major", Err("GNU.sparse.major, which is not supported")),
            ("etc/a", T::Regular, "GNU.sparse.map", Err("pack it without --sparse")),
            ("bin/ping", T::Regular, "SCHILY.xattr.security.capability", Err("without --xattrs")),
            ("bin/ping", T::Regular, "SCHILY.acl.access", Err("without --xattrs and --acls")),
            ("etc/a", T::Regular, "ACME.compressed", Err("ACME.compressed")),
            ("etc/null", T::Char, "", Err("is a device")),
            ("etc/dev/pipe", T::Fifo, "", Err("named pipe")),
            ("etc/a", T::new(b'M'), "", Err("of the type 'M'")),
            ("etc/.wh.passwd", T::Regular, "", Err("mark of a deleted file")),
        ] {
            let keys: Vec<String> = keys.split_whitespace().map(str::to_owned).collect();
            let found = decide_use(Path::new(path), kind, &keys);
            match expected {
                Ok(expected) => assert_eq!(found, Ok(expected), "{path} {keys:?}"),
                Err(part) => {
                    let error = found.expect_err(path);
                    assert!(error.contains(part), "{error}");
                    assert!(error.contains(path) || kind == T::XGlobalHeader, "{error}");
                }
            }
        }
    }
}
