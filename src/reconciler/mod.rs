//! Keeps the built-in objects of Kubernetes as the newest release in the cluster wants them.
//!
//! Components of ours rely on objects in Kubernetes: roles and their bindings, classes of priority, of runtime and of
//! storage. Each release has its own set. During an update, and more so when one is taken back, two releases run beside
//! each other, and would undo each other's changes; and an API server may meet objects that it cannot serve with. So one
//! program reconciles at any time, it is of the newest release, and it changes objects only while no controller runs that
//! they would break.
//!
//! # How the files fit
//!
//! Decisions, none of which does anything:
//!
//! * [`release`][]: what is compared. [`program`][]: what a program of this release asks of the others.
//! * [`status`][]: what all are told of the objects. [`nodes`][]: which releases the controllers have.
//! * [`leadership`][]: what whoever was elected does, step by step. [`gate`][]: whether a controller may begin.
//!
//! What they are carried out by:
//!
//! * [`objects`][]: what a pass is, and the pass that keeps the objects of a Kubernetes and its cluster's add-ons.
//! * [`service`][]: standing for election, and leading. [`waiting`][]: the gate, kept.
//!
//! # What holds
//!
//! * A controller serves only while its release is at least the lowest compatible one of the status, and the version of
//!   the status is at least what it needs.
//! * The lowest compatible release is raised only in a transaction that proves that no controller is older.
//! * Objects change only while the status promises no more than holds before *and* after, or while there is none.
//! * The status is written by whoever holds the lease, over what it has read, and never otherwise.
//! * Only the newest release stands for election; a newer one that appears ends the leadership of an older one.
//! * When all is done, the status describes exactly the release that did it. An object whose name somebody else has taken
//!   is told, and is no reason for not being done: nobody can hold up controllers with a name.
//! * An object is deleted only by its label, and only while it is the one and the state that was judged.
//! * Writes to Kubernetes cannot be bound to a lease in etcd. A former leader's may still arrive; what they spoil is
//!   repaired by the next pass.
//!
//! What cannot be known is taken for what would do harm: a node whose record cannot be read may run any release, and a
//! status that cannot be read may exclude this one. Both hold everything up, and say so; a status that is not there, on
//! the other hand, holds up controllers alone.

pub mod gate;
pub mod leadership;
pub mod nodes;
pub mod objects;
pub mod program;
pub mod release;
pub mod service;
pub mod status;
pub mod waiting;
