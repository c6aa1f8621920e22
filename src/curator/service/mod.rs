//! What a curator serves, and how it comes to lead.
//!
//! * [`curator`][]: the whole: standing for election, and serving what it is at the moment.
//! * [`listener`][]: connections, and their end. [`door`][]: who is let in.
//! * [`who_leads`][]: what every curator answers.
//! * [`leader`][]: what one has for as long as it leads; [`store`][]: records, written under its guard; [`view`][] and
//!   [`chronicle`][]: what everybody watches; [`members`][]: etcd's own; [`kubernetes_care`][]: what becomes of
//!   Kubernetes by itself; [`failure`][]: what is answered instead.
//! * [`registration`][], [`nodes`][], [`declarations`][], [`kubernetes`][], [`management`][], [`tickets`][],
//!   [`credentials`][], [`snapshots`][]: the services, one file each. They decide nothing: each reads, asks the decision it is named after, and writes.

pub mod chronicle;
pub mod credentials;
pub mod curator;
pub mod declarations;
pub mod door;
pub mod failure;
pub mod kubernetes;
pub mod kubernetes_care;
pub mod leader;
pub mod listener;
pub mod management;
pub mod members;
pub mod nodes;
pub mod registration;
pub mod snapshots;
pub mod store;
pub mod tickets;
pub mod view;
pub mod who_leads;
