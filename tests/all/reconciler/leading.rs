//! Which reconciler leads, and what can happen in between.

use std::time::Duration;

use shepherd::etcd::guard::{ExpectedRevision, LeaderGuard, WriteError};
use shepherd::etcd::key_space::{NODES, RECONCILER_STATUS};
use shepherd::etcd::namespace::KeySelector;
use shepherd::reconciler::leadership::{LeaderStep, Leadership, ReconcileTiming, StatusWrite, StoredStatus};
use shepherd::reconciler::service::{read_releases, write_status};
use shepherd::reconciler::status::{ReconcilerState, ReconcilerStatus};

use super::kit::{
    A_WHILE, Counting, PACE, Running, candidates, delete_node, program, put_node, put_status, status,
    status_in, until_status,
};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, until};

/// The scenario of the original: a newer node, one that is too old, and two of the same release.
#[tokio::test]
async fn newest_reconciles_once_nothing_too_old_is_left_and_hands_over_at_once() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let done = ReconcilerStatus::completed_by(&own);
    put_node(&client, "newer", true, Some("10000.0.0")).await?;
    put_status(&client, &status(ReconcilerState::Done, "0.0.2", "0.0.2")?).await?;
    let objects = Counting::new(&client);
    let first = Running::start(&client, "first", own.clone(), objects.clone());
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(candidates(&client).await?, Vec::<String>::new(), "a newer one is there");

    put_node(&client, "newer", true, Some("0.0.2")).await?;
    until("it stands", async || Ok(candidates(&client).await?.len() == 1)).await?;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(objects.passes(), [], "an API server is too old for the objects");
    put_node(&client, "newer", true, Some("2.0.0")).await?;
    until_status(&client, &done).await?;
    assert_eq!(objects.passes(), [Some(status(ReconcilerState::Working, "0.0.2", "2.0.0")?)]);

    // No release that is too old for the objects can be serving: the status excludes it.
    put_status(&client, &status(ReconcilerState::Done, "0.0.2", "10000.0.0")?).await?;
    put_node(&client, "old", true, Some("0.0.2")).await?;
    let others = Counting::new(&client);
    let second = Running::start(&client, "second", own.clone(), others.clone());
    until("both stand", async || Ok(candidates(&client).await?.len() == 2)).await?;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(others.passes(), [], "the first still leads");
    first.end().await?;
    until_status(&client, &done).await?;
    assert_eq!(others.passes(), [Some(status(ReconcilerState::Working, "0.0.2", "10000.0.0")?)]);
    assert_eq!(objects.passes().len(), 1);

    // A newer release ends the leadership.
    put_node(&client, "newer", true, Some("2.0.1")).await?;
    until("nobody stands", async || Ok(candidates(&client).await?.is_empty())).await?;
    second.end().await?;
    Ok(())
}

#[tokio::test]
async fn former_leader_writes_no_status_whichever_it_is() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let at = put_status(&client, &status(ReconcilerState::Done, "1.0.0", "1.0.0")?).await?;
    let create_revision = client.put_unguarded("/leader/1", b"").await?;
    let guard = LeaderGuard { key: "/leader/1".to_owned(), create_revision };
    client.delete_unguarded(&KeySelector::One(guard.key.clone())).await?;
    let nodes = read_releases(&client, &own).await?.revision;
    for (status, expected, nodes_since) in [
        (status(ReconcilerState::Working, "1.0.0", "1.0.0")?, ExpectedRevision::At(at), None),
        (status(ReconcilerState::Working, "1.0.0", "2.0.0")?, ExpectedRevision::At(at), Some(nodes)),
        (ReconcilerStatus::completed_by(&own), ExpectedRevision::At(at), None),
        (ReconcilerStatus::completed_by(&own), ExpectedRevision::Absent, None),
    ] {
        let write = StatusWrite { status, expected, nodes_unchanged_since: nodes_since };
        let error = write_status(&client, &guard, &write).await.unwrap_err();
        assert!(matches!(error, WriteError::LostLeadership(_)), "{write:?}: {error:?}");
    }
    assert_eq!(client.get(RECONCILER_STATUS).await?.unwrap().mod_revision, at);
    Ok(())
}

