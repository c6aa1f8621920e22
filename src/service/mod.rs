//! The service as one process: flags, configuration, start and stop.
//!
//! Only this module imports both the control loops and the listeners, so that neither of them depends on the other.
//!
//! * [`flags`]: the command-line flags and their defaults.
//! * [`configuration`]: the same flags in a TOML file, and providers.
//! * [`service_plan`]: validates flags and file and turns them into a plan, which `--check` prints.
//! * [`check`]: validates the plan against what it names, without changing anything.
//! * [`listeners`]: callback server, API and metrics of this process.
//! * [`service_metrics`]: registers all metrics.
//! * [`run`]: starts and stops the service.
//! * [`preflight`]: checks everything before anything is changed.
//! * [`demo`]: a simulated fleet with its own database.
//! * [`scratch`]: temporary directories that are removed when the process ends.
//! * [`traces`]: exports the spans of each work item.

pub mod check;
pub mod configuration;
pub mod demo;
pub mod failure;
pub mod flags;
pub mod listeners;
pub mod logging;
pub mod preflight;
pub mod run;
pub mod scratch;
pub mod service_metrics;
pub mod service_plan;
pub mod traces;
