//! Block devices from sysfs, with identification and health from the device.
//!
//! sysfs has their names and their geometry. What it lacks (serial number, health) is queried from the device itself,
//! by the protocol it speaks. The list has devices that hold data of their own: no partitions, no loop or memory disks,
//! nothing stacked on other devices, no drives with removable discs, no virtual media of a management controller, and
//! one entry for all paths to one disk ([`block_unit`][]).
//!
//! [`block_unit`]: crate::hardware::block_unit

use std::fs::File;
use std::path::Path;

use model::firmware_text::{is_placeholder, is_placeholder_name};
use proto::hardware::v1::BlockDevice;
use proto::hardware::v1::block_device::Protocol;

use crate::hardware::block_unit::merge_paths;
use crate::hardware::management_controller::is_virtual_medium;
use crate::hardware::{Sources, Warnings, ata, list_names, nvme, read_number, read_text, scsi};

const SECTOR_BYTES: u64 = 512;
/// SCSI peripheral device type of CD and DVD drives.
const SCSI_TYPE_DISC: u64 = 5;

/// Reads all devices, sorted by name.
pub fn read_block_devices(sources: &Sources, warnings: &mut Warnings) -> Vec<BlockDevice> {
    let directory = sources.sys.join("block");
    if !directory.is_dir() {
        warnings.add_warning(format!("{} is not there: no block device can be listed", directory.display()));
    }
    let names = list_names(&directory);
    let disks = names.iter().filter(|name| is_disk(name, &directory.join(name)));
    let devices = disks.map(|name| describe_device(name, &directory.join(name), sources, warnings)).collect();
    let multipath: Vec<_> = names.iter().filter_map(|name| list_paths(&directory.join(name))).collect();
    merge_paths(devices, &multipath, warnings)
}

/// The names of the devices below a multipath device of the device mapper; `None` for any other device.
fn list_paths(directory: &Path) -> Option<Vec<String>> {
    read_text(&directory.join("dm/uuid")).filter(|uuid| uuid.starts_with("mpath-"))?;
    Some(list_names(&directory.join("slaves")).iter().map(|name| device_name(name)).collect())
}

/// The name of a device by its name in sysfs, which has `!` for each slash (`cciss!c0d0`).
fn device_name(sysfs_name: &str) -> String {
    sysfs_name.replace('!', "/")
}

fn is_disk(name: &str, directory: &Path) -> bool {
    const NOT_DISKS: [&str; 9] = ["dm-", "drbd", "fd", "loop", "md", "nbd", "ram", "sr", "zram"];
    let device = directory.join("device");
    let set = |file: &str| read_number(&directory.join(file)) == Some(1);
    !NOT_DISKS.iter().any(|prefix| name.starts_with(prefix))
        // Firmware areas of an eMMC, not its storage.
        && !(name.starts_with("mmcblk") && (name.contains("boot") || name.contains("rpmb")))
        && device.exists()
        && !set("hidden")
        && read_number(&device.join("type")) != Some(SCSI_TYPE_DISC)
        && !is_virtual_medium(
            &read_text(&device.join("vendor")).unwrap_or_default(),
            &read_text(&device.join("model")).unwrap_or_default(),
        )
        // A card reader without a card.
        && !(set("removable") && read_number(&directory.join("size")) == Some(0))
}

