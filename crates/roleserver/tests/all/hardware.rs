//! Reports of machines with odd hardware or odd firmware.
//!
//! Each folder of `tests/data/hardware` is a machine: its `sys` and `proc` as far as they matter, and `report.txt`,
//! the report that it must give. A report is compared in the form of [`describe`], without the warnings about what a
//! folder leaves out.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use proto::hardware::v1::HardwareReport;
use shepherd_roleserver::hardware::{Sources, read_hardware};

fn describe(report: &HardwareReport) -> Result<String> {
    let mut text = String::new();
    for (name, value) in [
        ("manufacturer", &report.manufacturer),
        ("product", &report.product),
        ("serial number", &report.serial_number),
    ] {
        writeln!(text, "{name}: {}", or_dash(value))?;
    }
    let memory = report.memory.as_ref().context("no memory")?;
    writeln!(text, "memory: {} bytes, {:.2} usable", memory.installed_bytes, memory.usable_ratio)?;
    let threads: u32 = report.cpus.iter().map(|cpu| cpu.threads).sum();
    writeln!(text, "processors: {}, {threads} threads", report.cpus.len())?;
    for disk in &report.block_devices {
        writeln!(
            text,
            "disk: {}, {} bytes, WWN {}, serial number {}",
            disk.name,
            disk.capacity_bytes,
            or_dash(&hex::encode(&disk.wwn)),
            or_dash(&disk.serial_number)
        )?;
    }
    let left_out =
        |warning: &str| warning.contains("No such file or directory") || warning.contains(" is not there: ");
    for warning in report.warnings.iter().filter(|warning| !left_out(warning)) {
        writeln!(text, "warning: {warning}")?;
    }
    Ok(text)
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[test]
fn odd_machines_give_their_reports() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/hardware");
    let mut machines = Vec::new();
    for entry in fs::read_dir(&root)? {
        machines.push(entry?.path());
    }
    machines.sort();
    assert!(machines.len() >= 17, "{machines:?}");
    for machine in machines {
        let report = read_hardware(&Sources::in_directory(&machine));
        let expected = fs::read_to_string(machine.join("report.txt"))
            .with_context(|| format!("reading the report of {}", machine.display()))?;
        assert_eq!(describe(&report)?, expected, "{}", machine.display());
    }
    Ok(())
}
