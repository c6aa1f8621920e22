//! From which addresses services and pods get theirs.
//!
//! Two ranges, which must have no address in common: one for services of the whole cluster, and one for pods, of which
//! every worker has a part to itself. The parts are all of one size, so that any free one is as good as any other, and the
//! lowest is taken. Both are of IPv4: a range of IPv6 beside it would be one more of everything that follows from them,
//! and nothing here is tested with one.
//!
//! Two addresses of the services' range have an owner from the beginning: the first is that of the API servers (Kubernetes
//! gives it to the service `kubernetes` itself), the tenth that of the names (by convention of everything that installs
//! Kubernetes).
//!
//! Bounds that are not ours: an API server refuses a range of services with more than 20 bits, and the controller manager
//! more than 16 bits between the range of pods and the part of one node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// The largest range of services, as the length of its prefix.
const LARGEST_SERVICES: u8 = 12;
/// The smallest one: it has a tenth address.
const SMALLEST_SERVICES: u8 = 28;
/// The smallest part of a node: 14 pods.
const SMALLEST_NODE: u8 = 28;
/// How much longer the prefix of a node's part may be than that of all of them.
const MOST_NODE_BITS: u8 = 16;
/// Which address of the services' range is that of the names.
const DNS: u32 = 10;

/// Ranges whose addresses mean something else to every host.
const OF_HOSTS: [(Range, &str); 4] = [
    (Range { network: 0, prefix: 8 }, "addresses of no host"),
    (Range { network: 0x7f00_0000, prefix: 8 }, "each host's own addresses"),
    (Range { network: 0xa9fe_0000, prefix: 16 }, "addresses of one link"),
    (Range { network: 0xe000_0000, prefix: 3 }, "addresses of groups, or reserved"),
];

/// Addresses of IPv4 with one beginning: `10.96.0.0/16`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    network: u32,
    prefix: u8,
}

/// A text that is no range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRange {
    /// It is of IPv6.
    #[error("{0:?} is a range of IPv6, and Kubernetes of a cluster has ranges of IPv4 alone")]
    Ipv6(String),
    /// It is nothing of the kind.
    #[error("{0:?} is no range of addresses: write it as 10.96.0.0/16")]
    Malformed(String),
    /// Its address is one in the middle of it.
    #[error("{text} begins in the middle of a range: the one that it is in is {meant}")]
    HostBits {
        /// What was said.
        text: String,
        /// The range with the same prefix that has this address.
        meant: Range,
    },
}

impl Range {
    /// The range of this prefix that has this address; `None` where there is no such prefix.
    #[must_use]
    pub fn around(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        let mask = mask(prefix)?;
        Some(Self { network: u32::from(address) & mask, prefix })
    }

    /// The length of its prefix.
    #[must_use]
    pub const fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the address is in it.
    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        Self::around(address, self.prefix) == Some(self)
    }

    /// Whether both have an address in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        let (wide, narrow) = if self.prefix <= other.prefix { (self, other) } else { (other, self) };
        wide.contains(Ipv4Addr::from(narrow.network))
    }

    /// Its parts with this prefix, in order; none where it is shorter than its own.
    fn parts(self, prefix: u8) -> impl Iterator<Item = Self> {
        let bits = prefix.checked_sub(self.prefix).filter(|_| prefix <= 32);
        let count = bits.map_or(0, |bits| 1_u64 << bits);
        (0..count).filter_map(move |number| {
            let offset = number.checked_shl(u32::from(32 - prefix))?;
            let network = u64::from(self.network) + offset;
            Some(Self { network: u32::try_from(network).ok()?, prefix })
        })
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.network), self.prefix)
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Range {
    type Err = NoRange;

    fn from_str(text: &str) -> Result<Self, NoRange> {
        let shown = || text.chars().take(100).collect::<String>();
        let malformed = || NoRange::Malformed(shown());
        let (address, prefix) = text.split_once('/').ok_or_else(malformed)?;
        if address.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(NoRange::Ipv6(shown()));
        }
        let address: Ipv4Addr = address.parse().map_err(|_| malformed())?;
        let prefix: u8 = prefix.parse().map_err(|_| malformed())?;
        let range = Self::around(address, prefix).ok_or_else(malformed)?;
        if text != format!("{address}/{prefix}") {
            return Err(malformed());
        }
        if u32::from(address) != range.network {
            return Err(NoRange::HostBits { text: shown(), meant: range });
        }
        Ok(range)
    }
}

/// The ranges of a cluster, which fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges {
    services: Range,
    pods: Range,
    node_prefix: u8,
}

