//! The whole fleet: lists, counts, samples, providers, roll-outs, artefacts, secrets, retention.
//!
//! What is here concerns many machines. The cost of a statement must not grow with the fleet, unless its description
//! says that it does.
//!
//! # How it works
//!
//! * **Lists** for people come in pages with a cursor: machines by filter ([`listing`], in the order of
//!   [`machine_walk`]), what is due and what failed ([`queues`]), sessions and work ([`sessions`]), and the processes of
//!   the sessions ([`shepherds`]). Machines that a list or an order names are found together ([`machine_names`]).
//! * **Counts** for people are taken from indexes up to a bound, or from the newest sample ([`statistics`]). One
//!   shepherd stores a sample once a minute ([`sample`]). [`counts`] has counts for a demo and for tests, without a
//!   bound.
//! * **The whole fleet** is read page by page, each page a statement of its own: for plans ([`view`]) and for issues
//!   ([`issue_inputs`]).
//! * **Providers** deliver machines ([`provider`]). The [`brake`] stops recovery when too many machines fall silent at
//!   once.
//! * **Roll-outs** of a release are ordered and read in [`roll_out`]. An [`artefact`] is a file that machines fetch
//!   from any shepherd.
//! * **Shared by all shepherds:** secrets, sealed (`secret`), and the addresses at which servers can be reached
//!   ([`endpoints`]).
//! * **Housekeeping:** [`retention`] lists every table with its bound and deletes old rows; [`vacuum_stats`] reads what
//!   the database itself leaves behind, and [`database_limits`] how close its server is to limits at which it stops.
//!
//! # Invariants
//!
//! * What people and metrics see of the whole fleet is read in pages: no snapshot of the database is held for longer
//!   than a page takes. The exceptions are a count in an index (the recovery brake), a provider's machines (its
//!   provisioner), and the statements of [`counts`].
//! * A list that hardly any machine matches comes in pages with hardly any machine, never in one long statement.
//! * Lists show `phase_index`, which may lag behind the truth by a moment. The view of one machine is computed from its
//!   facts ([`crate::machine::view`]).
//! * Types that are serialized are what `shepherdctl -o json` prints: a field may be added, none changes its name or
//!   meaning.
//! * Each table has a bound for its rows.
//!
//! # Notes for the next implementor
//!
//! * A statement that reads an index over the whole fleet says so in its description. A loop that needs its result uses
//!   it for a while, as the recovery brake does.
//! * `tests/all/bmdb_explain.rs` bounds the buffers of statements on a large fleet.

pub mod artefact;
pub mod brake;
pub mod counts;
pub mod database_limits;
pub mod endpoints;
pub mod issue_inputs;
pub mod listing;
pub mod machine_names;
pub mod machine_walk;
pub mod provider;
pub mod queues;
pub mod retention;
pub mod roll_out;
pub mod sample;
#[cfg(feature = "sealing")]
pub mod secret;
pub mod sessions;
pub mod shepherds;
pub mod statistics;
pub mod vacuum_stats;
pub mod view;
