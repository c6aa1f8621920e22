//! Reports of machines with odd hardware or odd firmware.
//!
//! Each folder of `tests/data/hardware` is a machine: its `sys` and `proc` as far as they matter, and `report.txt`,
//! the report that it must give. A second reader computed each report from its folder by the specifications, before the
//! two were compared. `origin.txt` is in those that follow a machine of a public source: which one, and what is
//! odd in it. A report is compared in the form of [`describe`], without the warnings about what a folder leaves out.

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
    for cpu in &report.cpus {
        let (vendor, model) = (or_dash(&cpu.vendor), or_dash(&cpu.model));
        writeln!(text, "processor: {vendor}, {model}, {} cores, {} threads", cpu.cores, cpu.threads)?;
    }
    for disk in &report.block_devices {
        writeln!(
            text,
            "disk: {}, {}, {}, {}, {} bytes, WWN {}, serial number {}",
            disk.name,
            or_dash(&disk.vendor),
            or_dash(&disk.model),
            disk.protocol().as_str_name().trim_start_matches("PROTOCOL_").to_lowercase(),
            disk.capacity_bytes,
            or_dash(&hex::encode(&disk.wwn)),
            or_dash(&disk.serial_number)
        )?;
    }
    for port in &report.network_interfaces {
        let (address, driver) = (hex::encode(&port.mac), or_dash(&port.driver));
        let speed = match (port.link_up, port.current_speed_mbps) {
            (false, _) => "no link".to_owned(),
            (true, 0) => "link of unknown speed".to_owned(),
            (true, speed) => format!("{speed} Mb/s"),
        };
        writeln!(text, "port: {}, {}, {driver}, {speed}", port.name, or_dash(&address))?;
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
    assert!(machines.len() >= 34, "{machines:?}");
    let mut differences = String::new();
    for machine in machines {
        let report = describe(&read_hardware(&Sources::in_directory(&machine)))?;
        let expected = fs::read_to_string(machine.join("report.txt"))
            .with_context(|| format!("reading the report of {}", machine.display()))?;
        if report != expected {
            writeln!(differences, "{}\n--- expected\n{expected}--- reported\n{report}", machine.display())?;
        }
    }
    assert!(differences.is_empty(), "{differences}");
    Ok(())
}
