//! What is planned, case by case, and that any upgrade and any rollback comes to its end in the right order.

use uuid::Uuid;

use super::*;
use crate::model::cluster::kubernetes::{Component, OnNode};
use crate::model::cluster::state::{CONSENSUS_MEMBER, EtcdMember, Report};
use crate::model::phase::Phase;

const OLD: &str = "aaaa";
const NEW: &str = "bbbb";

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn bundle(digest: &str) -> Bundle {
    Bundle { digest: digest.to_owned(), version: if digest == OLD { "1.30.1" } else { "1.31.0" }.to_owned() }
}

fn upgrade() -> Upgrade {
    Upgrade {
        id: "u1".to_owned(),
        bundles: Some((bundle(OLD), bundle(NEW))),
        back: false,
        parallelism: 1,
        deadline: Duration::from_mins(1),
        paused: None,
        release: None,
        elsewhere: None,
        asked: BTreeMap::new(),
    }
}

/// A cluster of three controllers, c1 to c3, and two workers, w4 and w5.
#[derive(Clone)]
struct World {
    members: Vec<Member>,
    seen: Seen,
    upgrade: Upgrade,
}

fn on_node(bundle: &str, state: &str) -> OnNode {
    let component = Component {
        name: "kubelet".to_owned(),
        state: state.to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    };
    OnNode { bundle: bundle.to_owned(), components: vec![component], ..OnNode::default() }
}

impl World {
    fn new() -> Self {
        let part = |number: u8| if number < 4 { Part::ControlPlane } else { Part::Worker };
        let name = |number: u8| format!("{}{number}", if number < 4 { 'c' } else { 'w' });
        let members = (1..=5).map(|number| Member {
            machine: MachineId(Uuid::from_u128(number.into())),
            name: name(number),
            part: part(number),
            chosen_at: at(0),
            approved: None,
            leaving: None,
            asked: None,
            report: Some(Report { key: Some([number; 32]), ..Report::default() }),
            phase: Phase::Ready,
            retiring: false,
        });
        let roles = |number| match part(number) {
            Part::ControlPlane => vec![CONSENSUS_MEMBER, CONTROLLER],
            Part::Worker => vec![WORKER],
        };
        let nodes = (1..=5).map(|number| Node {
            id: name(number),
            key: [number; 32],
            machine: Some(MachineId(Uuid::from_u128(number.into()))),
            state: NodeState::Up,
            roles: roles(number).into_iter().map(str::to_owned).collect(),
            health: Health::Healthy,
            services: Vec::new(),
            kubernetes: Some(on_node(OLD, "healthy")),
        });
        let etcd =
            (1..=3).map(|number| EtcdMember { node: Some(name(number)), learner: false, reachable: true });
        let mut has = Has::default();
        OLD.clone_into(&mut has.settings.bundle);
        let seen = Seen {
            nodes: nodes.collect(),
            etcd: etcd.collect(),
            kubernetes: Known::Has(has),
            ..Seen::default()
        };
        Self { members: members.collect(), seen, upgrade: upgrade() }
    }

    fn has(&mut self) -> &mut Has {
        match &mut self.seen.kubernetes {
            Known::Has(has) => has,
            other => panic!("{other:?}"),
        }
    }

    fn node(&mut self, id: &str) -> &mut Node {
        self.seen.nodes.iter_mut().find(|node| node.id == id).unwrap()
    }

    fn runs(mut self, id: &str, bundle: &str, state: &str) -> Self {
        self.has().assigned.insert(id.to_owned(), bundle.to_owned());
        self.node(id).kubernetes = Some(on_node(bundle, state));
        self
    }

    fn asked(mut self, id: &str, seconds: i64, through: bool) -> Self {
        self.upgrade.asked.insert(id.to_owned(), Asked { at: at(seconds), through });
        self
    }

    fn next(&self, now: i64) -> Next {
        next(&self.upgrade, &self.members, &self.seen, at(now))
    }

    /// What is planned, a word a step.
    fn told(&self, now: i64) -> String {
        let steps = self.next(now).steps;
        let steps = steps.iter().map(|step| match step {
            Step::AssignBundle { node, bundle, .. } => format!("{node}={bundle}"),
            Step::Upgrade(Turn::Through { node }) => format!("{node} through"),
            Step::Upgrade(Turn::StandStill { why }) => format!("stand still: {why}"),
            Step::Upgrade(Turn::Released) => "released".to_owned(),
            Step::Upgrade(Turn::Finish) => "finish".to_owned(),
            other => other.to_string(),
        });
        steps.collect::<Vec<_>>().join("; ")
    }
}

#[test]
fn controllers_go_one_by_one_and_workers_after_them() {
    let world = World::new();
    assert_eq!(world.told(0), "c1=bbbb");
    let waits = world.next(0).machines;
    let of = |number: u128| waits[&MachineId(Uuid::from_u128(number))].clone();
    assert_eq!(of(2), "1 before it are not through yet");
    assert_eq!(of(4), "the controllers of the cluster are upgraded first");

    // Written down, and not told: told now, and nobody else.
    let asked = World::new().asked("c1", 0, false);
    assert_eq!(asked.told(1), "c1=bbbb");
    let told = asked.clone().runs("c1", OLD, "healthy");
    let mut told = told;
    told.has().assigned.insert("c1".to_owned(), NEW.to_owned());
    assert_eq!(told.told(1), "");
    let starting = told.clone().runs("c1", NEW, "starting");
    assert_eq!(starting.told(1), "");
    let well = told.clone().runs("c1", NEW, "healthy");
    assert_eq!(well.told(1), "c1 through");
    assert_eq!(well.clone().asked("c1", 0, true).told(1), "c2=bbbb");
    // One that is through and not well any more is waited for, and is no failure.
    assert_eq!(starting.asked("c1", 0, true).told(100_000), "");
}

