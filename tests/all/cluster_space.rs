//! The etcd of a cluster that is driven to its quota, as the operator of its fleet sees it: the issue before it is full, what
//! waits and what still works while it is full, and the way back without a person.
//!
//! The etcd is real, with a small quota. The way back of a single node is tested in `nodes/space.rs`.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use shepherd::etcd::client::{Client, EtcdError};
use shepherd::etcd::namespace::KeySelector;
use shepherd::model::byte_size::ByteSize;
use shepherd::model::issues::find_issues;
use shepherd::roleserver::cluster::files::ClusterFiles;

use crate::clusters::{Field, machines, settled};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::until;
use crate::harness::small_etcd::{
    QUOTA, SmallEtcd, fill, fill_to, filler_of, until_it_accepts_writes, write, write_to_the_quota,
};

/// Messages of the issues of the cluster with this id.
async fn issues(field: &Field, id: &str) -> Result<Vec<String>> {
    let inputs = field.fleet.database.bmdb().await?.read_issue_inputs().await?;
    let found = find_issues(&inputs).into_iter();
    let of_cluster = found.filter(|issue| issue.id == id && issue.subject == "cluster ams");
    Ok(of_cluster.map(|issue| issue.message).collect())
}

/// Whether a machine reports a full etcd as a problem of its node. It becomes an issue after minutes.
async fn a_member_reports_it(field: &Field) -> Result<bool> {
    let inputs = field.fleet.database.bmdb().await?.read_issue_inputs().await?;
    let mut problems = inputs.machines.iter().filter_map(|machine| machine.node_problem.as_ref());
    Ok(problems.any(|(text, _)| text.contains("etcd has no space left and accepts no writes")))
}

/// Clients of the members of etcd, in the order in which `describe` lists their machines.
fn fillers(field: &Field, cluster: &Value) -> Result<Vec<Client>> {
    let members = machines(cluster, "control-plane").into_iter().map(|machine| {
        let name = machine["name"].as_str().context("a machine without a name")?;
        filler_of(&ClusterFiles::in_state_directory(&field.disk(name)))
    });
    members.collect()
}

/// Reads and deletes while etcd is full.
async fn reads_and_deletions_work(client: &Client) -> Result<()> {
    let kept = client.get("/small").await?.context("a key is lost")?;
    ensure!(kept.value == b"one", "{kept:?}");
    until("a deletion is accepted", async || {
        match client.delete_unguarded(&KeySelector::One("/small".to_owned())).await {
            Ok(_) => Ok(true),
            // The member makes room already.
            Err(EtcdError::Deadline { .. } | EtcdError::Unavailable { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_etcd_is_an_issue_before_and_has_room_again_without_a_person() -> TestResult {
    let etcd = SmallEtcd::new()?;
    let field = Field::start_with("cluster_space", 4, &[("PATH", etcd.search_path()?)]).await?;
    let fillers = fillers(&field, &field.make_ams(3, 0).await?)?;
    let first = fillers.first().context("no members")?;
    assert_eq!(issues(&field, "cluster-etcd-large").await?, [""; 0]);

    // Before the limit: it is an issue, and everything works.
    assert!(write(first, "/small", b"one").await?, "an empty etcd is full");
    fill_to(first, QUOTA / 100 * 84).await?;
    until("the issue before the limit", async || {
        let limit = format!("etcd accepts no writes from {} on", ByteSize(QUOTA).humanize());
        Ok(issues(&field, "cluster-etcd-large").await?.iter().any(|message| message.contains(&limit)))
    })
    .await?;
    assert_eq!(issues(&field, "cluster-etcd-full").await?, [""; 0]);
    assert!(settled(&field.cluster("ams")?), "{:#}", field.cluster("ams")?);

    // At the limit: the cluster names the alarm as what it waits for, and so does a member.
    fill(first).await?;
    reads_and_deletions_work(first).await?;
    field.ctl(&["cluster", "scale", "ams", "--workers", "1", "--reason", "more load"])?;
    let (mut by_curator, mut by_member) = (false, false);
    until("the alarm is reported", async || {
        // The members make room within seconds. A host that is slow sees the next alarm.
        fill(first).await?;
        let cluster = field.cluster("ams")?;
        if cluster["waitReasons"].to_string().contains("is full (alarm NOSPACE)") {
            by_curator |= !issues(&field, "cluster-etcd-full").await?.is_empty();
        }
        by_member |= a_member_reports_it(&field).await?;
        Ok(by_curator && by_member)
    })
    .await?;

    // The way back: each member makes room, and the order is carried out that waited.
    for client in &fillers {
        until_it_accepts_writes(client).await?;
        write_to_the_quota(client).await?;
        until("the file of a member is small", async || {
            let status = client.database_status().await;
            Ok(status.is_ok_and(|status| !status.has_alarm && status.file_bytes < QUOTA / 10 * 8))
        })
        .await?;
    }
    let joined = |cluster: &Value| settled(cluster) && machines(cluster, "worker").len() == 1;
    let cluster = field.until("the worker has joined", "ams", joined).await?;
    assert_eq!((&cluster["voters"], &cluster["votersReached"]), (&3.into(), &3.into()), "{cluster:#}");
    for id in ["cluster-etcd-full", "cluster-etcd-large"] {
        until("the issue has ended", async || Ok(issues(&field, id).await?.is_empty())).await?;
    }
    until("no member reports it", async || Ok(!a_member_reports_it(&field).await?)).await?;
    Ok(())
}
