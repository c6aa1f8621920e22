//! What is to be done next about a cluster: a function of what is known of it.
//!
//! A pass does what is planned and looks again; whatever was cut off in the middle is planned once more from what is
//! known then. So no step here relies on another one of the same pass, and each can be made twice.
//!
//! # Harm
//!
//! * Members of etcd come and go one at a time, never while one is still learning, and never so that fewer are left than
//!   most of them. The curator refuses the same; here it is not even asked.
//! * A member that is well and leaves keeps its vote until another one has taken its place. One that is lost gives its
//!   vote up first, because a vote that nobody casts only makes losses harder to bear.
//! * A node that its curator hears is never replaced for what we do not hear of its machine: we may be the ones who are
//!   cut off.
//! * The order to found a cluster is given to one machine, and to another only after the first was told to leave.
//! * A cluster is brought back onto a machine that keeps nothing of it, once those of its old control plane that are heard
//!   have left it, or had [`FENCE_PATIENCE`] to. That it can never be one with those that are not heard is not seen to
//!   here: their etcd and their curators are of another epoch (`curator/restore.rs`).
//!
//! # What an order is worth
//!
//! A machine is let in by the key that it reported over its agent channel, which is pinned to the machine; a ticket alone
//! lets it ask.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::model::cluster::choice::{going_first, spread};
use crate::model::cluster::declared::{self, Digest};
use crate::model::cluster::kubernetes::{self, CONTROLLER, Keys, WORKER};
use crate::model::cluster::quorum::majority;
use crate::model::cluster::spec::{Approval, Part};
use crate::model::cluster::state::{
    Asked, CONSENSUS_MEMBER, Candidate, Cluster, Health, Member, Node, NodeState, Report, Restoring, Seen,
    View, Wanted,
};
use crate::model::cluster::upgrade::{self, Turn};
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::time::{Timestamp, between};