/// From the read of the nodes to the write, by the steps of a leadership. The test acts in between.
#[tokio::test]
async fn node_that_changes_between_the_look_and_the_write_undoes_the_proof() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let before = status(ReconcilerState::Done, "1.0.0", "1.0.0")?;
    put_node(&client, "own", true, Some("2.0.0")).await?;
    let revision = put_status(&client, &before).await?;
    let create_revision = client.put_unguarded("/leader/1", b"").await?;
    let guard = LeaderGuard { key: "/leader/1".to_owned(), create_revision };
    let excluding = async || {
        let mut leadership = Leadership::new(own.clone(), ReconcileTiming::default());
        let now = Duration::ZERO;
        leadership.on_status_read(now, Ok::<_, ()>(Some(StoredStatus { status: before.clone(), revision })));
        assert_eq!(leadership.next_step(now), LeaderStep::ReadReleases);
        leadership.on_releases_read(now, &read_releases(&client, &own).await?);
        match leadership.next_step(now) {
            LeaderStep::WriteStatus(write) => anyhow::Ok(write),
            other => anyhow::bail!("{other:?}"),
        }
    };
    for (id, version) in [("new", Some("1.0.0")), ("own", Some("1.0.0")), ("silent", None)] {
        let write = excluding().await?;
        put_node(&client, id, true, version).await?;
        let error = write_status(&client, &guard, &write).await.unwrap_err();
        let nodes = NODES.to_string();
        assert!(
            matches!(&error, WriteError::Conflict { keys: changed, .. } if changed == std::slice::from_ref(&nodes)),
            "{id}: {error:?}"
        );
        assert_eq!(status_in(&client).await?, Some(before.clone()));
        put_node(&client, id, id == "own", Some("2.0.0")).await?;
    }
    // A node that was read and leaves is no reason to read again.
    let write = excluding().await?;
    delete_node(&client, "new").await?;
    put_status(&client, &before).await?;
    let error = write_status(&client, &guard, &write).await.unwrap_err();
    assert!(
        matches!(&error, WriteError::Conflict { keys: changed, .. } if changed == &[RECONCILER_STATUS.to_owned()]),
        "{error:?}"
    );
    let at = client.get(RECONCILER_STATUS).await?.unwrap().mod_revision;
    let again = StatusWrite { expected: ExpectedRevision::At(at), ..write };
    write_status(&client, &guard, &again).await?;
    assert_eq!(status_in(&client).await?, Some(again.status));
    Ok(())
}

#[tokio::test]
async fn status_that_nobody_can_read_holds_everything_up_and_one_that_was_deleted_does_not() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let done = ReconcilerStatus::completed_by(&own);
    client.put_unguarded(RECONCILER_STATUS, b"\xff\xff").await?;
    let objects = Counting::new(&client);
    let running = Running::start(&client, "own", own.clone(), objects.clone());
    until("it stands", async || Ok(candidates(&client).await?.len() == 1)).await?;
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(objects.passes(), [], "what it excludes is not known");
    assert_eq!(client.get(RECONCILER_STATUS).await?.unwrap().value, b"\xff\xff");
    client.delete_unguarded(&KeySelector::One(RECONCILER_STATUS.to_owned())).await?;
    until_status(&client, &done).await?;
    assert_eq!(objects.passes(), [None]);

    // And while it has nothing to do.
    client.delete_unguarded(&KeySelector::One(RECONCILER_STATUS.to_owned())).await?;
    objects.change();
    until_status(&client, &done).await?;
    assert_eq!(objects.passes(), [None, None]);
    running.end().await?;
    Ok(())
}

#[tokio::test]
async fn node_that_may_be_any_release_is_in_the_way_until_somebody_sees_to_it() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    for (torn, value) in [(true, &b"\xff\xff"[..]), (false, b"")] {
        put_status(&client, &status(ReconcilerState::Done, "1.0.0", "1.0.0")?).await?;
        if torn {
            client.put_unguarded(&NODES.key("odd")?, value).await?;
        } else {
            put_node(&client, "odd", true, None).await?;
        }
        let objects = Counting::new(&client);
        let running = Running::start(&client, "own", own.clone(), objects.clone());
        tokio::time::sleep(A_WHILE).await;
        assert_eq!(candidates(&client).await?, Vec::<String>::new(), "it may be newer");
        assert_eq!(objects.passes(), [], "it may be older");
        put_node(&client, "odd", true, Some("2.0.0")).await?;
        until_status(&client, &ReconcilerStatus::completed_by(&own)).await?;
        running.end().await?;
    }
    Ok(())
}

