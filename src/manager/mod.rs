//! The control loops: what turns facts about machines into machines in use.
//!
//! * [`control_loop`]: the generic runner. Knows sessions, claims and panics,
//!   and nothing about machines.
//! * `sourcing`: where its work comes from, and what of that people paused.
//! * [`initializer`]: puts the role server on machines that have none.
//! * [`recoverer`]: climbs the ladder for machines that fell silent.
//! * [`retirer`]: gives machines back.
//! * [`switcher`]: reboots machines and switches their power, as people order.
//! * [`updater`]: asks providers what became of their machines.
//! * [`provisioner`]: brings providers' machines into the BMDB. No loop over
//!   machines but over providers, one at a time each, under a named lease.
//! * [`cluster`]: makes clusters of machines, one task for each, under a named lease.
//! * [`housekeeping`]: reaper, sweeper, brakes.
//! * [`sampler`]: counts the fleet once a minute, under a named lease; [`fleet_metrics`] shows the newest count.
//! * [`breakers`]: who of the providers hangs, and is left alone for a while.
//!
//! A loop never decides inside I/O code: `plan(snapshot, policy, now)` says
//! what to do, the handler does it, and what was learnt goes back as changes.

pub mod access;
pub mod brakes;
pub mod breakers;
pub mod cluster;
pub mod control_loop;
pub(crate) mod failpoint;
pub mod fleet_metrics;
pub mod housekeeping;
pub mod initializer;
pub mod limiter;
pub mod metrics;
pub mod provider_set;
pub mod provisioner;
pub mod recoverer;
pub mod retirer;
pub mod roll_outs;
pub mod sampler;
mod sourcing;
pub mod switcher;
pub mod updater;
