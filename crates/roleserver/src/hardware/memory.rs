//! Installed and usable memory.
//!
//! A machine that boots with half its memory mapped out looks healthy in every other way; the ratio of the two shows
//! it.

use proto::hardware::v1 as wire;

use crate::hardware::dmi::Dmi;
use crate::hardware::{Sources, Warnings, list_names, read_text};

/// Reads installed and usable memory.
pub fn read_memory(sources: &Sources, dmi: &Dmi, warnings: &mut Warnings) -> wire::Memory {
    let installed = dmi.memory_bytes.filter(|bytes| *bytes > 0).or_else(|| memory_block_bytes(sources));
    let usable = parse_mem_total(&warnings.read_required_text(&sources.proc.join("meminfo")));
    if installed.is_none() {
        warnings.add_warning("neither the firmware nor the kernel tells how much memory is installed");
    }
    let installed_bytes = installed.unwrap_or(0);
    wire::Memory { installed_bytes, usable_ratio: usable_ratio(usable.unwrap_or(0), installed_bytes) }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a ratio that people read; its seventh digit means nothing"
)]
fn usable_ratio(part: u64, whole: u64) -> f32 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64) as f32 }
}

/// The size of all memory blocks of the kernel.
fn memory_block_bytes(sources: &Sources) -> Option<u64> {
    let directory = sources.sys.join("devices/system/memory");
    let size = u64::from_str_radix(&read_text(&directory.join("block_size_bytes"))?, 16).ok()?;
    let is_block = |name: &&String| {
        name.strip_prefix("memory").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let count = list_names(&directory).iter().filter(is_block).count();
    u64::try_from(count).ok()?.checked_mul(size).filter(|bytes| *bytes > 0)
}

fn parse_mem_total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> (tempfile::TempDir, Sources) {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        let memory = sources.sys.join("devices/system/memory");
        for name in ["memory0", "memory1", "memory32", "power"] {
            std::fs::create_dir_all(memory.join(name)).unwrap();
        }
        std::fs::write(memory.join("block_size_bytes"), "8000000\n").unwrap();
        std::fs::create_dir_all(&sources.proc).unwrap();
        std::fs::write(sources.proc.join("meminfo"), "MemTotal:         196608 kB\nMemFree: 1 kB\n").unwrap();
        (root, sources)
    }

    #[test]
    fn firmware_is_believed_before_blocks() {
        let (_root, sources) = machine();
        let dmi = Dmi { memory_bytes: Some(256 << 20), ..Dmi::default() };
        let memory = read_memory(&sources, &dmi, &mut Warnings::default());
        assert_eq!(memory, wire::Memory { installed_bytes: 256 << 20, usable_ratio: 0.75 });
    }

    #[test]
    fn blocks_are_counted_where_the_firmware_is_silent() {
        let (_root, sources) = machine();
        let memory = read_memory(&sources, &Dmi::default(), &mut Warnings::default());
        assert_eq!(memory, wire::Memory { installed_bytes: 384 << 20, usable_ratio: 0.5 });
    }
}
