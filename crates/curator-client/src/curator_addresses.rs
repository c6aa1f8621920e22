//! Addresses of a cluster's curators: which one is queried next, and where the leader listens.
//!
//! The curator on this node is known under a local address, which does not change with the node's address.
//!
//! The directory is what a leader reports. A false leader could report one without the other curators, and so keep its
//! clients from the statement that revokes it. Therefore curators that were in the directory before are not forgotten:
//! the last ones that left it, and those that have proved themselves ([`proved_curators`](crate::proved_curators)).
//! However many addresses a false leader reports, they displace none that is proved.
//!
//! Many of the former ones are gone for good, and a connection to such a one takes seconds to fail. So they are queried
//! for the leader one by one, and only if no other curator names it for a while. Statements are requested from all of
//! them at once.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use proto::curator::v1 as wire;

use crate::node_id::NodeId;
use crate::proved_curators::ProvedAddresses;

/// How many curators of the directory are known. No cluster has so many consensus members, and a false leader could
/// report so many dead addresses that a round through them never ends.
pub(super) const MAX_LISTED: usize = 16;
/// How many former curators are remembered beside the proved ones: those that left the directory last.
const MAX_FORMER: usize = 16;
/// After how many rounds without a leader former curators are queried, too.
const ROUNDS_WITHOUT_FORMER: u32 = 10;
/// After how much time without a leader they are queried even if there were fewer rounds, because each of them was slow.
const TIME_WITHOUT_FORMER: Duration = Duration::from_secs(30);

/// The curators that a tracker knows.
#[derive(Debug, Default)]
pub(super) struct CuratorAddresses {
    /// `host:port` of the curators in the cluster's directory.
    directory: BTreeSet<String>,
    /// `host:port` of curators that left the directory, in this order. None of them is in it.
    former: Vec<String>,
    /// The curator on this node, if one runs: node id and `host:port`.
    pub(super) local: Option<(NodeId, String)>,
}

impl CuratorAddresses {
    /// `host:port` of the curators in the cluster's directory.
    pub(super) const fn directory(&self) -> &BTreeSet<String> {
        &self.directory
    }

    /// `host:port` of the curators that left the directory last, and are not in it again.
    pub(super) fn former(&self) -> BTreeSet<String> {
        self.former.iter().cloned().collect()
    }

    pub(super) fn replace_directory(&mut self, directory: BTreeSet<String>) {
        let directory = directory.into_iter().take(MAX_LISTED).collect();
        let before = std::mem::replace(&mut self.directory, directory);
        self.former.retain(|address| !self.directory.contains(address));
        self.former.extend(before.into_iter().filter(|address| !self.directory.contains(address)));
        let excess = self.former.len().saturating_sub(MAX_FORMER);
        self.former.drain(..excess);
    }

    /// The curators to query, in order: the local one first, then the others, beginning after the one that was queried
    /// last.
    pub(super) fn candidates(&self, last: Option<&str>) -> Vec<String> {
        let others: Vec<&String> = self.directory.iter().collect();
        let behind = others.partition_point(|address| last.is_some_and(|last| address.as_str() <= last));
        let local = self.local.iter().map(|(_, address)| address.clone());
        local
            .chain(others[behind..].iter().chain(&others[..behind]).map(|address| (*address).clone()))
            .collect()
    }

    /// The former curator to query after the others, in the round after so many ones without a leader, which took this
    /// time. Those that have proved themselves come first.
    pub(super) fn former_candidate(
        &self,
        failures: u32,
        time: Duration,
        proved: &ProvedAddresses,
    ) -> Option<String> {
        let waits_for = if time < TIME_WITHOUT_FORMER { ROUNDS_WITHOUT_FORMER } else { 0 };
        let round = usize::try_from(failures.checked_sub(waits_for)?).ok()?;
        let unlisted = proved.keys().filter(|address| !self.directory.contains(*address));
        let others = self.former.iter().filter(|address| !proved.contains_key(*address));
        let former: Vec<&String> = unlisted.chain(others).collect();
        former.get(round.checked_rem(former.len())?).map(|address| (*address).clone())
    }

    /// The curators to request statements from, beside the followed one: all that are in the directory, have left it
    /// last, or have proved themselves.
    pub(super) fn others(&self, followed: Option<&str>, proved: &ProvedAddresses) -> BTreeSet<String> {
        let known = self.directory.iter().chain(&self.former).chain(proved.keys());
        known.filter(|address| followed != Some(address.as_str())).cloned().collect()
    }

