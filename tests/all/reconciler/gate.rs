//! When a controller may start.

use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::{NODES, RECONCILER_STATUS};
use shepherd::etcd::namespace::KeySelector;
use shepherd::reconciler::gate::GateWait;
use shepherd::reconciler::gate_wait::wait_until_ready;
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::ReconcilerState;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::kit::{program, put_node, put_status, status};
use crate::harness::aloud::TestResult;
use crate::harness::etcd_servers::{Cluster, in_time, until};

type GateWaitReceiver = watch::Receiver<Option<GateWait>>;

fn wait(client: &Client, own: &Program) -> anyhow::Result<(JoinHandle<()>, GateWaitReceiver)> {
    let (tell, receiver) = watch::channel(None);
    let (client, own, key) = (client.clone(), own.clone(), NODES.key("own")?);
    Ok((tokio::spawn(async move { wait_until_ready(&client, &own, &key, &tell).await }), receiver))
}

async fn until_it_waits(receiver: &GateWaitReceiver, what: impl Fn(&GateWait) -> bool) -> anyhow::Result<()> {
    until("the controller waits", async || Ok(receiver.borrow().as_ref().is_some_and(&what))).await
}

#[tokio::test]
async fn controller_begins_once_it_and_the_objects_suit_each_other() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "2.0.0")?;
    put_node(&client, "own", true, Some("2.0.0")).await?;
    let (waiting, receiver) = wait(&client, &own)?;
    until_it_waits(&receiver, |wait| *wait == GateWait::NeverReconciled).await?;
    put_status(&client, &status(ReconcilerState::Working, "0.0.0", "2.0.0")?).await?;
    until_it_waits(&receiver, |wait| matches!(wait, GateWait::ObjectsTooOld { .. })).await?;
    put_status(&client, &status(ReconcilerState::Working, "10000.0.0", "10000.0.0")?).await?;
    until_it_waits(&receiver, |wait| matches!(wait, GateWait::ReleaseTooOld { .. })).await?;
    client.delete_unguarded(&KeySelector::One(RECONCILER_STATUS.to_owned())).await?;
    until_it_waits(&receiver, |wait| *wait == GateWait::NeverReconciled).await?;
    for garbage in [&b""[..], b"\xff\xff", b"DONE"] {
        client.put_unguarded(RECONCILER_STATUS, garbage).await?;
        until_it_waits(
            &receiver,
            |wait| matches!(wait, GateWait::StatusUnreadable(why) if why.contains(RECONCILER_STATUS)),
        )
        .await?;
    }
    assert!(!waiting.is_finished());
    put_status(&client, &status(ReconcilerState::Working, "10000.0.0", "2.0.0")?).await?;
    in_time("the controller to begin", waiting).await??;
    assert_eq!(*receiver.borrow(), None);
    Ok(())
}

#[tokio::test]
async fn controller_does_not_begin_before_its_record_says_what_it_is() -> TestResult {
    let etcd = Cluster::start(1).await?;
    let client = etcd.client();
    let own = program("2.0.0", "1.0.0", "1.0.0")?;
    put_status(&client, &status(ReconcilerState::Done, "2.0.0", "1.0.0")?).await?;
    let (waiting, receiver) = wait(&client, &own)?;
    let not_recorded = |wait: &GateWait| matches!(wait, GateWait::NotRecorded { .. });
    until_it_waits(&receiver, |wait| matches!(wait, GateWait::NotRecorded { recorded: None, .. })).await?;
    for (controller, version) in
        [(true, None), (true, Some("3.0.0")), (true, Some("?")), (false, Some("2.0.0"))]
    {
        put_node(&client, "own", controller, version).await?;
        until_it_waits(&receiver, not_recorded).await?;
        assert!(!waiting.is_finished(), "{controller} {version:?}");
    }
    put_node(&client, "own", true, Some("2.0.0+build")).await?;
    in_time("the controller to begin", waiting).await??;
    Ok(())
}
