//! Whoever carries out the plan: one loop, which is told of everything that happens and asks again what to do.
//!
//! Each life begins with what there is on this host: services that run are gone on with, whoever started them. They go on
//! as well when a life ends, however it does; what was begun with them and blocks is waited for, so that two lives never
//! do something with one service at once.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::curator::clock::Clock;
use crate::proto::curator::v1::ServiceStatus;
use crate::roleserver::child::ending::{Ending, ended};
use crate::roleserver::child::launch::Record;
use crate::roleserver::cluster::services::artefacts::Artefacts;
use crate::roleserver::cluster::services::hands::{Found, Hands};
use crate::roleserver::cluster::services::plan::{Action, Circumstances, plan};
use crate::roleserver::cluster::services::probe;
use crate::roleserver::cluster::services::state::{Doing, Ended, Health, How, Moment, Note, Present};
use crate::roleserver::cluster::services::told::{Since, tellings};
use crate::roleserver::cluster::services::wanted::{Check, Id, Wanted};
use crate::roleserver::cluster::services::work;
use crate::roleserver::durable::Durability;
use crate::supervisor::context::{Runnable, Scope, Starting};
use crate::supervisor::outcome::Stop;
use crate::supervisor::value::Value;

const LOG_CHECK: Duration = Duration::from_mins(1);

/// What happened.
enum Event {
    Started(Id, Result<(Record, Arc<OwnedFd>), String>),
    /// The process of this number ended.
    Ended(Id, u64, Ending),
    /// The health of the process of this number is another one.
    Health(Id, u64, Health),
    Stopped(Id, Result<(), String>),
    Forgotten(Id, Result<(), String>),
}

/// A process that runs.
struct Process {
    /// Tells it from others of the same service, before and after it.
    number: u64,
    record: Record,
    handle: Arc<OwnedFd>,
    watching: AbortHandle,
    looking: Option<Looking>,
}

/// Looks at a process that runs.
struct Looking {
    check: Check,
    end: CancellationToken,
    task: JoinHandle<()>,
}

/// What the keeper acts on.
#[derive(Clone)]
pub struct Inputs {
    /// What is to run.
    pub wanted: Value<BTreeMap<Id, Wanted>>,
    /// Artefacts.
    pub held: Value<Artefacts>,
}

/// The runnable, which brings this host to what is `wanted`, and says in `status` how that is. `boot_id` tells whether what is written down of an end is about this boot.
#[must_use]
pub fn keeper(
    hands: Hands,
    status: Value<Vec<ServiceStatus>>,
    inputs: Inputs,
    clock: Clock,
    boot_id: String,
) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (hands, status, clock, boot_id) = (hands.clone(), status.clone(), clock.clone(), boot_id.clone());
        let inputs = inputs.clone();
        async move {
            let found = {
                let hands = hands.clone();
                tokio::task::spawn_blocking(move || hands.find_all()).await??
            };
            let healthy = starting.healthy();
            let mut keeper = Keeper::new(hands, status, clock, boot_id);
            keeper.adopt(found);
            let ended = keeper.run(&inputs, healthy.scope()).await;
            keeper.leave().await;
            Err(ended)
        }
    })
}

struct Keeper {
    hands: Hands,
    status: Value<Vec<ServiceStatus>>,
    clock: Clock,
    boot_id: String,
    wanted: Option<BTreeMap<Id, Wanted>>,
    present: BTreeMap<Id, Present>,
    processes: BTreeMap<Id, Process>,
    numbers: u64,
    since: Since,
    held: Artefacts,
    sender: mpsc::UnboundedSender<Event>,
    events: mpsc::UnboundedReceiver<Event>,
    /// What waits for ends of processes, and can be dropped at any moment.
    watches: JoinSet<()>,
    /// What is done with services, and must be waited for.
    doings: JoinSet<()>,
    leaving: CancellationToken,
}

