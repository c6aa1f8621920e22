//! Combine the newest of several watch cells, and derive a value from every change (combine latest).
//!
//! The work of a part of a node mostly depends on more than one value: its roles *and* the connection to the curator.
//! Each value arrives at its own time. [`CombinedInputs`] collects the newest of each in one snapshot, in any order,
//! and [`derive_value`] is the runnable that computes a value from every such snapshot by a pure function.

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};

use crate::context::Runnable;
use crate::watch_cell::{WatchCell, Watcher};

/// A watched value, and its place in a snapshot.
trait SnapshotInput<S>: Send {
    /// Puts the new value, if there is one, into the snapshot.
    fn take(&mut self, snapshot: &mut S) -> bool;
    /// Waits for a new value without taking it.
    fn wait(&mut self) -> BoxFuture<'_, ()>;
}

struct WatchedInput<T, F> {
    watcher: Watcher<T>,
    /// A value that was received and is not in the snapshot yet.
    buffered: Option<T>,
    put: F,
}

impl<S, T, F> SnapshotInput<S> for WatchedInput<T, F>
where
    T: Clone + Send + Sync,
    F: Fn(&mut S, T) + Send,
{
    fn take(&mut self, snapshot: &mut S) -> bool {
        // A value in the cell is newer than the buffered one.
        match self.watcher.try_next().or_else(|| self.buffered.take()) {
            Some(value) => {
                self.buffered = None;
                (self.put)(snapshot, value);
                true
            }
            None => false,
        }
    }

    fn wait(&mut self) -> BoxFuture<'_, ()> {
        async {
            if self.buffered.is_none() {
                self.buffered = Some(self.watcher.next().await);
            }
        }
        .boxed()
    }
}

/// Several values that are watched together; `S` is the snapshot.
pub struct CombinedInputs<S> {
    snapshot: S,
    inputs: Vec<Box<dyn SnapshotInput<S>>>,
}

impl<S: Clone + 'static> CombinedInputs<S> {
    /// Begins without inputs; `nothing` is the snapshot before any value is set.
    #[must_use]
    pub fn new(nothing: S) -> Self {
        Self { snapshot: nothing, inputs: Vec::new() }
    }

    /// Adds an input; `put` writes its value into the snapshot.
    #[must_use]
    pub fn with<T: Clone + Send + Sync + 'static>(
        mut self,
        value: &WatchCell<T>,
        put: impl Fn(&mut S, T) + Send + 'static,
    ) -> Self {
        self.inputs.push(Box::new(WatchedInput { watcher: value.watch(), buffered: None, put }));
        self
    }

    /// Waits until any of the inputs is set, and returns the snapshot with the newest of all.
    ///
    /// Cancel-safe: a value that arrives before a drop is returned by the next call.
    pub async fn next(&mut self) -> S {
        if self.inputs.is_empty() {
            return std::future::pending().await;
        }
        select_all(self.inputs.iter_mut().map(|input| input.wait())).await;
        for input in &mut self.inputs {
            input.take(&mut self.snapshot);
        }
        self.snapshot.clone()
    }
}

/// A runnable that sets `output` to the result of `decide` for every snapshot, unless it is `None`.
///
/// `inputs` is called for each run, so that a restarted runnable sees all values again.
pub fn derive_value<S, T>(
    inputs: impl Fn() -> CombinedInputs<S> + Send + Sync + 'static,
    decide: impl Fn(&S) -> Option<T> + Send + Sync + Clone + 'static,
    output: &WatchCell<T>,
) -> Runnable
where
    S: Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
{
    let output = output.clone();
    Runnable::new(move |starting| {
        let (mut inputs, decide, output) = (inputs(), decide.clone(), output.clone());
        async move {
            let healthy = starting.mark_healthy();
            loop {
                let snapshot = healthy.scope().until_cancelled(inputs.next()).await?;
                if let Some(value) = decide(&snapshot) {
                    output.set(value);
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use futures::poll;

    #[derive(Clone, Debug, Default, PartialEq)]
    struct CombinedValue {
        name: Option<&'static str>,
        number: Option<u8>,
    }

    fn inputs(name: &WatchCell<&'static str>, number: &WatchCell<u8>) -> CombinedInputs<CombinedValue> {
        CombinedInputs::new(CombinedValue::default())
            .with(name, |known: &mut CombinedValue, name| known.name = Some(name))
            .with(number, |known: &mut CombinedValue, number| known.number = Some(number))
    }

    #[tokio::test]
    async fn newest_values_are_combined_in_any_order() {
        for name_first in [true, false] {
            let (name, number) = (WatchCell::new(), WatchCell::new());
            let mut inputs = inputs(&name, &number);
            assert!(poll!(std::pin::pin!(inputs.next())).is_pending());
            if name_first {
                name.set("a");
            } else {
                number.set(0);
            }
            let half = inputs.next().await;
            assert_eq!((half.name.is_some(), half.number.is_some()), (name_first, !name_first));
            name.set("b");
            number.set(1);
            number.set(2);
            assert_eq!(inputs.next().await, CombinedValue { name: Some("b"), number: Some(2) });
            assert!(poll!(std::pin::pin!(inputs.next())).is_pending());
        }
    }

    #[tokio::test]
    async fn dropped_wait_loses_nothing() {
        let (name, number) = (WatchCell::new(), WatchCell::new());
        let mut inputs = inputs(&name, &number);
        // One poll may receive several values, of which only one makes it ready.
        name.set("a");
        number.set(1);
        {
            let mut wait = select_all(inputs.inputs.iter_mut().map(|input| input.wait()));
            assert!(poll!(&mut wait).is_ready());
        }
        number.set(3);
        assert_eq!(inputs.next().await, CombinedValue { name: Some("a"), number: Some(3) });
    }
}
