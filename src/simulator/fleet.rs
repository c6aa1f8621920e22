//! All machines of one simulator, and what they show to the world.
//!
//! One lock holds the whole fleet: its kept state and the running servers and
//! agents. A step of a machine and the effects of that step happen under it, so
//! effects come in the order of the steps that caused them, and no await happens
//! in between. Two hundred machines make a few hundred short steps a second.
//!
//! # Durable before told
//!
//! Every change raises a generation. One task writes the newest state to the
//! file; whoever must not answer before his change is on disk awaits
//! [`Fleet::durable`]. Calls that come together share one write.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::roleserver::agent::Agent;
use crate::simulator::agent;
use crate::simulator::face::{AgentFace, Effect, NOTHING, SshFace};
use crate::simulator::faults::ProviderFault;
use crate::simulator::journal::Journal;
use crate::simulator::machine::{Event, Nature, Refusal};
use crate::simulator::node::{Nodes, draw_address};
use crate::simulator::port::Port;
use crate::simulator::ssh;
use crate::simulator::state::{FleetState, Record};

/// The longest the clockwork sleeps.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// All machines, shared by every server and task of the simulator.
pub struct Fleet {
    /// What the machines have in common.
    pub nature: Nature,
    /// Where calls are written down.
    pub journal: Arc<Journal>,
    /// What nodes of clusters need; without it no machine can be one.
    pub nodes: Option<Nodes>,
    path: PathBuf,
    inner: Mutex<Inner>,
    changed: Notify,
    woken: Notify,
    saved: watch::Sender<Saved>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

/// How far writing has come.
#[derive(Clone, Debug, Default)]
struct Saved {
    generation: u64,
    error: Option<String>,
}

struct Inner {
    state: FleetState,
    generation: u64,
    shown: Vec<Shown>,
    list_fault: Option<ProviderFault>,
    api_slow: bool,
    api_fails: bool,
}

/// What runs of one machine.
#[derive(Default)]
struct Shown {
    port: Option<Port>,
    ssh: CancellationToken,
    agent: Life,
    heard: Heard,
    /// What runs as a node of a cluster.
    node: CancellationToken,
    /// Held by whatever runs as a node: the next one begins when the one before has ended.
    disk: Arc<tokio::sync::Mutex<()>>,
}

/// How far an agent has come.
#[derive(Default)]
struct Life {
    /// It says no more.
    silent: CancellationToken,
    /// It is gone, with everything it had open.
    over: CancellationToken,
}

/// How the heartbeats of a machine fared since the simulator started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    /// Answered.
    pub delivered: u64,
    /// Refused, cut off, or without an answer.
    pub failed: u64,
    /// The pause that its agent chose after the last of those.
    pub pause: Option<Duration>,
}

/// Faults of the provider's API that hold now.
#[derive(Clone, Copy, Debug)]
pub struct ApiCondition {
    /// What is wrong with the list.
    pub list: Option<ProviderFault>,
    /// Whether every call is slow.
    pub slow: bool,
    /// Whether every call fails.
    pub fails: bool,
}

/// A change could not be put on disk.
#[derive(Debug, thiserror::Error)]
#[error("the simulator could not keep what it did: {0}")]
pub struct NotKept(String);

