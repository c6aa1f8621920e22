//! Service: `shepherd` as one process, from its flags to its stop.
//!
//! # Purpose
//!
//! The control loops of [`manager`](crate::manager) and the listeners of [`server`][] do not know each
//! other. This module imports both, gives them what they share (the database, sessions, metrics, keys), and starts and
//! stops them in order. It decides nothing about machines.
//!
//! # How it works
//!
//! [`program`] is the entry point of `shepherd`. A start passes through these steps. A step that fails ends the program
//! with an exit code, which states whether the caller made a mistake ([`failure::ExitFailure`]).
//!
//! 1. `command_line` parses the arguments. [`flags`] defines the flags and their environment variables.
//!    [`configuration`] turns the keys of the TOML file into arguments in front of them, so that there is one parser.
//!    [`provider_configuration`] has the providers of the file.
//! 2. [`service_plan`] validates everything that needs no database, provider or machine, and makes a plan of it.
//!    `plan_description` writes it for people.
//! 3. [`preflight`] reads what the plan names: providers' lists, the role server (`agent_check`), certificates, keys.
//!    `listen_addresses` warns about endpoints of another family than their listener. With `--check`, [`check`] prints the
//!    plan, the version of the schema and what was found, and the program ends here.
//! 4. [`database`] opens the database, starts a private PostgreSQL if the plan has one, and brings the schema up to
//!    date.
//! 5. [`start`] writes the policy that flags give, and starts sessions, [`listeners`], housekeeping and the loops of
//!    the plan. [`ssh_access`] loads what the loops reach machines with.
//! 6. [`program`] waits for a signal. Then [`running_service`] stops everything gracefully. A second signal skips the grace
//!    period. [`stop_deadline`] divides the time of the stop.
//!
//! [`logging`] and [`traces`] write and export what happens. [`os_process`] has the signals. [`scratch`] has temporary
//! directories that are removed even if the process is killed.
//!
//! [`demo`] runs the same service with short limits and a private database, against a simulator in a process of its
//! own.
//!
//! # Invariants
//!
//! * The preflight runs before the first change, so that a mistake leaves no upgraded schema behind. `--check` changes
//!   nothing.
//! * A part that fails to start stops the parts that were started before it.
//! * A stop returns when no work of this process is live and every session is closed. If the database does not answer,
//!   it gives up at its deadline, and the sessions expire by themselves.
//! * A plan and its description have no secrets. They have the paths of keys.
//!
//! # For the next implementor
//!
//! A new flag is a field of [`flags::ServiceFlags`]. That makes it an environment variable and a key of the file as
//! well. A new part of the service is a variant of [`flags::ServiceComponent`], a line in the description of the plan,
//! and a start in [`start`]. A task that works under a session belongs to the workers of the running service, which a
//! stop waits for first; any other task belongs to its tasks. `CONTRIBUTING.md` lists the steps for a loop and for a
//! provider.

mod agent_check;
pub mod check;
mod command_line;
pub mod configuration;
pub mod database;
pub mod demo;
pub mod failure;
pub mod flags;
mod listen_addresses;
pub mod listeners;
pub mod logging;
pub mod os_process;
mod plan_description;
pub mod preflight;
pub mod program;
pub mod provider_configuration;
pub mod running_service;
pub mod scratch;
pub mod service_plan;
mod signing_keys;
pub mod ssh_access;
pub mod start;
pub mod stop_deadline;
pub mod traces;
