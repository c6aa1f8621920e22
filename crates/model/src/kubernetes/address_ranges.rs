//! IPv4 ranges of services and pods, and the part of each node.
//!
//! There are two ranges without a common address: one for services of the whole cluster, and one for pods, of which
//! every worker has a part to itself. All parts have the same size, so any free one is as good as any other, and the
//! lowest is taken. Both ranges are IPv4: an IPv6 range beside them would double everything that follows from them, and
//! nothing here is tested with one.
//!
//! Two addresses of the service range are assigned from the beginning. The first belongs to the API servers (Kubernetes
//! gives it to the service `kubernetes`). The tenth belongs to DNS (by convention of everything that installs
//! Kubernetes).
//!
//! Two limits are Kubernetes' own: an API server rejects a service range with more than 20 bits, and the controller
//! manager rejects more than 16 bits between the pod range and the part of one node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Prefix length of the largest service range.
const MIN_SERVICE_PREFIX: u8 = 12;
/// Prefix length of the smallest service range: it still has a tenth address.
const MAX_SERVICE_PREFIX: u8 = 28;
/// Prefix length of the smallest part of a node: 14 pods.
const MAX_NODE_PREFIX: u8 = 28;
/// How many bits longer the prefix of a node's part may be than that of the pod range.
const MAX_NODE_BITS: u8 = 16;
/// Offset of the DNS address in the service range.
const DNS_OFFSET: u32 = 10;

/// Ranges with a special meaning for every host.
const RESERVED_RANGES: [(Ipv4Range, &str); 4] = [
    (Ipv4Range { network: 0, prefix: 8 }, "addresses of no host"),
    (Ipv4Range { network: 0x7f00_0000, prefix: 8 }, "each host's own addresses"),
    (Ipv4Range { network: 0xa9fe_0000, prefix: 16 }, "addresses of one link"),
    (Ipv4Range { network: 0xe000_0000, prefix: 3 }, "addresses of groups, or reserved"),
];

/// A range of IPv4 addresses with a common prefix: `10.96.0.0/16`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ipv4Range {
    network: u32,
    prefix: u8,
}

/// Error for a text that is not a range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The text is an IPv6 range.
    #[error("{0:?} is an IPv6 range; the Kubernetes of a cluster supports only IPv4")]
    Ipv6(String),
    /// The text is no range at all.
    #[error("{0:?} is not a range of addresses: write it as 10.96.0.0/16")]
    Malformed(String),
    /// The address has bits set after the prefix.
    #[error("{text} begins in the middle of a range; the range with this address is {suggestion}")]
    HostBits {
        /// The rejected text, shortened.
        text: String,
        /// The range with the same prefix that contains this address.
        suggestion: Ipv4Range,
    },
}

impl Ipv4Range {
    /// The range with this prefix that contains the address; `None` if `prefix` exceeds 32.
    #[must_use]
    pub fn containing(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        let mask = prefix_mask(prefix)?;
        Some(Self { network: u32::from(address) & mask, prefix })
    }

    /// Length of the prefix in bits.
    #[must_use]
    pub const fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether the address is in the range.
    #[must_use]
    pub fn contains(self, address: Ipv4Addr) -> bool {
        Self::containing(address, self.prefix) == Some(self)
    }

    /// Whether both ranges have an address in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        let (wide, narrow) = if self.prefix <= other.prefix { (self, other) } else { (other, self) };
        wide.contains(Ipv4Addr::from(narrow.network))
    }

    /// The parts with this prefix, in order; none if `prefix` is shorter than the range's own.
    fn subranges(self, prefix: u8) -> impl Iterator<Item = Self> {
        let bits = prefix.checked_sub(self.prefix).filter(|_| prefix <= 32);
        let count = bits.map_or(0, |bits| 1_u64 << bits);
        (0..count).filter_map(move |number| {
            let offset = number.checked_shl(u32::from(32 - prefix))?;
            let network = u64::from(self.network) + offset;
            Some(Self { network: u32::try_from(network).ok()?, prefix })
        })
    }
}

impl fmt::Display for Ipv4Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.network), self.prefix)
    }
}

impl fmt::Debug for Ipv4Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Ipv4Range {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        let shown = || text.chars().take(100).collect::<String>();
        let malformed = || RangeError::Malformed(shown());
        let (address, prefix) = text.split_once('/').ok_or_else(malformed)?;
        if address.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(RangeError::Ipv6(shown()));
        }
        let address: Ipv4Addr = address.parse().map_err(|_| malformed())?;
        let prefix: u8 = prefix.parse().map_err(|_| malformed())?;
        let range = Self::containing(address, prefix).ok_or_else(malformed)?;
        if text != format!("{address}/{prefix}") {
            return Err(malformed());
        }
        if u32::from(address) != range.network {
            return Err(RangeError::HostBits { text: shown(), suggestion: range });
        }
        Ok(range)
    }
}

/// The ranges of a cluster, validated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterRanges {
    services: Ipv4Range,
    pods: Ipv4Range,
    node_prefix: u8,
}