/// How long a ticket lets a machine in.
pub const TICKET_LIFETIME: Duration = Duration::from_hours(1);
/// How long machines of the old control plane that are heard have to leave it, before the cluster is brought back without
/// waiting for them any longer.
pub const FENCE_PATIENCE: Duration = Duration::from_mins(2);
/// How long what stands in a machine's way may pass by itself, before it is asked anew.
const ASK_ANEW: Duration = Duration::from_mins(2);

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make a machine part of the cluster.
    Choose {
        /// Which.
        machine: MachineId,
        /// What for.
        part: Part,
    },
    /// Ask a machine for something over its agent channel.
    Ask {
        /// Which.
        machine: MachineId,
        /// What.
        what: Wanted,
    },
    /// Write down by what the cluster is known, as this machine reported it.
    Founded {
        /// Which.
        machine: MachineId,
    },
    /// Let a node in by its key.
    Approve {
        /// On which machine.
        machine: MachineId,
        /// The key.
        key: [u8; 32],
    },
    /// Change roles of a node.
    Roles {
        /// Which.
        node: String,
        /// To give.
        give: Vec<String>,
        /// To take.
        take: Vec<String>,
    },
    /// Take a node out of the cluster for ever.
    Decommission {
        /// Which.
        node: String,
    },
    /// Forget a node.
    Delete {
        /// Which.
        node: String,
    },
    /// Have a machine leave, from now on.
    Leaving {
        /// Which.
        machine: MachineId,
        /// Why.
        why: String,
    },
    /// Let a machine be none of the cluster's.
    Forget {
        /// Which.
        machine: MachineId,
        /// How it ended.
        how: String,
    },
    /// Declare a role to the curators, or replace its declaration.
    Declare {
        /// Which.
        role: String,
    },
    /// Have the curators forget a role that no node has.
    Undeclare {
        /// Which.
        role: String,
    },
    /// Forget a withdrawn role that no curator has.
    ForgetDeclaration {
        /// Which.
        role: String,
    },
    /// Tell the curators what Kubernetes is to be.
    PutKubernetes,
    /// Have the curators forget it, which no node runs any more.
    DeleteKubernetes,
    /// Forget Kubernetes that no curator has.
    ForgetKubernetes,
    /// Have certificates or keys of Kubernetes replaced.
    Rotate {
        /// Which.
        keys: Keys,
    },
    /// Have a node run a bundle, as the next one of an upgrade.
    AssignBundle {
        /// Which node.
        node: String,
        /// On which machine.
        machine: MachineId,
        /// SHA-256, in hexadecimal digits.
        bundle: String,
    },
    /// Have a node run what the cluster runs.
    ClearBundle {
        /// Which.
        node: String,
    },
    /// Write down what became of an upgrade.
    Upgrade(Turn),
    /// Forget the cluster.
    Remove,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Choose { machine, part } => write!(f, "machine {machine} is chosen as {part}"),
            Self::Ask { machine, what } => write!(f, "machine {machine} is asked to {what}"),
            Self::Founded { machine } => write!(f, "machine {machine} has founded it"),
            Self::Approve { machine, key } => {
                write!(f, "machine {machine} is let in by the key {}", hex::encode(key))
            }
            Self::Roles { node, give, take } => {
                let (give, take) = (give.join(", "), take.join(", "));
                match (give.as_str(), take.as_str()) {
                    (give, "") => write!(f, "{node} is given {give}"),
                    ("", take) => write!(f, "{node} gives up {take}"),
                    (give, take) => write!(f, "{node} is given {give}, and gives up {take}"),
                }
            }
            Self::Decommission { node } => write!(f, "{node} is decommissioned"),
            Self::Delete { node } => write!(f, "{node} is deleted"),
            Self::Leaving { machine, why } => write!(f, "machine {machine} is to leave: {why}"),
            Self::Forget { machine, how } => write!(f, "machine {machine} is out of it: {how}"),
            Self::Declare { role } => write!(f, "role {role} is declared"),
            Self::Undeclare { role } => write!(f, "role {role} is declared no more"),
            Self::ForgetDeclaration { role } => write!(f, "the declaration of role {role} is forgotten"),
            Self::PutKubernetes => f.write_str("its curators are told what Kubernetes is to be"),
            Self::DeleteKubernetes => f.write_str("its curators forget Kubernetes"),
            Self::ForgetKubernetes => f.write_str("Kubernetes is forgotten"),
            Self::Rotate { keys } => write!(f, "{} of Kubernetes are replaced", keys.as_str()),
            Self::AssignBundle { node, bundle, .. } => {
                write!(f, "{node} is asked to run the bundle {}", bundle.get(..16).unwrap_or(bundle))
            }
            Self::ClearBundle { node } => write!(f, "{node} runs the bundle of its cluster"),
            Self::Upgrade(Turn::Through { node }) => write!(f, "{node} is through with its upgrade"),
            Self::Upgrade(Turn::StandStill { why }) => write!(f, "its upgrade stands still: {why}"),
            Self::Upgrade(Turn::Released) => f.write_str("its role servers are through"),
            Self::Upgrade(Turn::Finish) => f.write_str("its upgrade is done"),
            Self::Remove => f.write_str("nothing of it is left"),
        }
    }
}

/// What is to be done about a cluster, and what is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Plan {
    /// To do, in this order.
    pub steps: Vec<Step>,
    /// What the cluster as a whole waits for.
    pub waits: Vec<String>,
    /// What each machine waits for.
    pub machines: BTreeMap<MachineId, String>,
}

impl Plan {
    /// Whether the cluster is as it is to be.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.steps.is_empty() && self.waits.is_empty() && self.machines.is_empty()
    }
}

/// Decides what is to be done. `candidates` are machines that may be chosen; none need be given while none are lacking.
#[must_use]
pub fn plan(cluster: &Cluster, candidates: &[Candidate], places: &Places, now: Timestamp) -> Plan {
    let mut planning = Planning { cluster, now, plan: Plan::default() };
    if cluster.deleting {
        planning.end();
        return planning.plan;
    }
    if let Some(restoring) = &cluster.restoring {
        // Until there is one that restores it, a worker that is lacking must not take what may be the only free machine.
        let parts =
            if planning.restorer(restoring).is_none() { &[Part::ControlPlane] } else { &Part::ALL[..] };
        planning.choose(parts, &planning.may_restore(restoring, candidates), places);
        planning.restore(restoring, candidates);
        return planning.plan;
    }
    planning.choose(&Part::ALL, candidates, places);
    match (&cluster.founded, &cluster.view) {
        (None, _) => planning.found(),
        (Some(_), View::Seen(seen)) => planning.run(seen),
        (Some(_), View::Away(why)) => {
            let waits = format!("none of its curators answers: {why}");
            planning.plan.waits.push(waits);
        }
        (Some(_), View::Nobody) => {
            planning.plan.waits.push("its curators were not asked yet".to_owned());
        }
    }
    planning.plan
}

