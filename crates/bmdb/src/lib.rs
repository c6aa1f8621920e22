//! Bare metal database (BMDB): the only layer that speaks SQL.
//!
//! Any number of `shepherd` processes share one database and never talk to each other. What they know, what is due, who
//! works on what, and what operators ordered are plain rows, so a person with `psql` sees what every process is doing.
//!
//! # Rooms
//!
//! Each room begins with a description of how it works, what it guarantees, and how to add to it.
//!
//! * [`connection`]: pool, transactions with retry, time limits, schema, reads, the private server.
//! * [`metrics`]: counters of this process and of its handle on the database.
//! * [`engine`]: facts, schedule, sessions, claims, work, leases, intents. It decides which worker acts on which
//!   machine next.
//! * [`machine`]: one machine: heartbeats, logs, history, the view of it, finding it by a name.
//! * [`orders`]: what operators want changed: identity, decision, two-person rule, dry run, audit.
//! * [`cluster`]: clusters of machines: specification, Kubernetes, upgrades, keys, snapshots, restore.
//! * [`fleet`]: all machines: lists, counts, samples, providers, roll-outs, artefacts, secrets, retention.
//!
//! `metrics` is below `connection`, `engine` is above both, and the other rooms are above `engine`. One import goes
//! upwards: the initial rows of the schema have the name of a budget of `engine`. Between the upper rooms imports go
//! both ways, because a view of a machine shows its cluster, and a cluster consists of machines; no cycle between files
//! has more than three of them (`tools/cycles`).
//!
//! # Rules that hold everywhere
//!
//! * Locks are taken in one order: session, due rows by (machine, lane), facts, work, history. Batches are sorted.
//! * Time is the database's: `clock_timestamp()` where waiting for a lock must count, `now()` where one moment for a
//!   whole transaction is meant.
//! * No transaction stays open over anything but statements, and none is ever dropped half-way
//!   ([`connection::Bmdb::transact`]).
//! * Nothing is decided here that a pure function can decide: `model` decides, this crate reads and writes.
//! * Values that a newer release wrote are tolerated: two releases share the database during an upgrade.
//! * Statements are checked at compile time. Those of up to three lines are the text of `sqlx::query!`, `query_as!` or
//!   `query_scalar!`. Longer ones are in `sql/`, one per file, and so is a short one that several places send, that a
//!   test explains, or that is sent unchecked.
//!
//! # Tests
//!
//! `tests` of this crate has races, failures, invariants and orders, against a real PostgreSQL. The tests in `tests/all`
//! of the checkout use a database as whole programs do, or bound the buffers of statements.
//!
//! # Features
//!
//! `sealing` is what only the service does: it has the key of sealed secrets, stores heartbeats, and writes the state
//! of clusters and roll-outs under its leases. `shepherdctl` is built without it.

pub mod cluster;
pub mod connection;
pub mod engine;
pub mod fleet;
pub mod machine;
pub mod metrics;
pub mod orders;
