//! A member of etcd with several addresses. Its certificate names the one at which the others connect to it, and they
//! accept its own connections from each of them.
//!
//! Every member on the loopback has two addresses: it listens at its own, and connects from 127.0.0.1, which is the
//! source that the kernel chooses. So a comparison of the two would already keep a cluster from forming here.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result};
use shepherd::curator_client::tls::certified_key;
use shepherd::roleserver::cluster::etcd_member::read_peer_certificate;

use super::attacker::listeners::{PeerAnswer, peer_port, request_members_from};
use super::moving::addresses;
use super::node::Node;
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;

/// Whether etcd on `member` answers the pair of `peer` from this address.
async fn is_served(member: &Node, peer: &Node, source: IpAddr) -> Result<bool> {
    let certificate = read_peer_certificate(&peer.files()).context("it has no pair")?;
    assert_eq!(addresses(&certificate)?, [peer.address]);
    let key = peer.files().read_key()?.context("it has no key")?;
    let pair = certified_key(&certificate, key.pkcs8())?;
    let answer = request_members_from(source, peer_port(member)?, pair).await?;
    Ok(matches!(answer, PeerAnswer::Served(text) if text.starts_with("HTTP/1.1 200")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_with_two_addresses_is_served_from_both() -> TestResult {
    let (owner, first) = founded().await?;
    let second = joined(&owner, &first).await?;
    owner.roles(&second, &["consensus-member"], &[]).await?;
    second.until_control_plane(true).await?;
    owner.until_well(2, 2).await?;
    for (member, peer) in [(&first, &second), (&second, &first)] {
        for source in [peer.address, Ipv4Addr::LOCALHOST.into()] {
            assert!(
                is_served(member, peer, source).await?,
                "{source} is refused as a source of {}",
                peer.id()?
            );
        }
    }
    Ok(())
}
