//! Addresses of a cluster's curators: which one is queried next, and where the leader listens.
//!
//! The curator on this node is known under a local address, which does not change with the node's address.
//!
//! The directory is what a leader reports. A false leader could report one without the other curators, and so keep its
//! clients from the statement that revokes it. Therefore curators that were in the directory before are not forgotten.
//! Many of them are gone for good, and a connection to such a one takes seconds to fail. So they are queried one by one,
//! and for the leader only if no other curator names it for a while.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use proto::curator::v1 as wire;

use crate::node_id::NodeId;

/// How many curators of the directory are known. No cluster has so many consensus members, and a false leader could
/// report so many dead addresses that a round through them never ends.
pub(super) const MAX_LISTED: usize = 16;
/// How many former curators are remembered. The first ones are, so that a false leader cannot displace them.
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
    /// `host:port` of curators that were in the directory before. They may be in it again.
    former: BTreeSet<String>,
    /// The curator on this node, if one runs: node id and `host:port`.
    pub(super) local: Option<(NodeId, String)>,
}

/// The curators to request statements from at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NextOthers {
    /// One that is in the directory.
    pub(super) listed: Option<String>,
    /// One that was in the directory before, and is not any more.
    pub(super) former: Option<String>,
}

impl CuratorAddresses {
    /// `host:port` of the curators in the cluster's directory.
    pub(super) const fn directory(&self) -> &BTreeSet<String> {
        &self.directory
    }

    /// `host:port` of curators that were in the directory before, and are not any more.
    pub(super) fn former(&self) -> BTreeSet<String> {
        self.former.difference(&self.directory).cloned().collect()
    }

    pub(super) fn replace_directory(&mut self, directory: BTreeSet<String>) {
        let directory = directory.into_iter().take(MAX_LISTED).collect();
        for address in std::mem::replace(&mut self.directory, directory) {
            if self.former.len() < MAX_FORMER && !self.directory.contains(&address) {
                self.former.insert(address);
            }
        }
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
    /// time.
    pub(super) fn former_candidate(&self, failures: u32, time: Duration) -> Option<String> {
        let waits_for = if time < TIME_WITHOUT_FORMER { ROUNDS_WITHOUT_FORMER } else { 0 };
        let round = usize::try_from(failures.checked_sub(waits_for)?).ok()?;
        let former: Vec<&String> = self.former.difference(&self.directory).collect();
        former.get(round.checked_rem(former.len())?).map(|address| (*address).clone())
    }

    /// The curators to request statements from next, beside `followed`: one of the directory and one former.
    /// Each is the one behind `last` in the round of its kind.
    pub(super) fn next_others(&self, last: &NextOthers, followed: &str) -> NextOthers {
        let next = |all: &BTreeSet<String>, last: Option<&String>| {
            let is_behind = |address: &&String| last.is_none_or(|last| *address > last);
            let mut round = all.iter().filter(is_behind).chain(all);
            round.find(|address| *address != followed).cloned()
        };
        NextOthers {
            listed: next(&self.directory, last.listed.as_ref()),
            former: next(&self.former(), last.former.as_ref()),
        }
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

    fn listed(addresses: &CuratorAddresses, last: Option<&str>) -> Option<String> {
        let last = NextOthers { listed: last.map(ToOwned::to_owned), former: None };
        addresses.next_others(&last, "b:1").listed
    }

    #[test]
    fn each_other_curator_is_next_once_in_a_round() {
        let addresses = curator_addresses(&["a:1", "b:1", "c:1"], Some(1));
        let (mut last, mut round) = (NextOthers::default(), Vec::new());
        for _ in 0..4 {
            last = addresses.next_others(&last, "b:1");
            assert_eq!(last.former, None);
            round.push(last.listed.clone().unwrap());
        }
        assert_eq!(round, ["a:1", "c:1", "a:1", "c:1"]);
        assert_eq!(listed(&addresses, Some("x:1")).as_deref(), Some("a:1"));
        assert_eq!(listed(&curator_addresses(&["b:1"], None), Some("b:1")), None);
        assert_eq!(listed(&curator_addresses(&[], None), None), None);
        assert_eq!(curator_addresses(&["b:1"], None).former_candidate(99, TIME_WITHOUT_FORMER), None);
    }

    #[test]
    fn curators_that_a_false_leader_leaves_out_are_not_forgotten() {
        let directory = |addresses: &[&str]| addresses.iter().map(|address| (*address).to_owned()).collect();
        let mut addresses = curator_addresses(&["a:1", "b:1", "c:1"], None);
        addresses.replace_directory(directory(&["b:1"]));
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
            assert_eq!(addresses.former_candidate(failures, time).as_deref(), queried, "{failures} {time:?}");
        }
        let (mut last, mut round) = (NextOthers::default(), Vec::new());
        for _ in 0..3 {
            last = addresses.next_others(&last, "b:1");
            assert_eq!(last.listed, None);
            round.push(last.former.clone().unwrap());
        }
        assert_eq!(round, ["a:1", "c:1", "a:1"]);

        // However many it reports, and even if it reports the others again meanwhile.
        for number in 0..100 {
            addresses.replace_directory([format!("false:{number}")].into());
            addresses.replace_directory(directory(&["a:1", "c:1"]));
        }
        addresses.replace_directory(directory(&["b:1"]));
        assert_eq!(addresses.former.len(), MAX_FORMER);
        assert_eq!(addresses.former_candidate(11, soon).as_deref(), Some("c:1"));
        assert_eq!(addresses.next_others(&NextOthers::default(), "b:1").former.as_deref(), Some("a:1"));
    }

    #[test]
    fn directory_of_a_false_leader_is_bounded() {
        let mut addresses = curator_addresses(&["a:1"], Some(1));
        addresses.replace_directory((0..10_000).map(|number| format!("false:{number}")).collect());
        assert_eq!(addresses.candidates(None).len(), MAX_LISTED + 1, "and the local one");
        assert_eq!(addresses.former_candidate(1, TIME_WITHOUT_FORMER).as_deref(), Some("a:1"));
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
