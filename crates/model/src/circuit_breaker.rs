//! Circuit breaker for one provider: closed, open, half-open.
//!
//! An API that accepts a call and never answers holds a worker until a time limit passes, once for every machine of
//! that provider. After [`FAILURE_THRESHOLD`] such calls in a row the breaker opens: no call is made, the work is
//! postponed, and the workers serve other providers. When the cooldown is over the breaker is half-open: one caller may
//! try while the others still wait. Any answer closes the breaker; another timeout opens it for twice as long.
//!
//! An error that comes at once is an answer. It costs no worker any time, and backoffs handle it. Timeouts count as
//! consecutive only while they are at one endpoint. A provider with many endpoints, such as a power controller for each
//! machine, is not broken because some of them are.
//!
//! All times are durations since any fixed moment, passed in by the caller.

use std::time::Duration;

use backoff::ExponentialBackoff;

use crate::time::Span;

/// Consecutive timeouts after which the breaker opens.
pub const FAILURE_THRESHOLD: u32 = 3;
/// A call that fails after this long has held a worker for nothing.
pub const SLOW_CALL_THRESHOLD: Duration = Duration::from_secs(3);
/// How long no call is made.
const COOLDOWN: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_secs(30), factor: 2.0, max: Duration::from_mins(5) };
/// How long other callers wait while one tries, before they try again.
const HALF_OPEN_RETRY: Duration = Duration::from_secs(10);

/// The outcome of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It was answered, whatever the answer was.
    Responded,
    /// The call failed after [`SLOW_CALL_THRESHOLD`] or later.
    TimedOut {
        /// The address that did not answer.
        endpoint: String,
        /// What happened, as a sentence.
        message: String,
    },
}

impl CallOutcome {
    /// Classifies a call that took `took`. `failure` is where and why it failed, if it failed in a transient way.
    #[must_use]
    pub fn classify(took: Duration, failure: Option<(&str, &str)>) -> Self {
        match failure {
            Some((endpoint, sentence)) if took >= SLOW_CALL_THRESHOLD => {
                Self::TimedOut { endpoint: endpoint.to_owned(), message: sentence.to_owned() }
            }
            _ => Self::Responded,
        }
    }
}

/// The breaker is open: no call may be made now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BreakerOpen {
    /// How long to wait before the next try.
    pub retry_after: Duration,
    /// Why, as a sentence.
    pub reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BreakerState {
    Closed,
    /// No call is made before `until`, after a pause of `cooldown`.
    Open {
        until: Duration,
        cooldown: Duration,
    },
    /// One caller tries, after a pause of `cooldown`.
    HalfOpen {
        cooldown: Duration,
    },
}

/// The breaker of one provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CircuitBreaker {
    state: BreakerState,
    consecutive_timeouts: u32,
    endpoint: String,
    last_message: String,
}

impl Default for CircuitBreaker {
    fn default() -> Self {
        Self {
            state: BreakerState::Closed,
            consecutive_timeouts: 0,
            endpoint: String::new(),
            last_message: String::new(),
        }
    }
}

impl CircuitBreaker {
    /// Whether a call may be made at `now`. A caller that is admitted while the breaker is not closed must report the
    /// outcome, by [`CircuitBreaker::record_outcome`] or [`CircuitBreaker::abandon_probe`].
    pub fn admit_call(&mut self, now: Duration) -> Result<(), BreakerOpen> {
        let wait = match self.state {
            BreakerState::Closed => return Ok(()),
            BreakerState::Open { until, cooldown: pause } if until <= now => {
                self.state = BreakerState::HalfOpen { cooldown: pause };
                return Ok(());
            }
            BreakerState::Open { until, .. } => until.saturating_sub(now),
            BreakerState::HalfOpen { .. } => HALF_OPEN_RETRY,
        };
        Err(BreakerOpen { retry_after: wait, reason: self.reason() })
    }

    /// Records the outcome of a call that ended at `now`.
    pub fn record_outcome(&mut self, outcome: CallOutcome, now: Duration) {
        let CallOutcome::TimedOut { endpoint, message: sentence } = outcome else {
            *self = Self::default();
            return;
        };
        self.consecutive_timeouts =
            if self.endpoint == endpoint { self.consecutive_timeouts.saturating_add(1) } else { 1 };
        self.endpoint = endpoint;
        self.last_message = sentence;
        let pause = match self.state {
            BreakerState::Closed if self.consecutive_timeouts < FAILURE_THRESHOLD => return,
            BreakerState::Closed => COOLDOWN.nominal(1),
            // This call started before the breaker opened.
            BreakerState::Open { .. } => return,
            BreakerState::HalfOpen { cooldown: pause } => COOLDOWN.next_nominal(pause),
        };
        self.state = BreakerState::Open { until: now + pause, cooldown: pause };
    }

    /// Records that the admitted caller made no call after all, so that the next one may.
    pub fn abandon_probe(&mut self, now: Duration) {
        if let BreakerState::HalfOpen { cooldown: pause } = self.state {
            self.state = BreakerState::Open { until: now, cooldown: pause };
        }
    }