    /// `host:port` of the leader, by the response of a curator. The last argument is that curator's own address.
    pub(super) fn leader_address(
        &self,
        leader: NodeId,
        response: &wire::WatchLeaderResponse,
        query: &str,
    ) -> Option<String> {
        if let Some((_, local)) = self.local.as_ref().filter(|(own, _)| *own == leader) {
            return Some(local.clone());
        }
        if response.leader_address.is_empty() {
            // It names itself and does not know its address as others see it: use the one at which it was reached.
            return (response.responding_node_id == response.leader_node_id).then(|| query.to_owned());
        }
        let port = u16::try_from(response.leader_port).ok().filter(|port| *port > 0)?;
        let address: IpAddr = response.leader_address.parse().ok()?;
        Some(SocketAddr::new(address, port).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::node_id;

    fn curator_addresses(directory: &[&str], local: Option<u8>) -> CuratorAddresses {
        CuratorAddresses {
            directory: directory.iter().map(|address| (*address).to_owned()).collect(),
            local: local.map(|number| (node_id(number), "127.0.0.1:7835".to_owned())),
            ..CuratorAddresses::default()
        }
    }

    #[test]
    fn local_curator_is_tried_first_then_the_others_round_robin() {
        let directory = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
        assert_eq!(curator_addresses(&directory, None).candidates(None), directory);
        let turned = ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1"];
        assert_eq!(curator_addresses(&directory, None).candidates(Some("10.0.0.2:1")), turned);
        assert_eq!(curator_addresses(&directory, None).candidates(Some("10.0.0.3:1")), directory);
        let mut with_local = vec!["127.0.0.1:7835"];
        with_local.extend(turned);
        assert_eq!(curator_addresses(&directory, Some(1)).candidates(Some("10.0.0.2:1")), with_local);
        assert_eq!(curator_addresses(&[], None).candidates(None), Vec::<String>::new());
    }

    fn set(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    fn proved(addresses: &[&str]) -> ProvedAddresses {
        addresses.iter().map(|address| ((*address).to_owned(), node_id(1))).collect()
    }

    #[test]
    fn statements_are_requested_from_every_other_curator_at_once() {
        let mut addresses = curator_addresses(&["a:1", "b:1", "c:1"], Some(1));
        let none = ProvedAddresses::new();
        assert_eq!(addresses.others(Some("b:1"), &none), set(&["a:1", "c:1"]));
        addresses.replace_directory(set(&["b:1", "d:1"]));
        assert_eq!(addresses.others(Some("b:1"), &none), set(&["a:1", "c:1", "d:1"]));
        assert_eq!(addresses.others(None, &none), set(&["a:1", "b:1", "c:1", "d:1"]));
        assert_eq!(
            addresses.others(Some("b:1"), &proved(&["b:1", "x:1"])),
            set(&["a:1", "c:1", "d:1", "x:1"])
        );
        assert_eq!(curator_addresses(&["b:1"], None).others(Some("b:1"), &none), set(&[]));
        assert_eq!(curator_addresses(&["b:1"], None).former_candidate(99, TIME_WITHOUT_FORMER, &none), None);
    }

    #[test]
    fn curators_that_a_false_leader_leaves_out_are_not_forgotten() {
        let mut addresses = curator_addresses(&["a:1", "b:1", "c:1"], None);
        addresses.replace_directory(set(&["b:1"]));
        assert_eq!(addresses.candidates(None), ["b:1"]);
        let (soon, late) = (Duration::from_secs(29), TIME_WITHOUT_FORMER);
        for (failures, time, queried) in [
            (1, soon, None),
            (9, soon, None),
            (10, soon, Some("a:1")),
            (11, soon, Some("c:1")),
            (12, late, Some("a:1")),
            // Each round took long: the addresses of the directory do not answer.
            (1, late, Some("c:1")),
            (2, late, Some("a:1")),
        ] {
            let candidate = addresses.former_candidate(failures, time, &ProvedAddresses::new());
            assert_eq!(candidate.as_deref(), queried, "{failures} {time:?}");
        }
        let proved = proved(&["b:1", "c:1", "x:1"]);
        for (failures, queried) in [(10, "c:1"), (11, "x:1"), (12, "a:1"), (13, "c:1")] {
            let candidate = addresses.former_candidate(failures, soon, &proved);
            assert_eq!(candidate.as_deref(), Some(queried), "{failures}: the proved ones come first");
        }
    }

    /// What a stolen curator reports while it leads, one list after the other.
    fn reports_of_a_thief(honest: &[&str]) -> Vec<BTreeSet<String>> {
        let dead = |batch: usize| (0..13).map(move |number| format!("dead:{batch}{number:02}"));
        let with_honest =
            |batch| -> BTreeSet<String> { set(honest).into_iter().chain(dead(batch)).collect() };
        let mut reports: Vec<BTreeSet<String>> = (0..3).map(with_honest).collect();
        reports.push(set(&["false:1"]));
        reports.extend((3..20).map(|batch| dead(batch).collect()));
        reports
    }

    /// The dead addresses fill every place before the honest curators leave the directory.
    #[test]
    fn dead_addresses_displace_no_curator_that_has_proved_itself() {
        let honest = ["a:1", "b:1", "c:1"];
        let mut addresses = curator_addresses(&honest, None);
        let proved = proved(&honest);
        for report in reports_of_a_thief(&honest) {
            addresses.replace_directory(report);
            let others = addresses.others(Some("false:1"), &proved);
            assert!(set(&honest).is_subset(&others), "an honest curator is forgotten: {others:?}");
            assert!(others.len() <= MAX_LISTED + MAX_FORMER + honest.len(), "{}", others.len());
            assert!(addresses.former().len() <= MAX_FORMER);
        }
        let candidate = addresses.former_candidate(10, Duration::ZERO, &proved);
        assert_eq!(candidate.as_deref(), Some("a:1"));
    }

    #[test]
    fn newest_former_curators_are_remembered_without_a_proof() {
        let honest = ["a:1", "b:1", "c:1"];
        let mut addresses = curator_addresses(&honest, None);
        for report in reports_of_a_thief(&honest).into_iter().take(4) {
            addresses.replace_directory(report);
        }
        assert!(set(&honest).is_subset(&addresses.former()), "{:?}", addresses.former());
        // A curator that moves often is remembered where it was last.
        for number in 0..100 {
            addresses.replace_directory(set(&[&format!("moved:{number}")]));
        }
        assert!(addresses.former().contains("moved:98") && !addresses.former().contains("a:1"));
    }

    #[test]
    fn directory_of_a_false_leader_is_bounded() {
        let mut addresses = curator_addresses(&["a:1"], Some(1));
        addresses.replace_directory((0..10_000).map(|number| format!("false:{number}")).collect());
        assert_eq!(addresses.candidates(None).len(), MAX_LISTED + 1, "and the local one");
        let candidate = addresses.former_candidate(1, TIME_WITHOUT_FORMER, &ProvedAddresses::new());
        assert_eq!(candidate.as_deref(), Some("a:1"));
    }

    #[test]
    fn leader_address_is_the_reported_or_the_dialled_one() {
        let response = |leader: u8, address: &str, port, this: u8| wire::WatchLeaderResponse {
            leader_node_id: node_id(leader).to_string(),
            leader_address: address.to_owned(),
            leader_port: port,
            responding_node_id: node_id(this).to_string(),
            epoch: 0,
            statement_number: 0,
        };
        let place = |local, response: wire::WatchLeaderResponse| {
            curator_addresses(&[], local).leader_address(
                response.leader_node_id.parse().unwrap(),
                &response,
                "10.0.0.9:1",
            )
        };
        let at = |address: &str| Some(address.to_owned());
        assert_eq!(place(None, response(1, "10.0.0.1", 7835, 2)), at("10.0.0.1:7835"));
        assert_eq!(place(None, response(1, "fd00::1", 7835, 2)), at("[fd00::1]:7835"));
        assert_eq!(place(Some(1), response(1, "10.0.0.1", 7835, 2)), at("127.0.0.1:7835"), "our own");
        assert_eq!(place(Some(2), response(1, "10.0.0.1", 7835, 2)), at("10.0.0.1:7835"));
        assert_eq!(place(None, response(1, "", 7835, 1)), at("10.0.0.9:1"), "as it was reached");
        assert_eq!(place(None, response(1, "", 7835, 2)), None, "another one does not know where it is");
        assert_eq!(place(None, response(1, "10.0.0.1", 0, 2)), None);
        assert_eq!(place(None, response(1, "a host", 1, 2)), None);
    }
}
