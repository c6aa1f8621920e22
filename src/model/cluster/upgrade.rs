//! Upgrading a cluster: which node is next, which one is through, and when to stand still.
//!
//! Role servers come first: a roll-out of their release over the cluster's machines
//! ([`roll_out`][crate::model::roll_out]), because a bundle may need a newer one. Then the controllers, one by one, and when
//! all of them are through, the workers, a few at a time. A rollback goes the other way: no kubelet is ever newer than an
//! API server.
//!
//! A node is through when it reports the bundle and that all its components are well. The next controller is asked only
//! while every member of etcd is reached and all other controllers are well; a node that is not well itself has nothing to
//! lose, and is not asked about. The first failure lets the upgrade stand still, and a person decides how it goes on.
//!
//! Nothing is remembered between two passes but which nodes were asked, when, and which of them are through. A node that was
//! written down as asked and not told by its curators, because somebody died in between, is told in the next pass.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::cluster::kubernetes::{CONTROLLER, Has, Known, WORKER};
use crate::model::cluster::plan::Step;
use crate::model::cluster::spec::Part;
use crate::model::cluster::state::{Health, Member, Node, NodeState, Seen};
use crate::model::ids::MachineId;
use crate::model::time::{Timestamp, after};

/// Most workers at a time.
pub const MOST_AT_A_TIME: u32 = 50;
/// How long a node may take, in seconds.
pub const DEADLINES: std::ops::RangeInclusive<u32> = 5..=7_200;
/// How long a node may take when nobody says, in seconds: to fetch a bundle, to drain and to start.
pub const DEADLINE: u32 = 900;

/// A bundle that a cluster is to run, or ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// SHA-256, 64 hexadecimal digits.
    pub digest: String,
    /// Version of Kubernetes in it.
    pub version: String,
}

/// An upgrade that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgrade {
    /// Which.
    pub id: String,
    /// From which bundle to which; none where only role servers become another release.
    pub bundles: Option<(Bundle, Bundle)>,
    /// Whether it goes back.
    pub back: bool,
    /// How many workers at a time.
    pub parallelism: usize,
    /// How long a node may take.
    pub deadline: Duration,
    /// Why it stands still.
    pub paused: Option<String>,
    /// What becomes of the role servers' release; none where they stay, or are through.
    pub release: Option<Release>,
    /// The roll-out of somebody else that has asked a machine of this cluster, if there is one.
    pub elsewhere: Option<String>,
    /// Nodes that were asked on the way that it goes now, by their ids.
    pub asked: BTreeMap<String, Asked>,
}

/// How far the roll-out of the role servers' release is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// Its id.
    pub roll_out: String,
    /// Why it stands still.
    pub paused: Option<String>,
    /// How it ended, once it has; machines that have failed in it.
    pub ended: Option<(String, u32)>,
}

/// A node that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Asked {
    /// When.
    pub at: Timestamp,
    /// Whether it is through.
    pub through: bool,
}

/// What follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Next {
    /// To do, in this order.
    pub steps: Vec<Step>,
    /// What the upgrade waits for.
    pub waits: Vec<String>,
    /// What machines wait for.
    pub machines: BTreeMap<MachineId, String>,
}

/// What becomes of an upgrade beside what nodes are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A node is through.
    Through {
        /// Which.
        node: String,
    },
    /// It stands still, and why.
    StandStill {
        /// A sentence.
        why: String,
    },
    /// Role servers are through.
    Released,
    /// All of it is done.
    Finish,
}

/// A machine's node that an upgrade concerns.
struct Concerned<'c> {
    member: &'c Member,
    node: &'c Node,
}

impl Concerned<'_> {
    /// Why it is not well, none where it is.
    fn unwell(&self) -> Option<String> {
        match self.node.health {
            Health::Healthy => {}
            Health::Silent(silence) => {
                return Some(format!("its curator has not heard it for {} s", silence.as_secs()));
            }
            Health::Unknown => return Some("its curator has not heard it since it listens".to_owned()),
        }
        match &self.node.kubernetes {
            Some(kubernetes) => kubernetes.unwell(),
            None => Some("it says nothing of Kubernetes".to_owned()),
        }
    }
}

/// Decides.
#[must_use]
pub fn next(upgrade: &Upgrade, members: &[Member], seen: &Seen, now: Timestamp) -> Next {
    let mut planning = Planning { upgrade, seen, now, next: Next::default() };
    if let Some(why) = &upgrade.paused {
        planning.next.waits.push(format!("its upgrade stands still: {why}"));
    } else if !planning.release() {
        planning.bundle(members);
    }
    planning.next
}