fn describe_device(
    sysfs_name: &str,
    directory: &Path,
    sources: &Sources,
    warnings: &mut Warnings,
) -> BlockDevice {
    let name = device_name(sysfs_name);
    let at_device = directory.join("device");
    let any =
        |paths: &[&str]| paths.iter().find_map(|path| read_text(&directory.join(path))).unwrap_or_default();
    let queue = |file: &str| read_number(&directory.join("queue").join(file));
    let small = |value: Option<u64>| u32::try_from(value.unwrap_or(0)).unwrap_or(0);
    let protocol = detect_protocol(&name, &at_device);
    let mut device = BlockDevice {
        name: name.clone(),
        vendor: find_vendor(protocol, &at_device),
        model: any(&["device/model", "device/name"]),
        serial_number: any(&["serial", "device/serial"]),
        wwn: parse_wwn(&any(&["wwid", "device/wwid"])),
        rotational: queue("rotational") == Some(1),
        capacity_bytes: read_number(&directory.join("size")).unwrap_or(0).saturating_mul(SECTOR_BYTES),
        logical_block_bytes: small(queue("logical_block_size")),
        physical_block_bytes: small(queue("physical_block_size")),
        protocol: protocol.into(),
        ..Default::default()
    };
    if device.capacity_bytes == 0 {
        warnings.add_warning(format!("{name}: its size cannot be read"));
    }
    if matches!(protocol, Protocol::Scsi | Protocol::Ata) {
        scsi::fill_from_sysfs(&at_device, &mut device);
    }
    query_device(&sources.dev.join(name), protocol, &mut device, warnings);
    clear_placeholders(&mut device);
    device
}

/// Clears names that mean nothing, from wherever they were read.
fn clear_placeholders(device: &mut BlockDevice) {
    for text in [&mut device.vendor, &mut device.model, &mut device.serial_number] {
        if is_placeholder(text) {
            text.clear();
        }
    }
    if is_placeholder_name(&device.wwn) {
        device.wwn.clear();
    }
}

/// Queries the device itself, if its protocol is supported.
fn query_device(node: &Path, protocol: Protocol, device: &mut BlockDevice, warnings: &mut Warnings) {
    let ask = match protocol {
        Protocol::Nvme => nvme::query_device,
        Protocol::Ata => ata::query_device,
        Protocol::Scsi => scsi::query_device,
        _ => return,
    };
    match File::open(node) {
        Ok(file) => {
            for failure in ask(&file, device) {
                warnings.add_warning(format!("{}: {failure}", device.name));
            }
        }
        Err(error) => {
            warnings.add_warning(format!("{}: {} cannot be opened: {error}", device.name, node.display()));
        }
    }
}

fn detect_protocol(name: &str, device: &Path) -> Protocol {
    let subsystem = std::fs::read_link(device.join("subsystem")).ok();
    let subsystem = subsystem.as_deref().and_then(|path| path.file_name()?.to_str());
    match subsystem {
        _ if name.starts_with("nvme") => Protocol::Nvme,
        _ if name.starts_with("mmcblk") => Protocol::Mmc,
        Some("virtio") => Protocol::Virtio,
        // libata presents its disks as SCSI disks of this vendor (SAT).
        Some("scsi") if read_text(&device.join("vendor")).as_deref() == Some("ATA") => Protocol::Ata,
        Some("scsi") => Protocol::Scsi,
        _ => Protocol::Unknown,
    }
}

fn find_vendor(protocol: Protocol, device: &Path) -> String {
    match protocol {
        // "ATA" is a word of the translation, not a maker; ATA disks name theirs in the model.
        Protocol::Scsi => read_text(&device.join("vendor")).unwrap_or_default(),
        Protocol::Nvme => {
            let id = read_text(&device.join("device/vendor")).unwrap_or_default();
            pci_vendor(&id).map_or(id.clone(), str::to_owned)
        }
        Protocol::Mmc => read_text(&device.join("manfid")).unwrap_or_default(),
        _ => String::new(),
    }
}

/// Makers of NVMe drives by PCI vendor id.
fn pci_vendor(id: &str) -> Option<&'static str> {
    Some(match id {
        "0x1179" => "Toshiba",
        "0x1344" => "Micron",
        "0x144d" => "Samsung",
        "0x15b7" => "SanDisk",
        "0x1987" => "Phison",
        "0x1b96" => "Western Digital",
        "0x1c5c" => "SK hynix",
        "0x1cc1" => "ADATA",
        "0x1d0f" => "Amazon",
        "0x1e0f" => "KIOXIA",
        "0x2646" => "Kingston",
        "0x8086" => "Intel",
        "0xc0a9" => "Crucial",
        _ => return None,
    })
}

