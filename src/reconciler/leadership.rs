//! What whoever was elected does, step by step.
//!
//! A leadership is a machine without I/O: [`Leadership::next`] says what to do, and whoever does it says what came of
//! it. So the same steps run against etcd, against a table and in a simulated cluster.
//!
//! # The order of things
//!
//! The status promises two things to all controllers ([`status`](crate::reconciler::status)). With L this release, A the
//! lowest whose API servers its objects do not break, V and C the version and the lowest compatible release in the status:
//!
//! | status | before objects are changed | why |
//! | --- | --- | --- |
//! | none | nothing | nobody began yet, for a status is what they wait for |
//! | what this program would write | nothing | objects may only become what was promised |
//! | V ≤ L, C ≥ A | state: working | it promises no more than will hold, and excludes all that would break |
//! | V > L, or C < A | V to the lower of both, C to the higher, **once no controller is newer than L or older than A** | what needs V's objects must not begin, nor what this program's objects break |
//!
//! The last write needs proof. Controllers that are known to be compatible are looked up, and etcd writes only if none of
//! their records was written since: one that comes, or says another release, undoes the proof.
//!
//! Where there was a status, somebody reconciled before, and requests of his may be under way that no lease can call
//! back. They have a [quiet](Pace) time to arrive. Then the first pass, until one succeeds; then the status of this
//! program, which may promise more, or exclude less, only now; then a pass every thirty seconds, and when objects were changed by others.
//!
//! Before each of those the status is read again, as the leader: one that leads no longer learns it here, and a status
//! that somebody has deleted or replaced is a reason to begin from the start.
//!
//! A status that cannot be read is none of the rows. It may exclude what this program would let begin, so nothing is done
//! until it can be read, or is gone.

use std::time::Duration;

use crate::etcd::guard::{Change, Expected, Unchanged};
use crate::etcd::key_space::{NODES, RECONCILER_STATUS};
use crate::etcd::namespace::Keys;
use crate::reconciler::nodes::{Blocked, Releases};
use crate::reconciler::program::Program;
use crate::reconciler::status::{State, Status};

/// How long objects that others change all the time are left to them between two passes.
const BETWEEN_PASSES: Duration = Duration::from_secs(1);
/// How long what cannot be done is left alone before it is tried again, where no event tells that it can.
const AGAIN: Duration = Duration::from_secs(5);

/// How long the first pass may fail before anybody is told: an API server takes a moment to start.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// How often that is told then.
const TOLD_EVERY: Duration = Duration::from_secs(10);
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);

/// How a leadership waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// How long requests of a former leader have to arrive.
    pub quiet: Duration,
    /// How often all objects are looked at when nobody says that they changed.
    pub every: Duration,
}

impl Default for Pace {
    /// Five seconds, and thirty.
    fn default() -> Self {
        Self { quiet: Duration::from_secs(5), every: Duration::from_secs(30) }
    }
}

/// What can end a wait before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listens {
    /// Nothing.
    ToNothing,
    /// A change of nodes: [`Leadership::nodes_changed`].
    ToNodes,
    /// A change of objects: [`Leadership::objects_changed`].
    ToObjects,
}

/// What is to be done next. Times are since any moment that stays the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read the status, if this is still the leader; then [`Leadership::read`].
    Read,
    /// Look up the releases of all controllers; then [`Leadership::looked`].
    Look,
    /// Write this; then [`Leadership::written`] or [`Leadership::not_written`].
    Write(Write),
    /// Make a pass; then [`Leadership::passed`].
    Pass,
    /// Wait until this time, or until what it [listens](Leadership::listens) to happens.
    Wait(Duration),
}

/// A write of the status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// What it is to say.
    pub status: Status,
    /// What it must be until then.
    pub expected: Expected,
    /// The revision since which no record of a node must have been written, where it relies on them.
    pub nodes_since: Option<i64>,
}

impl Write {
    /// As etcd is asked for it.
    #[must_use]
    pub fn change(&self) -> Change {
        let key = RECONCILER_STATUS.to_owned();
        Change::Put { key, value: self.status.encode(), expected: self.expected }
    }

    /// What else it relies on.
    #[must_use]
    pub fn unchanged(&self) -> Option<Unchanged> {
        self.nodes_since.map(|since| Unchanged { keys: Keys::Under(NODES.range().start), since })
    }
}

