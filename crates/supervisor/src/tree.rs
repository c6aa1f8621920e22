//! The supervision tree as a pure state machine: states, groups, cancellation, restarts.
//!
//! It has no task and no clock: the driver reports each event with its time, and gets the runs to cancel and those to
//! start. Each node counts the runs at and below it that have not returned, so that the cost of an event depends on the
//! depth of the tree or the size of the group, never on the size of the tree.
//!
//! # When a node is restarted
//!
//! A node is restarted when it was cancelled, itself or by an ancestor; it is the topmost of the cancelled nodes; and
//! it and everything below it has returned. A lower node would be wrong: everything below the topmost one is removed
//! when that is restarted, and its children are created again by their parents. An earlier moment would be wrong: two
//! instances of what the children do would run at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::ExponentialBackoff;
use crate::exit_reason::ExitReason;
use crate::name::RunnableName;
use crate::report::{ReportEntry, TreeReport};

/// The name of the node without a parent.
const ROOT: &str = "root";

/// One run of one runnable: from one start to its exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunId {
    slot: usize,
    /// Unique among all runs of a tree.
    number: u64,
}

#[cfg(test)]
impl RunId {
    pub(super) const fn for_tests(slot: usize, number: u64) -> Self {
        Self { slot, number }
    }
}

/// The state of a runnable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunnableState {
    /// Started, or waiting for its start; it has not reported that it is healthy.
    New,
    /// It has reported that it is healthy.
    Healthy,
    /// It has reported that it is done, and returned.
    Done,
    /// It failed or panicked.
    Dead,
    /// It was cancelled, and has returned.
    Cancelled,
}

impl RunnableState {
    /// The name of the state, in reports and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Healthy => "healthy",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    const fn has_returned(self) -> bool {
        matches!(self, Self::Done | Self::Dead | Self::Cancelled)
    }
}

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

