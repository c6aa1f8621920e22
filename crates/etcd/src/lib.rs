//! An etcd client: guarded transactions, elections, watches, members, snapshots.
//!
//! etcd is the one place where a cluster's state is, and the one thing that decides between two programs that both
//! believe that they lead: two curators, or two reconcilers. Three rules follow, and each has a file that keeps it:
//!
//! * Nothing waits for etcd without a limit ([`client`][]). A call that ran out of time may have been done all the
//!   same; its error states so.
//! * Nothing is written without proof ([`guard`][]). A write carries the key that won the election, by its create
//!   revision, and the mod revision of the record that it was made from. etcd compares both in the transaction that
//!   writes.
//! * Nothing acts on a single past observation ([`election`][], [`key_watcher`][]). Both watch etcd for as long as they
//!   are held, report when they have lost sight of it, and start again by themselves, with a pause ([`backoff`][]).
//!
//! The location of every record is defined once ([`key_space`][]), and so is how a record is read ([`record`][]): a
//! record has one writer, and several readers.
//!
//! The others are helpers: [`members`][] changes the membership, [`connected_peers`][] finds which members are
//! connected, and [`snapshot_file`][] saves a copy of everything to a file. The outcome of an election is a pure
//! decision ([`election_view`][]).
//!
//! # What was left out
//!
//! etcd has an election service of its own. It holds the campaign inside one call of one connection, so that a
//! candidate whose connection breaks cannot tell whether it still stands, and it hides the revision by which the
//! position in the queue is known. The same election made of keys, as [`election`][] makes it, is one list and one
//! rule.

pub mod backoff;
pub mod client;
pub mod connected_peers;
pub mod election;
pub mod election_view;
pub mod guard;
pub mod key_space;
pub mod key_watcher;
pub mod members;
pub mod namespace;
pub mod record;
pub mod snapshot_file;
mod transport;
mod watch_cache;
