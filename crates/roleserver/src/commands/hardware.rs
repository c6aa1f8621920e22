//! `roleserver hardware`: the hardware of this machine, as the next report has it.
//!
//! People get a line per item, with sizes in GiB and TB: the lines of `shepherdctl describe machine`. Programs get the
//! report in the JSON form of its contract (`proto/shepherd/hardware/v1`), as the API encodes messages: 64-bit integers are
//! strings, and addresses and names of raw bytes are Base64.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use model::hardware_report::describe_hardware;
use model::plain_text::replace_hidden;
use proto::hardware::v1::cpu::Architecture;
use proto::hardware::v1::{BlockDevice, Cpu, HardwareReport, NetworkInterface};

/// The report for people: a label and a text per line. Hidden characters of firmware are visible.
#[must_use]
pub fn render_table(report: &HardwareReport) -> String {
    let lines = describe_hardware(report);
    let width = lines.iter().map(|(label, _)| label.len()).max().unwrap_or_default();
    let mut table = String::new();
    for (label, text) in lines {
        let _ = writeln!(table, "{label:<width$}  {}", replace_hidden(&text, &[]));
    }
    table
}

/// The report for programs: one JSON document. A property that could not be read is absent, empty or 0, as in the report.
#[must_use]
pub fn render_json(report: &HardwareReport) -> String {
    format!("{:#}\n", encode_report(report))
}

fn encode_report(report: &HardwareReport) -> Value {
    let mut fields = json!({
        "manufacturer": report.manufacturer,
        "product": report.product,
        "serialNumber": report.serial_number,
        "efiSupport": report.efi_support().as_str_name(),
        "cpus": report.cpus.iter().map(encode_cpu).collect::<Vec<_>>(),
        "blockDevices": report.block_devices.iter().map(encode_disk).collect::<Vec<_>>(),
        "networkInterfaces": report.network_interfaces.iter().map(encode_port).collect::<Vec<_>>(),
        "warnings": report.warnings,
        "kernelRelease": report.kernel_release,
        "hostname": report.hostname,
    });
    let memory = report.memory.map(|memory| {
        json!({
            "installedBytes": memory.installed_bytes.to_string(),
            "usableRatio": shortest(memory.usable_ratio),
        })
    });
    add_present(&mut fields, [("memory", memory)]);
    fields
}

fn encode_cpu(cpu: &Cpu) -> Value {
    let mut fields =
        json!({ "vendor": cpu.vendor, "model": cpu.model, "cores": cpu.cores, "threads": cpu.threads });
    let architecture = cpu.architecture.as_ref().map(|architecture| match architecture {
        Architecture::X8664(x86) => {
            ("x8664", json!({ "family": x86.family, "model": x86.model, "stepping": x86.stepping }))
        }
        Architecture::Arm64(arm) => (
            "arm64",
            json!({
                "implementer": arm.implementer, "part": arm.part, "variant": arm.variant,
                "revision": arm.revision,
            }),
        ),
    });
    add_present(&mut fields, architecture.map(|(name, value)| (name, Some(value))));
    fields
}

fn encode_disk(disk: &BlockDevice) -> Value {
    let mut fields = json!({
        "name": disk.name,
        "vendor": disk.vendor,
        "model": disk.model,
        "serialNumber": disk.serial_number,
        "wwn": STANDARD.encode(&disk.wwn),
        "rotational": disk.rotational,
        "capacityBytes": disk.capacity_bytes.to_string(),
        "logicalBlockBytes": disk.logical_block_bytes,
        "physicalBlockBytes": disk.physical_block_bytes,
        "protocol": disk.protocol().as_str_name(),
    });
    let health = [
        ("criticalWarning", disk.critical_warning.map(Value::from)),
        ("mediaErrors", disk.media_errors.map(|errors| errors.to_string().into())),
        ("availableSpareRatio", disk.available_spare_ratio.map(|ratio| shortest(ratio).into())),
        ("wearRatio", disk.wear_ratio.map(|ratio| shortest(ratio).into())),
    ];
    add_present(&mut fields, health);
    fields
}

fn encode_port(port: &NetworkInterface) -> Value {
    json!({
        "name": port.name,
        "mac": STANDARD.encode(&port.mac),
        "driver": port.driver,
        "supportedSpeedsMbps": port.supported_speeds_mbps,
        "currentSpeedMbps": port.current_speed_mbps,
        "linkUp": port.link_up,
    })
}

