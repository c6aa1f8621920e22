//! Bundle archive format: ustar, gzip, manifest first.
//!
//! An archive contains `manifest.json`, then the files that it names, in its order, and nothing else. So the first
//! piece of a bundle is enough to learn its contents without fetching the rest. And the unpacker knows before each byte
//! how many may follow: no archive can fill a disk with more than its manifest admits.
//!
//! Tar has grown for half a century, and most attacks by archives use what has grown: links, devices, sparse files,
//! names in records of their own. A bundle has none of these. They are not interpreted here but rejected. What is left
//! is the header of POSIX.1-1988 ("ustar"), 512 bytes, and it is parsed by hand.

use std::io::Read;

use flate2::read::GzDecoder;

use crate::kubernetes::bundle_manifest::{BundleManifest, MANIFEST, MAX_MANIFEST_BYTES};

/// Bytes of a block. A header is one block; contents are padded to whole blocks.
pub const BLOCK_BYTES: usize = 512;

/// The header before the contents of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TarHeader {
    /// Path of the file in the archive.
    pub path: String,
    /// Size of the contents in bytes.
    pub size: u64,
}

impl TarHeader {
    /// Parses a header; `None` at the end of the archive. The error is a sentence.
    pub fn parse(block: &[u8; BLOCK_BYTES]) -> Result<Option<Self>, String> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if &block[257..263] != b"ustar\0" {
            return Err("it is no tar archive in the format ustar".to_owned());
        }
        // The checksum counts its own field as spaces.
        let sum: u64 = block
            .iter()
            .enumerate()
            .map(|(place, byte)| if (148..156).contains(&place) { u64::from(b' ') } else { u64::from(*byte) })
            .sum();
        if parse_octal(&block[148..156]) != Some(sum) {
            return Err("a header of the archive is damaged: its sum is wrong".to_owned());
        }
        let path = parse_text(&block[..100]);
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
        let size = parse_octal(&block[124..136])
            .ok_or_else(|| format!("the entry {path:?} of the archive does not say how long it is"))?;
        Ok(Some(Self { path, size }))
    }

    /// How many bytes of padding follow the contents until the next block.
    #[must_use]
    pub fn padding(&self) -> usize {
        let block = BLOCK_BYTES as u64;
        usize::try_from((block - self.size % block) % block).unwrap_or_default()
    }
}

/// Reads the manifest from the first bytes of a bundle. About [`MAX_MANIFEST_BYTES`] of them are always enough. The
/// error is a sentence.
pub fn read_bundle_manifest(beginning: &[u8]) -> Result<BundleManifest, String> {
    let mut archive = GzDecoder::new(beginning);
    let text = read_manifest_text(&mut archive)?;
    BundleManifest::parse(&text).map_err(|problems| problems.to_string())
}

/// Reads the manifest's text from the beginning of the archive. The error is a sentence.
pub fn read_manifest_text(archive: &mut impl Read) -> Result<Vec<u8>, String> {
    let cut_off = |error: std::io::Error| {
        format!("it is not an archive compressed by gzip, or it is only a part of one: {error}")
    };
    let mut block = [0; BLOCK_BYTES];
    archive.read_exact(&mut block).map_err(cut_off)?;
    let header = TarHeader::parse(&block)?.ok_or("the archive is empty")?;
    if header.path != MANIFEST {
        return Err(format!("the archive begins with {:?}, and a bundle with {MANIFEST}", header.path));
    }
    if header.size > MAX_MANIFEST_BYTES {
        return Err(format!(
            "its {MANIFEST} has {} bytes, and {MAX_MANIFEST_BYTES} is the maximum",
            header.size
        ));
    }
    let mut text = Vec::new();
    archive.by_ref().take(header.size).read_to_end(&mut text).map_err(cut_off)?;
    if text.len() as u64 != header.size {
        return Err(cut_off(std::io::ErrorKind::UnexpectedEof.into()));
    }
    archive.read_exact(&mut block[..header.padding()]).map_err(cut_off)?;
    Ok(text)
}

/// Parses a number in octal digits, with spaces or zero bytes around it.
fn parse_octal(field: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    u64::from_str_radix(digits, 8).ok().filter(|_| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The text before the first zero byte; `None` if it is empty or no plain text.
fn parse_text(field: &[u8]) -> Option<String> {
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
    fn header_gives_path_size_and_padding() {
        for (size, padding) in [(0, 0), (1, 511), (511, 1), (512, 0), (513, 511), (8_589_934_591, 1)] {
            let read = TarHeader::parse(header("bin/kubelet", size).as_bytes()).unwrap().unwrap();
            assert_eq!(read, TarHeader { path: "bin/kubelet".to_owned(), size });
            assert_eq!(read.padding(), padding);
        }
        assert_eq!(TarHeader::parse(&[0; BLOCK_BYTES]), Ok(None));
    }

    #[test]
    fn entries_other_than_plain_files_are_rejected() {
        let changed = |change: &dyn Fn(&mut tar::Header)| {
            let mut header = header("bin/kubelet", 10);
            change(&mut header);
            header.set_cksum();
            TarHeader::parse(header.as_bytes()).unwrap_err()
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
            let text = changed(&|header| header.set_entry_type(kind));
            assert!(text.contains("\"bin/kubelet\" of the archive is no plain file"), "{kind:?}: {text}");
        }
        let text = changed(&|header| header.as_mut_bytes()[257..263].copy_from_slice(b"ustar "));
        assert!(text.contains("format ustar"), "{text}");
        let text = changed(&|header| header.as_mut_bytes()[345] = b'x');
        assert!(text.contains("more than 100 bytes"), "{text}");
        let text = changed(&|header| header.as_mut_bytes()[0] = 0xff);
        assert!(text.contains("no plain text"), "{text}");
        // Binary sizes, which GNU tar uses beyond 8 GiB.
        let text = changed(&|header| header.as_mut_bytes()[124] = 0x80);
        assert!(text.contains("how long"), "{text}");
        let mut damaged = header("bin/kubelet", 10);
        damaged.as_mut_bytes()[3] ^= 1;
        assert!(TarHeader::parse(damaged.as_bytes()).unwrap_err().contains("its sum is wrong"));
    }

    #[test]
    fn manifest_is_readable_from_the_first_bytes() {
        let text = crate::kubernetes::bundle_manifest::tests::TEXT;
        let mut whole = archive(MANIFEST, text.as_bytes());
        assert_eq!(read_bundle_manifest(&whole).unwrap().name, "test");
        whole.truncate(whole.len() - 20);
        whole.extend(b"something else");
        assert_eq!(read_bundle_manifest(&whole).unwrap().name, "test", "the manifest stands before that");

        let reported = |bytes: &[u8]| read_bundle_manifest(bytes).unwrap_err();
        assert!(reported(b"").contains("only a part"), "{}", reported(b""));
        assert!(reported(b"#!/bin/sh").contains("gzip"));
        assert!(reported(&archive(MANIFEST, text.as_bytes())[..60]).contains("only a part"));
        assert!(reported(&archive("bin/kubelet", b"x")).contains("begins with \"bin/kubelet\""));
        let long = vec![b' '; usize::try_from(MAX_MANIFEST_BYTES).unwrap() + 1];
        assert!(reported(&archive(MANIFEST, &long)).contains("is the maximum"));
        let mut nothing = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        nothing.write_all(&[0; 2 * BLOCK_BYTES]).unwrap();
        assert!(reported(&nothing.finish().unwrap()).contains("empty"));
    }
}
