//! Who is whose child, in which state, and who is to start again.
//!
//! No task and no clock: whoever drives it says what happened and when, and is told which lives to ask to end and which
//! to start. Each node counts those at and below it that have not returned, so that every event costs what the tree is
//! deep, or what the group is large, and never what the tree is large.
//!
//! # When a node starts again
//!
//! It was asked to end, itself or somebody above it; it is the topmost of those; and it and everything below it has
//! returned. It could not be a lower one: what is below it is thrown away when it starts again, and its own children are
//! made anew by whoever made them. It could not be before: two instances of what the children do would run at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::supervisor::backoff::Backoff;
use crate::supervisor::name::Name;
use crate::supervisor::outcome::End;
use crate::supervisor::report::{Entry, Report};

/// The name of the one without a parent.
const ROOT: &str = "root";

/// One life of one runnable: from one start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life {
    slot: usize,
    /// Never the same for two lives of a tree.
    number: u64,
}

#[cfg(test)]
impl Life {
    pub(super) const fn for_tests(slot: usize, number: u64) -> Self {
        Self { slot, number }
    }
}

/// What a runnable is just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Started, or waiting to be; it has not said that it is healthy.
    New,
    /// It said that it is healthy.
    Healthy,
    /// It said that it is done, and returned.
    Done,
    /// It failed, or panicked.
    Dead,
    /// It was asked to end, and did.
    Cancelled,
}

impl State {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
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
pub(super) enum NotStarted {
    #[error("two children of {path} are to be called {name}; give each a name of its own")]
    Twice { path: Arc<str>, name: Name },
    /// The parent was asked to end, or has ended.
    #[error("the parent was asked to end")]
    Over,
}

/// A life that is to be started now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) life: Life,
    /// After so long.
    pub(super) delay: Duration,
}

/// A change of state, for metrics and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Whose.
    pub path: Arc<str>,
    /// From which; none for one that was not there before.
    pub from: Option<State>,
    /// To which.
    pub to: State,
}

/// What follows from an event.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct After {
    /// Slots of those to ask to end, and all below each. What follows is of later lives.
    pub(super) ask: Vec<usize>,
    pub(super) start: Vec<Start>,
    pub(super) transitions: Vec<Transition>,
}

struct Node<P> {
    path: Arc<str>,
    parent: Option<usize>,
    children: BTreeMap<Name, usize>,
    /// Slots of the children that were started together.
    groups: Vec<Vec<usize>>,
    /// In which of its parent's groups it is.
    group: usize,
    payload: P,
    number: u64,
    state: State,
    /// Said to be done, and not returned yet, or both.
    said_done: bool,
    /// Asked to end by itself; those below it are as well.
    asked: bool,
    /// In a row, without having been healthy in between.
    deaths: u32,
    starts: u64,
    /// Those at and below it that have not returned.
    unreturned: usize,
    since: Duration,
    starts_at: Option<Duration>,
    last_failure: Option<Arc<str>>,
}

/// The tree; `P` is what its driver keeps of each node.
pub(super) struct Tree<P> {
    slots: Vec<Option<Node<P>>>,
    free: Vec<usize>,
    lives: u64,
    backoff: Backoff,
    closed: bool,
}

impl<P> Tree<P> {
    /// A tree with its root, which is to be started.
    pub(super) fn new(payload: P, backoff: Backoff, now: Duration) -> (Self, Life) {
        let mut tree = Self { slots: Vec::new(), free: Vec::new(), lives: 0, backoff, closed: false };
        let root = tree.add(ROOT.into(), None, 0, payload, now);
        (tree, root)
    }

    /// Adds children to one that is new; they share their fate.
    pub(super) fn start(
        &mut self,
        parent: Life,
        members: Vec<(Name, P)>,
        now: Duration,
    ) -> Result<(Vec<Life>, After), NotStarted> {
        if self.is_asked(parent) || self.node(parent).is_none_or(|node| node.state != State::New) {
            return Err(NotStarted::Over);
        }
        let Some(node) = self.node_mut(parent) else { return Err(NotStarted::Over) };
        let path = node.path.clone();
        let group = node.groups.len();
        let mut names: Vec<_> = members.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
        if let Some(name) = twice.or_else(|| names.into_iter().find(|name| node.children.contains_key(*name)))
        {
            return Err(NotStarted::Twice { path, name: name.clone() });
        }
        node.groups.push(Vec::new());
        let mut started = Vec::with_capacity(members.len());
        let mut after = After::default();
        for (name, payload) in members {
            let child_path: Arc<str> = format!("{path}.{name}").into();
            let life = self.add(child_path.clone(), Some(parent.slot), group, payload, now);
            if let Some(node) = self.node_mut(parent) {
                node.children.insert(name, life.slot);
                node.groups[group].push(life.slot);
            }
            after.transitions.push(Transition { path: child_path, from: None, to: State::New });
            started.push(life);
        }
        self.count(Some(parent.slot), started.len().cast_signed());
        Ok((started, after))
    }

