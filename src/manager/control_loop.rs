//! Generic control loop: sessions, claiming, dispatch, outcomes, panics.
//!
//! It claims due machines for one process and runs N workers in parallel.
//!
//! # How it works
//!
//! Every worker holds a session. Idle workers enter a queue. One claimer per loop claims for all of them in one
//! statement and dispatches a machine to each. So N workers cost the database one poll, not N, and never compete with
//! each other for the same row.
//!
//! A worker runs the handler and ends the work by what it returns. The handler decides nothing about the lease. Its
//! future is dropped when the session ends, when the machine is not due for this process any more, or when the shepherd
//! shuts down. A panic in the handler fails that one work item, with the panic's text as the cause.
//!
//! # For the next loop
//!
//! Implement [`ControlLoop`]. Read the facts first ([`Work::snapshot`]) and act on the present facts: the claim only
//! means that the machine was due when it was claimed. Make every outward call through [`Work::run_outward_call`] or
//! check [`Work::outward_call_limit`] before it. Return what was learnt as changes.

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

use crate::bmdb::claim::NextDue;
use crate::bmdb::error::BmdbError;
use crate::bmdb::fact_change::FactChange;
use crate::bmdb::facts::MachineSnapshot;
use crate::bmdb::session::{Session, Sessions};
use crate::bmdb::wakeup::WakeUps;
use crate::bmdb::work::Work;
use crate::manager::failpoint;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::{LoopMetrics, WorkResult};
use crate::manager::work_source::{SourceOutcome, WorkSource};
use crate::model::backoff::BackoffPolicy;
use crate::model::circuit_breaker::BreakerOpen;
use crate::model::process::Process;
use crate::model::schedule::next_due;
use crate::model::time::{Timestamp, after};
use crate::model::traces::TRACE_TARGET;

/// The handler of one kind of work.
#[async_trait]
pub trait ControlLoop: Send + Sync + 'static {
    /// Name of the loop: prefix of its flags, label of its metrics, component of its sessions.
    fn name(&self) -> &'static str;

    /// The process it claims.
    fn process(&self) -> Process;

    /// The providers whose machines it can handle.
    fn providers(&self) -> Vec<String>;

    /// Handles one machine. Dropped when the work must stop.
    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError>;
}

/// How a handler wants its work to end.
#[derive(Debug)]
pub enum HandlerOutcome {
    /// The work is done and its backoff is cleared.
    Finished {
        /// Facts that the work established.
        changes: Vec<FactChange>,
        /// Detail for the machine's history.
        detail: String,
    },
    /// The work is postponed without having failed.
    Requeue {
        /// Facts that the work established.
        changes: Vec<FactChange>,
        /// When the machine is due again.
        until: Timestamp,
        /// Reason, shown to people.
        reason: String,
    },
}

impl HandlerOutcome {
    /// Work that is done, with the facts that it established.
    pub fn finished(changes: Vec<FactChange>, detail: impl Into<String>) -> Self {
        Self::Finished { changes, detail: detail.into() }
    }

    /// Work that is postponed because the breaker of its provider is open.
    #[must_use]
    pub fn provider_unavailable(open: BreakerOpen, now: Timestamp) -> Self {
        Self::Requeue { changes: Vec::new(), until: after(now, open.retry_after), reason: open.reason }
    }
}

/// Why a handler failed.
#[derive(Debug)]
pub struct HandlerError {
    /// Stored as the cause, as a sentence.
    pub cause: String,
    /// Backoff in place of the policy's, for a known way to fail.
    pub backoff: Option<BackoffPolicy>,
    /// Facts that the work established before it failed.
    pub changes: Vec<FactChange>,
}

impl HandlerError {
    /// A failure with the policy's backoff.
    pub fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), backoff: None, changes: Vec::new() }
    }

    /// Adds facts that the work established before it failed.
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

