//! End of a response stream: its credential ends, its client is gone or reads too slowly, or it fails.
//!
//! Streams last longer than a call, so they check what a call checks only at its start. [`closing_stream`] sends the
//! end.
//!
//! [`closing_stream`]: crate::api::closing_stream

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::SendTimeoutError;
use tokio::time::Instant;
use tonic::{Code, Status};
use uuid::Uuid;

use crate::api::api_error::error_status;
use crate::api::context::ApiContext;

/// Interval between two checks of the credential.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long the check of the credential may fail.
const CREDENTIAL_CHECK_LIMIT: Duration = Duration::from_secs(10);

/// Why a watch, or another stream, ended.
#[derive(Debug)]
pub(super) enum StreamEnd {
    /// The client has closed the stream.
    ClientGone,
    /// The stream ends with this status.
    Failed(Status),
}

/// Waits until a credential is no longer active, or could not be checked for too long. A login to the database does not
/// end while its connection exists.
pub(super) async fn wait_for_credential_end(context: &ApiContext, credential: Option<Uuid>) -> StreamEnd {
    let Some(credential) = credential else { return std::future::pending().await };
    // The middleware has just authenticated it.
    let mut good_at = Instant::now();
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let requested_at = Instant::now();
        let answer = tokio::time::timeout_at(
            good_at + CREDENTIAL_CHECK_LIMIT,
            context.credential_checks.is_active(credential),
        )
        .await;
        let answer = answer.unwrap_or_else(|_| {
            let text = "for too long, this shepherd could not check whether the credential of this stream is \
                        still valid; resume in a moment, or at another shepherd";
            Err(error_status(Code::Unavailable, "UNAVAILABLE", text))
        });
        if matches!(answer, Ok(true)) {
            good_at = requested_at;
        }
        if let Some(status) = credential_end_status(answer, good_at.elapsed()) {
            return StreamEnd::Failed(status);
        }
    }
}

/// Status with which a stream ends after this check of its credential; `None` if it goes on. `unsure_for` is the time
/// since the last successful check.
fn credential_end_status(answer: Result<bool, Status>, unsure_for: Duration) -> Option<Status> {
    match answer {
        Ok(true) => None,
        Ok(false) => {
            let text = "the credential of this stream was revoked, or has expired";
            Some(error_status(Code::Unauthenticated, "INVALID_CREDENTIAL", text))
        }
        Err(status) if is_transient(status.code(), unsure_for, CREDENTIAL_CHECK_LIMIT) => None,
        Err(status) => Some(status),
    }
}

/// Whether an error is retried, after failing for `lasted`.
pub(super) fn is_transient(code: Code, lasted: Duration, patience: Duration) -> bool {
    code == Code::Unavailable && lasted < patience
}

/// Sends a message to the client if the buffer has space in time.
pub(super) async fn send_within<T>(
    sender: &mpsc::Sender<T>,
    message: T,
    within: Duration,
) -> Result<(), StreamEnd> {
    match sender.send_timeout(message, within).await {
        Ok(()) => Ok(()),
        Err(SendTimeoutError::Closed(_)) => Err(StreamEnd::ClientGone),
        Err(SendTimeoutError::Timeout(_)) => {
            let text = format!(
                "you read too slowly: there was no room for another message for {} seconds; resume with \
                 the last token you received, and read faster, or watch fewer machines",
                within.as_secs()
            );
            Err(StreamEnd::Failed(error_status(Code::ResourceExhausted, "SLOW_READER", text)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_is_trusted_for_a_while_when_it_cannot_be_checked() {
        let long = CREDENTIAL_CHECK_LIMIT + Duration::from_millis(1);
        let away = || Err(Status::unavailable("away"));
        for (answer, unsure_for, ends) in [
            (Ok(true), Duration::ZERO, None),
            (Ok(false), Duration::ZERO, Some(Code::Unauthenticated)),
            (away(), Duration::ZERO, None),
            (away(), CREDENTIAL_CHECK_LIMIT.saturating_sub(Duration::from_millis(1)), None),
            (away(), CREDENTIAL_CHECK_LIMIT, Some(Code::Unavailable)),
            (away(), long, Some(Code::Unavailable)),
            (Err(Status::internal("corrupt")), Duration::ZERO, Some(Code::Internal)),
        ] {
            let text = format!("{answer:?} after {unsure_for:?}");
            assert_eq!(credential_end_status(answer, unsure_for).map(|status| status.code()), ends, "{text}");
        }
    }

    #[test]
    fn only_transient_errors_are_retried_for_a_bounded_time() {
        const LIMIT: Duration = Duration::from_secs(30);
        for (code, lasted, again) in [
            (Code::Unavailable, Duration::ZERO, true),
            (Code::Unavailable, LIMIT, false),
            (Code::Internal, Duration::ZERO, false),
            (Code::OutOfRange, Duration::ZERO, false),
        ] {
            assert_eq!(is_transient(code, lasted, LIMIT), again, "{code:?} {lasted:?}");
        }
    }

    #[tokio::test]
    async fn slow_reader_gets_an_error_that_names_resuming() {
        let (sender, receiver) = mpsc::channel(1);
        send_within(&sender, 1, Duration::ZERO).await.unwrap();
        let end = send_within(&sender, 2, Duration::ZERO).await.unwrap_err();
        let StreamEnd::Failed(status) = end else { panic!("somebody listens: {end:?}") };
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("resume"), "{status}");
        drop(receiver);
        assert!(matches!(send_within(&sender, 3, Duration::ZERO).await, Err(StreamEnd::ClientGone)));
    }
}
