//! Simulated fleet: state, running servers and agents, durable changes.
//!
//! One lock protects the whole fleet: its stored state, and the running servers and agents. A step of a machine and the
//! effects of that step happen under this lock, with no await in between. So effects come in the order of the steps
//! that caused them. Two hundred machines make a few hundred short steps a second, so one lock is enough.
//!
//! # Durable before answered
//!
//! Every change increases a generation. One task writes the newest state to the file. A handler that must not answer
//! before its change is on disk awaits [`SimulatedFleet::wait_durable`]. Calls that arrive together share one write.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use roleserver::agent::Agent;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::agent;
use crate::faults::ProviderFault;
use crate::journal::Journal;
use crate::machine::{FleetProfile, MachineEvent, StepRejected};
use crate::node::{NodeSettings, random_loopback_address};
use crate::observable::{Effect, NOTHING_OBSERVABLE, ObservableAgent, ObservableSsh};
use crate::port::Port;
use crate::ssh;
use crate::state::{FleetState, MachineRecord};

/// The longest time that the clock task sleeps.
const MAX_CLOCK_SLEEP: Duration = Duration::from_mins(1);

/// All machines, shared by every server and task of the simulator.
pub(crate) struct SimulatedFleet {
    pub(crate) profile: FleetProfile,
    pub(crate) journal: Arc<Journal>,
    /// Settings of cluster nodes; `None` if no machine can be one.
    pub(crate) nodes: Option<NodeSettings>,
    path: PathBuf,
    inner: Mutex<FleetInner>,
    changed: Notify,
    clock_woken: Notify,
    save_progress: watch::Sender<SaveProgress>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

/// The newest generation on disk, or the error of writing it.
#[derive(Clone, Debug, Default)]
struct SaveProgress {
    generation: u64,
    error: Option<String>,
}

struct FleetInner {
    state: FleetState,
    generation: u64,
    runtimes: Vec<MachineRuntime>,
    list_fault: Option<ProviderFault>,
    api_slow: bool,
    api_fails: bool,
}

/// The running parts of one machine.
#[derive(Default)]
struct MachineRuntime {
    port: Option<Port>,
    ssh: CancellationToken,
    agent: AgentTokens,
    heartbeats: HeartbeatCounts,
    /// Cancelled to stop the machine's cluster node.
    node: CancellationToken,
    /// Held by the running cluster node: the next one starts when the previous one has ended.
    disk: Arc<tokio::sync::Mutex<()>>,
}

/// The tokens that silence and stop an agent.
#[derive(Default)]
struct AgentTokens {
    /// Cancelled when the agent falls silent.
    silent: CancellationToken,
    /// Cancelled when the agent and all its connections are gone.
    stopped: CancellationToken,
}

/// Counts of a machine's heartbeats since the simulator started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeartbeatCounts {
    /// Heartbeats that were answered successfully.
    pub(crate) delivered: u64,
    /// Heartbeats that were rejected, cut off, or not answered.
    pub(crate) failed: u64,
    /// The pause that its agent chose after the last failed heartbeat.
    pub(crate) pause: Option<Duration>,
}

/// The present faults of the provider's API.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ApiCondition {
    /// The fault of the list, if any.
    pub(crate) list: Option<ProviderFault>,
    /// Whether every call is slow.
    pub(crate) slow: bool,
    /// Whether every call fails.
    pub(crate) fails: bool,
}

/// The error of a change that could not be written to disk.
#[derive(Debug, thiserror::Error)]
#[error("the simulator could not store what it did: {0}")]
pub(crate) struct NotDurable(String);

