//! Waits at the gate until a controller may start.
//!
//! Each change of what it waits for is reported to the part that publishes the node's status. An unreadable status is
//! waited for too, because the repair should not require a restart. It is reported as an error.

use std::convert::Infallible;

use etcd::client::{Client, EtcdError};
use etcd::key_space::RECONCILER_STATUS;
use etcd::key_watcher::KeyWatcher;
use etcd::namespace::KeySelector;
use etcd::retry::RETRY_BACKOFF;
use tokio::sync::watch;

use crate::controller_releases::controller_release;
use crate::gate::{GateWait, check_gate};
use crate::program::Program;
use crate::status::ReconcilerStatus;

/// Waits until the components of this controller may start, and reports each change of what it waits for. `own` is the
/// key of the node's record in etcd. Cancel-safe.
pub async fn wait_until_ready(
    client: &Client,
    program: &Program,
    own: &str,
    sender: &watch::Sender<Option<GateWait>>,
) {
    let follow = |key: &str| {
        KeyWatcher::new(client, KeySelector::One(key.to_owned()), |_: &str, _: &[u8]| Ok::<_, Infallible>(()))
    };
    let (mut record, mut status) = (follow(own), follow(RECONCILER_STATUS));
    let mut failures = 0;
    loop {
        let waits = match evaluate_gate(client, program, own).await {
            Ok(Ok(())) => {
                tracing::info!(release = %program.version, "the controller of Kubernetes may begin");
                sender.send_replace(None);
                return;
            }
            Ok(Err(waits)) => waits,
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, failures, "it could not be decided whether the controller of Kubernetes may start");
                tokio::time::sleep(RETRY_BACKOFF.delay(failures, rand::random())).await;
                continue;
            }
        };
        failures = 0;
        sender.send_if_modified(|last| {
            let changed = last.as_ref() != Some(&waits);
            if changed {
                if matches!(waits, GateWait::StatusUnreadable(_)) {
                    tracing::error!(reason = %waits, "the controller of Kubernetes cannot begin");
                } else {
                    tracing::info!(reason = %waits, "the controller of Kubernetes waits");
                }
                *last = Some(waits);
            }
            changed
        });
        // Whichever of the two changes, both are read again.
        tokio::select! {
            _ = record.next_event() => {}
            _ = status.next_event() => {}
        }
    }
}

/// Checks once. The record is read before the status, which the proof relies on: see [`gate`](crate::gate).
async fn evaluate_gate(
    client: &Client,
    program: &Program,
    own: &str,
) -> Result<Result<(), GateWait>, EtcdError> {
    let recorded = client.get(own).await?.as_ref().and_then(controller_release);
    let status = client.get(RECONCILER_STATUS).await?;
    let status = status.map(|record| ReconcilerStatus::decode(&record.value)).transpose();
    let status = status.as_ref().map(Option::as_ref).map_err(ToString::to_string);
    Ok(check_gate(program, recorded, status))
}
