//! The node's part in a cluster: enrolment, control plane, roles, services and Kubernetes.
//!
//! A machine is ordered to found a cluster, to join one or to leave it by a file in its state directory
//! ([`node_order`][]), which its shepherd or an operator at the machine writes. From there on everything follows from
//! the files on its disk and from the curator, and the first node runs the same code as the hundredth.
//!
//! [`cluster_node`][] starts the parts as runnables. They exchange values through watch cells ([`node_facts`][]), which
//! a part that starts late or is restarted reads too. So no part waits for another one to start, and inputs may arrive
//! in any order.
//!
//! # How the files fit
//!
//! * [`order_inbox`][]: orders from the agent, and the reports on them. [`order_decision`][]: which orders are accepted
//!   (pure). [`peer_order`][]: the order that has a certificate for etcd. [`authority_order`][]: the order that has another
//!   authority after a theft; `authority_switch` takes its last steps.
//! * [`node_order`][]: the order of this machine. [`files`][]: the stored files.
//! * [`node_enrolment`][]: founds, joins or rejoins a cluster. [`node_address`][]: the address of the node.
//!   `host_addresses`: the addresses of the host.
//! * [`control_plane`][]: etcd as a child, and the curator in this process. [`local_curator`][]: that curator.
//!   [`startup`][]: decides whether both run, from founding or from roles (pure). [`etcd_member`][]: how etcd is
//!   started. [`etcd_data`][]: which member has data on the disk. [`etcd_program`][]: the version of etcd.
//!   [`etcd_space`][]: makes room in an etcd that is full. [`etcd_image`][]: restores an image of a whole etcd.
//!   [`peer_certificate`][]: renews the certificate of etcd. [`peer_revocation`][]: the list of the certificates that
//!   etcd rejects. [`member_address`][]: follows a member that comes back with another address. `beside_etcd`: steps
//!   that need the running etcd, and stop nothing when they fail.
//! * [`roles`][]: the roles of the node, from the disk first and then from the curator.
//! * [`node_problems`][]: what a person has to know, by the part that reports it.
//! * [`node_status`][]: reports the node's status. [`node_heartbeat`][]: reports that it is alive.
//! * [`curator_gate`][]: reports that the curator turns connections away.
//! * [`child_placement`][]: keeps what the node runs in scopes of systemd, outside the role server's unit.
//! * [`certificate_renewal`][]: renews the node's certificate. [`curator_certificate`][]: issues and renews that of its
//!   curator. [`curator_directory`][]: stores the addresses of curators.
//! * [`stored_authorities`][]: the authorities that the node trusts. [`authority_status`][]: reports them, and who signed
//!   what the node shows, while the authority of the cluster is replaced.
//! * [`services`][]: runs services of operators' roles. [`kubernetes`][]: runs Kubernetes components.
//! * [`cluster_node`][]: the root runnable.
//!
//! # The order of writes
//!
//! A node that is interrupted between any two of these writes continues there after its next start:
//!
//! * founding: its key; the authority; etcd's data; the records in etcd; its roles; its certificate, which makes it a
//!   node. The stored authority, the snapshot and the image are removed last, because their content is in etcd by then.
//! * joining: its key; the addresses of curators; its certificate. It sends no heartbeat before both are durable, or a
//!   node would count as healthy that cannot come back after a reboot.
//!
//! # Invariants
//!
//! * After a reboot a node runs what it ran before, without a curator. This is the only way for a cluster to come back
//!   that was completely off.
//! * An unknown input stops nothing that runs. Only a known one does.
//! * A machine changes its cluster only by an order to leave, which stops what it runs and removes its files.
//! * The highest epoch of a cluster is stored before it is followed. It falls only with its authority, after a theft.
//! * etcd is never started on the data of another membership.
//!
//! # Notes for the next implementor
//!
//! * A new part is a runnable in [`cluster_node`][], a cell in [`node_facts::NodeFacts`][] that its `clear` clears, and
//!   a row in the table of [`files`][]. Everything below the directory `cluster` is removed with the node, except for
//!   the order. What a part leaves elsewhere on the host it has to clean up itself.
//! * A runnable must not be marked as healthy before its first success, or its backoff does not grow.
//! * What a person has to know about a failing order goes into `NodeFacts::problems`, which the shepherd shows.
//!   Each part has a name of its own there ([`node_problems`][]).

pub mod authority_order;
pub mod authority_status;
mod authority_switch;
mod beside_etcd;
pub mod certificate_renewal;
pub mod child_placement;
pub mod cluster_node;
pub mod control_plane;
pub mod control_plane_context;
pub mod curator_certificate;
pub mod curator_directory;
pub mod curator_gate;
pub mod etcd_data;
pub mod etcd_image;
pub mod etcd_member;
pub mod etcd_program;
pub mod etcd_space;
pub mod etcd_start;
pub mod files;
mod host_addresses;
pub mod kubernetes;
pub mod local_curator;
pub mod member_address;
pub mod node_address;
pub mod node_enrolment;
pub mod node_facts;
pub mod node_heartbeat;
pub mod node_order;
pub mod node_problems;
pub mod node_status;
pub mod order_decision;
pub mod order_inbox;
pub mod peer_certificate;
pub mod peer_order;
pub mod peer_restart;
pub mod peer_revocation;
pub mod roles;
pub mod services;
pub mod startup;
pub mod stored_authorities;
