//! When each node of a cluster renews, so that not all of them do so at once.
//!
//! Nodes that joined within an hour have certificates that end within an hour, and a replacement of the authority is a
//! reason for all of them at the same moment. Each renewal is a write to the cluster's etcd, and the leader makes them one
//! at a time. So a node's place in a span of time follows from its id, which is the beginning of a random key: nodes are
//! spread evenly, each has the same place at each renewal, and nobody has to assign it.

use std::time::Duration;

use model::time::between;

use crate::certificate::Validity;
use crate::node_id::NodeId;

/// Renewals by time are spread over this part of the lifetime: two and a half days of thirty.
const LIFETIME_PARTS: u32 = 12;

/// How much earlier than at its renewal point a node renews this certificate, at most a twelfth of its lifetime.
#[must_use]
pub fn renewal_advance(node: NodeId, validity: Validity) -> Duration {
    place_of(node, between(validity.not_before, validity.not_after) / LIFETIME_PARTS)
}

/// The place of a node in a span of time: from zero to less than the span.
#[must_use]
pub fn place_of(node: NodeId, span: Duration) -> Duration {
    let place = (span.as_millis() * u128::from(node.evenly_spread())) >> u32::BITS;
    Duration::from_millis(u64::try_from(place).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_id::PublicKey;
    use crate::testing::{at, validity};

    /// A node with an id that begins with these bytes.
    fn node(begin: [u8; 4]) -> NodeId {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&begin);
        NodeId::from_key(&PublicKey(key))
    }

    #[test]
    fn place_of_a_node_follows_from_its_id_and_the_span() {
        let day = Duration::from_hours(24);
        for (begin, span, place) in [
            ([0, 0, 0, 0], day, Duration::ZERO),
            ([0x40, 0, 0, 0], day, Duration::from_hours(6)),
            ([0x80, 0, 0, 0], day, Duration::from_hours(12)),
            ([0x80, 0, 0, 0], Duration::from_mins(1), Duration::from_secs(30)),
            ([0xff; 4], day, Duration::from_millis(24 * 3_600_000 - 1)),
            ([0xff; 4], Duration::ZERO, Duration::ZERO),
        ] {
            assert_eq!(place_of(node(begin), span), place, "{begin:x?} in {span:?}");
        }
    }

    #[test]
    fn renewals_of_many_nodes_are_spread_over_a_twelfth_of_the_lifetime() {
        let month = Validity { not_before: at(0), not_after: at(30 * 24 * 3600) };
        let mut per_hour = [0; 60];
        for number in 0..6000_u32 {
            // The ids of a fleet are random. These are a permutation of what is even.
            let advance = renewal_advance(node(number.wrapping_mul(0x9e37_79b1).to_be_bytes()), month);
            per_hour[usize::try_from(advance.as_secs() / 3600).unwrap()] += 1;
        }
        assert!(per_hour.iter().all(|count| (90..=110).contains(count)), "{per_hour:?}");
        // A shorter lifetime has a shorter span.
        let half = [0x80, 0, 0, 0];
        assert_eq!(renewal_advance(node(half), month), Duration::from_hours(30));
        assert_eq!(renewal_advance(node(half), validity()), Duration::from_millis(41_666));
    }
}
