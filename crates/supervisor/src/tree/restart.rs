//! Cancellation and restart: which nodes a death cancels, and when each of them is started again.
//!
//! A node is restarted when three things are true. It was cancelled, and not only because an ancestor was. No ancestor
//! of it is cancelled. It and everything below it has returned. Once the tree is closed, no node is restarted.
//!
//! To restart a node below a cancelled one would be wrong: the restart of the upper node removes everything below it,
//! and parents create their children again. To restart earlier would be wrong as well: two instances of what the
//! children do would run at once.

use std::sync::Arc;
use std::time::Duration;

use super::{Effects, ScheduledStart, Tree};
use crate::state::{RunId, RunnableState};

impl<P> Tree<P> {
    /// Whether this run was cancelled, or is over.
    pub(crate) fn is_cancelled(&self, run: RunId) -> bool {
        self.node(run).is_none() || self.topmost_cancelled(run.slot).is_some()
    }

    pub(super) fn request_cancel(&mut self, slot: usize, effects: &mut Effects) {
        if let Some(node) = self.slots[slot].as_mut().filter(|node| !node.cancel_requested) {
            node.cancel_requested = true;
            effects.cancel.push(slot);
        }
    }

    /// The topmost node that was cancelled by itself, among this one and its ancestors.
    pub(super) fn topmost_cancelled(&self, slot: usize) -> Option<usize> {
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
    pub(super) fn restart_if_ready(
        &mut self,
        slot: usize,
        now: Duration,
        random: &mut impl FnMut() -> f64,
        effects: &mut Effects,
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
        node.cancel_requested = false;
        node.start_count += 1;
        node.restart_at = (!delay.is_zero()).then(|| now + delay);
        self.set_state(top, RunnableState::New, now, effects);
        self.adjust_running(Some(top), 1);
        let mut pending: Vec<_> = children.into_values().collect();
        while let Some(slot) = pending.pop() {
            if let Some(node) = self.slots[slot].take() {
                pending.extend(node.children.into_values());
                self.free.push(slot);
            }
        }
        effects.start.push(ScheduledStart { run: RunId { slot: top, number }, delay });
    }

    /// The path of a descendant that keeps this returned run from restarting.
    pub(crate) fn waits_for(&self, run: RunId) -> Option<Arc<str>> {
        let node = self.node(run)?;
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
