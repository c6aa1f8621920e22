//! Reconnection of commands that run for long: a watch, and reads that are repeated until a condition holds.
//!
//! A shepherd may stop or die while such a command runs. Then the command continues at the next server of the context,
//! for as long as `decide_reconnect` decides. `PersistentReader` does that for reads: it repeats one that nobody
//! answers, and returns every other error at once.

use std::time::Duration;

use backoff::ExponentialBackoff;
use tokio::time::{Instant, sleep, timeout_at};
use tonic::Code;

use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::output::print_stderr;

/// How long to retry while no server answers.
pub(crate) const OUTAGE_LIMIT: Duration = Duration::from_mins(5);
/// The waits before a reconnection. The shortest is 200 ms.
const RECONNECT_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(400), factor: 2.0, max: Duration::from_secs(5) };
/// How long an attempt to read may take, even if the reader has less time left.
const MIN_ATTEMPT: Duration = Duration::from_secs(10);

/// What to do after the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReconnectDecision {
    /// The watch was rejected: return the error.
    Fail,
    /// Start again, without a resume token.
    Restart,
    /// Resume at the next server after this wait.
    ResumeAfter(Duration),
    /// No server has answered for too long.
    GiveUp,
}

/// Decides what to do after the end of a stream with this code. `broken` is whether the client created the status
/// because the connection ended. `failures` counts the streams in a row without a message, and `unheard` is the time
/// since the last message. `roll` is uniform in 0..1.
pub(crate) fn decide_reconnect(
    code: Code,
    broken: bool,
    failures: u32,
    unheard: Duration,
    roll: f64,
) -> ReconnectDecision {
    let passes = matches!(
        code,
        Code::Ok
            | Code::Unavailable
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            // The server has too many watches, or this client reads too slowly.
            | Code::ResourceExhausted
    );
    match code {
        Code::OutOfRange => ReconnectDecision::Restart,
        _ if !passes && !broken => ReconnectDecision::Fail,
        _ if unheard >= OUTAGE_LIMIT => ReconnectDecision::GiveUp,
        _ => ReconnectDecision::ResumeAfter(RECONNECT_BACKOFF.delay(failures.saturating_add(1), roll)),
    }
}

/// How long to wait before a read is repeated; `None` to return its error. `silence` is the time since the last answer,
/// and `left` the time that the reader has. `roll` is uniform in 0..1.
fn decide_repetition(
    error: ExitCode,
    failures: u32,
    silence: Duration,
    left: Option<Duration>,
    roll: f64,
) -> Option<Duration> {
    let wait = RECONNECT_BACKOFF.delay(failures.saturating_add(1), roll);
    let has_time = silence < OUTAGE_LIMIT && left.is_none_or(|left| wait < left);
    (error == ExitCode::Unreachable && has_time).then_some(wait)
}

/// A client that repeats reads while nobody answers.
pub(crate) struct PersistentReader {
    client: FleetClient,
    last_answer_at: Instant,
    failures: u32,
}

impl PersistentReader {
    /// A reader that begins at the server that the client is connected to.
    pub(crate) fn new(client: FleetClient) -> Self {
        Self { client, last_answer_at: Instant::now(), failures: 0 }
    }

    /// The client, connected to the server that answered last.
    pub(crate) const fn client(&self) -> &FleetClient {
        &self.client
    }

    /// Reads, and repeats that at the next server while nobody answers. The last error is returned when no server has
    /// answered for five minutes, or when no time is left before `until`.
    pub(crate) async fn read<T>(
        &mut self,
        until: Option<Instant>,
        read: impl AsyncFn(FleetClient) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        loop {
            let error = match self.attempt(until, &read).await {
                Ok(answer) => {
                    (self.last_answer_at, self.failures) = (Instant::now(), 0);
                    return Ok(answer);
                }
                Err(error) => error,
            };
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let (exit, silence) = (error.exit_code(), self.last_answer_at.elapsed());
            let decision = decide_repetition(exit, self.failures, silence, left, rand::random());
            let Some(wait) = decision else { return Err(error) };
            self.failures = self.failures.saturating_add(1);
            let former = self.client.current_server().to_owned();
            sleep(wait).await;
            // Not fatal: if this fails, the next attempt fails too and reports it.
            drop(self.client.connect_to_next().await);
            // Once for an outage.
            if self.failures == 1 {
                print_stderr(&format!(
                    "shepherdctl: no answer from {former} ({error}); continuing at {}",
                    self.client.current_server()
                ));
            }
        }
    }

    async fn attempt<T>(
        &self,
        until: Option<Instant>,
        read: &impl AsyncFn(FleetClient) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let answer = read(self.client.clone());
        let Some(until) = until else { return answer.await };
        let limit = until.max(Instant::now() + MIN_ATTEMPT);
        timeout_at(limit, answer).await.unwrap_or_else(|_| {
            let message = format!("{} did not answer in time; try again", self.client.current_server());
            Err(CliError::Ended { exit: ExitCode::Unreachable, message })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_errors_are_retried_for_a_bounded_time() {
        let (millis, long) = (Duration::from_millis, OUTAGE_LIMIT);
        for (code, broken, failures, unheard, expected) in [
            (Code::Unavailable, false, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Ok, false, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Unknown, true, 2, millis(0), ReconnectDecision::ResumeAfter(millis(1600))),
            (Code::DeadlineExceeded, false, 99, millis(0), ReconnectDecision::ResumeAfter(millis(5000))),
            (Code::ResourceExhausted, false, 1, millis(0), ReconnectDecision::ResumeAfter(millis(800))),
            (Code::Internal, true, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Internal, false, 0, millis(0), ReconnectDecision::Fail),
            (Code::Unauthenticated, false, 0, millis(0), ReconnectDecision::Fail),
            (Code::InvalidArgument, false, 0, long, ReconnectDecision::Fail),
            (Code::OutOfRange, false, 0, long, ReconnectDecision::Restart),
            (Code::Unavailable, false, 3, long, ReconnectDecision::GiveUp),
        ] {
            assert_eq!(
                decide_reconnect(code, broken, failures, unheard, 1.0),
                expected,
                "{code:?} {broken} {failures}"
            );
        }
        let soonest = decide_reconnect(Code::Unavailable, false, 0, millis(0), 0.0);
        assert_eq!(soonest, ReconnectDecision::ResumeAfter(millis(200)));
    }

    #[test]
    fn read_is_repeated_while_nobody_answers_and_time_is_left() {
        let (millis, soon) = (Duration::from_millis, Duration::ZERO);
        for (error, failures, silence, left, expected) in [
            (ExitCode::Unreachable, 0, soon, None, Some(millis(400))),
            (ExitCode::Unreachable, 2, soon, Some(millis(2000)), Some(millis(1600))),
            (ExitCode::Unreachable, 99, soon, None, Some(millis(5000))),
            (ExitCode::Unreachable, 2, soon, Some(millis(1600)), None),
            (ExitCode::Unreachable, 0, soon, Some(soon), None),
            (ExitCode::Unreachable, 0, OUTAGE_LIMIT, None, None),
            (ExitCode::NotFound, 0, soon, None, None),
            (ExitCode::Refused, 0, soon, None, None),
        ] {
            let found = decide_repetition(error, failures, silence, left, 1.0);
            assert_eq!(found, expected, "{error:?} {failures} {silence:?} {left:?}");
        }
    }
}
