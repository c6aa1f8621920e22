//! Addresses at which curators of a cluster have proved themselves.
//!
//! A leader reports the directory of curators. Somebody with the stolen key of one could report dead addresses until the
//! honest ones are forgotten, and so keep its clients from the statement that revokes it. An address is proved here if a
//! server has shown a curator's certificate there that the newest statement permits. No unproved address takes its place.
//!
//! The holder of one key can prove as many addresses as it likes with it, and it can forward connections to an honest
//! curator. So each node has few places, and a proved address is displaced only if no server has answered there with the
//! certificate of the node in many rounds of requests. A server that shows another node's certificate at a proved address
//! takes the place over only if that node has room for it. If not, the address stays with its node. Somebody on the way to
//! an honest curator could otherwise have it forgotten by one answer with a stolen key.
//!
//! All trackers that follow the statements of one cluster share this, because a later tracker of the same program may
//! know no more than what a false leader has reported.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;

use crate::node_id::NodeId;

/// Most addresses in all.
const MAX_ADDRESSES: usize = 32;
/// Most addresses of one node: the present one, and the one before.
const MAX_PER_NODE: usize = 2;
/// After how many rounds without an answer an address may be displaced.
const MAX_MISSED_ROUNDS: u32 = 10;

/// Nodes by the addresses at which they have proved to be curators, `host:port` each.
pub type ProvedAddresses = BTreeMap<String, NodeId>;

/// The shared list of proved addresses.
#[derive(Clone)]
pub struct ProvedCurators(Arc<watch::Sender<ProvedPlaces>>);

impl Default for ProvedCurators {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(ProvedPlaces::default())))
    }
}

impl ProvedCurators {
    /// The proved addresses, and their nodes.
    #[must_use]
    pub fn addresses(&self) -> ProvedAddresses {
        self.0.borrow().addresses()
    }

    /// Remembers addresses that were stored by a program of before.
    pub fn restore(&self, stored: ProvedAddresses) {
        self.update(|places| places.record_answers(stored));
    }

    /// Waits until other addresses are proved than these, and returns them.
    pub async fn wait_for_change(&self, known: &ProvedAddresses) -> ProvedAddresses {
        let mut watched = self.0.subscribe();
        let changed = watched.wait_for(|places| places.addresses() != *known).await;
        let changed = changed.map(|places| places.addresses());
        match changed {
            Ok(addresses) => addresses,
            // This has the sender, so that is not possible.
            Err(_) => std::future::pending().await,
        }
    }

    /// Remembers an address as far as there is a place for it.
    pub(super) fn record_answer(&self, address: &str, node: NodeId) {
        self.update(|places| places.record_answers([(address.to_owned(), node)].into()));
    }

    /// Remembers who answered when all of `requested` were requested at once.
    pub(super) fn record_round(&self, requested: &BTreeSet<String>, answers: ProvedAddresses) {
        self.update(|places| places.record_round(requested, answers));
    }

    fn update(&self, change: impl FnOnce(&mut ProvedPlaces)) {
        self.0.send_if_modified(|places| {
            let before = places.addresses();
            change(places);
            before != places.addresses()
        });
    }
}

impl fmt::Debug for ProvedCurators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProvedCurators").field(&self.addresses()).finish()
    }
}

/// An address at which a node has proved to be a curator.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProvedPlace {
    address: String,
    node: NodeId,
    /// Number of rounds since it has answered.
    missed_rounds: u32,
}

/// The proved addresses, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ProvedPlaces(Vec<ProvedPlace>);

impl ProvedPlaces {
    fn addresses(&self) -> ProvedAddresses {
        self.0.iter().map(|place| (place.address.clone(), place.node)).collect()
    }

    /// Records answers outside a round. They displace nothing: an honest curator may answer a moment later.
    fn record_answers(&mut self, answers: ProvedAddresses) {
        // What has no place is found again by a round.
        drop(self.refresh(answers));
    }

    fn record_round(&mut self, requested: &BTreeSet<String>, answers: ProvedAddresses) {
        for place in self.0.iter_mut().filter(|place| requested.contains(&place.address)) {
            place.missed_rounds = place.missed_rounds.saturating_add(1);
        }
        // All answers count before anything is displaced.
        for (address, node) in self.refresh(answers) {
            if !self.record(&address, node)
                && let Some(displaced) = self.find_displaced(node)
            {
                self.0.remove(displaced);
                self.record(&address, node);
            }
        }
    }

