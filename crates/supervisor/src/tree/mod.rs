//! The supervision tree as a pure state machine: nodes, groups, states.
//!
//! It has no task and no clock. The driver ([`supervise`](crate::supervise)) reports each event with its time, and gets
//! the runs to cancel and the runs to start. `restart.rs` decides which these are.
//!
//! Each node counts the runs at and below it that have not returned. So the cost of an event depends on the depth of
//! the tree and the size of the group. Only a restart costs more: it removes all nodes below.

mod restart;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use backoff::ExponentialBackoff;

use crate::exit_reason::ExitReason;
use crate::name::RunnableName;
use crate::report::{ReportEntry, TreeReport};
use crate::state::{RunId, RunnableState, Transition};

/// The name of the node without a parent.
const ROOT: &str = "root";

/// Why no child was started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AddChildError {
    #[error("two children of {path} are to be called {name}; give each a name of its own")]
    DuplicateName { path: Arc<str>, name: RunnableName },
    /// The parent was cancelled, or has returned.
    #[error("the parent was cancelled or has returned")]
    ParentCancelled,
}

/// A run that the driver must start.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ScheduledStart {
    pub(super) run: RunId,
    /// Time to wait before the start.
    pub(super) delay: Duration,
}

/// What the driver must do after an event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Effects {
    /// Slots of the runs to cancel, each with all below it. The starts are of later runs.
    pub(super) cancel: Vec<usize>,
    pub(super) start: Vec<ScheduledStart>,
    pub(super) transitions: Vec<Transition>,
}

struct Node<P> {
    path: Arc<str>,
    parent: Option<usize>,
    children: BTreeMap<RunnableName, usize>,
    /// Slots of the children, by the group that they were started in.
    groups: Vec<Vec<usize>>,
    /// The index of its group in its parent.
    group: usize,
    payload: P,
    number: u64,
    state: RunnableState,
    /// It was cancelled by itself, and with it those below it.
    cancel_requested: bool,
    /// Failures in a row, without having been healthy in between.
    failures_in_a_row: u32,
    start_count: u64,
    /// The number of nodes at and below it that have not returned.
    running_below: usize,
    state_since: Duration,
    restart_at: Option<Duration>,
    last_failure: Option<Arc<str>>,
}

/// The tree; `P` is what its driver stores in each node.
pub(super) struct Tree<P> {
    slots: Vec<Option<Node<P>>>,
    free: Vec<usize>,
    last_number: u64,
    backoff: ExponentialBackoff,
    closed: bool,
}

impl<P> Tree<P> {
    /// A tree with its root, whose run the driver must start.
    pub(super) fn new(payload: P, backoff: ExponentialBackoff, now: Duration) -> (Self, RunId) {
        let mut tree = Self { slots: Vec::new(), free: Vec::new(), last_number: 0, backoff, closed: false };
        let root = tree.add_node(ROOT.into(), None, 0, payload, now);
        (tree, root)
    }

    /// Adds children, as one group, to a run that is new.
    pub(super) fn add_children(
        &mut self,
        parent: RunId,
        members: Vec<(RunnableName, P)>,
        now: Duration,
    ) -> Result<(Vec<RunId>, Effects), AddChildError> {
        if self.is_cancelled(parent) || self.node(parent).is_none_or(|node| node.state != RunnableState::New)
        {
            return Err(AddChildError::ParentCancelled);
        }
        let Some(node) = self.node_mut(parent) else { return Err(AddChildError::ParentCancelled) };
        let path = node.path.clone();
        let group = node.groups.len();
        let mut names: Vec<_> = members.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        if let Some(name) = twice.or_else(|| names.into_iter().find(|name| node.children.contains_key(*name)))
        {
            return Err(AddChildError::DuplicateName { path, name: name.clone() });
        }
        node.groups.push(Vec::new());
        let mut started = Vec::with_capacity(members.len());
        let mut effects = Effects::default();
        for (name, payload) in members {
            let child_path: Arc<str> = format!("{path}.{name}").into();
            let run = self.add_node(child_path.clone(), Some(parent.slot), group, payload, now);
            if let Some(node) = self.node_mut(parent) {
                node.children.insert(name, run.slot);
                node.groups[group].push(run.slot);
            }
            effects.transitions.push(Transition { path: child_path, from: None, to: RunnableState::New });
            started.push(run);
        }
        self.adjust_running(Some(parent.slot), started.len().cast_signed());
        Ok((started, effects))
    }

    /// The run has reported that it is healthy: its next death counts as its first.
    pub(super) fn mark_healthy(&mut self, run: RunId, now: Duration) -> Effects {
        let mut effects = Effects::default();
        if self.node(run).is_some_and(|node| node.state == RunnableState::New) {
            self.set_state(run.slot, RunnableState::Healthy, now, &mut effects);
            if let Some(node) = self.node_mut(run) {
                node.failures_in_a_row = 0;
            }
        }
        effects
    }

    /// The run has reported that it is done. The report takes effect when the run has returned.
    pub(super) fn mark_done(&mut self, run: RunId) {
        if let Some(node) = self.node_mut(run) {
            node.failures_in_a_row = 0;
        }
    }

