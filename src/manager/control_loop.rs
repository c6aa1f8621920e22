//! The control loop: sources due machines for one process and handles them, N
//! workers in parallel.
//!
//! # How it works
//!
//! Every worker holds a session. Idle workers put themselves into a queue; one
//! claimer per loop claims for all of them in one statement and hands each its
//! machine. So N workers cost the database one poll, never N, and never fight
//! each other for the same row.
//!
//! A worker runs the handler and ends the work by what it returns. The handler
//! decides nothing about the lease: it is told to stop by having its future
//! dropped, when the session is over, when the machine is not due for this any
//! more, or when the shepherd shuts down. A panic in it fails that one work
//! item, with the panic's text.
//!
//! # For the next loop
//!
//! Implement [`ControlLoop`]. Read the facts first ([`Work::snapshot`]) and act
//! on what they say now: the claim only says that the machine was due when it
//! was claimed. Ask [`Work::may_call_out`] before every outward call, and write
//! down what was learnt as changes, in what you return.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::FutureExt;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::field::{Empty, display};
use tracing::{Instrument, Span};

use crate::bmdb::change::FactChange;
use crate::bmdb::claim::Next;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::session::{Session, Sessions};
use crate::bmdb::wakeup::WakeUps;
use crate::bmdb::work::Work;
use crate::manager::failpoint;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::{LoopMetrics, WorkResult};
use crate::manager::sourcing::{Sourced, Sourcing};
use crate::model::backoff::Backoff;
use crate::model::breaker::Open;
use crate::model::process::Process;
use crate::model::schedule::next_due;
use crate::model::time::{Timestamp, after};
use crate::model::traces::TRACES;

/// One kind of work, as a loop does it.
#[async_trait]
pub trait ControlLoop: Send + Sync + 'static {
    /// Name of the loop: prefix of its flags, label of its metrics, component of its sessions.
    fn name(&self) -> &'static str;

    /// The process it claims.
    fn process(&self) -> Process;

    /// The providers whose machines it can handle.
    fn providers(&self) -> Vec<String>;

    /// Handles one machine. Dropped when the work must stop.
    async fn handle(&self, work: &Work) -> Result<Handled, HandlerError>;
}

/// How a handler wants its work ended.
#[derive(Debug)]
pub enum Handled {
    /// Done.
    Finished {
        /// What was learnt.
        changes: Vec<FactChange>,
        /// For history.
        detail: String,
    },
    /// Not now, and not because it failed.
    PutOff {
        /// What was learnt.
        changes: Vec<FactChange>,
        /// When to look again.
        until: Timestamp,
        /// Why.
        reason: String,
    },
}

impl Handled {
    /// Done, with what was learnt.
    pub fn finished(changes: Vec<FactChange>, detail: impl Into<String>) -> Self {
        Self::Finished { changes, detail: detail.into() }
    }

    /// Not now, because the provider hangs.
    #[must_use]
    pub fn left_alone(open: Open, now: Timestamp) -> Self {
        Self::PutOff { changes: Vec::new(), until: after(now, open.wait), reason: open.reason }
    }
}

/// Why a handler failed.
#[derive(Debug)]
pub struct HandlerError {
    /// The sentence that is stored as the cause.
    pub cause: String,
    /// Another growing delay than the policy's, for a known way to fail.
    pub backoff: Option<Backoff>,
    /// What was learnt all the same.
    pub changes: Vec<FactChange>,
}

impl HandlerError {
    /// A failure with the policy's backoff.
    pub fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), backoff: None, changes: Vec::new() }
    }

    /// The same with facts that were learnt.
    #[must_use]
    pub fn with_changes(mut self, changes: Vec<FactChange>) -> Self {
        self.changes = changes;
        self
    }
}

impl From<BmdbError> for HandlerError {
    fn from(error: BmdbError) -> Self {
        Self::new(error.to_string())
    }
}

