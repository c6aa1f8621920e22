//! The whole fleet: lists, counts, samples, providers, roll-outs, artefacts, secrets, retention.
//!
//! What is read or kept here concerns many machines, so its cost must not grow with the fleet unless it says so.
//!
//! # How it works
//!
//! * **Lists** for people come in pages with a cursor: machines by filter ([`listing`]), what is due and what failed
//!   ([`queues`]), sessions and work ([`sessions`]).
//! * **Counts** are taken from indexes up to a bound ([`statistics`], [`counts`]), or from a sample that one shepherd
//!   stores once a minute ([`sample`]).
//! * **The whole fleet** is read page by page, each page a statement of its own: for plans ([`view`]) and for issues
//!   ([`issue_inputs`]).
//! * **Providers** deliver machines ([`provider`]). The [`brake`] stops recovery when too many machines fall silent at
//!   once.
//! * **Roll-outs** of a release are ordered and read in [`roll_out`]. An [`artefact`] is a file that machines fetch
//!   from any shepherd.
//! * **Shared by all shepherds:** secrets, sealed (`secret`), and the addresses at which servers can be reached
//!   ([`endpoints`]).
//! * **Housekeeping:** [`retention`] lists every table with its bound and deletes old rows; [`vacuum_stats`] reads what
//!   the database itself leaves behind.
//!
//! # Invariants
//!
//! * No transaction reads the whole fleet: no snapshot of the database is held for longer than a page takes.
//! * A list that hardly any machine matches comes in pages with hardly any machine, never in one long statement.
//! * Lists show `phase_index`, which may lag behind the truth by a moment. The view of one machine is computed from its
//!   facts ([`crate::machine::view`]).
//! * Types that are serialized are what `shepherdctl -o json` prints: a field may be added, none changes its name or
//!   meaning.
//! * Each table has a bound for its rows.
//!
//! # Notes for the next implementor
//!
//! * A statement that reads an index over the whole fleet says so in its description, and is for a gauge or for a
//!   person who waits, never for a loop.
//! * `tests/all/bmdb_explain.rs` bounds the buffers of statements on a large fleet.

pub mod artefact;
pub mod brake;
pub mod counts;
pub mod endpoints;
pub mod issue_inputs;
pub mod listing;
pub mod provider;
pub mod queues;
pub mod retention;
pub mod roll_out;
pub mod sample;
#[cfg(feature = "sealing")]
pub mod secret;
pub mod sessions;
pub mod statistics;
pub mod vacuum_stats;
pub mod view;
