//! The state of the model: machines, etcd, Kubernetes objects, and all observations.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use shepherd::etcd::client::{Listing, Record};
use shepherd::etcd::guard::LeaderGuard;
use shepherd::etcd::key_space::{NODES, RECONCILER_STATUS};
use shepherd::etcd::namespace::Namespace;
use shepherd::model::kubernetes::version::ReleaseVersion;
use shepherd::proto::etcdserverpb as wire;
use shepherd::reconciler::program::Program;
use shepherd::reconciler::status::ReconcilerStatus;
use wire::request_op::Request;

use super::observer;
use crate::cluster_model::sim::{Process, Sim};
use crate::cluster_model::store::{Done, Etcd, NAMESPACE};
use crate::harness::seeds::Counts;
use crate::reconciler::kit::node_record;

/// Number of machines in the model.
pub(crate) const MACHINES: usize = 4;
/// Number of releases in the model.
pub(crate) const RELEASES: usize = 3;
/// Number of objects in the model.
pub(crate) const OBJECTS: usize = 3;
/// Events that are printed when an invariant fails.
const TRACE: usize = 60;

#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Which of the programs it runs, or will run when it is up.
    pub(crate) release: usize,
    pub(crate) process: Process,
    /// Whether its controller serves others.
    pub(crate) serving: bool,
    /// Whether it should be a controller.
    pub(crate) role: bool,
    /// When a stopped machine continued, or will continue.
    pub(crate) went_on: Duration,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) etcd: Etcd,
    pub(crate) machines: Vec<Machine>,
    /// The release that each object conforms to; `None` for an object that does not exist, or that another client
    /// changed.
    pub(crate) objects: [Option<usize>; OBJECTS],
    /// Grows with each change by another client.
    pub(crate) changes_by_hand: u64,
    /// The revision of the status that each leadership last read or wrote; 0 for none.
    pub(crate) read: BTreeMap<String, i64>,
    /// The leaderships that have completed a pass.
    pub(crate) passed: BTreeSet<String>,
    /// Since when the records are as they are.
    pub(crate) nodes_since: Duration,
    /// Since when the status is unreadable, and its former value.
    pub(crate) damaged: Option<(Duration, Vec<u8>)>,
    pub(crate) counts: Counts,
    pub(crate) trace: VecDeque<String>,
    pub(crate) violations: Vec<String>,
}

impl State {
    pub(crate) fn status(&self) -> Result<Option<ReconcilerStatus>, String> {
        let record = self.etcd.record(RECONCILER_STATUS);
        record
            .map(|record| ReconcilerStatus::decode(&record.value))
            .transpose()
            .map_err(|error| error.to_string())
    }

    /// The records of all nodes, as of now.
    pub(crate) fn nodes(&self) -> Listing {
        Listing { records: self.etcd.under(&NODES.range().start), revision: self.etcd.revision }
    }
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) sim: Rc<Sim>,
    pub(crate) namespace: Rc<Namespace>,
    /// The releases, in their order.
    pub(crate) programs: Rc<Vec<Program>>,
    state: Rc<RefCell<State>>,
}

impl World {
    pub(crate) fn new(seed: u64) -> anyhow::Result<Self> {
        let sim = Sim::new(seed);
        let release = |number: usize| ReleaseVersion::new(0, u32::try_from(number).unwrap_or_default(), 0);
        let programs = (1..=RELEASES).map(|number| Program {
            version: release(number).into(),
            needs_objects_of: release(1 + sim.below(number)),
            breaks_api_servers_below: release(1 + sim.below(number)),
        });
        let programs = Rc::new(programs.collect());
        let machine =
            |_| Machine { release: 0, process: 0, serving: false, role: true, went_on: Duration::ZERO };
        let state = State { machines: (0..MACHINES).map(machine).collect(), ..State::default() };
        let namespace = Rc::new(Namespace::new(NAMESPACE)?);
        Ok(Self { sim, namespace, programs, state: Rc::new(RefCell::new(state)) })
    }

    pub(crate) fn look(&self) -> Ref<'_, State> {
        self.state.borrow()
    }

    pub(crate) fn change(&self) -> RefMut<'_, State> {
        self.state.borrow_mut()
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.change().counts.entry(what).or_default() += 1;
    }

    pub(crate) fn note(&self, event: fmt::Arguments<'_>) {
        let event = format!("{:>8.3} {event}", self.sim.now().as_secs_f64());
        let mut state = self.change();
        if state.trace.len() == TRACE {
            state.trace.pop_front();
        }
        state.trace.push_back(event);
    }

    pub(crate) fn demand(&self, holds: Result<(), String>) {
        if let Err(violation) = holds {
            self.change().violations.push(violation);
        }
    }

    pub(crate) fn program(&self, machine: usize) -> Program {
        self.programs[self.look().machines[machine].release].clone()
    }

    /// Reads a key, with its value at some moment between request and response.
    pub(crate) async fn get(&self, key: &str) -> Option<Record> {
        self.sim.step().await;
        let record = self.look().etcd.record(key);
        self.sim.step().await;
        record
    }

    pub(crate) async fn list_nodes(&self) -> Listing {
        self.sim.step().await;
        let listing = self.look().nodes();
        self.sim.step().await;
        listing
    }

    /// Runs one transaction, and has the observer check it. `None` if the response is lost.
    pub(crate) async fn transact(
        &self,
        request: &wire::TxnRequest,
        by: Option<(&LeaderGuard, &Program)>,
    ) -> Option<Done> {
        self.sim.step().await;
        let done = self.change().etcd.transact(request);
        if let Some((guard, program)) = by {
            observer::judge_write(self, guard, program, &done);
        }
        self.sim.step().await;
        if self.sim.percent(2) {
            self.count("answers lost");
            return None;
        }
        Some(done)
    }

    /// Another client than a reconciler writes a key, or deletes it.
    pub(crate) fn put(&self, key: &str, value: Option<Vec<u8>>, lease: i64) -> i64 {
        let outside = format!("namespaced:{NAMESPACE}{key}").into_bytes();
        let request = match value {
            Some(value) => Request::RequestPut(wire::PutRequest { key: outside, value, lease }),
            None => Request::RequestDeleteRange(wire::DeleteRangeRequest { key: outside, range_end: vec![] }),
        };
        let success = vec![wire::RequestOp { request: Some(request) }];
        let body = wire::TxnRequest { success, ..Default::default() };
        let mut state = self.change();
        let done = state.etcd.transact(&body);
        if NODES.id_of(key).is_ok() {
            state.nodes_since = self.sim.now();
        }
        done.revision
    }

    /// The key of a machine's record.
    pub(crate) fn key_of(machine: usize) -> String {
        format!("{NODES}m{machine}")
    }

    /// Writes the state of the machine into its record.
    pub(crate) fn report(&self, machine: usize) {
        let (role, program) = (self.look().machines[machine].role, self.program(machine));
        let record = node_record(&format!("m{machine}"), role, Some(program.version.as_str()));
        self.put(&Self::key_of(machine), Some(record), 0);
        self.note(format_args!("the record of machine {machine} says {} and role {role}", program.version));
    }
}