impl Ranges {
    /// Takes what somebody said; the error is all that is wrong with it, a sentence each.
    pub fn new(services: &str, pods: &str, node_prefix: u32) -> Result<Self, Vec<String>> {
        let mut faults = Vec::new();
        let mut read = |field: &str, text: &str| match text.parse::<Range>() {
            Ok(range) => {
                for (taken, what) in OF_HOSTS {
                    if range.overlaps(taken) {
                        faults.push(format!("{field}: {range} has {what} in it ({taken})"));
                    }
                }
                Some(range)
            }
            Err(error) => {
                faults.push(format!("{field}: {error}"));
                None
            }
        };
        let (services, pods) = (read("service_range", services), read("pod_range", pods));
        if let Some(services) = services
            && !(LARGEST_SERVICES..=SMALLEST_SERVICES).contains(&services.prefix)
        {
            faults.push(format!(
                "service_range: {services} is no range for services: its prefix has {LARGEST_SERVICES} to \
                 {SMALLEST_SERVICES} bits"
            ));
        }
        if let (Some(services), Some(pods)) = (services, pods)
            && services.overlaps(pods)
        {
            faults.push(format!(
                "service_range and pod_range: {services} and {pods} have addresses in common; services and pods need \
                 ranges of their own"
            ));
        }
        let prefix = u8::try_from(node_prefix).ok();
        if let Some(pods) = pods {
            let longest = SMALLEST_NODE.min(pods.prefix.saturating_add(MOST_NODE_BITS));
            if pods.prefix > SMALLEST_NODE {
                faults.push(format!(
                    "pod_range: {pods} is too small: its prefix has {SMALLEST_NODE} bits at the most"
                ));
            } else if !prefix.is_some_and(|prefix| (pods.prefix..=longest).contains(&prefix)) {
                faults.push(format!(
                    "node_prefix: it is {node_prefix}, and the part of a node in {pods} has a prefix of {} to {longest} bits",
                    pods.prefix
                ));
            }
        }
        match (services, pods, prefix) {
            (Some(services), Some(pods), Some(node_prefix)) if faults.is_empty() => {
                Ok(Self { services, pods, node_prefix })
            }
            _ => Err(faults),
        }
    }

    /// From which services get their addresses.
    #[must_use]
    pub const fn services(&self) -> Range {
        self.services
    }

    /// From which nodes get theirs for pods.
    #[must_use]
    pub const fn pods(&self) -> Range {
        self.pods
    }

    /// At which address programs in the cluster reach its API servers.
    #[must_use]
    pub const fn api_server(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.services.network + 1)
    }

    /// At which address they ask for names.
    #[must_use]
    pub const fn dns(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.services.network + DNS)
    }

    /// How many nodes can have a part.
    #[must_use]
    pub const fn nodes(&self) -> u32 {
        1 << (self.node_prefix - self.pods.prefix)
    }

    /// Whether a node can have this part.
    #[must_use]
    pub fn has(&self, part: Range) -> bool {
        part.prefix == self.node_prefix && self.pods.overlaps(part)
    }

    /// The lowest part that has no address of those that are taken; `None` where there is no such part.
    #[must_use]
    pub fn lowest_free(&self, taken: &BTreeSet<Range>) -> Option<Range> {
        self.pods.parts(self.node_prefix).find(|part| !taken.contains(part))
    }
}

