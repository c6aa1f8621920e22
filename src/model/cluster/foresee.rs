//! What becomes of a cluster, step by step, before any of it is done: [`plan`] asked again and again, with everything done
//! and answered that it asks for.
//!
//! Which steps there are, and in which order, is decided by the function that the loop itself decides by; nothing of that is
//! decided here. Here is only what a step leaves behind where it succeeds (`Course::take`), and what comes about by itself
//! while nothing is to be done (`Course::pass`): whoever was asked has answered, a learner has its vote, what was asked to
//! run is well. So it is the least that happens, as [`crate::model::plan`] is for machines, and [`ASSUMPTIONS`] says so.
//!
//! Nobody is asked for it: of nodes it knows what the curators said last, as far as the BMDB keeps that.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::model::cluster::kubernetes::{CONTROLLER, Component, Has, Known, OnNode, WORKER, told};
use crate::model::cluster::plan::{Places, Step, plan};
use crate::model::cluster::spec::Part;
use crate::model::cluster::state::{
    Asked, CONSENSUS_MEMBER, Candidate, Cluster, EtcdMember, Founded, Health, Member, Node, NodeState,
    Report, Seen, View, Wanted,
};
use crate::model::cluster::upgrade::{self, Turn};
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::time::{Span, Timestamp, after};

/// What is taken for granted.
pub const ASSUMPTIONS: [&str; 5] = [
    "what is asked for succeeds: a machine does what it was asked, a node is well with what it is to run, and a member of \
     etcd learns",
    "nodes that are heard stay so, and those that are not stay silent; so do curators that do not answer",
    "curators have the roles that were declared, and nodes that are of no machine of the cluster are left alone",
    "machines that are free stay so, and no other comes; nobody else changes anything",
    "budgets, holds and pauses of loops let everything pass",
];

/// Steps after which it is said no further.
const MOST: usize = 2_000;

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The cluster is as it is to be.
    Settled,
    /// It waits, for what does not come by itself.
    Waiting,
    /// Nothing of it is left.
    Gone,
    /// There is so much to do that it is said no further.
    Cut,
}

impl End {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Settled, Self::Waiting, Self::Gone, Self::Cut];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Waiting => "waiting",
            Self::Gone => "gone",
            Self::Cut => "cut",
        }
    }
}

/// A step to come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foretold {
    /// UUID of the machine that it is about; none where it is about the cluster.
    pub machine: Option<String>,
    /// Its provider's name for it.
    pub name: Option<String>,
    /// What is done: the rest of a sentence that begins with the machine, or a sentence about the cluster.
    pub what: String,
}

/// What becomes of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreseen {
    /// The moment that it begins at.
    pub at: Timestamp,
    /// The steps, in their order.
    pub steps: Vec<Foretold>,
    /// How it ends.
    pub end: End,
    /// What the cluster as a whole waits for then.
    pub waits: Vec<String>,
    /// What machines wait for then: their names, and what for.
    pub machines: Vec<(String, String)>,
}

/// What is known at the beginning, or supposed.
#[derive(Clone, Debug)]
pub struct Beginning {
    /// The cluster.
    pub cluster: Cluster,
    /// Its nodes as its curators said last, whether they answer now or not.
    pub last: Seen,
    /// Machines that may be chosen.
    pub candidates: Vec<Candidate>,
    /// Where the cluster's machines stand.
    pub places: Places,
}

/// Lets a cluster take its course from `now` on.
#[must_use]
pub fn foresee(beginning: Beginning, now: Timestamp) -> Foreseen {
    let mut course = Course { beginning, now, told: Vec::new() };
    let (mut waits, mut machines) = (Vec::new(), BTreeMap::new());
    let end = loop {
        let Beginning { cluster, candidates, places, .. } = &course.beginning;
        let planned = plan(cluster, candidates, places, course.now);
        if planned.is_settled() {
            break End::Settled;
        }
        if course.told.len() >= MOST {
            break End::Cut;
        }
        let idle = planned.steps.is_empty();
        let gone = planned.steps.contains(&Step::Remove);
        for step in planned.steps {
            course.tell(&step);
            course.take(step);
        }
        if gone {
            break End::Gone;
        }
        if idle && !course.pass() {
            (waits, machines) = (planned.waits, planned.machines);
            break End::Waiting;
        }
        course.now = after(course.now, Span::seconds(1).0);
    };
    let machines = machines.into_iter().map(|(machine, waits)| (course.name(machine), waits)).collect();
    Foreseen { at: now, steps: course.told, end, waits, machines }
}

