//! ATA disks: identification, error statistics, SMART status.
//!
//! The disks are behind the kernel's SCSI translation. Commands travel in ATA PASS-THROUGH(16) (SAT), layouts are those
//! of ACS: IDENTIFY DEVICE, SMART RETURN STATUS, and two pages of the device statistics log, which mean the same on
//! every maker's disk, unlike SMART attributes.

use std::fs::File;

use proto::hardware::v1::BlockDevice;

use crate::hardware::ioctl;
use crate::hardware::scsi::printable_ascii;

const IDENTIFY_DEVICE: u8 = 0xec;
const READ_LOG_EXT: u8 = 0x2f;
const SMART: u8 = 0xb0;
const SMART_RETURN_STATUS: u8 = 0xda;
const DEVICE_STATISTICS: u8 = 0x04;
const GENERAL_ERRORS: u8 = 0x04;
const SOLID_STATE: u8 = 0x07;

/// Queries the disk and fills in the device; each failure is returned as a sentence.
pub fn query_device(disk: &File, device: &mut BlockDevice) -> Vec<String> {
    let mut failures = Vec::new();
    let mut sector = |what: &str, command: [u8; 16]| match ioctl::scsi_command(disk, &command, 512) {
        Ok(answer) if answer.status == 0 && answer.data.len() == 512 => Some(answer.data),
        // A disk rejects what it does not support; that is not a failure.
        Ok(_) => None,
        Err(error) => {
            failures.push(format!("{what} failed: {error}"));
            None
        }
    };
    if let Some(data) = sector("identifying the ATA disk", read_command(IDENTIFY_DEVICE, 0, 0)) {
        fill_identity(&data, device);
    }
    let statistics = |page| read_command(READ_LOG_EXT, DEVICE_STATISTICS, page);
    if let Some(data) = sector("reading ATA error statistics", statistics(GENERAL_ERRORS)) {
        device.media_errors = statistic(&data, GENERAL_ERRORS, 8).map(|value| value & 0xffff_ffff);
    }
    if let Some(data) = sector("reading ATA wear statistics", statistics(SOLID_STATE)) {
        device.wear_ratio = statistic(&data, SOLID_STATE, 8).map(as_ratio);
    }
    match ioctl::scsi_command(disk, &RETURN_STATUS, 0) {
        Ok(answer) => device.critical_warning = threshold_exceeded(&answer.sense),
        Err(error) => failures.push(format!("reading the SMART status failed: {error}")),
    }
    failures
}

/// ATA PASS-THROUGH(16), protocol PIO data-in, 48-bit, one sector from the device.
const fn read_command(command: u8, log: u8, page: u8) -> [u8; 16] {
    let extended = if command == READ_LOG_EXT { 1 } else { 0 };
    [0x85, (4 << 1) | extended, 0x0e, 0, 0, 0, 1, 0, log, 0, page, 0, 0, 0, command, 0]
}

/// SMART RETURN STATUS without data, with its registers returned in the sense data.
const RETURN_STATUS: [u8; 16] =
    [0x85, 3 << 1, 0x20, 0, SMART_RETURN_STATUS, 0, 0, 0, 0, 0, 0x4f, 0, 0xc2, 0, SMART, 0];

