//! Follows a consensus member that comes back with another address.
//!
//! The etcd of a member listens at the address of its membership, which is a part of its command line and of its
//! certificate, and the others connect there. So an etcd that runs keeps its address. A member that was off takes the
//! address of its node when it starts, if its order names that one, or if the host lost the former one. Otherwise nobody
//! could start it again without a person. A host that starts may get its address late, so a lost one is waited for, for a
//! minute.
//!
//! # How the others find it
//!
//! They list the former address, and need not know the new one for the member to take part: it connects to them at
//! addresses that have not changed, receives on these connections, and sends by requests of its own. Its former
//! certificate is accepted, because members do not compare the address of a client. So as soon as its etcd answers, the
//! member replaces its own address in etcd's list. Its certificate is renewed at once, because it does not name the new
//! address ([`peer_certificate`](super::peer_certificate)). The leader issues it if the connection of the node proves the
//! address. Otherwise the node issues it from its own etcd.
//!
//! This needs a quorum. Members that all come back with other addresses at once do not find each other. Give one of them
//! its former address back, or restore the cluster from a snapshot.
//!
//! A member does not move before its etcd has started once: etcd derives its number from the address at which it was added.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use curator::membership::peer_url;
use etcd::client::Client;
use etcd::members::MemberId;
use supervisor::exit_reason::RunnableError;
use tokio::time::Instant;

use crate::child::lifecycle::{ChildContext, find_running};
use crate::cluster::control_plane_context::ControlPlaneContext;
use crate::cluster::etcd_data::{self, EtcdDataState};
use crate::cluster::etcd_member;
use crate::cluster::files::{ClusterFiles, EtcdMembership};
use crate::cluster::host_addresses::list_host_addresses;

/// How long a host that has just started may take to get its former address again.
const RETURN_TIME: Duration = Duration::from_mins(1);
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// What decides whether a member has another address from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberAddressState<'a> {
    /// The address of its membership.
    pub membership: IpAddr,
    /// The address of its node.
    pub node: IpAddr,
    /// Whether the address of the node is that of its order.
    pub is_ordered: bool,
    /// Whether its etcd runs at this moment.
    pub is_running: bool,
    /// What etcd has of the membership on its disk.
    pub data: EtcdDataState,
    /// The addresses of the host; `None` if they cannot be listed.
    pub host: Option<&'a [IpAddr]>,
}

/// The other address that a member has from now on; `None` if it keeps its own.
#[must_use]
pub fn decide_member_address(state: &MemberAddressState<'_>) -> Option<IpAddr> {
    let listed = state.host?;
    // The loopback interface has all of its network.
    let has = |address: IpAddr| address.is_loopback() || listed.contains(&address);
    let is_off = !state.is_running && matches!(state.data, EtcdDataState::Member(_));
    let is_wanted = state.is_ordered || !has(state.membership);
    let moves = is_off && is_wanted && has(state.node) && state.node != state.membership;
    moves.then_some(state.node)
}

/// The address at which the etcd of this node listens now, with the curator; `None` if it does not run. A role server that
/// starts beside it keeps that address, also if the order names another one meanwhile.
pub(super) async fn running_member_address(
    files: &ClusterFiles,
    children: &Arc<ChildContext>,
) -> Result<Option<IpAddr>, RunnableError> {
    let Some(membership) = files.read_membership()? else { return Ok(None) };
    Ok(is_etcd_running(children).await?.then_some(membership.address))
}

async fn is_etcd_running(children: &Arc<ChildContext>) -> Result<bool, RunnableError> {
    let children = children.clone();
    let looking = tokio::task::spawn_blocking(move || find_running(etcd_member::NAME, &children));
    Ok(looking.await??.is_some())
}

/// The same membership at another address.
fn move_membership(membership: &EtcdMembership, address: IpAddr) -> EtcdMembership {
    let [former, present] = [membership.address, address].map(peer_url);
    let members = membership.initial_cluster.split(',').map(|member| match member.split_once('=') {
        Some((name, url)) if url == former => format!("{name}={present}"),
        _ => member.to_owned(),
    });
    let initial_cluster = members.collect::<Vec<_>>().join(",");
    EtcdMembership { address, initial_cluster, ..membership.clone() }
}

