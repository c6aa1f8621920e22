//! `roleserver run`: be the agent.
//!
//! Puts the host's parts into the heartbeat loop, keeps what answers bring, and
//! says what happens: the first delivery, each change, and a failure when it
//! begins, when its reason changes, and then ever more rarely, because a
//! shepherd may be away for days and the log is on the machine's own disk.
//!
//! What runs is a tree of runnables, so that one part that fails is started again
//! without the others:
//!
//! * `callback`: the heartbeat loop. New until a heartbeat was delivered.
//! * `cluster`: the node's part in a cluster, once it is asked to have one.
//! * `status`: tells `roleserver status` about the tree.
//! * `logs`: brings the logs that shepherds ask for ([`crate::roleserver::logs`]).
//! * `metrics`: tells `roleserver metrics` what is counted.
//! * `update`: fetches another release when one is ordered; this process becomes it then
//!   ([`crate::roleserver::update`]).

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::curator::clock::Clock;
use crate::roleserver::agent::{Agent, Event, ReadRelease};
use crate::roleserver::clock::{BootClock, HostClock};
use crate::roleserver::cluster;
use crate::roleserver::cluster::asked::Asked;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::worker::worker;
use crate::roleserver::commands::CommandError;
use crate::roleserver::enrolment::{Enrolment, Settings};
use crate::roleserver::hardware::{self, Sources};
use crate::roleserver::known_time::KnownTime;
use crate::roleserver::logs::Logs;
use crate::roleserver::logs::there::Source;
use crate::roleserver::metrics::{self, Known};
use crate::roleserver::running::{Process, program_digest};
use crate::roleserver::shepherds::Shepherds;
use crate::roleserver::state_directory::{LastHeartbeat, Learned, Lock, StateDirectory, StateError};
use crate::roleserver::told;
use crate::roleserver::update::release::{Handover, Release};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::report::Report;
use crate::supervisor::supervise::{self, Supervisor};
use crate::supervisor::value::Value;

/// How long the parts of a role server may take to end before it becomes another program.
const HANDOVER: Duration = Duration::from_secs(10);