/// Ends work whose machine is not due for it any more by the present facts: a hold or a quarantine came between the
/// claim and the first read. The renewal of the lease would stop the work too, but only the next time it runs.
pub(crate) fn no_longer_due(work: &Work, snapshot: &MachineSnapshot) -> Option<HandlerOutcome> {
    let (_, policy) = work.bmdb().policy();
    let due = next_due(&snapshot.facts, work.process().lane(), &policy, snapshot.now);
    let later = !due.timer && due.ready_at.is_some_and(|at| at > snapshot.now);
    (due.process != Some(work.process()) || later)
        .then(|| HandlerOutcome::finished(Vec::new(), format!("it is not due any more: {}", due.reason)))
}

/// How a loop is run.
pub struct LoopSettings {
    /// Number of workers; 0 counts as 1.
    pub parallelism: usize,
    /// Rate limit of its statements.
    pub limiter: Limiter,
}

/// What a running loop needs from the service.
#[derive(Clone)]
pub struct LoopContext {
    /// Sessions of this process.
    pub sessions: Sessions,
    /// Announcements of due work from the database.
    pub wake_ups: WakeUps,
    /// Metrics of this loop.
    pub metrics: LoopMetrics,
    /// Cancelled when no new work may be claimed.
    pub drain: CancellationToken,
    /// Cancelled when work under way must stop.
    pub abort: CancellationToken,
}

/// An idle worker: its session, and where to send its next work.
struct IdleWorker {
    session: Session,
    work_sender: oneshot::Sender<Work>,
}

/// Runs a loop until it is drained: no new work after `drain`, no work under way after `abort`. Returns when every
/// worker has closed its session.
pub async fn run_loop<L: ControlLoop>(control_loop: Arc<L>, settings: LoopSettings, context: LoopContext) {
    let (idle, slots) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let sourced_out = CancellationToken::new();
    for number in 0..settings.parallelism.max(1) {
        let worker =
            run_worker(control_loop.clone(), number, idle.clone(), context.clone(), sourced_out.clone());
        tasks.spawn(worker);
    }
    drop(idle);
    let (process, providers) = (control_loop.process(), control_loop.providers());
    let sourcing = WorkSource::new(&context.sessions, process, providers, settings.limiter);
    // The claimer ends by itself when drained and is never dropped: a claim under way would still commit, and its work
    // would stay under a session that its worker could then not close.
    run_claimer(sourcing, slots, context).await;
    sourced_out.cancel();
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            tracing::error!(loop_name = control_loop.name(), %error, "a worker ended in the middle");
        }
    }
}

/// How long to wait for work that the database does not announce.
struct PollPacer {
    /// Grows while nothing is found.
    poll_interval: Duration,
    has_wake_ups: bool,
}

/// Longest time between two polls when wake-ups are sent.
const SAFETY_POLL: Duration = Duration::from_secs(5);
/// Shortest and longest time between two polls without wake-ups.
const POLL_RANGE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

impl PollPacer {
    fn next_delay(&mut self, next: NextDue) -> Duration {
        let ceiling = if self.has_wake_ups { SAFETY_POLL } else { POLL_RANGE.1 };
        let pause = match next {
            // Work is due but could not be claimed: its lane waits after a lost session, or another shepherd took it.
            NextDue::Now => self.poll_interval,
            NextDue::In(wait) => wait.min(if self.has_wake_ups { ceiling } else { self.poll_interval }),
            NextDue::Never => {
                if self.has_wake_ups {
                    ceiling
                } else {
                    self.poll_interval
                }
            }
        };
        self.poll_interval = (self.poll_interval * 2).min(if self.has_wake_ups {
            Duration::from_secs(1)
        } else {
            POLL_RANGE.1
        });
        pause.mul_f64(0.9 + 0.2 * rand::random::<f64>())
    }
}

