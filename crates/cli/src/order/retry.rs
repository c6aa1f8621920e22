//! Retry of orders whose response was lost, with the same idempotency key.
//!
//! A server identifies an order by its idempotency key, carries it out once, and returns the first response again
//! ([`bmdb::orders::audit`]). So an order without a response is sent again with the same key, to the next server of the
//! context, for a bounded time that `decide_retry` decides. When the client gives up, its error contains the key,
//! which is also in the audit.

use std::time::Duration;

use backoff::ExponentialBackoff;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Response, Status};
use tonic_types::StatusExt as _;
use uuid::Uuid;

use crate::client::fleet_client::{ApiChannel, FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::order::outcome::OrderReply;
use crate::output::print_stderr;
use proto::fleet::v1;
use server::api::api_error::{ERROR_DOMAIN, OUTCOME_UNKNOWN};

/// How long an order is retried after its first response was lost.
const RETRY_WINDOW: Duration = Duration::from_secs(10);
/// Enough that no order is given up in the first six seconds, even if every wait is the shortest.
const MAX_ATTEMPTS: u32 = 8;
/// The waits between attempts. The shortest is 200 ms; how many fit into `RETRY_WINDOW` depends on their jitter.
const RETRY_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(400), factor: 2.0, max: Duration::from_millis(3200) };

/// What to do after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RetryDecision {
    /// The order was rejected: return the error.
    Fail,
    /// The outcome is unknown: send the order again after this wait.
    RetryAfter(Duration),
    /// The outcome is unknown, and there is no time left.
    GiveUp,
}

/// Decides what to do after attempt number `tries`, counted from 1. `broken` is whether the client created the status
/// because the connection ended. `lost_for` is the time since the first response was lost. `roll` is uniform in 0..1.
fn decide_retry(code: Code, broken: bool, tries: u32, lost_for: Duration, roll: f64) -> RetryDecision {
    // No server sends `Unknown`: it means a response that ended in the middle.
    let lost = matches!(code, Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown);
    if !lost && !broken {
        return RetryDecision::Fail;
    }
    let wait = RETRY_BACKOFF.delay(tries, roll);
    if tries >= MAX_ATTEMPTS || lost_for.saturating_add(wait) >= RETRY_WINDOW {
        RetryDecision::GiveUp
    } else {
        RetryDecision::RetryAfter(wait)
    }
}

/// Sends an order with the explicit idempotency key or a new one, and repeats it with the same key while its response
/// is lost. Records the exit code of its outcome, and what it has an effect on.
pub async fn send_order<A: OrderReply>(
    context: &CommandContext,
    reason: &str,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    send_order_through(&mut context.client.clone(), context, reason, give).await
}

/// Sends an order as [`send_order`] does, for a command that makes more calls: `client` stays connected to the server
/// that answered in the end.
pub async fn send_order_through<A: OrderReply>(
    client: &mut FleetClient,
    context: &CommandContext,
    reason: &str,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let flags = &context.order_flags;
    let order = v1::Order {
        reason: reason.to_owned(),
        idempotency_key: flags.idempotency_key.clone().unwrap_or_else(|| Uuid::new_v4().to_string()),
        dry_run: flags.dry_run,
        expected_version: None,
    };
    let answer = deliver_order(client, &order, give).await?;
    context.exit_record.record(answer.exit_code());
    context.order_targets.record(answer.targets());
    Ok(answer)
}

/// Sends a dry run of an order that may have to be confirmed. It has no idempotency key. Nothing of its
/// response is recorded: the exit code of the command and what it waits for follow from the order.
pub async fn preview_order<A>(
    context: &CommandContext,
    reason: &str,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let order = v1::Order { reason: reason.to_owned(), dry_run: true, ..v1::Order::default() };
    deliver_order(&mut context.client.clone(), &order, give).await
}

/// Sends an order, again if its response was lost.
async fn deliver_order<A>(
    client: &mut FleetClient,
    order: &v1::Order,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<A>, Status>,
) -> Result<A, CliError> {
    let mut result = give(client.channel(), order.clone()).await;
    let lost_at = Instant::now();
    let mut tries = 1;
    let mut may_have_run = false;
    loop {
        let status = match result {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) => status,
        };
        let broken = std::error::Error::source(&status).is_some();
        let decision = decide_retry(status.code(), broken, tries, lost_at.elapsed(), rand::random());
        may_have_run |=
            !order.dry_run && decision != RetryDecision::Fail && is_outcome_unknown(&status, broken);
        match decision {
            RetryDecision::Fail | RetryDecision::GiveUp if !may_have_run => {
                return Err(status_to_error(status));
            }
            RetryDecision::Fail => return Err(rejected_after_lost_response(&status, &order.idempotency_key)),
            RetryDecision::GiveUp => return Err(outcome_unknown(tries, &status, &order.idempotency_key)),
            RetryDecision::RetryAfter(wait) => {
                print_stderr(&format!(
                    "shepherdctl: no response from {} ({}); repeating the order",
                    client.current_server(),
                    status_text(&status)
                ));
                sleep(wait).await;
            }
        }
        tries += 1;
        let again = async {
            client.connect_to_next().await?;
            give(client.channel(), order.clone()).await
        };
        result = timeout(RETRY_WINDOW.saturating_sub(lost_at.elapsed()), again)
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
    }
}

/// Whether the order of this attempt may have been carried out. A shepherd that answers that it is unavailable has
/// carried out nothing, unless it reports that it does not know. The same answer of a proxy proves nothing.
fn is_outcome_unknown(status: &Status, broken: bool) -> bool {
    let info = status.get_details_error_info().filter(|info| info.domain == ERROR_DOMAIN);
    let carried_out_nothing =
        status.code() == Code::Unavailable && info.is_some_and(|info| info.reason != OUTCOME_UNKNOWN);
    broken || !carried_out_nothing
}

