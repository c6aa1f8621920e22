//! SCSI disks: vital product data, error counters, wear.
//!
//! Vital product data pages 80h (serial number) and 83h (designators) have the layout of SPC. The kernel keeps copies
//! in sysfs, and a disk is queried only for what is missing there. Health comes from LOG SENSE: error counters (SPC),
//! the informational exceptions page, and the solid state media page (SBC).

use std::fs::File;
use std::path::Path;

use proto::hardware::v1::BlockDevice;

use crate::hardware::ioctl::{self, ScsiResponse};
use crate::hardware::read_attribute;

const PAGE_LIMIT: u16 = 1024;

/// Fills serial and WWN from sysfs' copies of the pages.
pub fn fill_from_sysfs(directory: &Path, device: &mut BlockDevice) {
    if let Ok(page) = read_attribute(&directory.join("vpd_pg80")) {
        fill_serial(&page, device);
    }
    if let Ok(page) = read_attribute(&directory.join("vpd_pg83")) {
        fill_wwn(&page, device);
    }
}

/// Queries the disk for what is missing, and for its health; each failure is returned as a sentence.
pub fn query_device(disk: &File, device: &mut BlockDevice) -> Vec<String> {
    let mut failures = Vec::new();
    let mut data = |what: &str, command: &[u8]| match ioctl::scsi_command(disk, command, PAGE_LIMIT) {
        Ok(ScsiResponse { status: 0, data, .. }) => Some(data),
        // A disk rejects what it does not support; that is not a failure.
        Ok(_) => None,
        Err(error) => {
            failures.push(format!("{what} failed: {error}"));
            None
        }
    };
    if device.serial_number.is_empty()
        && let Some(page) = data("asking for the serial number", &inquiry_command(0x80))
    {
        fill_serial(&page, device);
    }
    if device.wwn.is_empty()
        && let Some(page) = data("asking for the World Wide Name", &inquiry_command(0x83))
    {
        fill_wwn(&page, device);
    }
    let mut errors = None;
    for page in [0x02, 0x03, 0x05] {
        let counted = data("reading error counters", &log_sense_command(page))
            .and_then(|page| uncorrected_errors(&page));
        errors = errors.map_or(counted, |sum: u64| Some(sum.saturating_add(counted.unwrap_or(0))));
    }
    device.media_errors = errors;
    device.critical_warning = data("reading informational exceptions", &log_sense_command(0x2f))
        .and_then(|page| log_parameter(&page, 0).and_then(|value| value.first().copied()))
        .map(|code| code != 0);
    device.wear_ratio = data("reading solid state media wear", &log_sense_command(0x11))
        .and_then(|page| log_parameter(&page, 1).and_then(|value| value.get(3).copied()))
        .map(|percent| f32::from(percent) / 100.0);
    failures
}

/// The printable ASCII characters of a field, trimmed.
#[must_use]
pub fn printable_ascii(bytes: &[u8]) -> String {
    let text: String =
        bytes.iter().filter(|byte| (0x20..0x7f).contains(*byte)).map(|byte| char::from(*byte)).collect();
    text.trim().to_owned()
}

/// INQUIRY for a vital product data page.
fn inquiry_command(page: u8) -> [u8; 6] {
    let [high, low] = PAGE_LIMIT.to_be_bytes();
    [0x12, 0x01, page, high, low, 0]
}

/// LOG SENSE for the cumulative values of a page.
fn log_sense_command(page: u8) -> [u8; 10] {
    let [high, low] = PAGE_LIMIT.to_be_bytes();
    [0x4d, 0, 0x40 | page, 0, 0, 0, 0, high, low, 0]
}

/// Fills in the serial number of vital product data page 80h.
pub fn fill_serial(page: &[u8], device: &mut BlockDevice) {
    if let Some(bytes) = vpd_page_data(page, 0x80) {
        let serial = printable_ascii(bytes);
        if !serial.is_empty() {
            device.serial_number = serial;
        }
    }
}

/// Fills in the World Wide Name of vital product data page 83h.
pub fn fill_wwn(page: &[u8], device: &mut BlockDevice) {
    if let Some(wwn) = vpd_page_data(page, 0x83).and_then(best_designator) {
        device.wwn = wwn.to_vec();
    }
}

