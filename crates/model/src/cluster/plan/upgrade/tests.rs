//! Plans of upgrades, case by case; every upgrade and every rollback ends, in the right order.

use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::cluster::kubernetes::{ComponentStatus, NodeKubernetes};
use crate::cluster::node_address::NodeAddresses;
use crate::cluster::state::{CONSENSUS_MEMBER_ROLE, EtcdMember, MemberReport};
use crate::cluster::upgrade::{NodeUpgrade, ReleaseProgress};
use crate::phase::Phase;

const OLD: &str = "aaaa";
const NEW: &str = "bbbb";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn bundle(digest: &str) -> BundleRef {
    BundleRef {
        digest: digest.to_owned(),
        version: if digest == OLD { "1.30.1" } else { "1.31.0" }.to_owned(),
    }
}

fn upgrade() -> ClusterUpgrade {
    ClusterUpgrade {
        id: "u1".to_owned(),
        bundles: Some((bundle(OLD), bundle(NEW))),
        rolling_back: false,
        parallelism: 1,
        node_deadline: Duration::from_mins(1),
        pause_reason: None,
        release: None,
        conflicting_roll_out: None,
        requested_nodes: BTreeMap::new(),
    }
}

/// A cluster of three controllers, c1 to c3, and two workers, w4 and w5.
#[derive(Clone)]
struct World {
    members: Vec<ClusterMember>,
    seen: ObservedCluster,
    upgrade: ClusterUpgrade,
}

fn on_node(bundle: &str, state: &str) -> NodeKubernetes {
    let component = ComponentStatus {
        name: "kubelet".to_owned(),
        state: state.to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    };
    NodeKubernetes { bundle: bundle.to_owned(), components: vec![component], ..NodeKubernetes::default() }
}

impl World {
    fn new() -> Self {
        let part = |number: u8| if number < 4 { ClusterPart::ControlPlane } else { ClusterPart::Worker };
        let name = |number: u8| format!("{}{number}", if number < 4 { 'c' } else { 'w' });
        let members = (1..=5).map(|number| ClusterMember {
            machine: MachineId(Uuid::from_u128(number.into())),
            name: name(number),
            part: part(number),
            chosen_at: at(0),
            approved_key: None,
            leave_reason: None,
            last_order: None,
            report: Some(MemberReport { key: Some([number; 32]), ..MemberReport::default() }),
            phase: Phase::Ready,
            retiring: false,
            keep_authority: false,
            listed_address: None,
        });
        let roles = |number| match part(number) {
            ClusterPart::ControlPlane => vec![CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE],
            ClusterPart::Worker => vec![WORKER_ROLE],
        };
        let nodes = (1..=5).map(|number| ClusterNode {
            id: name(number),
            key: [number; 32],
            machine: Some(MachineId(Uuid::from_u128(number.into()))),
            state: NodeState::Up,
            roles: roles(number).into_iter().map(str::to_owned).collect(),
            health: NodeHealth::Healthy,
            services: Vec::new(),
            kubernetes: Some(on_node(OLD, "healthy")),
            addresses: NodeAddresses::default(),
        });
        let etcd =
            (1..=3).map(|number| EtcdMember { node: Some(name(number)), learner: false, reachable: true });
        let mut has = CuratorKubernetes::default();
        OLD.clone_into(&mut has.spec.bundle);
        let seen = ObservedCluster {
            nodes: nodes.collect(),
            etcd_members: etcd.collect(),
            kubernetes: ObservedKubernetes::Present(has),
            ..ObservedCluster::default()
        };
        Self { members: members.collect(), seen, upgrade: upgrade() }
    }

    fn kubernetes_status(&mut self) -> &mut CuratorKubernetes {
        match &mut self.seen.kubernetes {
            ObservedKubernetes::Present(has) => has,
            other => panic!("{other:?}"),
        }
    }

    fn node(&mut self, id: &str) -> &mut ClusterNode {
        self.seen.nodes.iter_mut().find(|node| node.id == id).unwrap()
    }

    fn with_running(mut self, id: &str, bundle: &str, state: &str) -> Self {
        self.kubernetes_status().assigned_bundles.insert(id.to_owned(), bundle.to_owned());
        self.node(id).kubernetes = Some(on_node(bundle, state));
        self
    }

