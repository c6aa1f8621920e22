//! Reconciles the built-in Kubernetes objects of the newest release in a cluster.
//!
//! Our components rely on objects in Kubernetes: roles and their bindings, classes of priority, of runtime and of
//! storage. Each release has its own set. During an update, and more so during a rollback, controllers of two releases
//! run side by side and would undo each other's changes. And an API server may find objects that it cannot serve with.
//! So only one program reconciles at any time. It is of the newest release, and it changes objects only while no
//! controller runs that they would break.
//!
//! A *controller* is a node with the role of Kubernetes controller. It runs the control plane of Kubernetes and this
//! reconciler.
//!
//! # How it works
//!
//! Three kinds of records in etcd are enough to agree: the records of nodes, which have the release that each node
//! runs; one status record, which only the leader writes; and the candidates of an election.
//!
//! * The API server of a controller does not wait. Before the components that rely on the objects start, the controller
//!   waits at the [`gate`][], until its record shows its release and the status allows that release ([`gate_wait`][]
//!   does the waiting).
//! * Each controller of the newest release takes part in the election ([`service`][]). The releases of all controllers
//!   are read from the records of their nodes ([`controller_releases`][]).
//! * The leader follows the steps of [`leadership`][]: it reads the status, excludes controllers that its objects would
//!   break, makes passes until one succeeds, and then writes the status of its own release. After that it repeats the
//!   pass regularly and when others change objects.
//! * A pass compares the objects with what this release requires, and changes those that differ ([`objects`][]).
//!
//! [`release`][] has release numbers and their order. [`program`][] has what a program of this release requires of
//! others. [`status`][] is the status record. Of all these, only [`service`][], [`gate_wait`][] and parts of
//! [`objects`][] do I/O.
//!
//! # Invariants
//!
//! * A controller passes the gate only while its release is at least the lowest compatible one of the status, and the
//!   version of the status is at least what it needs.
//! * The lowest compatible release is raised only in a transaction that proves that no controller is older.
//! * Objects change only while the status promises no more than holds before *and* after, or while no status exists.
//! * The status is written only by the holder of the lease, over the revision that it has read.
//! * Only the newest release takes part in the election; a newer one that appears ends the leadership of an older one.
//! * When all is done, the status describes exactly the release that did it. An object whose name is taken by another
//!   owner is reported as a problem, and does not keep the status from becoming done. Otherwise anyone who may create
//!   an object could hold up all controllers.
//! * An object is deleted only if it has our label or is the Node object of one of our nodes, or to replace an object
//!   of the release. It is deleted only while its uid and its resource version are the evaluated ones.
//! * Writes to Kubernetes cannot be bound to a lease in etcd. Writes of a former leader may still arrive. The next pass
//!   repairs what they spoil.
//!
//! What is unknown is treated as harmful: a node whose record cannot be read may run any release, and a status that
//! cannot be read may exclude this one. Both hold everything up, and are reported. A missing status, in contrast, holds
//! up controllers only.
//!
//! # Notes for the next implementor
//!
//! * A change of the built-in objects may need a change of the two numbers in [`program`][]. Its documentation says
//!   when.
//! * [`leadership`][] and [`gate`][] are pure: `tests/all/reconciler/model.rs` runs them in a simulated cluster, in any
//!   order of events. A new step belongs there, and [`service`][] only executes it.
//! * Everything that a leader sends must stop when its future is dropped, because another leader may have begun by
//!   then. Do not spawn a task for a request.

pub mod controller_releases;
pub mod gate;
pub mod gate_wait;
pub mod leadership;
pub mod objects;
pub mod program;
pub mod release;
pub mod service;
pub mod status;