/// The content of a vital product data page.
fn vpd_page_data(page: &[u8], code: u8) -> Option<&[u8]> {
    let header = page.get(..4).filter(|header| header[1] == code)?;
    let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    page.get(4..)?.get(..length)
}

/// The best binary name of the logical unit: NAA before EUI-64.
fn best_designator(mut list: &[u8]) -> Option<&[u8]> {
    let mut best: Option<(u8, &[u8])> = None;
    while let Some((header, rest)) = list.split_at_checked(4) {
        let Some((value, rest)) = rest.split_at_checked(header[3].into()) else { break };
        list = rest;
        let (binary, of_unit, kind) = (header[0] & 0x0f == 1, header[1] & 0x30 == 0, header[1] & 0x0f);
        let better = best.is_none_or(|(known, _)| kind > known);
        if binary && of_unit && matches!(kind, 2 | 3) && !value.is_empty() && better {
            best = Some((kind, value));
        }
    }
    best.map(|(_, value)| value)
}

/// A parameter of a log page.
#[must_use]
pub fn log_parameter(page: &[u8], code: u16) -> Option<&[u8]> {
    let length = usize::from(u16::from_be_bytes(page.get(2..4)?.try_into().ok()?));
    let mut rest = page.get(4..)?;
    rest = rest.get(..length).unwrap_or(rest);
    while let Some((header, after)) = rest.split_at_checked(4) {
        let (value, after) = after.split_at_checked(header[3].into())?;
        if u16::from_be_bytes([header[0], header[1]]) == code {
            return Some(value);
        }
        rest = after;
    }
    None
}

/// Total uncorrected errors of an error counter page.
#[must_use]
pub fn uncorrected_errors(page: &[u8]) -> Option<u64> {
    let value = log_parameter(page, 0x0006)?;
    value.iter().try_fold(0_u64, |sum, byte| Some(sum.checked_mul(256)? + u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages 80h and 83h as a SAS disk gives them.
    const SERIAL: &[u8] = b"\x00\x80\x00\x14ZC1A2B3C0000C9080XYZ";
    const DESIGNATORS: &[u8] = b"\x00\x83\x00\x20\
        \x61\x93\x00\x08\x50\x00\xc5\x00\xa1\xb2\xc3\xd5\
        \x01\x03\x00\x08\x50\x00\xc5\x00\xa1\xb2\xc3\xd4\
        \x02\x01\x00\x04ABCD";

    #[test]
    fn pages_in_sysfs_give_serial_and_name_of_the_unit_not_of_its_port() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("vpd_pg80"), SERIAL).unwrap();
        std::fs::write(directory.path().join("vpd_pg83"), DESIGNATORS).unwrap();
        let mut device = BlockDevice::default();
        fill_from_sysfs(directory.path(), &mut device);
        assert_eq!(device.serial_number, "ZC1A2B3C0000C9080XYZ");
        assert_eq!(hex::encode(device.wwn), "5000c500a1b2c3d4");
    }

    #[test]
    fn counters_and_wear_are_found_by_their_code() {
        let counters = b"\x03\x00\x00\x10\x00\x05\x00\x04\x00\x00\x00\x09\x00\x06\x00\x04\x00\x00\x01\x02";
        assert_eq!(uncorrected_errors(counters), Some(258));
        let wear = b"\x11\x00\x00\x08\x00\x01\x03\x04\x00\x00\x00\x2a";
        assert_eq!(log_parameter(wear, 1).unwrap()[3], 42);
        assert_eq!(log_parameter(wear, 2), None);
    }

    #[test]
    fn cut_answers_are_no_answers() {
        for page in [SERIAL, DESIGNATORS] {
            for end in 0..page.len() {
                let mut device = BlockDevice::default();
                fill_serial(&page[..end], &mut device);
                fill_wwn(&page[..end], &mut device);
                assert_eq!(device, BlockDevice::default());
            }
        }
        assert_eq!(log_parameter(b"\x03\x00\x00\x10\x00\x06\x00\x04\x00", 6), None);
    }
}
