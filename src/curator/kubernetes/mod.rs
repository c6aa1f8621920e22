//! Kubernetes of a cluster, as far as the curator knows of it: what it is to be, who has which part, and by which keys its
//! parts know each other. No component runs here; nodes that have the roles run them, by what they are told.
//!
//! # How the files fit
//!
//! All of it decides, and none of it reads or writes:
//!
//! * [`settings`][]: what an owner says. [`allotment`][]: which node has which part of the pods' addresses, and its own bundle.
//! * [`authority`][]: a key that signs, and what it signs. [`keys`][]: all of them, and what is trusted beside them.
//! * [`certificates`][]: which component gets a certificate of which authority, in whose name, on which nodes.
//! * [`users`][]: certificates of people and of programs outside.
//! * [`rotation`][]: how a key is replaced without anybody being refused meanwhile. [`turns`][]: which node is told of it
//!   when. [`editions`][]: what those are told whose turn it is not.
//! * [`setup`][]: what one node is told. [`status`][]: what it may say of itself. [`refusal`][]: why something is not done.
//!
//! The calls are in [`service::kubernetes`](crate::curator::service::kubernetes), and what the leader does by itself in
//! [`service::kubernetes_care`](crate::curator::service::kubernetes_care).
//!
//! # Keys of its own
//!
//! Nothing of Kubernetes is signed by the cluster's own authority. A certificate of a node opens the curator, and whoever
//! could get one for a kubelet would be a node of the cluster; the other way round, an API server believes any certificate
//! of its authority what it says of its holder's groups. So there are four more, one for each question that components ask
//! each other: who serves (`servers`), who calls (`clients`), whether an API server passes somebody's call on
//! (`front-proxy`), and who is on the two ends of the way to etcd (`etcd`). A certificate that is good for one of them is
//! good for nothing else.
//!
//! All are of ECDSA with the curve P-256. The components would take Ed25519 from each other by now, but neither browsers
//! nor every client of Kubernetes' API does, and the tokens of service accounts are verified by RSA or ECDSA alone
//! (RFC 7518, section 3.1, `ES256`). One kind of key for all of it is one kind to know.
//!
//! # No revocation
//!
//! Kubernetes looks at no list of what was revoked. A certificate that was given out is believed until it ends, whatever
//! the curator thinks of its holder by then. So those of components are good for a week, and are renewed when half of it is
//! over; those of people for as long as they ask, a week at the most. Whoever has to be refused at once is refused by
//! replacing the authority that signed for him, which takes as long as the slowest node.

pub mod allotment;
pub mod authority;
pub mod certificates;
pub mod editions;
pub mod keys;
pub mod refusal;
pub mod rotation;
pub mod settings;
pub mod setup;
pub mod status;
pub mod turns;
pub mod users;
