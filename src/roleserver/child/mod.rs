//! Programs that a role server runs beside itself: etcd, and what an operator declares.
//!
//! They outlive it. A role server is replaced, crashes, is killed, and what its node serves must not notice; and whoever
//! comes after it must find what is already running, or two of one kind would run on one directory, which for etcd means
//! a broken member. Two things make that so at every moment, whenever the power goes or somebody is killed:
//!
//! * A program is started by way of this one ([`launch`][]): the new process joins its control group, writes down who it
//!   is, and only then becomes the program. So there is no program of ours that nobody has written down.
//! * A control group of its own ([`cgroup`][]) holds it and all that it starts. Before anything is started in there
//!   whatever is still in it is ended, also what was never written down.
//!
//! # How the files fit
//!
//! * [`spec`][]: what is to run. Its digest tells whether what runs is still that.
//! * [`cgroup`][]: control groups, version 1, 2 or both, as the host has them.
//! * [`launch`][]: from this program to the other one.
//! * [`ending`][]: how a process ended, also one that is not a child of ours.
//! * [`log`][]: what it writes, in a file that does not grow for ever.
//! * [`keep`][]: the runnable: adopts it or starts it, watches it, ends it.

pub mod cgroup;
pub mod ending;
pub mod keep;
pub mod launch;
pub mod log;
pub mod spec;
