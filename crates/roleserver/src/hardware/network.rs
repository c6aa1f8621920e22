//! Network interfaces from sysfs and ethtool.
//!
//! The list has interfaces on a bus of their own: no loopback, bridges or tunnels, no virtual functions of a port that is
//! listed already and no representors of those, and no interface to the management controller
//! ([`management_controller`][]). Where a hypervisor gives one port in two ways (`hv_netvsc`, `net_failover`), the
//! interface above both is listed. Speeds and the permanent address come from the driver by ethtool; an address in sysfs
//! may have been changed by a bond or by hand. A bond keeps the permanent address of each of its ports.
//!
//! [`management_controller`]: crate::hardware::management_controller

use std::os::fd::OwnedFd;
use std::path::Path;

use proto::hardware::v1::NetworkInterface;
use rustix::net::{AddressFamily, SocketType};

use crate::hardware::ioctl::{self, EthtoolBuffer};
use crate::hardware::management_controller::is_controller_interface;
use crate::hardware::{Sources, Warnings, list_names, read_number, read_text};

const ETHERNET: u64 = 1;
const INFINIBAND: u64 = 32;
/// The kernel's value for an unknown speed.
const SPEED_UNKNOWN: u32 = u32::MAX;

/// Where ethtool's data on the ports comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortSource {
    /// The running kernel, by the name of the port.
    Kernel,
    /// No kernel: the ports are laid out in files.
    FilesOnly,
}

/// Reads all ports, sorted by name.
pub fn read_interfaces(sources: &Sources, warnings: &mut Warnings) -> Vec<NetworkInterface> {
    let directory = sources.sys.join("class/net");
    if !directory.is_dir() {
        warnings.add_warning(format!("{} is not there: no network port can be listed", directory.display()));
    }
    let socket = match sources.ports {
        PortSource::FilesOnly => None,
        PortSource::Kernel => rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)
            .inspect_err(|error| warnings.add_warning(format!("network ports cannot be queried: {error}")))
            .ok(),
    };
    let found = list_names(&directory);
    let found = found.iter().filter(|name| is_port(&directory.join(name)));
    found.map(|name| describe_interface(name, &directory.join(name), socket.as_ref(), warnings)).collect()
}

fn is_port(directory: &Path) -> bool {
    let device = directory.join("device");
    device.exists()
        && !device.join("physfn").is_symlink()
        // A bond or a bridge has no device. A master with a device is the same port.
        && !directory.join("master/device").exists()
        && read_text(&directory.join("phys_port_name")).is_none_or(|name| !is_representor(&name))
        && !is_to_controller(&device)
        && matches!(read_number(&directory.join("type")), Some(ETHERNET | INFINIBAND))
}

/// Whether the name of a port is that of a representor: the end, in an adapter's switch, of a function of the adapter
/// (`pf0vf3`, `c1pf0sf1`). A port to the outside is called `p0`.
fn is_representor(port_name: &str) -> bool {
    let controller =
        port_name.strip_prefix('c').map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    let function = controller.unwrap_or(port_name).strip_prefix("pf");
    function.is_some_and(|function| function.starts_with(|c: char| c.is_ascii_digit()))
}

/// Whether an interface leads to the management controller. Its device is an interface of a USB device, which has the
/// ids.
fn is_to_controller(device: &Path) -> bool {
    let Ok(device) = device.canonicalize() else { return false };
    let id = |name: &str| read_text(&device.parent()?.join(name));
    id("idVendor")
        .zip(id("idProduct"))
        .is_some_and(|(vendor, product)| is_controller_interface(&vendor, &product))
}

/// The address of an interface without ethtool: the one that its bond keeps, or its present one.
fn read_address(directory: &Path) -> Vec<u8> {
    let address = |name: &str| hex::decode(read_text(&directory.join(name))?.replace(':', "")).ok();
    let permanent =
        address("bonding_slave/perm_hwaddr").filter(|address| address.iter().any(|byte| *byte != 0));
    permanent.or_else(|| address("address")).unwrap_or_default()
}

fn describe_interface(
    name: &str,
    directory: &Path,
    socket: Option<&OwnedFd>,
    warnings: &mut Warnings,
) -> NetworkInterface {
    let driver = std::fs::read_link(directory.join("device/driver")).ok();
    let driver = driver.as_deref().and_then(|path| path.file_name()?.to_str()).unwrap_or_default();
    let link_up = read_number(&directory.join("carrier")) == Some(1);
    // -1 without a link, which does not parse as a number here.
    let speed = read_number(&directory.join("speed")).and_then(|speed| u32::try_from(speed).ok());
    let speed = speed.filter(|speed| link_up && *speed != SPEED_UNKNOWN);
    let mut port = NetworkInterface {
        name: name.to_owned(),
        mac: read_address(directory),
        driver: driver.to_owned(),
        current_speed_mbps: speed.unwrap_or(0),
        link_up,
        ..Default::default()
    };
    if port.mac.is_empty() {
        warnings.add_warning(format!("{name}: its address cannot be read"));
    }
    let Some(socket) = socket else { return port };
    let mut buffer = EthtoolBuffer::permanent_address();
    // Many virtual drivers have no permanent address; the address in sysfs is as good there.
    if ioctl::ethtool(socket, name, &mut buffer).is_ok()
        && let Some(address) = parse_permanent_address(buffer.bytes())
    {
        port.mac = address;
    }
    match query_link_settings(socket, name) {
        Ok(buffer) => port.supported_speeds_mbps = parse_supported_speeds(buffer.bytes()),
        Err(error) => warnings.add_warning(format!("{name}: its speeds cannot be read: {error}")),
    }
    port
}

