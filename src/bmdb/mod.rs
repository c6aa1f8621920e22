//! The bare metal database: machines, facts about them, sessions, work,
//! schedule, history. The only room that speaks SQL.
//!
//! # How it works
//!
//! * A **session** ([`session`], [`keeper`]) is a lease that its process keeps
//!   alive. Everything that acts, acts under one.
//! * A **claim** ([`claim`]) puts due machines' lanes under sessions, each with
//!   a fence that grows; [`work`] ends them (`ending`). What a lost session held is freed
//!   by the [`reaper`].
//! * A **fact** changes ([`change`]) only in a transaction that holds the
//!   machine's due rows and writes its [`schedule`] anew before it commits. The
//!   [`sweeper`] proves that nobody forgot.
//! * A **heartbeat** is stored in groups (`group_commit`) as long as it changes nothing but a time, and
//!   else judged singly (`heartbeat`).
//! * An **intent** ([`intent`]) records an outward action before it is taken.
//! * An **order** of an operator ([`action`], [`audit`]) is carried out once and written down in the same
//!   transaction; whose it is, a [`credential`] says.
//! * A **cluster** of machines is asked for and read in [`cluster`]; what becomes of it is written under its lease
//!   (`cluster_work`). Roles that are declared to it are in [`cluster_declaration`], snapshots of it in
//!   [`cluster_snapshot`], and how it is brought back in [`cluster_restore`]. What is foreseen of it is in
//!   [`cluster_foresight`].
//! * A **roll-out** of a release is ordered and read in [`roll_out`]; what becomes of it is written under a lease
//!   (`roll_out_work`).
//! * An [`artefact`] is a file that machines fetch from any shepherd, kept in pieces.
//! * What is counted stands in one book ([`metric_book`], [`metrics`]); the fleet is counted once a minute
//!   ([`sample`]).
//! * What is old is deleted by [`retention`], which lists every table with its bound; [`storage`] looks at
//!   what the database itself leaves behind.
//!
//! # Rules that hold everywhere
//!
//! * Locks are taken in one order: session, due rows by (machine, lane), facts,
//!   work, history. Batches are sorted.
//! * Time is the database's. `clock_timestamp()` where waiting for a lock must
//!   count, `now()` where one moment for a whole transaction is meant.
//! * No transaction stays open over anything but statements, and none is ever
//!   dropped half-way ([`connection::Bmdb::transact`]).
//! * Statements stand in `sql/`, one a file, checked when this is compiled.

pub mod action;
pub mod approval;
pub mod artefact;
mod attempt;
pub mod audit;
pub mod budget;
pub mod change;
pub mod claim;
pub mod cluster;
mod cluster_candidates;
pub mod cluster_credential;
pub mod cluster_declaration;
pub mod cluster_foresight;
pub mod cluster_key;
pub mod cluster_kubernetes;
pub mod cluster_kubernetes_user;
pub mod cluster_restore;
pub mod cluster_snapshot;
pub mod cluster_upgrade;
#[cfg(feature = "shepherd")]
pub mod cluster_upgrade_work;
#[cfg(feature = "shepherd")]
pub mod cluster_work;
pub mod connection;
pub mod credential;
pub mod each;
mod ending;
pub mod error;
pub mod evidence;
pub mod facts;
pub mod find;
pub mod fleet;
pub mod fleet_view;
#[cfg(feature = "shepherd")]
pub mod group_commit;
#[cfg(feature = "shepherd")]
pub mod heartbeat;
pub mod host_key;
pub mod inspect;
pub mod intent;
pub mod keeper;
pub mod lease;
mod left_phases;
pub mod listing;
pub mod live;
pub mod log_request;
pub mod look;
pub mod metric_book;
pub mod metrics;
mod newer_fence;
pub mod pause;
pub mod policy;
mod pool_use;
pub mod postgres_programs;
pub mod power_order;
pub mod private_postgres;
mod private_postgres_directory;
pub mod provision;
pub mod reaper;
mod renewal;
pub mod restore;
pub mod retention;
pub mod retirement;
pub mod roll_out;
#[cfg(feature = "shepherd")]
pub mod roll_out_work;
pub mod sample;
pub mod schedule;
#[cfg(feature = "shepherd")]
pub mod sealed_snapshot;
#[cfg(feature = "shepherd")]
pub mod secret;
pub mod selection;
pub mod session;
pub mod setup;
pub mod silence;
pub mod statistics;
pub mod storage;
pub mod sweeper;
pub mod tags;
pub mod url;
pub mod waiting;
pub mod wakeup;
pub mod work;