impl Fleet {
    /// Brings a fleet to life as it was kept. Must be called in a tokio runtime.
    pub fn start(
        nature: Nature,
        state: FleetState,
        path: PathBuf,
        journal: Arc<Journal>,
        nodes: Option<Nodes>,
    ) -> std::io::Result<Arc<Self>> {
        let shown = state.machines.iter().map(|_| Shown::default()).collect();
        let fleet = Arc::new(Self {
            nature,
            journal,
            nodes,
            path,
            inner: Mutex::new(Inner {
                state,
                generation: 1,
                shown,
                list_fault: None,
                api_slow: false,
                api_fails: false,
            }),
            changed: Notify::new(),
            woken: Notify::new(),
            saved: watch::Sender::default(),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        {
            let mut inner = fleet.lock();
            for index in 0..inner.state.machines.len() {
                fleet.reserve_port(&mut inner, index)?;
                if fleet.nodes.is_some() {
                    inner.state.machines[index].node_address.get_or_insert_with(draw_address);
                }
                let effects = inner.state.machines[index].machine.face().since(NOTHING);
                fleet.carry_out(&mut inner, index, &effects);
            }
        }
        fleet.tasks.spawn(Arc::clone(&fleet).clockwork());
        fleet.tasks.spawn(Arc::clone(&fleet).keep());
        fleet.changed.notify_one();
        Ok(fleet)
    }

    /// Ends every server, agent and task, and writes the last state.
    pub async fn stop(&self) {
        self.shutdown.cancel();
        {
            let mut inner = self.lock();
            for shown in &mut inner.shown {
                shown.ssh.cancel();
                shown.agent.over.cancel();
                shown.node.cancel();
                if let Some(port) = &mut shown.port {
                    port.close();
                }
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
        self.save().await;
    }

    /// Reads something of the fleet.
    pub fn read<T>(&self, read: impl FnOnce(&FleetState) -> T) -> T {
        read(&self.lock().state)
    }

    /// Changes what is kept of one machine, and lets `event` happen to it if the change returns one.
    /// When the change or the event is refused, nothing changed.
    pub fn change<T, E: From<Refusal>>(
        self: &Arc<Self>,
        index: usize,
        change: impl FnOnce(&mut Record) -> Result<(T, Option<Event>), E>,
    ) -> Result<T, E> {
        self.change_chosen(|_| Ok(index), change)
    }

    /// Chooses a machine and changes it, with nothing in between: two callers never get one choice.
    pub fn change_chosen<T, E: From<Refusal>>(
        self: &Arc<Self>,
        choose: impl FnOnce(&FleetState) -> Result<usize, E>,
        change: impl FnOnce(&mut Record) -> Result<(T, Option<Event>), E>,
    ) -> Result<T, E> {
        let mut inner = self.lock();
        let index = choose(&inner.state)?;
        let mut record = inner.state.machines[index].clone();
        let (answer, event) = change(&mut record)?;
        let effects = match event {
            Some(event) => record.machine.step(event, host_now(), &self.nature)?,
            None => Vec::new(),
        };
        if let Some(event) = event {
            tracing::info!(machine = %record.id, ?event, state = record.machine.state.as_str(), "stepped");
        }
        let runs = record.machine.state.runs_programs();
        inner.state.machines[index] = record;
        if !runs {
            inner.shown[index].node.cancel();
        }
        self.carry_out(&mut inner, index, &effects);
        self.touched(&mut inner);
        Ok(answer)
    }

    /// Lets something happen to one machine.
    pub fn step(self: &Arc<Self>, index: usize, event: Event) -> Result<(), Refusal> {
        self.change(index, |_| Ok(((), Some(event))))
    }

    /// Counts a heartbeat of a machine.
    pub fn count_delivered(&self, index: usize) {
        self.lock().shown[index].heard.delivered += 1;
    }

    /// Counts a heartbeat that failed, and remembers how long its agent now waits.
    pub fn count_failed(&self, index: usize, pause: Duration) {
        let heard = &mut self.lock().shown[index].heard;
        heard.failed += 1;
        heard.pause = Some(pause);
    }

    /// How the heartbeats of a machine fared so far.
    pub fn heard(&self, index: usize) -> Heard {
        self.lock().shown[index].heard
    }

    /// Counts an API call; the number decides what befalls it.
    pub fn count_api_call(&self) -> u64 {
        let mut inner = self.lock();
        // Not worth a write of its own: it is kept with the next change.
        inner.state.api_calls += 1;
        inner.state.api_calls
    }

    /// Strikes the provider's API.
    pub fn strike_provider(&self, fault: ProviderFault) {
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

    /// What is wrong with the provider's API now.
    pub fn api_condition(&self) -> ApiCondition {
        let inner = self.lock();
        ApiCondition { list: inner.list_fault, slow: inner.api_slow, fails: inner.api_fails }
    }

    /// Waits until everything changed so far is on disk.
    pub async fn durable(&self) -> Result<(), NotKept> {
        let wanted = self.lock().generation;
        let mut saved = self.saved.subscribe();
        let saved = saved
            .wait_for(|saved| saved.generation >= wanted)
            .await
            .map_err(|_| NotKept("it is stopping".to_owned()))?;
        match &saved.error {
            Some(error) => Err(NotKept(error.clone())),
            None => Ok(()),
        }
    }

    /// Runs a task that the end of the fleet waits for.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touched(&self, inner: &mut Inner) {
        inner.generation += 1;
        self.changed.notify_one();
        self.woken.notify_one();
    }

    fn carry_out(self: &Arc<Self>, inner: &mut Inner, index: usize, effects: &[Effect]) {
        if self.shutdown.is_cancelled() {
            return;
        }
        for effect in effects {
            match *effect {
                Effect::Ssh(face) => self.show_ssh(inner, index, face),
                Effect::Agent(face) => self.show_agent(inner, index, face),
            }
        }
    }

    fn show_ssh(self: &Arc<Self>, inner: &mut Inner, index: usize, face: SshFace) {
        let Inner { state, shown, .. } = inner;
        let (record, shown) = (&state.machines[index], &mut shown[index]);
        shown.ssh.cancel();
        let Some(port) = &mut shown.port else { return };
        if face == SshFace::Closed {
            port.close();
            return;
        }
        match port.open() {
            Ok(listener) => {
                let stop = self.shutdown.child_token();
                shown.ssh = stop.clone();
                self.tasks.spawn(ssh::serve(Arc::clone(self), index, listener, face, stop));
            }
            Err(error) => {
                tracing::error!(machine = %record.id, port = record.ssh_port, %error, "cannot open the SSH server");
            }
        }
    }

    fn show_agent(self: &Arc<Self>, inner: &mut Inner, index: usize, face: AgentFace) {
        let Inner { state, shown, .. } = inner;
        let (record, shown) = (&state.machines[index], &mut shown[index]);
        shown.agent.silent.cancel();
        if face == AgentFace::Silent {
            return;
        }
        shown.agent.over.cancel();
        if face == AgentFace::Absent {
            return;
        }
        let over = self.shutdown.child_token();
        match agent::build(self, index, record, over.clone()) {
            Ok((agent, node)) => {
                if let Some(node) = node {
                    shown.node.cancel();
                    shown.node = self.shutdown.child_token();
                    let (boot, disk) = (agent.clock.boot_id(), shown.disk.clone());
                    self.tasks.spawn(node.run(boot, disk, shown.node.clone()));
                }
                shown.agent = Life { silent: CancellationToken::new(), over: over.clone() };
                self.tasks.spawn(live(agent, shown.agent.silent.clone(), over));
            }
            Err(error) => tracing::error!(machine = %record.id, %error, "cannot start the agent"),
        }
    }

    /// Takes the machine's SSH port, or another where it has none or somebody took it meanwhile.
    #[expect(clippy::unused_self, reason = "reads as a step of starting the fleet")]
    fn reserve_port(&self, inner: &mut Inner, index: usize) -> std::io::Result<()> {
        let record = &mut inner.state.machines[index];
        let port = match Port::take(record.ssh_port) {
            Ok(port) => port,
            Err(error) => {
                tracing::warn!(machine = %record.id, port = record.ssh_port, %error, "its SSH port was taken; it gets another");
                Port::take(0)?
            }
        };
        record.ssh_port = port.number();
        inner.shown[index].port = Some(port);
        Ok(())
    }

    /// Steps every machine whose time has come.
    async fn clockwork(self: Arc<Self>) {
        loop {
            let now = host_now();
            let (due, next) = self.read(|state| {
                let times = state.machines.iter().enumerate();
                let times = times.filter_map(|(index, record)| Some((index, record.machine.wakes_at()?)));
                let (due, later): (Vec<_>, Vec<_>) = times.partition(|(_, at)| *at <= now);
                (due, later.into_iter().map(|(_, at)| at).min())
            });
            for (index, _) in &due {
                // A tick is never refused.
                let _ = self.step(*index, Event::Tick);
            }
            let sleep = next
                .and_then(|at| (at - now).to_std().ok())
                .map_or(LONGEST_SLEEP, |until| until.min(LONGEST_SLEEP));
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.woken.notified() => {}
                () = tokio::time::sleep(sleep) => {}
            }
        }
    }

    /// Puts the newest state on disk, again and again until the end.
    async fn keep(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.shutdown.cancelled() => return,
                () = self.changed.notified() => self.save().await,
            }
        }
    }

    /// Puts the newest state on disk and tells those who wait for it.
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
        self.saved.send_replace(Saved { generation, error });
    }
}

