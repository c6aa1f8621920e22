//! The gate, kept: waits until a controller may begin.
//!
//! What it waits for is told as it changes, to whoever says how the node is. A status that cannot be read is waited for
//! like all else, because whoever repairs it should not have to start anything again; it is told as an error.

use std::convert::Infallible;

use tokio::sync::watch;

use crate::etcd::client::{Client, EtcdError};
use crate::etcd::key_space::RECONCILER_STATUS;
use crate::etcd::namespace::Keys;
use crate::etcd::pause;
use crate::etcd::value::Follower;
use crate::reconciler::gate::{Wait, may_begin};
use crate::reconciler::nodes::controller;
use crate::reconciler::program::Program;
use crate::reconciler::status::Status;

/// Waits until the components of this controller may begin, and says in `told` what for; `own` is the key of the node's
/// record in etcd. Cancel-safe.
pub async fn until_ready(client: &Client, program: &Program, own: &str, told: &watch::Sender<Option<Wait>>) {
    let follow = |key: &str| {
        Follower::new(client, Keys::One(key.to_owned()), |_: &str, _: &[u8]| Ok::<_, Infallible>(()))
    };
    let (mut record, mut status) = (follow(own), follow(RECONCILER_STATUS));
    let mut failures = 0;
    loop {
        let waits = match look(client, program, own).await {
            Ok(Ok(())) => {
                tracing::info!(release = %program.version, "the controller of Kubernetes may begin");
                told.send_replace(None);
                return;
            }
            Ok(Err(waits)) => waits,
            Err(error) => {
                failures += 1;
                tracing::debug!(%error, failures, "it is not known whether the controller of Kubernetes may begin");
                tokio::time::sleep(pause::after_failure(failures, rand::random())).await;
                continue;
            }
        };
        failures = 0;
        told.send_if_modified(|last| {
            let changed = last.as_ref() != Some(&waits);
            if changed {
                if matches!(waits, Wait::Unreadable(_)) {
                    tracing::error!(why = %waits, "the controller of Kubernetes cannot begin");
                } else {
                    tracing::info!(why = %waits, "the controller of Kubernetes waits");
                }
                *last = Some(waits);
            }
            changed
        });
        // Whatever the event is, both are read anew.
        tokio::select! {
            _ = record.next() => {}
            _ = status.next() => {}
        }
    }
}

/// Looks once. The record is read before the status, which the proof relies on: see [`gate`](crate::reconciler::gate).
async fn look(client: &Client, program: &Program, own: &str) -> Result<Result<(), Wait>, EtcdError> {
    let recorded = client.get(own).await?.as_ref().and_then(controller);
    let status = client.get(RECONCILER_STATUS).await?;
    let status = status.map(|record| Status::decode(&record.value)).transpose();
    let status = status.as_ref().map(Option::as_ref).map_err(ToString::to_string);
    Ok(may_begin(program, recorded, status))
}