/// A status as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// What it says.
    pub status: Status,
    /// The store's revision of it.
    pub revision: i64,
}

/// Who is told that a pass failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loudness {
    /// Whoever looks closely.
    Quiet,
    /// Everybody.
    Aloud,
}

/// One leadership.
#[derive(Clone, Debug)]
pub struct Leadership {
    program: Program,
    pace: Pace,
    phase: Phase,
}

#[derive(Clone, Debug)]
enum Phase {
    /// It is not known what the status says.
    Unread,
    /// The status cannot be read, or etcd did not answer.
    Stuck { until: Duration },
    /// To be written before anything is done.
    Announce(Write),
    /// To be written once nodes allow it.
    Exclude { status: Status, revision: i64, blocked: Option<(Blocked, Duration)> },
    /// Requests of a former leader may arrive.
    Hush { known: Stored, until: Duration },
    /// No pass has succeeded.
    First(First),
    /// All objects are as they should be, and the status does not say so.
    Finish { known: Option<Stored> },
    /// All objects were as they should be, and the status says so.
    Settled { known: Stored, next: Duration, last: Duration, checked: bool },
}

#[derive(Clone, Debug)]
struct First {
    known: Option<Stored>,
    began: Duration,
    told: Option<Duration>,
    failures: u32,
    not_before: Duration,
}

impl Leadership {
    /// An election was won.
    #[must_use]
    pub const fn begin(program: Program, pace: Pace) -> Self {
        Self { program, pace, phase: Phase::Unread }
    }

    /// What is to be done.
    #[must_use]
    pub fn next(&self, now: Duration) -> Step {
        let from = |at: Duration, step: Step| if now < at { Step::Wait(at) } else { step };
        match &self.phase {
            Phase::Unread => Step::Read,
            Phase::Stuck { until } => from(*until, Step::Read),
            Phase::Announce(write) => Step::Write(write.clone()),
            Phase::Exclude { blocked: None, .. } => Step::Look,
            Phase::Exclude { blocked: Some((_, until)), .. } => from(*until, Step::Look),
            Phase::Hush { until, .. } => from(*until, Step::Pass),
            Phase::First(first) => from(first.not_before, Step::Pass),
            Phase::Finish { known } => {
                let expected = known.as_ref().map_or(Expected::Absent, |known| Expected::At(known.revision));
                let status = Status::done_by(&self.program);
                Step::Write(Write { status, expected, nodes_since: None })
            }
            Phase::Settled { checked: true, .. } => Step::Pass,
            Phase::Settled { next, .. } => from(*next, Step::Read),
        }
    }

    /// What nodes must do before anything can go on.
    #[must_use]
    pub const fn blocked(&self) -> Option<&Blocked> {
        match &self.phase {
            Phase::Exclude { blocked: Some((blocked, _)), .. } => Some(blocked),
            _ => None,
        }
    }

    /// What can end a wait before its time.
    #[must_use]
    pub fn listens(&self) -> Listens {
        match &self.phase {
            Phase::Exclude { .. } => Listens::ToNodes,
            // One that passes soon anyway has heard it.
            Phase::Settled { next, last, .. } if *next > *last + BETWEEN_PASSES => Listens::ToObjects,
            _ => Listens::ToNothing,
        }
    }

    /// The status was read; `None` where there is none. The error is of one that cannot be understood.
    pub fn read<E>(&mut self, now: Duration, read: Result<Option<Stored>, E>) {
        let Ok(read) = read else {
            self.phase = Phase::Stuck { until: now + AGAIN };
            return;
        };
        if let Phase::Settled { known, checked, .. } = &mut self.phase
            && read.as_ref().is_some_and(|read| read == known)
        {
            *checked = true;
            return;
        }
        self.phase = self.after_reading(now, read);
    }

