//! An etcd that is driven to its quota accepts writes again without a person, on each member that is full.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::cluster::etcd_member::client_endpoint;

use super::node::Node;
use super::owner::Owner;
use crate::harness::aloud::TestResult;
use crate::harness::etcd_program::etcd_program;
use crate::harness::etcd_servers::until;

const QUOTA: u64 = 16 << 20;

/// The etcd of the tests with a small quota, as a program of its own.
struct SmallEtcd {
    place: tempfile::TempDir,
}

impl SmallEtcd {
    fn new() -> Result<Self> {
        let (place, real) = (tempfile::tempdir()?, etcd_program()?);
        let real = real.display();
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = --version ] && exec {real} --version\nexec {real} --quota-backend-bytes {QUOTA} \"$@\"\n"
        );
        let small = Self { place };
        std::fs::write(small.path(), script)?;
        std::fs::set_permissions(small.path(), std::fs::Permissions::from_mode(0o755))?;
        Ok(small)
    }

    fn path(&self) -> PathBuf {
        self.place.path().join("etcd")
    }

    /// A machine that will run it.
    fn node(&self) -> Result<Node> {
        let mut node = Node::new()?;
        node.etcd_program = self.path();
        Ok(node)
    }
}

/// A client of the etcd of a node, in a namespace that nobody else uses.
fn client_of(node: &Node) -> Result<Client> {
    Ok(Client::new(vec![client_endpoint(&node.files())], Namespace::new("filler")?))
}

/// Writes a value until etcd has answered; whether it had space. A member that is defragmented answers nothing meanwhile,
/// and a write that is repeated only takes more of the quota.
async fn write(client: &Client, key: &str, value: &[u8]) -> Result<bool> {
    let mut had_space = false;
    until("etcd answers a write", async || match client.put_unguarded(key, value).await {
        Ok(_) => {
            had_space = true;
            Ok(true)
        }
        Err(EtcdError::Deadline { .. } | EtcdError::Unavailable { .. }) => Ok(false),
        Err(error) => {
            let text = error.to_string();
            ensure!(text.contains("database space exceeded"), "{text}");
            Ok(true)
        }
    })
    .await?;
    Ok(had_space)
}

/// Writes one key until etcd accepts no writes.
async fn fill(node: &Node) -> Result<()> {
    let (client, value) = (client_of(node)?, vec![b'v'; 1 << 16]);
    for _ in 0..3200 {
        if !write(&client, "/filler", &value).await? {
            return Ok(());
        }
    }
    bail!("etcd accepted 200 MiB");
}

/// Writes once so much that a member with a full file raises the alarm. Not every version is defragmented before that.
async fn write_to_the_quota(node: &Node) -> Result<()> {
    write(&client_of(node)?, "/large", &vec![b'v'; 1 << 20]).await?;
    Ok(())
}

/// Waits until the etcd of a node has no alarm and accepts a write.
async fn until_it_accepts_writes(node: &Node) -> Result<()> {
    let client = client_of(node)?;
    until("etcd has no alarm and accepts writes", async || {
        let quiet = client.database_status().await.is_ok_and(|status| !status.has_alarm);
        Ok(quiet && client.put_unguarded("/small", b"one").await.is_ok())
    })
    .await
    .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))
}

/// The role server starts while etcd is full, when no curator can lead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_member_recovers_without_a_person_also_after_its_role_server_has_restarted() -> TestResult {
    let (owner, etcd) = (Owner::new()?, SmallEtcd::new()?);
    let mut node = etcd.node()?;
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
    fill(&node).await?;
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
    let mut first = etcd.node()?;
    first.ask(owner.founding_order())?;
    first.start()?;
    first.until_control_plane(true).await?;
    first.until_it_is_one().await?;
    owner.claim(&first).await?;
    let mut others = [etcd.node()?, etcd.node()?];
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

    fill(&first).await?;
    for node in [&first, second, third] {
        until_it_accepts_writes(node).await?;
        write_to_the_quota(node).await?;
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