struct Course {
    beginning: Beginning,
    now: Timestamp,
    told: Vec<Foretold>,
}

impl Course {
    fn cluster(&mut self) -> &mut Cluster {
        &mut self.beginning.cluster
    }

    fn member(&mut self, machine: MachineId) -> Option<&mut Member> {
        self.cluster().members.iter_mut().find(|member| member.machine == machine)
    }

    fn seen(&mut self) -> Option<&mut Seen> {
        match &mut self.beginning.cluster.view {
            View::Seen(seen) => Some(seen),
            View::Nobody | View::Away(_) => None,
        }
    }

    fn node(&mut self, id: &str) -> Option<&mut Node> {
        self.seen()?.nodes.iter_mut().find(|node| node.id == id)
    }

    fn has(&mut self) -> Option<&mut Has> {
        match &mut self.seen()?.kubernetes {
            Known::Has(has) => Some(has),
            _ => None,
        }
    }

    /// Its provider's name for a machine: one of the cluster, one that may be, or one that was.
    fn name(&self, machine: MachineId) -> String {
        let Beginning { cluster, candidates, .. } = &self.beginning;
        let member = cluster.members.iter().find(|member| member.machine == machine);
        let candidate = || candidates.iter().find(|candidate| candidate.machine == machine);
        let name = member.map(|member| member.name.clone());
        name.or_else(|| Some(candidate()?.name.clone())).unwrap_or_else(|| machine.to_string())
    }

    /// On which machine a node is.
    fn machine_of(&self, node: &str) -> Option<MachineId> {
        let View::Seen(seen) = &self.beginning.cluster.view else { return None };
        let node = seen.nodes.iter().find(|one| one.id == node)?;
        let mut members = self.beginning.cluster.members.iter();
        members.find(|member| member.key() == Some(node.key)).map(|member| member.machine).or(node.machine)
    }

    /// Says a step by the words that everybody else says it by, without whom it is about.
    fn tell(&mut self, step: &Step) {
        let (machine, subject) = match step {
            Step::Choose { machine, .. }
            | Step::Ask { machine, .. }
            | Step::Founded { machine }
            | Step::Approve { machine, .. }
            | Step::Leaving { machine, .. }
            | Step::Forget { machine, .. } => (Some(*machine), format!("machine {machine} ")),
            Step::Roles { node, .. }
            | Step::Decommission { node }
            | Step::Delete { node }
            | Step::AssignBundle { node, .. }
            | Step::ClearBundle { node }
            | Step::Upgrade(Turn::Through { node }) => (self.machine_of(node), format!("{node} ")),
            _ => (None, String::new()),
        };
        let what = match step {
            // Its key is not known before it has one.
            Step::Approve { .. } => "is let in by its key".to_owned(),
            step => step.to_string(),
        };
        let what = match machine {
            Some(_) => what.strip_prefix(&subject).map(str::to_owned).unwrap_or(what),
            None => what,
        };
        let name = machine.map(|machine| self.name(machine));
        self.told.push(Foretold { machine: machine.map(|machine| machine.to_string()), name, what });
    }