impl Keeper {
    fn new(hands: Hands, status: Value<Vec<ServiceStatus>>, clock: Clock, boot_id: String) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            hands,
            status,
            clock,
            boot_id,
            wanted: None,
            present: BTreeMap::new(),
            processes: BTreeMap::new(),
            numbers: 0,
            since: Since::default(),
            held: Artefacts::default(),
            sender,
            events,
            watches: JoinSet::new(),
            doings: JoinSet::new(),
            leaving: CancellationToken::new(),
        }
    }

    /// Takes over what there is.
    fn adopt(&mut self, found: Vec<Found>) {
        let now = self.now();
        for Found { note, running } in found {
            let id = note.id.clone();
            let ended = note.ended.clone().filter(|ended| ended.boot_id == self.boot_id);
            let doing = match ended {
                Some(ended) if running.is_none() => {
                    Doing::Ended { how: ended.how, said: ended.said, at: now, random: rand::random() }
                }
                _ => Doing::Down,
            };
            self.present.insert(id.clone(), Present { note, doing, deaths: 0 });
            if let Some((record, handle)) = running {
                tracing::info!(service = %id, pid = record.instance.pid, "a service that runs already was adopted");
                self.is_up(&id, record, Arc::new(handle));
            }
        }
    }

    async fn run(&mut self, inputs: &Inputs, scope: &Scope) -> Stop {
        let (mut wanted, mut held) = (inputs.wanted.watch(), inputs.held.watch());
        let mut log_check = tokio::time::interval(LOG_CHECK);
        loop {
            let look_again = self.act();
            let due = async {
                match look_again {
                    Some(moment) => tokio::time::sleep(moment.saturating_sub(self.clock.running())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                cancelled = scope.cancelled() => return cancelled.into(),
                now = wanted.next() => self.wanted = Some(now),
                now = held.next() => self.held = now,
                Some(event) = self.events.recv() => self.hear(event),
                // Nothing is kept of those that are over.
                Some(_) = self.watches.join_next() => {}
                Some(_) = self.doings.join_next() => {}
                _ = log_check.tick() => self.limit_logs(),
                () = due => {}
            }
        }
    }

    /// Waits for what must not overlap with whoever comes after.
    async fn leave(&mut self) {
        self.leaving.cancel();
        let processes = std::mem::take(&mut self.processes);
        for looking in processes.into_values().filter_map(|process| process.looking) {
            looking.end.cancel();
            let _ = looking.task.await;
        }
        while self.doings.join_next().await.is_some() {}
        self.watches.shutdown().await;
    }

    fn now(&self) -> Moment {
        self.clock.running()
    }

    /// Does what is to be done, and says how everything is; gives when to look again.
    fn act(&mut self) -> Option<Moment> {
        let plan = plan(&self.circumstances());
        for action in plan.actions {
            self.carry_out(action);
        }
        self.tend_looks();
        self.tell();
        plan.look_again
    }

    fn circumstances(&self) -> Circumstances<'_> {
        Circumstances {
            wanted: self.wanted.as_ref(),
            present: &self.present,
            artefacts: &self.held.whole,
            now: self.now(),
        }
    }

    fn carry_out(&mut self, action: Action) {
        tracing::debug!(?action, "a step of the plan");
        match action {
            Action::Start(id) => self.start(&id),
            Action::Stop(id) => self.stop(&id),
            Action::Adjust(id) => self.adjust(&id),
            Action::Forget(id) => {
                let Some(present) = self.present.get_mut(&id) else { return };
                present.doing = Doing::Forgetting;
                let (hands, sender) = (self.hands.clone(), self.sender.clone());
                self.doings.spawn(async move {
                    let forgotten = work::blocking({
                        let id = id.clone();
                        move || hands.forget(&id)
                    });
                    let _ = sender.send(Event::Forgotten(id, forgotten.await));
                });
            }
        }
    }

    fn start(&mut self, id: &Id) {
        let Some(wanted) = self.wanted.as_ref().and_then(|all| all.get(id)).cloned() else { return };
        let Some(digest) = wanted.digest().map(str::to_owned) else { return };
        let before = self.present.get(id).map(|present| present.note.clone());
        let again = before.as_ref().filter(|before| before.digest == digest);
        let ended = self.present.get(id).is_some_and(|present| matches!(present.doing, Doing::Ended { .. }));
        let files = match &wanted.rendered {
            Ok((rendered, _)) => rendered.files.iter().map(|file| file.path.clone()).collect(),
            Err(_) => BTreeSet::new(),
        };
        let mut note = before.clone().unwrap_or_else(|| Note::lost(id.clone())).adjusted(&wanted);
        note.restarts = if again.is_some() && ended { note.restarts.saturating_add(1) } else { 0 };
        (note.digest, note.files, note.ended) = (digest, files, None);
        note.started_at_ms = self.clock.now().timestamp_millis();
        let deaths = match self.present.get(id) {
            Some(present) if again.is_some() => present.deaths,
            _ => 0,
        };
        self.present.insert(id.clone(), Present { note: note.clone(), doing: Doing::Starting, deaths });
        let (hands, sender, id) = (self.hands.clone(), self.sender.clone(), id.clone());
        self.doings.spawn(async move {
            let started = work::blocking(move || hands.start(&wanted, before.as_ref(), &note));
            let started = started.await.map(|(record, handle)| (record, Arc::new(handle)));
            let _ = sender.send(Event::Started(id, started));
        });
    }

    fn adjust(&mut self, id: &Id) {
        let wanted = self.wanted.as_ref().and_then(|all| all.get(id));
        let Some((wanted, present)) = wanted.zip(self.present.get_mut(id)) else { return };
        present.note = present.note.adjusted(wanted);
        tracing::info!(service = %id, revision = present.note.revision, "a service goes on as it is declared now");
        // At once: beside the loop it could come after what is done with the service next.
        if let Err(error) = self.hands.adjust(&present.note) {
            tracing::error!(%error, service = %id, "what is newly declared of a service does not hold for it yet");
        }
    }

    fn stop(&mut self, id: &Id) {
        let Some(present) = self.present.get_mut(id) else { return };
        present.doing = Doing::Stopping;
        let process = self.processes.remove(id);
        let stopping = work::Stopping {
            hands: self.hands.clone(),
            id: id.clone(),
            patience: present.note.stop_time(),
            leaving: self.leaving.clone(),
        };
        let (sender, id) = (self.sender.clone(), id.clone());
        self.doings.spawn(async move {
            let mut running = None;
            if let Some(process) = process {
                process.watching.abort();
                if let Some(looking) = process.looking {
                    looking.end.cancel();
                    let _ = looking.task.await;
                }
                running = Some((process.record, process.handle));
            }
            if let Some(stopped) = stopping.stop(running).await {
                let _ = sender.send(Event::Stopped(id, stopped));
            }
        });
    }

    fn is_up(&mut self, id: &Id, record: Record, handle: Arc<OwnedFd>) {
        let since = self.now();
        let Some(present) = self.present.get_mut(id) else { return };
        present.doing = Doing::Up { since, health: Health::Unknown };
        self.numbers += 1;
        let number = self.numbers;
        let (sender, watched, id_of) = (self.sender.clone(), handle.clone(), id.clone());
        let watching = self.watches.spawn(async move {
            let how = ended(&watched).await.unwrap_or_else(|error| {
                tracing::error!(%error, service = %id_of, "a service cannot be watched");
                Ending::Unknown
            });
            let _ = sender.send(Event::Ended(id_of, number, how));
        });
        self.processes.insert(id.clone(), Process { number, record, handle, watching, looking: None });
    }

    fn hear(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Started(id, Ok((record, handle))) => {
                tracing::info!(service = %id, pid = record.instance.pid, "a service was started");
                self.is_up(&id, record, handle);
            }
            Event::Started(id, Err(why)) => {
                let Some(present) = self.present.get_mut(&id) else { return };
                tracing::warn!(service = %id, why, "a service was not started");
                present.end(How::NotStarted, why, now, rand::random());
            }
            Event::Ended(id, number, ending) => self.ended(&id, number, ending),
            Event::Health(id, number, health) => {
                if self.processes.get(&id).is_some_and(|process| process.number == number)
                    && let Some(Present { doing: Doing::Up { health: known, .. }, .. }) =
                        self.present.get_mut(&id)
                {
                    tracing::info!(service = %id, ?health, "how a service does has changed");
                    *known = health;
                }
            }
            Event::Stopped(id, stopped) => {
                let Some(present) = self.present.get_mut(&id) else { return };
                present.deaths = 0;
                present.doing = match stopped {
                    Ok(()) => Doing::Down,
                    Err(said) => Doing::Stuck { said, at: now },
                };
            }
            Event::Forgotten(id, Ok(())) => {
                tracing::info!(service = %id, "a service is gone");
                self.present.remove(&id);
            }
            Event::Forgotten(id, Err(said)) => {
                tracing::error!(service = %id, said, "what a service left could not be removed");
                if let Some(present) = self.present.get_mut(&id) {
                    present.doing = Doing::Stuck { said, at: now };
                }
            }
        }
    }

    /// The process of this number ended, unless it was stopped: then that is told by who stopped it.
    fn ended(&mut self, id: &Id, number: u64, ending: Ending) {
        if self.processes.get(id).is_none_or(|process| process.number != number) {
            return;
        }
        let now = self.now();
        let process = self.processes.remove(id);
        if let Some(looking) = process.and_then(|process| process.looking) {
            looking.end.cancel();
            self.doings.spawn(async move {
                let _ = looking.task.await;
            });
        }
        let Some(present) = self.present.get_mut(id) else { return };
        let written = self.hands.said(id);
        let said = if written.is_empty() {
            ending.to_string()
        } else {
            format!("{ending}; it last wrote: {written}")
        };
        tracing::warn!(service = %id, said, "a service ended");
        present.end(ending.into(), said.clone(), now, rand::random());
        // For the next role server of this boot, which must not start what is to stay ended.
        present.note.ended = Some(Ended { boot_id: self.boot_id.clone(), how: ending.into(), said });
        if let Err(error) = self.hands.write_note(&present.note, Durability::UntilPowerLoss) {
            tracing::warn!(%error, "that a service ended is not written down");
        }
    }

    /// Has those looked at that run and have a check, and nobody else.
    fn tend_looks(&mut self) {
        for (id, process) in &mut self.processes {
            let Some(present) = self.present.get_mut(id) else { continue };
            let wanted = self.wanted.as_ref().and_then(|all| all.get(id));
            let wanted = wanted.filter(|wanted| wanted.digest() == Some(present.note.digest.as_str()));
            let check = wanted.and_then(|wanted| wanted.check.as_ref());
            if process.looking.as_ref().map(|looking| &looking.check) == check {
                continue;
            }
            if let Some(looking) = process.looking.take() {
                looking.end.cancel();
                self.doings.spawn(async move {
                    let _ = looking.task.await;
                });
                if let Doing::Up { health, .. } = &mut present.doing {
                    *health = Health::Unknown;
                }
            }
            let Some((wanted, check)) = wanted.zip(check) else { continue };
            let (end, sender) = (CancellationToken::new(), self.sender.clone());
            let (of, number) = (id.clone(), process.number);
            let tell = move |health| drop(sender.send(Event::Health(of.clone(), number, health)));
            let watching = probe::watch(self.hands.clone(), wanted.clone(), check.clone(), end.clone(), tell);
            process.looking = Some(Looking { check: check.clone(), end, task: tokio::spawn(watching) });
        }
    }

    fn tell(&mut self) {
        let tellings = tellings(&self.circumstances(), &self.held.said);
        let began = |id: &Id| self.present.get(id).map(|present| present.note.started_at_ms);
        let now = self.clock.now().timestamp_millis();
        let status = self.since.status(&tellings, began, now);
        if self.status.latest().as_ref() != Some(&status) {
            self.status.set(status);
        }
    }

    fn limit_logs(&mut self) {
        let (hands, ids) = (self.hands.clone(), self.processes.keys().cloned().collect::<Vec<_>>());
        self.doings.spawn_blocking(move || ids.iter().for_each(|id| hands.limit_logs(id)));
    }
}
