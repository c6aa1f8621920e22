//! One decision from several values.
//!
//! What a part of a node does mostly follows from more than one thing: its roles *and* how the curator is reached. Each
//! of these comes when it comes. [`Inputs`] brings the newest of each together in one snapshot, whatever their order, and
//! [`reduce`] is the runnable that makes a value of every such snapshot by a pure function.

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};

use crate::supervisor::context::Runnable;
use crate::supervisor::value::{Value, Watcher};

/// A watched value, and where its states go in a snapshot.
trait Input<S>: Send {
    /// Puts what is new, if anything is, into the snapshot.
    fn take(&mut self, snapshot: &mut S) -> bool;
    /// Waits for something new, and leaves it there.
    fn wait(&mut self) -> BoxFuture<'_, ()>;
}

struct Watched<T, F> {
    watcher: Watcher<T>,
    /// Seen, and not in the snapshot yet.
    seen: Option<T>,
    put: F,
}

impl<S, T, F> Input<S> for Watched<T, F>
where
    T: Clone + Send + Sync,
    F: Fn(&mut S, T) + Send,
{
    fn take(&mut self, snapshot: &mut S) -> bool {
        // What came after it was seen is newer.
        match self.watcher.pending().or_else(|| self.seen.take()) {
            Some(value) => {
                self.seen = None;
                (self.put)(snapshot, value);
                true
            }
            None => false,
        }
    }

    fn wait(&mut self) -> BoxFuture<'_, ()> {
        async {
            if self.seen.is_none() {
                self.seen = Some(self.watcher.next().await);
            }
        }
        .boxed()
    }
}

/// Several values, watched together; `S` is what is known of them.
pub struct Inputs<S> {
    snapshot: S,
    inputs: Vec<Box<dyn Input<S>>>,
}

impl<S: Clone + 'static> Inputs<S> {
    /// Nothing is watched yet, and `nothing` is what is known then.
    #[must_use]
    pub fn new(nothing: S) -> Self {
        Self { snapshot: nothing, inputs: Vec::new() }
    }

    /// Watches one more; `put` puts what it is set to into the snapshot.
    #[must_use]
    pub fn with<T: Clone + Send + Sync + 'static>(
        mut self,
        value: &Value<T>,
        put: impl Fn(&mut S, T) + Send + 'static,
    ) -> Self {
        self.inputs.push(Box::new(Watched { watcher: value.watch(), seen: None, put }));
        self
    }

    /// Waits until any of them was set, and gives the newest of all.
    ///
    /// Whoever drops this before it is ready has lost nothing.
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

/// A runnable that sets `output` to what `decide` makes of every snapshot for which it makes something.
///
/// `inputs` is called for each life, so that one that was started again sees all of them again.
pub fn reduce<S, T>(
    inputs: impl Fn() -> Inputs<S> + Send + Sync + 'static,
    decide: impl Fn(&S) -> Option<T> + Send + Sync + Clone + 'static,
    output: &Value<T>,
) -> Runnable
where
    S: Clone + Send + Sync + 'static,
    T: Clone + Send + Sync + 'static,
{
    let output = output.clone();
    Runnable::new(move |starting| {
        let (mut inputs, decide, output) = (inputs(), decide.clone(), output.clone());
        async move {
            let healthy = starting.healthy();
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
    struct Known {
        name: Option<&'static str>,
        number: Option<u8>,
    }

    fn inputs(name: &Value<&'static str>, number: &Value<u8>) -> Inputs<Known> {
        Inputs::new(Known::default())
            .with(name, |known: &mut Known, name| known.name = Some(name))
            .with(number, |known: &mut Known, number| known.number = Some(number))
    }

    #[tokio::test]
    async fn newest_of_all_come_together_in_whatever_order_they_came() {
        for name_first in [true, false] {
            let (name, number) = (Value::new(), Value::new());
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
            assert_eq!(inputs.next().await, Known { name: Some("b"), number: Some(2) });
            assert!(poll!(std::pin::pin!(inputs.next())).is_pending());
        }
    }

    #[tokio::test]
    async fn wait_that_was_given_up_takes_nothing_with_it() {
        let (name, number) = (Value::new(), Value::new());
        let mut inputs = inputs(&name, &number);
        // Several may be seen by one poll, of which only one makes it ready.
        name.set("a");
        number.set(1);
        {
            let mut wait = select_all(inputs.inputs.iter_mut().map(|input| input.wait()));
            assert!(poll!(&mut wait).is_ready());
        }
        number.set(3);
        assert_eq!(inputs.next().await, Known { name: Some("a"), number: Some(3) });
    }
}
