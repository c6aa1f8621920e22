//! Self-update: try another release, keep it once a heartbeat was answered, roll back otherwise.
//!
//! The program at the *stable path*, which the init system or the supervisor starts, stays the proven release until the
//! other one has proven itself. The other one, the *candidate*, is put beside it, and this process becomes it by
//! `execve`: pid and arguments stay, and so do the children of the role server, which the candidate finds as after any
//! restart. It has proven itself when a shepherd has acknowledged one of its heartbeats; then it takes the stable
//! path's name, in one step. Until then any exit brings the former release back: the supervisor starts the program at
//! the stable path.
//!
//! * [`decision`][]: what a role server does when it starts, and with an order (pure).
//! * [`files`][]: the files of an update and their names.
//! * [`self_updater`][]: the role server's side: takes orders, fetches, hands over, proves itself.
//! * [`watchdog`][]: the process of the former release that kills a silent candidate.
//!
//! # A crash after each step
//!
//! | after the step | a start then finds |
//! | --- | --- |
//! | the candidate is beside the stable program | the former release, and nothing on trial |
//! | `update.json` names the trial | the former release: the candidate has failed |
//! | the watchdog runs, the process is the candidate | the same: no heartbeat of it was acknowledged |
//! | the candidate has the stable path's name | the candidate, which is proven and records that |
//! | `release.json` has the outcome | the same |
//! | `update.json` is removed | nothing on trial |
//!
//! # Notes for the next implementor
//!
//! `update.json` is written by the former release and read by the candidate, by the watchdog of the former release, and
//! by whichever of the two starts next. So its fields stay, and a new one needs a default. The flags of `roleserver
//! run` must stay valid too: the candidate gets the arguments of the former release.

pub mod decision;
pub mod files;
pub mod self_updater;
pub mod watchdog;