/// Bytes of a World Wide Name as the kernel writes it (`naa.…`, `eui.…`, `uuid.…`); empty for names that are made of
/// model and serial number.
fn parse_wwn(text: &str) -> Vec<u8> {
    let digits = ["naa.", "eui.", "uuid.", "0x"].iter().find_map(|prefix| text.strip_prefix(prefix));
    digits.and_then(|digits| hex::decode(digits.replace('-', "")).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Machine {
        _root: tempfile::TempDir,
        sources: Sources,
    }

    impl Machine {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let sources = Sources::in_directory(root.path());
            std::fs::create_dir_all(sources.sys.join("block")).unwrap();
            Self { _root: root, sources }
        }

        fn disk(&self, name: &str, subsystem: Option<&str>, files: &[(&str, &str)]) {
            let directory = self.sources.sys.join("block").join(name);
            std::fs::create_dir_all(directory.join("queue")).unwrap();
            if let Some(subsystem) = subsystem {
                std::fs::create_dir_all(directory.join("device/device")).unwrap();
                symlink(format!("../../../bus/{subsystem}"), directory.join("device/subsystem")).unwrap();
            }
            for (path, value) in files {
                std::fs::write(directory.join(path), format!("{value}\n")).unwrap();
            }
        }

        fn read_block_devices(&self) -> (Vec<BlockDevice>, Vec<String>) {
            let mut warnings = Warnings::default();
            let devices = read_block_devices(&self.sources, &mut warnings);
            (devices, warnings.into_sentences())
        }
    }

    const GEOMETRY: [(&str, &str); 4] = [
        ("size", "1953525168"),
        ("queue/rotational", "1"),
        ("queue/logical_block_size", "512"),
        ("queue/physical_block_size", "4096"),
    ];

    fn with(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        GEOMETRY.iter().chain(more).copied().collect()
    }

    #[test]
    fn only_devices_with_data_of_their_own_are_listed() {
        let machine = Machine::new();
        for name in ["loop0", "ram0", "zram0", "dm-0", "md127", "nbd0", "bcache0"] {
            machine.disk(name, None, &GEOMETRY);
        }
        machine.disk("sr0", Some("scsi"), &GEOMETRY);
        machine.disk("nvme0c0n1", Some("nvme"), &with(&[("hidden", "1")]));
        machine.disk("mmcblk0boot0", Some("mmc"), &GEOMETRY);
        machine.disk("sdb", Some("scsi"), &[("removable", "1"), ("size", "0")]);
        machine.disk("sdc", Some("scsi"), &with(&[("device/type", "5")]));
        machine.disk("sda", Some("scsi"), &with(&[("removable", "0"), ("device/type", "0")]));
        machine.disk("vda", Some("virtio"), &GEOMETRY);
        let (devices, _) = machine.read_block_devices();
        let listed: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(listed, ["sda", "vda"]);
    }

    #[test]
    fn slash_of_a_name_and_its_node_come_back() {
        let machine = Machine::new();
        machine.disk("cciss!c0d0", Some("scsi"), &GEOMETRY);
        let (devices, warnings) = machine.read_block_devices();
        assert_eq!(devices[0].name, "cciss/c0d0");
        assert!(warnings[0].contains("dev/cciss/c0d0 cannot be opened"), "{warnings:?}");
    }

    #[test]
    fn names_that_mean_nothing_are_left_out() {
        let machine = Machine::new();
        let names = [("wwid", "eui.0000000000000000"), ("serial", "0123456789"), ("device/model", "Unknown")];
        machine.disk("nvme0n1", Some("nvme"), &with(&names));
        let (devices, _) = machine.read_block_devices();
        let device = &devices[0];
        assert_eq!((device.model.as_str(), device.serial_number.as_str()), ("", ""));
        assert!(device.wwn.is_empty());
    }

    #[test]
    fn protocol_follows_from_sysfs() {
        let machine = Machine::new();
        machine.disk(
            "nvme0n1",
            Some("nvme"),
            &with(&[
                ("wwid", "eui.0025385b21404321"),
                ("device/model", "SAMSUNG MZQLB1T9HAJR-00007"),
                ("device/serial", "S4EVNF0M123456"),
                ("device/device/vendor", "0x144d"),
            ]),
        );
        machine.disk(
            "sda",
            Some("scsi"),
            &with(&[
                ("device/vendor", "ATA     "),
                ("device/model", "ST1000NX0313    "),
                ("device/wwid", "naa.5000c500a1b2c3d4"),
            ]),
        );
        machine.disk(
            "sdb",
            Some("scsi"),
            &with(&[("device/vendor", "SEAGATE "), ("device/model", "ST600MM0009")]),
        );
        machine.disk(
            "mmcblk0",
            Some("mmc"),
            &with(&[
                ("device/name", "DG4016"),
                ("device/serial", "0x1234abcd"),
                ("device/manfid", "0x000045"),
            ]),
        );
        machine.disk("vda", Some("virtio"), &with(&[("serial", "root"), ("device/vendor", "0x1af4")]));
        let (devices, warnings) = machine.read_block_devices();
        let reported: Vec<_> = devices
            .iter()
            .map(|d| (d.protocol(), d.vendor.as_str(), d.model.as_str(), d.serial_number.as_str()))
            .collect();
        assert_eq!(
            reported,
            [
                (Protocol::Mmc, "0x000045", "DG4016", "0x1234abcd"),
                (Protocol::Nvme, "Samsung", "SAMSUNG MZQLB1T9HAJR-00007", "S4EVNF0M123456"),
                (Protocol::Ata, "", "ST1000NX0313", ""),
                (Protocol::Scsi, "SEAGATE", "ST600MM0009", ""),
                (Protocol::Virtio, "", "", "root"),
            ]
        );
        assert_eq!(hex::encode(&devices[1].wwn), "0025385b21404321");
        assert_eq!(hex::encode(&devices[2].wwn), "5000c500a1b2c3d4");
        for device in &devices {
            assert!(device.rotational);
            assert_eq!(device.capacity_bytes, 1_000_204_886_016);
            assert_eq!((device.logical_block_bytes, device.physical_block_bytes), (512, 4096));
            assert_eq!(device.critical_warning, None, "no device could be queried");
        }
        assert_eq!(warnings.len(), 3, "three device nodes are missing: {warnings:?}");
    }

    #[test]
    fn node_that_is_no_disk_is_a_warning() {
        let machine = Machine::new();
        machine.disk("nvme0n1", Some("nvme"), &GEOMETRY);
        std::fs::create_dir_all(&machine.sources.dev).unwrap();
        std::fs::write(machine.sources.dev.join("nvme0n1"), "").unwrap();
        let (devices, warnings) = machine.read_block_devices();
        assert_eq!(devices.len(), 1);
        assert_eq!(warnings.len(), 2, "{warnings:?}");
        assert!(warnings[0].starts_with("nvme0n1: identifying the NVMe controller failed: "), "{warnings:?}");
    }

    #[test]
    fn names_made_of_model_and_serial_are_no_world_wide_names() {
        assert_eq!(hex::encode(parse_wwn("naa.50014ee2b1234567")), "50014ee2b1234567");
        assert_eq!(parse_wwn("uuid.6b29fc40-ca47-1067-b31d-00dd010662da").len(), 16);
        assert_eq!(parse_wwn("t10.ATA     ST1000NX0313"), Vec::<u8>::new());
        assert_eq!(parse_wwn("nvme.144d-5334"), Vec::<u8>::new());
        assert_eq!(parse_wwn("naa.5"), Vec::<u8>::new());
    }
}
