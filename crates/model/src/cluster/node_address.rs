//! Addresses of nodes: the one in the provider's list, the assigned one and the recorded one.
//!
//! A provider's list names the address at which a machine is taken over. The shepherd assigns that address to the node
//! of the machine, so that the node cannot have another one, from wherever it connects to its curators. An order to found
//! or to join names it, too, so that the node reports it.
//!
//! A list may have the name of a machine instead, or an address at which no other node reaches the machine. Then nothing
//! is assigned, and the curators believe the source of the node's connection.

use std::net::IpAddr;

/// The addresses of a node, as its curators have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// The address in its record; `None` before the curators have accepted one.
    pub recorded: Option<IpAddr>,
    /// The address that an owner assigned to it.
    pub assigned: AssignedAddress,
}

/// The address that an owner of its cluster assigned to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AssignedAddress {
    /// The curators did not report it: an earlier release leads, which assigns none.
    #[default]
    Unknown,
    /// None is assigned, and its connections prove its address.
    Nothing,
    /// The only one that the node can have.
    Address(IpAddr),
}

/// The address of a node by the text in its provider's list; `None` for a name, and for an address at which no other
/// machine reaches it.
#[must_use]
pub fn listed_node_address(text: &str) -> Option<IpAddr> {
    let address = text.parse::<IpAddr>().ok()?.to_canonical();
    // A link-local address of IPv6 means nothing without an interface of the caller.
    let needs_interface = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    let reaches_nobody = address.is_unspecified() || address.is_multicast() || address.is_loopback();
    (!reaches_nobody && !needs_interface).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_address_is_one_that_other_machines_reach() {
        for (text, expected) in [
            ("10.0.0.7", Some("10.0.0.7")),
            ("::ffff:10.0.0.7", Some("10.0.0.7")),
            ("2001:db8::7", Some("2001:db8::7")),
            ("m7.example", None),
            ("10.0.0.7:22", None),
            ("", None),
            ("127.0.0.1", None),
            ("::1", None),
            ("::ffff:127.0.0.1", None),
            ("0.0.0.0", None),
            ("ff02::1", None),
            ("fe80::7", None),
            ("fe80::7%eth0", None),
        ] {
            let expected = expected.map(|text| text.parse().unwrap());
            assert_eq!(listed_node_address(text), expected, "{text:?}");
        }
    }
}
