//! A supervision tree: tasks that start children and are restarted with a backoff when they fail.
//!
//! The parts of a node depend on what the node is ordered to be, and that changes. So they are not started by a list
//! from top to bottom. Each part is a *runnable*, which starts the parts it needs as its children, reports when it is
//! healthy, and ends when the reason for its start no longer holds. A runnable that ends without having reported that
//! it is done is restarted, after everything it had started has returned. Parts share their state through *watch
//! cells*, which outlive all of them.
//!
//! # How the files fit
//!
//! * [`name`][]: the names of runnables, unique among siblings.
//! * [`exit_reason`][]: how a runnable ends, and what its end means. Pure.
//! * [`backoff`][]: how long a dead runnable waits. Pure.
//! * [`tree`][]: parents, children and states, and which runnable is restarted when. Pure: no task, no clock.
//! * [`context`][]: what a runnable gets: a [`Starting`](context::Starting), later a [`Healthy`](context::Healthy).
//! * [`supervise`][]: the tasks themselves, on tokio.
//! * [`quiescence`][]: counts the runnables that have something to do, so that a test knows when nothing is left to
//!   happen.
//! * [`report`][]: the state of the tree, printed for people.
//! * [`watch_cell`][]: a cell with the newest value, which late watchers get too.
//! * [`combine`][]: one decision from several values.
//!
//! # The rules
//!
//! * A runnable is *new* until it reports that it is *healthy*, and starts all its children before that. Both are
//!   types: only a `Starting` can start children, and becoming healthy consumes it.
//! * It is *done* when it has reported that and returned. To return without that report is a failure, which is a type
//!   too: it can only return a [`Done`](context::Done) or a [`RunnableError`](exit_reason::RunnableError).
//! * It is *cancelled* when it was cancelled and returns the [`Cancelled`](exit_reason::Cancelled) of its own run. That
//!   of another run, and every other error, is a failure: a connection that broke because its server was cancelled is
//!   one.
//! * It is *dead* when it failed or panicked. Then its children are cancelled, and with it all of its group. Each of
//!   them is restarted as soon as everything below it has returned; the dead one, after its back-off.
//! * A runnable that ignores its cancellation holds up those above it for ever, and only those. The report shows which
//!   runnable waits for which.

pub mod backoff;
pub mod combine;
pub mod context;
pub mod exit_reason;
pub mod name;
pub mod quiescence;
pub mod report;
pub mod supervise;
pub mod tree;
pub mod watch_cell;
