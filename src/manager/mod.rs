//! Control loops over machines, providers and clusters.
//!
//! They turn facts about machines into machines in use.
//!
//! * [`control_loop`]: the generic runner. It handles sessions, claims and panics, and knows nothing about machines.
//! * `work_source`: where its work comes from, and which of that is paused.
//! * [`initializer`]: enrols the role server on machines without one.
//! * [`recoverer`]: executes the recovery ladder for silent machines.
//! * [`retirer`]: releases machines to their providers.
//! * [`power_controller`]: executes operators' orders to reboot machines and to switch their power.
//! * [`updater`]: refreshes what providers report of machines.
//! * [`provisioner`]: brings providers' machines into the BMDB. It is no loop over machines: it has one task per
//!   provider, under a named lease.
//! * [`cluster`]: makes clusters of machines, with one task per cluster, under a named lease.
//! * [`housekeeping`]: reaper, sweeper, brakes.
//! * [`sampler`]: counts the fleet once a minute, under a named lease; [`fleet_metrics`] shows the newest count.
//! * [`provider_breakers`]: circuit breakers of providers whose calls time out.
//!
//! A loop never decides inside I/O code: `plan(snapshot, policy, now)` decides the next step, the handler executes it,
//! and what was learnt returns as changes.

pub mod cluster;
pub mod control_loop;
pub(crate) mod failpoint;
pub mod fleet_metrics;
pub mod housekeeping;
pub mod initializer;
pub mod limiter;
pub mod machine_access;
pub mod metrics;
pub mod power_controller;
pub mod provider_breakers;
pub mod provider_set;
pub mod provisioner;
pub mod recoverer;
pub mod recovery_brakes;
pub mod retirer;
pub mod roll_outs;
pub mod sampler;
pub mod updater;
mod work_source;
