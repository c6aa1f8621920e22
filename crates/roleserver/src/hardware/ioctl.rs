//! Read-only ioctls for NVMe, SCSI and ethtool; the only unsafe code of the inventory.
//!
//! Each takes and returns plain bytes. The layouts are those of `<linux/nvme_ioctl.h>`, `<scsi/sg.h>` and
//! `<linux/ethtool.h>`, which the kernel never changes. All data goes one way: from the device.

use std::ffi::c_void;
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd as _, OwnedFd};

/// How long one command may take.
const TIMEOUT_MILLISECONDS: u32 = 5000;

/// `_IOWR('N', 0x41, struct nvme_admin_cmd)`.
const NVME_IOCTL_ADMIN_CMD: u32 = 0xc048_4e41;
const SG_IO: u32 = 0x2285;
const SG_DXFER_NONE: i32 = -1;
const SG_DXFER_FROM_DEV: i32 = -3;
const SIOCETHTOOL: u32 = 0x8946;

/// Layout of the kernel's `struct nvme_admin_cmd`.
#[repr(C)]
#[derive(Default)]
struct NvmeAdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    namespace: u32,
    words_2_3: [u32; 2],
    metadata: u64,
    address: u64,
    metadata_length: u32,
    data_length: u32,
    words_10_15: [u32; 6],
    timeout_milliseconds: u32,
    result: u32,
}

const _: () = assert!(size_of::<NvmeAdminCommand>() == 72);

/// Whether an NVMe admin command only reads: get log page, identify. The same call formats drives, so no other command
/// is sent.
const fn nvme_only_reads(opcode: u8) -> bool {
    matches!(opcode, 0x02 | 0x06)
}

/// Whether a SCSI command only reads: INQUIRY, LOG SENSE, and the ATA commands that identify, read a log or return the
/// SMART status.
const fn scsi_only_reads(command: &[u8]) -> bool {
    match command {
        [0x12 | 0x4d, ..] => true,
        [0x85, _, _, _, feature, _, _, _, _, _, _, _, _, _, ata, _] => {
            matches!((*ata, *feature), (0xec | 0x2f, _) | (0xb0, 0xda))
        }
        _ => false,
    }
}

/// Sends an NVMe admin command that only reads, and returns `length` bytes.
pub fn nvme_admin(
    device: &File,
    opcode: u8,
    namespace: u32,
    command_word_10: u32,
    length: u32,
) -> Result<Vec<u8>> {
    if !nvme_only_reads(opcode) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut data = vec![0_u8; usize::try_from(length).unwrap_or(0)];
    let mut command = NvmeAdminCommand {
        opcode,
        namespace,
        address: data.as_mut_ptr().expose_provenance() as u64,
        data_length: length,
        words_10_15: [command_word_10, 0, 0, 0, 0, 0],
        timeout_milliseconds: TIMEOUT_MILLISECONDS,
        ..Default::default()
    };
    // SAFETY: the descriptor is open for the whole call, `command` is the structure that this request takes, and its
    // address and length describe `data`, which lives until after the call.
    let status = unsafe {
        libc::ioctl(device.as_raw_fd(), NVME_IOCTL_ADMIN_CMD.into(), std::ptr::from_mut(&mut command))
    };
    match status {
        0 => Ok(data),
        -1 => Err(Error::last_os_error()),
        status => Err(Error::other(format!("the drive answered with status {status:#x}"))),
    }
}

/// Layout of the kernel's `struct sg_io_hdr`.
#[repr(C)]
struct SgIoHeader {
    interface_id: i32,
    direction: i32,
    command_length: u8,
    sense_limit: u8,
    scatter_count: u16,
    data_length: u32,
    data: *mut c_void,
    command: *const u8,
    sense: *mut u8,
    timeout_milliseconds: u32,
    flags: u32,
    pack_id: i32,
    user: *mut c_void,
    status: u8,
    masked_status: u8,
    message_status: u8,
    sense_written: u8,
    host_status: u16,
    driver_status: u16,
    residual: i32,
    duration: u32,
    info: u32,
}

/// The response to a SCSI command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScsiResponse {
    /// The data, without the part of the buffer that the device did not fill.
    pub data: Vec<u8>,
    /// Sense data; empty if there is none.
    pub sense: Vec<u8>,
    /// SCSI status byte; 0 is good, 2 means that the sense data has the reason.
    pub status: u8,
}