/// The bits of a prefix.
const fn mask(prefix: u8) -> Option<u32> {
    match prefix {
        0 => Some(0),
        1..=32 => Some(u32::MAX << (32 - prefix)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Range {
        text.parse().unwrap()
    }

    #[test]
    fn range_has_one_form_and_begins_where_it_begins() {
        for text in ["10.96.0.0/16", "10.128.0.0/12", "0.0.0.0/0", "10.0.0.7/32", "128.0.0.0/1"] {
            assert_eq!(range(text).to_string(), text);
        }
        for (text, said) in [
            ("", "no range"),
            ("10.96.0.0", "no range"),
            ("10.96.0.0/", "no range"),
            ("10.96.0.0/33", "no range"),
            ("10.96.0.0/+16", "no range"),
            ("10.96.0.0/016", "no range"),
            ("10.96.0/16", "no range"),
            ("10.96.0.00/16", "no range"),
            (" 10.96.0.0/16", "no range"),
            ("fd00::/64", "IPv4 alone"),
            ("10.96.1.0/16", "is 10.96.0.0/16"),
            ("10.140.0.0/12", "is 10.128.0.0/12"),
        ] {
            let error = text.parse::<Range>().unwrap_err().to_string();
            assert!(error.contains(said), "{text:?}: {error}");
        }
    }

    #[test]
    fn ranges_overlap_when_one_is_in_the_other() {
        for (one, other, both) in [
            ("10.0.0.0/8", "10.96.0.0/16", true),
            ("10.96.0.0/16", "10.96.0.0/16", true),
            ("10.96.0.0/16", "10.97.0.0/16", false),
            ("10.96.0.0/12", "10.112.0.0/12", false),
            ("0.0.0.0/0", "192.168.0.0/24", true),
            ("10.0.0.0/31", "10.0.0.1/32", true),
        ] {
            assert_eq!(range(one).overlaps(range(other)), both, "{one} {other}");
            assert_eq!(range(other).overlaps(range(one)), both, "{other} {one}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_told_at_once() {
        for (services, pods, node_prefix, said) in [
            ("10.96.0.0/16", "10.128.0.0/12", 24, &[][..]),
            ("10.96.0.0/12", "10.128.0.0/28", 28, &[]),
            ("10.96.0.0/28", "10.0.0.0/11", 27, &[]),
            ("10.96.0.0/16", "10.0.0.0/8", 24, &["have addresses in common"]),
            ("10.96.0.0/16", "10.96.128.0/17", 24, &["have addresses in common"]),
            ("10.0.0.0/8", "192.168.0.0/16", 24, &["12 to 28 bits"]),
            ("10.96.0.0/29", "10.128.0.0/12", 24, &["12 to 28 bits"]),
            ("10.96.0.0/16", "10.128.0.0/24", 23, &["node_prefix: it is 23", "24 to 28"]),
            ("10.96.0.0/16", "10.128.0.0/24", 29, &["node_prefix: it is 29"]),
            ("10.96.0.0/16", "10.0.0.0/10", 27, &["10 to 26"]),
            ("10.96.0.0/16", "10.128.0.0/12", 0, &["node_prefix: it is 0"]),
            ("10.96.0.0/16", "10.128.0.0/12", 1000, &["node_prefix: it is 1000"]),
            ("10.96.0.0/16", "10.128.0.0/29", 29, &["pod_range: 10.128.0.0/29 is too small"]),
            ("127.0.0.0/16", "224.0.0.0/12", 24, &["each host's own", "groups"]),
            ("0.0.0.0/0", "169.254.0.0/16", 24, &["addresses of no host", "one link", "in common"]),
            (
                "fd00::/64",
                "10.128.1.0/12",
                24,
                &["service_range: \"fd00::/64\"", "pod_range: 10.128.1.0/12 begins"],
            ),
            ("", "", 24, &["service_range", "pod_range"]),
        ] {
            let faults = Ranges::new(services, pods, node_prefix).err().unwrap_or_default();
            assert_eq!(faults.is_empty(), said.is_empty(), "{services} {pods} {node_prefix}: {faults:?}");
            let told = faults.join("\n");
            for said in said {
                assert!(told.contains(said), "{services} {pods} {node_prefix}: {told}");
            }
        }
    }

    #[test]
    fn first_and_tenth_address_of_services_have_their_owners() {
        for (services, first, tenth) in
            [("10.96.0.0/16", "10.96.0.1", "10.96.0.10"), ("10.96.0.240/28", "10.96.0.241", "10.96.0.250")]
        {
            let ranges = Ranges::new(services, "10.128.0.0/12", 24).unwrap();
            assert_eq!(
                (ranges.api_server().to_string(), ranges.dns().to_string()),
                (first.to_owned(), tenth.to_owned())
            );
            assert!(ranges.services().contains(ranges.dns()));
        }
    }

    #[test]
    fn lowest_free_part_is_taken_until_there_is_none() {
        let ranges = Ranges::new("10.96.0.0/16", "10.128.0.0/22", 24).unwrap();
        assert_eq!(ranges.nodes(), 4);
        let mut taken = BTreeSet::new();
        for expected in ["10.128.0.0/24", "10.128.1.0/24", "10.128.2.0/24", "10.128.3.0/24"] {
            let part = ranges.lowest_free(&taken).unwrap();
            assert_eq!(part.to_string(), expected);
            assert!(ranges.has(part));
            taken.insert(part);
        }
        assert_eq!(ranges.lowest_free(&taken), None);
        taken.remove(&range("10.128.1.0/24"));
        assert_eq!(ranges.lowest_free(&taken), Some(range("10.128.1.0/24")));
        assert!(!ranges.has(range("10.128.4.0/24")) && !ranges.has(range("10.128.0.0/25")));
        let one = Ranges::new("10.96.0.0/16", "10.128.0.0/24", 24).unwrap();
        assert_eq!(one.lowest_free(&BTreeSet::new()), Some(one.pods()));
        let last = Ranges::new("10.96.0.0/16", "192.168.0.0/16", 28).unwrap();
        assert_eq!(last.pods.parts(28).last(), Some(range("192.168.255.240/28")));
    }
}
