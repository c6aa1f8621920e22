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
//!   a group, everything that is still in it is killed, including processes that were never recorded. Only programs that have
//!   to survive their parent (the shims of containerd) are left. If the record is damaged, `lost_record` looks for the
//!   child in its scope, and what it does not recognize gets SIGTERM and the stop time first.
//!
//! Under systemd a third one is necessary: systemd ends everything in the group of a unit with the unit. So each child
//! of a role server that systemd started gets a transient scope outside its unit ([`scope`][]). Elsewhere, and while
//! systemd does not answer, the group of a child is below that of the role server.
//!
//! # What keeps a child alive
//!
//! | what happens | etcd, a service by path | a service in a root filesystem | containerd | its shims, and pods |
//! | --- | --- | --- | --- | --- |
//! | the role server crashes | its own session and group; the next role server adopts it by its record | as before: runc, and the container in a group inside its own | as before | a session and group of their own, made by containerd and runc |
//! | systemd restarts the unit | its scope is not part of the unit | the same scope | the same scope | shims are in the scope of the containerd that started them; groups of pods are outside the unit |
//! | an update, or a roll-back | the process of the role server continues by `execve`; the record is read by both releases | as before | as before | containerd finds its shims by its own state |
//! | a takeover | an enrolment moves children of an old layout into scopes before it restarts the unit | as before; the state of runc follows | as before | processes move with the group that they are in |
//! | the child itself is restarted | it ends, in all its scopes | as before | it ends, and its shims are spared in their scope | they go on |
//! | its role or the node ends | it is stopped with all its scopes | as before, and its container is deleted | as before | they are ended with the group above all pods |
//!
//! # How the files fit
//!
//! * [`spec`][]: what to run. Its digest shows whether the running program still matches.
//! * [`cgroup`][]: control groups, version 1, 2 or both, as the host has them. [`limits`][]: which limits a group can
//!   hold (pure). `running_limits`: applies the limits of a running child.
//! * [`confinement`][]: the capabilities that a declared service keeps, and `no_new_privs`.
//! * [`launch`][]: the steps from this program to the other one.
//! * [`scope`][]: whether children get scopes of systemd, their names and properties (pure). [`placement`][]: puts a
//!   child into its scope, and finds its groups. [`migration`][]: moves running children into scopes, and
//!   `process_move` their processes. [`existing_cgroup`][]: groups that others made.
//! * `lost_record`: finds the process of a child in its scope after its record was damaged.
//! * [`exit`][]: waits for the exit of a process, also of one that is not our child.
//! * [`log`][]: the output of a child, in a file of bounded size.
//! * [`lifecycle`][]: the runnable that adopts or starts a child, watches it, stops it.
//!
//! # Invariants
//!
//! * Two children of one name never run at once.
//! * A running program with the right digest is adopted, with its pid and its connections. Limits are not in the digest,
//!   and are applied without a restart. So is one that was declared in the same way, and that another release started
//!   with other flags: what a release changes counts from the next start.
//! * No program runs before it is in its scope, so nothing that it starts can be left in the unit.
//! * A move into a scope that fails or is interrupted is repeated until each of its steps has succeeded.
//! * While a child is in a scope, the group of the unit hands no controllers on. Otherwise systemd could not start the
//!   unit again.
//! * A recorded process gets a signal only if pid, boot and start time are those of the record.
//! * A child has the environment of its specification and nothing else. It shares no terminal and no session with the
//!   role server, and since Linux 5.11 no descriptor.
//! * A limit that cannot hold is never dropped in silence: the child does not start, or the limit is reported until it
//!   holds.
//! * When the role server ends, its children go on. When only their runnable is cancelled, they are stopped.
//!
//! # Notes for the next implementor
//!
//! * A host may have no control groups that we may use. Then there are no limits, and only recorded processes are found
//!   again. Nothing may depend on more than that.
//! * A new field of [`spec::ChildSpec`][] belongs into its digest if a running program has to be restarted for it. If
//!   it is in the digest, the release that brings it restarts every child that has no
//!   [`declared`][spec::ChildSpec::declared] digest.
//! * The release before reads the record of a child too. Names of its fields stay.
//! * A record need not survive a loss of power, because no process does.

pub mod cgroup;
pub mod confinement;
pub mod existing_cgroup;
pub mod exit;
pub mod launch;
pub mod lifecycle;
pub mod limits;
pub mod log;
mod lost_record;
pub mod migration;
pub mod placement;
mod process_move;
mod runc_state;
mod running_limits;
pub mod scope;
pub mod spec;
mod unit_group;
