//! Clusters of the fleet: what an operator asked for, and what becomes of it.
//!
//! * [`spec`][]: what was asked for. [`selector`][]: which machines may be chosen.
//! * [`state`][]: what is known of a cluster, its machines and its nodes at one time.
//! * [`plan`][]: what is to be done next, and what each machine waits for.
//! * [`foresee`][]: all that will be done, step by step, before any of it is.
//! * [`choice`][]: which machines are chosen, and which go first.
//! * [`declared`][]: roles that operators declare to it.
//! * [`kubernetes`][]: what it is to run of Kubernetes, and what its curators are told of that.
//! * [`kubernetes_user`][]: certificates of people for its API servers. [`kubernetes_view`][]: what people are shown of it.
//! * [`upgrade`][]: which of its nodes becomes another release next, and when to stand still.
//! * [`view`][]: what people are shown.
//! * [`disturb`][]: what a cluster says to disturbing one of its machines.
//! * [`credential`][]: certificates of people for it. [`key`][]: the key of the shepherd, and when another takes its place.
//! * [`restore`][]: whether it may be brought back from such a snapshot.
//! * [`snapshot`][]: when its records are taken to be kept elsewhere, and which of them are kept.
//! * [`quorum`][]: how many members may be disturbed.

pub mod choice;
pub mod credential;
pub mod declared;
pub mod disturb;
pub mod foresee;
pub mod hardware;
pub mod key;
pub mod kubernetes;
pub mod kubernetes_user;
pub mod kubernetes_view;
pub mod labels;
pub mod plan;
pub mod quorum;
pub mod restore;
pub mod selector;
pub mod snapshot;
pub mod spec;
pub mod state;
pub mod upgrade;
pub mod view;
