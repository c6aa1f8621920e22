//! State of the model: machines with their disks, which of them reach each other, etcd, and all observations.

use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::time::Duration;

use shepherd::curator::tickets::TicketSecret;
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::node::{Node, NodeRoles};
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::etcd::key_space::NODES;
use shepherd::etcd::namespace::Namespace;
use shepherd::model::time::{Timestamp, after};
use shepherd::roleserver::cluster::files::EtcdMembership;

use super::curators::Curator;
use super::fixture::Fixture;
use super::sim::{Process, Sim};
use super::store::{Etcd, Listed, NAMESPACE};
use crate::harness::seeds::Counts;

/// How many machines there are.
pub(crate) const MACHINES: usize = 5;
/// Number of last events that a failure message shows.
const TRACE: usize = 60;

/// The order that a machine starts with: to found a cluster or to join one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StartupOrder {
    Found,
    Join,
}

/// Contents of a disk. Each field is written atomically, and exists from then on.
#[derive(Clone, Default)]
pub(crate) struct Disk {
    pub(crate) order: Option<StartupOrder>,
    pub(crate) key: Option<PublicKey>,
    pub(crate) authority: bool,
    pub(crate) membership: Option<EtcdMembership>,
    pub(crate) roles: Option<NodeRoles>,
    pub(crate) credentials: Option<Validity>,
    pub(crate) proof: bool,
    /// etcd's own data: member numbers by the name of the data directory.
    pub(crate) etcd: BTreeMap<String, u64>,
}

/// Facts that the parts of a node share while it runs.
#[derive(Clone, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is one thing that is known, or not")]
pub(crate) struct Facts {
    pub(crate) to_found: bool,
    pub(crate) roles: Option<NodeRoles>,
    pub(crate) connection: bool,
    pub(crate) control_plane: bool,
    pub(crate) address: bool,
    /// The membership that runs, once it does.
    pub(crate) running: Option<u64>,
    /// Number of changes to these facts; readers compare it to see a change.
    pub(crate) update_count: u64,
    /// Whether the launcher runs what was decided, and has nothing left to do.
    pub(crate) settled: bool,
}

/// The etcd process on a machine.
#[derive(Clone)]
pub(crate) struct Program {
    pub(crate) membership: EtcdMembership,
    /// Its number, once it has begun its membership.
    pub(crate) id: Option<u64>,
    pub(crate) since: Duration,
    /// The members as it last saw them.
    pub(crate) seen: Vec<Listed>,
}

pub(crate) struct Machine {
    pub(crate) address: IpAddr,
    pub(crate) power: bool,
    /// Machines of one part of the network reach each other.
    pub(crate) part: usize,
    pub(crate) disk: Disk,
    pub(crate) role_server: Option<Process>,
    pub(crate) facts: Facts,
    pub(crate) etcd: Option<Program>,
    pub(crate) curator: Option<Rc<Curator>>,
}

pub(crate) struct State {
    pub(crate) machines: Vec<Machine>,
    pub(crate) etcd: Etcd,
    /// Added to the time of day.
    pub(crate) leap: Duration,
    pub(crate) secrets: Vec<TicketSecret>,
    /// The voters that ran within reach when a leader last listed the members, by its machine.
    pub(crate) listed: BTreeMap<usize, BTreeSet<u64>>,
    /// Time of a node's last heartbeat at a leader, by the create revision of the leader's key and the node id.
    pub(crate) last_heartbeats: BTreeMap<(i64, NodeId), Duration>,
    pub(crate) counts: Counts,
    pub(crate) trace: VecDeque<String>,
    pub(crate) violations: Vec<String>,
}

/// Handle on the whole model, shared by all tasks.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) sim: Rc<Sim>,
    pub(crate) fixture: &'static Fixture,
    pub(crate) namespace: Rc<Namespace>,
    /// Number of tasks that decide about members now from what they have just read. A disk that is lost meanwhile is
    /// more than a quorum tolerates.
    pub(crate) changing: Rc<Cell<usize>>,
    state: Rc<RefCell<State>>,
}

/// While this exists, a task decides about members.
pub(crate) struct Changing(Rc<Cell<usize>>);