/// How work ends whose machine is not due for it any more, by the facts as they are now: a hold, or a
/// quarantine, that came between the claim and the first look. The keeper would stop the work too, but
/// only at its next renewal.
pub(crate) fn no_longer_due(work: &Work, snapshot: &Snapshot) -> Option<Handled> {
    let (_, policy) = work.bmdb().policy();
    let due = next_due(&snapshot.facts, work.process().lane(), &policy, snapshot.now);
    let later = !due.timer && due.ready_at.is_some_and(|at| at > snapshot.now);
    (due.process != Some(work.process()) || later)
        .then(|| Handled::finished(Vec::new(), format!("it is not due any more: {}", due.reason)))
}

/// How a loop is run.
pub struct LoopSettings {
    /// Workers; 0 counts as 1.
    pub parallelism: usize,
    /// What its statements are limited by.
    pub limiter: Limiter,
}

/// What runs a loop needs.
#[derive(Clone)]
pub struct LoopContext {
    /// This process's sessions.
    pub sessions: Sessions,
    /// Who wakes it.
    pub wake_ups: WakeUps,
    /// Where it counts.
    pub metrics: LoopMetrics,
    /// Stop sourcing new work.
    pub drain: CancellationToken,
    /// Stop what is under way.
    pub abort: CancellationToken,
}

/// An idle worker.
struct Slot {
    session: Session,
    work: oneshot::Sender<Work>,
}

/// Runs a loop until it is drained: no new work after `drain`, none under way after `abort`.
/// Returns when every worker has closed its session.
pub async fn run<L: ControlLoop>(control_loop: Arc<L>, settings: LoopSettings, context: LoopContext) {
    let (idle, slots) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let sourced_out = CancellationToken::new();
    for number in 0..settings.parallelism.max(1) {
        let worker = worker(control_loop.clone(), number, idle.clone(), context.clone(), sourced_out.clone());
        tasks.spawn(worker);
    }
    drop(idle);
    let (process, providers) = (control_loop.process(), control_loop.providers());
    let sourcing = Sourcing::new(&context.sessions, process, providers, settings.limiter);
    // Ends by itself when drained, and is never dropped: a claim on its way would still commit, and
    // its work stay under a session that its worker could then not close.
    claim_for(sourcing, slots, context).await;
    sourced_out.cancel();
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            tracing::error!(loop_name = control_loop.name(), %error, "a worker ended in the middle");
        }
    }
}

/// How long to wait for what the database does not tell.
struct Pace {
    /// Grows while nothing is found.
    poll: Duration,
    notified: bool,
}

/// Longest time between two looks where wake-ups are sent.
const SAFETY_POLL: Duration = Duration::from_secs(5);
/// First and longest time between two looks where none are.
const POLL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

impl Pace {
    fn next(&mut self, next: Next) -> Duration {
        let ceiling = if self.notified { SAFETY_POLL } else { POLL.1 };
        let pause = match next {
            // Due, and yet nothing could be claimed: it waits out a loss, or is another shepherd's.
            Next::Due => self.poll,
            Next::In(wait) => wait.min(if self.notified { ceiling } else { self.poll }),
            Next::Never => {
                if self.notified {
                    ceiling
                } else {
                    self.poll
                }
            }
        };
        self.poll = (self.poll * 2).min(if self.notified { Duration::from_secs(1) } else { POLL.1 });
        pause.mul_f64(0.9 + 0.2 * rand::random::<f64>())
    }
}