    /// Does a step: leaves behind what it leaves where it succeeds.
    fn take(&mut self, step: Step) {
        match step {
            Step::Choose { machine, part } => self.choose(machine, part),
            Step::Ask { machine, what } => {
                let at = self.now;
                if let Some(member) = self.member(machine) {
                    let generation = member.asked.map_or(0, |asked| asked.generation) + 1;
                    member.asked = Some(Asked { what, generation, at });
                }
            }
            Step::Founded { machine } => self.founded(machine),
            Step::Approve { key, .. } => {
                let mut nodes = self.seen().into_iter().flat_map(|seen| &mut seen.nodes);
                if let Some(node) = nodes.find(|node| node.key == key) {
                    node.state = NodeState::Standby;
                }
            }
            Step::Roles { node, give, take } => self.roles(&node, &give, &take),
            Step::Decommission { node } => {
                if let Some(node) = self.node(&node) {
                    node.state = NodeState::Decommissioned;
                    node.roles.clear();
                }
            }
            Step::Delete { node } => {
                if let Some(seen) = self.seen() {
                    seen.nodes.retain(|one| one.id != node);
                }
            }
            Step::Leaving { machine, why } => {
                if let Some(member) = self.member(machine) {
                    member.leaving = Some(why);
                }
            }
            Step::Forget { machine, .. } => self.forget(machine),
            Step::Declare { role } => {
                let digest =
                    self.cluster().declared.iter().find(|one| one.role == role).map(|one| one.digest);
                if let (Some(digest), Some(seen)) = (digest, self.seen()) {
                    seen.declared.insert(role, digest);
                }
            }
            Step::Undeclare { role } => {
                if let Some(seen) = self.seen() {
                    seen.declared.remove(&role);
                }
            }
            Step::ForgetDeclaration { role } => self.cluster().declared.retain(|one| one.role != role),
            Step::PutKubernetes => {
                let settings =
                    self.cluster().kubernetes.as_ref().map(|wanted| told(wanted.kubernetes.settings()));
                let before = self.has().cloned().unwrap_or_default();
                if let (Some(settings), Some(seen)) = (settings, self.seen()) {
                    seen.kubernetes = Known::Has(Has { settings, ..before });
                }
            }
            Step::DeleteKubernetes => {
                if let Some(seen) = self.seen() {
                    seen.kubernetes = Known::Nothing;
                }
            }
            Step::ForgetKubernetes => self.cluster().kubernetes = None,
            Step::Rotate { keys } => {
                if let Some(wanted) = &mut self.cluster().kubernetes {
                    wanted.rotate.retain(|one| *one != keys);
                }
            }
            Step::AssignBundle { node, bundle, .. } => {
                let at = self.now;
                if let Some(upgrade) = &mut self.cluster().upgrade {
                    upgrade.asked.insert(node.clone(), upgrade::Asked { at, through: false });
                }
                if let Some(has) = self.has() {
                    has.assigned.insert(node, bundle);
                }
            }
            Step::ClearBundle { node } => {
                if let Some(has) = self.has() {
                    has.assigned.remove(&node);
                }
            }
            Step::Upgrade(turn) => self.turn(turn),
            Step::Remove => {}
        }
    }

    fn choose(&mut self, machine: MachineId, part: Part) {
        let (name, chosen_at) = (self.name(machine), self.now);
        let Beginning { cluster, candidates, places, .. } = &mut self.beginning;
        if let Some(found) = candidates.iter().position(|candidate| candidate.machine == machine) {
            places.insert(machine, candidates.remove(found).location);
        }
        cluster.members.push(Member {
            machine,
            name,
            part,
            chosen_at,
            approved: None,
            leaving: None,
            asked: None,
            report: None,
            phase: Phase::Ready,
            retiring: false,
        });
    }

    fn forget(&mut self, machine: MachineId) {
        let Beginning { cluster, candidates, places, .. } = &mut self.beginning;
        let Some(found) = cluster.members.iter().position(|member| member.machine == machine) else { return };
        let member = cluster.members.remove(found);
        // A cluster that is restored may need it again; else nothing is lacking where machines go.
        if !member.retiring && matches!(member.phase, Phase::Ready | Phase::Installed) {
            let location = places.get(&machine).cloned().flatten();
            candidates.push(Candidate { machine, name: member.name, location });
        }
    }

