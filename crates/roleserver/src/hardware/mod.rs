//! Hardware inventory: reads the machine and reports what could not be read as warnings.
//!
//! One file per source. Every reader takes the paths to read from ([`Sources`]), so that a test can lay out a machine
//! by hand, and every parser is a function of bytes.
//!
//! * [`dmi`][]: data of the firmware: maker, product, serial number, memory modules, UEFI support.
//! * [`memory`][]: data of firmware and kernel together. [`cpu`][]: data of the kernel.
//! * [`block`][]: block devices from sysfs; [`nvme`][], [`scsi`][] and [`ata`][] query the devices themselves, and
//!   [`block_unit`][] finds the devices that are one disk.
//! * [`network`][]: ports from sysfs and ethtool.
//! * [`management_controller`][]: what looks like a disk or a port and belongs to the management controller.
//! * [`ioctl`][]: the three kernel calls behind that, the only unsafe code of the inventory.
//!
//! # Invariants
//!
//! * Nothing here writes to a device. Each command is an identification or a log that the device only reads out, and
//!   [`ioctl`][] rejects every other one.
//! * A thing is counted once, under however many names the kernel shows it. A text that is a placeholder
//!   ([`model::firmware_text`]) is no value. Where two sources contradict each other, a warning says so.
//! * A value that cannot be read is left unset and becomes a warning. No failure to read something ever fails the
//!   report.
//! * A report has a bounded size: the length of texts, the number of warnings and the bytes that are read of a file are
//!   limited.
//! * Bytes of a device or of the firmware are not trusted. No parser panics on them; `tests/all/fuzz.rs` feeds them
//!   random ones.
//!
//! # Notes for the next implementor
//!
//! A read may block for long on a broken disk, so the agent calls [`read_hardware`] in a thread of its own and does not
//! wait for it longer than twenty seconds. A layout from a specification is cited by its name and page, so that the
//! next reader can check the offsets.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use proto::hardware::v1 as wire;

pub mod ata;
pub mod block;
pub mod block_unit;
pub mod cpu;
pub mod dmi;
pub mod ioctl;
pub mod management_controller;
pub mod memory;
pub mod network;
pub mod nvme;
pub mod scsi;

/// Where to read the machine from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Mount point of sysfs, `/sys`.
    pub sys: PathBuf,
    /// Mount point of procfs, `/proc`.
    pub proc: PathBuf,
    /// Directory of device nodes, `/dev`.
    pub dev: PathBuf,
    /// The source of data on network ports, which have no path.
    pub ports: network::PortSource,
}

impl Sources {
    /// The machine this program runs on.
    #[must_use]
    pub fn host() -> Self {
        Self {
            sys: "/sys".into(),
            proc: "/proc".into(),
            dev: "/dev".into(),
            ports: network::PortSource::Kernel,
        }
    }

    /// A machine laid out under one directory, without a kernel for its ports.
    #[must_use]
    pub fn in_directory(root: &Path) -> Self {
        Self {
            sys: root.join("sys"),
            proc: root.join("proc"),
            dev: root.join("dev"),
            ports: network::PortSource::FilesOnly,
        }
    }
}

/// Bytes that are read of a table or of a list of all processors; that of 512 processors is about 2 MiB.
const TABLE_LIMIT_BYTES: u64 = 16 << 20;
/// Bytes that are read of an attribute, which is at most a page; pages have up to 64 KiB.
const ATTRIBUTE_LIMIT_BYTES: u64 = 64 << 10;

/// Most characters of one text in a report.
const TEXT_LIMIT: usize = 1000;