#[test]
fn what_is_in_the_way_is_waited_for_and_said() {
    let because = |change: &dyn Fn(&mut World)| {
        let mut world = World::new();
        change(&mut world);
        assert_eq!(world.told(0), "");
        world.next(0).machines[&MachineId(Uuid::from_u128(1))].clone()
    };
    assert!(because(&|world| world.seen.etcd[2].reachable = false).starts_with("2 of 3 members of etcd"));
    assert!(because(&|world| world.seen.etcd[2].learner = true).starts_with("a member of etcd is learning"));
    assert!(
        because(&|world| world.upgrade.elsewhere = Some("u7".into())).starts_with("the update u7 has asked")
    );
    assert!(
        because(&|world| {
            for id in ["c2", "c3"] {
                world.node(id).health = Health::Unknown;
            }
            world.node("c1").kubernetes = Some(on_node(OLD, "healthy"));
        })
        .starts_with("the controller c2 of its cluster is not well")
    );
    let paused = World { upgrade: Upgrade { paused: Some("kim".into()), ..upgrade() }, ..World::new() };
    assert_eq!((paused.told(0), paused.next(0).waits.len()), (String::new(), 1));
}

#[test]
fn node_that_is_not_well_goes_first_and_loses_nothing() {
    let ill = World::new().runs("c2", OLD, "backing off");
    assert_eq!(ill.told(0), "c2=bbbb", "the others are well, and it is not");
    // Two are not well: the upgrade may be what they need.
    assert_eq!(ill.runs("c3", OLD, "unhealthy").told(0), "c2=bbbb");
}

#[test]
fn first_failure_lets_it_stand_still() {
    let failed = World::new().asked("c1", 0, false).runs("c1", NEW, "unhealthy");
    assert_eq!(failed.told(60), "");
    let said = failed.told(61);
    assert!(
        said.starts_with("stand still: c1: it was not well with the bundle within 60 s: kubelet is"),
        "{said}"
    );
    // Also where another one is through at the same time: nobody else is asked in that pass.
    let mut workers = World::new();
    workers.upgrade.parallelism = 2;
    for id in ["c1", "c2", "c3"] {
        workers = workers.runs(id, NEW, "healthy").asked(id, 0, true);
    }
    assert_eq!(workers.told(1), "w4=bbbb; w5=bbbb");
    let one = workers
        .runs("w4", NEW, "healthy")
        .asked("w4", 0, false)
        .asked("w5", 0, false)
        .runs("w5", NEW, "ended");
    assert!(one.told(61).starts_with("stand still: w5"), "{}", one.told(61));
}

#[test]
fn role_servers_go_first_and_stop_it_where_they_fail() {
    let world = |ended: Option<(&str, u32)>, paused: Option<&str>| {
        let release = Release {
            roll_out: "r1".to_owned(),
            paused: paused.map(str::to_owned),
            ended: ended.map(|(how, failed)| (how.to_owned(), failed)),
        };
        World { upgrade: Upgrade { release: Some(release), ..upgrade() }, ..World::new() }
    };
    for (ended, paused, expected) in [
        (None, None, ""),
        (None, Some("m1: no"), ""),
        (Some(("finished", 0)), None, "released"),
        (Some(("finished", 2)), None, "released; stand still: 2 of its machines do not run the release"),
        (Some(("aborted", 0)), None, "released; stand still: the update r1 of its role servers was aborted"),
    ] {
        let said = world(ended, paused).told(0);
        assert!(said.starts_with(expected) && said.is_empty() == expected.is_empty(), "{said}");
    }
    // Going back is a matter of bundles alone.
    let mut back = world(None, None);
    back.upgrade.back = true;
    assert_eq!(back.told(0), "finish");
}

/// Carries out what is planned until nothing is left, and says in which order nodes came to their bundle.
fn carried_out(mut world: World) -> Vec<String> {
    let mut order = Vec::new();
    for second in 0..100 {
        let steps = world.next(second).steps;
        for step in &steps {
            match step {
                Step::AssignBundle { node, bundle, .. } => {
                    world.upgrade.asked.insert(node.clone(), Asked { at: at(second), through: false });
                    world = world.runs(node, bundle, "healthy");
                    order.push(node.clone());
                }
                Step::Upgrade(Turn::Through { node }) => {
                    world.upgrade.asked.get_mut(node).unwrap().through = true;
                }
                Step::Upgrade(Turn::Finish) => return order,
                other => panic!("{other}"),
            }
        }
    }
    panic!("it comes to no end: {order:?}");
}

#[test]
fn any_upgrade_ends_and_its_rollback_goes_the_other_way() {
    assert_eq!(carried_out(World::new()), ["c1", "c2", "c3", "w4", "w5"]);
    // From half-way: a worker before any controller, and what never left stays.
    let mut half = World::new();
    for id in ["c1", "c2", "c3", "w4"] {
        half = half.runs(id, NEW, "healthy");
    }
    half.upgrade.back = true;
    assert_eq!(carried_out(half), ["w4", "c1", "c2", "c3"]);
    // One that a failed upgrade left unwell goes first among its like.
    let mut failed = World::new().runs("c1", NEW, "healthy").runs("c2", NEW, "backing off");
    failed.upgrade.back = true;
    assert_eq!(carried_out(failed), ["c2", "c1"]);
}

#[test]
fn only_role_servers_are_upgraded_where_no_bundle_is_named() {
    let world = World { upgrade: Upgrade { bundles: None, ..upgrade() }, ..World::new() };
    assert_eq!(world.told(0), "finish");
}
