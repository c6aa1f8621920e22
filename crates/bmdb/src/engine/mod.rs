//! The engine: facts, schedule, sessions, claims, work, leases, intents.
//!
//! It answers one question for any number of processes that share a database and never talk to each other: which
//! machine needs what next, and who does it? `shepherdctl why` shows the answers. Everything that acts on a machine
//! goes through here.
//!
//! # How it works
//!
//! 1. **Facts** about a machine are rows; [`facts`] reads them into one value. A change of a fact is data
//!    ([`fact_change`]).
//! 2. The **schedule** says when each lane of a machine is due, and for which process. It is a pure function of the
//!    facts, the stored policy ([`policy`]) and the time. Every transaction that changes a fact holds the machine's due
//!    rows, computes the schedule again and writes it before it commits ([`schedule`], [`change_machine`]). A heartbeat
//!    that only changes a time does not: it can only move a due moment further away.
//! 3. A **session** ([`session`], [`session_renewer`]) is a lease that its process renews, on a thread of its own
//!    (`renewal_thread`). Every action of a loop is taken under a session.
//! 4. A **claim** ([`claim`]) puts due lanes under sessions, each with a fence that grows. A [`wakeup`] makes a loop
//!    claim sooner than its next poll.
//! 5. **Work** ([`work`]) is a claimed lane. It ends in one transaction that writes facts, schedule, lease and history.
//!    The [`reaper`] frees what a lost session held.
//! 6. A **named lease** ([`named_lease`]) is the same for what is no machine: a provider's provisioner, a cluster, the
//!    roll-outs.
//! 7. An **intent** ([`intent`]) records an outward action before it is taken. A disruption is recorded in the
//!    transaction that decides whether it may be taken.
//! 8. The [`sweeper`] computes every schedule again and proves that no transaction forgot. `unknown_fence` notices when
//!    this database lost a part of its past.
//!
//! # Invariants
//!
//! * At most one work item is live for each lane of a machine. A lane never gets the same fence twice.
//! * Locks are taken in one order: session, due rows by (machine, lane), facts, work, history.
//! * A transaction that changes facts consists of separate statements: lock, read, compute, write. A statement that
//!   waits for a lock sees that row new and every other table old.
//! * What a session writes is committed before the session is closed, or not at all: each of its transactions locks the
//!   session's row first.
//! * The start and the end of each work item have a line in history, in the same commit. So have a machine's changes of
//!   phase.
//! * Time is the database's. The host only measures how long something takes, and the local deadline of a session, on a
//!   clock that also runs while the host is suspended.
//!
//! # Notes for the next implementor
//!
//! * A new fact needs a migration, a column or a list in the view `machine_snapshot`, its decoding in [`facts`], and a
//!   [`fact_change::FactChange`].
//! * Decode what a newer release may write: two releases share the database during an upgrade.
//! * Write for the holder of a named lease with `Bmdb::transact_under_lease`, or with `Bmdb::execute_under_lease` if it
//!   is one statement, so that no write forgets to check the lease.
//! * Do not send `NOTIFY` from a claim or at the end of work, except for another process that is due now: a notifying
//!   commit waits for every other one ([`schedule`]).
//! * `tests/all/fire` tries to break the invariants. `tests/faults` has patches that break the code on purpose, each
//!   with the test that must fail.

pub mod change_machine;
pub mod claim;
pub mod fact_change;
pub mod facts;
pub(crate) mod host_findings;
pub mod intent;
pub mod named_lease;
pub mod policy;
pub mod reaper;
mod renewal_thread;
pub mod schedule;
pub mod session;
pub mod session_renewer;
pub mod sweeper;
pub(crate) mod unknown_fence;
pub mod wakeup;
pub mod work;