fn read_word(data: &[u8], index: usize) -> u16 {
    data.get(index * 2..index * 2 + 2).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Text in IDENTIFY DEVICE has the bytes of each pair swapped.
fn swapped_text(data: &[u8], words: std::ops::Range<usize>) -> String {
    printable_ascii(&words.flat_map(|index| read_word(data, index).to_be_bytes()).collect::<Vec<_>>())
}

/// Fills in the fields of an IDENTIFY DEVICE response.
pub fn fill_identity(data: &[u8], device: &mut BlockDevice) {
    for (field, words) in [(&mut device.serial_number, 10..20), (&mut device.model, 27..47)] {
        let text = swapped_text(data, words);
        if !text.is_empty() {
            *field = text;
        }
    }
    // Word 87 is valid when its top bits are 01; its bit 8 announces a World Wide Name.
    let has_name = read_word(data, 87) & 0xc100 == 0x4100;
    let name: Vec<u8> = (108..112).flat_map(|index| read_word(data, index).to_be_bytes()).collect();
    if has_name && name.iter().any(|byte| *byte != 0) {
        device.wwn = name;
    }
}

/// A value of a device statistics page, if it is supported and valid.
#[must_use]
pub fn statistic(page: &[u8], number: u8, offset: usize) -> Option<u64> {
    if page.get(2) != Some(&number) {
        return None;
    }
    let value = u64::from_le_bytes(page.get(offset..offset + 8)?.try_into().ok()?);
    (value >> 62 == 0b11).then_some(value & 0x00ff_ffff_ffff_ffff)
}

fn as_ratio(value: u64) -> f32 {
    f32::from(u8::try_from(value & 0xff).unwrap_or(u8::MAX)) / 100.0
}

/// Whether a SMART threshold was exceeded, from the registers LBA(15:8) and LBA(23:16) in the sense data.
#[must_use]
pub fn threshold_exceeded(sense: &[u8]) -> Option<bool> {
    let registers = match sense.first()? & 0x7f {
        0x72 => registers_in_descriptor(sense.get(8..)?)?,
        // The format of translations in the firmware of host adapters; the additional sense code marks these as
        // registers ("ATA pass through information available").
        0x70 if sense.get(12..14)? == [0x00, 0x1d] => (sense[10], sense[11]),
        _ => return None,
    };
    match registers {
        (0x4f, 0xc2) => Some(false),
        (0xf4, 0x2c) => Some(true),
        _ => None,
    }
}

/// The registers in the ATA status return descriptor (SAT), if it exists.
fn registers_in_descriptor(mut descriptors: &[u8]) -> Option<(u8, u8)> {
    while let [kind, length, ..] = *descriptors {
        let (descriptor, rest) = descriptors.split_at_checked(usize::from(length) + 2)?;
        if kind == 0x09 && descriptor.len() >= 14 {
            return Some((descriptor[9], descriptor[11]));
        }
        descriptors = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put_text(data: &mut [u8], word: usize, text: &str, words: usize) {
        let padded = format!("{text:<width$}", width = words * 2);
        for (index, pair) in padded.as_bytes().chunks(2).enumerate() {
            data[(word + index) * 2] = pair[1];
            data[(word + index) * 2 + 1] = pair[0];
        }
    }

    #[test]
    fn identification_gives_serial_model_and_name() {
        let mut data = vec![0; 512];
        put_text(&mut data, 10, "S3Z8NB0K", 10);
        put_text(&mut data, 27, "Samsung SSD 860 EVO 1TB", 20);
        data[174..176].copy_from_slice(&0x4163_u16.to_le_bytes());
        for (index, value) in [0x5002_u16, 0x538e, 0x4000, 0x0001].into_iter().enumerate() {
            data[(108 + index) * 2..(109 + index) * 2].copy_from_slice(&value.to_le_bytes());
        }
        let mut device = BlockDevice::default();
        fill_identity(&data, &mut device);
        assert_eq!(device.serial_number, "S3Z8NB0K");
        assert_eq!(device.model, "Samsung SSD 860 EVO 1TB");
        assert_eq!(hex::encode(&device.wwn), "5002538e40000001");
        data[175] = 0;
        let mut nameless = BlockDevice::default();
        fill_identity(&data, &mut nameless);
        assert!(nameless.wwn.is_empty());
    }

    #[test]
    fn statistics_count_only_when_valid() {
        let mut page = vec![0; 512];
        page[2] = SOLID_STATE;
        page[8..16].copy_from_slice(&(0xc0_u64 << 56 | 7).to_le_bytes());
        assert_eq!(statistic(&page, SOLID_STATE, 8).map(as_ratio), Some(0.07));
        assert_eq!(statistic(&page, GENERAL_ERRORS, 8), None);
        page[15] = 0x80;
        assert_eq!(statistic(&page, SOLID_STATE, 8), None, "supported, but not valid");
    }

    #[test]
    fn smart_status_is_in_the_registers() {
        let mut sense = vec![0x72, 1, 0, 0x1d, 0, 0, 0, 14];
        sense.extend([0x09, 0x0c, 0, 0, 0, 0, 0, 0, 0, 0x4f, 0, 0xc2, 0, 0x50]);
        assert_eq!(threshold_exceeded(&sense), Some(false));
        (sense[17], sense[19]) = (0xf4, 0x2c);
        assert_eq!(threshold_exceeded(&sense), Some(true));
        assert_eq!(threshold_exceeded(&sense[..12]), None);
        let mut fixed = [0x70, 0, 1, 0, 0x50, 0, 0, 10, 0, 0, 0xf4, 0x2c, 0x00, 0x1d, 0, 0, 0, 0];
        assert_eq!(threshold_exceeded(&fixed), Some(true));
        (fixed[10], fixed[11]) = (0x4f, 0xc2);
        assert_eq!(threshold_exceeded(&fixed), Some(false));
        fixed[13] = 0x1c;
        assert_eq!(threshold_exceeded(&fixed), None, "sense data of something else");
        assert_eq!(threshold_exceeded(&fixed[..13]), None);
        assert_eq!(threshold_exceeded(&[]), None);
    }
}
