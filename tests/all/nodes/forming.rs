//! From machines to a cluster that outlives its members.

use std::collections::BTreeSet;

use anyhow::Context as _;

use super::node::Node;
use super::owner::Owner;
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;

/// The first node and the third run the same code. Then leaders are stopped, and everything at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_form_a_cluster_that_outlives_each_of_them_and_all_at_once() -> TestResult {
    let mut owner = Owner::new()?;
    let mut first = Node::new()?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    first.until_it_is_one().await?;
    owner.claim(&first).await?;
    assert_eq!(owner.members().await?.len(), 1);

    let mut others = [Node::new()?, Node::new()?];
    for node in &mut others {
        node.start()?;
        node.ask(owner.join(&first).await?)?;
        owner.approve(node).await?;
        node.until_it_is_one().await?;
        node.until_control_plane(false).await?;
        assert!(node.etcd().is_none(), "it has no role yet");
        owner.wait_for_node_status(node).await?;
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
    }
    let [mut second, mut third] = others;
    owner.learn(&[&first, &second, &third])?;
    owner.until_well(3, 3).await?;

    // The leader's role server ends, and nothing else: its etcd continues, with its pid, and is adopted.
    let leader = owner.curators()?.leader().context("nobody leads")?.node;
    let all = [&mut first, &mut second, &mut third];
    let leading = all.into_iter().find(|node| node.id().ok() == Some(leader)).context("no such node")?;
    let etcd = leading.etcd().context("no etcd")?;
    leading.stop().await?;
    assert!(etcd.instance.is_alive(), "what runs beside it goes on");
    leading.start()?;
    leading.until_control_plane(true).await?;
    assert_eq!(leading.etcd().context("no etcd")?.instance, etcd.instance, "no second one was started");
    owner.until_well(3, 3).await?;

    // The leader's machine loses its power, and starts again.
    let leader = owner.curators()?.leader().context("nobody leads")?.node;
    let all = [&mut first, &mut second, &mut third];
    let leading = all.into_iter().find(|node| node.id().ok() == Some(leader)).context("no such node")?;
    leading.cut_power().await?;
    owner.until_well_without(3, 2).await?;
    leading.start()?;
    owner.until_well(3, 3).await?;

    // All of them at once: the content of their disks is sufficient.
    for node in [&mut first, &mut second, &mut third] {
        node.cut_power().await?;
    }
    for node in [&mut first, &mut second, &mut third] {
        node.start()?;
    }
    owner.until_well(3, 3).await?;
    Ok(())
}

/// A member is lost with its machine, and another machine takes its place. Then the new member is needed for the quorum.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_died_is_replaced_by_another_machine() -> TestResult {
    let (owner, first) = founded().await?;
    let (mut second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 3).await?;
    }
    owner.learn(&[&first, &second, &third])?;
    third.cut_power().await?;
    owner.until_well_without(3, 2).await?;
    owner.delete(&third).await?;
    drop(third);
    owner.until_well(2, 2).await?;

    let fourth = joined(&owner, &first).await?;
    owner.roles(&fourth, &["consensus-member"], &[]).await?;
    fourth.until_control_plane(true).await?;
    owner.until_well(3, 3).await?;
    owner.learn(&[&first, &second, &fourth])?;
    let expected = [first.id()?, second.id()?, fourth.id()?].map(|id| id.to_string());
    let members: BTreeSet<String> = owner.members().await?.into_iter().map(|member| member.node_id).collect();
    assert_eq!(members, expected.into());

    second.cut_power().await?;
    owner.until_well_without(3, 2).await?;
    // A write, which needs both of the others.
    owner.put_kubernetes().await?;
    second.start()?;
    owner.until_well(3, 3).await?;
    Ok(())
}