/// Runs the agent until SIGTERM or SIGINT.
pub fn execute(state_directory: &Path) -> Result<(), CommandError> {
    let state = StateDirectory::open(state_directory).map_err(CommandError::failed)?;
    let held = state.lock(Lock::Agent).map_err(CommandError::failed)?;
    let not_enrolled = || {
        CommandError::Failed(format!(
            "this machine is not enrolled: {} holds no enrolment with its key; a shepherd enrols it",
            state.path().display()
        ))
    };
    let enrolment = state.enrolment().map_err(CommandError::failed)?.ok_or_else(not_enrolled)?;
    let identity = state.identity().map_err(CommandError::failed)?.ok_or_else(not_enrolled)?;
    let (settings, fallback) = settings(&state, &enrolment);
    let clock = HostClock::read().map_err(CommandError::failed)?;
    let told = state.told_time().unwrap_or_else(|error| {
        tracing::warn!(%error, "going on with this machine's own clock");
        None
    });
    let time = Arc::new(KnownTime::new(Arc::new(clock.clone()), told));
    let digest = program_digest(Path::new("/proc/self/exe")).map_err(CommandError::failed)?;
    let release = Release::at_start(state.path(), &digest, &clock);
    let record = Process::this(enrolment.revision, digest).map_err(CommandError::failed)?;
    // An enrolment finds the agent by its record. On a disk that is full or can only be read the
    // machine calls all the same, and the record is tried again with each heartbeat.
    let recorded = state.record_agent(&record);
    let unrecorded = recorded.is_err().then_some(record);
    complain(recorded);

    let incarnation = Uuid::new_v4();
    let heard = Value::new();
    let facts = Facts::default();
    let asked = Asked::new(enrolment.machine_id, Files::of(state.path()), facts.clone());
    let standing = asked.clone();
    let shepherds = Shepherds::default();
    let logs = Logs::new(Source::of(state.log_path(), state.path()), shepherds.clone(), incarnation);
    let keeper = Keeper {
        logs: logs.clone(),
        heard: heard.clone(),
        asked,
        release: release.clone(),
        state: state.clone(),
        clock: clock.clone(),
        incarnation,
        revision: enrolment.revision,
        memory: Mutex::new(Memory {
            settings: settings.clone(),
            delivered_at: None,
            last_error: None,
            unrecorded,
        }),
    };
    let agent = Agent {
        machine_id: enrolment.machine_id,
        identity: Arc::new(identity),
        settings,
        fallback,
        access_fence: enrolment.access_fence(),
        incarnation,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        clock: Arc::new(clock),
        time,
        hardware: Arc::new(|| hardware::read(&Sources::host())),
        cluster: Arc::new(move || standing.report()),
        release: reported(&release),
        brings_logs: true,
        shepherds: Some(shepherds.clone()),
        observer: Arc::new(move |event| keeper.hear(event)),
    };
    tracing::info!(machine = %enrolment.machine_id, %incarnation, "the agent runs");

    let leaving = CancellationToken::new();
    let cluster = worker(
        &cluster::worker::Settings {
            state_directory: state.path().to_owned(),
            launcher: "/proc/self/exe".into(),
            etcd: cluster::etcd_program::program(),
            boot_id: agent.clock.boot_id(),
            clock: Clock::host(),
            leaving: leaving.clone(),
            shepherds: shepherds.clone(),
            ports: cluster::kubernetes::ports::Ports::default(),
        },
        &facts,
    );

    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CommandError::failed)?;
    let counted = move |tree: &Report| metrics::text(tree, &Known::of(&facts));
    let root = root(
        (agent, heard),
        (state.clone(), enrolment),
        [
            ("cluster", cluster),
            ("logs", logs.carry_out()),
            ("metrics", told::telling(state.path(), told::METRICS, counted)),
            ("update", release.follow(shepherds)),
        ],
    );
    let ended = runtime.block_on(until_asked_to_end(root, &leaving, &release));
    // A disk that hangs under the hardware reader must not hold up the end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match ended.map_err(CommandError::failed)? {
        None => Ok(()),
        Some(handover) => {
            // Whoever this process becomes is the agent then.
            drop(held);
            Err(CommandError::failed(release.become_it(&handover)))
        }
    }
}

/// What is said of the release that runs.
fn reported(release: &Release) -> ReadRelease {
    let release = release.clone();
    Arc::new(move || Some(release.report()))
}

/// Everything that runs.
fn root(
    (agent, heard): (Agent, Value<()>),
    (state, enrolment): (StateDirectory, Enrolment),
    others: [(&'static str, Runnable); 4],
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let callback = callback(agent.clone(), state.clone(), enrolment.clone(), heard.clone());
        let status = told::telling(state.path(), told::STATUS, Report::to_string);
        let others = others.clone();
        async move {
            starting.start("callback", callback)?;
            for (name, other) in others {
                starting.start(name, other)?;
            }
            starting.start("status", status)?;
            Err(starting.healthy().scope().cancelled().await.into())
        }
    })
}

/// What was learned last for this enrolment, and what to fall back to.
fn settings(state: &StateDirectory, enrolment: &Enrolment) -> (Settings, Option<Settings>) {
    let learned = state.learned(enrolment.revision).unwrap_or_else(|error| {
        tracing::warn!(%error, "going on with what the enrolment says");
        None
    });
    learned.map_or_else(
        || (enrolment.settings.clone(), None),
        |Learned { settings, fallback, .. }| (settings, fallback),
    )
}

