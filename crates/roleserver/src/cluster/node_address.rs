//! This node's address: from its order, or detected, and followed when it changes.
//!
//! The address in the order counts. Without one, the address is the one that the host uses as the source of connections
//! to a curator. A curator of another node sees that source, and refuses the report of any other address.
//!
//! A host may lose its address while the node runs, for example when a lease of DHCP ends. So the address is looked for
//! again every 15 seconds. An address that the host still has stays, so that a node with several addresses does
//! not change between them. The status report, the services and the components of Kubernetes follow the new one. A
//! consensus member does not: its address is a part of its membership of etcd.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::time::Duration;

use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::files::ClusterFiles;
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::node_order::NodeOrder;

/// How often the address of this node is compared with those of the host.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// The address at which other nodes connect to this one: from the order, or else from the route to a curator.
pub fn node_address(
    order: Option<&NodeOrder>,
    curators: impl IntoIterator<Item = String>,
) -> Result<IpAddr, RunnableError> {
    order.and_then(|order| order.address).map_or_else(|| detect_address(curators), Ok)
}

/// What decides whether a running node has another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressState {
    /// The address that it has.
    pub current: IpAddr,
    /// The address in its order.
    pub ordered: Option<IpAddr>,
    /// Whether the host still has `current`.
    pub is_present: bool,
    /// Whether the node is a consensus member.
    pub is_member: bool,
}

/// The other address that a running node has from now on; `None` while nothing changes.
#[must_use]
pub fn decide_address(state: &AddressState, detect: impl FnOnce() -> Option<IpAddr>) -> Option<IpAddr> {
    if state.ordered.is_some() || state.is_present || state.is_member {
        return None;
    }
    detect().filter(|detected| *detected != state.current)
}

/// Makes the runnable that follows the address of this host.
#[must_use]
pub fn follow_address(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let healthy = starting.mark_healthy();
            loop {
                healthy.scope().until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await?;
                let (Some(connection), Some(current)) = (facts.connection.latest(), facts.address.latest())
                else {
                    continue;
                };
                let state = AddressState {
                    current,
                    ordered: files.read_order()?.and_then(|order| order.address),
                    is_present: has_address(current),
                    is_member: facts.roles.latest().is_some_and(|roles| roles.consensus_member.is_some()),
                };
                let detect = || detect_address(connection.curators.directory()).ok();
                if let Some(address) = decide_address(&state, detect) {
                    tracing::warn!(former = %current, %address, "the host lost its address: the node has another");
                    facts.address.set(address);
                }
            }
        }
    })
}

/// Whether the host has this address: a socket can be bound to it.
fn has_address(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// The address that the host would use as source; no packet is sent.
fn detect_address(curators: impl IntoIterator<Item = String>) -> Result<IpAddr, RunnableError> {
    // A documentation address (TEST-NET-1) represents the default route.
    let elsewhere = SocketAddr::from(([192, 0, 2, 1], 7835));
    let towards = curators.into_iter().filter_map(|curator| curator.to_socket_addrs().ok()?.next());
    for remote in towards.chain([elsewhere]) {
        let any: SocketAddr = if remote.is_ipv4() { ([0; 4], 0).into() } else { ([0_u16; 8], 0).into() };
        let result = UdpSocket::bind(any).and_then(|socket| {
            socket.connect(remote)?;
            socket.local_addr()
        });
        match result {
            Ok(local) if !local.ip().is_loopback() && !local.ip().is_unspecified() => return Ok(local.ip()),
            _ => {}
        }
    }
    Err(RunnableError::msg(
        "no address is known at which other nodes can reach this one: it has no route to a curator; set the \
         address in the order",
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cluster::node_order::OrderKind;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn address_changes_only_when_the_host_lost_it_and_nothing_gives_it() {
        let (current, other) = (ip("10.0.0.1"), ip("10.0.0.2"));
        let lost = AddressState { current, ordered: None, is_present: false, is_member: false };
        for (case, state, detected, expected) in [
            ("lost", lost, Some(other), Some(other)),
            ("lost, and none is detected", lost, None, None),
            ("lost, and detected all the same", lost, Some(current), None),
            ("still there", AddressState { is_present: true, ..lost }, Some(other), None),
            ("of a member of etcd", AddressState { is_member: true, ..lost }, Some(other), None),
            ("in the order", AddressState { ordered: Some(current), ..lost }, Some(other), None),
        ] {
            assert_eq!(decide_address(&state, || detected), expected, "{case}");
        }
        let present = AddressState { is_present: true, ..lost };
        assert_eq!(decide_address(&present, || panic!("nothing is detected without need")), None);
    }

    #[test]
    fn address_in_the_order_counts() {
        let address = Some(ip("127.0.0.7"));
        let order = NodeOrder {
            generation: 0,
            what: OrderKind::Leave {},
            machine: None,
            labels: BTreeMap::new(),
            address,
        };
        assert_eq!(node_address(Some(&order), []).ok(), address);
    }

    #[test]
    fn host_has_the_loopback_interface_and_no_address_for_documentation() {
        assert!(has_address(ip("127.0.0.1")));
        assert!(!has_address(ip("192.0.2.77")));
    }
}
