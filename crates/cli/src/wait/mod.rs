//! `wait`, and `--wait` of orders: wait until objects meet a condition.
//!
//! The objects are selected once, and then read again and again until each of them has met the condition. A shepherd
//! may stop meanwhile: the reads continue at the next server of the context ([`crate::client::reconnect`]).
//!
//! * [`condition`][]: the conditions, as `--for` takes them, and what an order aims at.
//! * [`snapshot`][]: what is known of an object at one moment.
//! * [`decide`][]: whether an object meets a condition, may meet it later, or cannot meet it any more. It is a pure
//!   function of a snapshot, a condition and a time.
//! * [`progress`][]: which objects have met the condition, what to print, and when the waiting ends. Time is passed in.
//! * [`fetch`][]: fetches objects, and makes snapshots of them.
//! * [`follow`][]: the loop that fetches, decides and prints. It decides nothing itself.
//! * [`command`][]: `wait KIND [NAME…] --for CONDITION`. [`after_order`][]: `--wait`.
//!
//! # Invariants
//!
//! * An object that met the condition once has met it, whatever happens to it later.
//! * No sentence is read: what a machine, a cluster or an update is follows from fields of the API alone.
//! * The exit code is 0 only if every object met the condition.
//!
//! # Notes for the next implementor
//!
//! A new condition is a variant of a goal in [`condition`][], a row of its table, and an arm in [`decide`][] with
//! rows of the table of its test. An order with work that continues after its answer gets
//! [`crate::order::wait_flags::WaitFlags`] and an arm in [`after_order`][]. One that waits without a limit, and prints its
//! answer at the end, calls [`follow`][] itself: `cluster rotate-authority`.

pub mod after_order;
pub mod command;
pub mod condition;
pub mod decide;
pub mod fetch;
pub mod follow;
pub mod progress;
pub mod snapshot;