    /// There is a cluster, of one node; or it is back, with the nodes that it had.
    fn founded(&mut self, machine: MachineId) {
        let now = self.now;
        let Some(key) = self.member(machine).and_then(|member| member.key()) else { return };
        let mut seen = std::mem::take(&mut self.beginning.last);
        for node in &mut seen.nodes {
            // The old control plane is of another epoch, and hears no more of this one.
            if node.roles.remove(CONSENSUS_MEMBER) {
                node.health = Health::Silent(std::time::Duration::ZERO);
            }
        }
        seen.nodes.retain(|node| node.key != key);
        let mut founder = node_of(machine, key);
        founder.state = NodeState::Up;
        founder.roles.insert(CONSENSUS_MEMBER.to_owned());
        seen.etcd = vec![EtcdMember { node: Some(founder.id.clone()), learner: false, reachable: true }];
        seen.nodes.push(founder);
        if self.beginning.cluster.kubernetes.is_some() && matches!(seen.kubernetes, Known::NotAsked) {
            seen.kubernetes = Known::Nothing;
        }
        let cluster = self.cluster();
        cluster.founded = Some(Founded { ca_certificate: vec![1], curators: Vec::new(), at: now });
        if cluster.restoring.take().is_some() {
            cluster.restored_at = Some(now);
            let epoch = cluster.epoch;
            if let Some(report) = self.member(machine).and_then(|member| member.report.as_mut()) {
                report.epoch = epoch;
            }
        }
        self.cluster().view = View::Seen(seen);
    }

    fn roles(&mut self, id: &str, give: &[String], take: &[String]) {
        let Some(node) = self.node(id) else { return };
        node.roles.extend(give.iter().cloned());
        node.roles.retain(|role| !take.contains(role));
        let member = node.is_member();
        if let Some(seen) = self.seen() {
            let is = |one: &EtcdMember| one.node.as_deref() == Some(id);
            if !member {
                seen.etcd.retain(|one| !is(one));
            } else if !seen.etcd.iter().any(is) {
                seen.etcd.push(EtcdMember { node: Some(id.to_owned()), learner: true, reachable: true });
            }
        }
    }

    fn turn(&mut self, turn: Turn) {
        let cluster = self.cluster();
        let Some(upgrade) = &mut cluster.upgrade else { return };
        match turn {
            Turn::Through { node } => {
                if let Some(asked) = upgrade.asked.get_mut(&node) {
                    asked.through = true;
                }
            }
            Turn::StandStill { why } => upgrade.paused = Some(why),
            Turn::Released => upgrade.release = None,
            Turn::Finish => {
                let target = upgrade.bundles.clone().map(|(from, to)| if upgrade.back { from } else { to });
                cluster.upgrade = None;
                if let (Some(target), Some(wanted)) = (target, &mut cluster.kubernetes) {
                    wanted.kubernetes.bundle.clone_from(&target.digest);
                    wanted.kubernetes.version = target.version;
                    if let Some(has) = self.has() {
                        has.settings.bundle = target.digest;
                    }
                }
            }
        }
    }

    /// Lets come about what comes by itself. Whether anything did.
    fn pass(&mut self) -> bool {
        let mut passed = self.machines_answer();
        let now_epoch = self.beginning.cluster.epoch;
        let standby: Vec<[u8; 32]> = match self.seen() {
            None => Vec::new(),
            Some(seen) => {
                let mut let_in = Vec::new();
                for node in seen.nodes.iter_mut().filter(|node| node.state == NodeState::Standby) {
                    node.state = NodeState::Up;
                    let_in.push(node.key);
                }
                let heard: BTreeSet<&String> = (seen.nodes.iter())
                    .filter(|node| node.health == Health::Healthy)
                    .map(|node| &node.id)
                    .collect();
                let is_heard =
                    |member: &EtcdMember| member.node.as_ref().is_some_and(|node| heard.contains(node));
                for member in seen.etcd.iter_mut().filter(|member| is_heard(member)) {
                    passed |= member.learner || !member.reachable;
                    (member.learner, member.reachable) = (false, true);
                }
                let_in
            }
        };
        passed |= !standby.is_empty();
        for member in &mut self.cluster().members {
            if let Some(report) =
                member.report.as_mut().filter(|report| report.key.is_some_and(|key| standby.contains(&key)))
            {
                report.ca_certificate = Some(vec![1]);
                report.epoch = now_epoch;
            }
        }
        passed |= self.nodes_run_kubernetes();
        if let Some(upgrade) = &mut self.cluster().upgrade
            && upgrade.paused.is_none()
        {
            if let Some(release) = &mut upgrade.release
                && (release.paused.is_none() && release.ended.is_none())
            {
                release.ended = Some(("finished".to_owned(), 0));
                passed = true;
            }
            passed |= upgrade.elsewhere.take().is_some();
        }
        passed
    }