/// Where the machines of a cluster stand.
pub type Places = BTreeMap<MachineId, Option<String>>;

struct Planning<'c> {
    cluster: &'c Cluster,
    now: Timestamp,
    plan: Plan,
}

impl Planning<'_> {
    fn step(&mut self, step: Step) {
        self.plan.steps.push(step);
    }

    fn wait(&mut self, member: &Member, reason: impl Into<String>) {
        self.plan.machines.insert(member.machine, reason.into());
    }

    fn ask(&mut self, member: &Member, what: Wanted) {
        self.step(Step::Ask { machine: member.machine, what });
    }

    /// The cluster ends: every machine is asked to leave, and each is forgotten when it has, or was given up.
    fn end(&mut self) {
        if self.cluster.members.is_empty() {
            return self.step(Step::Remove);
        }
        for member in &self.cluster.members {
            self.see_off(member, "its cluster ended");
        }
    }

    /// The last of a machine in the cluster: nothing else has to be done for it.
    fn see_off(&mut self, member: &Member, how: &str) {
        if member.asked.is_none() && member.key().is_none() {
            let how = format!("{how}, and it had not been asked anything");
            self.step(Step::Forget { machine: member.machine, how });
        } else if member.asked.is_none_or(|asked| asked.what != Wanted::Leave) {
            self.ask(member, Wanted::Leave);
        } else if member.has_left() {
            self.step(Step::Forget { machine: member.machine, how: format!("{how}, and it has left") });
        } else if member.is_given_up() {
            let how =
                format!("{how}; its machine is {}, and is told to leave if it is heard again", member.phase);
            self.step(Step::Forget { machine: member.machine, how });
        } else {
            self.wait(member, "it was asked to leave, and has not said that it has");
        }
    }

    fn choose(&mut self, parts: &[Part], candidates: &[Candidate], places: &Places) {
        let mut left: Vec<Candidate> = candidates.to_vec();
        for &part in parts {
            let lacking = self.cluster.lacks(part);
            if lacking == 0 {
                continue;
            }
            let mut beside: BTreeMap<Option<String>, u32> = BTreeMap::new();
            let staying = self.cluster.members.iter().filter(|member| member.leaving.is_none());
            for member in staying.filter(|member| member.part == part) {
                *beside.entry(places.get(&member.machine).cloned().flatten()).or_default() += 1;
            }
            let chosen = spread(&left, beside, lacking);
            left.retain(|candidate| !chosen.contains(candidate));
            let found = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
            for candidate in chosen {
                self.step(Step::Choose { machine: candidate.machine, part });
            }
            if found < lacking {
                let fits = match self.cluster.spec.selector.to_string().as_str() {
                    "" => "is free".to_owned(),
                    said => format!("is free and fits {said}"),
                };
                self.plan.waits.push(format!(
                    "{} more of the {part} {} wanted, and no machine {fits}",
                    lacking - found,
                    if lacking - found == 1 { "is" } else { "are" }
                ));
            }
        }
    }

    fn found(&mut self) {
        for member in self.cluster.members.iter().filter(|member| member.leaving.is_some()) {
            self.see_off(member, "it left before the cluster was founded");
        }
        self.send_off(None);
        let mut staying = self.cluster.members.iter().filter(|member| member.leaving.is_none());
        let founder = staying.find(|member| member.part == Part::ControlPlane);
        self.found_by(founder, "founds the cluster first");
    }

    /// Has the founder found the cluster, and the others wait for it.
    fn found_by(&mut self, founder: Option<&Member>, first: &str) {
        let mut staying = self.cluster.members.iter().filter(|member| member.leaving.is_none());
        let elsewhere = self.cluster.members.iter().find(|member| {
            member.asked.is_some_and(|asked| asked.what == Wanted::Found)
                && Some(member.machine) != founder.map(|founder| founder.machine)
        });
        let Some(founder) = founder else { return };
        for member in staying.by_ref().filter(|member| member.machine != founder.machine) {
            self.wait(member, format!("{} {first}", founder.name));
        }
        if let Some(other) = elsewhere {
            return self.wait(
                founder,
                format!("{}, which was to found the cluster, has to leave first", other.name),
            );
        }
        let Some(asked) = founder.asked.filter(|asked| asked.what == Wanted::Found) else {
            return match founder.asked {
                Some(asked) if asked.what == Wanted::Leave && !founder.has_left() => {
                    self.wait(founder, "it has to leave what it was a node of before");
                }
                _ => self.ask(founder, Wanted::Found),
            };
        };
        let report = founder.report.as_ref().filter(|report| report.generation == asked.generation);
        match report {
            None => self.wait(founder, "it was asked to found the cluster, and has not taken the order"),
            Some(report) if report.ca_certificate.is_some() && report.address.is_some() => {
                self.step(Step::Founded { machine: founder.machine });
            }
            Some(report) => {
                let waits = match &report.error {
                    Some(error) => format!("it cannot found the cluster: {error}"),
                    None => "it is founding the cluster".to_owned(),
                };
                self.wait(founder, waits);
            }
        }
    }

    /// Machines that may be chosen while the cluster is brought back: until there is one that does it, only the one that a
    /// person said, if a person said one.
    fn may_restore(&self, restoring: &Restoring, candidates: &[Candidate]) -> Vec<Candidate> {
        let onto = restoring.onto.filter(|_| self.restorer(restoring).is_none());
        let may = |candidate: &&Candidate| onto.is_none_or(|onto| candidate.machine == onto);
        candidates.iter().filter(may).cloned().collect()
    }

    /// The machine that brings it back: the first of the new control plane.
    fn restorer(&self, restoring: &Restoring) -> Option<&Member> {
        self.cluster.members.iter().find(|member| {
            member.part == Part::ControlPlane
                && member.leaving.is_none()
                && member.chosen_at > restoring.since
        })
    }

    /// Brings the cluster back: its old control plane leaves first, as far as it is heard.
    fn restore(&mut self, restoring: &Restoring, candidates: &[Candidate]) {
        let restorer = self.restorer(restoring).cloned();
        // Of these one may be needed again, when it has left.
        let needed = |member: &Member| match restoring.onto {
            _ if restorer.is_some() => false,
            Some(onto) => member.machine == onto,
            None => candidates.is_empty(),
        };
        let mut to_leave = 0;
        for member in &self.cluster.members {
            if member.part == Part::Worker {
                // Its node goes first, and nobody can be asked for that now.
                if member.leaving.is_some() {
                    self.wait(member, "it leaves once the cluster is back");
                }
                continue;
            }
            let old = member.chosen_at <= restoring.since;
            let heard = matches!(member.phase, Phase::Ready | Phase::Installed);
            match &member.leaving {
                None if old => {
                    to_leave += usize::from(heard);
                    let why = "its cluster is restored from a snapshot".to_owned();
                    self.step(Step::Leaving { machine: member.machine, why });
                }
                // Whoever was to restore it and is lost in between has an epoch of its own, which counts no more.
                None if member.is_given_up() || member.retiring => {
                    let why = "it was lost while the cluster was restored".to_owned();
                    self.step(Step::Leaving { machine: member.machine, why });
                }
                Some(_) if member.has_left() && needed(member) => {
                    let how = "it has left, and may be chosen anew to restore the cluster".to_owned();
                    self.step(Step::Forget { machine: member.machine, how });
                }
                Some(_) if member.has_left() => {
                    self.wait(member, "it has left; its node is deleted once the cluster is back");
                }
                Some(_) if member.asked.is_none_or(|asked| asked.what != Wanted::Leave) => {
                    to_leave += usize::from(old && heard);
                    self.ask(member, Wanted::Leave);
                }
                Some(_) => {
                    to_leave += usize::from(old && heard);
                    self.wait(member, "it was asked to leave, and has not said that it has");
                }
                None => {}
            }
        }
        if to_leave > 0 && between(restoring.since, self.now) < FENCE_PATIENCE {
            let waits = format!("{to_leave} of its old control plane are heard and have to leave first");
            return self.plan.waits.push(waits);
        }
        if restorer.is_none() && self.plan.steps.is_empty() {
            let waits = match restoring.onto {
                Some(_) => "the machine that it is to be restored onto is not free yet",
                None => "no machine is free that it could be restored onto",
            };
            self.plan.waits.push(waits.to_owned());
        }
        self.found_by(restorer.as_ref(), "restores the cluster first");
    }

    /// Those that are to leave from now on.
    fn send_off(&mut self, seen: Option<&Seen>) {
        for member in self.cluster.members.iter().filter(|member| member.leaving.is_none()) {
            let node = member.key().and_then(|key| seen?.node_of(&key));
            let heard = node.is_some_and(|node| node.health == Health::Healthy);
            let why = if member.retiring {
                "it is being retired"
            } else if member.is_given_up() && !heard {
                "its machine is lost"
            } else {
                continue;
            };
            self.step(Step::Leaving { machine: member.machine, why: why.to_owned() });
        }
    }

    fn run(&mut self, seen: &Seen) {
        // Before nodes are given what they are to act on.
        let (steps, waits) = declared::next(&self.cluster.declared, seen);
        self.plan.steps.extend(steps);
        self.plan.waits.extend(waits);
        let (steps, waits) =
            kubernetes::next(self.cluster.kubernetes.as_ref(), self.cluster.upgrade.as_ref(), seen);
        self.plan.steps.extend(steps);
        self.plan.waits.extend(waits);
        self.send_off(Some(seen));
        self.shrink(seen);
        let mut consensus = None;
        for member in &self.cluster.members {
            match &member.leaving {
                Some(why) => self.drain(member, why, seen, &mut consensus),
                None => self.settle(member, seen, &mut consensus),
            }
        }
        self.clean(seen, &mut consensus);
        if let Some(step) = consensus {
            self.step(step);
        }
        // Nodes that come and go first: an upgrade is of those that stay.
        if let Some(upgrade) = &self.cluster.upgrade {
            let next = upgrade::next(upgrade, &self.cluster.members, seen, self.now);
            self.plan.steps.extend(next.steps);
            self.plan.waits.extend(next.waits);
            for (machine, wait) in next.machines {
                self.plan.machines.entry(machine).or_insert(wait);
            }
        }
    }

    /// Sends off those that are too many, one of the control plane at a time.
    fn shrink(&mut self, seen: &Seen) {
        for part in Part::ALL {
            let order = going_first(&self.cluster.members, part, Some(seen));
            let wanted = usize::try_from(self.cluster.spec.wanted(part)).unwrap_or(usize::MAX);
            let surplus = order.len().saturating_sub(wanted);
            let leaving =
                self.cluster.members.iter().any(|member| member.part == part && member.leaving.is_some());
            let at_once = match part {
                Part::ControlPlane => usize::from(!leaving).min(surplus),
                Part::Worker => surplus,
            };
            let why = format!("the cluster is to have {wanted} of the {part}");
            for member in order.into_iter().take(at_once) {
                self.step(Step::Leaving { machine: member.machine, why: why.clone() });
            }
        }
    }

    /// A machine that stays: it is to be a node, with its roles.
    fn settle(&mut self, member: &Member, seen: &Seen, consensus: &mut Option<Step>) {
        let report = member.report.clone().unwrap_or_default();
        let Some(key) = report.key else { return self.invite(member) };
        let node = seen.node_of(&key);
        if self.has_to_follow(member, &report, node) {
            return self.ask(member, Wanted::Join);
        }
        let Some(node) = node else {
            if report.ca_certificate.is_some() {
                if member.asked.is_none_or(|asked| asked.what != Wanted::Leave) {
                    return self.ask(member, Wanted::Leave);
                }
                return self.wait(member, "its node was deleted, and it has to leave before it comes anew");
            }
            return self.invite(member);
        };
        match node.state {
            NodeState::New => match self.cluster.spec.approval {
                Approval::Manual if member.approved == Some(key) => {
                    self.step(Step::Approve { machine: member.machine, key });
                }
                Approval::Automatic => self.step(Step::Approve { machine: member.machine, key }),
                Approval::Manual => self.wait(
                    member,
                    format!(
                        "a person has to approve its key; run: shepherdctl cluster approve {} {}",
                        self.cluster.spec.name, member.name
                    ),
                ),
            },
            NodeState::Standby => self.wait(member, "it was let in, and takes its certificate"),
            NodeState::Decommissioned => {
                if member.asked.is_none_or(|asked| asked.what != Wanted::Leave) {
                    return self.ask(member, Wanted::Leave);
                }
                self.wait(member, "its node was decommissioned, and it has to leave before it comes anew");
            }
            NodeState::Up => self.employ(member, node, seen, consensus),
        }
    }

    /// Whether a machine has to be told where its cluster is since that was restored. One that is a node goes on with its
    /// key: the order to join says the epoch and where curators are, and its ticket is not used. One that registered or
    /// waited to be approved meanwhile is asked anew. Whatever has to leave is told nothing else.
    fn has_to_follow(&self, member: &Member, report: &Report, node: Option<&Node>) -> bool {
        let restored = self.cluster.restored_at;
        let told = |asked: &Asked| {
            asked.what == Wanted::Leave
                || asked.what == Wanted::Join && restored.is_none_or(|restored| asked.at > restored)
        };
        let lives_on =
            node.is_some_and(|node| node.state == NodeState::Up) && report.ca_certificate.is_some();
        let registers = report.ca_certificate.is_none()
            && node.is_none_or(|node| node.state != NodeState::Decommissioned)
            && member.asked.is_some_and(|asked| asked.what == Wanted::Join);
        report.epoch < self.cluster.epoch
            && (lives_on || registers)
            && !member.asked.as_ref().is_some_and(told)
    }

    /// Asks a machine to join that has no node yet.
    fn invite(&mut self, member: &Member) {
        let Some(asked) = member.asked else { return self.ask(member, Wanted::Join) };
        let age = between(asked.at, self.now);
        let report = member.report.clone().unwrap_or_default();
        match asked.what {
            Wanted::Leave if !member.has_left() => self.wait(member, "it has to leave before it comes anew"),
            Wanted::Leave | Wanted::Found => self.ask(member, Wanted::Join),
            Wanted::Join if age > TICKET_LIFETIME => self.ask(member, Wanted::Join),
            Wanted::Join if report.generation != asked.generation => {
                self.wait(member, "it was asked to join, and has not taken the order");
            }
            Wanted::Join => match report.error {
                Some(_) if age > ASK_ANEW => self.ask(member, Wanted::Join),
                Some(error) => self.wait(member, format!("it cannot join: {error}")),
                None => self.wait(member, "it was asked to join, and registers"),
            },
        }
    }

    /// Gives a node its roles, and takes what it is not to have.
    fn employ(&mut self, member: &Member, node: &Node, seen: &Seen, consensus: &mut Option<Step>) {
        if node.health != Health::Healthy {
            return self.wait(member, silence(node, member));
        }
        match member.part {
            Part::ControlPlane if node.is_member() => {
                match seen.etcd.iter().find(|one| one.node.as_ref() == Some(&node.id)) {
                    Some(etcd) if etcd.learner => self.wait(member, "its member of etcd learns"),
                    Some(etcd) if !etcd.reachable => self.wait(member, "its member of etcd is not reached"),
                    Some(_) => {}
                    None => self.wait(member, "its member of etcd has not started"),
                }
                self.employ_controller(member, node, seen);
            }
            Part::ControlPlane => {
                if let Some(why) = no_member_now(seen) {
                    return self.wait(member, why);
                }
                if consensus.is_some() {
                    return self.wait(member, "members of etcd come and go one at a time");
                }
                let give = vec![CONSENSUS_MEMBER.to_owned()];
                *consensus = Some(Step::Roles { node: node.id.clone(), give, take: Vec::new() });
            }
            Part::Worker => {
                let wanted = &self.worker_roles(node, seen);
                let give: Vec<String> = wanted.difference(&node.roles).cloned().collect();
                let take: Vec<String> =
                    node.roles.difference(wanted).filter(|role| *role != CONSENSUS_MEMBER).cloned().collect();
                if !give.is_empty() || !take.is_empty() {
                    self.step(Step::Roles { node: node.id.clone(), give, take });
                }
            }
        }
    }

    /// Whether Kubernetes is to run, and the curators know so.
    fn runs_kubernetes(&self, seen: &Seen) -> bool {
        let wanted = self.cluster.kubernetes.as_ref().filter(|wanted| !wanted.removing);
        wanted.is_some() && matches!(seen.kubernetes, kubernetes::Known::Has(_))
    }

    /// A member of the control plane runs that of Kubernetes too, from when it is a member that is reached until nobody runs
    /// pods any more.
    fn employ_controller(&mut self, member: &Member, node: &Node, seen: &Seen) {
        let runs = node.roles.contains(CONTROLLER);
        let step = |give: &[&str], take: &[&str]| {
            let roles = |roles: &[&str]| roles.iter().map(|&role| role.to_owned()).collect();
            Step::Roles { node: node.id.clone(), give: roles(give), take: roles(take) }
        };
        let removing = self.cluster.kubernetes.as_ref().is_some_and(|wanted| wanted.removing);
        let waits = self.plan.machines.contains_key(&member.machine);
        if self.runs_kubernetes(seen) && !runs && !waits {
            self.step(step(&[CONTROLLER], &[]));
        } else if removing && runs {
            if seen.nodes.iter().any(|node| node.roles.contains(WORKER)) {
                return self.wait(
                    member,
                    "it runs the control plane of Kubernetes until no node runs pods any more",
                );
            }
            self.step(step(&[], &[CONTROLLER]));
        }
    }

    /// What a worker is to do: pods from when somebody answers for them, and for as long as Kubernetes is not to go.
    fn worker_roles(&self, node: &Node, seen: &Seen) -> BTreeSet<String> {
        let mut wanted = self.cluster.spec.roles.clone();
        let stays = self.cluster.kubernetes.as_ref().is_some_and(|kubernetes| !kubernetes.removing);
        let begins =
            self.runs_kubernetes(seen) && seen.nodes.iter().any(|node| node.roles.contains(CONTROLLER));
        if begins || stays && node.roles.contains(WORKER) {
            wanted.insert(WORKER.to_owned());
        }
        wanted
    }

    /// A machine that leaves: its node goes first, and then the machine.
    fn drain(&mut self, member: &Member, why: &str, seen: &Seen, consensus: &mut Option<Step>) {
        let nodes: Vec<&Node> = seen
            .nodes
            .iter()
            .filter(|node| node.machine == Some(member.machine) || Some(node.key) == member.key())
            .collect();
        if nodes.is_empty() {
            return self.see_off(member, why);
        }
        for node in nodes {
            let step = match next_to_nothing(node) {
                Next::GiveUpVote => match self.may_give_up(node, seen) {
                    Ok(step) if consensus.is_none() => {
                        *consensus = Some(step);
                        continue;
                    }
                    Ok(_) => {
                        self.wait(
                            member,
                            format!("it leaves, because {why}; members of etcd go one at a time"),
                        );
                        continue;
                    }
                    Err(not_yet) => {
                        self.wait(member, format!("it leaves, because {why}; {not_yet}"));
                        continue;
                    }
                },
                Next::Step(step) => step,
            };
            self.step(step);
        }
    }

    /// Nodes of our machines that are other nodes by now, and those that had left. What somebody else let in is theirs.
    fn clean(&mut self, seen: &Seen, consensus: &mut Option<Step>) {
        let current: BTreeMap<MachineId, &Member> =
            self.cluster.members.iter().map(|member| (member.machine, member)).collect();
        let keys: BTreeSet<Digest> = self.cluster.members.iter().filter_map(Member::key).collect();
        for node in &seen.nodes {
            let current = node.machine.and_then(|machine| current.get(&machine));
            // What a machine has not reported yet it may be about to.
            let stale = current.is_some_and(|member| {
                member.leaving.is_none()
                    && node.health != Health::Healthy
                    && member.report.as_ref().is_some_and(|report| report.key != Some(node.key))
            });
            // It had left, and a snapshot from before that has brought it back.
            let is_back =
                current.is_none() && self.cluster.left.contains(&node.key) && !keys.contains(&node.key);
            if !stale && !is_back {
                continue;
            }
            match next_to_nothing(node) {
                Next::Step(step) => self.step(step),
                Next::GiveUpVote => match self.may_give_up(node, seen) {
                    Ok(step) if consensus.is_none() => *consensus = Some(step),
                    Ok(_) => {}
                    Err(not_yet) => {
                        let why = if stale {
                            "whose machine is another node by now"
                        } else {
                            "which had left before"
                        };
                        let waits = format!("{}, {why}, is to go; {not_yet}", node.id);
                        self.plan.waits.push(waits);
                    }
                },
            }
        }
    }

    /// Whether a member of etcd may go now; if not, why.
    fn may_give_up(&self, node: &Node, seen: &Seen) -> Result<Step, String> {
        let own = seen.etcd.iter().find(|member| member.node.as_ref() == Some(&node.id));
        let (voters, reached) = seen.votes();
        let reached_itself = own.is_some_and(|own| own.reachable && !own.learner);
        let others = reached - usize::from(reached_itself);
        let after = voters - usize::from(own.is_some_and(|own| !own.learner));
        if after == 0 || others < majority(after) || reached < majority(voters) {
            return Err(format!("its vote is needed: {others} of the {after} other members are reached"));
        }
        let staying: BTreeSet<[u8; 32]> = self
            .cluster
            .members
            .iter()
            .filter(|member| member.leaving.is_none() && member.part == Part::ControlPlane)
            .filter_map(Member::key)
            .filter(|key| *key != node.key)
            .collect();
        let taken_over = seen.etcd.iter().filter(|member| !member.learner && member.reachable);
        let taken_over = taken_over.filter(|member| {
            let of = |id: &String| seen.nodes.iter().find(|node| node.id == *id);
            member.node.as_ref().and_then(of).is_some_and(|node| staying.contains(&node.key))
        });
        let wanted = usize::try_from(self.cluster.spec.control_plane).unwrap_or(usize::MAX);
        // Where it is well, nobody is in a hurry.
        if reached_itself && taken_over.count() < wanted {
            return Err("another member has to take its place first".to_owned());
        }
        // An API server stands on its node's member of etcd.
        let first = if node.roles.contains(CONTROLLER) { CONTROLLER } else { CONSENSUS_MEMBER };
        Ok(Step::Roles { node: node.id.clone(), give: Vec::new(), take: vec![first.to_owned()] })
    }
}

