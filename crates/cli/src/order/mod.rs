//! Orders: calls of the fleet API that change something.
//!
//! An order has a reason ([`reason`][]), an operator ([`operator`][]), and an idempotency key ([`idempotency_key`][]),
//! by which it is carried out once however often it is sent. [`retry::send_order`][] sends it, again if its response
//! was lost, and marks it as a dry run if the operator requested one ([`dry_run`][]). The server decides the order
//! under the lock of what it changes, and writes the audit, and the history of a machine, in the same transaction.
//!
//! An order that nothing undoes is confirmed before it is sent ([`confirmation`][]).
//!
//! The flags `--idempotency-key` and `--dry-run` belong to every order, apart from the commands that
//! [`idempotency_key`][] and [`dry_run`][] exclude. So the grammar adds them ([`crate::command::grammar`]), and
//! [`retry::send_order`][] takes them from the context of the command ([`crate::context`]): a new command only passes
//! its context on. An order with work that continues after its answer has [`wait_flags`][].

pub mod confirmation;
pub mod dry_run;
pub mod expiry;
pub mod idempotency_key;
pub mod operator;
pub mod outcome;
pub mod reason;
pub mod retry;
pub mod wait_flags;
