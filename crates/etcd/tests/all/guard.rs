//! Writes that only the leader can make.

use anyhow::Context as _;
use shepherd_etcd::client::Client;
use shepherd_etcd::guard::{ExpectedRevision, KeyChange, LeaderGuard, WriteError};
use shepherd_etcd::namespace::KeySelector;
use tokio::task::JoinSet;

use testkit::aloud::TestResult;
use testkit::etcd_servers::Cluster;

async fn lock(client: &Client) -> anyhow::Result<LeaderGuard> {
    let create_revision = client.put_unguarded("/leader/1", b"").await?;
    Ok(LeaderGuard { key: "/leader/1".to_owned(), create_revision })
}

fn put(key: &str, value: &str, expected: ExpectedRevision) -> KeyChange {
    KeyChange::Put { key: key.to_owned(), value: value.into(), expected }
}

fn delete(key: &str, expected: ExpectedRevision) -> KeyChange {
    KeyChange::Delete { key: key.to_owned(), expected }
}

#[tokio::test]
async fn guarded_write_changes_all_or_nothing() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let guard = lock(&client).await?;
    let both = [put("/a", "1", ExpectedRevision::Absent), put("/b", "1", ExpectedRevision::Any)];
    let first = client.write_guarded(&guard, &both).await?;
    let read = client.read_guarded(&guard, "/a").await?.context("it was written")?;
    assert_eq!((&read.value[..], read.mod_revision), (&b"1"[..], first));

    let second = client.write_guarded(&guard, &[put("/a", "2", ExpectedRevision::At(first))]).await?;
    let stale = [put("/a", "3", ExpectedRevision::At(first)), put("/b", "3", ExpectedRevision::Any)];
    let error = client.write_guarded(&guard, &stale).await.unwrap_err();
    assert!(matches!(&error, WriteError::Conflict { keys: changed, .. } if changed == &["/a"]), "{error:?}");
    let error = client.write_guarded(&guard, &[put("/b", "3", ExpectedRevision::Absent)]).await.unwrap_err();
    assert!(matches!(&error, WriteError::Conflict { keys: changed, .. } if changed == &["/b"]), "{error:?}");
    assert_eq!(client.get("/a").await?.context("it is there")?.value, b"2");
    assert_eq!(client.get("/b").await?.context("it is there")?.value, b"1");

    let error = client.write_guarded(&guard, &[delete("/a", ExpectedRevision::At(first))]).await.unwrap_err();
    assert!(matches!(error, WriteError::Conflict { .. }), "{error:?}");
    client.write_guarded(&guard, &[delete("/a", ExpectedRevision::At(second))]).await?;
    assert_eq!(client.read_guarded(&guard, "/a").await?, None);
    let error =
        client.write_guarded(&guard, &[put("/a", "3", ExpectedRevision::At(second))]).await.unwrap_err();
    assert!(matches!(error, WriteError::Conflict { .. }), "deleted is changed: {error:?}");
    Ok(())
}

#[tokio::test]
async fn former_leader_writes_and_reads_nothing() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let guard = lock(&client).await?;
    let first = client.write_guarded(&guard, &[put("/a", "1", ExpectedRevision::Absent)]).await?;

    client.delete_unguarded(&KeySelector::One(guard.key.clone())).await?;
    for again in [false, true] {
        if again {
            // The same name, elected again.
            assert_ne!(lock(&client).await?, guard);
        }
        for expected in [ExpectedRevision::Any, ExpectedRevision::At(first), ExpectedRevision::Absent] {
            let error = client.write_guarded(&guard, &[put("/a", "2", expected)]).await.unwrap_err();
            assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
        }
        let error = client.write_guarded(&guard, &[delete("/a", ExpectedRevision::Any)]).await.unwrap_err();
        assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
        let error = client.read_guarded(&guard, "/a").await.unwrap_err();
        assert!(matches!(error, WriteError::LostLeadership(_)), "{error:?}");
        assert!(error.to_string().contains("no longer the leader"), "{error}");
    }
    assert_eq!(client.get("/a").await?.context("it is there")?.mod_revision, first);
    Ok(())
}

#[tokio::test]
async fn etcd_that_is_away_is_no_lost_leadership() -> TestResult {
    let mut etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let guard = lock(&client).await?;
    etcd.kill(0)?;
    let error = client.write_guarded(&guard, &[put("/a", "1", ExpectedRevision::Absent)]).await.unwrap_err();
    assert!(matches!(error, WriteError::Etcd(_)), "{error:?}");
    Ok(())
}

#[tokio::test]
async fn tasks_of_one_leader_do_not_undo_one_another() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let guard = lock(&client).await?;
    client.write_guarded(&guard, &[put("/counter", "0", ExpectedRevision::Absent)]).await?;
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (client, guard) = (client.clone(), guard.clone());
        tasks.spawn(async move {
            let (mut done, mut refused) = (0, 0);
            while done < 10 {
                let read = client.read_guarded(&guard, "/counter").await?.context("it is there")?;
                let next = std::str::from_utf8(&read.value)?.parse::<u32>()? + 1;
                let change = put("/counter", &next.to_string(), ExpectedRevision::At(read.mod_revision));
                match client.write_guarded(&guard, &[change]).await {
                    Ok(_) => done += 1,
                    Err(WriteError::Conflict { .. }) => refused += 1,
                    Err(error) => return Err(error.into()),
                }
            }
            anyhow::Ok(refused)
        });
    }
    let mut refused = 0;
    while let Some(task) = tasks.join_next().await {
        refused += task??;
    }
    assert!(refused > 0, "they never met");
    assert_eq!(client.get("/counter").await?.context("it is there")?.value, b"80");
    Ok(())
}
