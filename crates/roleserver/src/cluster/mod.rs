//! The node's part in a cluster.
//!
//! A machine is ordered to found a cluster or to join one by a file in its state directory ([`node_order`][]), which
//! its shepherd or an operator at the machine writes. From there on everything follows from the files on its disk and
//! from the curator, and the first node runs the same code as the hundredth.
//!
//! # How the files fit
//!
//! * [`order_inbox`][]: orders from the agent channel, and the reports on them.
//! * [`node_order`][]: the order of this machine. [`files`][]: the stored files, and the order in which they are
//!   written.
//! * [`node_facts`][]: watch cells that the parts below share.
//! * [`node_enrolment`][]: founds, joins or rejoins a cluster.
//! * [`control_plane`][]: etcd as a child, and the curator in this process. [`startup`][]: decides whether both run,
//!   from founding or from roles. [`etcd_member`][]: how etcd is started. [`etcd_program`][]: the version of etcd.
//! * [`roles`][]: the roles of the node, from the disk first and then from the curator.
//! * [`node_status`][]: reports the node's status. [`node_heartbeat`][]: reports that it is alive.
//! * [`certificate_renewal`][]: renews the node's certificate. [`curator_directory`][]: stores the addresses of
//!   curators.
//! * [`services`][]: runs services of operators' roles. [`kubernetes`][]: runs Kubernetes components.
//! * [`cluster_node`][]: the root runnable.
//!
//! # The order of writes
//!
//! A node that is interrupted between any two of these writes continues there after its next start:
//!
//! * founding: its key; the authority; etcd's data; the records in etcd; its roles; its certificate, which makes it a
//!   node. The stored authority and the snapshot are removed last, because their content is in etcd by then.
//! * joining: its key; the addresses of curators; its certificate. It sends no heartbeat before both are durable, or a
//!   node would count as healthy that cannot come back after a reboot.

pub mod certificate_renewal;
pub mod cluster_node;
pub mod control_plane;
pub mod curator_directory;
pub mod etcd_member;
pub mod etcd_program;
pub mod files;
pub mod kubernetes;
pub mod node_enrolment;
pub mod node_facts;
pub mod node_heartbeat;
pub mod node_order;
pub mod node_status;
pub mod order_decision;
pub mod order_inbox;
pub mod roles;
pub mod services;
pub mod startup;