/// Adds the fields that have a value.
fn add_present(fields: &mut Value, more: impl IntoIterator<Item = (&'static str, Option<Value>)>) {
    let more: Map<String, Value> =
        more.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if let Value::Object(fields) = fields {
        fields.extend(more);
    }
}

/// The number with the fewest digits that is this one in single precision: 0.98, and not 0.9800000190734863.
fn shortest(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::hardware::v1::block_device::Protocol;
    use proto::hardware::v1::cpu::X86;
    use proto::hardware::v1::{EfiSupport, Memory};

    fn report() -> HardwareReport {
        HardwareReport {
            manufacturer: "Dell Inc.".into(),
            product: "PowerEdge R640".into(),
            serial_number: "0QX7Z93".into(),
            efi_support: EfiSupport::Enabled.into(),
            memory: Some(Memory { installed_bytes: 256 << 30, usable_ratio: 0.98 }),
            cpus: vec![Cpu {
                vendor: "GenuineIntel".into(),
                model: "Xeon 6134".into(),
                cores: 8,
                threads: 16,
                architecture: Some(Architecture::X8664(X86 { family: 6, model: 85, stepping: 4 })),
            }],
            block_devices: vec![
                BlockDevice {
                    name: "nvme0n1".into(),
                    model: "MZQL23T8".into(),
                    serial_number: "S64G".into(),
                    wwn: vec![0x50, 0],
                    capacity_bytes: 3_840_755_982_336,
                    logical_block_bytes: 512,
                    physical_block_bytes: 4096,
                    protocol: Protocol::Nvme.into(),
                    critical_warning: Some(false),
                    media_errors: Some(0),
                    wear_ratio: Some(0.25),
                    ..BlockDevice::default()
                },
                BlockDevice { name: "sda".into(), rotational: true, ..BlockDevice::default() },
            ],
            network_interfaces: vec![NetworkInterface {
                name: "eno1".into(),
                mac: vec![0x0c, 0xc4, 0x7a, 0x64, 0, 0x10],
                driver: "i40e".into(),
                supported_speeds_mbps: vec![1000, 10_000],
                current_speed_mbps: 10_000,
                link_up: true,
            }],
            warnings: vec!["/sys/a\u{1b}[31m cannot be read".into()],
            kernel_release: "6.1.0".into(),
            hostname: "rack7".into(),
        }
    }

    #[test]
    fn people_get_a_line_per_item_with_sizes_in_units() {
        let table = render_table(&report());
        let expected = "\
system     Dell Inc. PowerEdge R640
serial     0QX7Z93
host name  rack7
kernel     6.1.0
EFI        yes
memory     256 GiB, 98 % usable
cpu        GenuineIntel Xeon 6134, 8 cores, 16 threads, family 6 model 85 stepping 4
disk       nvme0n1: MZQL23T8, 3.8 TB, NVMe, solid state, blocks 512/4096, serial S64G, WWN 5000, 0 media errors, 25 % worn
disk       sda: unknown, unknown, protocol unknown, rotational, blocks 0/0
network    eno1: 0c:c4:7a:64:00:10, driver i40e, link at 10000 Mb/s, can 1000/10000 Mb/s
";
        let (lines, warning) = table.split_at(expected.len());
        assert_eq!(lines, expected);
        assert!(warning.starts_with("warning    /sys/a") && warning.ends_with("[31m cannot be read\n"));
        assert!(!table.contains('\u{1b}'), "{warning:?}");
    }

    #[test]
    fn programs_get_the_report_in_the_json_form_of_its_contract() {
        let text = render_json(&report());
        assert!(text.starts_with("{\n  ") && text.ends_with("}\n"), "{text}");
        let found: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({
            "manufacturer": "Dell Inc.",
            "product": "PowerEdge R640",
            "serialNumber": "0QX7Z93",
            "efiSupport": "EFI_SUPPORT_ENABLED",
            "memory": { "installedBytes": "274877906944", "usableRatio": 0.98 },
            "cpus": [{
                "vendor": "GenuineIntel",
                "model": "Xeon 6134",
                "cores": 8,
                "threads": 16,
                "x8664": { "family": 6, "model": 85, "stepping": 4 },
            }],
            "blockDevices": [
                {
                    "name": "nvme0n1",
                    "vendor": "",
                    "model": "MZQL23T8",
                    "serialNumber": "S64G",
                    "wwn": "UAA=",
                    "rotational": false,
                    "capacityBytes": "3840755982336",
                    "logicalBlockBytes": 512,
                    "physicalBlockBytes": 4096,
                    "protocol": "PROTOCOL_NVME",
                    "criticalWarning": false,
                    "mediaErrors": "0",
                    "wearRatio": 0.25,
                },
                {
                    "name": "sda",
                    "vendor": "",
                    "model": "",
                    "serialNumber": "",
                    "wwn": "",
                    "rotational": true,
                    "capacityBytes": "0",
                    "logicalBlockBytes": 0,
                    "physicalBlockBytes": 0,
                    "protocol": "PROTOCOL_UNSPECIFIED",
                },
            ],
            "networkInterfaces": [{
                "name": "eno1",
                "mac": "DMR6ZAAQ",
                "driver": "i40e",
                "supportedSpeedsMbps": [1000, 10_000],
                "currentSpeedMbps": 10_000,
                "linkUp": true,
            }],
            "warnings": ["/sys/a\u{1b}[31m cannot be read"],
            "kernelRelease": "6.1.0",
            "hostname": "rack7",
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn report_of_nothing_is_a_document_too() {
        let found: Value = serde_json::from_str(&render_json(&HardwareReport::default())).unwrap();
        assert_eq!(found["blockDevices"], json!([]));
        assert!(found.get("memory").is_none(), "{found}");
        assert!(render_table(&HardwareReport::default()).starts_with("system     unknown\n"));
    }
}
