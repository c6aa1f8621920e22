//! Clusters: spec, state, plan, restore, upgrade and credentials.
//!
//! * [`spec`][]: what an operator requests. [`selector`][]: which machines may be chosen.
//! * [`state`][]: spec, members and nodes of a cluster at one time.
//! * [`plan`][]: the next steps, and what each machine waits for.
//! * [`forecast`][]: all steps to come, before any of them is taken.
//! * [`placement`][]: which machines are chosen, and which are removed first.
//! * [`hardware`][]: facts that select and label members. [`node_labels`][]: labels that a node gets when it joins.
//! * [`declaration_sync`][]: roles that operators declare to a cluster.
//! * [`kubernetes`][]: desired and observed Kubernetes of a cluster, and the steps between them.
//! * [`kubernetes_user`][]: certificates of people for API servers. [`kubernetes_view`][]: Kubernetes as shown.
//! * [`upgrade`][]: which node gets another release next, and when to pause.
//! * [`view`][]: a cluster as shown.
//! * [`disruption`][]: a cluster's objection to disrupting one of its machines.
//! * [`credential`][]: certificates of people for a cluster. [`owner_key`][]: the shepherd's own key and its rotation.
//! * [`restore`][]: whether a cluster may be restored from a snapshot.
//! * [`snapshot`][]: when a cluster's records are copied elsewhere, and which of these copies are kept.
//! * [`quorum`][]: majority and tolerated failures.

pub mod credential;
pub mod declaration_sync;
pub mod disruption;
pub mod forecast;
pub mod hardware;
pub mod kubernetes;
pub mod kubernetes_user;
pub mod kubernetes_view;
pub mod node_labels;
pub mod owner_key;
pub mod placement;
pub mod plan;
pub mod quorum;
pub mod restore;
pub mod selector;
pub mod snapshot;
pub mod spec;
pub mod state;
pub mod upgrade;
pub mod view;
