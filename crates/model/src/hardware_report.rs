//! A hardware report for people: one line per item, in the order of the report.
//!
//! `shepherdctl describe machine` and `roleserver hardware` print these lines. Memory is in binary units, and disks are in
//! decimal ones, as they are sold.

use prost::Message as _;

use crate::byte_size::{ByteSize, DiskSize};
use proto::hardware::v1::block_device::Protocol;
use proto::hardware::v1::cpu::Architecture;
use proto::hardware::v1::{BlockDevice, Cpu, EfiSupport, HardwareReport, NetworkInterface};

/// Label and text of each line of an encoded report; an error if it cannot be decoded.
pub fn describe_report(bytes: &[u8]) -> Result<Vec<(String, String)>, prost::DecodeError> {
    Ok(describe_hardware(&HardwareReport::decode(bytes)?))
}

/// Label and text of each line.
#[must_use]
pub fn describe_hardware(report: &HardwareReport) -> Vec<(String, String)> {
    let mut lines = vec![
        ("system".to_owned(), join_known(&[&report.manufacturer, &report.product])),
        ("serial".to_owned(), or_unknown(&report.serial_number)),
        ("host name".to_owned(), or_unknown(&report.hostname)),
        ("kernel".to_owned(), or_unknown(&report.kernel_release)),
        ("EFI".to_owned(), format_efi(report.efi_support())),
    ];
    let memory = report.memory.unwrap_or_default();
    let usable = if memory.usable_ratio > 0.0 {
        format!(", {:.0} % usable", memory.usable_ratio * 100.0)
    } else {
        String::new()
    };
    lines.push((
        "memory".to_owned(),
        format!(
            "{}{usable}",
            size_or_unknown(memory.installed_bytes, ByteSize(memory.installed_bytes).humanize())
        ),
    ));
    lines.extend(report.cpus.iter().map(|found| ("cpu".to_owned(), format_cpu(found))));
    lines.extend(report.block_devices.iter().map(|found| ("disk".to_owned(), format_disk(found))));
    lines.extend(
        report.network_interfaces.iter().map(|found| ("network".to_owned(), format_interface(found))),
    );
    lines.extend(report.warnings.iter().map(|warning| ("warning".to_owned(), warning.clone())));
    lines
}

fn format_efi(support: EfiSupport) -> String {
    match support {
        EfiSupport::Unspecified | EfiSupport::Unknown => "unknown",
        EfiSupport::Unsupported => "no",
        EfiSupport::Disabled => "possible, not used by this boot",
        EfiSupport::Enabled => "yes",
    }
    .to_owned()
}

fn format_cpu(cpu: &Cpu) -> String {
    let kind = match &cpu.architecture {
        Some(Architecture::X8664(x86)) => {
            format!(", family {} model {} stepping {}", x86.family, x86.model, x86.stepping)
        }
        Some(Architecture::Arm64(arm)) => format!(
            ", implementer {:#x} part {:#x} variant {:#x} revision {}",
            arm.implementer, arm.part, arm.variant, arm.revision
        ),
        None => String::new(),
    };
    format!("{}, {} cores, {} threads{kind}", join_known(&[&cpu.vendor, &cpu.model]), cpu.cores, cpu.threads)
}

fn format_disk(disk: &BlockDevice) -> String {
    let protocol = match disk.protocol() {
        Protocol::Unspecified | Protocol::Unknown => "protocol unknown",
        Protocol::Scsi => "SCSI",
        Protocol::Ata => "ATA",
        Protocol::Nvme => "NVMe",
        Protocol::Mmc => "MMC",
        Protocol::Virtio => "virtio",
    };
    let mut text = format!(
        "{}: {}, {}, {protocol}, {}",
        disk.name,
        join_known(&[&disk.vendor, &disk.model]),
        size_or_unknown(disk.capacity_bytes, DiskSize(disk.capacity_bytes).humanize()),
        if disk.rotational { "rotational" } else { "solid state" },
    );
    let mut add = |more: String| {
        text.push_str(", ");
        text.push_str(&more);
    };
    add(format!("blocks {}/{}", disk.logical_block_bytes, disk.physical_block_bytes));
    if !disk.serial_number.is_empty() {
        add(format!("serial {}", disk.serial_number));
    }
    if !disk.wwn.is_empty() {
        add(format!("WWN {}", hex::encode(&disk.wwn)));
    }
    if disk.critical_warning == Some(true) {
        add("CRITICAL WARNING".to_owned());
    }
    if let Some(errors) = disk.media_errors {
        add(format!("{errors} media errors"));
    }
    if let Some(spare) = disk.available_spare_ratio {
        add(format!("{:.0} % spare", spare * 100.0));
    }
    if let Some(wear) = disk.wear_ratio {
        add(format!("{:.0} % worn", wear * 100.0));
    }
    text
}

fn format_interface(port: &NetworkInterface) -> String {
    let mac: Vec<String> = port.mac.iter().map(|byte| format!("{byte:02x}")).collect();
    let speeds: Vec<String> = port.supported_speeds_mbps.iter().map(u32::to_string).collect();
    let link = match (port.link_up, port.current_speed_mbps) {
        (false, _) => "no link".to_owned(),
        (true, 0) => "link, speed unknown".to_owned(),
        (true, speed) => format!("link at {speed} Mb/s"),
    };
    let can = if speeds.is_empty() { String::new() } else { format!(", can {} Mb/s", speeds.join("/")) };
    format!("{}: {}, driver {}, {link}{can}", port.name, mac.join(":"), or_unknown(&port.driver))
}

fn join_known(parts: &[&str]) -> String {
    let given: Vec<&str> = parts.iter().copied().filter(|part| !part.is_empty()).collect();
    if given.is_empty() { "unknown".to_owned() } else { given.join(" ") }
}

fn or_unknown(text: &str) -> String {
    join_known(&[text])
}

/// The size of a device, unless the report does not know it.
fn size_or_unknown(bytes: u64, size: String) -> String {
    if bytes == 0 { "unknown".to_owned() } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hardware::v1::Memory;

    #[test]
    fn memory_is_in_binary_units_and_disks_are_in_decimal_ones() {
        let report = HardwareReport {
            memory: Some(Memory { installed_bytes: 64 << 30, ..Memory::default() }),
            block_devices: vec![
                BlockDevice { capacity_bytes: 3_840_755_982_336, ..BlockDevice::default() },
                BlockDevice::default(),
            ],
            ..HardwareReport::default()
        };
        let lines = describe_report(&report.encode_to_vec()).unwrap();
        assert!(lines.contains(&("memory".to_owned(), "64 GiB".to_owned())), "{lines:?}");
        let disks: Vec<&String> =
            lines.iter().filter(|(label, _)| label == "disk").map(|(_, text)| text).collect();
        assert!(disks[0].contains(", 3.8 TB, ") && disks[1].contains(", unknown, "), "{disks:?}");
    }

    #[test]
    fn empty_report_shows_unknown() {
        let lines = describe_report(&[]).unwrap();
        assert_eq!(lines.len(), 6);
        assert_eq!(lines[0], ("system".to_owned(), "unknown".to_owned()));
        assert!(describe_report(&[0xff, 0xff]).is_err());
    }
}
