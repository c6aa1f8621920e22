//! Fixtures of these tests: programs, records of nodes, and objects that only count.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use prost::Message as _;
use shepherd::etcd::client::Client;
use shepherd::etcd::key_space::{NODES, RECONCILER_LEADER, RECONCILER_STATUS};
use shepherd::etcd::namespace::KeySelector;
use shepherd::etcd::record;
use shepherd::model::kubernetes::version::ReleaseVersion;
use shepherd::proto::curator::v1 as wire;
use shepherd::reconciler::leadership::ReconcileTiming;
use shepherd::reconciler::objects::{ObjectReconciler, ReconcileError, ReconcileSummary};
use shepherd::reconciler::program::Program;
use shepherd::reconciler::service::{Reconciler, ReconcilerSettings};
use shepherd::reconciler::status::{ReconcilerState, ReconcilerStatus};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::harness::etcd_servers::{in_time, until};

/// A wait for something that must not happen: long enough for a program that does it. No test passes because of it.
pub(crate) const A_WHILE: Duration = Duration::from_millis(300);

pub(crate) fn release(text: &str) -> Result<ReleaseVersion> {
    Ok(text.parse()?)
}

/// A program of this version that needs objects of the second one, and breaks API servers below the third.
pub(crate) fn program(version: &str, needs: &str, breaks_below: &str) -> Result<Program> {
    Ok(Program {
        version: version.parse()?,
        needs_objects_of: release(needs)?,
        breaks_api_servers_below: release(breaks_below)?,
    })
}

pub(crate) fn status(
    state: ReconcilerState,
    version: &str,
    lowest_compatible: &str,
) -> Result<ReconcilerStatus> {
    Ok(ReconcilerStatus { state, version: version.parse()?, lowest_compatible: release(lowest_compatible)? })
}

/// The record of a node that is a controller or not, and that has reported its version or no status.
pub(crate) fn node_record(id: &str, controller: bool, version: Option<&str>) -> Vec<u8> {
    let status =
        version.map(|version| wire::NodeStatus { version: version.to_owned(), ..Default::default() });
    let node = wire::Node {
        node_id: id.to_owned(),
        roles: Some(wire::NodeRoles { kubernetes_controller: controller, ..Default::default() }),
        status,
        ..Default::default()
    };
    wire::NodeRecord {
        format: record::FORMAT,
        node: Some(node),
        ticket_id: String::new(),
        ..Default::default()
    }
    .encode_to_vec()
}

pub(crate) async fn put_node(
    client: &Client,
    id: &str,
    controller: bool,
    version: Option<&str>,
) -> Result<i64> {
    Ok(client.put_unguarded(&NODES.key(id)?, &node_record(id, controller, version)).await?)
}

pub(crate) async fn delete_node(client: &Client, id: &str) -> Result<i64> {
    Ok(client.delete_unguarded(&KeySelector::One(NODES.key(id)?)).await?)
}

pub(crate) async fn put_status(client: &Client, status: &ReconcilerStatus) -> Result<i64> {
    Ok(client.put_unguarded(RECONCILER_STATUS, &status.encode()).await?)
}

pub(crate) async fn status_in(client: &Client) -> Result<Option<ReconcilerStatus>> {
    let record = client.get(RECONCILER_STATUS).await?;
    Ok(record.map(|record| ReconcilerStatus::decode(&record.value)).transpose()?)
}

pub(crate) async fn until_status(client: &Client, wanted: &ReconcilerStatus) -> Result<()> {
    until("the status is written", async || Ok(status_in(client).await?.as_ref() == Some(wanted))).await
}

/// The keys of the candidates, in the order of their creation.
pub(crate) async fn candidates(client: &Client) -> Result<Vec<String>> {
    let mut listing = client.list(&KeySelector::Prefix(RECONCILER_LEADER.range().start)).await?.records;
    listing.sort_by_key(|record| record.create_revision);
    Ok(listing.into_iter().map(|record| record.key).collect())
}