/// What brings a node nearer to being none.
enum Next {
    /// Its member of etcd goes, which has to be asked.
    GiveUpVote,
    Step(Step),
}

fn next_to_nothing(node: &Node) -> Next {
    if node.is_member() {
        return Next::GiveUpVote;
    }
    let id = || node.id.clone();
    Next::Step(match node.state {
        NodeState::Up if !node.roles.is_empty() => {
            Step::Roles { node: id(), give: Vec::new(), take: node.roles.iter().cloned().collect() }
        }
        NodeState::Up => Step::Decommission { node: id() },
        NodeState::New | NodeState::Standby | NodeState::Decommissioned => Step::Delete { node: id() },
    })
}

/// Why no member may come now.
fn no_member_now(seen: &Seen) -> Option<String> {
    if seen.etcd.iter().any(|member| member.learner || member.node.is_none()) {
        return Some("another member of etcd is still learning".to_owned());
    }
    let (voters, reached) = seen.votes();
    // The new one gets its vote when it is reached, and not before.
    let few = reached < majority(voters) || reached + 1 < majority(voters + 1);
    few.then(|| {
        format!("{reached} of {voters} members of etcd are reached, and one more would leave no majority")
    })
}

fn silence(node: &Node, member: &Member) -> String {
    let machine = match member.phase {
        Phase::Ready | Phase::Installed => "its machine reports".to_owned(),
        phase => format!("its machine is {phase}"),
    };
    match node.health {
        Health::Silent(silence) => {
            format!("its curator has not heard it for {} s; {machine}", silence.as_secs())
        }
        _ => format!("its curator has not heard it since it listens; {machine}"),
    }
}

#[cfg(test)]
mod tests;