    fn after_reading(&self, now: Duration, read: Option<Stored>) -> Phase {
        let Some(stored) = read else { return Phase::First(First::begin(None, now)) };
        if stored.status == Status::done_by(&self.program) {
            return Phase::Hush { known: stored, until: now + self.pace.quiet };
        }
        let mut status = stored.status.clone();
        status.state = State::Working;
        let (own, wanted) = (self.program.release(), self.program.breaks_api_servers_below);
        if status.version.release() <= own && status.lowest_compatible >= wanted {
            if status == stored.status {
                return Phase::Hush { known: stored, until: now + self.pace.quiet };
            }
            let expected = Expected::At(stored.revision);
            return Phase::Announce(Write { status, expected, nodes_since: None });
        }
        if status.version.release() >= own {
            status.version = self.program.version.clone();
        }
        status.lowest_compatible = status.lowest_compatible.max(wanted);
        Phase::Exclude { status, revision: stored.revision, blocked: None }
    }

    /// Nodes were looked up.
    pub fn looked(&mut self, now: Duration, releases: &Releases) {
        let Phase::Exclude { status, revision, blocked } = &mut self.phase else { return };
        if let Err(why) = releases.may_exclude(&self.program) {
            *blocked = Some((why, now + AGAIN));
            return;
        }
        let (status, expected) = (status.clone(), Expected::At(*revision));
        self.phase = Phase::Announce(Write { status, expected, nodes_since: Some(releases.revision) });
    }

    /// Nodes have changed.
    pub fn nodes_changed(&mut self) {
        if let Phase::Exclude { blocked, .. } = &mut self.phase {
            *blocked = None;
        }
    }

    /// The status was written, and this is its revision.
    pub fn written(&mut self, now: Duration, status: Status, revision: i64) {
        let known = Stored { status, revision };
        self.phase = match &self.phase {
            Phase::Finish { .. } => {
                Phase::Settled { known, next: now + self.pace.every, last: now, checked: false }
            }
            _ => Phase::Hush { known, until: now + self.pace.quiet },
        };
    }

    /// The status was not written, because it, or a node, is no longer as it was seen; all is decided anew.
    pub fn not_written(&mut self) {
        self.phase = Phase::Unread;
    }

    /// etcd did not answer, and may have done what it was asked.
    pub fn unanswered(&mut self, now: Duration) {
        self.phase = Phase::Stuck { until: now + AGAIN };
    }

    /// A pass succeeded, or not. Says how loudly that is to be told; `random` is from 0 to 1.
    pub fn passed(&mut self, now: Duration, succeeded: bool, random: f64) -> Loudness {
        if let Phase::Hush { known, .. } = &self.phase {
            self.phase = Phase::First(First::begin(Some(known.clone()), now));
        }
        match &mut self.phase {
            Phase::First(first) if succeeded => {
                let known = first.known.take();
                let done = Status::done_by(&self.program);
                self.phase = match known {
                    Some(known) if known.status == done => {
                        Phase::Settled { known, next: now + self.pace.every, last: now, checked: false }
                    }
                    known => Phase::Finish { known },
                };
                Loudness::Quiet
            }
            Phase::First(first) => first.failed(now, random),
            Phase::Settled { next, last, checked, .. } => {
                (*next, *last, *checked) = (now + self.pace.every, now, false);
                Loudness::Aloud
            }
            _ => Loudness::Aloud,
        }
    }

    /// Objects were changed by somebody else.
    pub fn objects_changed(&mut self) {
        if let Phase::Settled { next, last, .. } = &mut self.phase {
            *next = (*next).min(*last + BETWEEN_PASSES);
        }
    }
}

impl First {
    const fn begin(known: Option<Stored>, now: Duration) -> Self {
        Self { known, began: now, told: None, failures: 0, not_before: now }
    }

    fn failed(&mut self, now: Duration, random: f64) -> Loudness {
        self.not_before = now + pause_after(self.failures, random);
        self.failures = self.failures.saturating_add(1);
        let due = self.told.map_or(self.began + TOLD_AFTER, |told| told + TOLD_EVERY);
        if now < due {
            return Loudness::Quiet;
        }
        self.told = Some(now);
        Loudness::Aloud
    }
}

/// The pause before the next try after so many before this one; half of it more or less, by `random` from 0 to 1.
fn pause_after(failures: u32, random: f64) -> Duration {
    let factor = 1.5_f64.powi(i32::try_from(failures.min(100)).unwrap_or(100));
    let whole = SHORTEST_PAUSE.mul_f64(factor.min(LONGEST_PAUSE.div_duration_f64(SHORTEST_PAUSE)));
    whole.mul_f64(0.5 + random.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests;