/// Gives a member the address of its node, `node`, if it came back with another one. The change is stored before etcd
/// starts.
pub(super) async fn follow_moved_member(
    host: &ControlPlaneContext,
    node: IpAddr,
    membership: EtcdMembership,
) -> Result<EtcdMembership, RunnableError> {
    let running = is_etcd_running(&host.children).await?;
    let is_ordered = host.files.read_order()?.and_then(|order| order.address) == Some(node);
    let data = etcd_data::inspect_data(&host.files, &membership);
    let end = Instant::now() + RETURN_TIME;
    let address = loop {
        let listed = list_host_addresses();
        if let Err(error) = &listed {
            tracing::warn!(%error, "the addresses of this host cannot be listed, so its etcd member keeps its own");
        }
        let listed = listed.ok();
        let state = MemberAddressState {
            membership: membership.address,
            node,
            is_ordered,
            is_running: running,
            data,
            host: listed.as_deref(),
        };
        let Some(address) = decide_member_address(&state) else { return Ok(membership) };
        if is_ordered || Instant::now() >= end {
            break address;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    };
    tracing::warn!(former = %membership.address, %address, "the etcd member of this node comes back with another address");
    let moved = move_membership(&membership, address);
    host.files.write_membership(&moved)?;
    Ok(moved)
}

/// Lets the other members connect to the member behind `client` at its address.
pub(super) async fn publish_peer_url(client: &Client, address: IpAddr) -> Result<(), RunnableError> {
    let (own, url) = (MemberId(client.status().await?.member_id), peer_url(address));
    let listed = client.list_members().await?;
    let is_outdated = |urls: &[String]| urls != std::slice::from_ref(&url);
    if listed.iter().any(|member| member.id == own && is_outdated(&member.peer_urls)) {
        client.update_member(own, std::slice::from_ref(&url)).await?;
        tracing::info!(member = %own, url, "the other members connect to this one at another address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn member_moves_only_while_it_is_off_and_for_a_reason() {
        let (former, present, other) = (ip("10.0.0.1"), ip("10.0.0.2"), ip("10.0.0.9"));
        let (both, only_new) = ([former, present], [present]);
        let lost = MemberAddressState {
            membership: former,
            node: present,
            is_ordered: false,
            is_running: false,
            data: EtcdDataState::Member(7),
            host: Some(&only_new),
        };
        let ordered = MemberAddressState { is_ordered: true, host: Some(&both), ..lost };
        let none: [IpAddr; 0] = [];
        for (case, state, expected) in [
            ("the host lost it", lost, Some(present)),
            ("the order names another one", ordered, Some(present)),
            ("the host has both", MemberAddressState { host: Some(&both), ..lost }, None),
            ("nothing has changed", MemberAddressState { node: former, ..ordered }, None),
            ("etcd runs", MemberAddressState { is_running: true, ..lost }, None),
            ("etcd runs, and it is ordered", MemberAddressState { is_running: true, ..ordered }, None),
            ("etcd never started", MemberAddressState { data: EtcdDataState::Empty, ..lost }, None),
            ("its data is unreadable", MemberAddressState { data: EtcdDataState::Unknown, ..lost }, None),
            ("the host has no list", MemberAddressState { host: None, ..lost }, None),
            ("the host has neither", MemberAddressState { host: Some(&none), ..lost }, None),
            (
                "the order names one of another host",
                MemberAddressState { node: other, host: Some(&both), ..ordered },
                None,
            ),
            (
                "on loopback, as it is ordered",
                MemberAddressState { membership: ip("127.0.0.7"), node: ip("127.0.0.8"), ..ordered },
                Some(ip("127.0.0.8")),
            ),
            (
                "on loopback, which is never lost",
                MemberAddressState { membership: ip("127.0.0.7"), node: ip("127.0.0.8"), ..lost },
                None,
            ),
        ] {
            assert_eq!(decide_member_address(&state), expected, "{case}");
        }
    }

    #[test]
    fn moved_membership_differs_in_its_own_address_alone() {
        let membership = EtcdMembership {
            member: Some(7),
            data: "member-7".to_owned(),
            address: ip("10.0.0.1"),
            initial_cluster: "a=https://10.0.0.1:7834,b=https://10.0.0.11:7834".to_owned(),
            new_cluster: false,
            epoch: 3,
        };
        let moved = move_membership(&membership, ip("fd00::2"));
        let expected = EtcdMembership {
            address: ip("fd00::2"),
            initial_cluster: "a=https://[fd00::2]:7834,b=https://10.0.0.11:7834".to_owned(),
            ..membership.clone()
        };
        assert_eq!(moved, expected);
        assert_eq!(move_membership(&moved, ip("10.0.0.1")), membership);
    }
}
