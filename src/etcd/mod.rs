//! All that is said to etcd.
//!
//! etcd is the one place where a cluster's state is, and the one thing that decides between two who both believe to
//! lead: two curators, or two reconcilers. Three rules follow, and each has a file that keeps it:
//!
//! * Nothing waits for etcd without a limit ([`client`][]). A call that ran out of time may have been done all the
//!   same; its error says so.
//! * Nothing is written without proof ([`guard`][]). A write carries the key that won the election, by its create
//!   revision, and the mod revision of what it was made from; etcd compares both in the transaction that writes.
//! * Nobody acts on what he saw once ([`election`][], [`value`][]). Both follow etcd for as long as they are held, say
//!   when they have lost sight of it, and start again by themselves, with a pause ([`pause`][]).
//!
//! Where everything stands is said once ([`key_space`][]), and how it is read there ([`record`][]): a record has one
//! writer, and others that read it.
//!
//! The others are errands: [`members`][] for who the members are, [`peers`][] for which of
//! them are connected, [`snapshot`][] for a copy of everything in a file. What an election has come to is a decision of
//! its own ([`places`][]).
//!
//! # What was left out
//!
//! etcd has an election service of its own. It holds the campaign inside one call of one connection, so that a
//! candidate whose connection breaks cannot tell whether it stands, and it hides the revision by which the place in
//! the queue is known. The same election made of keys, as [`election`][] makes it, is one list and one rule.

pub mod client;
pub mod election;
pub mod guard;
pub mod key_space;
pub mod members;
pub mod namespace;
pub mod pause;
pub mod peers;
pub mod places;
pub mod record;
pub mod snapshot;
mod transport;
pub mod value;
mod watch_cache;
