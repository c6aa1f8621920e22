//! The breaker of one provider: who hangs is asked less and less, so that workers serve the others.
//!
//! An API that takes a call and never answers holds a worker until a time limit
//! passes, once for every machine of that provider. After [`OPENS_AFTER`] such
//! calls in a row the breaker opens: nobody is asked, and the work is put off.
//! When the pause is over one caller may try, while the others still wait; it
//! closes the breaker with any answer, or opens it for twice as long.
//!
//! An error that comes at once is an answer. It costs no worker anything, and is
//! what backoffs are for. Calls in a row count while they hang at one endpoint: a
//! provider that speaks to many, such as a power controller for each machine, is
//! not broken because some of them are.
//!
//! Time is given as what has passed since any fixed moment.

use std::time::Duration;

use crate::model::time::Span;

/// Calls in a row that hang before nobody is asked any more.
pub const OPENS_AFTER: u32 = 3;
/// A call that fails after this long has held a worker for nothing.
pub const HANGS_AFTER: Duration = Duration::from_secs(3);
const FIRST_PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// How long the others wait while one tries, before they ask again.
const WHILE_TRIED: Duration = Duration::from_secs(10);

/// What became of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// It was answered, whatever the answer was.
    Answered,
    /// Nobody answered.
    Hung {
        /// The address that it hung at.
        endpoint: String,
        /// What happened, as a sentence.
        sentence: String,
    },
}

impl Heard {
    /// What a call tells that took `took`; `failure` is where and why it failed, if it did in a way that may pass.
    #[must_use]
    pub fn of(took: Duration, failure: Option<(&str, &str)>) -> Self {
        match failure {
            Some((endpoint, sentence)) if took >= HANGS_AFTER => {
                Self::Hung { endpoint: endpoint.to_owned(), sentence: sentence.to_owned() }
            }
            _ => Self::Answered,
        }
    }
}

/// Nobody may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// When asking again makes sense.
    pub wait: Duration,
    /// Why, as a sentence.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Closed,
    /// Nobody is asked before that moment, after a pause of that length.
    Open {
        until: Duration,
        pause: Duration,
    },
    /// One asks, after a pause of that length.
    Tried {
        pause: Duration,
    },
}

/// The breaker of one provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    state: State,
    hung: u32,
    endpoint: String,
    last: String,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed, hung: 0, endpoint: String::new(), last: String::new() }
    }
}

impl Breaker {
    /// Whether the provider may be asked at `now`. Who was let in while it is not closed tells what came of
    /// it, by [`Breaker::heard`] or [`Breaker::left`].
    pub fn admit(&mut self, now: Duration) -> Result<(), Open> {
        let wait = match self.state {
            State::Closed => return Ok(()),
            State::Open { until, pause } if until <= now => {
                self.state = State::Tried { pause };
                return Ok(());
            }
            State::Open { until, .. } => until.saturating_sub(now),
            State::Tried { .. } => WHILE_TRIED,
        };
        Err(Open { wait, reason: self.reason() })
    }

    /// Takes note of what became of a call that ended at `now`.
    pub fn heard(&mut self, heard: Heard, now: Duration) {
        let Heard::Hung { endpoint, sentence } = heard else {
            *self = Self::default();
            return;
        };
        self.hung = if self.endpoint == endpoint { self.hung.saturating_add(1) } else { 1 };
        self.endpoint = endpoint;
        self.last = sentence;
        let pause = match self.state {
            State::Closed if self.hung < OPENS_AFTER => return,
            State::Closed => FIRST_PAUSE,
            // A call that began before it opened.
            State::Open { .. } => return,
            State::Tried { pause } => (pause * 2).min(LONGEST_PAUSE),
        };
        self.state = State::Open { until: now + pause, pause };
    }

    /// Takes note that who was let in has asked nothing after all: the next one may.
    pub fn left(&mut self, now: Duration) {
        if let State::Tried { pause } = self.state {
            self.state = State::Open { until: now, pause };
        }
    }

