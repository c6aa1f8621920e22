//! The service manager: one event loop that re-plans after every event and executes the plan.
//!
//! Each run begins by adopting the services that run on this host, no matter which role server started them. They also
//! continue when a run ends, for whatever reason. Blocking operations that a run began are waited for, so that two runs
//! never work on one service at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use curator_client::clock::Clock;
use proto::curator::v1::ServiceStatus;
use supervisor::context::{Runnable, Scope, Starting};
use supervisor::exit_reason::RunnableError;
use supervisor::watch_cell::WatchCell;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::child::exit::{ChildExit, wait_for_exit};
use crate::child::launch::ChildRecord;
use crate::child::limits::name_limits;
use crate::cluster::services::artefact_store::ArtefactStates;
use crate::cluster::services::desired::{DesiredService, RetainedRoles, ServiceId};
use crate::cluster::services::plan::{PlanInput, ServiceAction, plan_services};
use crate::cluster::services::service_process::{HealthCheckTask, ServiceProcess};
use crate::cluster::services::service_runtime::{FoundService, ServiceRuntime};
use crate::cluster::services::service_state::{
    ExitRecord, Health, Moment, ObservedService, RunRecord, ServiceExit, ServicePhase,
};
use crate::cluster::services::service_stop;
use crate::cluster::services::status::{TransitionTimes, service_conditions};

const LOG_CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// An event that the loop handles.
enum ServiceEvent {
    Started(ServiceId, Result<(Box<ChildRecord>, Arc<OwnedFd>), String>),
    /// The process with this number exited.
    Exited(ServiceId, u64, ChildExit),
    /// The health of the process with this number changed.
    HealthChanged(ServiceId, u64, Health),
    Stopped(ServiceId, Result<(), String>),
    Removed(ServiceId, Result<(), String>),
}

/// Inputs of the service manager.
#[derive(Clone)]
pub struct ServiceManagerInputs {
    /// The services that should run.
    pub desired: WatchCell<BTreeMap<ServiceId, DesiredService>>,
    /// Roles of which services continue although none is desired. A role is here before its services are not desired.
    pub retained: WatchCell<RetainedRoles>,
    /// Artefacts that are available, and why others are not.
    pub artefacts: WatchCell<ArtefactStates>,
}

/// Makes the runnable that starts and stops services until they are as desired, and publishes their status in `status`.
/// `boot_id` decides whether a recorded exit is of this boot.
#[must_use]
pub fn run_service_manager(
    runtime: ServiceRuntime,
    status: WatchCell<Vec<ServiceStatus>>,
    inputs: ServiceManagerInputs,
    clock: Clock,
    boot_id: String,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (runtime, status, clock, boot_id) =
            (runtime.clone(), status.clone(), clock.clone(), boot_id.clone());
        let inputs = inputs.clone();
        async move {
            let found = {
                let runtime = runtime.clone();
                tokio::task::spawn_blocking(move || runtime.find_services()).await??
            };
            let healthy = starting.mark_healthy();
            let mut keeper = ServiceManager::new(runtime, status, clock, boot_id);
            keeper.adopt_services(found);
            let ended = keeper.run(&inputs, healthy.scope()).await;
            keeper.shut_down().await;
            Err(ended)
        }
    })
}

struct ServiceManager {
    runtime: ServiceRuntime,
    status: WatchCell<Vec<ServiceStatus>>,
    clock: Clock,
    boot_id: String,
    desired: Option<BTreeMap<ServiceId, DesiredService>>,
    retained: RetainedRoles,
    observed: BTreeMap<ServiceId, ObservedService>,
    processes: BTreeMap<ServiceId, ServiceProcess>,
    /// Adopted services with limits that have not been compared yet.
    unchecked_limits: BTreeSet<ServiceId>,
    last_number: u64,
    status_times: TransitionTimes,
    artefacts: ArtefactStates,
    sender: mpsc::UnboundedSender<ServiceEvent>,
    events: mpsc::UnboundedReceiver<ServiceEvent>,
    /// Tasks that wait for processes to exit; they can be dropped at any moment.
    exit_watches: JoinSet<()>,
    /// Operations on services, which have to be waited for.
    operations: JoinSet<()>,
    shutdown: CancellationToken,
}