    /// It says that it is healthy: its next death is its first.
    pub(super) fn healthy(&mut self, life: Life, now: Duration) -> After {
        let mut after = After::default();
        if self.node(life).is_some_and(|node| node.state == State::New) {
            self.change(life.slot, State::Healthy, now, &mut after);
            if let Some(node) = self.node_mut(life) {
                node.deaths = 0;
            }
        }
        after
    }

    /// It says that it is done; it is so once it has returned.
    pub(super) fn done(&mut self, life: Life) {
        if let Some(node) = self.node_mut(life) {
            node.said_done = true;
            node.deaths = 0;
        }
    }

    /// A life has returned.
    pub(super) fn ended(
        &mut self,
        life: Life,
        end: End,
        now: Duration,
        random: &mut impl FnMut() -> f64,
    ) -> After {
        let mut after = After::default();
        let Some(node) = self.node_mut(life).filter(|node| !node.state.has_returned()) else { return after };
        let state = match end {
            End::Done => State::Done,
            End::Cancelled => State::Cancelled,
            End::Dead(why) => {
                node.last_failure = Some(why.into());
                node.deaths = node.deaths.saturating_add(1);
                State::Dead
            }
        };
        node.starts_at = None;
        let (parent, group) = (node.parent, node.group);
        self.change(life.slot, state, now, &mut after);
        self.count(Some(life.slot), -1);
        let mut fate = vec![life.slot];
        if state == State::Dead {
            if let Some(parent) = parent.and_then(|slot| self.slots[slot].as_ref()) {
                fate.clone_from(&parent.groups[group]);
            }
            // Where they were asked to end before, all of them were.
            if self.topmost_asked(life.slot).is_none() {
                for slot in &fate {
                    self.ask(*slot, &mut after);
                }
            }
        }
        for slot in fate {
            self.start_again(slot, now, random, &mut after);
        }
        after
    }

    /// Asks all to end, and starts none again.
    pub(super) fn close(&mut self) -> After {
        self.closed = true;
        let mut after = After::default();
        self.ask(0, &mut after);
        after
    }

    /// Whether this life was asked to end, or is over.
    pub(super) fn is_asked(&self, life: Life) -> bool {
        self.node(life).is_none() || self.topmost_asked(life.slot).is_some()
    }

    /// What the driver keeps of it.
    pub(super) fn payload(&self, slot: usize) -> Option<&P> {
        self.slots.get(slot)?.as_ref().map(|node| &node.payload)
    }

    /// What the driver keeps of this life, of its parent, and where it is.
    pub(super) fn started(&mut self, life: Life) -> Option<(&mut P, Option<&P>, Arc<str>)> {
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

    /// The delayed start of this life came.
    pub(super) fn begun(&mut self, life: Life) {
        if let Some(node) = self.node_mut(life) {
            node.starts_at = None;
        }
    }

    /// How many nodes there are.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The tree as people read it, from the root down, children by their names.
    pub(super) fn report(&self, now: Duration) -> Report {
        let mut entries = Vec::new();
        let mut left = vec![(0, 0)];
        while let Some((slot, depth)) = left.pop() {
            let Some(node) = &self.slots[slot] else { continue };
            entries.push(Entry {
                path: node.path.clone(),
                depth,
                state: node.state,
                since: now.saturating_sub(node.since),
                starts: node.starts,
                starts_in: node.starts_at.map(|at| at.saturating_sub(now)),
                waits_for: self.waits_for(Life { slot, number: node.number }),
                last_failure: node.last_failure.clone(),
            });
            left.extend(node.children.values().rev().map(|child| (*child, depth + 1)));
        }
        Report { entries }
    }

    fn node(&self, life: Life) -> Option<&Node<P>> {
        self.slots.get(life.slot)?.as_ref().filter(|node| node.number == life.number)
    }

    fn node_mut(&mut self, life: Life) -> Option<&mut Node<P>> {
        self.slots.get_mut(life.slot)?.as_mut().filter(|node| node.number == life.number)
    }

    fn add(
        &mut self,
        path: Arc<str>,
        parent: Option<usize>,
        group: usize,
        payload: P,
        now: Duration,
    ) -> Life {
        self.lives += 1;
        let node = Node {
            path,
            parent,
            children: BTreeMap::new(),
            groups: Vec::new(),
            group,
            payload,
            number: self.lives,
            state: State::New,
            said_done: false,
            asked: false,
            deaths: 0,
            starts: 1,
            unreturned: 1,
            since: now,
            starts_at: None,
            last_failure: None,
        };
        let slot = self.free.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(Some(node));
        } else {
            self.slots[slot] = Some(node);
        }
        Life { slot, number: self.lives }
    }

