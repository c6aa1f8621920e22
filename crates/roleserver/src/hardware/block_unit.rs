//! Units of storage behind block devices. *Pure.*
//!
//! The kernel shows a disk once for each way to it: a shelf with two adapters shows each of its disks twice. A report
//! has one entry for each unit, or a machine would have twice its disks. Two devices are one unit if
//!
//! * one multipath device of the device mapper is on top of both, or
//! * they have the same World Wide Name, and nothing that both report contradicts it.
//!
//! Some makers give one World Wide Name to many drives. Devices of one name with different serial numbers or sizes stay
//! two, with a warning.

use proto::hardware::v1::BlockDevice;

use crate::hardware::Warnings;

/// A unit with the names of the devices that lead to it.
struct Unit {
    device: BlockDevice,
    names: Vec<String>,
}

/// Merges the devices of one unit into the first of them. Each of `multipath` has the names of the devices below one
/// multipath device.
pub fn merge_paths(
    devices: Vec<BlockDevice>,
    multipath: &[Vec<String>],
    warnings: &mut Warnings,
) -> Vec<BlockDevice> {
    let mut units: Vec<Unit> = Vec::new();
    for device in devices {
        let name = device.name.clone();
        if let Some(unit) = units.iter_mut().find(|unit| is_one_unit(unit, &device, multipath)) {
            fill_missing(&mut unit.device, device);
            unit.names.push(name);
            continue;
        }
        if let Some(other) = units.iter().find(|unit| has_same_name(&unit.device, &device)) {
            warnings.add_warning(format!(
                "{} and {name} have one World Wide Name, {}, but another serial number or size: they are listed as two \
                 disks",
                other.device.name,
                hex::encode(&device.wwn)
            ));
        }
        units.push(Unit { device, names: vec![name] });
    }
    units.into_iter().map(|unit| unit.device).collect()
}

fn is_one_unit(unit: &Unit, device: &BlockDevice, multipath: &[Vec<String>]) -> bool {
    let below_one = |group: &Vec<String>| {
        group.contains(&device.name) && unit.names.iter().any(|name| group.contains(name))
    };
    multipath.iter().any(below_one)
        || (has_same_name(&unit.device, device)
            && agree(&unit.device.serial_number, &device.serial_number, String::is_empty)
            && agree(&unit.device.capacity_bytes, &device.capacity_bytes, |bytes| *bytes == 0))
}

fn has_same_name(one: &BlockDevice, other: &BlockDevice) -> bool {
    !one.wwn.is_empty() && one.wwn == other.wwn
}

/// Whether two values are equal, or one of them is unknown: a standby path answers less.
fn agree<T: PartialEq>(one: &T, other: &T, is_unknown: impl Fn(&T) -> bool) -> bool {
    one == other || is_unknown(one) || is_unknown(other)
}

/// Takes over what another path to the unit reports and the first one does not.
fn fill_missing(device: &mut BlockDevice, other: BlockDevice) {
    if device.serial_number.is_empty() {
        device.serial_number = other.serial_number;
    }
    if device.wwn.is_empty() {
        device.wwn = other.wwn;
    }
    if device.capacity_bytes == 0 {
        device.capacity_bytes = other.capacity_bytes;
    }
    device.critical_warning = device.critical_warning.or(other.critical_warning);
    device.media_errors = device.media_errors.or(other.media_errors);
    device.available_spare_ratio = device.available_spare_ratio.or(other.available_spare_ratio);
    device.wear_ratio = device.wear_ratio.or(other.wear_ratio);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, wwn: &[u8], serial_number: &str, capacity_bytes: u64) -> BlockDevice {
        BlockDevice {
            name: name.to_owned(),
            wwn: wwn.to_vec(),
            serial_number: serial_number.to_owned(),
            capacity_bytes,
            ..BlockDevice::default()
        }
    }

    #[test]
    fn unit_is_listed_once_however_many_ways_lead_to_it() {
        for (other, multipath, listed, warned) in [
            (device("sdb", b"wwn1", "S1", 5), vec![], 1, false),
            (device("sdb", b"wwn1", "", 5), vec![], 1, false),
            (device("sdb", b"wwn1", "S1", 0), vec![], 1, false),
            (device("sdb", b"wwn1", "S2", 5), vec![], 2, true),
            (device("sdb", b"wwn1", "S1", 6), vec![], 2, true),
            (device("sdb", b"wwn2", "S1", 5), vec![], 2, false),
            (device("sdb", b"", "S1", 5), vec![], 2, false),
            (device("sdb", b"", "", 0), vec![vec!["sda".to_owned(), "sdb".to_owned()]], 1, false),
            (device("sdb", b"", "", 0), vec![vec!["sdb".to_owned(), "sdc".to_owned()]], 2, false),
        ] {
            let shown = format!("{other:?} {multipath:?}");
            let mut warnings = Warnings::default();
            let units = merge_paths(vec![device("sda", b"wwn1", "S1", 5), other], &multipath, &mut warnings);
            assert_eq!(units.len(), listed, "{shown}");
            assert_eq!((units[0].name.as_str(), units[0].capacity_bytes), ("sda", 5), "{shown}");
            assert_eq!(!warnings.into_sentences().is_empty(), warned, "{shown}");
        }
    }

    #[test]
    fn what_one_way_does_not_report_comes_from_the_other() {
        let standby = device("sda", b"wwn1", "", 0);
        let active = BlockDevice { critical_warning: Some(true), ..device("sdb", b"wwn1", "S1", 5) };
        let units = merge_paths(vec![standby, active], &[], &mut Warnings::default());
        assert_eq!(units.len(), 1);
        assert_eq!((units[0].serial_number.as_str(), units[0].capacity_bytes), ("S1", 5));
        assert_eq!(units[0].critical_warning, Some(true));
    }
}