fn status_text(status: &Status) -> String {
    match status.message() {
        "" => format!("{:?}", status.code()),
        text => text.to_owned(),
    }
}

/// The error for a rejection after an earlier attempt whose response was lost, and which may have been carried out.
fn rejected_after_lost_response(status: &Status, key: &str) -> CliError {
    let text = format!(
        "{}. The response to an earlier attempt was lost, so the order may have been carried out; if so, the \
         audit has it with the idempotency key {key}",
        status_text(status)
    );
    CliError::Ended { exit: ExitCode::OutcomeUnknown, message: text }
}

fn outcome_unknown(tries: u32, status: &Status, key: &str) -> CliError {
    let message = format!(
        "the outcome of this order is unknown: it was sent {tries} times with the idempotency key {key}, \
         and no response came (last error: {}). If it was carried out, the audit has it with that key",
        status_text(status)
    );
    CliError::Ended { exit: ExitCode::OutcomeUnknown, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use server::api::api_error::error_status;

    #[test]
    fn unanswered_order_is_retried_for_a_bounded_time() {
        let millis = Duration::from_millis;
        for (code, broken, tries, lost_for, expected) in [
            (Code::Unavailable, false, 1, 0, RetryDecision::RetryAfter(millis(400))),
            (Code::DeadlineExceeded, false, 2, 300, RetryDecision::RetryAfter(millis(800))),
            // The client's own timeout, and a response without an end.
            (Code::Cancelled, true, 1, 0, RetryDecision::RetryAfter(millis(400))),
            (Code::Unknown, false, 1, 0, RetryDecision::RetryAfter(millis(400))),
            // A broken connection, whatever its code.
            (Code::Internal, true, 5, 5000, RetryDecision::RetryAfter(millis(3200))),
            (Code::Unavailable, false, MAX_ATTEMPTS, 0, RetryDecision::GiveUp),
            (Code::Unavailable, true, 1, 10_000, RetryDecision::GiveUp),
            (Code::Unavailable, false, 5, 6800, RetryDecision::GiveUp),
            (Code::Unavailable, false, u32::MAX, 60_000, RetryDecision::GiveUp),
            (Code::Internal, false, 1, 0, RetryDecision::Fail),
            (Code::InvalidArgument, false, 1, 0, RetryDecision::Fail),
            (Code::NotFound, false, 3, 0, RetryDecision::Fail),
            (Code::AlreadyExists, false, 2, 0, RetryDecision::Fail),
            (Code::Aborted, false, 1, 0, RetryDecision::Fail),
            (Code::Unauthenticated, false, 1, 0, RetryDecision::Fail),
            (Code::ResourceExhausted, false, 1, 0, RetryDecision::Fail),
        ] {
            let found = decide_retry(code, broken, tries, millis(lost_for), 1.0);
            assert_eq!(found, expected, "{code:?}, {broken}, {tries}, {lost_for}");
        }
        let soonest = decide_retry(Code::Unavailable, false, 1, Duration::ZERO, 0.0);
        assert_eq!(soonest, RetryDecision::RetryAfter(millis(200)));
    }

    #[test]
    fn only_a_shepherd_that_is_unavailable_proves_that_nothing_was_done() {
        let answer = |code, reason: &str| error_status(code, reason, "no");
        for (status, broken, expected) in [
            (answer(Code::Unavailable, "UNAVAILABLE"), false, false),
            (answer(Code::Unavailable, "SERVER_STOPPING"), false, false),
            (answer(Code::Unavailable, OUTCOME_UNKNOWN), false, true),
            (answer(Code::Unavailable, "UNAVAILABLE"), true, true),
            (answer(Code::DeadlineExceeded, "CALL_TIMEOUT"), false, true),
            // What a proxy answers for a shepherd whose response it lost.
            (Status::unavailable("upstream connect error"), false, true),
        ] {
            assert_eq!(is_outcome_unknown(&status, broken), expected, "{status:?}, {broken}");
        }
    }

    #[test]
    fn order_is_retried_for_six_seconds_at_least_and_for_its_window_at_most() {
        for roll in [0.0, 0.5, 1.0] {
            let (mut lost_for, mut tries) = (Duration::ZERO, 1);
            while let RetryDecision::RetryAfter(wait) =
                decide_retry(Code::Unavailable, false, tries, lost_for, roll)
            {
                lost_for += wait;
                tries += 1;
            }
            assert!(lost_for > Duration::from_secs(6) && lost_for < RETRY_WINDOW, "{roll}: {lost_for:?}");
            assert!((6..=MAX_ATTEMPTS).contains(&tries), "{roll}: {tries} tries");
        }
    }

    #[test]
    fn giving_up_reports_the_idempotency_key() {
        let given_up = outcome_unknown(6, &Status::unavailable("the line is dead"), "k-1");
        assert_eq!(given_up.exit_code(), ExitCode::OutcomeUnknown);
        let text = given_up.to_string();
        assert!(text.contains("idempotency key k-1") && text.contains("the line is dead"), "{text}");
        let later = rejected_after_lost_response(&Status::unauthenticated("the token is revoked"), "k-1");
        assert_eq!(later.exit_code(), ExitCode::OutcomeUnknown);
        let text = later.to_string();
        assert!(text.starts_with("the token is revoked. ") && text.ends_with("key k-1"), "{text}");
    }
}
