//! Child programs that run beside the role server and outlive it.
//!
//! Children are etcd, the services that operators declare, and Kubernetes components. When a role server is replaced,
//! crashes or is killed, the node's services must not notice. The next role server must find what is already running.
//! Otherwise two programs of one kind would run on one directory, which for etcd means a broken member. Two things
//! ensure this at every moment, whenever the power fails or a process is killed:
//!
//! * A program is started through this one ([`launch`][]): the new process joins its control group, records its own
//!   process, and only then executes the program. So every program of ours is recorded, except for health probes, which
//!   end soon.
//! * The program and all that it starts are in a control group of its own ([`cgroup`][]). Before anything is started in
//!   a group, whatever is still in it is killed, including processes that were never recorded. Only programs that have
//!   to survive their parent (the shims of containerd) are left.
//!
//! # How the files fit
//!
//! * [`spec`][]: what to run. Its digest shows whether the running program still matches.
//! * [`cgroup`][]: control groups, version 1, 2 or both, as the host has them.
//! * [`launch`][]: the steps from this program to the other one.
//! * [`exit`][]: waits for the exit of a process, also of one that is not our child.
//! * [`log`][]: the output of a child, in a file of bounded size.
//! * [`lifecycle`][]: the runnable that adopts or starts a child, watches it, stops it.
//!
//! # Invariants
//!
//! * Two children of one name never run at once.
//! * A running program whose digest matches is adopted, with its pid and its connections. Limits are not in the digest,
//!   and are applied without a restart.
//! * A recorded process gets a signal only if pid, boot and start time are those of the record.
//! * A child has the environment of its specification and nothing else. It shares no terminal and no session with the
//!   role server, and since Linux 5.11 no descriptor.
//! * When the role server ends, its children go on. When only their runnable is cancelled, they are stopped.
//!
//! # Notes for the next implementor
//!
//! * A host may have no control groups that we may use. Then there are no limits, and only recorded processes are found
//!   again. Nothing may depend on more than that.
//! * A new field of [`spec::ChildSpec`][] belongs into its digest if a running program has to be restarted for it. If
//!   it is in the digest, the release that brings it restarts every child.
//! * A record need not survive a loss of power, because no process does.

pub mod cgroup;
pub mod exit;
pub mod launch;
pub mod lifecycle;
pub mod log;
pub mod spec;
