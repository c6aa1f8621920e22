//! Child programs that run beside the role server and outlive it.
//!
//! Children are etcd and the services that operators declare. When a role server is replaced, crashes or is killed, the
//! node's services must not notice. The next role server must find what is already running, or two programs of one kind
//! would run on one directory, which for etcd means a broken member. Two things ensure that at every moment, whenever
//! the power fails or a process is killed:
//!
//! * A program is started through this one ([`launch`][]): the new process joins its control group, records its own
//!   process, and only then executes the program. So every program of ours is recorded.
//! * The program and all that it starts are in a control group of its own ([`cgroup`][]). Before anything is started in
//!   a group, whatever is still in it is killed, including processes that were never recorded.
//!
//! # How the files fit
//!
//! * [`spec`][]: what to run. Its digest shows whether the running program still matches.
//! * [`cgroup`][]: control groups, version 1, 2 or both, as the host has them.
//! * [`launch`][]: the steps from this program to the other one.
//! * [`exit`][]: waits for the exit of a process, also of one that is not our child.
//! * [`log`][]: the output of a child, in a file of bounded size.
//! * [`lifecycle`][]: the runnable that adopts or starts a child, watches it, stops it.

pub mod cgroup;
pub mod exit;
pub mod launch;
pub mod lifecycle;
pub mod log;
pub mod spec;