impl SimulatedFleet {
    /// Starts a fleet from its stored state. Must be called in a tokio runtime.
    pub(crate) fn start(
        profile: FleetProfile,
        state: FleetState,
        path: PathBuf,
        journal: Arc<Journal>,
        nodes: Option<NodeSettings>,
    ) -> std::io::Result<Arc<Self>> {
        let runtimes = state.machines.iter().map(|_| MachineRuntime::default()).collect();
        let fleet = Arc::new(Self {
            profile,
            journal,
            nodes,
            path,
            inner: Mutex::new(FleetInner {
                state,
                generation: 1,
                runtimes,
                list_fault: None,
                api_slow: false,
                api_fails: false,
            }),
            changed: Notify::new(),
            clock_woken: Notify::new(),
            save_progress: watch::Sender::default(),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        {
            let mut inner = fleet.lock();
            for index in 0..inner.state.machines.len() {
                fleet.reserve_port(&mut inner, index)?;
                if fleet.nodes.is_some() {
                    inner.state.machines[index].node_address.get_or_insert_with(random_loopback_address);
                }
                let effects =
                    inner.state.machines[index].machine.observable().effects_from(NOTHING_OBSERVABLE);
                fleet.apply_effects(&mut inner, index, &effects);
            }
        }
        fleet.tasks.spawn(Arc::clone(&fleet).run_clock());
        fleet.tasks.spawn(Arc::clone(&fleet).run_saver());
        fleet.changed.notify_one();
        Ok(fleet)
    }

    /// Stops every server, agent and task, and writes the last state.
    pub(crate) async fn stop(&self) {
        self.shutdown.cancel();
        {
            let mut inner = self.lock();
            for runtime in &mut inner.runtimes {
                runtime.ssh.cancel();
                runtime.agent.stopped.cancel();
                runtime.node.cancel();
                if let Some(port) = &mut runtime.port {
                    port.close();
                }
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
        self.save().await;
    }

    /// Reads a part of the fleet's state.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&FleetState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Changes the record of one machine, and applies the event that the change returns. If the change or the event is
    /// rejected, nothing has changed.
    pub(crate) fn change<T, E: From<StepRejected>>(
        self: &Arc<Self>,
        index: usize,
        change: impl FnOnce(&mut MachineRecord) -> Result<(T, Option<MachineEvent>), E>,
    ) -> Result<T, E> {
        self.change_chosen(|_| Ok(index), change)
    }

    /// Chooses a machine and changes it under one lock: two callers never choose the same one.
    pub(crate) fn change_chosen<T, E: From<StepRejected>>(
        self: &Arc<Self>,
        choose: impl FnOnce(&FleetState) -> Result<usize, E>,
        change: impl FnOnce(&mut MachineRecord) -> Result<(T, Option<MachineEvent>), E>,
    ) -> Result<T, E> {
        let mut inner = self.lock();
        let index = choose(&inner.state)?;
        let mut record = inner.state.machines[index].clone();
        let (answer, event) = change(&mut record)?;
        let effects = match event {
            Some(event) => record.machine.step(event, host_now(), &self.profile)?,
            None => Vec::new(),
        };
        if let Some(event) = event {
            tracing::info!(machine = %record.id, ?event, state = record.machine.state.as_str(), "stepped");
        }
        let runs = record.machine.state.runs_programs();
        inner.state.machines[index] = record;
        if !runs {
            inner.runtimes[index].node.cancel();
        }
        self.apply_effects(&mut inner, index, &effects);
        self.mark_changed(&mut inner);
        Ok(answer)
    }

    /// Applies an event to one machine.
    pub(crate) fn step(self: &Arc<Self>, index: usize, event: MachineEvent) -> Result<(), StepRejected> {
        self.change(index, |_| Ok(((), Some(event))))
    }

    /// Counts a delivered heartbeat of a machine.
    pub(crate) fn count_delivered(&self, index: usize) {
        self.lock().runtimes[index].heartbeats.delivered += 1;
    }

    /// Counts a failed heartbeat, and stores the pause of its agent.
    pub(crate) fn count_failed(&self, index: usize, pause: Duration) {
        let counts = &mut self.lock().runtimes[index].heartbeats;
        counts.failed += 1;
        counts.pause = Some(pause);
    }

    /// The heartbeat counts of a machine so far.
    pub(crate) fn heartbeat_counts(&self, index: usize) -> HeartbeatCounts {
        self.lock().runtimes[index].heartbeats
    }

    /// Counts an API call. The number decides which fault it meets.
    pub(crate) fn count_api_call(&self) -> u64 {
        let mut inner = self.lock();
        // This needs no write of its own: it is stored with the next change.
        inner.state.api_calls += 1;
        inner.state.api_calls
    }

    /// Applies a fault to the provider's API.
    pub(crate) fn apply_provider_fault(&self, fault: ProviderFault) {
        let mut inner = self.lock();
        match fault {
            ProviderFault::Heal => {
                (inner.list_fault, inner.api_slow, inner.api_fails) = (None, false, false);
            }
            ProviderFault::ApiSlow => inner.api_slow = true,
            ProviderFault::ApiError => inner.api_fails = true,
            fault => inner.list_fault = Some(fault),
        }
    }

    /// The present faults of the provider's API.
    pub(crate) fn api_condition(&self) -> ApiCondition {
        let inner = self.lock();
        ApiCondition { list: inner.list_fault, slow: inner.api_slow, fails: inner.api_fails }
    }

    /// Waits until all changes so far are on disk.
    pub(crate) async fn wait_durable(&self) -> Result<(), NotDurable> {
        let wanted = self.lock().generation;
        let mut saved = self.save_progress.subscribe();
        let saved = saved
            .wait_for(|saved| saved.generation >= wanted)
            .await
            .map_err(|_| NotDurable("it is stopping".to_owned()))?;
        match &saved.error {
            Some(error) => Err(NotDurable(error.clone())),
            None => Ok(()),
        }
    }

    /// Spawns a task that the stop of the fleet waits for.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    fn lock(&self) -> MutexGuard<'_, FleetInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_changed(&self, inner: &mut FleetInner) {
        inner.generation += 1;
        self.changed.notify_one();
        self.clock_woken.notify_one();
    }

    fn apply_effects(self: &Arc<Self>, inner: &mut FleetInner, index: usize, effects: &[Effect]) {
        if self.shutdown.is_cancelled() {
            return;
        }
        for effect in effects {
            match *effect {
                Effect::Ssh(ssh) => self.apply_ssh(inner, index, ssh),
                Effect::Agent(agent) => self.apply_agent(inner, index, agent),
            }
        }
    }

    fn apply_ssh(self: &Arc<Self>, inner: &mut FleetInner, index: usize, observable: ObservableSsh) {
        let FleetInner { state, runtimes, .. } = inner;
        let (record, runtime) = (&state.machines[index], &mut runtimes[index]);
        runtime.ssh.cancel();
        let Some(port) = &mut runtime.port else { return };
        if observable == ObservableSsh::Closed {
            port.close();
            return;
        }
        match port.open() {
            Ok(listener) => {
                let stop = self.shutdown.child_token();
                runtime.ssh = stop.clone();
                self.tasks.spawn(ssh::serve_ssh(Arc::clone(self), index, listener, observable, stop));
            }
            Err(error) => {
                tracing::error!(machine = %record.id, port = record.ssh_port, %error, "cannot open the SSH server");
            }
        }
    }

    fn apply_agent(self: &Arc<Self>, inner: &mut FleetInner, index: usize, observable: ObservableAgent) {
        let FleetInner { state, runtimes, .. } = inner;
        let (record, runtime) = (&state.machines[index], &mut runtimes[index]);
        runtime.agent.silent.cancel();
        if observable == ObservableAgent::Silent {
            return;
        }
        runtime.agent.stopped.cancel();
        if observable == ObservableAgent::Absent {
            return;
        }
        let over = self.shutdown.child_token();
        match agent::build_agent(self, index, record, over.clone()) {
            Ok((agent, node)) => {
                if let Some(node) = node {
                    runtime.node.cancel();
                    runtime.node = self.shutdown.child_token();
                    let (boot, disk) = (agent.clock.boot_id(), runtime.disk.clone());
                    self.tasks.spawn(node.run(boot, disk, runtime.node.clone()));
                }
                runtime.agent = AgentTokens { silent: CancellationToken::new(), stopped: over.clone() };
                self.tasks.spawn(run_agent(agent, runtime.agent.silent.clone(), over));
            }
            Err(error) => tracing::error!(machine = %record.id, %error, "cannot start the agent"),
        }
    }

    /// Reserves the machine's SSH port, or another one if it has none or the port was taken meanwhile.
    #[expect(clippy::unused_self, reason = "reads as a step of starting the fleet")]
    fn reserve_port(&self, inner: &mut FleetInner, index: usize) -> std::io::Result<()> {
        let record = &mut inner.state.machines[index];
        let port = match Port::reserve(record.ssh_port) {
            Ok(port) => port,
            Err(error) => {
                tracing::warn!(machine = %record.id, port = record.ssh_port, %error, "its SSH port was taken; it gets another");
                Port::reserve(0)?
            }
        };
        record.ssh_port = port.number();
        inner.runtimes[index].port = Some(port);
        Ok(())
    }

    /// Steps every machine that is due.
    async fn run_clock(self: Arc<Self>) {
        loop {
            let now = host_now();
            let (due, next) = self.read(|state| {
                let times = state.machines.iter().enumerate();
                let times = times.filter_map(|(index, record)| Some((index, record.machine.next_tick_at()?)));
                let (due, later): (Vec<_>, Vec<_>) = times.partition(|(_, at)| *at <= now);
                (due, later.into_iter().map(|(_, at)| at).min())
            });
            for (index, _) in &due {
                // A tick is never rejected.
                let _ = self.step(*index, MachineEvent::Tick);
            }
            let sleep = next
                .and_then(|at| (at - now).to_std().ok())
                .map_or(MAX_CLOCK_SLEEP, |until| until.min(MAX_CLOCK_SLEEP));
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.clock_woken.notified() => {}
                () = tokio::time::sleep(sleep) => {}
            }
        }
    }

    /// Saves the newest state after each change, until the fleet stops.
    async fn run_saver(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.changed.notified() => self.save().await,
            }
        }
    }

