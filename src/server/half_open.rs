//! How many handshakes may be under way, and which one gives way when there are too many. The same
//! holds for connections that have shaken hands and proven no agent yet.
//!
//! A connection that says nothing costs its sender nothing and us memory until
//! its deadline. Refusing new ones when there are too many would hand the door
//! to whoever opens a thousand: nobody else gets in until they time out. So the
//! newcomer is let in and the *oldest* gives way, of its own source when that
//! one has too many, else of the source that has most. An honest handshake takes
//! milliseconds; what has waited longest is what says nothing.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};

use tokio_util::sync::CancellationToken;

/// What one source may have under way: an IPv4 address, or an IPv6 network of 64 bits, which is what
/// one customer gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source(IpAddr);

impl Source {
    /// The source of a connection from `address`.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(v6) => Self(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into()),
            v4 @ IpAddr::V4(_) => Self(v4),
        }
    }
}

/// Limits on handshakes under way.
#[derive(Clone, Copy, Debug)]
pub struct HalfOpenLimits {
    /// Of one source.
    pub per_source: usize,
    /// Of all together.
    pub overall: usize,
}

impl Default for HalfOpenLimits {
    fn default() -> Self {
        Self { per_source: 2048, overall: 8192 }
    }
}

/// The handshakes under way.
#[derive(Debug)]
pub struct HalfOpen {
    limits: HalfOpenLimits,
    sources: HashMap<Source, BTreeMap<u64, CancellationToken>>,
    count: usize,
    next: u64,
}

/// One handshake under way.
#[derive(Clone, Debug)]
pub struct Ticket {
    source: Source,
    number: u64,
    /// Cancelled when it has to give way.
    pub gives_way: CancellationToken,
}

impl HalfOpen {
    /// None yet.
    #[must_use]
    pub fn new(limits: HalfOpenLimits) -> Self {
        Self { limits, sources: HashMap::new(), count: 0, next: 0 }
    }

    /// Takes a newcomer in; older ones may be told to give way.
    pub fn admit(&mut self, source: Source) -> Ticket {
        while self
            .sources
            .get(&source)
            .is_some_and(|of_source| of_source.len() >= self.limits.per_source.max(1))
        {
            self.oldest_gives_way(source);
        }
        while self.count >= self.limits.overall.max(1) {
            let busiest = self.sources.iter().max_by_key(|(source, own)| (own.len(), **source));
            let Some((&busiest, _)) = busiest else { break };
            self.oldest_gives_way(busiest);
        }
        let ticket = Ticket { source, number: self.next, gives_way: CancellationToken::new() };
        self.next += 1;
        self.count += 1;
        self.sources.entry(source).or_default().insert(ticket.number, ticket.gives_way.clone());
        ticket
    }

    /// A handshake is over.
    pub fn leave(&mut self, ticket: &Ticket) {
        let Some(own) = self.sources.get_mut(&ticket.source) else { return };
        if own.remove(&ticket.number).is_some() {
            self.count -= 1;
        }
        if own.is_empty() {
            self.sources.remove(&ticket.source);
        }
    }

    /// How many are under way.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    fn oldest_gives_way(&mut self, source: Source) {
        let Some(own) = self.sources.get_mut(&source) else { return };
        if let Some((_, oldest)) = own.pop_first() {
            oldest.cancel();
            self.count -= 1;
        }
        if own.is_empty() {
            self.sources.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(last: u8) -> Source {
        Source::of(IpAddr::from([192, 0, 2, last]))
    }

    fn alive(tickets: &[Ticket]) -> Vec<bool> {
        tickets.iter().map(|ticket| !ticket.gives_way.is_cancelled()).collect()
    }

    #[test]
    fn oldest_of_a_source_gives_way_to_its_newest() {
        let mut open = HalfOpen::new(HalfOpenLimits { per_source: 2, overall: 10 });
        let other = open.admit(source(9));
        let tickets = [open.admit(source(1)), open.admit(source(1)), open.admit(source(1))];
        assert_eq!(alive(&tickets), [false, true, true]);
        assert_eq!(alive(&[other]), [true]);
        assert_eq!(open.count(), 3);
    }

    #[test]
    fn busiest_source_gives_way_when_all_together_are_too_many() {
        let mut open = HalfOpen::new(HalfOpenLimits { per_source: 10, overall: 3 });
        let quiet = open.admit(source(2));
        let flood = [open.admit(source(1)), open.admit(source(1))];
        let newcomer = open.admit(source(3));
        assert_eq!(alive(&flood), [false, true]);
        assert_eq!(alive(&[quiet, newcomer]), [true, true]);
    }

    #[test]
    fn what_left_counts_no_more_and_only_once() {
        let mut open = HalfOpen::new(HalfOpenLimits { per_source: 1, overall: 1 });
        let first = open.admit(source(1));
        let second = open.admit(source(1));
        open.leave(&first);
        assert_eq!(open.count(), 1);
        open.leave(&second);
        open.leave(&second);
        assert_eq!((open.count(), open.sources.len()), (0, 0));
    }

    #[test]
    fn ipv6_hosts_of_one_network_are_one_source() {
        let of = |text: &str| Source::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
    }
}