    /// Machines take what they were asked, and say so. Whether any did.
    fn machines_answer(&mut self) -> bool {
        let (mut answered, mut registered) = (false, Vec::new());
        let epoch = self.beginning.cluster.epoch;
        for member in &mut self.cluster().members {
            let heard = matches!(member.phase, Phase::Ready | Phase::Installed);
            let Some(asked) = member.asked.filter(|_| heard) else { continue };
            let before = member.report.clone().unwrap_or_default();
            if before.generation == asked.generation && before.error.is_none() {
                continue;
            }
            answered = true;
            let key = before.key.unwrap_or_else(|| key_of(member.machine, asked.generation));
            let founds = (asked.what == Wanted::Found).then(|| vec![1]);
            member.report = Some(Report {
                generation: asked.generation,
                key: (asked.what != Wanted::Leave).then_some(key),
                ca_certificate: (asked.what != Wanted::Leave)
                    .then_some(before.ca_certificate)
                    .flatten()
                    .or(founds),
                address: Some(before.address.unwrap_or_else(|| member.name.clone())),
                error: None,
                epoch: if asked.what == Wanted::Leave { before.epoch } else { epoch },
            });
            if asked.what == Wanted::Join {
                registered.push((member.machine, key));
            }
        }
        if let Some(seen) = self.seen() {
            for (machine, key) in registered {
                if seen.node_of(&key).is_none() {
                    seen.nodes.push(node_of(machine, key));
                }
            }
        }
        answered
    }

    /// Nodes run of Kubernetes what their roles and bundles say. Whether any came to it now.
    fn nodes_run_kubernetes(&mut self) -> bool {
        let Some(wanted) = self.beginning.cluster.kubernetes.clone() else { return false };
        let bundles = self.beginning.cluster.upgrade.as_ref().and_then(|upgrade| upgrade.bundles.clone());
        let version = |digest: &str| match &bundles {
            Some((from, _)) if from.digest == digest => from.version.clone(),
            Some((_, to)) if to.digest == digest => to.version.clone(),
            _ => wanted.kubernetes.version.clone(),
        };
        let Some(seen) = self.seen() else { return false };
        let Known::Has(has) = &mut seen.kubernetes else { return false };
        let mut came = !has.rotations.is_empty();
        has.rotations.clear();
        for node in seen.nodes.iter_mut().filter(|node| node.health == Health::Healthy) {
            let role = [CONTROLLER, WORKER].into_iter().find(|role| node.roles.contains(*role));
            let bundle = has.bundle_of(&node.id);
            let runs = role.map(|role| OnNode {
                bundle: bundle.to_owned(),
                version: version(bundle),
                components: vec![well(role)],
                ..OnNode::default()
            });
            let already = match (&node.kubernetes, &runs) {
                (Some(is), Some(runs)) => is.bundle == runs.bundle && is.unwell().is_none(),
                (None, None) => true,
                (Some(is), None) => is.bundle.is_empty(),
                (None, Some(_)) => false,
            };
            if !already {
                node.kubernetes = runs;
                came = true;
            }
        }
        came
    }
}

fn well(role: &str) -> Component {
    Component {
        name: role.to_owned(),
        state: "healthy".to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    }
}

/// A key that nobody has: of a machine, and of its so-manieth life as a node.
fn key_of(machine: MachineId, generation: i64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(machine.0.as_bytes());
    key[16..24].copy_from_slice(&generation.to_be_bytes());
    key
}

fn node_of(machine: MachineId, key: [u8; 32]) -> Node {
    Node {
        id: format!("node-{}", hex::encode(key)),
        key,
        machine: Some(machine),
        state: NodeState::New,
        roles: BTreeSet::new(),
        health: Health::Healthy,
        services: Vec::new(),
        kubernetes: None,
    }
}

#[cfg(test)]
mod tests;
