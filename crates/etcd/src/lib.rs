//! An etcd client: guarded transactions, elections, watches, members, snapshots.
//!
//! etcd stores the state of a cluster. It also decides between two programs that both believe that they lead: two
//! curators, or two reconcilers. This crate has all that speaks to etcd, and the layout of the keys. It knows nothing
//! of nodes, roles or certificates. A value is bytes here; its type belongs to the crate that writes it.
//!
//! # How it works
//!
//! * [`client`][]: reads, unguarded writes, deadlines and errors. A client belongs to one namespace of one cluster
//!   ([`namespace`][]). It connects by a UNIX socket or by TLS ([`transport`][]) when it is first used.
//! * [`guard`][]: writes of a leader. `transaction` has the parts that such a write is made of.
//! * [`election`][]: leader election over a lease. The role of a candidate follows from the keys of the election
//!   ([`election_view`][], without I/O).
//! * [`lock`][]: a lock over a lease, for work that one member at a time may do.
//! * [`key_watcher`][]: list and watch, the newest value of each key. It is fed by `watch_cache`, which merges events
//!   and listings (without I/O).
//! * [`members`][]: lists, adds, promotes, moves and removes members of etcd. `connected_peers` reads from a member's metrics which
//!   members are connected.
//! * [`maintenance`][]: alarms, the size of the database file and its quota, and the way back from a full one.
//! * [`snapshot_file`][]: receives all data of etcd, as a stream or in a file, and verifies its digest.
//! * [`key_space`][]: the key of every record. [`record`][]: the format number of a record, and errors of reading one.
//! * [`retry`][]: the delays before the next attempt.
//!
//! # Invariants
//!
//! * Every call has a deadline; that of a stream (a watch, a lease that is kept alive, a snapshot) ends with the head
//!   of its response. A call that ran out of time may have been carried out, and its error says so. The caller reads
//!   again before it repeats a write.
//! * A leader writes only with proof. A write carries the key that won the election, with its create revision, and the
//!   mod revision of the record that it was made from. etcd compares both in the transaction that writes. A caller may
//!   leave out the second one (`ExpectedRevision::Any`) where the former content does not matter. Writes without a
//!   guard have `unguarded` in their name: they are for records that exist before anybody can lead, and for records
//!   whose keys are never written twice.
//! * Nothing acts on a single past observation. An election and a watcher watch etcd as long as they exist, report when
//!   they lose the connection, and start again by themselves.
//! * A record has one key, one writer and several readers. An unreadable record is an error that names its key; it is
//!   never skipped.
//!
//! # Why the client is our own
//!
//! The crate `etcd-client` (0.21) enables the default features of `tonic`, and thereby links `axum`, an HTTP server
//! framework, into the role server. A test forbids that (`tests/all/dependencies.rs`). It also needs the program
//! `protoc` for every build. Here the client is generated from the part of etcd's contract that we use
//! (`proto/etcd/etcdserverpb.proto`), without `protoc` and without a server.
//!
//! etcd's own election service is not used either. It holds the campaign inside one call of one connection, so a
//! candidate whose connection breaks cannot tell whether it still takes part. It also hides the revision that
//! determines the place in the queue. The same election made of keys is one list and one rule.
//!
//! # Notes for the next implementor
//!
//! * A new kind of record gets a prefix in [`key_space`][], also in the list of its tests, and a message with a
//!   `format` field. When a field is added that must not be lost, [`record::FORMAT`][] grows: an older release then
//!   rejects the record instead of writing it back without the field.
//! * A new call to etcd is added to the contract first, with etcd's own names and numbers. It goes through
//!   `Client::call_unary` or `Client::open_stream`, which limit the wait and classify errors.
//! * etcd 3.4 is the oldest version that is supported. Its watches can lose events ([`key_watcher`][]), and its list of
//!   members may be outdated ([`members`][]).
//! * `tests` of this crate runs it against real etcd servers, and `tests/all/on_etcd_3_4.txt` of the checkout names the
//!   tests that also run on etcd 3.4.

pub mod client;
mod connected_peers;
pub mod election;
pub mod election_view;
pub mod guard;
pub mod key_space;
pub mod key_watcher;
pub mod lock;
pub mod maintenance;
pub mod members;
pub mod namespace;
pub mod record;
pub mod retry;
pub mod snapshot_file;
mod transaction;
pub mod transport;
mod watch_cache;