async fn claim_for(mut sourcing: Sourcing, mut slots: mpsc::UnboundedReceiver<Slot>, context: LoopContext) {
    let process = sourcing.process;
    let mut idle: Vec<Slot> = Vec::new();
    let notified = context.sessions.bmdb().dialect().notifies();
    let mut pace = Pace { poll: POLL.0, notified };
    // Whether to claim without asking first: something was just announced or claimed.
    let mut eager = true;
    loop {
        while let Ok(slot) = slots.try_recv() {
            idle.push(slot);
        }
        idle.retain(|slot| !slot.work.is_closed() && !slot.session.lost().is_cancelled());
        if idle.is_empty() {
            let slot = tokio::select! {
                () = context.drain.cancelled() => return,
                slot = slots.recv() => slot,
            };
            let Some(slot) = slot else { return };
            idle.push(slot);
            continue;
        }
        if context.drain.is_cancelled() {
            return;
        }
        let sessions: Vec<Session> = idle.iter().map(|slot| slot.session.clone()).collect();
        match sourcing.source(&sessions, eager, &context.metrics).await {
            Ok(Sourced::Work(work)) => {
                context.metrics.claimed(work.len());
                for waited in work.iter().filter_map(Work::waited) {
                    context.metrics.waited(waited);
                }
                for unwanted in hand_out(work, &mut idle) {
                    give_back(unwanted).await;
                }
                pace.poll = POLL.0;
                eager = true;
            }
            Ok(Sourced::Contended) => {
                context.metrics.contended();
                let pause = Duration::from_millis(2 + u64::from(rand::random::<u8>()) / 16);
                tokio::time::sleep(pause).await;
            }
            Ok(Sourced::Nothing(next)) => {
                eager = false;
                let pause = pace.next(next);
                tokio::select! {
                    () = context.drain.cancelled() => return,
                    () = context.wake_ups.woken(process) => {
                        eager = true;
                        pace.poll = POLL.0;
                    }
                    () = tokio::time::sleep(pause) => {}
                }
            }
            Err(error) => {
                tracing::warn!(%process, %error, "cannot source work; trying again in a second");
                context.metrics.source_failed();
                tokio::select! {
                    () = context.drain.cancelled() => return,
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
            }
        }
    }
}

/// Hands each to the worker whose session it is under; what is left is of workers that take nothing any more.
fn hand_out(work: Vec<Work>, idle: &mut Vec<Slot>) -> Vec<Work> {
    let mut unwanted = Vec::new();
    for item in work {
        let id = item.session().id();
        let Some(position) = idle.iter().position(|slot| slot.session.id() == id) else {
            unwanted.push(item);
            continue;
        };
        unwanted.extend(idle.swap_remove(position).work.send(item).err());
    }
    unwanted
}

/// The trace of a work item.
fn trace_of(work: &Work) -> Span {
    tracing::debug_span!(
        target: TRACES,
        "work",
        process = %work.process(),
        machine = %work.machine(),
        fence = work.fence(),
        begun_before_ns = u64::try_from(work.held_for().as_nanos()).unwrap_or(u64::MAX),
        result = Empty,
        error = Empty,
    )
}

/// Cancels work that nobody has begun, because its shepherd stops. It was claimed, so it has a trace like any other.
async fn give_back(work: Work) {
    let traced = trace_of(&work);
    async {
        let because = work.stop_reason().unwrap_or("the shepherd is shutting down").to_owned();
        let result = match written(work.cancel(because)).await {
            Ok(()) => WorkResult::Cancelled,
            Err(error) => {
                traced.record("error", display(&error));
                WorkResult::Lost
            }
        };
        traced.record("result", result.as_str());
    }
    .instrument(traced.clone())
    .await;
}

async fn worker<L: ControlLoop>(
    control_loop: Arc<L>,
    number: usize,
    idle: mpsc::UnboundedSender<Slot>,
    context: LoopContext,
    sourced_out: CancellationToken,
) {
    let details = serde_json::json!({ "worker": number });
    while !context.drain.is_cancelled() {
        let session = match context.sessions.start(control_loop.name(), details.clone()).await {
            Ok(session) => session,
            Err(error) => {
                tracing::warn!(loop_name = control_loop.name(), number, %error, "cannot start a session; trying again in a second");
                tokio::select! {
                    () = context.drain.cancelled() => {}
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
                continue;
            }
        };
        context.metrics.session_started();
        work_under(&*control_loop, &session, &idle, &context).await;
        if session.lost().is_cancelled() {
            let because = session.lost_because().unwrap_or_default();
            tracing::warn!(
                loop_name = control_loop.name(),
                number,
                because,
                "replacing a session in a second"
            );
            tokio::select! {
                () = context.drain.cancelled() => {}
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            continue;
        }
        // Until then a claim that is on its way may still bring this session work.
        sourced_out.cancelled().await;
        context.sessions.drained().await;
        if let Err(error) = context.sessions.close(&session, "the shepherd shut down").await {
            tracing::warn!(session = %session.id(), %error, "cannot close a session; the reaper will");
        }
        return;
    }
}

/// Works under one session until it is over or the loop is drained.
async fn work_under<L: ControlLoop>(
    control_loop: &L,
    session: &Session,
    idle: &mpsc::UnboundedSender<Slot>,
    context: &LoopContext,
) {
    loop {
        let (sender, mut handed) = oneshot::channel();
        if idle.send(Slot { session: session.clone(), work: sender }).is_err() {
            return;
        }
        let work = tokio::select! {
            () = session.lost().cancelled() => None,
            () = context.drain.cancelled() => None,
            work = &mut handed => match work {
                Ok(work) => Some(work),
                Err(_) => return,
            },
        };
        let Some(work) = work else {
            // From here on it goes back to whoever would have handed it out.
            handed.close();
            if let Ok(unbegun) = handed.try_recv() {
                give_back(unbegun).await;
            }
            return;
        };
        let traced = trace_of(&work);
        let span = tracing::info_span!(
            parent: &traced,
            "work",
            process = %work.process(),
            machine = %work.machine(),
            fence = work.fence(),
        );
        handle(control_loop, work, context, &traced).instrument(span).instrument(traced.clone()).await;
        if session.lost().is_cancelled() || context.drain.is_cancelled() {
            return;
        }
    }
}

async fn handle<L: ControlLoop>(control_loop: &L, work: Work, context: &LoopContext, traced: &Span) {
    let began = Instant::now();
    let stop = work.stop().clone();
    failpoint::pass(control_loop.name(), "claimed");
    let outcome = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        () = context.abort.cancelled() => None,
        outcome = AssertUnwindSafe(control_loop.handle(&work)).catch_unwind() => Some(outcome),
    };
    let ending = Instant::now();
    let (result, ended) = match outcome {
        None => {
            let because = work.stop_reason().unwrap_or("the shepherd is shutting down").to_owned();
            tracing::info!(because, "stopped");
            let cancelled = written(work.cancel(because)).await;
            failpoint::pass(control_loop.name(), "cancelled");
            (WorkResult::Cancelled, cancelled)
        }
        Some(Ok(Ok(Handled::Finished { changes, detail }))) => {
            tracing::debug!(detail, "finished");
            (WorkResult::Finished, written(work.finish(changes, detail)).await)
        }
        Some(Ok(Ok(Handled::PutOff { changes, until, reason }))) => {
            tracing::debug!(%until, reason, "put off");
            (WorkResult::PutOff, written(work.put_off(changes, until, reason)).await)
        }
        Some(Ok(Err(HandlerError { cause, backoff, changes }))) => {
            tracing::info!(cause, "failed");
            traced.record("error", &cause);
            let failed = work.fail(changes, format!("failed to process: {cause}"), backoff);
            (WorkResult::Failed, written(failed).await)
        }
        Some(Err(panic)) => {
            let text = panic_text(&*panic);
            tracing::error!(text, "a handler panicked; its work fails and its worker goes on");
            traced.record("error", &text);
            let failed = work.fail(Vec::new(), format!("the handler panicked: {text}"), None);
            (WorkResult::Panicked, written(failed).await)
        }
    };
    context.metrics.end_written(ending.elapsed());
    failpoint::pass(control_loop.name(), "ended");
    let result = match ended {
        Ok(()) => result,
        Err(error) => {
            tracing::warn!(%error, "the end of work could not be written");
            traced.record("error", display(&error));
            WorkResult::Lost
        }
    };
    traced.record("result", result.as_str());
    context.metrics.ended(result, began.elapsed());
}

/// Writing the end of work, as a part of its trace.
async fn written<T>(end: impl Future<Output = T>) -> T {
    end.instrument(tracing::debug_span!(target: TRACES, "write the end")).await
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no text".to_owned())
}