    fn change(&mut self, slot: usize, state: State, now: Duration, after: &mut After) {
        if let Some(node) = &mut self.slots[slot] {
            let from = Some(std::mem::replace(&mut node.state, state));
            node.since = now;
            after.transitions.push(Transition { path: node.path.clone(), from, to: state });
        }
    }

    /// Adds to the count of those that have not returned, from here up.
    fn count(&mut self, from: Option<usize>, change: isize) {
        let mut slot = from;
        while let Some(node) = slot.and_then(|slot| self.slots[slot].as_mut()) {
            node.unreturned = node.unreturned.saturating_add_signed(change);
            slot = node.parent;
        }
    }

    fn ask(&mut self, slot: usize, after: &mut After) {
        if let Some(node) = self.slots[slot].as_mut().filter(|node| !node.asked) {
            node.asked = true;
            after.ask.push(slot);
        }
    }

    /// Of this one and those above it, the topmost that was asked to end by itself.
    fn topmost_asked(&self, slot: usize) -> Option<usize> {
        let (mut slot, mut topmost) = (Some(slot), None);
        while let Some((at, node)) = slot.and_then(|slot| Some((slot, self.slots[slot].as_ref()?))) {
            if node.asked {
                topmost = Some(at);
            }
            slot = node.parent;
        }
        topmost
    }

    /// Starts what a return at `slot` allows to start again.
    fn start_again(
        &mut self,
        slot: usize,
        now: Duration,
        random: &mut impl FnMut() -> f64,
        after: &mut After,
    ) {
        if self.closed || self.slots[slot].is_none() {
            return;
        }
        let Some(top) = self.topmost_asked(slot) else { return };
        self.lives += 1;
        let (number, backoff) = (self.lives, self.backoff);
        let Some(node) = self.slots[top].as_mut().filter(|node| node.unreturned == 0) else { return };
        let delay =
            if node.state == State::Dead { backoff.after(node.deaths, random()) } else { Duration::ZERO };
        let children = std::mem::take(&mut node.children);
        node.groups = Vec::new();
        node.number = number;
        node.said_done = false;
        node.asked = false;
        node.starts += 1;
        node.starts_at = (!delay.is_zero()).then(|| now + delay);
        self.change(top, State::New, now, after);
        self.count(Some(top), 1);
        let mut left: Vec<_> = children.into_values().collect();
        while let Some(slot) = left.pop() {
            if let Some(node) = self.slots[slot].take() {
                left.extend(node.children.into_values());
                self.free.push(slot);
            }
        }
        after.start.push(Start { life: Life { slot: top, number }, delay });
    }

