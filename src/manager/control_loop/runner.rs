//! Runner of a control loop: sessions, claiming, dispatch, outcomes, panics.
//!
//! It runs N workers in parallel for one handler.
//!
//! Every worker holds a session. Idle workers enter a queue. One claimer per loop claims for all of them in one
//! statement and dispatches a machine to each. So N workers cost the database one poll, not N, and never compete with
//! each other for the same row.
//!
//! A worker runs the handler and ends the work by what it returns. The handler decides nothing about the lease. Its
//! future is dropped when the session ends, when the machine is not due for this process any more, or when the shepherd
//! shuts down. A panic in the handler fails that one work item, with the panic's text as the cause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::field::{Empty, display};
use tracing::{Instrument, Span};

use crate::backoff::{ExponentialBackoff, spread_interval};
use crate::bmdb::engine::claim::NextDue;
use crate::bmdb::engine::session::{Session, Sessions};
use crate::bmdb::engine::wakeup::WakeUps;
use crate::bmdb::engine::work::Work;
use crate::manager::catch_panic::catch_panic;
use crate::manager::control_loop::work_source::{SourceOutcome, WorkSource};
use crate::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome};
use crate::manager::failpoint;
use crate::manager::limiter::Limiter;
use crate::manager::metrics::{LoopMetrics, WorkResult};
use crate::model::traces::TRACE_TARGET;

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
    let claimer_done = CancellationToken::new();
    for number in 0..settings.parallelism.max(1) {
        let worker =
            run_worker(control_loop.clone(), number, idle.clone(), context.clone(), claimer_done.clone());
        tasks.spawn(worker);
    }
    drop(idle);
    let (process, providers) = (control_loop.process(), control_loop.providers());
    let source = WorkSource::new(&context.sessions, process, providers, settings.limiter);
    // The claimer ends by itself when drained and is never dropped: a claim under way would still commit, and its work
    // would stay under a session that its worker could then not close.
    run_claimer(source, slots, context).await;
    claimer_done.cancel();
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            tracing::error!(loop_name = control_loop.name(), %error, "a worker ended early");
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
/// Time between two polls without wake-ups, while they find nothing.
const IDLE_POLL: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(50), factor: 2.0, max: Duration::from_secs(1) };

impl PollPacer {
    fn next_delay(&mut self, next: NextDue) -> Duration {
        let ceiling = if self.has_wake_ups { SAFETY_POLL } else { IDLE_POLL.max };
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
        self.poll_interval = IDLE_POLL.next_nominal(self.poll_interval);
        spread_interval(pause, 0.1, rand::random())
    }
}

async fn run_claimer(
    mut source: WorkSource,
    mut slots: mpsc::UnboundedReceiver<IdleWorker>,
    context: LoopContext,
) {
    let process = source.process;
    let mut idle: Vec<IdleWorker> = Vec::new();
    let notified = context.sessions.bmdb().dialect().notifies();
    let mut pace = PollPacer { poll_interval: IDLE_POLL.initial, has_wake_ups: notified };
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
        match source.source_work(&sessions, eager, &context.metrics).await {
            Ok(SourceOutcome::Work(work)) => {
                context.metrics.record_claimed(work.len());
                for waited in work.iter().filter_map(Work::queue_delay) {
                    context.metrics.record_wait(waited);
                }
                for undeliverable in dispatch_work(work, &mut idle) {
                    cancel_unstarted(undeliverable).await;
                }
                pace.poll_interval = IDLE_POLL.initial;
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
                        pace.poll_interval = IDLE_POLL.initial;
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
    let mut undeliverable = Vec::new();
    for item in work {
        let id = item.session().id();
        let Some(position) = idle.iter().position(|slot| slot.session.id() == id) else {
            undeliverable.push(item);
            continue;
        };
        undeliverable.extend(idle.swap_remove(position).work_sender.send(item).err());
    }
    undeliverable
}

/// The trace span of a work item.
fn work_span(work: &Work) -> Span {
    tracing::debug_span!(
        target: TRACE_TARGET,
        "work",
        process = %work.process(),
        machine = %work.machine(),
        fence = work.fence(),
        elapsed_ns = i64::try_from(work.time_since_claim().as_nanos()).unwrap_or(i64::MAX),
        result = Empty,
        error = Empty,
    )
}

/// Cancels work that no worker has started, because the shepherd stops. It was claimed, so it has a trace like any
/// other.
async fn cancel_unstarted(work: Work) {
    let trace_span = work_span(&work);
    async {
        let reason = work.stop_reason().unwrap_or("the shepherd is shutting down").to_owned();
        let result = match trace_end_write(work.cancel(reason)).await {
            Ok(()) => WorkResult::Cancelled,
            Err(error) => {
                trace_span.record("error", display(&error));
                WorkResult::Lost
            }
        };
        trace_span.record("result", result.as_str());
    }
    .instrument(trace_span.clone())
    .await;
}

async fn run_worker<L: ControlLoop>(
    control_loop: Arc<L>,
    number: usize,
    idle: mpsc::UnboundedSender<IdleWorker>,
    context: LoopContext,
    claimer_done: CancellationToken,
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
        claimer_done.cancelled().await;
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
        let (sender, mut receiver) = oneshot::channel();
        if idle.send(IdleWorker { session: session.clone(), work_sender: sender }).is_err() {
            return;
        }
        let work = tokio::select! {
            () = session.lost().cancelled() => None,
            () = context.drain.cancelled() => None,
            work = &mut receiver => match work {
                Ok(work) => Some(work),
                Err(_) => return,
            },
        };
        let Some(work) = work else {
            // From here on the channel is closed, and the claimer cancels the work that it cannot send.
            receiver.close();
            if let Ok(work) = receiver.try_recv() {
                cancel_unstarted(work).await;
            }
            return;
        };
        let trace_span = work_span(&work);
        let span = tracing::info_span!(
            parent: &trace_span,
            "work",
            process = %work.process(),
            machine = %work.machine(),
            fence = work.fence(),
        );
        handle(control_loop, work, context, &trace_span)
            .instrument(span)
            .instrument(trace_span.clone())
            .await;
        if session.lost().is_cancelled() || context.drain.is_cancelled() {
            return;
        }
    }
}

async fn handle<L: ControlLoop>(control_loop: &L, work: Work, context: &LoopContext, trace_span: &Span) {
    let began = Instant::now();
    failpoint::hit(control_loop.name(), "claimed");
    let outcome = tokio::select! {
        biased;
        () = context.abort.cancelled() => None,
        outcome = work.run_while_held(catch_panic(control_loop.handle(&work))) => outcome,
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
            tracing::debug!(not_before = %until, reason, "requeued");
            (WorkResult::Requeued, trace_end_write(work.postpone(changes, until, reason)).await)
        }
        Some(Ok(Err(HandlerError { cause, backoff, changes }))) => {
            tracing::warn!(cause, "failed");
            trace_span.record("error", &cause);
            let failed = work.fail(changes, format!("failed to process: {cause}"), backoff);
            (WorkResult::Failed, trace_end_write(failed).await)
        }
        Some(Err(text)) => {
            tracing::error!(text, "a handler panicked; its work fails and its worker continues");
            trace_span.record("error", &text);
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
            trace_span.record("error", display(&error));
            WorkResult::Lost
        }
    };
    trace_span.record("result", result.as_str());
    context.metrics.record_end(result, began.elapsed());
}

/// Traces the write that ends the work.
async fn trace_end_write<T>(end: impl Future<Output = T>) -> T {
    end.instrument(tracing::debug_span!(target: TRACE_TARGET, "write the end")).await
}
