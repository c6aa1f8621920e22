//! Orders of operators: identity, decision, two-person rule, dry run, audit.
//!
//! An order is what a person, or a program with a credential, wants changed. It reaches this room through the services
//! of the API, also when `shepherdctl` works on the database without a server.
//!
//! # How it works
//!
//! 1. A [`credential`] identifies the actor. What an actor may do is decided by the server.
//! 2. An [`order`] has an actor, a reason, a target, an idempotency key and a flag for a dry run.
//! 3. One transaction (`execution`) carries it out: look for the same order in the [`audit`]; lock its target; decide;
//!    ask the two-person rule ([`approval`], [`two_person_rule`]) if the order is a sensitive one; change; write its
//!    line of the audit.
//! 4. Orders about one machine are pure decisions ([`machine_decision`], [`power_order`], [`retirement`]) and data
//!    ([`machine_order`]), so that the same order can be given for many machines ([`bulk_orders`]).
//! 5. Other orders change how the fleet is run: [`budget`], [`loop_pause`], [`declare_restored`]. Orders about
//!    clusters, artefacts and roll-outs are in the rooms of their subjects, with the same helpers.
//!
//! # Invariants
//!
//! * An order with an idempotency key is carried out once. Giving it again returns the first result, for as long as its
//!   line of the audit is retained.
//! * An order and its line of the audit are one commit. An order that is rejected because of what it found is in the
//!   audit too, unless that line could not be written.
//! * A dry run does everything and undoes it. Only its line of the audit stays.
//! * An order that changes nothing has the outcome `Already`, if what it requests holds, and `NoEffect` otherwise.
//!   Programs decide by that, never by the sentence ([`order::OutcomeKind`]).
//! * An order changes what is desired, and returns. Loops do the rest, and check again whether they may.
//! * An approval belongs to one order with one content, and is used once.
//!
//! # Notes for the next implementor
//!
//! * A new order is a function that `Bmdb::execute_order` calls in its transaction. Lock before you read what you
//!   decide on, and return an `OrderEffect`. The key, the dry run and the audit are not its concern.
//! * A rejection has a reason for programs (`NO_SUCH_KEY`), which does not change any more, and a sentence for people
//!   that says what to do.
//! * An order that could do harm to many machines belongs to the two-person rule ([`model::two_person_rule`]).

pub mod approval;
pub mod audit;
pub mod budget;
pub mod bulk_orders;
pub mod credential;
pub mod declare_restored;
mod execution;
pub mod key_replacement;
pub mod loop_pause;
pub mod machine_decision;
pub mod machine_order;
pub mod order;
pub mod power_order;
pub mod retirement;
pub mod two_person_rule;