struct Planning<'u> {
    upgrade: &'u Upgrade,
    seen: &'u Seen,
    now: Timestamp,
    next: Next,
}

impl Planning<'_> {
    fn turn(&mut self, turn: Turn) {
        self.next.steps.push(Step::Upgrade(turn));
    }

    fn wait(&mut self, machine: MachineId, why: impl Into<String>) {
        self.next.machines.insert(machine, why.into());
    }

    /// Sees to the role servers; whether they are not through yet.
    fn release(&mut self) -> bool {
        let Some(release) = self.upgrade.release.as_ref().filter(|_| !self.upgrade.back) else {
            return false;
        };
        let id = &release.roll_out;
        match (&release.ended, &release.paused) {
            (Some((how, 0)), _) if how == "finished" => self.turn(Turn::Released),
            (Some((how, failed)), _) if how == "finished" => {
                // A person looks at it, and lets it go on as it is.
                self.turn(Turn::Released);
                let why = format!("{failed} of its machines do not run the release; see: shepherdctl update describe {id}");
                self.turn(Turn::StandStill { why });
            }
            (Some((how, _)), _) => {
                self.turn(Turn::Released);
                self.turn(Turn::StandStill { why: format!("the update {id} of its role servers was {how}") });
            }
            (None, Some(why)) => self.next.waits.push(format!(
                "the update {id} of its role servers stands still: {why}; see: shepherdctl update describe {id}"
            )),
            (None, None) => self.next.waits.push(format!(
                "its role servers become another release first; see: shepherdctl update describe {id}"
            )),
        }
        true
    }

    fn bundle(&mut self, members: &[Member]) {
        let Some((from, to)) = &self.upgrade.bundles else { return self.turn(Turn::Finish) };
        let target = if self.upgrade.back { from } else { to };
        let Known::Has(has) = &self.seen.kubernetes else {
            return self.next.waits.push("its curators do not say what they have of Kubernetes".to_owned());
        };
        let mut order = [Part::ControlPlane, Part::Worker];
        if self.upgrade.back {
            order.reverse();
        }
        let groups = order.map(|part| (part, concerned(self.seen, members, part)));
        let controllers = concerned(self.seen, members, Part::ControlPlane);
        let mut before = None;
        for (part, group) in groups {
            if let Some(first) = before {
                for one in &group {
                    if !self.is_through(one, has, target) {
                        self.wait(
                            one.member.machine,
                            format!("the {first}s of the cluster are upgraded first"),
                        );
                    }
                }
                continue;
            }
            if self.group(part, &group, &controllers, has, target) {
                before = Some(if part == Part::Worker { "worker" } else { "controller" });
            }
        }
        if before.is_none() && self.next.steps.is_empty() {
            self.turn(Turn::Finish);
        }
    }

    fn is_through(&self, one: &Concerned<'_>, has: &Has, target: &Bundle) -> bool {
        match self.upgrade.asked.get(&one.node.id) {
            Some(asked) => asked.through,
            None => has.bundle_of(&one.node.id) == target.digest && runs(one.node, target),
        }
    }

    /// Plans for the nodes of one part; whether some of them are not through.
    fn group(
        &mut self,
        part: Part,
        group: &[Concerned<'_>],
        controllers: &[Concerned<'_>],
        has: &Has,
        target: &Bundle,
    ) -> bool {
        let (mut in_flight, mut waiting, mut open) = (0, Vec::new(), false);
        for one in group {
            let asked = self.upgrade.asked.get(&one.node.id);
            if self.is_through(one, has, target) {
                // What it runs may have become unwell since: it takes the place of one that is under way.
                if let Some(why) = asked.and_then(|_| one.unwell()) {
                    in_flight += 1;
                    self.wait(
                        one.member.machine,
                        format!("it runs the bundle, and is not well any more: {why}"),
                    );
                }
                continue;
            }
            open = true;
            let Some(asked) = asked else {
                waiting.push(one);
                continue;
            };
            in_flight += 1;
            if has.bundle_of(&one.node.id) != target.digest {
                // Whoever wrote down that it is asked has not come to it.
                self.assign(one, target);
                continue;
            }
            let why = if runs(one.node, target) { one.unwell() } else { Some(not_yet(one)) };
            match why {
                None => self.turn(Turn::Through { node: one.node.id.clone() }),
                Some(why) if after(asked.at, self.upgrade.deadline) < self.now => {
                    let why = format!(
                        "{}: it was not well with the bundle within {} s: {why}",
                        one.member.name,
                        self.upgrade.deadline.as_secs()
                    );
                    // Nobody else is asked, and what is under way is left to end.
                    self.next.steps.clear();
                    self.turn(Turn::StandStill { why });
                    return true;
                }
                Some(why) => self.wait(one.member.machine, format!("it is asked to run the bundle: {why}")),
            }
        }
        let at_once = match part {
            Part::ControlPlane => 1,
            Part::Worker => self.upgrade.parallelism.max(1),
        };
        // Those that are not well lose nothing.
        waiting.sort_by_key(|one| one.unwell().is_none());
        for one in waiting {
            if in_flight >= at_once {
                self.wait(one.member.machine, format!("{in_flight} before it are not through yet"));
            } else if let Some(why) = self.objection(one, controllers) {
                self.wait(one.member.machine, why);
            } else {
                in_flight += 1;
                self.assign(one, target);
            }
        }
        open
    }

    fn assign(&mut self, one: &Concerned<'_>, target: &Bundle) {
        self.next.steps.push(Step::AssignBundle {
            node: one.node.id.clone(),
            machine: one.member.machine,
            bundle: target.digest.clone(),
        });
    }

    /// Why a node is not asked now.
    fn objection(&self, one: &Concerned<'_>, controllers: &[Concerned<'_>]) -> Option<String> {
        if let Some(elsewhere) = &self.upgrade.elsewhere {
            return Some(format!(
                "the update {elsewhere} has asked a machine of its cluster, and one thing is done at a time"
            ));
        }
        if let Some(etcd) = etcd_unwell(self.seen) {
            return Some(etcd);
        }
        if one.node.health != Health::Healthy {
            return one.unwell();
        }
        if one.unwell().is_some() {
            return None;
        }
        let mut others = controllers.iter().filter(|other| other.node.id != one.node.id);
        others.find_map(|other| Some((&other.member.name, other.unwell()?))).map(|(name, why)| {
            format!("the controller {name} of its cluster is not well, and has to be first: {why}")
        })
    }
}

