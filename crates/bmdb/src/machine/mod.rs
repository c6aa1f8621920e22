//! One machine: heartbeats, logs, host key, history, tags, the view of it, and finding it by a name.
//!
//! The engine decides on a machine's facts; this room has the ways by which a machine and people reach them.
//!
//! # How it works
//!
//! * **From the machine.** Its agent sends heartbeats at the interval of the policy (half a minute), and its reports
//!   with them (`heartbeat`). Plain ones are stored in groups, so that a hundred thousand machines cost few commits.
//!   Requests for its logs are delivered with the response to a heartbeat, and the agent uploads the logs in parts
//!   ([`log_request`]).
//! * **Over SSH.** [`host_key`] is the host key that was pinned at the first connection, and the one that was refused
//!   since.
//! * **To people.** [`view`] is everything that decides about the machine, at one moment; [`history`] is what happened
//!   to it, [`timeline`] the same with its routine folded, and [`recent_steps`] what was done to it lately; [`tags`] finds
//!   facts by the shape of their tables, so that an older program shows facts that a newer migration added.
//! * **By name.** [`lookup`] resolves a UUID, a prefix of one, or a provider's id. [`scoped_lookup`] does so for a
//!   credential that may see some providers only.
//! * `traits` are the labels and the hardware that selectors match, and `selector_values` is what else they match: facts and
//!   the cluster.
//!
//! # Invariants
//!
//! * A heartbeat is durable before it is answered as stored, and so is every report that it carries.
//! * A name that fits several machines is never resolved by preference: an order must not hit a neighbour.
//! * A machine that a credential may not see does not exist for it, not even by a difference in the answer.
//! * Nothing is decided by a machine's clock: a heartbeat counts from when the database stores it.
//! * Types that are serialized are what `shepherdctl -o json` prints: a field may be added, none changes its name or
//!   meaning.
//!
//! # Notes for the next implementor
//!
//! * A heartbeat that changes only a time must stay one heap-only update: no index may have a column that it writes.
//! * A new report of an agent is a field of `heartbeat::ReceivedHeartbeat` and a
//!   [`crate::engine::fact_change::FactChange`]. It must be recognised when it is sent again, or the same heartbeat is
//!   called stale.

#[cfg(feature = "sealing")]
pub mod heartbeat;
pub mod history;
pub mod host_key;
pub mod log_request;
pub mod lookup;
pub mod recent_steps;
pub mod scoped_lookup;
pub(crate) mod selector_values;
pub mod tags;
pub mod timeline;
pub(crate) mod traits;
pub mod view;
