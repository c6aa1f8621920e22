//! How a bundle is laid out: a tar archive of the plainest kind, compressed by gzip.
//!
//! First comes `manifest.json`; then the files that it names, in its order, and nothing else. So whoever has the first piece
//! of a bundle knows what it is without fetching the rest, and whoever unpacks one knows before each byte how many there may
//! still be: no archive can fill a disk with more than its manifest admits to.
//!
//! Tar has had half a century to grow, and most ways to harm whoever unpacks an archive live in what has grown: links,
//! devices, sparse files, names in records of their own. A bundle has none of these, so they are not understood here but
//! refused. What is left is the header of POSIX.1-1988 ("ustar"), 512 bytes, and is read by hand.

use std::io::Read;

use flate2::read::GzDecoder;

use crate::model::kubernetes::bundle::{LARGEST_MANIFEST, MANIFEST, Manifest};

/// Bytes of a block. A header has one; contents are filled up to whole ones.
pub const BLOCK: usize = 512;

/// What stands before the contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its path in the archive.
    pub path: String,
    /// Bytes of its contents.
    pub size: u64,
}

impl Header {
    /// Reads a header; none where the archive ends. The error is a sentence.
    pub fn read(block: &[u8; BLOCK]) -> Result<Option<Self>, String> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if &block[257..263] != b"ustar\0" {
            return Err("it is no tar archive in the format ustar".to_owned());
        }
        // The sum counts its own place as spaces.
        let sum: u64 = block
            .iter()
            .enumerate()
            .map(|(place, byte)| if (148..156).contains(&place) { u64::from(b' ') } else { u64::from(*byte) })
            .sum();
        if octal(&block[148..156]) != Some(sum) {
            return Err("a header of the archive is damaged: its sum is wrong".to_owned());
        }
        let path = text(&block[..100]);
        let (Some(path), true) = (path, block[345] == 0) else {
            return Err(
                "an entry of the archive has a path of more than 100 bytes, or one that is no plain text"
                    .to_owned(),
            );
        };
        if block[156] != b'0' {
            return Err(format!(
                "the entry {path:?} of the archive is no plain file: links, directories and devices have no place in a bundle"
            ));
        }
        let size = octal(&block[124..136])
            .ok_or_else(|| format!("the entry {path:?} of the archive does not say how long it is"))?;
        Ok(Some(Self { path, size }))
    }

    /// How many bytes stand behind its contents until the next block.
    #[must_use]
    pub fn padding(&self) -> usize {
        let block = BLOCK as u64;
        usize::try_from((block - self.size % block) % block).unwrap_or_default()
    }
}

/// What a bundle says that it holds, read from its first bytes; some [`LARGEST_MANIFEST`] of them are always enough. The error
/// is a sentence.
pub fn manifest(beginning: &[u8]) -> Result<Manifest, String> {
    let mut archive = GzDecoder::new(beginning);
    let text = read_manifest(&mut archive)?;
    Manifest::read(&text).map_err(|problems| problems.to_string())
}

/// The text of the manifest, where the archive begins. The error is a sentence.
pub fn read_manifest(archive: &mut impl Read) -> Result<Vec<u8>, String> {
    let cut_off = |error: std::io::Error| {
        format!("it is no archive that gzip compressed, or only a part of one: {error}")
    };
    let mut block = [0; BLOCK];
    archive.read_exact(&mut block).map_err(cut_off)?;
    let header = Header::read(&block)?.ok_or("the archive is empty")?;
    if header.path != MANIFEST {
        return Err(format!("the archive begins with {:?}, and a bundle with {MANIFEST}", header.path));
    }
    if header.size > LARGEST_MANIFEST {
        return Err(format!("its {MANIFEST} has {} bytes, and {LARGEST_MANIFEST} are the most", header.size));
    }
    let mut text = Vec::new();
    archive.by_ref().take(header.size).read_to_end(&mut text).map_err(cut_off)?;
    if text.len() as u64 != header.size {
        return Err(cut_off(std::io::ErrorKind::UnexpectedEof.into()));
    }
    archive.read_exact(&mut block[..header.padding()]).map_err(cut_off)?;
    Ok(text)
}