/// Nodes of a part that run Kubernetes and stay, in order of their machines' names.
fn concerned<'c>(seen: &'c Seen, members: &'c [Member], part: Part) -> Vec<Concerned<'c>> {
    let role = match part {
        Part::ControlPlane => CONTROLLER,
        Part::Worker => WORKER,
    };
    let mut found: Vec<Concerned<'c>> = members
        .iter()
        .filter(|member| member.part == part && member.leaving.is_none())
        .filter_map(|member| Some(Concerned { member, node: seen.node_of(&member.key()?)? }))
        .filter(|one| one.node.state == NodeState::Up && one.node.roles.contains(role))
        .collect();
    found.sort_by(|one, other| (&one.member.name, &one.node.id).cmp(&(&other.member.name, &other.node.id)));
    found
}

fn runs(node: &Node, target: &Bundle) -> bool {
    node.kubernetes.as_ref().is_some_and(|kubernetes| kubernetes.bundle == target.digest)
}

fn not_yet(one: &Concerned<'_>) -> String {
    let waits = one.node.kubernetes.as_ref().map(|kubernetes| kubernetes.waits.as_str()).unwrap_or_default();
    match (one.node.health, waits) {
        (Health::Healthy, "") => "it does not say that it runs it yet".to_owned(),
        (Health::Healthy, waits) => waits.to_owned(),
        _ => one.unwell().unwrap_or_default(),
    }
}

/// What is wrong with etcd: an API server that is away is borne only while every member of it is there.
#[must_use]
pub fn etcd_unwell(seen: &Seen) -> Option<String> {
    let (voters, reached) = seen.votes();
    if seen.etcd.iter().any(|member| member.learner || member.node.is_none()) {
        return Some("a member of etcd is learning, and has to be through first".to_owned());
    }
    let nodes: BTreeSet<&String> = seen.etcd.iter().filter_map(|member| member.node.as_ref()).collect();
    (reached < voters || nodes.is_empty())
        .then(|| format!("{reached} of {voters} members of etcd are reached, and all of them have to be"))
}

#[cfg(test)]
pub(crate) mod tests;
