//! A cluster of which everything is simulated but its decisions.
//!
//! Five machines with disks, a network, an etcd, owners who order at random, and faults: role servers killed and stopped,
//! power cut at one machine and at all, partitions, lost disks, damaged files, a month that passes at once. Time is virtual
//! and one seed is one run. Whatever decides is the product's own: [`sim`] and the rest only carry it from one read or
//! write to the next, as `src/curator/service/` and `src/roleserver/cluster/` do, and anything may come between two of
//! those. After every write and every report an observer who sees everything asks the invariants ([`invariants`]); when
//! the faults are over, all that was ordered must come to be in bounded time ([`runs`]).
//!
//! To run one seed alone: `SHEPHERD_CLUSTER_MODEL_SEED=7 cargo test --test all cluster_model::runs`. A run that fails
//! tells its seed, its last events and the state of all machines.
//!
//! # What the product decides here
//!
//! `roles::{evaluate, Plan::next}`, `membership::{sync, Change::record, promotion, owners}`, `life_cycle`, `tickets`,
//! `health::Heartbeats`, `permissions`, `node` (records, with their encoding), `pki::renewal`; of etcd's election
//! `etcd::places`, of its guard the transactions themselves and what their failure means; `service::chronicle`. On the node
//! `enrolment::decide`, `startup::{decide, inherit, begins_anew, is_as_it_should}`, `etcd::{first_membership,
//! membership_of}`, `roles::{last_known, ordered}`, `status::decide`, `certificate::decide`.
//!
//! # What is simulated, and what follows
//!
//! The order of steps inside one call or one worker is repeated here from the product where it is not a decision; tests
//! with real components show that part. Raft is taken for granted: there is one order of all writes, and what it leaves
//! open is kept (`store.rs`). TLS is one comparison of dates and keys.
//!
//! # Which invariant is shown where
//!
//! Tests of the model are those of [`runs`]; those with a path are real components; names alone are unit tests.
//!
//! | | in the model | otherwise |
//! | --- | --- | --- |
//! | V1 one pair at a time, and the old one over before | `one_etcd_at_a_time`, `one_curator_at_a_time`: that the launcher asks for no second one. Whether a process has *returned* is nothing a model can know | `supervisor::deep_sibling_returns_wholly_before_it_starts_again`, `nodes::roles::…` |
//! | V2 no restart for what a role says | `begun_anew_for_a_reason` | `only_another_membership_starts_the_control_plane_again`, `what_etcd_is_started_with_stays_as_it_was_begun` |
//! | V3 values converge after any crash | `what_is_still_to_be_done` | [`arrival`]; `nodes::forming::…` |
//! | V4 a connection only once it is durable | `connection_is_durable` | `nodes::crashes::{founding…, joining…}` |
//! | V5 nothing asks before there is a connection | not expressible: each worker of the model waits by itself, so that would be asked of the model | `nothing_is_decided_before_roles_and_the_way_are_known`, [`arrival`] |
//! | V6 old or lost roles cost nothing | `only_what_is_over_is_removed`, with roles damaged on disks | `damaged_roles_are_absent_and_never_none`, `nodes::crashes::only_member_whose_roles_are_damaged…` |
//! | V7 reports | `report_is_complete`, and that the last one is what the record says. "Ordered" is that one worker sends them one after the other, which the model repeats | `nothing_is_said_before_the_address_is_known_and_all_of_it_then`, `report_of_a_node_is_taken…`, [`arrival`] |
//! | V8 a controller without consensus waits | no Kubernetes runs on a node yet; what can be said by now is I-a below | `order_that_cannot_be_is_refused_with_a_sentence` |
//! | V9 other roles change nothing | `begun_anew_for_a_reason`, with orders that mix all roles | `order_about_other_roles_leaves_membership_alone` |
//! | V10 no write of a former leader | `only_the_leader_writes`, with processes that stand still longer than their lease | `etcd::guard::whoever_lost_the_election_writes_and_reads_nothing`, `curator::leading::…` |
//! | V11 I-a | `roles_are_of_nodes_that_are_up` | `record_that_breaks_a_rule_is_not_written` |
//! | V11 I-b | `removal_leaves_a_living_quorum`, `voters_keep_a_quorum` | `removal_leaves_a_quorum_of_living_members`, `curator::consensus::member_out_of_reach…` |
//! | V11 I-c | `what_is_still_to_be_done` | `ticks_settle_every_disagreement`, `curator::consensus::members_and_records_come_to_agree…` |
//! | V11 I-d | `membership_goes_first` | `record_follows_only_once_membership_is_changed`, `curator::life::node_goes_only…` |
//! | V11 life cycle | `life_cycle_is_kept` | `curator::life::machine_becomes_a_node_step_by_step…` |
//! | V12 one end of the backlog | not expressible: what is told in which message is not a decision by itself, and the model has no messages | `curator::watches::watch_of_all_nodes_ends_its_backlog_once…`, `backlog_ends_once_and_what_comes_later_is_not_in_it` |
//! | V13 health | `health_is_what_the_leader_can_know`, with leaders that have just begun | `verdict_follows_the_table`, `curator::heartbeats::…` |
//!
//! # What the original had no test for
//!
//! | | |
//! | --- | --- |
//! | roles that flip, quickly too | [`runs`]; `nodes::roles::role_that_is_given_and_taken_quickly_ends_as_it_was_ordered_last` |
//! | a launcher that crashes after it has told | [`runs`]; `nodes::forming::three_nodes_form_a_cluster_that_outlives…` |
//! | founding cut off at any step | [`runs`]; `nodes::crashes::founding_that_was_cut_off_after_any_step…` |
//! | damaged roles | [`runs`]; `nodes::crashes::only_member_whose_roles_are_damaged…` |
//! | the end of its own node | `node_does_what_it_is_told_of_itself_and_nothing_once_it_is_deleted`, `curator::watches::watch_of_one_node_tells_each_of_its_lives` |
//! | heartbeats over a change of leaders | [`runs`]; `new_leader_does_not_know_and_then_hears`, `curator::heartbeats::…` |
//! | status said again after a failed call | [`runs`], as a part of what is still to be done |
//! | orders in which inputs arrive | [`arrival`] |
//! | a record that changes between the look and the write | [`runs`]; `etcd::guard::tasks_of_one_leader_do_not_undo_one_another` |
//! | deletions while etcd was out of sight | `etcd::value::deletion_while_etcd_was_out_of_sight_is_told_and_the_rest_is_not_told_again` |
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
