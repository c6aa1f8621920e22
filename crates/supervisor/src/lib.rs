//! Supervision tree: tasks that start children and are restarted with a backoff when they fail.
//!
//! The parts of a node depend on what the node is ordered to be, and that changes. So they are not started by a list
//! from top to bottom. Each part is a *runnable*: a function that makes a future. It starts the parts that it needs as
//! its children, reports that it is healthy, and ends when the reason for its start no longer holds. A runnable that
//! ends without having reported that it is done is restarted, after everything that it had started has returned. Parts
//! share their state through *watch cells*, which outlive all of them.
//!
//! # How it works
//!
//! [`supervise::Supervisor::start`][] runs a root. Each run of a runnable is a tokio task. When the task ends,
//! [`exit_reason`][] classifies what it returned as done, cancelled or dead. The tree, which is pure and behind a lock,
//! decides from that which runs are cancelled and which are started, and the task that has just ended carries it out.
//! So no task watches all others, and nothing is polled.
//!
//! * [`name`][]: names of runnables, unique among siblings.
//! * [`state`][]: the state of a runnable, and a change of state.
//! * [`exit_reason`][]: how a run ends, and what its end means. Pure.
//! * `tree`: parents, children and groups, and which runnable is restarted when. Pure: no task, no clock.
//! * [`context`][]: what a runnable gets: a [`Starting`](context::Starting), later a [`Healthy`](context::Healthy).
//! * [`supervise`][]: the tasks on tokio.
//! * `quiescence`: counts the runnables that have something to do, so that a test knows when nothing is left to happen.
//! * [`report`][]: the state of the tree, printed for people.
//! * [`watch_cell`][]: a cell with the newest value, which late watchers get too.
//! * [`combine`][]: one decision from several cells.
//!
//! # Invariants
//!
//! * A runnable is *new* until it reports that it is *healthy*, and starts all its children before that. Both are
//!   types: only a `Starting` can start children, and becoming healthy consumes it.
//! * It is *done* when it has reported that and returned. To return without that report is a failure, which is a type
//!   too: it can only return a [`Done`](exit_reason::Done) or a [`RunnableError`](exit_reason::RunnableError).
//! * It is *cancelled* when it was cancelled and returns the [`Cancelled`](exit_reason::Cancelled) of its own run. The
//!   cancellation of another run is a failure, and so is every other error: a connection that broke because its server
//!   was cancelled is one.
//! * It is *dead* when it failed or panicked. Then all of its group is cancelled, each with its children. Each of them
//!   is restarted as soon as everything below it has returned; the dead one also waits for a delay of the crate
//!   `backoff`.
//! * Two runs of one runnable never overlap, and neither do those of its children.
//! * A runnable that ignores its cancellation holds up those above it for ever, and only those. The report shows which
//!   runnable waits for which.
//!
//! # Notes for the next implementor
//!
//! * Return the error of [`until_cancelled`](context::Scope::until_cancelled) with `?`, also wrapped in other errors:
//!   the classification searches the sources of an error for the cancellation.
//! * A task that a runnable spawns by itself is outside the tree. It must not outlive the run, and a test that waits
//!   for quiescence does not see it.
//! * A decision about restarts belongs into `tree`, which tests drive with random events.

pub mod combine;
pub mod context;
pub mod exit_reason;
pub mod name;
mod quiescence;
pub mod report;
pub mod state;
pub mod supervise;
mod tree;
pub mod watch_cell;