    /// Records answers as far as there is room, and returns the others.
    fn refresh(&mut self, answers: ProvedAddresses) -> ProvedAddresses {
        answers.into_iter().filter(|(address, node)| !self.record(address, *node)).collect()
    }

    /// Records that this node has answered at this address, and returns whether there was room. If not, a known address
    /// stays with its node, as if nobody had answered: the curator that is honest may have proved itself there since.
    fn record(&mut self, address: &str, node: NodeId) -> bool {
        let (has_room, is_full) = (self.count_of(node) < MAX_PER_NODE, self.0.len() >= MAX_ADDRESSES);
        match self.0.iter_mut().find(|place| place.address == address) {
            Some(place) if place.node == node || has_room => {
                (place.node, place.missed_rounds) = (node, 0);
                true
            }
            None if has_room && !is_full => {
                self.0.push(ProvedPlace { address: address.to_owned(), node, missed_rounds: 0 });
                true
            }
            _ => false,
        }
    }

    fn count_of(&self, node: NodeId) -> usize {
        self.0.iter().filter(|place| place.node == node).count()
    }

    /// The place that a new address of this node takes: the one that has not answered for longest, if that is long
    /// enough. A node that has all its places displaces none of another node.
    fn find_displaced(&self, node: NodeId) -> Option<usize> {
        let is_full = self.count_of(node) >= MAX_PER_NODE;
        let places = self.0.iter().enumerate();
        places
            .filter(|(_, place)| !is_full || place.node == node)
            .filter(|(_, place)| place.missed_rounds >= MAX_MISSED_ROUNDS)
            .max_by_key(|(_, place)| place.missed_rounds)
            .map(|(position, _)| position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::node_id;

    fn answers(of: &[(&str, u8)]) -> ProvedAddresses {
        of.iter().map(|(address, node)| ((*address).to_owned(), node_id(*node))).collect()
    }

    /// A round in which all known addresses are requested, and those of the answers.
    fn round(places: &mut ProvedPlaces, of: &[(&str, u8)]) {
        let answers = answers(of);
        let requested = places.addresses().into_keys().chain(answers.keys().cloned()).collect();
        places.record_round(&requested, answers);
    }

    #[test]
    fn one_key_displaces_no_curator_however_many_addresses_it_proves() {
        let honest = [("a:1", 1), ("b:1", 2)];
        let mut places = ProvedPlaces::default();
        round(&mut places, &honest);
        // Its own servers, and others that forward connections to an honest curator.
        for number in 0..200 {
            let (own, forwarded) = (format!("false:{number}"), format!("forwarded:{number}"));
            let all = [honest[0], honest[1], (own.as_str(), 9), (forwarded.as_str(), 1)];
            round(&mut places, &all);
            places.record_answers(answers(&all));
        }
        // One of them does not answer here for a while.
        for number in 1..MAX_MISSED_ROUNDS {
            let (own, forwarded) = (format!("false:b{number}"), format!("forwarded:b{number}"));
            round(&mut places, &[honest[1], (own.as_str(), 9), (forwarded.as_str(), 1)]);
        }
        let known = places.addresses();
        let has_honest = honest.iter().all(|(address, _)| known.contains_key(*address));
        assert!(has_honest, "an honest curator is forgotten: {known:?}");
        assert_eq!(known.len(), 5, "two of the first node, and two of the thief's: {known:?}");

        // A server that forwarded to an honest curator shows the thief's certificate from now on.
        let forwarded = known.keys().find(|address| address.starts_with("forwarded:")).unwrap();
        let flipped = [honest[0], honest[1], (forwarded.as_str(), 9)];
        for in_round in [true, false] {
            let mut places = places.clone();
            if in_round {
                round(&mut places, &flipped);
            } else {
                places.record_answers(answers(&flipped));
            }
            let known = places.addresses();
            let has_honest = honest.iter().all(|(address, _)| known.contains_key(*address));
            assert!(has_honest, "an honest curator is forgotten: {known:?}");
            assert_eq!(places.count_of(node_id(9)), MAX_PER_NODE, "one key has more places: {known:?}");
        }
    }

    #[test]
    fn address_of_before_is_displaced_once_it_has_not_answered_for_long() {
        let mut places = ProvedPlaces::default();
        for address in ["a:1", "a:2"] {
            round(&mut places, &[(address, 1)]);
        }
        for missed in 2..=MAX_MISSED_ROUNDS {
            round(&mut places, &[("a:2", 1), ("a:3", 1)]);
            let is_displaced = !places.addresses().contains_key("a:1");
            assert_eq!(is_displaced, missed == MAX_MISSED_ROUNDS, "{missed}");
        }
        assert_eq!(places.addresses(), answers(&[("a:2", 1), ("a:3", 1)]));
        // What is not requested misses nothing.
        for _ in 0..20 {
            places.record_round(&["a:2".to_owned()].into(), answers(&[("a:2", 1), ("a:4", 1)]));
        }
        assert_eq!(places.addresses(), answers(&[("a:2", 1), ("a:3", 1)]));
    }

    #[test]
    fn node_at_the_address_of_another_one_takes_its_place() {
        let mut places = ProvedPlaces::default();
        round(&mut places, &[("a:1", 1)]);
        round(&mut places, &[("a:1", 2)]);
        assert_eq!(places.addresses(), answers(&[("a:1", 2)]));
    }

    /// A round takes seconds. The thief answers at the address of an honest curator, which proves itself there meanwhile.
    #[test]
    fn answer_with_a_stolen_key_forgets_no_address_also_if_it_was_proved_meanwhile() {
        let thief = [("false:1", 9), ("false:2", 9)];
        let flipped = [thief[0], thief[1], ("a:1", 9)];
        for in_round in [true, false] {
            let mut places = ProvedPlaces::default();
            round(&mut places, &thief);
            places.record_answers(answers(&[("a:1", 1)]));
            if in_round {
                round(&mut places, &flipped);
            } else {
                places.record_answers(answers(&flipped));
            }
            let known = places.addresses();
            assert_eq!(known.get("a:1"), Some(&node_id(1)), "an honest curator is forgotten: {known:?}");
        }
    }

    #[test]
    fn node_at_the_address_of_another_one_displaces_its_own_former_address() {
        let mut places = ProvedPlaces::default();
        round(&mut places, &[("a:1", 1), ("b:1", 2), ("b:2", 2)]);
        for missed in 1..=MAX_MISSED_ROUNDS {
            round(&mut places, &[("a:1", 2), ("b:2", 2)]);
            let node = if missed == MAX_MISSED_ROUNDS { 2 } else { 1 };
            assert_eq!(places.addresses().get("a:1"), Some(&node_id(node)), "{missed}");
        }
        assert_eq!(places.addresses(), answers(&[("a:1", 2), ("b:2", 2)]));
    }

    #[test]
    fn addresses_in_all_are_bounded_and_the_longest_silent_one_makes_room() {
        let mut places = ProvedPlaces::default();
        let (name, most) = (|number: usize| format!("a:{number}"), MAX_ADDRESSES);
        let nodes = |numbers: std::ops::Range<usize>| -> ProvedAddresses {
            numbers.map(|number| (name(number), node_id(u8::try_from(number).unwrap()))).collect()
        };
        places.record_answers(nodes(0..most + 5));
        assert_eq!(places.addresses().len(), most);
        let silent: BTreeSet<String> = places.addresses().into_keys().take(1).collect();
        for _ in 0..MAX_MISSED_ROUNDS {
            places.record_round(&silent, ProvedAddresses::default());
        }
        places.record_answers(nodes(100..101));
        assert!(!places.addresses().contains_key(&name(100)), "it displaces something outside a round");
        places.record_round(&BTreeSet::new(), nodes(100..102));
        let known = places.addresses();
        assert!(known.contains_key(&name(100)) && !known.contains_key(&name(101)), "{known:?}");
        assert!(silent.iter().all(|address| !known.contains_key(address)), "{known:?}");
    }

    #[tokio::test]
    async fn change_of_the_addresses_is_published_and_an_answer_alone_is_not() {
        let proved = ProvedCurators::default();
        proved.restore(answers(&[("a:1", 1)]));
        let known = proved.wait_for_change(&ProvedAddresses::default()).await;
        assert_eq!(known, answers(&[("a:1", 1)]));
        let watched = proved.0.subscribe();
        proved.record_answer("a:1", node_id(1));
        assert!(!watched.has_changed().unwrap());
        proved.record_answer("b:1", node_id(2));
        assert_eq!(proved.wait_for_change(&known).await, answers(&[("a:1", 1), ("b:1", 2)]));
    }
}