/// Objects that count how often they are reconciled, and read the status in each pass.
#[derive(Clone)]
pub(crate) struct Counting {
    client: Client,
    shared: Arc<CountingState>,
}

#[derive(Default)]
struct CountingState {
    seen: Mutex<Vec<Option<ReconcilerStatus>>>,
    fails: AtomicUsize,
    held: AtomicBool,
    waiting: AtomicUsize,
    go_on: Notify,
    changed: Notify,
}

impl Counting {
    pub(crate) fn new(client: &Client) -> Self {
        Self { client: client.clone(), shared: Arc::default() }
    }

    /// The reconciler status that each pass found.
    pub(crate) fn passes(&self) -> Vec<Option<ReconcilerStatus>> {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) async fn until_passes(&self, wanted: usize) -> Result<()> {
        until("objects are looked at", async || Ok(self.passes().len() >= wanted)).await
    }

    /// This many passes fail from now on.
    pub(crate) fn fail(&self, times: usize) {
        self.shared.fails.store(times, Ordering::SeqCst);
    }

    /// Blocks passes in the middle.
    pub(crate) fn hold(&self) {
        self.shared.held.store(true, Ordering::SeqCst);
    }

    pub(crate) async fn until_held(&self) -> Result<()> {
        until("a pass is held up", async || Ok(self.shared.waiting.load(Ordering::SeqCst) > 0)).await
    }

    pub(crate) fn let_go(&self) {
        self.shared.held.store(false, Ordering::SeqCst);
        self.shared.go_on.notify_waiters();
    }

    /// Another client changes an object.
    pub(crate) fn change(&self) {
        self.shared.changed.notify_one();
    }
}

/// A reconciler that waits in the middle of a pass. It may be dropped there.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ObjectReconciler for Counting {
    async fn reconcile(&self) -> Result<ReconcileSummary, ReconcileError> {
        let status = status_in(&self.client).await.map_err(|error| ReconcileError(error.to_string()))?;
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner).push(status);
        let go_on = self.shared.go_on.notified();
        if self.shared.held.load(Ordering::SeqCst) {
            self.shared.waiting.fetch_add(1, Ordering::SeqCst);
            let _waiting = Waiting(&self.shared.waiting);
            go_on.await;
        }
        let failing = |left: usize| left.checked_sub(1);
        match self.shared.fails.fetch_update(Ordering::SeqCst, Ordering::SeqCst, failing) {
            Ok(_) => Err(ReconcileError("this pass is to fail".to_owned())),
            Err(_) => Ok(ReconcileSummary::default()),
        }
    }

    async fn wait_for_change(&self) {
        self.shared.changed.notified().await;
    }
}

/// A reconciler that runs until it is stopped or dropped.
pub(crate) struct Running {
    cancel: CancellationToken,
    task: JoinHandle<()>,
    _end: DropGuard,
}

/// Hardly any pause, and no periodic pass.
pub(crate) const PACE: ReconcileTiming =
    ReconcileTiming { settle_time: Duration::from_millis(10), interval: Duration::from_hours(1) };

impl Running {
    pub(crate) fn start(client: &Client, name: &str, program: Program, objects: Counting) -> Self {
        Self::start_at(PACE, client, name, program, objects)
    }

    pub(crate) fn start_at(
        pace: ReconcileTiming,
        client: &Client,
        name: &str,
        program: Program,
        objects: Counting,
    ) -> Self {
        // Much longer than a test: another reconciler leads only if the leader releases its lease.
        let ttl = Duration::from_hours(1);
        let settings =
            ReconcilerSettings { name: name.to_owned(), program, client: client.clone(), ttl, timing: pace };
        let cancel = CancellationToken::new();
        let task = tokio::spawn({
            let cancel = cancel.clone();
            async move { Box::pin(Reconciler::new(settings, objects).run(&cancel)).await }
        });
        Self { _end: cancel.clone().drop_guard(), cancel, task }
    }

    pub(crate) async fn end(self) -> Result<()> {
        self.cancel.cancel();
        in_time("the end of a reconciler", self.task).await?.context("a reconciler panicked")
    }
}
