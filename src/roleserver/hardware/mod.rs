//! What the machine is made of.
//!
//! One file per source. Every reader takes where to read from ([`Sources`]), so
//! that a test can lay out a machine by hand, and every parser is a function of
//! bytes. A thing that cannot be read is left unset and becomes a warning; no
//! failure to read something ever fails the report.
//!
//! * [`dmi`][]: what the firmware says: maker, product, serial, memory modules.
//! * [`efi`][], [`memory`][], [`cpu`][]: what firmware and kernel say together.
//! * [`block`][]: block devices by sysfs; [`nvme`][], [`scsi`][] and [`ata`][] ask
//!   the devices themselves.
//! * [`network`][]: ports by sysfs and ethtool.
//! * [`ioctl`][]: the three kernel calls behind that, the only unsafe code.
//!
//! Nothing here writes to a device: each command sent is an identification or a
//! log that the device only reads out.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::proto::hardware::v1 as wire;

pub mod ata;
pub mod block;
pub mod cpu;
pub mod dmi;
pub mod efi;
pub mod ioctl;
pub mod memory;
pub mod network;
pub mod nvme;
pub mod scsi;

/// Where the kernel shows the machine.
#[derive(Clone, Debug)]
pub struct Sources {
    /// sysfs.
    pub sys: PathBuf,
    /// procfs.
    pub proc: PathBuf,
    /// Device nodes.
    pub dev: PathBuf,
    /// Who answers for network ports, which have no path.
    pub ports: network::Ports,
}

impl Sources {
    /// The machine this program runs on.
    #[must_use]
    pub fn host() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into(), dev: "/dev".into(), ports: network::Ports::Kernel }
    }

    /// A machine laid out under one directory, whose ports answer nothing.
    #[must_use]
    pub fn under(root: &Path) -> Self {
        Self {
            sys: root.join("sys"),
            proc: root.join("proc"),
            dev: root.join("dev"),
            ports: network::Ports::Silent,
        }
    }
}

/// What is read of a table or of a list of all processors; that of 512 of them has some 2 MiB.
const TABLE_LIMIT_BYTES: u64 = 16 << 20;
/// What is read of an attribute, which is a page at most; pages have up to 64 KiB.
const ATTRIBUTE_LIMIT_BYTES: u64 = 64 << 10;

/// Characters of one text in a report.
const TEXT_LIMIT: usize = 1000;

/// Reads the whole machine; blocks, on a broken disk for long.
#[must_use]
pub fn read(sources: &Sources) -> wire::HardwareReport {
    let mut warnings = Warnings::default();
    let dmi = dmi::read(sources, &mut warnings);
    wire::HardwareReport {
        efi_support: efi::read(sources, &dmi).into(),
        memory: Some(memory::read(sources, &dmi, &mut warnings)),
        cpus: cpu::read(sources, &mut warnings),
        block_devices: block::read(sources, &mut warnings),
        network_interfaces: network::read(sources, &mut warnings),
        kernel_release: cut(&warnings.text(&sources.proc.join("sys/kernel/osrelease"))),
        hostname: cut(&warnings.text(&sources.proc.join("sys/kernel/hostname"))),
        manufacturer: dmi.manufacturer,
        product: dmi.product,
        serial_number: dmi.serial_number,
        warnings: warnings.into_sentences(),
    }
}

/// What could not be read, one sentence each.
#[derive(Debug, Default)]
pub struct Warnings {
    sentences: Vec<String>,
    left_out: usize,
}

impl Warnings {
    /// A machine with hundreds of broken disks must not make a report too large to take.
    const MOST: usize = 64;
    const LONGEST: usize = 300;

    /// Adds a sentence.
    pub fn add(&mut self, sentence: impl AsRef<str>) {
        if self.sentences.len() < Self::MOST {
            self.sentences.push(sentence.as_ref().chars().take(Self::LONGEST).collect());
        } else {
            self.left_out += 1;
        }
    }

    /// Reads a file that every machine has, trimmed; empty with a warning when it cannot.
    pub fn text(&mut self, path: &Path) -> String {
        match beginning(path, TABLE_LIMIT_BYTES) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
            Err(error) => {
                self.add(format!("{} cannot be read: {error}", path.display()));
                String::new()
            }
        }
    }

    fn into_sentences(mut self) -> Vec<String> {
        if self.left_out > 0 {
            self.sentences.push(format!("{} more warnings are left out", self.left_out));
        }
        self.sentences
    }
}

/// The first bytes of a file: what the kernel shows may be as wrong as the firmware behind it.
fn beginning(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads an attribute that a machine may lack.
fn attribute(path: &Path) -> std::io::Result<Vec<u8>> {
    beginning(path, ATTRIBUTE_LIMIT_BYTES)
}

/// As much of a text as belongs into a report, which must not become too large to be taken.
fn cut(text: &str) -> String {
    text.chars().take(TEXT_LIMIT).collect()
}

/// Reads a text that a machine may lack, trimmed, cut and not empty.
#[must_use]
pub fn text(path: &Path) -> Option<String> {
    let bytes = attribute(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| cut(text))
}

/// Reads a decimal number that a machine may lack.
#[must_use]
pub fn number(path: &Path) -> Option<u64> {
    text(path)?.parse().ok()
}

/// The names in a directory, in order; none when it cannot be read.
#[must_use]
pub fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_processors_and_memory() {
        let report = read(&Sources::host());
        assert!(!report.cpus.is_empty(), "{report:?}");
        assert!(report.cpus.iter().all(|cpu| cpu.cores >= 1 && cpu.threads >= cpu.cores));
        assert!(report.memory.unwrap().installed_bytes > 0);
        assert!(!report.kernel_release.is_empty());
        assert_ne!(report.efi_support, 0);
    }

    #[test]
    fn machine_that_shows_nothing_still_gives_a_report() {
        let root = tempfile::tempdir().unwrap();
        let report = read(&Sources::under(root.path()));
        assert!(report.cpus.is_empty() && report.block_devices.is_empty());
        assert!(report.warnings.len() >= 4, "{:?}", report.warnings);
    }

    #[test]
    fn warnings_have_an_end() {
        let mut warnings = Warnings::default();
        for _ in 0..100 {
            warnings.add("x".repeat(1000));
        }
        let sentences = warnings.into_sentences();
        assert_eq!(sentences.len(), 65);
        assert_eq!(sentences[0].len(), 300);
        assert_eq!(sentences[64], "36 more warnings are left out");
    }
}