    /// Saves the newest state and notifies those that wait for it.
    async fn save(&self) {
        let (state, generation) = {
            let inner = self.lock();
            (inner.state.clone(), inner.generation)
        };
        let path = self.path.clone();
        let error = match tokio::task::spawn_blocking(move || state.save(&path)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = &error {
            tracing::error!(%error, "the fleet's state is not on disk");
        }
        self.save_progress.send_replace(SaveProgress { generation, error });
    }
}

/// Runs an agent until it falls silent, and keeps its connection open until it is stopped.
async fn run_agent(agent: Agent, silent: CancellationToken, over: CancellationToken) {
    let mut run = std::pin::pin!(agent.run(over.clone()));
    tokio::select! {
        biased;
        () = silent.cancelled() => {}
        () = &mut run => return,
    }
    // It still has its connection, but does not use it any more. HTTP/2 pings are still answered, as they are for a
    // program with one hanging thread.
    over.cancelled().await;
}

/// This host's clock. The simulator is the whole world of its machines, so its clock is the right one here.
#[must_use]
pub(crate) fn host_now() -> DateTime<Utc> {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use chrono::TimeDelta;

    use super::*;
    use crate::faults::{Fault, FaultProfile};
    use crate::seed::Seed;

    /// On one thread, so that no task of the fleet runs between two lines without an await.
    #[tokio::test]
    async fn reported_state_matches_observable_behaviour() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleet.json");
        let journal = Journal::open(&Journal::path_beside(&path)).unwrap();
        let state = FleetState::new(Seed(1), 1, host_now());
        let profile = FleetProfile {
            seed: Seed(1),
            fault_profile: FaultProfile::None,
            boot: TimeDelta::zero(),
            persistent_per_mille: 0,
        };
        let fleet = SimulatedFleet::start(profile, state, path.clone(), journal, None).unwrap();
        let port = fleet.read(|state| state.machines[0].ssh_port);
        let answers = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
        assert!(!answers(), "it is off");
        for _ in 0..3 {
            fleet.step(0, MachineEvent::PowerOn).unwrap();
            assert!(!answers(), "it boots");
            fleet.step(0, MachineEvent::Tick).unwrap();
            assert!(answers(), "it is up");
            fleet.step(0, MachineEvent::Fault(Fault::NewHostKey)).unwrap();
            assert!(answers(), "it is still up");
            fleet.step(0, MachineEvent::Fault(Fault::SshRefuse)).unwrap();
            assert!(!answers(), "its SSH server is stopped");
            fleet.step(0, MachineEvent::Fault(Fault::Heal)).unwrap();
            assert!(answers(), "and starts again");
            fleet.step(0, MachineEvent::PowerOff).unwrap();
            assert!(!answers(), "it is off again");
        }
        fleet.stop().await;
        let kept = FleetState::load(&path).unwrap().unwrap();
        assert_eq!(kept.machines[0].machine.boots, 3, "what was last is kept");
    }
}