    fn with_requested(mut self, id: &str, seconds: i64, through: bool) -> Self {
        self.upgrade
            .requested_nodes
            .insert(id.to_owned(), NodeUpgrade { requested_at: at(seconds), is_done: through });
        self
    }

    fn plan(&self, now: i64) -> UpgradePlan {
        plan_upgrade(&self.upgrade, &self.members, &self.seen, at(now))
    }

    /// The planned steps as text, separated by semicolons.
    fn plan_text(&self, now: i64) -> String {
        let steps = self.plan(now).steps;
        let steps = steps.iter().map(|step| match step {
            ClusterPlanStep::AssignBundle { node, bundle, .. } => format!("{node}={bundle}"),
            ClusterPlanStep::RecordUpgrade(UpgradeEvent::NodeDone { node }) => format!("{node} through"),
            ClusterPlanStep::RecordUpgrade(UpgradeEvent::Pause { reason: why }) => {
                format!("stand still: {why}")
            }
            ClusterPlanStep::RecordUpgrade(UpgradeEvent::ReleaseDone) => "released".to_owned(),
            ClusterPlanStep::RecordUpgrade(UpgradeEvent::Finish) => "finish".to_owned(),
            other => other.to_string(),
        });
        steps.collect::<Vec<_>>().join("; ")
    }
}

#[test]
fn controllers_go_one_by_one_and_workers_after_them() {
    let world = World::new();
    assert_eq!(world.plan_text(0), "c1=bbbb");
    let waits = world.plan(0).machine_waits;
    let of = |number: u128| waits[&MachineId(Uuid::from_u128(number))].clone();
    assert_eq!(of(2), "1 before it are not done yet");
    assert_eq!(of(4), "the controllers of the cluster are upgraded first");

    // The request is recorded and was not sent: it is sent now, and no other node is started.
    let requested = World::new().with_requested("c1", 0, false);
    assert_eq!(requested.plan_text(1), "c1=bbbb");
    let reported = requested.clone().with_running("c1", OLD, "healthy");
    let mut reported = reported;
    reported.kubernetes_status().assigned_bundles.insert("c1".to_owned(), NEW.to_owned());
    assert_eq!(reported.plan_text(1), "");
    let starting = reported.clone().with_running("c1", NEW, "starting");
    assert_eq!(starting.plan_text(1), "");
    let well = reported.clone().with_running("c1", NEW, "healthy");
    assert_eq!(well.plan_text(1), "c1 through");
    assert_eq!(well.clone().with_requested("c1", 0, true).plan_text(1), "c2=bbbb");
    // A finished node that becomes unhealthy is waited for, and is no failure.
    assert_eq!(starting.with_requested("c1", 0, true).plan_text(100_000), "");
}

#[test]
fn obstacles_are_waited_for_and_reported() {
    let because = |change: &dyn Fn(&mut World)| {
        let mut world = World::new();
        change(&mut world);
        assert_eq!(world.plan_text(0), "");
        world.plan(0).machine_waits[&MachineId(Uuid::from_u128(1))].clone()
    };
    assert!(
        because(&|world| world.seen.etcd_members[2].reachable = false).starts_with("2 of 3 members of etcd")
    );
    assert!(
        because(&|world| world.seen.etcd_members[2].learner = true)
            .starts_with("a member of etcd is still learning")
    );
    assert!(
        because(&|world| world.upgrade.conflicting_roll_out = Some("u7".into()))
            .starts_with("the update u7 has an open order for a machine of its cluster")
    );
    assert!(
        because(&|world| {
            for id in ["c2", "c3"] {
                world.node(id).health = NodeHealth::Unknown;
            }
            world.node("c1").kubernetes = Some(on_node(OLD, "healthy"));
        })
        .starts_with("the controller c2 of its cluster is not healthy")
    );
    let paused =
        World { upgrade: ClusterUpgrade { pause_reason: Some("kim".into()), ..upgrade() }, ..World::new() };
    assert_eq!((paused.plan_text(0), paused.plan(0).wait_reasons.len()), (String::new(), 1));
}

#[test]
fn unhealthy_node_is_upgraded_first() {
    let ill = World::new().with_running("c2", OLD, "backing off");
    assert_eq!(ill.plan_text(0), "c2=bbbb", "the others are well, and it is not");
    // Two are unhealthy: the upgrade may be what they need.
    assert_eq!(ill.with_running("c3", OLD, "unhealthy").plan_text(0), "c2=bbbb");
}

