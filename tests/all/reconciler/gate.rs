//! When a controller may begin.

use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::{NODES, RECONCILER_STATUS};
use shepherd::etcd::namespace::Keys;
use shepherd::reconciler::gate::Wait;
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::State;
use shepherd::reconciler::waiting::until_ready;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::kit::{program, put_node, put_status, status};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, in_time, until};

type Told = watch::Receiver<Option<Wait>>;

fn wait(client: &Client, own: &Program) -> anyhow::Result<(JoinHandle<()>, Told)> {
    let (tell, told) = watch::channel(None);
    let (client, own, key) = (client.clone(), own.clone(), NODES.key("own")?);
    Ok((tokio::spawn(async move { until_ready(&client, &own, &key, &tell).await }), told))
}

async fn until_it_waits(told: &Told, what: impl Fn(&Wait) -> bool) -> anyhow::Result<()> {
    until("the controller waits", async || Ok(told.borrow().as_ref().is_some_and(&what))).await
}

#[tokio::test]
async fn controller_begins_once_it_and_the_objects_suit_each_other() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    put_node(&client, "own", true, Some("2.0.0")).await?;
    let (waiting, told) = wait(&client, &own)?;
    until_it_waits(&told, |wait| *wait == Wait::NeverDone).await?;
    put_status(&client, &status(State::Working, "0.0.0", "2.0.0")?).await?;
    until_it_waits(&told, |wait| matches!(wait, Wait::ObjectsTooOld { .. })).await?;
    put_status(&client, &status(State::Working, "10000.0.0", "10000.0.0")?).await?;
    until_it_waits(&told, |wait| matches!(wait, Wait::TooOld { .. })).await?;
    client.delete_unguarded(&Keys::One(RECONCILER_STATUS.to_owned())).await?;
    until_it_waits(&told, |wait| *wait == Wait::NeverDone).await?;
    for garbage in [&b""[..], b"\xff\xff", b"DONE"] {
        client.put_unguarded(RECONCILER_STATUS, garbage).await?;
        until_it_waits(
            &told,
            |wait| matches!(wait, Wait::Unreadable(why) if why.contains(RECONCILER_STATUS)),
        )
        .await?;
    }
    assert!(!waiting.is_finished());
    put_status(&client, &status(State::Working, "10000.0.0", "2.0.0")?).await?;
    in_time("the controller to begin", waiting).await??;
    assert_eq!(*told.borrow(), None);
    Ok(())
}

#[tokio::test]
async fn controller_does_not_begin_before_its_record_says_what_it_is() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "1.0.0")?;
    put_status(&client, &status(State::Done, "2.0.0", "1.0.0")?).await?;
    let (waiting, told) = wait(&client, &own)?;
    let not_recorded = |wait: &Wait| matches!(wait, Wait::NotRecorded { .. });
    until_it_waits(&told, |wait| matches!(wait, Wait::NotRecorded { recorded: None, .. })).await?;
    for (controller, version) in
        [(true, None), (true, Some("3.0.0")), (true, Some("?")), (false, Some("2.0.0"))]
    {
        put_node(&client, "own", controller, version).await?;
        until_it_waits(&told, not_recorded).await?;
        assert!(!waiting.is_finished(), "{controller} {version:?}");
    }
    put_node(&client, "own", true, Some("2.0.0+build")).await?;
    in_time("the controller to begin", waiting).await??;
    Ok(())
}
