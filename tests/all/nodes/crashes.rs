//! A node that was interrupted after each of the steps that it makes durable.
//!
//! The content of the disk after each step is derived from the content at the end: everything that is written later is
//! removed again.

use std::path::Path;

use anyhow::{Context as _, Result};
use shepherd::curator::bootstrap::create_authority;
use shepherd::roleserver::cluster::files::{ClusterFiles, EtcdMembership, StoredAuthority};

use super::node::Node;
use super::owner::Owner;
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

fn remove(disk: &Path, names: &[&str]) -> Result<()> {
    for name in names {
        let path = disk.join(name);
        if path.is_dir() { std::fs::remove_dir_all(path)? } else { std::fs::remove_file(path)? }
    }
    Ok(())
}

fn unnumbered(files: &ClusterFiles) -> Result<()> {
    let membership = files.read_membership()?.context("no membership")?;
    Ok(files.write_membership(&EtcdMembership { member: None, ..membership })?)
}

/// The content of the disk after a step of founding, and whether etcd had the cluster's records by then.
type Step = (&'static str, bool, fn(&Path, &ClusterFiles) -> Result<()>);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn founding_that_was_cut_off_after_any_step_founds_the_same_cluster() -> TestResult {
    let mut owner = Owner::new()?;
    let mut node = Node::new()?;
    node.ask(owner.founding_order())?;
    let files = node.files();
    let made = create_authority(owner.cluster, std::time::SystemTime::now().into())?;
    let kept = StoredAuthority {
        certificate: hex::encode(&made.anchor().certificate),
        private_key: hex::encode(made.pkcs8()),
    };
    files.write_authority(&kept)?;
    node.start()?;
    node.until_it_is_one().await?;
    owner.claim(&node).await?;
    assert_eq!(files.read_authority()?, None, "its key is in etcd, and nowhere else");
    let (id, ca) = (node.id()?, made.anchor().certificate.clone());
    let founded = owner.nodes().await?[0].node.as_ref().context("no node")?.registered_at_ms;
    node.cut_power().await?;
    let end = tempfile::tempdir()?;
    copy(&node.disk(), end.path())?;

    let steps: [Step; 8] = [
        ("nothing but the order", false, |disk, _| {
            remove(disk, &["node_key.pk8", "etcd", "membership.json", "roles.json", "credentials.json"])
        }),
        ("its key", false, |disk, _| {
            remove(disk, &["etcd", "membership.json", "roles.json", "credentials.json"])
        }),
        ("that a membership begins", false, |disk, files| {
            unnumbered(files)?;
            remove(
                disk,
                &["etcd/founding", "etcd/peer.crt", "etcd/peer.key", "roles.json", "credentials.json"],
            )
        }),
        ("what etcd proves itself with", false, |disk, files| {
            unnumbered(files)?;
            remove(disk, &["etcd/founding", "roles.json", "credentials.json"])
        }),
        ("the records in etcd", true, |disk, files| {
            unnumbered(files)?;
            remove(disk, &["roles.json", "credentials.json"])
        }),
        ("the number of the membership", true, |disk, _| remove(disk, &["roles.json", "credentials.json"])),
        ("its roles", true, |disk, _| remove(disk, &["credentials.json"])),
        ("its certificate", true, |_, _| Ok(())),
    ];
    for (step, recorded, cut) in steps {
        std::fs::remove_dir_all(node.disk())?;
        copy(end.path(), &node.disk())?;
        // Removed last of all.
        files.write_authority(&kept)?;
        cut(&node.disk(), &files)?;
        node.start()?;
        node.until_it_is_one().await.context(step)?;
        node.until_control_plane(true).await.context(step)?;
        let connection = node.facts.connection.latest().context("no connection")?;
        assert_eq!(connection.anchor.certificate, ca, "after {step}");
        let new_key = step == "nothing but the order";
        assert_eq!(node.id()? == id, !new_key, "after {step}");
        let mut owner = owner.again();
        owner.claim(&node).await.context(step)?;
        let members = owner.members().await?;
        assert_eq!(members.len(), 1, "after {step}");
        let nodes = owner.nodes().await?;
        assert_eq!(nodes.len(), 1, "after {step}");
        let since = nodes[0].node.as_ref().map_or(0, |node| node.registered_at_ms);
        assert_eq!(since == founded, recorded, "after {step}: {since} and {founded}");
        assert!(
            files.read_roles().is_some() && files.read_membership()?.is_some_and(|m| m.member.is_some()),
            "after {step}"
        );
        node.cut_power().await?;
    }
    Ok(())
}

/// Registered, approved and committed. Each time the response was lost, or the power failed before it was written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_that_was_cut_off_after_any_step_ends_as_the_same_node() -> TestResult {
    let (owner, first) = founded().await?;
    let mut node = joined(&owner, &first).await?;
    let id = node.id()?;
    node.stop().await?;
    let end = tempfile::tempdir()?;
    copy(&node.disk(), end.path())?;
    for (step, lost) in [
        ("its key", &["credentials.json", "curators.json", "roles.json"][..]),
        ("where curators are", &["credentials.json", "roles.json"][..]),
        ("its certificate", &["roles.json"][..]),
        ("all of it", &[][..]),
    ] {
        std::fs::remove_dir_all(node.disk())?;
        copy(end.path(), &node.disk())?;
        for name in lost {
            // A file that was never written does not exist.
            let _ = std::fs::remove_file(node.disk().join(name));
        }
        node.start()?;
        node.until_it_is_one().await.context(step)?;
        node.until_control_plane(false).await.context(step)?;
        assert_eq!(node.id()?, id, "after {step}");
        assert_eq!(owner.nodes().await?.len(), 2, "after {step}");
        node.stop().await?;
    }
    Ok(())
}

/// Its roles are lost on the only member: no other node could send them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_member_whose_roles_are_damaged_comes_back_all_the_same() -> TestResult {
    let (owner, mut node) = founded().await?;
    owner.put_kubernetes().await?;
    owner.roles(&node, &["kubernetes-worker"], &[]).await?;
    node.cut_power().await?;
    std::fs::write(node.disk().join("roles.json"), "{\"consensus_member\": nu")?;
    node.start()?;
    node.until_control_plane(true).await?;
    let roles = node.facts.roles.clone();
    crate::harness::etcd_servers::until("the curator says what it is to do", async || {
        Ok(roles.latest().is_some_and(|roles| roles.kubernetes_worker))
    })
    .await?;
    let files = node.files();
    crate::harness::etcd_servers::until("it is written down", async || {
        Ok(files
            .read_roles()
            .is_some_and(|roles| roles.kubernetes_worker && roles.consensus_member.is_some()))
    })
    .await?;
    Ok(())
}
