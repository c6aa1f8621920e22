//! Members of etcd that restart because they run with old inputs: in turn, and only while the others are there.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::PEER_RESTART;
use shepherd::etcd::lock::{Lock, LockAttempt};
use shepherd::etcd::namespace::Namespace;
use shepherd::roleserver::child::launch::ChildRecord;
use shepherd::roleserver::cluster::etcd_member;
use shepherd::roleserver::cluster::node_problems::NodePart;
use shepherd::roleserver::cluster::peer_restart::StartRecord;
use shepherd::roleserver::process::ProcessInstance;

use super::node::Node;
use super::services::{founded, joined};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;

/// Lets a restart of etcd on this node be due: as if it had been started with the certificate of another authority.
fn make_restart_due(node: &Node) -> Result<()> {
    let record = StartRecord { authority_sha256: "another".to_owned(), ..StartRecord::default() };
    node.files().write_etcd_file("started.json", &serde_json::to_vec(&record)?)?;
    Ok(())
}

fn client_of(node: &Node) -> Result<Client> {
    Ok(Client::new(vec![etcd_member::client_endpoint(&node.files())], Namespace::new("curator")?))
}

/// Takes the lock of the member that restarts, as another member would.
async fn take_lock(client: &Client) -> Result<Lock> {
    match client.try_lock(PEER_RESTART, "of-the-test", Duration::from_mins(30)).await? {
        LockAttempt::Acquired(lock) => Ok(lock),
        LockAttempt::Busy { holder } => bail!("{holder} holds it"),
    }
}

fn instance(node: &Node) -> Result<ProcessInstance> {
    Ok(node.etcd().context("no etcd")?.instance)
}

fn is_running(node: &Node) -> bool {
    node.etcd().is_some_and(|etcd| etcd.instance.is_alive())
}

/// Waits until the node reports that its etcd has to restart and waits for this. It is the same process until then.
async fn until_reported(node: &Node, former: &ProcessInstance, why: &str) -> Result<()> {
    let reported = async || {
        ensure!(instance(node)? == *former, "it did not wait");
        let problem = node.facts.problems.describe();
        Ok(problem
            .is_some_and(|text| text.starts_with("etcd of this node has to restart") && text.contains(why)))
    };
    until(why, reported)
        .await
        .with_context(|| format!("{:?}\n{}", node.facts.problems.describe(), node.report()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_restart_in_turn_and_only_while_the_others_are_there() -> TestResult {
    let (owner, first) = founded().await?;
    let (second, mut third) = (joined(&owner, &first).await?, joined(&owner, &first).await?);
    for (node, voters) in [(&second, 2), (&third, 3)] {
        owner.roles(node, &["consensus-member"], &[]).await?;
        node.until_control_plane(true).await?;
        owner.until_well(voters, 3).await?;
    }
    {
        let nodes = [&first, &second, &third];
        let former: Vec<ProcessInstance> = nodes.into_iter().map(instance).collect::<Result<_>>()?;
        for node in nodes {
            make_restart_due(node)?;
        }
        let mut most = 0;
        let restarted = until("all have restarted", async || {
            most = most.max(nodes.iter().filter(|node| !is_running(node)).count());
            let mut pairs = nodes.iter().zip(&former);
            Ok(pairs.all(|(node, former)| is_running(node) && instance(node).is_ok_and(|now| now != *former)))
        })
        .await;
        restarted.with_context(|| {
            nodes.map(|node| format!("{:?}\n{}", node.facts.problems.describe(), node.report())).join("\n")
        })?;
        assert!(most <= 1, "{most} of three members were down at once");
    }
    owner.until_well(3, 3).await?;

    // A member that is missing keeps the others from restarting, until it is there again.
    let (client, former) = (client_of(&first)?, instance(&first)?);
    third.cut_power().await?;
    until("the first member misses the third one", async || Ok(client.connected_peers().await?.len() == 1))
        .await?;
    make_restart_due(&first)?;
    until_reported(&first, &former, "of the 2 other voting members of etcd, 1 are started").await?;
    third.start()?;
    first.until_etcd_is_another(&former).await?;
    owner.until_well(3, 3).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_waits_while_another_one_restarts() -> TestResult {
    let (_owner, first) = founded().await?;
    first.until_control_plane(true).await?;
    let (client, former) = (client_of(&first)?, instance(&first)?);
    let lock = take_lock(&client).await?;
    make_restart_due(&first)?;
    until_reported(&first, &former, "node of-the-test restarts its own").await?;

    // A part that recovers leaves the problem of another one.
    let (problems, other) = (first.facts.problems.clone(), Some("of another part".to_owned()));
    problems.set(NodePart::Enrolment, other.clone());
    lock.release(&client).await;
    first.until_etcd_is_another(&former).await?;
    until("only the other problem is reported", async || Ok(problems.describe() == other)).await?;
    until("the lock is released", async || {
        Ok(client.get(PEER_RESTART).await.is_ok_and(|record| record.is_none()))
    })
    .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_with_flags_of_another_release_is_adopted_and_restarts_in_its_turn() -> TestResult {
    let (_owner, mut first) = founded().await?;
    first.until_control_plane(true).await?;
    let client = client_of(&first)?;
    let lock = take_lock(&client).await?;
    let record = first.etcd().context("no etcd")?;
    first.stop().await?;
    let other = ChildRecord { spec_sha256: "0".repeat(64), ..record.clone() };
    other.write(&first.places().record_path(etcd_member::NAME))?;

    first.start()?;
    first.until_control_plane(true).await?;
    until_reported(&first, &record.instance, "it runs with the flags of another release").await?;
    lock.release(&client).await;
    first.until_etcd_is_another(&record.instance).await?;
    assert_eq!(first.etcd().context("no etcd")?.spec_sha256, record.spec_sha256);
    first.until_control_plane(true).await?;
    Ok(())
}