    /// Whoever keeps this life, which has returned, from starting again.
    pub(super) fn waits_for(&self, life: Life) -> Option<Arc<str>> {
        let node = self.node(life)?;
        if !node.asked || !node.state.has_returned() || node.unreturned == 0 {
            return None;
        }
        let mut at = node;
        while at.state.has_returned() {
            at = at
                .children
                .values()
                .filter_map(|child| self.slots[*child].as_ref())
                .find(|child| child.unreturned > 0)?;
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
        lives: BTreeMap<String, Life>,
    }

    fn middle() -> f64 {
        0.5
    }

    impl Bench {
        fn new() -> Self {
            let (tree, root) = Tree::new((), Backoff::USUAL, NOW);
            Self { tree, lives: [("root".to_owned(), root)].into() }
        }

        fn path(&self, slot: usize) -> String {
            self.tree.slots[slot].as_ref().unwrap().path.to_string()
        }

        /// Starts a group at `parent`: names with spaces between them.
        fn group(&mut self, parent: &str, names: &str) -> &mut Self {
            let members = names.split(' ').map(|name| (Name::new(name).unwrap(), ())).collect();
            let (lives, _) = self.tree.start(self.lives[parent], members, NOW).unwrap();
            for (life, name) in lives.into_iter().zip(names.split(' ')) {
                self.lives.insert(format!("{parent}.{name}"), life);
            }
            self
        }

        fn healthy(&mut self, path: &str) -> &mut Self {
            self.tree.healthy(self.lives[path], NOW);
            self
        }

        /// Ends one; says who was asked to end (`-`) and who starts, after how many milliseconds (`+`).
        fn end(&mut self, path: &str, end: End) -> String {
            let after = self.tree.ended(self.lives[path], end, NOW, &mut middle);
            self.say(&after)
        }

        fn say(&mut self, after: &After) -> String {
            let mut said: Vec<_> = after.ask.iter().map(|slot| format!("-{}", self.path(*slot))).collect();
            for start in &after.start {
                let path = self.path(start.life.slot);
                self.lives.insert(path.clone(), start.life);
                said.push(format!("+{path} {}", start.delay.as_millis()));
            }
            said.join(", ")
        }

        fn dead(&mut self, path: &str) -> String {
            self.end(path, End::Dead("broken".to_owned()))
        }

        fn cancelled(&mut self, path: &str) -> String {
            self.end(path, End::Cancelled)
        }

        fn done(&mut self, path: &str) -> String {
            self.tree.done(self.lives[path]);
            self.end(path, End::Done)
        }

        fn states(&self) -> String {
            let report = self.tree.report(NOW);
            let said: Vec<_> =
                report.entries.iter().map(|e| format!("{} {}", e.path, e.state.word())).collect();
            said.join(", ")
        }
    }

    #[test]
    fn one_that_dies_alone_starts_again_alone_after_its_backoff() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root", "b").healthy("root");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500");
        assert_eq!(bench.states(), "root healthy, root.a new, root.b new");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 750");
        bench.healthy("root.a");
        assert_eq!(bench.dead("root.a"), "-root.a, +root.a 500", "it was healthy in between");
    }

    #[test]
    fn group_shares_the_fate_of_the_dead_one_and_only_that_waits() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root", "c").healthy("root.b");
        assert_eq!(bench.dead("root.a"), "-root.a, -root.b, +root.a 500");
        // No barrier: each starts as soon as it has returned.
        assert_eq!(bench.cancelled("root.b"), "+root.b 0");
        assert_eq!(bench.states(), "root new, root.a new, root.b new, root.c new");
    }

    #[test]
    fn nothing_starts_again_before_all_below_it_has_returned() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root.a", "b").group("root.a.b", "c d");
        assert_eq!(bench.dead("root.a"), "-root.a");
        assert_eq!(bench.cancelled("root.a.b"), "");
        assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.c"));
        assert_eq!(bench.cancelled("root.a.b.c"), "");
        assert_eq!(bench.tree.report(NOW).entries[1].waits_for.as_deref(), Some("root.a.b.d"));
        // It failed on its way out: that is of no account, it is gone.
        assert_eq!(bench.dead("root.a.b.d"), "+root.a 500");
        assert_eq!(bench.states(), "root new, root.a new");
        assert_eq!(bench.tree.len(), 2);
    }

    #[test]
    fn one_that_is_done_keeps_its_children_and_starts_again_only_with_its_group() {
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
    fn end_of_one_that_is_done_or_cancelled_leaves_its_group_alone() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root", "c").healthy("root.a");
        assert_eq!(bench.done("root.a"), "");
        assert_eq!(bench.dead("root"), "-root");
        assert_eq!(bench.cancelled("root.b"), "");
        assert_eq!(bench.cancelled("root.c"), "+root 500");
    }

    #[test]
    fn child_that_died_of_itself_waits_for_its_backoff_only_while_its_parent_lives() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root.a", "b").healthy("root.a");
        assert_eq!(bench.dead("root.a.b"), "-root.a.b, +root.a.b 500");
        assert_eq!(bench.dead("root.a"), "-root.a");
        // What waited for its back-off goes straight to cancelled.
        assert_eq!(bench.cancelled("root.a.b"), "+root.a 500");
    }

    #[test]
    fn end_of_a_life_that_is_over_says_nothing() {
        let mut bench = Bench::new();
        bench.group("root", "a");
        let first = bench.lives["root.a"];
        bench.dead("root.a");
        let after = bench.tree.ended(first, End::Dead("late".to_owned()), NOW, &mut middle);
        assert_eq!(after, After::default());
        assert_eq!(bench.tree.healthy(first, NOW), After::default());
        assert!(bench.tree.is_asked(first));
        assert_eq!(bench.tree.start(first, Vec::new(), NOW), Err(NotStarted::Over));
        assert!(!bench.tree.is_asked(bench.lives["root.a"]));
    }

    #[test]
    fn children_are_started_by_new_ones_under_names_of_their_own() {
        let mut bench = Bench::new();
        bench.group("root", "a").group("root", "b");
        let (root, a) = (bench.lives["root"], bench.lives["root.a"]);
        let name = |name| (Name::new(name).unwrap(), ());
        let twice = |name| Err(NotStarted::Twice { path: "root".into(), name: Name::new(name).unwrap() });
        assert_eq!(bench.tree.start(root, vec![name("b")], NOW), twice("b"));
        assert_eq!(bench.tree.start(root, vec![name("c"), name("c")], NOW), twice("c"));
        assert_eq!(bench.states(), "root new, root.a new, root.b new", "all or none");
        bench.healthy("root");
        assert_eq!(bench.tree.start(root, vec![name("d")], NOW), Err(NotStarted::Over));
        bench.dead("root");
        assert_eq!(bench.tree.start(a, vec![name("d")], NOW), Err(NotStarted::Over), "its parent is dead");
    }

    #[test]
    fn closed_tree_starts_nothing_again() {
        let mut bench = Bench::new();
        bench.group("root", "a b").group("root.a", "c");
        let after = bench.tree.close();
        assert_eq!(bench.say(&after), "-root");
        for path in ["root.a", "root", "root.a.c"] {
            assert_eq!(bench.cancelled(path), "");
        }
        assert_eq!(bench.dead("root.b"), "");
        assert_eq!(bench.tree.slots[0].as_ref().unwrap().unreturned, 0);
    }

    #[test]
    fn slots_of_what_is_gone_are_used_again() {
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

    /// Every event of random trees, in random order: what has started is what was not running.
    #[test]
    fn no_life_starts_beside_another_of_its_own_or_of_those_below_it() {
        use rand::rngs::SmallRng;
        use rand::{RngExt as _, SeedableRng as _};
        for seed in 0..200 {
            let mut random = SmallRng::seed_from_u64(seed);
            let (mut tree, root) = Tree::new((), Backoff::USUAL, NOW);
            let mut running = vec![(root, "root".to_owned())];
            for step in 0..300 {
                let chosen = random.random_range(0..running.len());
                let (life, path) = running[chosen].clone();
                let after = match random.random_range(0..6) {
                    0 | 1 => {
                        let names = (0..random.random_range(1..4))
                            .map(|number| (Name::new(&format!("n{step}-{number}")).unwrap(), ()))
                            .collect::<Vec<_>>();
                        match tree.start(life, names.clone(), NOW) {
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
                    2 => tree.healthy(life, NOW),
                    kind => {
                        running.swap_remove(chosen);
                        let end = match kind {
                            3 if tree.is_asked(life) => End::Cancelled,
                            4 => End::Done,
                            _ => End::Dead("broken".to_owned()),
                        };
                        tree.ended(life, end, NOW, &mut middle)
                    }
                };
                for start in after.start {
                    let path = tree.slots[start.life.slot].as_ref().unwrap().path.to_string();
                    let below = format!("{path}.");
                    for (_, other) in &running {
                        assert!(
                            *other != path && !other.starts_with(&below),
                            "seed {seed}: {path} beside {other}"
                        );
                    }
                    running.push((start.life, path));
                }
                // Done, all of them: nothing more happens in this tree.
                if running.is_empty() {
                    break;
                }
                let counted = tree.slots[0].as_ref().unwrap().unreturned;
                assert_eq!(counted, running.len(), "seed {seed}");
            }
            // Whoever was asked to end does: then nobody is left waiting for one that has returned.
            for _ in 0..10_000 {
                let asked = running.iter().position(|(life, _)| tree.is_asked(*life));
                let Some(asked) = asked else { break };
                let (life, _) = running.swap_remove(asked);
                for start in tree.ended(life, End::Cancelled, NOW, &mut middle).start {
                    running.push((start.life, String::new()));
                }
            }
            let waiting =
                tree.report(NOW).entries.into_iter().filter(|entry| entry.waits_for.is_some()).count();
            assert_eq!(waiting, 0, "seed {seed}");
        }
    }
}
