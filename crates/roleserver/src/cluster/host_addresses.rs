//! The addresses that the interfaces of this host have.
//!
//! Whether a socket can be bound to an address says less. With `net.ipv4.ip_nonlocal_bind`, which load balancers set, a
//! socket can be bound to an address that the host does not have.

use std::io::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The list of getifaddrs(3), which is freed when this is dropped.
struct InterfaceList(*mut libc::ifaddrs);

impl Drop for InterfaceList {
    fn drop(&mut self) {
        // SAFETY: the list came from getifaddrs, is freed once, and nothing refers to it any more.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

/// All addresses of the interfaces of this host, in the network namespace of this process.
pub(super) fn list_host_addresses() -> Result<Vec<IpAddr>, Error> {
    let mut first = ptr::null_mut();
    // SAFETY: `first` is a place for a pointer, which the call writes before it returns 0.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(Error::last_os_error());
    }
    let list = InterfaceList(first);
    let (mut addresses, mut next) = (Vec::new(), list.0.cast_const());
    // SAFETY: each entry of the list is valid until `list` is dropped, and the last one refers to none.
    while let Some(entry) = unsafe { next.as_ref() } {
        addresses.extend(read_address(entry));
        next = entry.ifa_next;
    }
    Ok(addresses)
}

/// The address of an entry; `None` if it has none, or one of another family.
fn read_address(entry: &libc::ifaddrs) -> Option<IpAddr> {
    // SAFETY: an entry refers to no address or to one with a family, which lives as long as the entry.
    let family = unsafe { entry.ifa_addr.as_ref() }?.sa_family;
    match libc::c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a whole `sockaddr_in`. It is read without regard to alignment.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a whole `sockaddr_in6`. It is read without regard to alignment.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn only_addresses_of_interfaces_are_listed() {
        let addresses = list_host_addresses().unwrap();
        assert!(addresses.contains(&Ipv4Addr::LOCALHOST.into()), "{addresses:?}");
        // As with each address if net.ipv4.ip_nonlocal_bind is set: it can be bound to, and no interface has it.
        let bindable = Ipv4Addr::new(127, 0, 0, 77);
        assert!(UdpSocket::bind((bindable, 0)).is_ok());
        assert!(!addresses.contains(&bindable.into()), "{addresses:?}");
        assert!(addresses.iter().all(|address| !address.is_unspecified()), "{addresses:?}");
    }
}
