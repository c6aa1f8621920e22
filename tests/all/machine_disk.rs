//! A machine with a disk that fills up, as the operator of its fleet sees it: an issue before it is full, a machine that
//! reports on a full disk, and an end of the issue without a person at the machine.
//!
//! The role server is real, on a small disk of its own. What it does there is tested in `roleserver/full_disk.rs`.

use anyhow::Result;
use shepherd::model::issues::find_issues;
use shepherd::model::time::Span;

use crate::harness::aloud::TestResult;
use crate::harness::callback::{self, Listener, phase, until};
use crate::harness::postgres::TestDatabase;
use crate::roleserver::Machine;
use crate::roleserver::odd_disk::OddDisk;

/// Messages of the issues about file systems of machines.
async fn storage_issues(listener: &Listener) -> Result<Vec<String>> {
    let inputs = listener.bmdb.read_issue_inputs().await?;
    let issues = find_issues(&inputs).into_iter().filter(|issue| issue.id == "storage-low");
    Ok(issues.map(|issue| issue.message).collect())
}

/// Waits until an issue has this text.
async fn until_reported(listener: &Listener, text: &str) -> Result<()> {
    until("the issue", || async move {
        Ok(storage_issues(listener).await?.iter().any(|message| message.contains(text)))
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_of_a_machine_is_an_issue_until_there_is_space() -> TestResult {
    let (database, directory) = (TestDatabase::create("machine_disk").await?, tempfile::tempdir()?);
    let bmdb = database.bmdb().await?;
    bmdb.migrate().await?;
    bmdb.read_policy().await?;
    bmdb.change_policy("test", |policy| policy.heartbeat_interval = Span::seconds(1)).await?;
    let listener = Listener::start(&database, callback::settings(directory.path())?).await?;
    let pool = database.pool().await?;
    let (machine, host) = callback::enrolled(&listener, &pool, Machine::new).await?;
    let ended = host.clone();
    tokio::task::spawn_blocking(move || ended.end_role_server()).await??;
    let incarnation = async || -> Result<Option<String>> {
        let stored = "SELECT incarnation FROM machine_agent_heartbeat WHERE machine_id = $1";
        Ok(sqlx::query_scalar(stored).bind(machine.0).fetch_optional(&pool).await?)
    };
    let before = incarnation().await?;
    let mut disk = OddDisk::small(&host.path(), &host.command("run"))?;
    until("it reports from the small disk", || async {
        let now = incarnation().await?;
        Ok(now.is_some() && now != before)
    })
    .await?;
    assert_eq!(storage_issues(&listener).await?, [""; 0]);

    // The log takes of it, too, so that too little would be none before anybody looks.
    disk.leave_free(9)?;
    until_reported(&listener, "is nearly full").await?;
    disk.leave_free(0)?;
    until_reported(&listener, "is full").await?;
    let last = "SELECT max(at)::TEXT FROM machine_agent_heartbeat WHERE machine_id = $1";
    let full_since: Option<String> = sqlx::query_scalar(last).bind(machine.0).fetch_one(&pool).await?;
    until("it reports on a full disk", || async {
        let newest: Option<String> = sqlx::query_scalar(last).bind(machine.0).fetch_one(&pool).await?;
        Ok(newest != full_since)
    })
    .await?;
    assert_eq!(phase(&pool, machine).await?, "Ready");
    assert!(!disk.has_ended()?, "the role server ended");

    disk.make_room()?;
    until("the issue has ended", || async { Ok(storage_issues(&listener).await?.is_empty()) }).await?;
    assert!(!disk.has_ended()?, "the role server ended");
    Ok(listener.stop().await?)
}
