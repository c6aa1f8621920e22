//! Manager: the control loops over machines, providers and clusters.
//!
//! # Purpose
//!
//! The BMDB has facts about machines, and for each machine when it is due for which work. The manager does that work: it
//! acts on machines, providers and clusters, and records what it learns as new facts. Any number of shepherds run the
//! same loops on one BMDB.
//!
//! # How it works
//!
//! There are three kinds of tasks. They differ in how they keep out of each other's way.
//!
//! *Control loops* handle one machine at a time. A loop claims due machines, so that each has one worker among all
//! shepherds. [`control_loop`] has the trait, and the runner with sessions, claims and panics.
//!
//! * [`initializer`]: enrols the role server on machines without one.
//! * [`recoverer`]: executes the recovery ladder for silent machines.
//! * [`updater`]: refreshes what providers report of machines.
//! * [`power_controller`]: executes operators' orders to reboot machines and to switch their power.
//! * [`retirer`]: releases machines to their providers.
//!
//! *Leased tasks* handle something as a whole, in one shepherd at a time, under a named lease. They work in passes: a
//! pass reads everything, plans, and executes the plan. Only connections and caches are kept between two passes, so that
//! the next holder of the lease continues where the last one stopped.
//!
//! * [`provisioner`]: brings the machines of a provider into the BMDB. One task per provider.
//! * [`cluster`]: makes clusters of machines, and keeps them. One task per cluster.
//! * [`roll_outs`]: orders new releases of the role server, and evaluates their results.
//! * [`sampler`]: counts the fleet once a minute. Every shepherd shows the newest count ([`fleet_metrics`]).
//!
//! *Housekeeping* runs in every shepherd at once, and does no harm by that. [`housekeeping`] has the reaper, the sweeper,
//! retention, the recorder of brakes and the monitor of storage, which also shows the limits of the database server
//! (`database_metrics`). [`process_resources`] watches the disks and the open files of this process.
//!
//! What they share: [`machine_access`] reaches a machine over SSH. [`provider_set`] has the providers, each behind a
//! circuit breaker of [`provider_breakers`]. [`recovery_brakes`] stops recovery while too many machines fall silent.
//! [`limiter`] limits rates, [`metrics`] counts, and `catch_panic` keeps a panic within one work item, pass or round. At
//! the places of `failpoint`, tests abort or freeze the process.
//!
//! # Invariants
//!
//! * I/O code decides nothing. A pure function decides the next step from a snapshot and a time, and the loop executes
//!   it. Most of them are in [`model`][].
//! * The creation of a machine and each disruptive step are recorded as an intent before, and their outcome after. The
//!   next worker finds the intent and knows that the step may have been taken.
//! * Right before a disruptive step, one transaction reads the facts again and checks that the step is allowed.
//! * No outward call starts once the session has ended. One that started may outlast the session by the policy's
//!   outward limit, and the next holder waits for that long. What may last longer than that is harmless: a machine
//!   rejects an older fence.
//! * The manager opens no database transaction. Each call of the BMDB is one, so that none is open during a call outside.
//!
//! # For the next implementor
//!
//! `CONTRIBUTING.md` lists the steps for a new loop, and [`control_loop`] has notes for its handler. Add a file, or a
//! folder if the loop has parts. A leased task copies the structure of [`roll_outs`], which is the shortest. Follow each
//! step that leaves something behind with a fail point, and write a test that stops there.

pub mod agent_file;
mod catch_panic;
pub mod cluster;
pub mod control_loop;
pub mod database_metrics;
pub(crate) mod failpoint;
pub mod fleet_metrics;
pub mod housekeeping;
pub mod initializer;
pub mod limiter;
pub mod machine_access;
pub mod metrics;
pub mod power_controller;
pub mod process_resources;
pub mod provider_breakers;
pub mod provider_set;
pub mod provisioner;
pub mod recoverer;
pub mod recovery_brakes;
pub mod retirer;
pub mod roll_outs;
pub mod sampler;
pub mod updater;