/// Runs an agent until it falls silent, and keeps it until it is gone.
async fn live(agent: Agent, silent: CancellationToken, over: CancellationToken) {
    let mut run = std::pin::pin!(agent.run(over.clone()));
    tokio::select! {
        biased;
        () = silent.cancelled() => {}
        () = &mut run => return,
    }
    // Still there with its connection, which it does not use any more. (HTTP/2 pings are answered for
    // it, as they are for a program of which only one thread hangs.)
    over.cancelled().await;
}

/// This host's clock. The simulator *is* the world, so its clock is the right one here.
#[must_use]
pub fn host_now() -> DateTime<Utc> {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpStream};

    use chrono::TimeDelta;

    use super::*;
    use crate::simulator::faults::{Fault, Profile};
    use crate::simulator::seed::Seed;

    /// On one thread, where no task of the fleet gets a turn between two lines without an await.
    #[tokio::test]
    async fn what_a_machine_is_said_to_be_is_what_it_shows() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleet.json");
        let journal = Journal::open(&Journal::path_beside(&path)).unwrap();
        let state = FleetState::new(Seed(1), 1, host_now());
        let nature = Nature {
            seed: Seed(1),
            profile: Profile::None,
            boot: TimeDelta::zero(),
            persistent_per_mille: 0,
        };
        let fleet = Fleet::start(nature, state, path.clone(), journal, None).unwrap();
        let port = fleet.read(|state| state.machines[0].ssh_port);
        let answers = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
        assert!(!answers(), "it is off");
        for _ in 0..3 {
            fleet.step(0, Event::PowerOn).unwrap();
            assert!(!answers(), "it boots");
            fleet.step(0, Event::Tick).unwrap();
            assert!(answers(), "it is up");
            fleet.step(0, Event::Struck(Fault::NewHostKey)).unwrap();
            assert!(answers(), "it is still up");
            fleet.step(0, Event::Struck(Fault::SshRefuse)).unwrap();
            assert!(!answers(), "its SSH server is stopped");
            fleet.step(0, Event::Struck(Fault::Heal)).unwrap();
            assert!(answers(), "and starts again");
            fleet.step(0, Event::PowerOff).unwrap();
            assert!(!answers(), "it is off again");
        }
        fleet.stop().await;
        let kept = FleetState::load(&path).unwrap().unwrap();
        assert_eq!(kept.machines[0].machine.boots, 3, "what was last is kept");
    }
}
