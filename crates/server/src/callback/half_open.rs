//! Limit on half-open connections per network: the oldest is evicted.
//!
//! The same limit is used for connections that have finished the handshake but proven no agent yet.
//!
//! A silent connection costs its sender nothing and us memory until its deadline. Rejecting new connections at the
//! limit would give control to a peer that opens a thousand: nobody else gets in until they time out. So the new
//! connection is admitted and the *oldest* is evicted: of its own network if that has too many, else of the network
//! that has most. An honest handshake takes milliseconds, so the oldest connection is a silent one.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use tokio_util::sync::CancellationToken;

/// The network of a peer: an IPv4 address, or an IPv6 network of 64 bits, which is what one customer gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerNetwork(IpAddr);

impl PeerNetwork {
    /// The network of a connection from `address`.
    #[must_use]
    pub fn from_address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(v6) => Self(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into()),
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

/// Limits on handshakes in progress.
#[derive(Clone, Copy, Debug)]
pub struct HalfOpenLimits {
    /// Most connections of one network.
    pub per_network: usize,
    /// Most connections in total.
    pub total: usize,
}

impl Default for HalfOpenLimits {
    fn default() -> Self {
        Self { per_network: 2048, total: 8192 }
    }
}

/// The handshakes in progress.
#[derive(Debug)]
pub struct HalfOpenSet {
    limits: HalfOpenLimits,
    networks: HashMap<PeerNetwork, BTreeMap<u64, CancellationToken>>,
    count: usize,
    next: u64,
}

/// One handshake in progress.
#[derive(Clone, Debug)]
pub struct HalfOpenTicket {
    network: PeerNetwork,
    number: u64,
    /// Cancelled when the connection is evicted.
    pub evicted: CancellationToken,
}

impl HalfOpenSet {
    /// Creates an empty set with these limits.
    #[must_use]
    pub fn new(limits: HalfOpenLimits) -> Self {
        Self { limits, networks: HashMap::new(), count: 0, next: 0 }
    }

    /// Admits a new connection, and evicts older ones above the limits.
    pub fn admit(&mut self, source: PeerNetwork) -> HalfOpenTicket {
        while self
            .networks
            .get(&source)
            .is_some_and(|of_source| of_source.len() >= self.limits.per_network.max(1))
        {
            self.evict_oldest(source);
        }
        while self.count >= self.limits.total.max(1) {
            let busiest = self.networks.iter().max_by_key(|(source, own)| (own.len(), **source));
            let Some((&busiest, _)) = busiest else { break };
            self.evict_oldest(busiest);
        }
        let ticket = HalfOpenTicket { network: source, number: self.next, evicted: CancellationToken::new() };
        self.next += 1;
        self.count += 1;
        self.networks.entry(source).or_default().insert(ticket.number, ticket.evicted.clone());
        ticket
    }

    /// Removes a connection whose handshake is finished.
    pub fn remove(&mut self, ticket: &HalfOpenTicket) {
        let Some(own) = self.networks.get_mut(&ticket.network) else { return };
        if own.remove(&ticket.number).is_some() {
            self.count -= 1;
        }
        if own.is_empty() {
            self.networks.remove(&ticket.network);
        }
    }

    /// Number of connections in the set.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    fn evict_oldest(&mut self, source: PeerNetwork) {
        let Some(own) = self.networks.get_mut(&source) else { return };
        if let Some((_, oldest)) = own.pop_first() {
            oldest.cancel();
            self.count -= 1;
        }
        if own.is_empty() {
            self.networks.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(last: u8) -> PeerNetwork {
        PeerNetwork::from_address(IpAddr::from([192, 0, 2, last]))
    }

    fn alive(tickets: &[HalfOpenTicket]) -> Vec<bool> {
        tickets.iter().map(|ticket| !ticket.evicted.is_cancelled()).collect()
    }

    #[test]
    fn oldest_of_a_network_is_evicted_for_its_newest() {
        let mut open = HalfOpenSet::new(HalfOpenLimits { per_network: 2, total: 10 });
        let other = open.admit(network(9));
        let tickets = [open.admit(network(1)), open.admit(network(1)), open.admit(network(1))];
        assert_eq!(alive(&tickets), [false, true, true]);
        assert_eq!(alive(&[other]), [true]);
        assert_eq!(open.count(), 3);
    }

    #[test]
    fn busiest_network_is_evicted_when_the_total_is_exceeded() {
        let mut open = HalfOpenSet::new(HalfOpenLimits { per_network: 10, total: 3 });
        let quiet = open.admit(network(2));
        let flood = [open.admit(network(1)), open.admit(network(1))];
        let newcomer = open.admit(network(3));
        assert_eq!(alive(&flood), [false, true]);
        assert_eq!(alive(&[quiet, newcomer]), [true, true]);
    }

    #[test]
    fn removed_ticket_is_subtracted_once() {
        let mut open = HalfOpenSet::new(HalfOpenLimits { per_network: 1, total: 1 });
        let first = open.admit(network(1));
        let second = open.admit(network(1));
        open.remove(&first);
        assert_eq!(open.count(), 1);
        open.remove(&second);
        open.remove(&second);
        assert_eq!((open.count(), open.networks.len()), (0, 0));
    }

    #[test]
    fn ipv6_hosts_of_one_network_share_a_limit() {
        let of = |text: &str| PeerNetwork::from_address(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
