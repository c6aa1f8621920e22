//! Orders through the API whose answer is lost: given again, until somebody says what became of them.
//!
//! A server knows an order by its idempotency key, carries it out once, and answers it again as it did then
//! ([`crate::bmdb::audit`]). So what got no answer is given again with the same key, at the next server of
//! the context, for a bounded time that [`step`] decides. Who gives up says the key: the audit has it.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Response, Status};

use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::order_key;
use crate::cli::output::say;
use crate::cli::remote::{Authorized, Remote, refused};
use crate::proto::fleet::v1;

/// How long an order is given again after its first answer was lost, and how often it is given at most.
const BOUND: Duration = Duration::from_secs(10);
const MOST_TRIES: u32 = 6;
/// The first wait; each of the others is twice the one before it.
const FIRST_WAIT: Duration = Duration::from_millis(200);

/// What follows a try that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It was refused: that is the answer.
    Heed,
    /// Nobody knows what became of it: give it again after this wait.
    Again(Duration),
    /// Nobody knows, and there is no time left.
    GiveUp,
}

/// Decides what follows the try of that number, counted from 1. `broken` is whether this side made the
/// status, because the connection ended; `lost_for` is how long ago the first answer was lost.
#[must_use]
pub fn step(code: Code, broken: bool, tries: u32, lost_for: Duration) -> Step {
    // No server says `Unknown`: it stands for an answer that ended in its middle.
    let lost = matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown);
    if !lost && !broken {
        return Step::Heed;
    }
    let wait = FIRST_WAIT.saturating_mul(1 << tries.saturating_sub(1).min(10));
    if tries >= MOST_TRIES || lost_for.saturating_add(wait) >= BOUND {
        Step::GiveUp
    } else {
        Step::Again(wait)
    }
}

/// Gives an order with a key of its own or the one that was typed, and again with the same key while its answer is lost. The server
/// that answered in the end is the one that is asked from then on.
pub async fn order<A>(
    remote: &mut Remote,
    reason: &str,
    give: impl AsyncFn(Authorized, v1::Order) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let order = v1::Order {
        reason: reason.to_owned(),
        idempotency_key: order_key::key(),
        dry_run: dry_run::asked(),
        expected_version: None,
    };
    let mut said = give(remote.service(), order.clone()).await;
    let lost_at = Instant::now();
    let mut tries = 1;
    loop {
        let status = match said {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        let broken = std::error::Error::source(&status).is_some();
        match step(status.code(), broken, tries, lost_at.elapsed()) {
            Step::Heed if tries == 1 => return Err(refused(status)),
            Step::Heed => return Err(refused_later(&status, &order.idempotency_key)),
            Step::GiveUp => return Err(unknown(tries, &status, &order.idempotency_key)),
            Step::Again(wait) => {
                say(&format!(
                    "shepherdctl: no answer from {} ({}); giving the same order again",
                    remote.server(),
                    words(&status)
                ));
                sleep(wait).await;
            }
        }
        tries += 1;
        let again = async {
            remote.go_on().await?;
            give(remote.service(), order.clone()).await
        };
        said = timeout(BOUND.saturating_sub(lost_at.elapsed()), again)
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
    }
}

fn words(status: &Status) -> String {
    match status.message() {
        "" => format!("{:?}", status.code()),
        said => said.to_owned(),
    }
}

/// A refusal of what may have been carried out before: by a try whose answer was lost.
fn refused_later(status: &Status, key: &str) -> CliError {
    let said = format!(
        "{}. The answer to an earlier try was lost, so the order may have been carried out then; the audit \
         has it if so, with the idempotency key {key}",
        words(status)
    );
    refused(Status::new(status.code(), said))
}

fn unknown(tries: u32, status: &Status, key: &str) -> CliError {
    CliError::Failed(format!(
        "what became of this order is unknown: it was given {tries} times with the idempotency key {key}, \
         and no answer came (the last time: {}). If it was carried out, the audit has it with that key",
        words(status)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_got_no_answer_is_given_again_for_a_while() {
        let millis = Duration::from_millis;
        for (code, broken, tries, lost_for, expected) in [
            (Code::Unavailable, false, 1, 0, Step::Again(millis(200))),
            (Code::DeadlineExceeded, false, 2, 300, Step::Again(millis(400))),
            // How this side calls its own timeout, and an answer without an end.
            (Code::Cancelled, true, 1, 0, Step::Again(millis(200))),
            (Code::Unknown, false, 1, 0, Step::Again(millis(200))),
            // A connection that broke, whatever it is called.
            (Code::Internal, true, 5, 5000, Step::Again(millis(3200))),
            (Code::Unavailable, false, MOST_TRIES, 0, Step::GiveUp),
            (Code::Unavailable, true, 1, 10_000, Step::GiveUp),
            (Code::Unavailable, false, 5, 6800, Step::GiveUp),
            (Code::Unavailable, false, u32::MAX, 60_000, Step::GiveUp),
            (Code::Internal, false, 1, 0, Step::Heed),
            (Code::InvalidArgument, false, 1, 0, Step::Heed),
            (Code::NotFound, false, 3, 0, Step::Heed),
            (Code::AlreadyExists, false, 2, 0, Step::Heed),
            (Code::Aborted, false, 1, 0, Step::Heed),
            (Code::Unauthenticated, false, 1, 0, Step::Heed),
            (Code::ResourceExhausted, false, 1, 0, Step::Heed),
        ] {
            let found = step(code, broken, tries, millis(lost_for));
            assert_eq!(found, expected, "{code:?}, {broken}, {tries}, {lost_for}");
        }
    }

    #[test]
    fn all_waits_together_stay_within_the_bound() {
        let (mut lost_for, mut tries) = (Duration::ZERO, 1);
        while let Step::Again(wait) = step(Code::Unavailable, false, tries, lost_for) {
            lost_for += wait;
            tries += 1;
        }
        assert!(tries > 3 && lost_for < BOUND, "{tries} tries, {lost_for:?}");
    }

    #[test]
    fn whoever_gives_up_says_the_key() {
        let given_up = unknown(6, &Status::unavailable("the line is dead"), "k-1");
        assert_eq!(given_up.exit_code(), 1);
        let said = given_up.to_string();
        assert!(said.contains("idempotency key k-1") && said.contains("the line is dead"), "{said}");
        let later = refused_later(&Status::unauthenticated("the token is revoked"), "k-1");
        assert_eq!(later.exit_code(), 2);
        let said = later.to_string();
        assert!(said.starts_with("the token is revoked. ") && said.ends_with("key k-1"), "{said}");
    }
}