async fn run_claimer(
    mut sourcing: WorkSource,
    mut slots: mpsc::UnboundedReceiver<IdleWorker>,
    context: LoopContext,
) {
    let process = sourcing.process;
    let mut idle: Vec<IdleWorker> = Vec::new();
    let notified = context.sessions.bmdb().dialect().notifies();
    let mut pace = PollPacer { poll_interval: POLL_RANGE.0, has_wake_ups: notified };
    // Whether to claim without a probe first: something was just announced or claimed.
    let mut eager = true;
    loop {
        while let Ok(slot) = slots.try_recv() {
            idle.push(slot);
        }
        idle.retain(|slot| !slot.work_sender.is_closed() && !slot.session.lost().is_cancelled());
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
        match sourcing.source_work(&sessions, eager, &context.metrics).await {
            Ok(SourceOutcome::Work(work)) => {
                context.metrics.record_claimed(work.len());
                for waited in work.iter().filter_map(Work::queue_delay) {
                    context.metrics.record_wait(waited);
                }
                for unwanted in dispatch_work(work, &mut idle) {
                    cancel_unstarted(unwanted).await;
                }
                pace.poll_interval = POLL_RANGE.0;
                eager = true;
            }
            Ok(SourceOutcome::Contended) => {
                context.metrics.record_contended();
                let pause = Duration::from_millis(2 + u64::from(rand::random::<u8>()) / 16);
                tokio::time::sleep(pause).await;
            }
            Ok(SourceOutcome::Idle(next)) => {
                eager = false;
                let pause = pace.next_delay(next);
                tokio::select! {
                    () = context.drain.cancelled() => return,
                    () = context.wake_ups.wait_for_wake(process) => {
                        eager = true;
                        pace.poll_interval = POLL_RANGE.0;
                    }
                    () = tokio::time::sleep(pause) => {}
                }
            }
            Err(error) => {
                tracing::warn!(%process, %error, "cannot source work; trying again in a second");
                context.metrics.record_source_failure();
                tokio::select! {
                    () = context.drain.cancelled() => return,
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
            }
        }
    }
}

/// Sends each work item to the worker whose session holds it. Returns the items of workers that accept none any more.
fn dispatch_work(work: Vec<Work>, idle: &mut Vec<IdleWorker>) -> Vec<Work> {
    let mut unwanted = Vec::new();
    for item in work {
        let id = item.session().id();
        let Some(position) = idle.iter().position(|slot| slot.session.id() == id) else {
            unwanted.push(item);
            continue;
        };
        unwanted.extend(idle.swap_remove(position).work_sender.send(item).err());
    }
    unwanted
}

/// The trace span of a work item.
fn work_span(work: &Work) -> Span {
    tracing::debug_span!(
        target: TRACE_TARGET,
        "work",
        process = %work.process(),
        machine = %work.machine(),
        fence = work.fence(),
        elapsed_ns = u64::try_from(work.time_since_claim().as_nanos()).unwrap_or(u64::MAX),
        result = Empty,
        error = Empty,
    )
}

/// Cancels work that no worker has started, because the shepherd stops. It was claimed, so it has a trace like any
/// other.
async fn cancel_unstarted(work: Work) {
    let traced = work_span(&work);
    async {
        let reason = work.stop_reason().unwrap_or("the shepherd is shutting down").to_owned();
        let result = match trace_end_write(work.cancel(reason)).await {
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

async fn run_worker<L: ControlLoop>(
    control_loop: Arc<L>,
    number: usize,
    idle: mpsc::UnboundedSender<IdleWorker>,
    context: LoopContext,
    sourced_out: CancellationToken,
) {
    let details = serde_json::json!({ "worker": number });
    while !context.drain.is_cancelled() {
        let session = match context.sessions.start(control_loop.name(), details.clone()).await {
            Ok(session) => session,
            Err(error) => {
                tracing::warn!(loop_name = control_loop.name(), worker = number, %error, "cannot start a session; trying again in a second");
                tokio::select! {
                    () = context.drain.cancelled() => {}
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
                continue;
            }
        };
        context.metrics.record_session_start();
        run_under_session(&*control_loop, &session, &idle, &context).await;
        if session.lost().is_cancelled() {
            let reason = session.loss_reason().unwrap_or_default();
            tracing::warn!(
                loop_name = control_loop.name(),
                worker = number,
                reason,
                "replacing a session in a second"
            );
            tokio::select! {
                () = context.drain.cancelled() => {}
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
            }
            continue;
        }
        // Until then, a claim under way may still bring work to this session.
        sourced_out.cancelled().await;
        context.sessions.wait_until_drained().await;
        if let Err(error) = context.sessions.close(&session, "the shepherd shut down").await {
            tracing::warn!(session = %session.id(), %error, "cannot close a session; the reaper will");
        }
        return;
    }
}

/// Works under one session until it ends or the loop is drained.
async fn run_under_session<L: ControlLoop>(
    control_loop: &L,
    session: &Session,
    idle: &mpsc::UnboundedSender<IdleWorker>,
    context: &LoopContext,
) {
    loop {
        let (sender, mut handed) = oneshot::channel();
        if idle.send(IdleWorker { session: session.clone(), work_sender: sender }).is_err() {
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
            // From here on the channel is closed, and the claimer cancels the work that it cannot send.
            handed.close();
            if let Ok(unbegun) = handed.try_recv() {
                cancel_unstarted(unbegun).await;
            }
            return;
        };
        let traced = work_span(&work);
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
    failpoint::hit(control_loop.name(), "claimed");
    let outcome = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        () = context.abort.cancelled() => None,
        outcome = AssertUnwindSafe(control_loop.handle(&work)).catch_unwind() => Some(outcome),
    };
    let ending = Instant::now();
    let (result, ended) = match outcome {
        None => {
            let reason = work.stop_reason().unwrap_or("the shepherd is shutting down").to_owned();
            tracing::info!(reason, "stopped");
            let cancelled = trace_end_write(work.cancel(reason)).await;
            failpoint::hit(control_loop.name(), "cancelled");
            (WorkResult::Cancelled, cancelled)
        }
        Some(Ok(Ok(HandlerOutcome::Finished { changes, detail }))) => {
            tracing::debug!(detail, "finished");
            (WorkResult::Finished, trace_end_write(work.finish(changes, detail)).await)
        }
        Some(Ok(Ok(HandlerOutcome::Requeue { changes, until, reason }))) => {
            tracing::debug!(not_before = %until, reason, "put off");
            (WorkResult::Requeued, trace_end_write(work.postpone(changes, until, reason)).await)
        }
        Some(Ok(Err(HandlerError { cause, backoff, changes }))) => {
            tracing::info!(cause, "failed");
            traced.record("error", &cause);
            let failed = work.fail(changes, format!("failed to process: {cause}"), backoff);
            (WorkResult::Failed, trace_end_write(failed).await)
        }
        Some(Err(panic)) => {
            let text = panic_message(&*panic);
            tracing::error!(text, "a handler panicked; its work fails and its worker goes on");
            traced.record("error", &text);
            let failed = work.fail(Vec::new(), format!("the handler panicked: {text}"), None);
            (WorkResult::Panicked, trace_end_write(failed).await)
        }
    };
    context.metrics.record_end_write(ending.elapsed());
    failpoint::hit(control_loop.name(), "ended");
    let result = match ended {
        Ok(()) => result,
        Err(error) => {
            tracing::warn!(%error, "the end of work could not be written");
            traced.record("error", display(&error));
            WorkResult::Lost
        }
    };
    traced.record("result", result.as_str());
    context.metrics.record_end(result, began.elapsed());
}

/// Traces the write that ends the work.
async fn trace_end_write<T>(end: impl Future<Output = T>) -> T {
    end.instrument(tracing::debug_span!(target: TRACE_TARGET, "write the end")).await
}

/// The text of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no text".to_owned())
}