impl ServiceManager {
    fn new(
        runtime: ServiceRuntime,
        status: WatchCell<Vec<ServiceStatus>>,
        clock: Clock,
        boot_id: String,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            runtime,
            status,
            clock,
            boot_id,
            desired: None,
            retained: RetainedRoles::new(),
            observed: BTreeMap::new(),
            processes: BTreeMap::new(),
            unchecked_limits: BTreeSet::new(),
            last_number: 0,
            status_times: TransitionTimes::default(),
            artefacts: ArtefactStates::default(),
            sender,
            events,
            exit_watches: JoinSet::new(),
            operations: JoinSet::new(),
            shutdown: CancellationToken::new(),
        }
    }

    /// Takes over the services that were found on this host.
    fn adopt_services(&mut self, found: Vec<FoundService>) {
        let now = self.now();
        for FoundService { record: note, running } in found {
            let id = note.id.clone();
            let ended = note.ended.clone().filter(|ended| ended.boot_id == self.boot_id);
            let doing = match ended {
                Some(ended) if running.is_none() => ServicePhase::Ended {
                    exit: ended.exit,
                    message: ended.message,
                    at: now,
                    random: rand::random(),
                },
                _ => ServicePhase::Stopped,
            };
            self.observed.insert(id.clone(), ObservedService { record: note, phase: doing, failures: 0 });
            if let Some((record, handle)) = running {
                tracing::info!(service = %id, pid = record.instance.pid, "a service that runs already was adopted");
                self.mark_running(&id, record, Arc::new(handle));
                self.unchecked_limits.insert(id);
            }
        }
    }

    async fn run(&mut self, inputs: &ServiceManagerInputs, scope: &Scope) -> RunnableError {
        let (mut wanted, mut held) = (inputs.desired.watch(), inputs.artefacts.watch());
        let mut retained = inputs.retained.watch();
        let mut log_check = tokio::time::interval(LOG_CHECK_INTERVAL);
        loop {
            // Read after the desired services, and not when its watch wakes: it was set before them.
            self.retained = inputs.retained.latest().unwrap_or_default();
            let look_again = self.execute_plan().await;
            let due = async {
                match look_again {
                    Some(moment) => tokio::time::sleep(moment.saturating_sub(self.clock.monotonic())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                cancelled = scope.cancelled() => return cancelled.into(),
                now = wanted.next() => self.desired = Some(now),
                now = held.next() => self.artefacts = now,
                _ = retained.next() => {}
                Some(event) = self.events.recv() => self.handle_event(event),
                // The results of finished tasks are not needed.
                Some(_) = self.exit_watches.join_next() => {}
                Some(_) = self.operations.join_next() => {}
                _ = log_check.tick() => self.truncate_logs(),
                () = due => {}
            }
        }
    }

    /// Waits for everything that must not overlap with the next run.
    async fn shut_down(&mut self) {
        self.shutdown.cancel();
        let processes = std::mem::take(&mut self.processes);
        for looking in processes.into_values().filter_map(|process| process.health_check) {
            looking.end().await;
        }
        while self.operations.join_next().await.is_some() {}
        self.exit_watches.shutdown().await;
    }

    fn now(&self) -> Moment {
        self.clock.monotonic()
    }

    /// Plans, executes the actions and publishes the status; returns when to plan again.
    async fn execute_plan(&mut self) -> Option<Moment> {
        let plan = plan_services(&self.plan_input());
        for action in plan.actions {
            self.execute_action(action).await;
        }
        self.restore_limits().await;
        self.sync_health_checks();
        self.publish_status();
        plan.next_check
    }

    fn plan_input(&self) -> PlanInput<'_> {
        PlanInput {
            desired: self.desired.as_ref(),
            retained: &self.retained,
            observed: &self.observed,
            artefacts: &self.artefacts.available,
            now: self.now(),
        }
    }

    async fn execute_action(&mut self, action: ServiceAction) {
        tracing::debug!(?action, "a step of the plan");
        match action {
            ServiceAction::Start(id) => self.start_service(&id),
            ServiceAction::Stop(id) => self.stop_service(&id),
            ServiceAction::Adjust(id) => self.adjust_service(&id).await,
            ServiceAction::Remove(id) => {
                let Some(present) = self.observed.get_mut(&id) else { return };
                present.phase = ServicePhase::Removing;
                let (runtime, sender) = (self.runtime.clone(), self.sender.clone());
                self.operations.spawn(async move {
                    let forgotten = service_stop::run_blocking({
                        let id = id.clone();
                        move || runtime.remove_service(&id)
                    });
                    let _ = sender.send(ServiceEvent::Removed(id, forgotten.await));
                });
            }
        }
    }

    fn start_service(&mut self, id: &ServiceId) {
        let Some(wanted) = self.desired.as_ref().and_then(|all| all.get(id)).cloned() else { return };
        let Some(digest) = wanted.digest().map(str::to_owned) else { return };
        let before = self.observed.get(id).map(|present| present.record.clone());
        let again = before.as_ref().filter(|before| before.digest == digest);
        let ended =
            self.observed.get(id).is_some_and(|present| matches!(present.phase, ServicePhase::Ended { .. }));
        let files = match &wanted.rendered {
            Ok((rendered, _)) => rendered.files.iter().map(|file| file.path.clone()).collect(),
            Err(_) => BTreeSet::new(),
        };
        let mut note = before.clone().unwrap_or_else(|| RunRecord::missing(id.clone())).adjusted(&wanted);
        note.restarts = if again.is_some() && ended { note.restarts.saturating_add(1) } else { 0 };
        (note.digest, note.files, note.ended) = (digest, files, None);
        note.started_at_ms = self.clock.now().timestamp_millis();
        let deaths = match self.observed.get(id) {
            Some(present) if again.is_some() => present.failures,
            _ => 0,
        };
        self.observed.insert(
            id.clone(),
            ObservedService { record: note.clone(), phase: ServicePhase::Starting, failures: deaths },
        );
        let (runtime, sender, id) = (self.runtime.clone(), self.sender.clone(), id.clone());
        self.operations.spawn(async move {
            let started =
                service_stop::run_blocking(move || runtime.start_service(&wanted, before.as_ref(), &note));
            let started = started.await.map(|(record, handle)| (Box::new(record), Arc::new(handle)));
            let _ = sender.send(ServiceEvent::Started(id, started));
        });
    }

    async fn adjust_service(&mut self, id: &ServiceId) {
        let wanted = self.desired.as_ref().and_then(|all| all.get(id));
        let Some((wanted, present)) = wanted.zip(self.observed.get(id)) else { return };
        let adjusted = present.record.adjusted(wanted);
        tracing::info!(service = %id, revision = adjusted.revision, "a changed declaration is applied to a running service");
        let (runtime, note, limits) = (self.runtime.clone(), adjusted.clone(), wanted.group_limits());
        // systemd may take seconds for limits, and the only worker thread renews leases. The loop waits, because the
        // change must not overlap with the next operation on the service.
        let applied = service_stop::run_blocking(move || runtime.apply_record(&note, &limits)).await;
        match (applied, self.observed.get_mut(id)) {
            (Ok(()), Some(present)) => present.record = adjusted,
            (Ok(()), None) => {}
            // The service keeps its revision, which its status reports, and the next plan tries again.
            (Err(error), _) => {
                tracing::error!(error, service = %id, "a changed declaration could not be applied to a running service");
            }
        }
    }

    /// Sets limits again that the control groups of adopted services have lost. Each service is compared once, as soon as it
    /// is known which limits it should have. The loop waits, as for a changed declaration.
    async fn restore_limits(&mut self) {
        for id in std::mem::take(&mut self.unchecked_limits) {
            let Some(present) = self.observed.get(&id) else { continue };
            let wanted = self.desired.as_ref().and_then(|all| all.get(&id));
            let Some(wanted) = wanted.filter(|wanted| wanted.digest().is_some()) else {
                self.unchecked_limits.insert(id);
                continue;
            };
            // Its next start sets them.
            if !matches!(present.phase, ServicePhase::Running { .. }) || !present.record.satisfies(wanted) {
                continue;
            }
            let (runtime, limits, name) = (self.runtime.clone(), wanted.group_limits(), id.clone());
            let restored = service_stop::run_blocking(move || runtime.restore_limits(&name, &limits)).await;
            match restored {
                Ok(None) => {}
                Ok(Some(lost)) => {
                    let limits = name_limits(&lost);
                    tracing::warn!(service = %id, limits, "limits that the scope of a service had lost were set again");
                }
                Err(error) => {
                    tracing::error!(error, service = %id, "limits that the scope of a service has lost could not be set again");
                }
            }
        }
    }

    fn stop_service(&mut self, id: &ServiceId) {
        let Some(present) = self.observed.get_mut(id) else { return };
        present.phase = ServicePhase::Stopping;
        let process = self.processes.remove(id);
        let stopping = service_stop::ServiceStop {
            runtime: self.runtime.clone(),
            id: id.clone(),
            timeout: present.record.stop_time(),
            shutdown: self.shutdown.clone(),
        };
        let (sender, id) = (self.sender.clone(), id.clone());
        self.operations.spawn(async move {
            let mut running = None;
            if let Some(process) = process {
                process.exit_watch.abort();
                if let Some(looking) = process.health_check {
                    looking.end().await;
                }
                running = Some((process.record, process.handle));
            }
            if let Some(stopped) = stopping.stop(running).await {
                let _ = sender.send(ServiceEvent::Stopped(id, stopped));
            }
        });
    }

    fn mark_running(&mut self, id: &ServiceId, record: ChildRecord, handle: Arc<OwnedFd>) {
        let since = self.now();
        let Some(present) = self.observed.get_mut(id) else { return };
        present.phase = ServicePhase::Running { since, health: Health::Unknown };
        self.last_number += 1;
        let number = self.last_number;
        let (sender, watched, id_of) = (self.sender.clone(), handle.clone(), id.clone());
        let watching = self.exit_watches.spawn(async move {
            let how = wait_for_exit(&watched).await.unwrap_or_else(|error| {
                tracing::error!(%error, service = %id_of, "a service cannot be watched");
                ChildExit::Unknown
            });
            let _ = sender.send(ServiceEvent::Exited(id_of, number, how));
        });
        self.processes.insert(
            id.clone(),
            ServiceProcess { number, record, handle, exit_watch: watching, health_check: None },
        );
    }

    fn handle_event(&mut self, event: ServiceEvent) {
        let now = self.now();
        match event {
            ServiceEvent::Started(id, Ok((record, handle))) => {
                tracing::info!(service = %id, pid = record.instance.pid, "a service was started");
                self.mark_running(&id, *record, handle);
            }
            ServiceEvent::Started(id, Err(why)) => {
                let Some(present) = self.observed.get_mut(&id) else { return };
                tracing::warn!(service = %id, reason = why, "a service was not started");
                present.record_exit(ServiceExit::NotStarted, why, now, rand::random());
            }
            ServiceEvent::Exited(id, number, ending) => self.handle_exit(&id, number, ending),
            ServiceEvent::HealthChanged(id, number, health) => {
                if self.processes.get(&id).is_some_and(|process| process.number == number)
                    && let Some(ObservedService {
                        phase: ServicePhase::Running { health: known, .. }, ..
                    }) = self.observed.get_mut(&id)
                {
                    tracing::info!(service = %id, ?health, "the health of a service has changed");
                    *known = health;
                }
            }
            ServiceEvent::Stopped(id, stopped) => {
                let Some(present) = self.observed.get_mut(&id) else { return };
                present.failures = 0;
                present.phase = match stopped {
                    Ok(()) => ServicePhase::Stopped,
                    Err(reason) => ServicePhase::Stuck { message: reason, at: now },
                };
            }
            ServiceEvent::Removed(id, Ok(())) => {
                tracing::info!(service = %id, "a service was removed");
                self.observed.remove(&id);
            }
            ServiceEvent::Removed(id, Err(reason)) => {
                tracing::error!(service = %id, reason, "the files of a service could not be removed");
                if let Some(present) = self.observed.get_mut(&id) {
                    present.phase = ServicePhase::Stuck { message: reason, at: now };
                }
            }
        }
    }

    /// Handles the exit of the process with this number. The exit of a stopped process is handled by its stop.
    fn handle_exit(&mut self, id: &ServiceId, number: u64, ending: ChildExit) {
        if self.processes.get(id).is_none_or(|process| process.number != number) {
            return;
        }
        let now = self.now();
        let process = self.processes.remove(id);
        if let Some(looking) = process.and_then(|process| process.health_check) {
            self.operations.spawn(looking.end());
        }
        let Some(present) = self.observed.get_mut(id) else { return };
        let written = self.runtime.output_tail(id);
        let text = if written.is_empty() {
            ending.to_string()
        } else {
            format!("{ending}; it last wrote: {written}")
        };
        tracing::warn!(service = %id, text, "a service ended");
        present.record_exit(ending.into(), text.clone(), now, rand::random());
        // For the next role server of this boot, which must not start a service that stays ended.
        present.record.ended =
            Some(ExitRecord { boot_id: self.boot_id.clone(), exit: ending.into(), message: text });
        if let Err(error) = self.runtime.write_record(&present.record) {
            tracing::warn!(%error, "the exit of a service could not be recorded");
        }
    }

    /// Probes exactly the running services that have a health check.
    fn sync_health_checks(&mut self) {
        for (id, process) in &mut self.processes {
            let Some(present) = self.observed.get_mut(id) else { continue };
            let wanted = self.desired.as_ref().and_then(|all| all.get(id));
            let wanted = wanted.filter(|wanted| present.record.satisfies(wanted));
            let check = wanted.and_then(|wanted| wanted.check.as_ref());
            if process.is_probed_by(check) {
                continue;
            }
            if let Some(looking) = process.health_check.take() {
                self.operations.spawn(looking.end());
                if let ServicePhase::Running { health, .. } = &mut present.phase {
                    *health = Health::Unknown;
                }
            }
            let Some((wanted, check)) = wanted.zip(check) else { continue };
            let (sender, of, number) = (self.sender.clone(), id.clone(), process.number);
            let report =
                move |health| drop(sender.send(ServiceEvent::HealthChanged(of.clone(), number, health)));
            let task = HealthCheckTask::start(self.runtime.clone(), wanted.clone(), check.clone(), report);
            process.health_check = Some(task);
        }
    }

    fn publish_status(&mut self) {
        let tellings = service_conditions(&self.plan_input(), &self.artefacts.messages);
        let began = |id: &ServiceId| self.observed.get(id).map(|present| present.record.started_at_ms);
        let now = self.clock.now().timestamp_millis();
        let status = self.status_times.wire_statuses(&tellings, began, now);
        if self.status.latest().as_ref() != Some(&status) {
            self.status.set(status);
        }
    }

    fn truncate_logs(&mut self) {
        let (runtime, ids) = (self.runtime.clone(), self.processes.keys().cloned().collect::<Vec<_>>());
        self.operations.spawn_blocking(move || ids.iter().for_each(|id| runtime.truncate_logs(id)));
    }
}