/// Queries the length of the masks, then the masks, as `<linux/ethtool.h>` requires.
fn query_link_settings(socket: &OwnedFd, name: &str) -> std::io::Result<EthtoolBuffer> {
    let mut ethtool_buffer = EthtoolBuffer::link_settings(0);
    ioctl::ethtool(socket, name, &mut ethtool_buffer)?;
    let words = i8::from_ne_bytes([ethtool_buffer.bytes()[15]]).checked_neg().unwrap_or(0);
    if words <= 0 {
        return Err(std::io::Error::other("the driver tells no mask length"));
    }
    let mut buffer = EthtoolBuffer::link_settings(words);
    ioctl::ethtool(socket, name, &mut buffer)?;
    Ok(buffer)
}

/// The address in a `struct ethtool_perm_addr`.
#[must_use]
pub fn parse_permanent_address(bytes: &[u8]) -> Option<Vec<u8>> {
    let length = u32::from_ne_bytes(bytes.get(4..8)?.try_into().ok()?);
    let address = bytes.get(8..)?.get(..usize::try_from(length).ok()?)?;
    address.iter().any(|byte| *byte != 0).then(|| address.to_vec())
}

/// The speeds in the first mask of `struct ethtool_link_settings`.
#[must_use]
pub fn parse_supported_speeds(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.get(15).map_or(0, |words| i8::from_ne_bytes([*words]).max(0).unsigned_abs());
    let mask = bytes.get(48..48 + usize::from(words) * 4).unwrap_or_default();
    let mut speeds = Vec::new();
    for (index, word) in mask.chunks_exact(4).enumerate() {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        speeds
            .extend((0..32).filter(|bit| word >> bit & 1 == 1).filter_map(|bit| speed_of(index * 32 + bit)));
    }
    speeds.sort_unstable();
    speeds.dedup();
    speeds
}

