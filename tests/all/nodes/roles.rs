//! Roles that are added and removed.

use anyhow::Context as _;
use shepherd::roleserver::cluster::etcd_data::{self, EtcdDataState};
use shepherd::roleserver::cluster::files::EtcdMembership;

use super::services::{founded, joined};
use crate::harness::aloud::TestResult;

/// Quick changes, of which the node sees some and misses others. The last order takes effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role_that_is_given_and_taken_quickly_ends_as_it_was_ordered_last() -> TestResult {
    let (owner, first) = founded().await?;
    let node = joined(&owner, &first).await?;
    for _ in 0..5 {
        owner.roles(&node, &["consensus-member"], &[]).await?;
        owner.roles(&node, &[], &["consensus-member"]).await?;
    }
    node.until_control_plane(false).await?;
    assert_eq!(owner.members().await?.len(), 1);
    owner.roles(&node, &["consensus-member"], &[]).await?;
    node.until_control_plane(true).await?;
    owner.until_well(2, 2).await?;

    // Removed for good: etcd ends, and its data is removed.
    let data =
        node.files().read_membership()?.map(|membership| node.disk().join("etcd").join(membership.data));
    assert!(data.as_ref().is_some_and(|data| data.exists()));
    let membership = node.files().read_membership()?.context("no membership")?;
    let number = membership.member.context("no number")?;
    assert_eq!(
        etcd_data::inspect_data(&node.files(), &membership),
        EtcdDataState::Member(number),
        "by etcd's own log"
    );
    let elsewhere = EtcdMembership { data: "elsewhere".to_owned(), ..membership };
    assert_eq!(etcd_data::inspect_data(&node.files(), &elsewhere), EtcdDataState::Empty);
    owner.roles(&node, &[], &["consensus-member"]).await?;
    node.until_control_plane(false).await?;
    crate::harness::etcd_servers::until("its etcd is gone, with its data", async || {
        Ok(node.etcd().is_none() && data.as_ref().is_some_and(|data| !data.exists()))
    })
    .await?;
    owner.until_well(1, 2).await?;
    Ok(())
}