    /// Whether it is open, or only one may try.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state != State::Closed
    }

    fn reason(&self) -> String {
        let pause = match self.state {
            State::Closed => Duration::ZERO,
            State::Open { pause, .. } | State::Tried { pause } => pause,
        };
        format!(
            "the provider is left alone for {}, because {} calls in a row hung, and each held a worker; the last: {}",
            Span(pause),
            self.hung,
            self.last
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn hung_at(endpoint: &str) -> Heard {
        Heard::of(seconds(30), Some((endpoint, "no answer in time")))
    }

    fn opened() -> Breaker {
        let mut breaker = Breaker::default();
        for at in 0..u64::from(OPENS_AFTER) {
            assert_eq!(breaker.admit(seconds(at)), Ok(()));
            breaker.heard(hung_at("a"), seconds(at));
        }
        breaker
    }

    fn wait(breaker: &mut Breaker, now: u64) -> Option<u64> {
        breaker.admit(seconds(now)).err().map(|open| open.wait.as_secs())
    }

    #[test]
    fn only_a_failure_after_a_while_is_a_hanging_call() {
        let failure = Some(("a", "HTTP 503"));
        for (took, failure, hangs) in [
            (seconds(0), None, false),
            (seconds(40), None, false),
            (seconds(0), failure, false),
            (seconds(2), failure, false),
            (seconds(3), failure, true),
            (seconds(30), failure, true),
        ] {
            assert_eq!(Heard::of(took, failure) != Heard::Answered, hangs, "{took:?} {failure:?}");
        }
    }

    #[test]
    fn calls_in_a_row_that_hang_at_one_endpoint_open_it() {
        let answered = || Heard::Answered;
        for (name, heard, open) in [
            ("two", vec![hung_at("a"), hung_at("a")], false),
            ("three", vec![hung_at("a"), hung_at("a"), hung_at("a")], true),
            ("an answer between", vec![hung_at("a"), hung_at("a"), answered(), hung_at("a")], false),
            ("three of many controllers", vec![hung_at("a"), hung_at("b"), hung_at("c")], false),
            ("one controller of many", vec![hung_at("b"), hung_at("a"), hung_at("a"), hung_at("a")], true),
            ("an answer after it opened", vec![hung_at("a"), hung_at("a"), hung_at("a"), answered()], false),
        ] {
            let mut breaker = Breaker::default();
            for one in heard {
                breaker.heard(one, seconds(0));
            }
            assert_eq!(breaker.is_open(), open, "{name}");
            assert_eq!(breaker.admit(seconds(0)).is_err(), open, "{name}");
        }
    }

    #[test]
    fn one_tries_when_the_pause_is_over_and_each_try_in_vain_doubles_it() {
        let mut breaker = opened();
        assert_eq!(wait(&mut breaker, 2), Some(30));
        assert_eq!(wait(&mut breaker, 31), Some(1));
        let mut now = 32;
        for pause in [60, 120, 240, 300, 300] {
            assert_eq!(wait(&mut breaker, now), None, "one may try");
            assert_eq!(wait(&mut breaker, now), Some(10), "and nobody else meanwhile");
            breaker.heard(hung_at("a"), seconds(now));
            assert_eq!(wait(&mut breaker, now), Some(pause));
            now += pause;
        }
        assert_eq!(wait(&mut breaker, now), None);
        breaker.heard(Heard::Answered, seconds(now));
        assert_eq!(breaker, Breaker::default(), "an answer closes it, and forgets how long the pause was");
    }

    #[test]
    fn who_asks_nothing_after_all_leaves_the_try_to_the_next() {
        let mut breaker = opened();
        assert_eq!(wait(&mut breaker, 40), None);
        breaker.left(seconds(41));
        assert_eq!(wait(&mut breaker, 41), None);
        let mut closed = Breaker::default();
        closed.left(seconds(41));
        assert_eq!(closed, Breaker::default());
    }

    #[test]
    fn calls_that_began_before_it_opened_do_not_lengthen_the_pause() {
        let mut breaker = opened();
        breaker.heard(hung_at("a"), seconds(20));
        assert_eq!(wait(&mut breaker, 20), Some(12));
    }

    #[test]
    fn reason_says_how_often_and_what_happened_last() {
        let open = opened().admit(seconds(2)).unwrap_err();
        assert_eq!(
            open.reason,
            "the provider is left alone for 30s, because 3 calls in a row hung, and each held a worker; the last: no \
             answer in time"
        );
    }
}
