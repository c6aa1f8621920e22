//! The node's part in a cluster.
//!
//! A machine is asked to found a cluster or to join one by a file in its state directory ([`order`][]), written by the
//! shepherd that holds it or by whoever sits at it. From there on everything follows from what is on its disk and from
//! what the curator says, and the first node goes through the same code as the hundredth.
//!
//! # How the files fit
//!
//! * [`asked`][]: what comes over the agent channel, and what is reported there.
//! * [`order`][]: what was asked. [`files`][]: what is kept, and in which order it comes to be.
//! * [`facts`][]: the values that the parts below tell each other.
//! * [`enrolment`][]: becoming a node, or coming back as one.
//! * [`control_plane`][]: etcd as a program beside us, and the curator in this process; [`startup`][]: whether both run,
//!   which follows from founding or from roles. [`etcd`][]: how etcd is started. [`etcd_program`][]: which version it is.
//! * [`roles`][]: what the node is to do, from disk first and from the curator then.
//! * [`status`][]: what the node says of itself. [`heartbeat`][]: that it lives.
//! * [`certificate`][]: another one in time. [`directory`][]: where curators are, for the next start.
//! * [`services`][]: what the node runs of operators' own roles. [`kubernetes`][]: what it runs of Kubernetes.
//! * [`worker`][]: all of it as one runnable.
//!
//! # The order in which things come to be on disk
//!
//! A node that is cut off between any two of these does the rest when it comes back:
//!
//! * founding: its key; the authority; etcd's data; the records in etcd; its roles; its certificate, by which it is a
//!   node from then on. The authority's key is removed last: it lives in etcd.
//! * joining: its key; its certificate and where curators are. Nothing sends a heartbeat before both are durable, or a
//!   node would be taken for healthy that cannot come back after a reboot.

pub mod asked;
pub mod certificate;
pub mod control_plane;
pub mod directory;
pub mod enrolment;
pub mod etcd;
pub mod etcd_program;
pub mod facts;
pub mod files;
pub mod heartbeat;
pub mod kubernetes;
pub mod order;
pub mod roles;
pub mod services;
pub mod startup;
pub mod status;
pub mod worker;
