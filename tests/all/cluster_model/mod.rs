//! Cluster model: the product's decisions, with everything else simulated.
//!
//! Five machines with disks, a network, an etcd, owners who order at random, and faults: role servers are killed and
//! stopped, power is cut at one machine and at all, the network is partitioned, disks are lost, files are damaged, and
//! a month passes at once. Time is virtual and one seed is one run. All decisions are the product's own. [`sim`] and
//! the rest only connect one read or write to the next, as `crates/curator/src/service/` and
//! `crates/roleserver/src/cluster/` do, and anything may happen between two of those. After every write and every
//! report an observer with complete knowledge checks the invariants ([`invariants`]). When the faults are over, all
//! orders must take effect in bounded time ([`runs`]).
//!
//! To run one seed alone: `SHEPHERD_CLUSTER_MODEL_SEED=7 cargo test --test all cluster_model::runs`. A failing run
//! prints its seed, its last events and the state of all machines.
//!
//! # What the product decides here
//!
//! On the curator: `role_orders::plan_role_change`, `membership::{plan_sync, learner_to_promote}`, `node_lifecycle`,
//! `tickets`, `node_health::HeartbeatTracker`, `permissions`, `node` (records, with their encoding),
//! `certificate::decide_renewal`, `service::node_watch_cache`. Of etcd: `election_view`, and of `guard` the transactions
//! themselves and the meaning of their failure. On the node: `node_enrolment::decide_step`,
//! `startup::{decide_startup, decide_etcd_data, must_restart, matches_running}`,
//! `etcd_member::{first_membership, membership_for_role}`, `roles::{restore_roles, roles_from_event}`,
//! `node_status::build_status`, `certificate_renewal::decide_renewal_action`.
//!
//! # What is simulated, and what follows
//!
//! The order of steps inside one call or one worker is repeated here from the product where it is not a decision; tests
//! with real components cover that part. Raft is taken for granted: there is one order of all writes, and the model
//! keeps what Raft leaves open (`store.rs`). TLS is one comparison of dates and keys.
//!
//! # Which invariant is shown where
//!
//! Tests of the model are those of [`runs`]. Those with a path use real components. Names alone are unit tests.
//!
//! | | in the model | otherwise |
//! | --- | --- | --- |
//! | V1 one pair at a time, and the old one over before | `one_etcd_at_a_time`, `one_curator_at_a_time`: that the launcher starts no second one. A model cannot know whether a process has *returned* | `supervisor::deep_sibling_returns_wholly_before_it_starts_again`, `nodes::roles::…` |
//! | V2 no restart for other fields of a role | `restarts_for_a_reason` | `only_another_membership_starts_the_control_plane_again`, `etcd_arguments_do_not_change_within_a_membership` |
//! | V3 values converge after any crash | `what_is_still_to_be_done` | [`arrival`]; `nodes::forming::…` |
//! | V4 a connection only once it is durable | `connection_is_durable` | `nodes::crashes::{founding…, joining…}` |
//! | V5 nothing makes a call before a connection exists | not expressible: each worker of the model waits by itself, so the check would test the model | `nothing_is_decided_before_roles_and_the_connection_are_known`, [`arrival`] |
//! | V6 old or lost roles cost nothing | `only_what_is_over_is_removed`, with roles damaged on disks | `damaged_roles_are_absent_and_never_none`, `nodes::crashes::only_member_whose_roles_are_damaged…` |
//! | V7 reports | `report_is_complete`, and that the record equals the last one. "Ordered" means that one worker sends them one after the other, which the model repeats | `nothing_is_reported_before_the_address_is_known`, `status_report_is_accepted_while_up_and_only_when_changed`, [`arrival`] |
//! | V8 a controller without consensus waits | no Kubernetes runs on a node of the model; the part that it can check is I-a below | `impossible_order_is_rejected_with_a_reason` |
//! | V9 other roles change nothing | `restarts_for_a_reason`, with orders that mix all roles | `order_about_other_roles_keeps_membership` |
//! | V10 no write of a former leader | `only_the_leader_writes`, with processes that stop for longer than their lease | `etcd/guard::former_leader_writes_and_reads_nothing`, `curator/leading::…` |
//! | V11 I-a | `roles_are_of_nodes_that_are_up` | `record_that_breaks_an_invariant_is_not_written` |
//! | V11 I-b | `removal_leaves_a_living_quorum`, `voters_keep_a_quorum` | `removal_leaves_a_quorum_of_living_members`, `curator/consensus::member_out_of_reach…` |
//! | V11 I-c | `what_is_still_to_be_done` | `repeated_syncs_resolve_every_disagreement`, `curator/consensus::members_and_records_come_to_agree…` |
//! | V11 I-d | `membership_goes_first` | `record_follows_only_once_membership_is_changed`, `curator/life::node_goes_only…` |
//! | V11 life cycle | `life_cycle_is_kept` | `curator/life::machine_becomes_a_node_step_by_step…` |
//! | V12 one end of the backlog | not expressible: how events are divided into messages is not a decision by itself, and the model has no messages | `curator/watches::watch_of_all_nodes_ends_its_backlog_once…`, `backlog_ends_once_and_what_comes_later_is_not_in_it` |
//! | V13 health | `health_is_what_the_leader_can_know`, with leaders that have just begun | `health_follows_the_table`, `curator/heartbeats::…` |
//!
//! # What the original had no test for
//!
//! | | |
//! | --- | --- |
//! | roles that flip, quickly too | [`runs`]; `nodes::roles::role_that_is_given_and_taken_quickly_ends_as_it_was_ordered_last` |
//! | a launcher that crashes after it has reported | [`runs`]; `nodes::forming::three_nodes_form_a_cluster_that_outlives…` |
//! | founding cut off at any step | [`runs`]; `nodes::crashes::founding_that_was_cut_off_after_any_step…` |
//! | damaged roles | [`runs`]; `nodes::crashes::only_member_whose_roles_are_damaged…` |
//! | the end of its own node | `node_takes_its_own_roles_and_none_once_it_is_deleted`, `curator/watches::watch_of_one_node_tells_each_of_its_lives` |
//! | heartbeats over a change of leaders | [`runs`]; `health_is_unknown_until_a_new_leader_receives_heartbeats`, `curator/heartbeats::…` |
//! | status reported again after a failed call | [`runs`], as a part of `what_is_still_to_be_done` |
//! | orders in which inputs arrive | [`arrival`] |
//! | a record that changes between the read and the write | [`runs`]; `etcd/guard::tasks_of_one_leader_do_not_undo_one_another` |
//! | deletions while etcd was out of reach | `etcd/value::deletion_while_etcd_was_unreachable_is_reported_and_the_rest_is_not_repeated` |
//! | branches of the reconciler's leader; its status key; nodes that come back to it | `reconciler::rows::…`, `reconciler::leading::…`, and a model of its own: `reconciler::model` |
//! | name clashes; immutable objects | with the objects of the reconciler, which are not there yet |

mod arrival;
mod asking_etcd;
mod curators;
mod fixture;
mod invariants;
mod launcher;
mod node;
mod operators;
mod runs;
mod service;
pub(crate) mod sim;
pub(crate) mod store;
mod world;
