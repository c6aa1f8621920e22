//! A tree of tasks that start each other, and start again when they end.
//!
//! What runs on a node depends on what the node is asked to be, and that changes. So nothing on it is started by a list
//! from top to bottom: each part is a *runnable*, which starts the parts it needs as its children, says when it is
//! healthy, and ends when what it was started for is no longer so. Whoever ends without having said that it is done is
//! started again, after everything it had started has returned. Parts tell each other what they know by *values*, which
//! outlive all of them.
//!
//! # How the files fit
//!
//! * [`name`][]: what a runnable is called among its siblings.
//! * [`outcome`][]: how a runnable ends, and what its end means. Pure.
//! * [`backoff`][]: how long a dead one waits. Pure.
//! * [`tree`][]: who is whose child, in which state, and who is to start again. Pure: no task, no clock.
//! * [`context`][]: what a runnable is given: a [`Starting`](context::Starting), later a [`Healthy`](context::Healthy).
//! * [`supervise`][]: the tasks themselves, on tokio.
//! * [`awake`][]: how many of them have something to do, which is how a test knows that nothing is left to happen.
//! * [`report`][]: the tree as people read it.
//! * [`value`][]: the newest of something, for whoever asks, however late.
//! * [`reduce`][]: one decision from several values.
//!
//! # The rules
//!
//! * A runnable is *new* until it says that it is *healthy*, and starts all its children before that. Both are types:
//!   only a `Starting` can start children, and becoming healthy consumes it.
//! * It is *done* when it said so and returned. To return without having said so is a failure, which is a type too:
//!   there is nothing else to return than a [`Done`](context::Done) or a [`Stop`](outcome::Stop).
//! * It is *cancelled* when it was asked to end and answers with the [`Cancelled`](outcome::Cancelled) of its own life.
//!   Anybody else's, and every other error, is a failure: a connection that broke because its server was cancelled is
//!   one.
//! * It is *dead* when it failed or panicked. Then its children are cancelled, and with it all of its group. Each of
//!   them starts again as soon as everything below it has returned; the dead one, after its back-off.
//! * One that ignores being cancelled holds up those above it for ever, and only those. The report says who waits for
//!   whom.

pub mod awake;
pub mod backoff;
pub mod context;
pub mod name;
pub mod outcome;
pub mod reduce;
pub mod report;
pub mod supervise;
pub mod tree;
pub mod value;
