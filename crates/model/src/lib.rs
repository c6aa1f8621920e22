//! Model: plain types and pure decisions about machines and clusters.
//!
//! Shepherd decides here and acts elsewhere. A control loop reads facts, calls a function of this crate, and carries
//! out what it returns. `shepherdctl plan` prints what the same functions return, `shepherdctl why` explains it, and
//! tests call them with tables of cases. Most decisions have the shape `fn(facts, policy, now) -> plan`.
//!
//! # How a decision about a machine is made
//!
//! 1. [`facts`][] are what the BMDB knows of the machine at one moment. [`policy`][] is the configuration of the fleet.
//! 2. [`schedule::next_due`][] computes from them when each lane of the machine is due, for which process, and why. It
//!    is called in every transaction that changes a fact, except that of a heartbeat which only changes a time.
//! 3. A loop claims what is due and calls the decision of its process: [`recovery`][], [`power_control`][],
//!    [`retirement`][]. A step that a user of the machine may notice is first checked by [`disruption`][].
//! 4. The outcome is a new fact, and the schedule is computed again.
//!
//! A cluster has one function for all its machines: [`cluster::plan::plan_cluster`][].
//!
//! # Modules by subject
//!
//! * Machines: [`facts`][], [`ids`][], [`phase`][] (derived from facts), [`provider_status`][], [`adoption`][] (what
//!   bounds how many there are of a provider), [`host_key`][], [`label`][], [`selector`][] (the language that chooses
//!   machines), [`priority`][], [`waits`][], [`machine_view`][] (a machine as shown), [`hardware_report`][] (as shown),
//!   [`timeline`][] (its history), [`event_name`][] (of what is in it), [`unknown_fence`][].
//! * Schedule: [`schedule`][], [`process`][] (kinds of work and lanes), [`schedule_mismatch`][], [`backoff`][],
//!   [`circuit_breaker`][], [`pause`][], [`routine`][] (work that readers need not see line by line).
//! * Recovery: [`recovery`][] (the ladder), [`needs_human`][] (obstacles), [`healing`][], [`brake`][], [`recent_step`][] (what
//!   was done lately).
//! * Disruption: [`disruption`][] (the check), [`budget`][] (budgets as shown), [`power_order`][],
//!   [`power_control`][], [`retirement`][].
//! * The fleet: [`policy`][], [`policy_flags`][], [`plan`][] (forecast), [`why`][] (explanation), [`issues`][],
//!   [`fleet_sample`][] (metrics), [`database_limits`][] and [`database_durability`][] (of the database
//!   server).
//! * Clusters: [`cluster`][], [`kubernetes`][] (bundles and versions), [`node_role`][], [`role_declaration`][],
//!   [`template`][].
//! * Releases and takeover: [`artefact`][], [`signed_artefact`][] (signatures of files), [`roll_out`][] (with what an
//!   agent reports of its release), [`roll_out_view`][], [`host_finding`][] (what an agent finds wrong with how it runs),
//!   [`storage_level`][] (when a file system is nearly full), [`open_files`][], [`remote_step`][].
//! * Programs: [`program_mark`][] (by which a role server is recognized), and of others [`program_versions`][] (versions
//!   with a published fault, and which etcd may replace another).
//! * Operators and their orders: [`access`][], [`admins`][], [`two_person_rule`][], [`order_limits`][],
//!   [`order_rules`][] (which orders nothing undoes), [`rpc_name`][] (of the RPCs that give them), [`log_request`][].
//! * Text and time: [`time`][], [`humanize`][], [`byte_size`][], [`natural_order`][] (of names with numbers),
//!   [`text_layout`][], [`text_file`][] (files that people write), [`pem_blocks`][] (certificates and keys in them),
//!   [`plain_text`][] (text that people give), [`sanitize`][] (text of others), [`excerpt`][] (answers in errors),
//!   [`firmware_text`][] (placeholders in the text of firmware), [`shell_words`][], [`arguments`][], [`usage_error`][],
//!   [`traces`][], [`configuration_value`][] (values of a configuration file).
//!
//! # Invariants
//!
//! * No decision does I/O or reads a clock. Time is a parameter, and so is a random number. Leases and deadlines are
//!   measured by the database's clock. Only [`ids`][] makes new identifiers.
//! * The same arguments give the same result. Where one of several machines is chosen, the order is defined.
//! * A wait has a reason: [`schedule::DueWork`][] cannot be built without one, and records where in the code it was
//!   decided.
//! * Names that are stored or sent do not change. `as_str` of a type has them.
//! * Imports go one way. A definition that two modules share lies below both, and no import cycle has more than three
//!   files (`tools/cycles`). So [`facts`][] imports only the types of what rows contain, and decisions import
//!   [`facts`][].
//!
//! # Notes for the next implementor
//!
//! * A change of what [`schedule::next_due`][] returns needs a new [`schedule::RULES_VERSION`][], so that stored rows
//!   are computed again.
//! * [`phase::phase_of`][] has a twin in SQL, `sql/fleet/count_phases.sql`. A property test compares them.
//! * A process that acts on a machine also has an effect in [`plan`][], a note in [`why`][], and an issue if it can be
//!   stuck ([`issues`][]).
//! * An earlier release reads the stored [`policy::Policy`][] too. A new field of [`policy::Policy`][] gets a default,
//!   and the earlier release ignores it. A new kind of budget in [`policy::Policy::budgets`][], or a new field of a
//!   type with `deny_unknown_fields`, would make the earlier release reject the row.

pub mod access;
pub mod admins;
pub mod adoption;
pub mod arguments;
pub mod artefact;
pub mod backoff;
pub mod brake;
pub mod budget;
pub mod byte_size;
pub mod circuit_breaker;
pub mod cluster;
pub mod configuration_value;
pub mod database_durability;
pub mod database_limits;
pub mod disruption;
pub mod event_name;
pub mod excerpt;
pub mod facts;
pub mod firmware_text;
pub mod fleet_sample;
pub mod hardware_report;
pub mod healing;
pub mod host_finding;
pub mod host_key;
pub mod humanize;
pub mod ids;
pub mod issues;
pub mod kubernetes;
pub mod label;
pub mod log_request;
pub mod machine_view;
pub mod natural_order;
pub mod needs_human;
pub mod node_role;
pub mod open_files;
pub mod order_limits;
pub mod order_rules;
pub mod pause;
pub mod pem_blocks;
pub mod phase;
pub mod plain_text;
pub mod plan;
pub mod policy;
pub mod policy_flags;
pub mod power_control;
pub mod power_order;
pub mod priority;
pub mod process;
pub mod program_mark;
pub mod program_versions;
pub mod provider_status;
pub mod recent_step;
pub mod recovery;
pub mod remote_step;
pub mod retirement;
pub mod role_declaration;
pub mod roll_out;
pub mod roll_out_view;
pub mod routine;
pub mod rpc_name;
#[cfg(test)]
mod sample_machine;
pub mod sanitize;
pub mod schedule;
pub mod schedule_mismatch;
pub mod selector;
pub mod shell_words;
pub mod signed_artefact;
pub mod storage_level;
pub mod template;
pub mod text_file;
pub mod text_layout;
pub mod time;
pub mod timeline;
pub mod traces;
pub mod two_person_rule;
pub mod unknown_fence;
pub mod usage_error;
pub mod waits;
pub mod why;