/// Sends a SCSI command that only reads.
pub fn scsi_command(device: &File, command: &[u8], length: u16) -> Result<ScsiResponse> {
    if !scsi_only_reads(command) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut data = vec![0_u8; length.into()];
    let mut sense = [0_u8; 64];
    let mut header = SgIoHeader {
        interface_id: i32::from(b'S'),
        direction: if length == 0 { SG_DXFER_NONE } else { SG_DXFER_FROM_DEV },
        command_length: u8::try_from(command.len()).map_err(|_| ErrorKind::InvalidInput)?,
        sense_limit: 64,
        scatter_count: 0,
        data_length: length.into(),
        data: data.as_mut_ptr().cast(),
        command: command.as_ptr(),
        sense: sense.as_mut_ptr(),
        timeout_milliseconds: TIMEOUT_MILLISECONDS,
        flags: 0,
        pack_id: 0,
        user: std::ptr::null_mut(),
        status: 0,
        masked_status: 0,
        message_status: 0,
        sense_written: 0,
        host_status: 0,
        driver_status: 0,
        residual: 0,
        duration: 0,
        info: 0,
    };
    // SAFETY: the descriptor is open for the whole call, `header` is the structure that this request takes, and each
    // pointer in it is to a buffer of the length beside it, which lives until after the call.
    let status = unsafe { libc::ioctl(device.as_raw_fd(), SG_IO.into(), std::ptr::from_mut(&mut header)) };
    if status != 0 {
        return Err(Error::last_os_error());
    }
    if header.host_status != 0 {
        return Err(Error::other(format!("the host adapter answered with status {:#x}", header.host_status)));
    }
    let unsent = usize::try_from(header.residual).unwrap_or(0).min(data.len());
    data.truncate(data.len() - unsent);
    let sense = sense[..usize::from(header.sense_written).min(sense.len())].to_vec();
    Ok(ScsiResponse { data, sense, status: header.status })
}

/// `struct ifreq` as `SIOCETHTOOL` reads it.
#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    data: *mut c_void,
    rest: [u8; 16],
}

/// Sends an ethtool command in `buffer`; the kernel writes its response in place.
///
/// The buffer must be as long as the command in its first four bytes and the sizes in it make the kernel write. That
/// holds for the two commands that [`EthtoolBuffer`] can hold.
pub fn ethtool(socket: &OwnedFd, interface: &str, buffer: &mut EthtoolBuffer) -> Result<()> {
    let mut name = [0; 16];
    let bytes = interface.as_bytes();
    // The last byte stays zero.
    name.get_mut(..bytes.len())
        .filter(|_| bytes.len() < 16)
        .ok_or(ErrorKind::InvalidInput)?
        .copy_from_slice(bytes);
    let mut request =
        InterfaceRequest { name, data: std::ptr::from_mut(&mut buffer.0).cast(), rest: [0; 16] };
    // SAFETY: the descriptor is open for the whole call, `request` is at least as long as the
    // kernel's `struct ifreq`, and `data` points to a buffer longer than anything the two commands
    // that `EthtoolBuffer` can hold make the kernel write (48 + 3 * 127 * 4 bytes, 8 + 32 bytes).
    let status =
        unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL.into(), std::ptr::from_mut(&mut request)) };
    if status == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// An ethtool command and room for its response.
#[repr(C, align(8))]
#[derive(Clone)]
pub struct EthtoolBuffer([u8; 2048]);

impl EthtoolBuffer {
    /// `ETHTOOL_GPERMADDR` for an address of up to 32 bytes (`MAX_ADDR_LEN`).
    #[must_use]
    pub fn permanent_address() -> Self {
        let mut buffer = Self([0; 2048]);
        buffer.0[..4].copy_from_slice(&0x20_u32.to_ne_bytes());
        buffer.0[4..8].copy_from_slice(&32_u32.to_ne_bytes());
        buffer
    }

    /// `ETHTOOL_GLINKSETTINGS` with masks of this many words; 0 queries how many there are.
    #[must_use]
    pub fn link_settings(mask_words: i8) -> Self {
        let mut buffer = Self([0; 2048]);
        buffer.0[..4].copy_from_slice(&0x4c_u32.to_ne_bytes());
        buffer.0[15] = mask_words.max(0).to_ne_bytes()[0];
        buffer
    }

    /// The bytes of the command, or of the response after the call.
    #[must_use]
    pub const fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_write_never_reach_a_device() {
        let nowhere = File::open("/dev/null").unwrap();
        let refused = |error: Error| error.kind() == ErrorKind::InvalidInput;
        // Format NVM, FORMAT UNIT, WRITE(10), ATA SECURITY ERASE UNIT.
        assert!(refused(nvme_admin(&nowhere, 0x80, 1, 0, 0).unwrap_err()));
        for opcode in [0x04, 0x2a] {
            assert!(refused(scsi_command(&nowhere, &[opcode, 0, 0, 0, 0, 0], 0).unwrap_err()));
        }
        let mut erase = [0; 16];
        (erase[0], erase[14]) = (0x85, 0xf4);
        assert!(refused(scsi_command(&nowhere, &erase, 0).unwrap_err()));
        // A command that only reads is sent, and fails by whatever the file is.
        assert!(!refused(nvme_admin(&nowhere, 0x06, 0, 1, 4096).unwrap_err()));
        assert!(!refused(scsi_command(&nowhere, &[0x12, 0, 0, 0, 36, 0], 36).unwrap_err()));
    }

    #[test]
    fn name_that_is_no_interface_is_refused() {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)
                .unwrap();
        let mut buffer = EthtoolBuffer::link_settings(0);
        assert!(ethtool(&socket, "a-name-of-sixteen", &mut buffer).is_err());
        assert!(ethtool(&socket, "no-such-port", &mut buffer).is_err());
    }
}
