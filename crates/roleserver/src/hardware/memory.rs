//! Installed and usable memory.
//!
//! A machine that boots with half its memory mapped out looks healthy in every other way; the ratio of the two shows
//! it.

use proto::hardware::v1 as wire;

use crate::hardware::dmi::Dmi;
use crate::hardware::{Sources, Warnings, list_names, read_text};

/// Firmware and kernel agree if they differ by less than one part in this many: both round, and firmware keeps some
/// memory for itself.
const AGREEING_PARTS: u64 = 8;

/// Reads installed and usable memory.
pub fn read_memory(sources: &Sources, dmi: &Dmi, warnings: &mut Warnings) -> wire::Memory {
    let modules = dmi.memory_bytes.filter(|bytes| *bytes > 0);
    let usable = parse_mem_total(&warnings.read_required_text(&sources.proc.join("meminfo")));
    let (installed_bytes, doubt) = decide_installed(modules, memory_block_bytes(sources), usable);
    if let Some(doubt) = doubt {
        warnings.add_warning(doubt);
    }
    wire::Memory { installed_bytes, usable_ratio: usable_ratio(usable.unwrap_or(0), installed_bytes) }
}

/// The installed memory by what the firmware says of its modules, what the kernel says of its memory blocks, and what
/// the kernel can use; and a sentence where they contradict each other. The firmware is believed first. What the kernel
/// can use is installed, also if the others differ.
fn decide_installed(modules: Option<u64>, blocks: Option<u64>, usable: Option<u64>) -> (u64, Option<String>) {
    match (modules.or(blocks), usable) {
        (None, None) => {
            (0, Some("the firmware and the kernel do not report how much memory is installed".to_owned()))
        }
        (None, Some(usable)) => (
            usable,
            Some(format!(
                "the firmware and the kernel do not report how much memory is installed; it is at least the {usable} \
                 bytes that the kernel can use"
            )),
        ),
        (Some(installed), Some(usable)) if installed < usable => (
            usable,
            Some(format!(
                "{installed} bytes of memory are installed by the {}, and the kernel can use {usable}: the larger \
                 number is reported",
                if modules.is_some() { "firmware's table" } else { "kernel's memory blocks" }
            )),
        ),
        (Some(installed), _) => {
            let doubt = modules.zip(blocks).filter(|(modules, blocks)| {
                modules.abs_diff(*blocks) > (*modules).max(*blocks) / AGREEING_PARTS
            });
            let doubt = doubt.map(|(modules, blocks)| {
                format!("the firmware has memory modules of {modules} bytes, and the kernel has blocks of {blocks}")
            });
            (installed, doubt)
        }
    }
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
    #[test]
    fn sources_are_compared_and_what_the_kernel_uses_is_installed() {
        const GIB: u64 = 1 << 30;
        for (modules, blocks, usable, installed, part) in [
            (None, None, None, 0, Some("the firmware and the kernel do not report")),
            (None, None, Some(8), 8, Some("at least the 8589934592 bytes")),
            (None, Some(32), Some(31), 32, None),
            (Some(32), None, Some(31), 32, None),
            (Some(32), Some(31), Some(30), 32, None),
            (Some(32), Some(24), Some(23), 32, Some("the kernel has blocks of 25769803776")),
            (Some(16), Some(32), Some(31), 31, Some("by the firmware's table")),
            (None, Some(16), Some(31), 31, Some("by the kernel's memory blocks")),
            (Some(32), Some(32), None, 32, None),
        ] {
            let bytes = |count: Option<u64>| count.map(|count| count * GIB);
            let (found, doubt) = decide_installed(bytes(modules), bytes(blocks), bytes(usable));
            assert_eq!(found, installed * GIB, "{modules:?} {blocks:?} {usable:?}");
            assert_eq!(doubt.is_some(), part.is_some(), "{doubt:?}");
            assert!(part.is_none_or(|part| doubt.is_some_and(|doubt| doubt.contains(part))));
        }
    }
}
