//! Addresses of a cluster's curators: which one is queried next, and where the leader listens.
//!
//! The curator on this node is known under a local address, which does not change with the node's address.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use proto::curator::v1 as wire;

use crate::node_id::NodeId;

/// The curators that a tracker knows.
#[derive(Debug, Default)]
pub(super) struct CuratorAddresses {
    /// `host:port` of the curators in the cluster's directory.
    pub(super) directory: BTreeSet<String>,
    /// The curator on this node, if one runs: node id and `host:port`.
    pub(super) local: Option<(NodeId, String)>,
}

impl CuratorAddresses {
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

    /// The curator of the directory behind `last` in the round of all, but never `followed`.
    pub(super) fn next_other(&self, last: &str, followed: &str) -> Option<String> {
        let behind = self.directory.iter().filter(|address| address.as_str() > last);
        let mut round = behind.chain(&self.directory);
        round.find(|address| *address != followed).cloned()
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

    #[test]
    fn each_other_curator_is_next_once_in_a_round() {
        let addresses = curator_addresses(&["a:1", "b:1", "c:1"], Some(1));
        let (mut last, mut round) = ("b:1".to_owned(), Vec::new());
        for _ in 0..4 {
            last = addresses.next_other(&last, "b:1").unwrap();
            round.push(last.clone());
        }
        assert_eq!(round, ["c:1", "a:1", "c:1", "a:1"]);
        assert_eq!(addresses.next_other("127.0.0.1:7835", "127.0.0.1:7835").as_deref(), Some("a:1"));
        assert_eq!(curator_addresses(&["b:1"], None).next_other("b:1", "b:1"), None);
        assert_eq!(curator_addresses(&[], None).next_other("b:1", "b:1"), None);
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