/// A change of state, for metrics and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Path of the runnable that changed.
    pub path: Arc<str>,
    /// The state before; `None` for a new runnable.
    pub from: Option<RunnableState>,
    /// The state after the change.
    pub to: RunnableState,
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
    /// It has reported that it is done; it may not have returned yet.
    declared_done: bool,
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
        let mut after = Effects::default();
        for (name, payload) in members {
            let child_path: Arc<str> = format!("{path}.{name}").into();
            let life = self.add_node(child_path.clone(), Some(parent.slot), group, payload, now);
            if let Some(node) = self.node_mut(parent) {
                node.children.insert(name, life.slot);
                node.groups[group].push(life.slot);
            }
            after.transitions.push(Transition { path: child_path, from: None, to: RunnableState::New });
            started.push(life);
        }
        self.adjust_running(Some(parent.slot), started.len().cast_signed());
        Ok((started, after))
    }

    /// The run has reported that it is healthy: its next death counts as its first.
    pub(super) fn mark_healthy(&mut self, life: RunId, now: Duration) -> Effects {
        let mut after = Effects::default();
        if self.node(life).is_some_and(|node| node.state == RunnableState::New) {
            self.set_state(life.slot, RunnableState::Healthy, now, &mut after);
            if let Some(node) = self.node_mut(life) {
                node.failures_in_a_row = 0;
            }
        }
        after
    }

    /// The run has reported that it is done; that holds once it has returned.
    pub(super) fn mark_done(&mut self, life: RunId) {
        if let Some(node) = self.node_mut(life) {
            node.declared_done = true;
            node.failures_in_a_row = 0;
        }
    }

    /// A run has returned.
    pub(super) fn record_exit(
        &mut self,
        life: RunId,
        end: ExitReason,
        now: Duration,
        random: &mut impl FnMut() -> f64,
    ) -> Effects {
        let mut after = Effects::default();
        let Some(node) = self.node_mut(life).filter(|node| !node.state.has_returned()) else { return after };
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
        self.set_state(life.slot, state, now, &mut after);
        self.adjust_running(Some(life.slot), -1);
        let mut fate = vec![life.slot];
        if state == RunnableState::Dead {
            if let Some(parent) = parent.and_then(|slot| self.slots[slot].as_ref()) {
                fate.clone_from(&parent.groups[group]);
            }
            // If they were cancelled before, all of them were.
            if self.topmost_cancelled(life.slot).is_none() {
                for slot in &fate {
                    self.request_cancel(*slot, &mut after);
                }
            }
        }
        for slot in fate {
            self.restart_if_ready(slot, now, random, &mut after);
        }
        after
    }

    /// Cancels all runs, and starts none any more.
    pub(super) fn close(&mut self) -> Effects {
        self.closed = true;
        let mut after = Effects::default();
        self.request_cancel(0, &mut after);
        after
    }

    /// Whether this run was cancelled, or is over.
    pub(super) fn is_cancelled(&self, life: RunId) -> bool {
        self.node(life).is_none() || self.topmost_cancelled(life.slot).is_some()
    }

    /// The payload of the node in this slot.
    pub(super) fn payload(&self, slot: usize) -> Option<&P> {
        self.slots.get(slot)?.as_ref().map(|node| &node.payload)
    }

    /// The payloads of this run and its parent, and its path.
    pub(super) fn payload_and_parent(&mut self, life: RunId) -> Option<(&mut P, Option<&P>, Arc<str>)> {
        let parent = self.node(life)?.parent;
        let (node, parent) = match parent {
            None => (self.slots[life.slot].as_mut()?, None),
            Some(parent) => {
                let [node, parent] = self.slots.get_disjoint_mut([life.slot, parent]).ok()?;
                (node.as_mut()?, parent.as_ref())
            }
        };
        let path = node.path.clone();
        Some((&mut node.payload, parent.map(|parent| &parent.payload), path))
    }

    /// The delay before the start of this run has passed.
    pub(super) fn mark_started(&mut self, life: RunId) {
        if let Some(node) = self.node_mut(life) {
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
        let mut left = vec![(0, 0)];
        while let Some((slot, depth)) = left.pop() {
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
            left.extend(node.children.values().rev().map(|child| (*child, depth + 1)));
        }
        TreeReport { entries }
    }

    fn node(&self, life: RunId) -> Option<&Node<P>> {
        self.slots.get(life.slot)?.as_ref().filter(|node| node.number == life.number)
    }

    fn node_mut(&mut self, life: RunId) -> Option<&mut Node<P>> {
        self.slots.get_mut(life.slot)?.as_mut().filter(|node| node.number == life.number)
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
            declared_done: false,
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

    fn set_state(&mut self, slot: usize, state: RunnableState, now: Duration, after: &mut Effects) {
        if let Some(node) = &mut self.slots[slot] {
            let from = Some(std::mem::replace(&mut node.state, state));
            node.state_since = now;
            after.transitions.push(Transition { path: node.path.clone(), from, to: state });
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

    fn request_cancel(&mut self, slot: usize, after: &mut Effects) {
        if let Some(node) = self.slots[slot].as_mut().filter(|node| !node.cancel_requested) {
            node.cancel_requested = true;
            after.cancel.push(slot);
        }
    }

    /// The topmost node that was cancelled by itself, among this one and its ancestors.
    fn topmost_cancelled(&self, slot: usize) -> Option<usize> {
        let (mut slot, mut topmost) = (Some(slot), None);
        while let Some((at, node)) = slot.and_then(|slot| Some((slot, self.slots[slot].as_ref()?))) {
            if node.cancel_requested {
                topmost = Some(at);
            }
            slot = node.parent;
        }
        topmost
    }

    /// Starts what a return at `slot` allows to restart.
    fn restart_if_ready(
        &mut self,
        slot: usize,
        now: Duration,
        random: &mut impl FnMut() -> f64,
        after: &mut Effects,
    ) {
        if self.closed || self.slots[slot].is_none() {
            return;
        }
        let Some(top) = self.topmost_cancelled(slot) else { return };
        self.last_number += 1;
        let (number, backoff) = (self.last_number, self.backoff);
        let Some(node) = self.slots[top].as_mut().filter(|node| node.running_below == 0) else { return };
        let delay = if node.state == RunnableState::Dead {
            backoff.delay(node.failures_in_a_row, random())
        } else {
            Duration::ZERO
        };
        let children = std::mem::take(&mut node.children);
        node.groups = Vec::new();
        node.number = number;
        node.declared_done = false;
        node.cancel_requested = false;
        node.start_count += 1;
        node.restart_at = (!delay.is_zero()).then(|| now + delay);
        self.set_state(top, RunnableState::New, now, after);
        self.adjust_running(Some(top), 1);
        let mut left: Vec<_> = children.into_values().collect();
        while let Some(slot) = left.pop() {
            if let Some(node) = self.slots[slot].take() {
                left.extend(node.children.into_values());
                self.free.push(slot);
            }
        }
        after.start.push(ScheduledStart { run: RunId { slot: top, number }, delay });
    }

    /// The path of a descendant that keeps this returned run from restarting.
    pub(super) fn waits_for(&self, life: RunId) -> Option<Arc<str>> {
        let node = self.node(life)?;
        if !node.cancel_requested || !node.state.has_returned() || node.running_below == 0 {
            return None;
        }
        let mut at = node;
        while at.state.has_returned() {
            at = at
                .children
                .values()
                .filter_map(|child| self.slots[*child].as_ref())
                .find(|child| child.running_below > 0)?;
        }
        Some(at.path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    struct Bench {
        tree: Tree<()>,
        lives: BTreeMap<String, RunId>,
    }

    fn middle() -> f64 {
        0.5
    }

    impl Bench {
        fn new() -> Self {
            let (tree, root) = Tree::new((), ExponentialBackoff::DEFAULT, NOW);
            Self { tree, lives: [("root".to_owned(), root)].into() }
        }

        fn path(&self, slot: usize) -> String {
            self.tree.slots[slot].as_ref().unwrap().path.to_string()
        }

        /// Starts a group at `parent`: names separated by spaces.
        fn group(&mut self, parent: &str, names: &str) -> &mut Self {
            let members = names.split(' ').map(|name| (RunnableName::new(name).unwrap(), ())).collect();
            let (lives, _) = self.tree.add_children(self.lives[parent], members, NOW).unwrap();
            for (life, name) in lives.into_iter().zip(names.split(' ')) {
                self.lives.insert(format!("{parent}.{name}"), life);
            }
            self
        }

        fn healthy(&mut self, path: &str) -> &mut Self {
            self.tree.mark_healthy(self.lives[path], NOW);
            self
        }

        /// Ends a run; returns the cancelled runs (`-`) and the started ones with their delay in milliseconds (`+`).
        fn end(&mut self, path: &str, end: ExitReason) -> String {
            let after = self.tree.record_exit(self.lives[path], end, NOW, &mut middle);
            self.describe_effects(&after)
        }

        fn describe_effects(&mut self, after: &Effects) -> String {
            let mut messages: Vec<_> =
                after.cancel.iter().map(|slot| format!("-{}", self.path(*slot))).collect();
            for start in &after.start {
                let path = self.path(start.run.slot);
                self.lives.insert(path.clone(), start.run);
                messages.push(format!("+{path} {}", start.delay.as_millis()));
            }
            messages.join(", ")
        }

        fn dead(&mut self, path: &str) -> String {
            self.end(path, ExitReason::Dead("broken".to_owned()))
        }

        fn cancelled(&mut self, path: &str) -> String {
            self.end(path, ExitReason::Cancelled)
        }

        fn done(&mut self, path: &str) -> String {
            self.tree.mark_done(self.lives[path]);
            self.end(path, ExitReason::Done)
        }

        fn states(&self) -> String {
            let report = self.tree.report(NOW);
            let messages: Vec<_> =
                report.entries.iter().map(|e| format!("{} {}", e.path, e.state.as_str())).collect();
            messages.join(", ")
        }
    }

    #[test]
    fn single_death_restarts_only_that_node_after_its_backoff() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root", "b").healthy("root");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500");
        assert_eq!(bench.states(), "root healthy, root.a new, root.b new");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 750");
        bench.healthy("root.a");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500", "it was healthy in between");
    }

    #[test]
    fn group_restarts_with_its_dead_member_and_only_that_backs_off() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root", "c").healthy("root.b");
        assert_eq!(bench.dead("root.a"), "-root.a, -root.b, +root.a 500");
        // No barrier: each restarts as soon as it has returned.
        assert_eq!(bench.cancelled("root.b"), "+root.b 0");
        assert_eq!(bench.states(), "root new, root.a new, root.b new, root.c new");
    }

    #[test]
    fn nothing_restarts_before_its_whole_subtree_has_exited() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root.a", "b").group("root.a.b", "c d");
        assert_eq!(bench.dead("root.a"), "-root.a");
        assert_eq!(bench.cancelled("root.a.b"), "");
        assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.c"));
        assert_eq!(bench.cancelled("root.a.b.c"), "");
        assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.d"));
        // It failed after its cancellation: that does not count, because it is removed.
        assert_eq!(bench.dead("root.a.b.d"), "+root.a 500");
        assert_eq!(bench.states(), "root new, root.a new");
        assert_eq!(bench.tree.len(), 2);
    }

    #[test]
    fn done_node_keeps_its_children_and_restarts_only_with_its_group() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root.a", "c").healthy("root.a");
        assert_eq!(bench.done("root.a"), "");
        assert_eq!(bench.states(), "root new, root.a done, root.a.c new, root.b new");
        assert_eq!(bench.dead("root.b"), "-root.a, -root.b, +root.b 500");
        assert_eq!(bench.cancelled("root.a.c"), "+root.a 0");
    }

    #[test]
    fn done_one_without_children_starts_at_once_when_its_group_dies() {
        let mut bench = Bench::new();
        bench.group("root", "a b").healthy("root.a");
        bench.done("root.a");
        assert_eq!(bench.dead("root.b"), "-root.a, -root.b, +root.a 0, +root.b 500");
    }

    #[test]
    fn exit_of_a_done_or_cancelled_node_leaves_its_group_alone() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root", "c").healthy("root.a");
        assert_eq!(bench.done("root.a"), "");
        assert_eq!(bench.dead("root"), "-root");
        assert_eq!(bench.cancelled("root.b"), "");
        assert_eq!(bench.cancelled("root.c"), "+root 500");
    }

    #[test]
    fn dead_child_backs_off_only_while_its_parent_runs() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root.a", "b").healthy("root.a");
        assert_eq!(bench.dead("root.a.b"), "-root.a.b, +root.a.b 500");
        assert_eq!(bench.dead("root.a"), "-root.a");
        // A run that waited for its back-off goes straight to cancelled.
        assert_eq!(bench.cancelled("root.a.b"), "+root.a 500");
    }

    #[test]
    fn exit_of_a_finished_run_has_no_effect() {
        let mut bench = Bench::new();
        bench.group("root", "a");
        let first = bench.lives["root.a"];
        bench.dead("root.a");
        let after = bench.tree.record_exit(first, ExitReason::Dead("late".to_owned()), NOW, &mut middle);
        assert_eq!(after, Effects::default());
        assert_eq!(bench.tree.mark_healthy(first, NOW), Effects::default());
        assert!(bench.tree.is_cancelled(first));
        assert_eq!(bench.tree.add_children(first, Vec::new(), NOW), Err(AddChildError::ParentCancelled));
        assert!(!bench.tree.is_cancelled(bench.lives["root.a"]));
    }

    #[test]
    fn children_are_started_by_new_ones_under_names_of_their_own() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root", "b");
        let (root, a) = (bench.lives["root"], bench.lives["root.a"]);
        let name = |name| (RunnableName::new(name).unwrap(), ());
        let twice = |name| {
            Err(AddChildError::DuplicateName { path: "root".into(), name: RunnableName::new(name).unwrap() })
        };
        assert_eq!(bench.tree.add_children(root, vec![name("b")], NOW), twice("b"));
        assert_eq!(bench.tree.add_children(root, vec![name("c"), name("c")], NOW), twice("c"));
        assert_eq!(bench.states(), "root new, root.a new, root.b new", "all or none");
        bench.healthy("root");
        assert_eq!(bench.tree.add_children(root, vec![name("d")], NOW), Err(AddChildError::ParentCancelled));
        bench.dead("root");
        assert_eq!(
            bench.tree.add_children(a, vec![name("d")], NOW),
            Err(AddChildError::ParentCancelled),
            "its parent is dead"
        );
    }

    #[test]
    fn closed_tree_starts_nothing_again() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root.a", "c");
        let after = bench.tree.close();
        assert_eq!(bench.describe_effects(&after), "-root");
        for path in ["root.a", "root", "root.a.c"] {
            assert_eq!(bench.cancelled(path), "");
        }
        assert_eq!(bench.dead("root.b"), "");
        assert_eq!(bench.tree.slots[0].as_ref().unwrap().running_below, 0);
    }

    #[test]
    fn slots_of_removed_nodes_are_reused() {
        let mut bench = Bench::new();
        for _ in 0..50 {
            bench.group("root", "a b c d").group("root.a", "e f g");
            for path in ["root.a", "root.b", "root.c", "root.d", "root.a.e", "root.a.f"] {
                bench.cancelled(path);
            }
            bench.dead("root");
            assert_eq!(bench.tree.len(), 8);
            assert!(bench.cancelled("root.a.g").starts_with("+root "));
            assert_eq!(bench.tree.len(), 1);
        }
        assert_eq!(bench.tree.slots.len(), 8);
    }

    /// Every event of random trees, in random order: no run starts while it is running.
    #[test]
    fn no_run_starts_while_an_earlier_one_or_its_subtree_runs() {
        use rand::rngs::SmallRng;
        use rand::{RngExt as _, SeedableRng as _};
        for seed in 0..200 {
            let mut random = SmallRng::seed_from_u64(seed);
            let (mut tree, root) = Tree::new((), ExponentialBackoff::DEFAULT, NOW);
            let mut running = vec![(root, "root".to_owned())];
            for step in 0..300 {
                let chosen = random.random_range(0..running.len());
                let (life, path) = running[chosen].clone();
                let after = match random.random_range(0..6) {
                    0 | 1 => {
                        let names = (0..random.random_range(1..4))
                            .map(|number| (RunnableName::new(&format!("n{step}-{number}")).unwrap(), ()))
                            .collect::<Vec<_>>();
                        match tree.add_children(life, names.clone(), NOW) {
                            Ok((lives, after)) => {
                                running.extend(
                                    lives
                                        .into_iter()
                                        .zip(names)
                                        .map(|(life, (name, ()))| (life, format!("{path}.{name}"))),
                                );
                                after
                            }
                            Err(_) => continue,
                        }
                    }
                    2 => tree.mark_healthy(life, NOW),
                    kind => {
                        running.swap_remove(chosen);
                        let end = match kind {
                            3 if tree.is_cancelled(life) => ExitReason::Cancelled,
                            4 => ExitReason::Done,
                            _ => ExitReason::Dead("broken".to_owned()),
                        };
                        tree.record_exit(life, end, NOW, &mut middle)
                    }
                };
                for start in after.start {
                    let path = tree.slots[start.run.slot].as_ref().unwrap().path.to_string();
                    let below = format!("{path}.");
                    for (_, other) in &running {
                        assert!(
                            *other != path && !other.starts_with(&below),
                            "seed {seed}: {path} beside {other}"
                        );
                    }
                    running.push((start.run, path));
                }
                // All of them are done: nothing more happens in this tree.
                if running.is_empty() {
                    break;
                }
                let counted = tree.slots[0].as_ref().unwrap().running_below;
                assert_eq!(counted, running.len(), "seed {seed}");
            }
            // Every cancelled run returns: then no returned run is left waiting.
            for _ in 0..10_000 {
                let requested = running.iter().position(|(life, _)| tree.is_cancelled(*life));
                let Some(requested) = requested else { break };
                let (life, _) = running.swap_remove(requested);
                for start in tree.record_exit(life, ExitReason::Cancelled, NOW, &mut middle).start {
                    running.push((start.run, String::new()));
                }
            }
            let waiting =
                tree.report(NOW).entries.into_iter().filter(|entry| entry.waits_for.is_some()).count();
            assert_eq!(waiting, 0, "seed {seed}");
        }
    }
}
