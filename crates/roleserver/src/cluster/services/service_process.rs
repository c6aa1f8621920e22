//! The running process of a service, with the tasks of it: one waits for its exit, another probes its health.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::task::{AbortHandle, JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::child::launch::ChildRecord;
use crate::cluster::services::desired::{DesiredService, RenderedHealthCheck};
use crate::cluster::services::probe;
use crate::cluster::services::service_runtime::ServiceRuntime;
use crate::cluster::services::service_state::Health;

/// A running process of a service.
pub(super) struct ServiceProcess {
    /// Distinguishes it from earlier and later processes of the same service.
    pub(super) number: u64,
    /// The record of the child.
    pub(super) record: ChildRecord,
    /// The pidfd of the process.
    pub(super) handle: Arc<OwnedFd>,
    /// Ends the task that waits for its exit.
    pub(super) exit_watch: AbortHandle,
    /// The task that probes it; `None` if the service has no health check.
    pub(super) health_check: Option<HealthCheckTask>,
}

impl ServiceProcess {
    /// Whether exactly this check probes the process, or nothing does if there is none.
    pub(super) fn is_probed_by(&self, check: Option<&RenderedHealthCheck>) -> bool {
        self.health_check.as_ref().map(|task| &task.check) == check
    }
}

/// The task that probes a running process.
pub(super) struct HealthCheckTask {
    check: RenderedHealthCheck,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl HealthCheckTask {
    /// Starts to probe a service. `report` gets its health whenever that changes.
    pub(super) fn start(
        runtime: ServiceRuntime,
        service: DesiredService,
        check: RenderedHealthCheck,
        report: impl Fn(Health) + Send + Sync + 'static,
    ) -> Self {
        let stop = CancellationToken::new();
        let probing = probe::watch_health(runtime, service, check.clone(), stop.clone(), report);
        Self { check, stop, task: tokio::spawn(probing) }
    }

    /// Requests the end of the task at once. The result is ready when it has ended, with every process of a probe.
    pub(super) fn end(self) -> impl Future<Output = ()> + Send {
        self.stop.cancel();
        async move {
            let _ = self.task.await;
        }
    }
}