/// Megabits per second of a link mode (`enum ethtool_link_mode_bit_indices`); `None` for a bit that is not a speed
/// (autonegotiation, connectors, error correction).
const fn speed_of(bit: usize) -> Option<u32> {
    Some(match bit {
        0 | 1 | 92 | 99..=102 => 10,
        2 | 3 | 67 | 90 | 91 => 100,
        4 | 5 | 17 | 41 | 68 => 1000,
        15 | 47 => 2500,
        48 => 5000,
        12 | 18..=20 | 42..=46 => 10_000,
        21 | 22 => 20_000,
        31..=33 => 25_000,
        23..=26 => 40_000,
        34 | 35 | 40 | 52..=56 => 50_000,
        27..=30 => 56_000,
        36..=39 | 57..=61 | 75..=79 => 100_000,
        62..=66 | 80..=84 | 103..=108 => 200_000,
        69..=73 | 85..=89 | 109..=114 => 400_000,
        93..=98 | 115..=120 => 800_000,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn port(sources: &Sources, name: &str, files: &[(&str, &str)], driver: Option<&str>) {
        let directory = sources.sys.join("class/net").join(name);
        std::fs::create_dir_all(&directory).unwrap();
        if let Some(driver) = driver {
            std::fs::create_dir_all(directory.join("device")).unwrap();
            symlink(format!("../../../../bus/pci/drivers/{driver}"), directory.join("device/driver"))
                .unwrap();
        }
        for (path, value) in files {
            std::fs::write(directory.join(path), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn ports_on_a_bus_are_listed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        let ethernet =
            [("type", "1"), ("address", "0c:c4:7a:00:01:02"), ("carrier", "1"), ("speed", "25000")];
        port(&sources, "eno1", &ethernet, Some("mlx5_core"));
        port(
            &sources,
            "eno2",
            &[("type", "1"), ("address", "0c:c4:7a:00:01:03"), ("speed", "-1")],
            Some("igb"),
        );
        port(&sources, "lo", &[("type", "772"), ("address", "00:00:00:00:00:00")], None);
        port(&sources, "br0", &ethernet, None);
        port(&sources, "eno1v0", &ethernet, Some("mlx5_core"));
        symlink("../eno1", sources.sys.join("class/net/eno1v0/device/physfn")).unwrap();
        let mut warnings = Warnings::default();
        let ports = read_interfaces(&sources, &mut warnings);
        assert_eq!(ports.len(), 2, "{ports:?}");
        assert_eq!((ports[0].name.as_str(), ports[0].driver.as_str()), ("eno1", "mlx5_core"));
        assert_eq!(hex::encode(&ports[0].mac), "0cc47a000102");
        assert_eq!((ports[0].current_speed_mbps, ports[0].link_up), (25_000, true));
        assert_eq!((ports[1].current_speed_mbps, ports[1].link_up), (0, false));
        assert!(warnings.into_sentences().is_empty());
    }

    #[test]
    fn port_that_is_given_in_two_ways_is_listed_once() {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        let ethernet = [("type", "1"), ("address", "00:0d:3a:00:01:02")];
        port(&sources, "eth0", &ethernet, Some("hv_netvsc"));
        port(&sources, "eth1", &ethernet, Some("mlx5_core"));
        port(&sources, "eth2", &ethernet, Some("igb"));
        port(&sources, "bond0", &ethernet, None);
        let master = |name: &str, master: &str| {
            let link = sources.sys.join("class/net").join(name).join("master");
            symlink(format!("../{master}"), link).unwrap();
        };
        master("eth1", "eth0");
        master("eth2", "bond0");
        let ports = read_interfaces(&sources, &mut Warnings::default());
        let names: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(names, ["eth0", "eth2"]);
    }

    #[test]
    fn function_of_an_adapter_is_no_port_of_the_machine() {
        for (name, expected) in [
            ("p0", false),
            ("p1s2", false),
            ("0", false),
            ("c", false),
            ("pf", false),
            ("pf0vf3", true),
            ("pf1sf20", true),
            ("c1pf0vf0", true),
            ("pf0", true),
        ] {
            assert_eq!(is_representor(name), expected, "{name}");
        }
    }

    #[test]
    fn interface_to_the_management_controller_is_no_port() {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        for (name, vendor, product) in [("usb0", "0b1f", "03ee"), ("usb1", "0bda", "8153")] {
            let usb = sources.sys.join("devices").join(name);
            std::fs::create_dir_all(usb.join("interface")).unwrap();
            std::fs::write(usb.join("idVendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(usb.join("idProduct"), format!("{product}\n")).unwrap();
            port(&sources, name, &[("type", "1"), ("address", "b0:3a:f2:b6:05:9f")], None);
            let device = sources.sys.join("class/net").join(name).join("device");
            symlink(format!("../../../devices/{name}/interface"), device).unwrap();
        }
        let ports = read_interfaces(&sources, &mut Warnings::default());
        let names: Vec<_> = ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(names, ["usb1"]);
    }

    #[test]
    fn ports_of_a_bond_have_their_own_addresses() {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        for (name, permanent) in [("eno1", "0c:c4:7a:00:01:02"), ("eno2", "00:00:00:00:00:00")] {
            port(&sources, name, &[("type", "1"), ("address", "0c:c4:7a:00:01:0f")], Some("igb"));
            let bond = sources.sys.join("class/net").join(name).join("bonding_slave");
            std::fs::create_dir_all(&bond).unwrap();
            std::fs::write(bond.join("perm_hwaddr"), format!("{permanent}\n")).unwrap();
        }
        let ports = read_interfaces(&sources, &mut Warnings::default());
        assert_eq!(hex::encode(&ports[0].mac), "0cc47a000102");
        assert_eq!(hex::encode(&ports[1].mac), "0cc47a00010f");
    }

    fn settings(bits: &[usize]) -> Vec<u8> {
        let mut bytes = vec![0; 48 + 3 * 4 * 4];
        bytes[15] = 4;
        for bit in bits {
            let at = 48 + bit / 32 * 4;
            let word = u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()) | 1 << (bit % 32);
            bytes[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn link_modes_are_speeds_in_order_once_each() {
        // 1000baseT full, autonegotiation, TP, 25000baseCR, 25000baseSR, 100000baseCR4, FEC.
        assert_eq!(parse_supported_speeds(&settings(&[38, 5, 6, 7, 31, 33, 50])), [1000, 25_000, 100_000]);
        assert_eq!(parse_supported_speeds(&settings(&[])), Vec::<u32>::new());
        assert_eq!(parse_supported_speeds(&settings(&[69])[..50]), Vec::<u32>::new());
        assert_eq!(parse_supported_speeds(&settings(&[69, 107])), [200_000, 400_000]);
    }

    #[test]
    fn permanent_address_counts_unless_it_is_zero() {
        let mut bytes = vec![0; 40];
        bytes[4..8].copy_from_slice(&6_u32.to_ne_bytes());
        assert_eq!(parse_permanent_address(&bytes), None);
        bytes[8..14].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        assert_eq!(parse_permanent_address(&bytes).unwrap(), [2, 0, 0, 0, 0, 1]);
        bytes[4..8].copy_from_slice(&600_u32.to_ne_bytes());
        assert_eq!(parse_permanent_address(&bytes), None);
    }
}
