//! Hardware reports of simulated machines: plausible, and the same at every boot.

use proto::hardware::v1 as hardware;

use crate::seed::Seed;

const GIB: u64 = 1 << 30;
const TB: u64 = 1_000_000_000_000;

/// One model of server.
struct ServerModel {
    manufacturer: &'static str,
    product: &'static str,
    cpu_vendor: &'static str,
    cpu_model: &'static str,
    x86: hardware::cpu::X86,
    sockets: u32,
    cores: u32,
    memory_gib: u64,
    disks: u32,
    disk_model: &'static str,
    disk_bytes: u64,
    speeds_mbps: &'static [u32],
    driver: &'static str,
}

const MODELS: [ServerModel; 3] = [
    ServerModel {
        manufacturer: "Dell Inc.",
        product: "PowerEdge R6615",
        cpu_vendor: "AuthenticAMD",
        cpu_model: "AMD EPYC 9354P 32-Core Processor",
        x86: hardware::cpu::X86 { family: 25, model: 17, stepping: 1 },
        sockets: 1,
        cores: 32,
        memory_gib: 384,
        disks: 2,
        disk_model: "Dell Ent NVMe CM7 U.2 RI 3.84TB",
        disk_bytes: 384 * TB / 100,
        speeds_mbps: &[10_000, 25_000],
        driver: "bnxt_en",
    },
    ServerModel {
        manufacturer: "Supermicro",
        product: "SYS-121C-TN10R",
        cpu_vendor: "GenuineIntel",
        cpu_model: "Intel(R) Xeon(R) Gold 6430",
        x86: hardware::cpu::X86 { family: 6, model: 143, stepping: 8 },
        sockets: 2,
        cores: 32,
        memory_gib: 512,
        disks: 4,
        disk_model: "SAMSUNG MZQL27T6HBLA-00A07",
        disk_bytes: 768 * TB / 100,
        speeds_mbps: &[1_000, 10_000, 25_000],
        driver: "ice",
    },
    ServerModel {
        manufacturer: "HPE",
        product: "ProLiant DL20 Gen10 Plus",
        cpu_vendor: "GenuineIntel",
        cpu_model: "Intel(R) Xeon(R) E-2378 CPU @ 2.60GHz",
        x86: hardware::cpu::X86 { family: 6, model: 167, stepping: 1 },
        sockets: 1,
        cores: 8,
        memory_gib: 64,
        disks: 2,
        disk_model: "VK000960GXAWK",
        disk_bytes: 960_197_124_096,
        speeds_mbps: &[100, 1_000],
        driver: "tg3",
    },
];

/// The hardware report of machine `index`.
#[must_use]
pub(crate) fn hardware_report(seed: Seed, index: u32, hostname: &str) -> hardware::HardwareReport {
    let chosen = usize::try_from(seed.number_below(MODELS.len() as u64, "model", index, 0)).unwrap_or(0);
    let model = &MODELS[chosen];
    hardware::HardwareReport {
        manufacturer: model.manufacturer.to_owned(),
        product: model.product.to_owned(),
        serial_number: serial_number(seed, "serial", index, 0, 8),
        efi_support: hardware::EfiSupport::Enabled.into(),
        memory: Some(hardware::Memory {
            installed_bytes: model.memory_gib * GIB,
            usable_ratio: if model.memory_gib > 100 { 0.985 } else { 0.97 },
        }),
        cpus: (0..model.sockets)
            .map(|_| hardware::Cpu {
                vendor: model.cpu_vendor.to_owned(),
                model: model.cpu_model.to_owned(),
                cores: model.cores,
                threads: model.cores * 2,
                architecture: Some(hardware::cpu::Architecture::X8664(model.x86)),
            })
            .collect(),
        block_devices: (0..model.disks).map(|disk| block_device(model, seed, index, disk)).collect(),
        network_interfaces: (0..2).map(|port| network_interface(model, seed, index, port)).collect(),
        warnings: Vec::new(),
        kernel_release: "6.1.0-28-amd64".to_owned(),
        hostname: hostname.to_owned(),
    }
}

fn block_device(model: &ServerModel, seed: Seed, index: u32, disk: u32) -> hardware::BlockDevice {
    let used = seed.number_below(40, "wear", index, u64::from(disk));
    let mut wwn = vec![0x36, 0x48, 0x41];
    wwn.extend_from_slice(&seed.bytes("wwn", index, u64::from(disk))[..13]);
    hardware::BlockDevice {
        name: format!("nvme{disk}n1"),
        vendor: String::new(),
        model: model.disk_model.to_owned(),
        serial_number: serial_number(seed, "disk", index, disk, 14),
        wwn,
        rotational: false,
        capacity_bytes: model.disk_bytes,
        logical_block_bytes: 512,
        physical_block_bytes: 4096,
        protocol: hardware::block_device::Protocol::Nvme.into(),
        critical_warning: Some(false),
        media_errors: Some(0),
        available_spare_ratio: Some(1.0),
        wear_ratio: Some(f32::from(u8::try_from(used).unwrap_or(0)) / 100.0),
    }
}

fn network_interface(model: &ServerModel, seed: Seed, index: u32, port: u32) -> hardware::NetworkInterface {
    // A locally administered address, which no real port has.
    let mut mac = vec![0x02, 0x53];
    mac.extend_from_slice(&seed.bytes("mac", index, u64::from(port))[..4]);
    let link_up = port == 0;
    hardware::NetworkInterface {
        name: format!("eno{}", port + 1),
        mac,
        driver: model.driver.to_owned(),
        supported_speeds_mbps: model.speeds_mbps.to_vec(),
        current_speed_mbps: if link_up { model.speeds_mbps.last().copied().unwrap_or(0) } else { 0 },
        link_up,
    }
}

fn serial_number(seed: Seed, purpose: &str, index: u32, turn: u32, length: usize) -> String {
    const LETTERS: &[u8; 32] = b"0123456789ABCDEFGHJKLMNPQRSTVWXY";
    seed.bytes(purpose, index, u64::from(turn))
        .iter()
        .take(length)
        .map(|byte| char::from(LETTERS[usize::from(byte % 32)]))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_machine_reports_the_same_hardware_at_every_boot_and_no_two_share_a_serial() {
        let reports: Vec<_> = (0..100).map(|index| hardware_report(Seed(1), index, "sim")).collect();
        assert_eq!(reports[7], hardware_report(Seed(1), 7, "sim"));
        let serials: HashSet<_> = reports.iter().map(|report| &report.serial_number).collect();
        let macs: HashSet<_> = reports
            .iter()
            .flat_map(|report| &report.network_interfaces)
            .map(|interface| &interface.mac)
            .collect();
        assert_eq!((serials.len(), macs.len()), (100, 200));
        let products: HashSet<_> = reports.iter().map(|report| &report.product).collect();
        assert_eq!(products.len(), MODELS.len(), "a fleet is mixed");
    }
}