impl ClusterRanges {
    /// Parses and validates ranges; the error lists all problems, one sentence each.
    pub fn new(services: &str, pods: &str, node_prefix: u32) -> Result<Self, Vec<String>> {
        let mut faults = Vec::new();
        let mut read = |field: &str, text: &str| match text.parse::<Ipv4Range>() {
            Ok(range) => {
                for (taken, what) in RESERVED_RANGES {
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
            && !(MIN_SERVICE_PREFIX..=MAX_SERVICE_PREFIX).contains(&services.prefix)
        {
            faults.push(format!(
                "service_range: {services} is not a range for services: its prefix has {MIN_SERVICE_PREFIX} to \
                 {MAX_SERVICE_PREFIX} bits"
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
            let longest = MAX_NODE_PREFIX.min(pods.prefix.saturating_add(MAX_NODE_BITS));
            if pods.prefix > MAX_NODE_PREFIX {
                faults.push(format!(
                    "pod_range: {pods} is too small: its prefix has {MAX_NODE_PREFIX} bits at the most"
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

    /// The range of service addresses.
    #[must_use]
    pub const fn services(&self) -> Ipv4Range {
        self.services
    }

    /// The range that is divided among nodes for their pods.
    #[must_use]
    pub const fn pods(&self) -> Ipv4Range {
        self.pods
    }

    /// Address at which programs in the cluster reach its API servers.
    #[must_use]
    pub const fn api_server_address(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.services.network + 1)
    }

    /// Address of the cluster's DNS service.
    #[must_use]
    pub const fn dns_address(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.services.network + DNS_OFFSET)
    }

    /// How many nodes can have a part of the pod range.
    #[must_use]
    pub const fn max_nodes(&self) -> u32 {
        1 << (self.node_prefix - self.pods.prefix)
    }

    /// Whether a node can have this part.
    #[must_use]
    pub fn is_node_range(&self, part: Ipv4Range) -> bool {
        part.prefix == self.node_prefix && self.pods.overlaps(part)
    }

    /// The lowest part that is not taken; `None` if all are.
    #[must_use]
    pub fn lowest_free_node_range(&self, taken: &BTreeSet<Ipv4Range>) -> Option<Ipv4Range> {
        self.pods.subranges(self.node_prefix).find(|part| !taken.contains(part))
    }
}

/// The mask of a prefix; `None` if it exceeds 32 bits.
const fn prefix_mask(prefix: u8) -> Option<u32> {
    match prefix {
        0 => Some(0),
        1..=32 => Some(u32::MAX << (32 - prefix)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(text: &str) -> Ipv4Range {
        text.parse().unwrap()
    }

    #[test]
    fn range_text_is_canonical() {
        for text in ["10.96.0.0/16", "10.128.0.0/12", "0.0.0.0/0", "10.0.0.7/32", "128.0.0.0/1"] {
            assert_eq!(range(text).to_string(), text);
        }
        for (text, message) in [
            ("", "not a range"),
            ("10.96.0.0", "not a range"),
            ("10.96.0.0/", "not a range"),
            ("10.96.0.0/33", "not a range"),
            ("10.96.0.0/+16", "not a range"),
            ("10.96.0.0/016", "not a range"),
            ("10.96.0/16", "not a range"),
            ("10.96.0.00/16", "not a range"),
            (" 10.96.0.0/16", "not a range"),
            ("fd00::/64", "only IPv4"),
            ("10.96.1.0/16", "is 10.96.0.0/16"),
            ("10.140.0.0/12", "is 10.128.0.0/12"),
        ] {
            let error = text.parse::<Ipv4Range>().unwrap_err().to_string();
            assert!(error.contains(message), "{text:?}: {error}");
        }
    }

    #[test]
    fn ranges_overlap_when_one_contains_the_other() {
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
    fn all_faults_are_reported_at_once() {
        for (services, pods, node_prefix, messages) in [
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
            let faults = ClusterRanges::new(services, pods, node_prefix).err().unwrap_or_default();
            assert_eq!(faults.is_empty(), messages.is_empty(), "{services} {pods} {node_prefix}: {faults:?}");
            let text = faults.join("\n");
            for message in messages {
                assert!(text.contains(message), "{services} {pods} {node_prefix}: {text}");
            }
        }
    }

    #[test]
    fn api_server_and_dns_have_fixed_service_addresses() {
        for (services, first, tenth) in
            [("10.96.0.0/16", "10.96.0.1", "10.96.0.10"), ("10.96.0.240/28", "10.96.0.241", "10.96.0.250")]
        {
            let ranges = ClusterRanges::new(services, "10.128.0.0/12", 24).unwrap();
            assert_eq!(
                (ranges.api_server_address().to_string(), ranges.dns_address().to_string()),
                (first.to_owned(), tenth.to_owned())
            );
            assert!(ranges.services().contains(ranges.dns_address()));
        }
    }

    #[test]
    fn lowest_free_node_range_until_exhausted() {
        let ranges = ClusterRanges::new("10.96.0.0/16", "10.128.0.0/22", 24).unwrap();
        assert_eq!(ranges.max_nodes(), 4);
        let mut taken = BTreeSet::new();
        for expected in ["10.128.0.0/24", "10.128.1.0/24", "10.128.2.0/24", "10.128.3.0/24"] {
            let part = ranges.lowest_free_node_range(&taken).unwrap();
            assert_eq!(part.to_string(), expected);
            assert!(ranges.is_node_range(part));
            taken.insert(part);
        }
        assert_eq!(ranges.lowest_free_node_range(&taken), None);
        taken.remove(&range("10.128.1.0/24"));
        assert_eq!(ranges.lowest_free_node_range(&taken), Some(range("10.128.1.0/24")));
        assert!(
            !ranges.is_node_range(range("10.128.4.0/24")) && !ranges.is_node_range(range("10.128.0.0/25"))
        );
        let one = ClusterRanges::new("10.96.0.0/16", "10.128.0.0/24", 24).unwrap();
        assert_eq!(one.lowest_free_node_range(&BTreeSet::new()), Some(one.pods()));
        let last = ClusterRanges::new("10.96.0.0/16", "192.168.0.0/16", 28).unwrap();
        assert_eq!(last.pods.subranges(28).last(), Some(range("192.168.255.240/28")));
    }
}