/// The heartbeat loop, each life with what the one before has learned.
fn callback(agent: Agent, state: StateDirectory, enrolment: Enrolment, heard: Value<()>) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (settings, fallback) = settings(&state, &enrolment);
        let agent = Agent { settings, fallback, ..agent.clone() };
        let mut heard = heard.watch();
        async move {
            let scope = starting.scope().clone();
            let mut run = std::pin::pin!(agent.run(scope.token()));
            tokio::select! {
                () = &mut run => return Err(scope.cancelled().await.into()),
                () = heard.next() => {}
            }
            let healthy = starting.healthy();
            run.await;
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

/// Runs until this process is asked to end, or has to become another program.
async fn until_asked_to_end(
    root: Runnable,
    leaving: &CancellationToken,
    release: &Release,
) -> std::io::Result<Option<Handover>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let tree = Supervisor::start(root, supervise::Settings::default());
    let handover = loop {
        tokio::select! {
            _ = terminate.recv() => break None,
            _ = interrupt.recv() => break None,
            handover = release.handed_over() => break Some(handover),
            // The end of a terminal is not the end of the machine.
            _ = hangup.recv() => {}
        }
    };
    // What runs beside us goes on, for whoever comes after us.
    leaving.cancel();
    match &handover {
        None => tree.stop().await,
        // What does not end in order ends with this program.
        Some(_) => drop(tokio::time::timeout(HANDOVER, tree.stop()).await),
    }
    Ok(handover)
}

/// Keeps and says what the loop tells.
struct Keeper {
    heard: Value<()>,
    logs: Logs,
    asked: Asked,
    release: Release,
    state: StateDirectory,
    clock: HostClock,
    incarnation: Uuid,
    revision: u64,
    memory: Mutex<Memory>,
}

struct Memory {
    settings: Settings,
    delivered_at: Option<u64>,
    last_error: Option<String>,
    unrecorded: Option<Process>,
}

impl Keeper {
    fn hear(&self, event: &Event) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.unrecorded.take_if(|record| self.state.record_agent(record).is_ok());
        match event {
            Event::Delivered { endpoint, delivered, .. } => {
                self.heard.set(());
                self.release.heard();
                let recovered = memory.last_error.take().is_some();
                if delivered.first || recovered {
                    tracing::info!(%endpoint, "heartbeat delivered");
                }
                if delivered.with_report {
                    tracing::info!(%endpoint, "hardware report delivered");
                }
                if let Some(generation) = delivered.refused_installation {
                    tracing::error!(
                        generation,
                        "the shepherd asks for an operating system; this release of the role server cannot install"
                    );
                }
                memory.delivered_at = Some(self.clock.milliseconds());
                self.note(endpoint, None, memory.delivered_at);
            }
            Event::Failed { endpoint, error, failures, pause } => {
                let changed = memory.last_error.as_ref() != Some(error);
                if changed || failures.is_power_of_two() {
                    let pause = format!("{:.1} s", pause.as_secs_f64());
                    tracing::warn!(%endpoint, error, failures, %pause, "heartbeat not delivered");
                }
                memory.last_error = Some(error.clone());
                self.note(endpoint, Some(error.clone()), memory.delivered_at);
            }
            Event::Settings { settings, fallback } => {
                tracing::info!(endpoints = ?settings.endpoints, "the shepherd changed the settings");
                memory.settings = settings.clone();
                self.learn(settings, fallback.clone());
            }
            Event::SettingsWork => self.learn(&memory.settings, None),
            Event::SettingsRefused { reason } => {
                tracing::error!(reason, "the shepherd sent settings that cannot be used; the old ones stay");
            }
            Event::ClusterOrder { order } => self.asked.hear(order),
            Event::ReleaseOrder { order } => self.release.hear(order),
            Event::LogRequests { requests } => self.logs.hear(requests),
            Event::Time { told } => complain(self.state.keep_told_time(told)),
        }
    }

    fn learn(&self, settings: &Settings, fallback: Option<Settings>) {
        let learned = Learned { revision: self.revision, settings: settings.clone(), fallback };
        complain(self.state.keep_learned(&learned));
    }

    fn note(&self, endpoint: &str, error: Option<String>, delivered_at: Option<u64>) {
        complain(self.state.note_heartbeat(&LastHeartbeat {
            boot_id: self.clock.boot_id(),
            at_milliseconds: self.clock.milliseconds(),
            incarnation: self.incarnation,
            endpoint: endpoint.to_owned(),
            error,
            delivered_at_milliseconds: delivered_at,
        }));
    }
}

/// A full disk must not silence the machine.
fn complain(written: Result<(), StateError>) {
    if let Err(error) = written {
        tracing::warn!(%error, "going on without");
    }
}