/// A number in octal digits, with spaces or zero bytes around it.
fn octal(field: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    u64::from_str_radix(digits, 8).ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What stands before the first zero byte.
fn text(field: &[u8]) -> Option<String> {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).ok()?;
    (!text.is_empty() && !text.chars().any(char::is_control)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::io::Write as _;

    fn header(path: &str, size: u64) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_path(path).unwrap();
        header.set_size(size);
        header.set_mode(0o644);
        header.set_entry_type(tar::EntryType::Regular);
        header.set_cksum();
        header
    }

    fn archive(path: &str, content: &[u8]) -> Vec<u8> {
        let mut builder =
            tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        builder.append(&header(path, content.len() as u64), content).unwrap();
        builder.into_inner().unwrap().finish().unwrap()
    }

    #[test]
    fn header_says_what_follows_and_where_it_ends() {
        for (size, padding) in [(0, 0), (1, 511), (511, 1), (512, 0), (513, 511), (8_589_934_591, 1)] {
            let read = Header::read(header("bin/kubelet", size).as_bytes()).unwrap().unwrap();
            assert_eq!(read, Header { path: "bin/kubelet".to_owned(), size });
            assert_eq!(read.padding(), padding);
        }
        assert_eq!(Header::read(&[0; BLOCK]), Ok(None));
    }

    #[test]
    fn what_is_no_plain_file_of_the_plainest_archive_is_refused() {
        let changed = |change: &dyn Fn(&mut tar::Header)| {
            let mut header = header("bin/kubelet", 10);
            change(&mut header);
            header.set_cksum();
            Header::read(header.as_bytes()).unwrap_err()
        };
        for kind in [
            tar::EntryType::Symlink,
            tar::EntryType::Link,
            tar::EntryType::Char,
            tar::EntryType::Directory,
            tar::EntryType::Fifo,
            tar::EntryType::GNUSparse,
            tar::EntryType::GNULongName,
            tar::EntryType::XHeader,
            tar::EntryType::Continuous,
        ] {
            let said = changed(&|header| header.set_entry_type(kind));
            assert!(said.contains("\"bin/kubelet\" of the archive is no plain file"), "{kind:?}: {said}");
        }
        let said = changed(&|header| header.as_mut_bytes()[257..263].copy_from_slice(b"ustar "));
        assert!(said.contains("format ustar"), "{said}");
        let said = changed(&|header| header.as_mut_bytes()[345] = b'x');
        assert!(said.contains("more than 100 bytes"), "{said}");
        let said = changed(&|header| header.as_mut_bytes()[0] = 0xff);
        assert!(said.contains("no plain text"), "{said}");
        // Binary sizes, of which GNU's tar makes use beyond 8 GiB.
        let said = changed(&|header| header.as_mut_bytes()[124] = 0x80);
        assert!(said.contains("how long"), "{said}");
        let mut damaged = header("bin/kubelet", 10);
        damaged.as_mut_bytes()[3] ^= 1;
        assert!(Header::read(damaged.as_bytes()).unwrap_err().contains("its sum is wrong"));
    }

    #[test]
    fn manifest_is_read_from_the_first_bytes_alone() {
        let text = crate::model::kubernetes::bundle::tests::TEXT;
        let mut whole = archive(MANIFEST, text.as_bytes());
        assert_eq!(manifest(&whole).unwrap().name, "test");
        whole.truncate(whole.len() - 20);
        whole.extend(b"something else");
        assert_eq!(manifest(&whole).unwrap().name, "test", "the manifest stands before that");

        let said = |bytes: &[u8]| manifest(bytes).unwrap_err();
        assert!(said(b"").contains("only a part"), "{}", said(b""));
        assert!(said(b"#!/bin/sh").contains("gzip"));
        assert!(said(&archive(MANIFEST, text.as_bytes())[..60]).contains("only a part"));
        assert!(said(&archive("bin/kubelet", b"x")).contains("begins with \"bin/kubelet\""));
        let long = vec![b' '; usize::try_from(LARGEST_MANIFEST).unwrap() + 1];
        assert!(said(&archive(MANIFEST, &long)).contains("are the most"));
        let mut nothing = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        nothing.write_all(&[0; 2 * BLOCK]).unwrap();
        assert!(said(&nothing.finish().unwrap()).contains("empty"));
    }
}