    /// Whether it is open or half-open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.state != BreakerState::Closed
    }

    fn reason(&self) -> String {
        let pause = match self.state {
            BreakerState::Closed => Duration::ZERO,
            BreakerState::Open { cooldown: pause, .. } | BreakerState::HalfOpen { cooldown: pause } => pause,
        };
        format!(
            "the provider is left alone for {}, because {} calls in a row hung, and each held a worker; the last: {}",
            Span(pause),
            self.consecutive_timeouts,
            self.last_message
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn timed_out_at(endpoint: &str) -> CallOutcome {
        CallOutcome::classify(seconds(30), Some((endpoint, "no answer in time")))
    }

    fn open_breaker() -> CircuitBreaker {
        let mut breaker = CircuitBreaker::default();
        for at in 0..u64::from(FAILURE_THRESHOLD) {
            assert_eq!(breaker.admit_call(seconds(at)), Ok(()));
            breaker.record_outcome(timed_out_at("a"), seconds(at));
        }
        breaker
    }

    fn wait(breaker: &mut CircuitBreaker, now: u64) -> Option<u64> {
        breaker.admit_call(seconds(now)).err().map(|open| open.retry_after.as_secs())
    }

    #[test]
    fn only_a_slow_failure_counts_as_a_timeout() {
        let failure = Some(("a", "HTTP 503"));
        for (took, failure, hangs) in [
            (seconds(0), None, false),
            (seconds(40), None, false),
            (seconds(0), failure, false),
            (seconds(2), failure, false),
            (seconds(3), failure, true),
            (seconds(30), failure, true),
        ] {
            assert_eq!(
                CallOutcome::classify(took, failure) != CallOutcome::Responded,
                hangs,
                "{took:?} {failure:?}"
            );
        }
    }

    #[test]
    fn consecutive_timeouts_at_one_endpoint_open_it() {
        let answered = || CallOutcome::Responded;
        for (name, outcomes, open) in [
            ("two", vec![timed_out_at("a"), timed_out_at("a")], false),
            ("three", vec![timed_out_at("a"), timed_out_at("a"), timed_out_at("a")], true),
            (
                "an answer between",
                vec![timed_out_at("a"), timed_out_at("a"), answered(), timed_out_at("a")],
                false,
            ),
            (
                "three of many controllers",
                vec![timed_out_at("a"), timed_out_at("b"), timed_out_at("c")],
                false,
            ),
            (
                "one controller of many",
                vec![timed_out_at("b"), timed_out_at("a"), timed_out_at("a"), timed_out_at("a")],
                true,
            ),
            (
                "an answer after it opened",
                vec![timed_out_at("a"), timed_out_at("a"), timed_out_at("a"), answered()],
                false,
            ),
        ] {
            let mut breaker = CircuitBreaker::default();
            for one in outcomes {
                breaker.record_outcome(one, seconds(0));
            }
            assert_eq!(breaker.is_open(), open, "{name}");
            assert_eq!(breaker.admit_call(seconds(0)).is_err(), open, "{name}");
        }
    }

    #[test]
    fn one_probe_after_the_cooldown_and_each_failure_doubles_it() {
        let mut breaker = open_breaker();
        assert_eq!(wait(&mut breaker, 2), Some(30));
        assert_eq!(wait(&mut breaker, 31), Some(1));
        let mut now = 32;
        for pause in [60, 120, 240, 300, 300] {
            assert_eq!(wait(&mut breaker, now), None, "one may try");
            assert_eq!(wait(&mut breaker, now), Some(10), "and nobody else meanwhile");
            breaker.record_outcome(timed_out_at("a"), seconds(now));
            assert_eq!(wait(&mut breaker, now), Some(pause));
            now += pause;
        }
        assert_eq!(wait(&mut breaker, now), None);
        breaker.record_outcome(CallOutcome::Responded, seconds(now));
        assert_eq!(
            breaker,
            CircuitBreaker::default(),
            "an answer closes it, and forgets how long the pause was"
        );
    }

    #[test]
    fn abandoned_probe_lets_the_next_caller_probe() {
        let mut breaker = open_breaker();
        assert_eq!(wait(&mut breaker, 40), None);
        breaker.abandon_probe(seconds(41));
        assert_eq!(wait(&mut breaker, 41), None);
        let mut closed = CircuitBreaker::default();
        closed.abandon_probe(seconds(41));
        assert_eq!(closed, CircuitBreaker::default());
    }

    #[test]
    fn calls_begun_before_it_opened_do_not_extend_the_cooldown() {
        let mut breaker = open_breaker();
        breaker.record_outcome(timed_out_at("a"), seconds(20));
        assert_eq!(wait(&mut breaker, 20), Some(12));
    }

    #[test]
    fn reason_says_how_often_and_what_happened_last() {
        let open = open_breaker().admit_call(seconds(2)).unwrap_err();
        assert_eq!(
            open.reason,
            "the provider is left alone for 30s, because 3 calls in a row hung, and each held a worker; the last: no \
             answer in time"
        );
    }
}