/// Reads the whole machine. Blocks, on a broken disk for long.
#[must_use]
pub fn read_hardware(sources: &Sources) -> wire::HardwareReport {
    let mut warnings = Warnings::default();
    let dmi = dmi::read_dmi(sources, &mut warnings);
    wire::HardwareReport {
        efi_support: dmi::read_efi_support(sources, &dmi).into(),
        memory: Some(memory::read_memory(sources, &dmi, &mut warnings)),
        cpus: cpu::read_cpus(sources, &mut warnings),
        block_devices: block::read_block_devices(sources, &mut warnings),
        network_interfaces: network::read_interfaces(sources, &mut warnings),
        kernel_release: truncate_text(
            &warnings.read_required_text(&sources.proc.join("sys/kernel/osrelease")),
        ),
        hostname: truncate_text(&warnings.read_required_text(&sources.proc.join("sys/kernel/hostname"))),
        manufacturer: dmi.manufacturer,
        product: dmi.product,
        serial_number: dmi.serial_number,
        warnings: warnings.into_sentences(),
    }
}

/// Warnings about what could not be read, one sentence each.
#[derive(Debug, Default)]
pub struct Warnings {
    sentences: Vec<String>,
    omitted: usize,
}

impl Warnings {
    /// A machine with hundreds of broken disks must not make a report too large to take.
    const MAX_SENTENCES: usize = 64;
    const MAX_SENTENCE_CHARS: usize = 300;

    /// Adds a sentence, shortened to 300 characters; beyond 64 sentences it is only counted.
    pub fn add_warning(&mut self, sentence: impl AsRef<str>) {
        if self.sentences.len() < Self::MAX_SENTENCES {
            self.sentences.push(sentence.as_ref().chars().take(Self::MAX_SENTENCE_CHARS).collect());
        } else {
            self.omitted += 1;
        }
    }

    /// Reads a file that every machine has, trimmed; empty with a warning if it cannot be read.
    pub fn read_required_text(&mut self, path: &Path) -> String {
        match read_prefix(path, TABLE_LIMIT_BYTES) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
            Err(error) => {
                self.add_warning(format!("{} cannot be read: {error}", path.display()));
                String::new()
            }
        }
    }

    fn into_sentences(mut self) -> Vec<String> {
        if self.omitted > 0 {
            self.sentences.push(format!("{} more warnings are left out", self.omitted));
        }
        self.sentences
    }
}

/// Reads the first bytes of a file: the kernel's data may be as wrong as the firmware behind it.
fn read_prefix(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads an attribute that a machine may lack.
fn read_attribute(path: &Path) -> std::io::Result<Vec<u8>> {
    read_prefix(path, ATTRIBUTE_LIMIT_BYTES)
}

/// The first characters of a text, because a report must not become too large.
fn truncate_text(text: &str) -> String {
    text.chars().take(TEXT_LIMIT).collect()
}

/// Reads a text that a machine may lack, trimmed and shortened; `None` if it is empty.
#[must_use]
pub fn read_text(path: &Path) -> Option<String> {
    let bytes = read_attribute(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| truncate_text(text))
}

/// Reads a decimal number that a machine may lack.
#[must_use]
pub fn read_number(path: &Path) -> Option<u64> {
    read_text(path)?.parse().ok()
}

/// The names in a directory, sorted; empty if it cannot be read.
#[must_use]
pub fn list_names(directory: &Path) -> Vec<String> {
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
        let report = read_hardware(&Sources::host());
        assert!(!report.cpus.is_empty(), "{report:?}");
        assert!(report.cpus.iter().all(|cpu| cpu.cores >= 1 && cpu.threads >= cpu.cores));
        assert!(report.memory.unwrap().installed_bytes > 0);
        assert!(!report.kernel_release.is_empty());
        assert_ne!(report.efi_support, 0);
    }

    #[test]
    fn machine_that_shows_nothing_still_gives_a_report() {
        let root = tempfile::tempdir().unwrap();
        let report = read_hardware(&Sources::in_directory(root.path()));
        assert!(report.cpus.is_empty() && report.block_devices.is_empty());
        assert!(report.warnings.len() >= 4, "{:?}", report.warnings);
    }

    #[test]
    fn warnings_have_an_end() {
        let mut warnings = Warnings::default();
        for _ in 0..100 {
            warnings.add_warning("x".repeat(1000));
        }
        let sentences = warnings.into_sentences();
        assert_eq!(sentences.len(), 65);
        assert_eq!(sentences[0].len(), 300);
        assert_eq!(sentences[64], "36 more warnings are left out");
    }
}
