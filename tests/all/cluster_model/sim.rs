//! Virtual time: tasks that only sleep, run one after the other in the order of their wake-up times.
//!
//! A task belongs to a process. A process is killed as a whole, between any two of its awaits, so a crash can come
//! between any two steps. Or it is stopped for a while, and then continues as if no time had passed. All random values
//! are drawn from one generator, so a seed gives the same run every time.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// A process by its number; no two have the same.
pub(crate) type Process = u64;
/// The process of everything outside of all machines. It is never killed.
pub(crate) const OUTSIDE: Process = 0;

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// The clock, and all tasks.
pub(crate) struct Sim {
    now: Cell<Duration>,
    random: RefCell<ChaCha8Rng>,
    queue: RefCell<BinaryHeap<Reverse<(Duration, u64)>>>,
    tasks: RefCell<BTreeMap<u64, (Process, Option<Running>)>>,
    stopped: RefCell<BTreeMap<Process, Duration>>,
    next: Cell<u64>,
    /// The time until which the running task wants to sleep.
    sleeps_until: Cell<Duration>,
}

impl Sim {
    pub(crate) fn new(seed: u64) -> Rc<Self> {
        Rc::new(Self {
            now: Cell::new(Duration::ZERO),
            random: RefCell::new(ChaCha8Rng::seed_from_u64(seed)),
            queue: RefCell::default(),
            tasks: RefCell::default(),
            stopped: RefCell::default(),
            next: Cell::new(1),
            sleeps_until: Cell::new(Duration::ZERO),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.now.get()
    }

    /// A number below `end`.
    pub(crate) fn below(&self, end: usize) -> usize {
        self.random.borrow_mut().random_range(0..end)
    }

    /// Whether an event with this probability in per cent happens.
    pub(crate) fn percent(&self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// A duration between these, in milliseconds.
    pub(crate) fn between(&self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.random.borrow_mut().random_range(from..=to))
    }

    pub(crate) fn bytes(&self) -> [u8; 32] {
        self.random.borrow_mut().random()
    }

    /// A number that was not returned before.
    pub(crate) fn number(&self) -> u64 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    pub(crate) fn spawn(&self, process: Process, task: impl Future<Output = ()> + 'static) {
        let id = self.number();
        self.tasks.borrow_mut().insert(id, (process, Some(Box::pin(task))));
        self.queue.borrow_mut().push(Reverse((self.now(), id)));
    }

    /// Ends all tasks of a process, wherever they are.
    pub(crate) fn kill(&self, process: Process) {
        let mut dead = Vec::new();
        self.tasks.borrow_mut().retain(|_, (of, task)| {
            if *of == process {
                dead.push(task.take());
            }
            *of != process
        });
        self.stopped.borrow_mut().remove(&process);
        // Dropped last, because what is dropped may read this.
        drop(dead);
    }

    /// Stops a process for this long.
    pub(crate) fn stop_for(&self, process: Process, time: Duration) {
        self.stopped.borrow_mut().insert(process, self.now() + time);
    }

    /// Continues every stopped process.
    pub(crate) fn go_on(&self) {
        self.stopped.borrow_mut().clear();
    }

    pub(crate) async fn sleep(&self, time: Duration) {
        let until = self.now() + time;
        std::future::poll_fn(|_| {
            if self.now() >= until {
                return Poll::Ready(());
            }
            self.sleeps_until.set(until);
            Poll::Pending
        })
        .await;
    }

    /// The time that one step takes. Anything may happen between two steps.
    pub(crate) async fn step(&self) {
        self.sleep(self.between(1, 30)).await;
    }

    /// Runs the next task, if there is one before `end`.
    pub(crate) fn run_next(&self, end: Duration) -> bool {
        let Some(Reverse((at, id))) = self.queue.borrow_mut().pop() else { return false };
        if at > end {
            self.queue.borrow_mut().push(Reverse((at, id)));
            self.now.set(end);
            return false;
        }
        let Some((process, task)) =
            self.tasks.borrow_mut().get_mut(&id).map(|(process, task)| (*process, task.take()))
        else {
            return true;
        };
        self.now.set(at.max(self.now()));
        let stopped = self.stopped.borrow().get(&process).copied();
        let Some(mut task) = task else { return true };
        let wakes = if let Some(until) = stopped.filter(|until| *until > at) {
            Some(until)
        } else {
            self.stopped.borrow_mut().remove(&process);
            let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            polled.is_pending().then(|| self.sleeps_until.get())
        };
        let mut tasks = self.tasks.borrow_mut();
        if let (Some(wakes), Some((_, place))) = (wakes, tasks.get_mut(&id)) {
            *place = Some(task);
            self.queue.borrow_mut().push(Reverse((wakes, id)));
        } else {
            // The task was killed by its own action, or has ended. What is dropped may read this.
            tasks.remove(&id);
            drop(tasks);
            drop(task);
        }
        true
    }
}
