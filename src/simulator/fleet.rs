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
//!
//! # A port that stays
//!
//! A machine's SSH port must survive being closed, or another process would be
//! given it while the machine is off. Each machine therefore holds a second
//! socket, bound to the port and never listening: the kernel keeps the port
//! away from everyone and still refuses connections (`SO_REUSEADDR` on both
//! lets the listening one come and go).

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::simulator::agent;
use crate::simulator::faults::ProviderFault;
use crate::simulator::journal::Journal;
use crate::simulator::machine::{AgentFace, Effect, Event, NOTHING, Nature, Refusal, SshFace};
use crate::simulator::ssh;
use crate::simulator::state::{FleetState, Record};

/// Connections a machine's SSH server lets wait.
const BACKLOG: u32 = 128;
/// The longest the clockwork sleeps.
const LONGEST_SLEEP: Duration = Duration::from_mins(1);

/// All machines, shared by every server and task of the simulator.
pub struct Fleet {
    /// What the machines have in common.
    pub nature: Nature,
    /// Where calls are written down.
    pub journal: Arc<Journal>,
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
}

/// What runs of one machine.
#[derive(Default)]
struct Shown {
    /// Holds the SSH port while nothing listens on it.
    reservation: Option<TcpSocket>,
    ssh: CancellationToken,
    server: Option<JoinHandle<()>>,
    agent: CancellationToken,
}

/// Faults of the provider's API that hold now.
#[derive(Clone, Copy, Debug)]
pub struct ApiCondition {
    /// What is wrong with the list.
    pub list: Option<ProviderFault>,
    /// Whether every call is slow.
    pub slow: bool,
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
    ) -> std::io::Result<Arc<Self>> {
        let shown = state.machines.iter().map(|_| Shown::default()).collect();
        let fleet = Arc::new(Self {
            nature,
            journal,
            path,
            inner: Mutex::new(Inner { state, generation: 1, shown, list_fault: None, api_slow: false }),
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
                let effects = inner.state.machines[index].machine.effects_since(NOTHING);
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
            let inner = self.lock();
            for shown in &inner.shown {
                shown.ssh.cancel();
                shown.agent.cancel();
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
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
        inner.state.machines[index] = record;
        self.carry_out(&mut inner, index, &effects);
        self.touched(&mut inner);
        Ok(answer)
    }

    /// Lets something happen to one machine.
    pub fn step(self: &Arc<Self>, index: usize, event: Event) -> Result<(), Refusal> {
        self.change(index, |_| Ok(((), Some(event))))
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
            ProviderFault::Heal => (inner.list_fault, inner.api_slow) = (None, false),
            ProviderFault::ApiSlow => inner.api_slow = true,
            fault => inner.list_fault = Some(fault),
        }
    }

    /// What is wrong with the provider's API now.
    pub fn api_condition(&self) -> ApiCondition {
        let inner = self.lock();
        ApiCondition { list: inner.list_fault, slow: inner.api_slow }
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
        if face == SshFace::Closed {
            return;
        }
        let stop = self.shutdown.child_token();
        shown.ssh = stop.clone();
        let (fleet, id, port, before) =
            (Arc::clone(self), record.id.clone(), record.ssh_port, shown.server.take());
        shown.server = Some(self.tasks.spawn(async move {
            // The one before holds the port until its task is gone. What it ended with is its own.
            if let Some(before) = before {
                let _ = before.await;
            }
            match listen(port) {
                Ok(listener) => ssh::serve(fleet, index, listener, face, stop).await,
                Err(error) => {
                    tracing::error!(machine = %id, port, %error, "cannot open the SSH server");
                }
            }
        }));
    }

    fn show_agent(self: &Arc<Self>, inner: &mut Inner, index: usize, face: AgentFace) {
        let Inner { state, shown, .. } = inner;
        let (record, shown) = (&state.machines[index], &mut shown[index]);
        shown.agent.cancel();
        if face == AgentFace::Silent {
            return;
        }
        let stop = self.shutdown.child_token();
        match agent::build(self, index, record, stop.clone()) {
            Ok(agent) => {
                shown.agent = stop.clone();
                self.tasks.spawn(agent.run(stop));
            }
            Err(error) => tracing::error!(machine = %record.id, %error, "cannot start the agent"),
        }
    }

    /// Takes the machine's SSH port, or another where it has none or somebody took it meanwhile.
    #[expect(clippy::unused_self, reason = "reads as a step of starting the fleet")]
    fn reserve_port(&self, inner: &mut Inner, index: usize) -> std::io::Result<()> {
        let record = &mut inner.state.machines[index];
        let socket = match bind(record.ssh_port) {
            Ok(socket) => socket,
            Err(error) => {
                tracing::warn!(machine = %record.id, port = record.ssh_port, %error, "its SSH port was taken; it gets another");
                bind(0)?
            }
        };
        record.ssh_port = socket.local_addr()?.port();
        inner.shown[index].reservation = Some(socket);
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

    /// Puts the newest state on disk, again and again, and once more at the end.
    async fn keep(self: Arc<Self>) {
        loop {
            let last = tokio::select! {
                () = self.shutdown.cancelled() => true,
                () = self.changed.notified() => false,
            };
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
            if last {
                return;
            }
        }
    }
}

/// This host's clock. The simulator *is* the world, so its clock is the right one here.
#[must_use]
pub fn host_now() -> DateTime<Utc> {
    SystemTime::now().into()
}

fn bind(port: u16) -> std::io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
    Ok(socket)
}

fn listen(port: u16) -> std::io::Result<TcpListener> {
    bind(port)?.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn a_reserved_port_refuses_until_it_listens_and_after_it_closed() {
        let reservation = bind(0).unwrap();
        let address = reservation.local_addr().unwrap();
        for _ in 0..3 {
            assert!(TcpStream::connect(address).await.is_err(), "nothing listens");
            let listener = listen(address.port()).unwrap();
            let client = TcpStream::connect(address).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            drop(listener);
            drop(server);
            drop(client);
        }
    }

    #[tokio::test]
    async fn a_reserved_port_is_chosen_for_nobody_else() {
        let reservation = bind(0).unwrap();
        let taken = reservation.local_addr().unwrap();
        let others: Vec<_> = (0..200).map(|_| bind(0).unwrap()).collect();
        assert!(others.iter().all(|other| other.local_addr().unwrap() != taken));
    }
}
