//! NVMe drives: identification and health log.
//!
//! Layouts by the NVM Express base specification: Identify Controller (CNS 01h)
//! and the SMART / Health Information log (02h).

use std::fs::File;

use proto::hardware::v1::BlockDevice;

use crate::hardware::ioctl;
use crate::hardware::scsi::printable_ascii;

const ADMIN_GET_LOG_PAGE: u8 = 0x02;
const ADMIN_IDENTIFY: u8 = 0x06;
const EVERY_NAMESPACE: u32 = 0xffff_ffff;
/// 512 bytes (128 double words, counted from 0) of log 02h.
const HEALTH_LOG: u32 = (127 << 16) | 0x02;

/// Queries the drive and fills in the device; each failure is returned as a sentence.
pub fn query_device(drive: &File, device: &mut BlockDevice) -> Vec<String> {
    let mut failures = Vec::new();
    match ioctl::nvme_admin(drive, ADMIN_IDENTIFY, 0, 1, 4096) {
        Ok(bytes) => fill_identity(&bytes, device),
        Err(error) => failures.push(format!("identifying the NVMe controller failed: {error}")),
    }
    match ioctl::nvme_admin(drive, ADMIN_GET_LOG_PAGE, EVERY_NAMESPACE, HEALTH_LOG, 512) {
        Ok(bytes) => fill_health(&bytes, device),
        Err(error) => failures.push(format!("reading the NVMe health log failed: {error}")),
    }
    failures
}

/// Fills in the fields of an Identify Controller response.
pub fn fill_identity(bytes: &[u8], device: &mut BlockDevice) {
    for (field, range) in [(&mut device.serial_number, 4..24), (&mut device.model, 24..64)] {
        let text = bytes.get(range).map(printable_ascii).unwrap_or_default();
        if !text.is_empty() {
            *field = text;
        }
    }
}

/// Fills in the fields of a health log.
pub fn fill_health(bytes: &[u8], device: &mut BlockDevice) {
    let Some(log) = bytes.get(..512) else { return };
    device.critical_warning = Some(log[0] != 0);
    device.available_spare_ratio = Some(f32::from(log[3]) / 100.0);
    device.wear_ratio = Some(f32::from(log[5]) / 100.0);
    let errors = log[160..176].iter().rev().fold(0_u128, |sum, byte| sum << 8 | u128::from(*byte));
    device.media_errors = Some(u64::try_from(errors).unwrap_or(u64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identification_gives_serial_and_model() {
        let mut bytes = vec![0; 4096];
        bytes[4..24].copy_from_slice(b"S4EVNF0M123456      ");
        bytes[24..64].copy_from_slice(b"SAMSUNG MZQLB1T9HAJR-00007              ");
        let mut device = BlockDevice::default();
        fill_identity(&bytes, &mut device);
        assert_eq!(device.serial_number, "S4EVNF0M123456");
        assert_eq!(device.model, "SAMSUNG MZQLB1T9HAJR-00007");
        fill_identity(&[0; 4096], &mut device);
        assert_eq!(device.serial_number, "S4EVNF0M123456", "an empty answer replaces nothing");
    }

    #[test]
    fn health_log_gives_warning_spare_wear_and_errors() {
        let mut log = vec![0; 512];
        (log[0], log[3], log[5]) = (0x04, 97, 112);
        log[160..162].copy_from_slice(&[0x02, 0x01]);
        let mut device = BlockDevice::default();
        fill_health(&log, &mut device);
        assert_eq!(device.critical_warning, Some(true));
        assert_eq!(device.available_spare_ratio, Some(0.97));
        assert_eq!(device.wear_ratio, Some(1.12));
        assert_eq!(device.media_errors, Some(258));
        log[168] = 1;
        fill_health(&log, &mut device);
        assert_eq!(device.media_errors, Some(u64::MAX));
        let mut untouched = BlockDevice::default();
        fill_health(&log[..100], &mut untouched);
        assert_eq!(untouched, BlockDevice::default());
    }
}