    /// A run has returned.
    pub(super) fn record_exit(
        &mut self,
        run: RunId,
        end: ExitReason,
        now: Duration,
        random: &mut impl FnMut() -> f64,
    ) -> Effects {
        let mut effects = Effects::default();
        let Some(node) = self.node_mut(run).filter(|node| !node.state.has_returned()) else { return effects };
        let state = match end {
            ExitReason::Done => RunnableState::Done,
            ExitReason::Cancelled => RunnableState::Cancelled,
            ExitReason::Dead(why) => {
                node.last_failure = Some(why.into());
                node.failures_in_a_row = node.failures_in_a_row.saturating_add(1);
                RunnableState::Dead
            }
        };
        node.restart_at = None;
        let (parent, group) = (node.parent, node.group);
        self.set_state(run.slot, state, now, &mut effects);
        self.adjust_running(Some(run.slot), -1);
        let mut members = vec![run.slot];
        if state == RunnableState::Dead {
            if let Some(parent) = parent.and_then(|slot| self.slots[slot].as_ref()) {
                members.clone_from(&parent.groups[group]);
            }
            // If they were cancelled before, all of them were.
            if self.topmost_cancelled(run.slot).is_none() {
                for slot in &members {
                    self.request_cancel(*slot, &mut effects);
                }
            }
        }
        for slot in members {
            self.restart_if_ready(slot, now, random, &mut effects);
        }
        effects
    }

    /// Cancels all runs, and starts none any more.
    pub(super) fn close(&mut self) -> Effects {
        self.closed = true;
        let mut effects = Effects::default();
        self.request_cancel(0, &mut effects);
        effects
    }

    /// The payload of the node in this slot.
    pub(super) fn payload(&self, slot: usize) -> Option<&P> {
        self.slots.get(slot)?.as_ref().map(|node| &node.payload)
    }

    /// The payloads of this run and its parent, and its path.
    pub(super) fn payload_and_parent(&mut self, run: RunId) -> Option<(&mut P, Option<&P>, Arc<str>)> {
        let parent = self.node(run)?.parent;
        let (node, parent) = match parent {
            None => (self.slots[run.slot].as_mut()?, None),
            Some(parent) => {
                let [node, parent] = self.slots.get_disjoint_mut([run.slot, parent]).ok()?;
                (node.as_mut()?, parent.as_ref())
            }
        };
        let path = node.path.clone();
        Some((&mut node.payload, parent.map(|parent| &parent.payload), path))
    }

    /// The delay before the start of this run has passed.
    pub(super) fn mark_started(&mut self, run: RunId) {
        if let Some(node) = self.node_mut(run) {
            node.restart_at = None;
        }
    }

    /// The number of nodes.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A report of the tree from the root down, siblings sorted by name.
    pub(super) fn report(&self, now: Duration) -> TreeReport {
        let mut entries = Vec::new();
        let mut pending = vec![(0, 0)];
        while let Some((slot, depth)) = pending.pop() {
            let Some(node) = &self.slots[slot] else { continue };
            entries.push(ReportEntry {
                path: node.path.clone(),
                depth,
                state: node.state,
                state_age: now.saturating_sub(node.state_since),
                start_count: node.start_count,
                restart_in: node.restart_at.map(|at| at.saturating_sub(now)),
                waits_for: self.waits_for(RunId { slot, number: node.number }),
                last_failure: node.last_failure.clone(),
            });
            pending.extend(node.children.values().rev().map(|child| (*child, depth + 1)));
        }
        TreeReport { entries }
    }

    fn node(&self, run: RunId) -> Option<&Node<P>> {
        self.slots.get(run.slot)?.as_ref().filter(|node| node.number == run.number)
    }

    fn node_mut(&mut self, run: RunId) -> Option<&mut Node<P>> {
        self.slots.get_mut(run.slot)?.as_mut().filter(|node| node.number == run.number)
    }

    fn add_node(
        &mut self,
        path: Arc<str>,
        parent: Option<usize>,
        group: usize,
        payload: P,
        now: Duration,
    ) -> RunId {
        self.last_number += 1;
        let node = Node {
            path,
            parent,
            children: BTreeMap::new(),
            groups: Vec::new(),
            group,
            payload,
            number: self.last_number,
            state: RunnableState::New,
            cancel_requested: false,
            failures_in_a_row: 0,
            start_count: 1,
            running_below: 1,
            state_since: now,
            restart_at: None,
            last_failure: None,
        };
        let slot = self.free.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(Some(node));
        } else {
            self.slots[slot] = Some(node);
        }
        RunId { slot, number: self.last_number }
    }

    fn set_state(&mut self, slot: usize, state: RunnableState, now: Duration, effects: &mut Effects) {
        if let Some(node) = &mut self.slots[slot] {
            let from = Some(std::mem::replace(&mut node.state, state));
            node.state_since = now;
            effects.transitions.push(Transition { path: node.path.clone(), from, to: state });
        }
    }

    /// Adds to the count of nodes that have not returned, from here up.
    fn adjust_running(&mut self, from: Option<usize>, change: isize) {
        let mut slot = from;
        while let Some(node) = slot.and_then(|slot| self.slots[slot].as_mut()) {
            node.running_below = node.running_below.saturating_add_signed(change);
            slot = node.parent;
        }
    }
}