#[tokio::test]
async fn lease_that_is_lost_in_the_middle_of_a_pass_ends_it() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    put_status(&client, &status(ReconcilerState::Done, "1.0.0", "2.0.0")?).await?;
    let objects = Counting::new(&client);
    objects.hold();
    let running = Running::start(&client, "own", own.clone(), objects.clone());
    objects.until_held().await?;
    let lock = candidates(&client).await?;
    // As if its lease had expired, and another leader had begun to work.
    let others = status(ReconcilerState::Working, "1.5.0", "2.0.0")?;
    put_status(&client, &others).await?;
    client.delete_unguarded(&KeySelector::One(lock[0].clone())).await?;
    objects.until_passes(2).await?;
    assert_ne!(candidates(&client).await?, lock, "another election");
    assert_eq!(objects.passes()[1], Some(others), "it goes on from what it finds");
    objects.let_go();
    until_status(&client, &ReconcilerStatus::completed_by(&own)).await?;
    running.end().await?;
    assert_eq!(candidates(&client).await?, Vec::<String>::new(), "its lease was given back");
    Ok(())
}

#[tokio::test]
async fn requests_of_the_former_leader_are_given_their_time() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let never = ReconcileTiming { settle_time: Duration::from_hours(1), ..PACE };
    for (before, during) in [
        (
            status(ReconcilerState::Done, "1.0.0", "2.0.0")?,
            status(ReconcilerState::Working, "1.0.0", "2.0.0")?,
        ),
        (
            status(ReconcilerState::Working, "1.0.0", "1.0.0")?,
            status(ReconcilerState::Working, "1.0.0", "2.0.0")?,
        ),
        (ReconcilerStatus::completed_by(&own), ReconcilerStatus::completed_by(&own)),
    ] {
        put_status(&client, &before).await?;
        let objects = Counting::new(&client);
        let running = Running::start_at(never, &client, "own", own.clone(), objects.clone());
        until("it stands", async || Ok(candidates(&client).await?.len() == 1)).await?;
        let begun = async || Ok(before == during || status_in(&client).await?.as_ref() != Some(&before));
        until("the status is what it must be while it waits", begun).await?;
        tokio::time::sleep(A_WHILE).await;
        assert_eq!(objects.passes(), [], "{before:?}");
        assert_eq!(status_in(&client).await?, Some(during));
        running.end().await?;
    }
    // If no reconciler led before, there is nothing to wait for.
    client.delete_unguarded(&KeySelector::One(RECONCILER_STATUS.to_owned())).await?;
    let objects = Counting::new(&client);
    let running = Running::start_at(never, &client, "own", own.clone(), objects.clone());
    until_status(&client, &ReconcilerStatus::completed_by(&own)).await?;
    assert_eq!(objects.passes(), [None]);
    running.end().await?;
    Ok(())
}

#[tokio::test]
async fn passes_are_repeated_until_one_succeeds_and_when_objects_were_changed() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    let done = ReconcilerStatus::completed_by(&own);
    let objects = Counting::new(&client);
    objects.fail(3);
    let running = Running::start(&client, "own", own.clone(), objects.clone());
    until_status(&client, &done).await?;
    assert_eq!(objects.passes(), [None, None, None, None], "no status before a pass has succeeded");
    for passes in 5..8 {
        objects.change();
        objects.until_passes(passes).await?;
        assert_eq!(objects.passes()[passes - 1], Some(done.clone()));
    }
    running.end().await?;

    let often = ReconcileTiming { interval: Duration::from_millis(20), ..PACE };
    let objects = Counting::new(&client);
    let running = Running::start_at(often, &client, "own", own, objects.clone());
    objects.until_passes(5).await?;
    running.end().await?;
    Ok(())
}