#[test]
fn first_failure_pauses_the_upgrade() {
    let failed = World::new().with_requested("c1", 0, false).with_running("c1", NEW, "unhealthy");
    assert_eq!(failed.plan_text(60), "");
    let output = failed.plan_text(61);
    assert!(
        output.starts_with("stand still: c1: it was not healthy with the bundle within 60 s: kubelet is"),
        "{output}"
    );
    // Even if another node finishes at the same time, no further node is started in that pass.
    let mut workers = World::new();
    workers.upgrade.parallelism = 2;
    for id in ["c1", "c2", "c3"] {
        workers = workers.with_running(id, NEW, "healthy").with_requested(id, 0, true);
    }
    assert_eq!(workers.plan_text(1), "w4=bbbb; w5=bbbb");
    let one = workers
        .with_running("w4", NEW, "healthy")
        .with_requested("w4", 0, false)
        .with_requested("w5", 0, false)
        .with_running("w5", NEW, "ended");
    assert!(one.plan_text(61).starts_with("stand still: w5"), "{}", one.plan_text(61));
}

#[test]
fn role_servers_go_first_and_their_failure_pauses_the_upgrade() {
    let world = |ended: Option<(&str, u32)>, paused: Option<&str>| {
        let release = ReleaseProgress {
            roll_out: "r1".to_owned(),
            pause_reason: paused.map(str::to_owned),
            outcome: ended.map(|(how, failed)| (how.to_owned(), failed)),
        };
        World { upgrade: ClusterUpgrade { release: Some(release), ..upgrade() }, ..World::new() }
    };
    for (ended, paused, expected) in [
        (None, None, ""),
        (None, Some("m1: no"), ""),
        (Some(("finished", 0)), None, "released"),
        (Some(("finished", 2)), None, "released; stand still: 2 of its machines do not run the release"),
        (Some(("aborted", 0)), None, "released; stand still: the update r1 of its role servers was aborted"),
    ] {
        let output = world(ended, paused).plan_text(0);
        assert!(output.starts_with(expected) && output.is_empty() == expected.is_empty(), "{output}");
    }
    // A rollback concerns bundles only.
    let mut back = world(None, None);
    back.upgrade.rolling_back = true;
    assert_eq!(back.plan_text(0), "finish");
}

/// Applies planned steps until none is left; returns the order in which nodes got their bundle.
fn run_to_end(mut world: World) -> Vec<String> {
    let mut order = Vec::new();
    for second in 0..100 {
        let steps = world.plan(second).steps;
        for step in &steps {
            match step {
                ClusterPlanStep::AssignBundle { node, bundle, .. } => {
                    world
                        .upgrade
                        .requested_nodes
                        .insert(node.clone(), NodeUpgrade { requested_at: at(second), is_done: false });
                    world = world.with_running(node, bundle, "healthy");
                    order.push(node.clone());
                }
                ClusterPlanStep::RecordUpgrade(UpgradeEvent::NodeDone { node }) => {
                    world.upgrade.requested_nodes.get_mut(node).unwrap().is_done = true;
                }
                ClusterPlanStep::RecordUpgrade(UpgradeEvent::Finish) => return order,
                other => panic!("{other}"),
            }
        }
    }
    panic!("it comes to no end: {order:?}");
}

#[test]
fn every_upgrade_ends_and_rollback_reverses_the_order() {
    assert_eq!(run_to_end(World::new()), ["c1", "c2", "c3", "w4", "w5"]);
    // From half-way: a worker before any controller. What was never upgraded stays.
    let mut half = World::new();
    for id in ["c1", "c2", "c3", "w4"] {
        half = half.with_running(id, NEW, "healthy");
    }
    half.upgrade.rolling_back = true;
    assert_eq!(run_to_end(half), ["w4", "c1", "c2", "c3"]);
    // A node that a failed upgrade left unhealthy goes first within its part.
    let mut failed = World::new().with_running("c1", NEW, "healthy").with_running("c2", NEW, "backing off");
    failed.upgrade.rolling_back = true;
    assert_eq!(run_to_end(failed), ["c2", "c1"]);
}

#[test]
fn only_role_servers_are_upgraded_without_a_bundle() {
    let world = World { upgrade: ClusterUpgrade { bundles: None, ..upgrade() }, ..World::new() };
    assert_eq!(world.plan_text(0), "finish");
}
