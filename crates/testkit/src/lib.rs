//! What tests of several crates share: a private PostgreSQL and etcd, child processes, ports, reading sources.
//!
//! Only `[dev-dependencies]` may name this crate. No program links it.
//!
//! # How it works
//!
//! * [`aloud`][]: the result of a test, and reports of failures that do not wait for the end of the run.
//! * [`child`][]: programs that end with the test process, however that ends.
//! * [`port`][]: ports that stay reserved while nothing listens on them.
//! * [`damage`][]: what a loss of power, a disk error or a newer release makes of a state file.
//! * [`flood`][]: connections from many addresses that send nothing or too little.
//! * [`memory`][]: how many bytes a piece of code allocates. A test program that links this crate has its allocator.
//! * [`source`][]: the files of the checkout, and Rust code apart from its comments and strings.
//! * [`statement`][]: the SQL statements of the checkout, those of files and those in Rust code.
//! * [`skip`][]: tests that are skipped because the user or the host lacks something.
//! * [`etcd_program`][]: which etcd the tests use. `etcd_servers`: clusters of real etcd servers, and waiting.
//!   `curators`: a cluster of curators beside such servers, and its clients. `forged_access`: the worth of copied keys of
//!   Kubernetes.
//! * `postgres`: one PostgreSQL server for the run, and a database for each test. `dialect`: the dialects of the
//!   database, and the lists of the tests that run in them. `bmdb_kit`: a fleet in a database, and processes that share
//!   the engine without any loop.
//! * `declaration`: a role as clients declare it.
//!
//! # Features
//!
//! A test program links only what its crate needs. `etcd` adds the module `etcd_servers`, which needs the crate `etcd`,
//! and `curator` also adds `curators`, which needs the crate of that name.
//! `postgres` adds `postgres`, `dialect` and `bmdb_kit`, which need the crate `bmdb`. `declaration` adds the module of that
//! name, which needs the contracts alone.
//!
//! # Tests of a crate
//!
//! * Tests that need one crate are one program, `crates/NAME/tests/all/main.rs`, with a module per subject: each
//!   further program would be linked against the same libraries again. Such a program names its own crate
//!   `shepherd_NAME`. Tests that need programs, or several crates that do not depend on each other, are in `tests/all`.
//! * Unit tests in `src` of a crate below this one (`bmdb`, `curator`, `etcd`) cannot use the features of this crate
//!   that name it: they would link their crate a second time, with types of its own.
//! * Each test is on a list in `tests/all`: see `dialect`.

pub mod aloud;
#[cfg(feature = "postgres")]
pub mod bmdb_kit;
pub mod child;
#[cfg(feature = "curator")]
pub mod curators;
pub mod damage;
#[cfg(feature = "declaration")]
pub mod declaration;
#[cfg(feature = "postgres")]
pub mod dialect;
pub mod etcd_program;
#[cfg(feature = "etcd")]
pub mod etcd_servers;
pub mod flood;
#[cfg(feature = "curator")]
pub mod forged_access;
#[cfg(feature = "curator")]
pub mod key_holder;
pub mod memory;
pub mod port;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "curator")]
mod shifted_clock;
pub mod skip;
pub mod source;
pub mod statement;
