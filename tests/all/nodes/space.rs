//! An etcd that is driven to its quota accepts writes again without a person, on each member that is full.

use anyhow::{Context as _, Result};

use super::node::Node;
use super::owner::Owner;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::small_etcd::{self, QUOTA, SmallEtcd, fill, filler_of, write_to_the_quota};

/// A machine that will run a small etcd.
fn node_with(etcd: &SmallEtcd) -> Result<Node> {
    let mut node = Node::new()?;
    node.etcd_program = etcd.path();
    Ok(node)
}

/// Waits until the etcd of a node has no alarm and accepts a write.
async fn until_it_accepts_writes(node: &Node) -> Result<()> {
    small_etcd::until_it_accepts_writes(&filler_of(&node.files())?)
        .await
        .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))
}

/// The role server starts while etcd is full, when no curator can lead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_member_recovers_without_a_person_also_after_its_role_server_has_restarted() -> TestResult {
    let (owner, etcd) = (Owner::new()?, SmallEtcd::new()?);
    let mut node = node_with(&etcd)?;
    node.ask(owner.founding_order())?;
    node.start()?;
    node.until_control_plane(true).await?;
    node.until_it_is_one().await?;
    let space = async || {
        let space = node.facts.etcd_space.latest().flatten();
        Ok(space.is_some_and(|space| space.quota_bytes == QUOTA && space.full_members == 0))
    };
    until("its space is reported", space).await.with_context(|| node.report())?;

    node.stop().await?;
    fill(&filler_of(&node.files())?).await?;
    node.start()?;
    let reported = async || {
        let problem = node.facts.problems.describe().unwrap_or_default();
        Ok(problem.contains("etcd has no space left and accepts no writes"))
    };
    until("the problem is reported", reported).await.with_context(|| node.report())?;
    until_it_accepts_writes(&node).await?;
    node.until_control_plane(true).await?;
    until("nothing is reported any more", async || Ok(node.facts.problems.describe().is_none()))
        .await
        .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))?;
    let space = node.facts.etcd_space.latest().flatten().context("it reports no space")?;
    assert!(space.file_bytes < QUOTA / 2 && space.full_members == 0, "{space:?}");
    assert_eq!(space.defragmentations, 1, "{space:?}");
    Ok(())
}

/// etcd raises the alarm for one member at a time, and the files of all three are full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_member_of_a_full_cluster_makes_room() -> TestResult {
    let (mut owner, etcd) = (Owner::new()?, SmallEtcd::new()?);
    let mut first = node_with(&etcd)?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    first.until_it_is_one().await?;
    owner.claim(&first).await?;
    let mut others = [node_with(&etcd)?, node_with(&etcd)?];
    for node in &mut others {
        node.start()?;
        node.ask(owner.join(&first).await?)?;
        owner.approve(node).await?;
        node.until_it_is_one().await?;
        owner.wait_for_node_status(node).await?;
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
    }
    let [second, third] = &others;
    owner.learn(&[&first, second, third])?;
    owner.until_well(3, 3).await?;

    fill(&filler_of(&first.files())?).await?;
    for node in [&first, second, third] {
        until_it_accepts_writes(node).await?;
        write_to_the_quota(&filler_of(&node.files())?).await?;
        let small = async || {
            let space = node.facts.etcd_space.latest().flatten();
            Ok(space.is_some_and(|space| space.file_bytes < QUOTA / 10 * 9 && space.full_members == 0))
        };
        until("its file is small", small)
            .await
            .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))?;
    }
    owner.until_well(3, 3).await?;
    let spaces: Vec<_> =
        [&first, second, third].iter().filter_map(|node| node.facts.etcd_space.latest().flatten()).collect();
    assert!(spaces.iter().all(|space| space.defragmentations <= 1), "{spaces:?}");
    assert!(spaces.iter().any(|space| space.defragmentations == 1), "{spaces:?}");
    Ok(())
}
