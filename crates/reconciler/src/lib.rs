//! Reconciles the built-in Kubernetes objects of the newest release in a cluster.
//!
//! Our components rely on objects in Kubernetes: roles and their bindings, classes of priority, of runtime and of
//! storage. Each release has its own set. During an update, and more so during a rollback, two releases run side by
//! side and would undo each other's changes. And an API server may find objects that it cannot serve with. So only one
//! program reconciles at any time, it is of the newest release, and it changes objects only while no controller runs
//! that they would break.
//!
//! # How the files fit
//!
//! Decisions, without I/O:
//!
//! * [`release`][]: release numbers and how they compare. [`program`][]: what a program of this release requires of
//!   others.
//! * [`status`][]: what all controllers learn of the objects. [`controller_releases`][]: the releases of the
//!   controllers.
//! * [`leadership`][]: the steps of an elected leader. [`gate`][]: whether a controller may start.
//!
//! I/O:
//!
//! * [`objects`][]: what a pass is, and the pass over the objects of a Kubernetes and its cluster's add-ons.
//! * [`service`][]: the election, and the steps of a leader. [`gate_wait`][]: the wait at the gate.
//!
//! # Invariants
//!
//! * A controller serves only while its release is at least the lowest compatible one of the status, and the version of
//!   the status is at least what it needs.
//! * The lowest compatible release is raised only in a transaction that proves that no controller is older.
//! * Objects change only while the status promises no more than holds before *and* after, or while none exists.
//! * The status is written only by the holder of the lease, over the revision that it has read.
//! * Only the newest release stands for election; a newer one that appears ends the leadership of an older one.
//! * When all is done, the status describes exactly the release that did it. An object whose name is taken by another
//!   owner is reported as a problem, and does not keep the status from becoming done: nobody can hold up controllers
//!   with a name.
//! * An object is deleted only by its label, and only while its uid and its resource version are the evaluated ones.
//! * Writes to Kubernetes cannot be bound to a lease in etcd. Writes of a former leader may still arrive. The next pass
//!   repairs what they spoil.
//!
//! What is unknown is treated as harmful: a node whose record cannot be read may run any release, and a status that
//! cannot be read may exclude this one. Both hold everything up, and are reported. A missing status, in contrast, holds
//! up controllers only.

pub mod controller_releases;
pub mod gate;
pub mod gate_wait;
pub mod leadership;
pub mod objects;
pub mod program;
pub mod release;
pub mod service;
pub mod status;