impl Drop for Changing {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl World {
    pub(crate) fn new(seed: u64, fixture: &'static Fixture) -> anyhow::Result<Self> {
        let machine = |index: usize| Machine {
            address: Ipv4Addr::new(10, 0, 0, u8::try_from(index + 1).unwrap_or(u8::MAX)).into(),
            power: true,
            part: 0,
            disk: Disk {
                order: Some(if index == 0 { StartupOrder::Found } else { StartupOrder::Join }),
                ..Disk::default()
            },
            role_server: None,
            facts: Facts::default(),
            etcd: None,
            curator: None,
        };
        let state = State {
            machines: (0..MACHINES).map(machine).collect(),
            etcd: Etcd::default(),
            leap: Duration::ZERO,
            secrets: Vec::new(),
            listed: BTreeMap::new(),
            last_heartbeats: BTreeMap::new(),
            counts: Counts::new(),
            trace: VecDeque::new(),
            violations: Vec::new(),
        };
        Ok(Self {
            sim: Sim::new(seed),
            fixture,
            namespace: Rc::new(Namespace::new(NAMESPACE)?),
            changing: Rc::default(),
            state: Rc::new(RefCell::new(state)),
        })
    }

    /// The state; never held over an await.
    pub(crate) fn look(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    pub(crate) fn change(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    pub(crate) fn machine<T>(&self, index: usize, change: impl FnOnce(&mut Machine) -> T) -> T {
        change(&mut self.state.borrow_mut().machines[index])
    }

    pub(crate) fn begin_to_change(&self) -> Changing {
        self.changing.set(self.changing.get() + 1);
        Changing(self.changing.clone())
    }

    /// The time of day.
    pub(crate) fn time(&self) -> Timestamp {
        let begin = Timestamp::from_timestamp(1_900_000_000, 0).unwrap_or_default();
        after(begin, self.sim.now() + self.look().leap)
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.change().counts.entry(what).or_default() += 1;
    }

    pub(crate) fn note(&self, what: std::fmt::Arguments<'_>) {
        let at = self.sim.now().as_secs_f64();
        let mut state = self.change();
        if state.trace.len() == TRACE {
            state.trace.pop_front();
        }
        state.trace.push_back(format!("{at:9.3} {what}"));
    }

    /// Checks an invariant on the current state.
    pub(crate) fn judge(&self, judge: impl FnOnce(&State) -> Result<(), String>) {
        let judged = judge(&self.look());
        self.demand(judged);
    }

    /// Records the violation that an invariant found.
    pub(crate) fn demand(&self, judged: Result<(), String>) {
        if let Err(reason) = judged {
            self.note(format_args!("VIOLATION: {reason}"));
            self.change().violations.push(reason);
        }
    }
}

impl Machine {
    pub(crate) fn id(&self) -> Option<NodeId> {
        self.disk.key.as_ref().map(NodeId::from_key)
    }

    /// The member of etcd that runs here.
    pub(crate) fn member(&self) -> Option<u64> {
        self.etcd.as_ref().filter(|_| self.power).and_then(|etcd| etcd.id)
    }
}

impl State {
    pub(crate) fn reaches(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.machines[a], &self.machines[b]);
        a.power && b.power && a.part == b.part
    }

    /// Members that run within reach of a machine.
    pub(crate) fn within_reach(&self, machine: usize) -> BTreeSet<u64> {
        let there = (0..self.machines.len()).filter(|other| self.reaches(machine, *other));
        there.filter_map(|other| self.machines[other].member()).collect()
    }

    /// Whether a machine's member votes and sees a quorum that has a leader.
    pub(crate) fn has_quorum(&self, machine: usize) -> bool {
        let Some(own) = self.machines[machine].member() else { return false };
        let there = self.within_reach(machine);
        let voters: Vec<u64> = self.etcd.voters().map(|member| member.id).collect();
        voters.contains(&own)
            && voters.iter().filter(|id| there.contains(id)).count() > voters.len() / 2
            && self.etcd.leader.is_some_and(|leader| there.contains(&leader))
    }

    pub(crate) fn nodes(&self) -> Vec<Node> {
        let records = self.etcd.under(&NODES.range().start);
        records.iter().filter_map(|record| Node::decode(&record.key, &record.value).ok()).collect()
    }

    /// Whether one more lost disk would lose all stored data, or prevent further changes.
    pub(crate) fn can_lose_disk(&self, machine: usize) -> bool {
        let keeps = |index: usize, id: u64| {
            index != machine && self.machines[index].disk.etcd.values().any(|kept| *kept == id)
        };
        let voters: Vec<u64> = self.etcd.voters().map(|member| member.id).collect();
        let kept = voters.iter().filter(|id| (0..self.machines.len()).any(|index| keeps(index, **id)));
        kept.count() > voters.len() / 2
    }
}
