//! OTLP sender: batch, retry, drop.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::trace::SpanData;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::backoff::ExponentialBackoff;
use crate::model::excerpt::Excerpt;
use crate::service::traces::SpanCounts;
use crate::service::traces::settings::TraceSettings;

/// The waits after failures. The shortest is a second.
const RETRY_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_secs(2), factor: 2.0, max: Duration::from_secs(30) };
/// How long a service that stops tries to send the remaining spans.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Sends the spans of a queue to a receiver.
#[derive(Debug)]
pub struct SpanSender {
    settings: TraceSettings,
    resource: ResourceAttributesWithSchema,
    queue: mpsc::Receiver<SpanData>,
    counts: SpanCounts,
    failure: Option<Failure>,
}

/// Why spans do not arrive. A change is logged once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// They cannot be sent.
    Unsent,
    /// The receiver rejects them.
    Rejected,
}

impl SpanSender {
    /// A sender of the spans from this queue.
    #[must_use]
    pub fn new(settings: TraceSettings, queue: mpsc::Receiver<SpanData>, counts: SpanCounts) -> Self {
        let resource = ResourceAttributesWithSchema::from(&settings.resource);
        Self { settings, resource, queue, counts, failure: None }
    }

    /// Sends spans until it is stopped, and then the remaining ones within `SHUTDOWN_TIMEOUT`.
    pub async fn run(mut self, stop: CancellationToken) {
        // The stop must not wait for a receiver that is down.
        let late = async {
            stop.cancelled().await;
            sleep(SHUTDOWN_TIMEOUT).await;
        };
        tokio::select! {
            () = self.run_until_stopped(&stop) => {}
            () = late => {}
        }
    }

    async fn run_until_stopped(&mut self, stop: &CancellationToken) {
        // Connects when there is something to send, and reconnects after a failure.
        let mut client = TraceServiceClient::new(self.settings.receiver.endpoint.connect_lazy());
        loop {
            let mut batch = Vec::new();
            tokio::select! {
                count = self.queue.recv_many(&mut batch, self.settings.max_batch) => if count == 0 { return },
                () = stop.cancelled() => break,
            }
            if batch.len() < self.settings.max_batch {
                tokio::select! {
                    () = sleep(self.settings.batch_delay) => {}
                    () = stop.cancelled() => {}
                }
                self.fill_batch(&mut batch);
            }
            self.send_batch(&mut client, batch, stop).await;
        }
        loop {
            let mut batch = Vec::new();
            self.fill_batch(&mut batch);
            if batch.is_empty() {
                return;
            }
            self.send_batch(&mut client, batch, stop).await;
        }
    }

    /// Adds the spans that are waiting, up to the largest batch.
    fn fill_batch(&mut self, batch: &mut Vec<SpanData>) {
        while batch.len() < self.settings.max_batch
            && let Ok(span) = self.queue.try_recv()
        {
            batch.push(span);
        }
    }

    /// Retries until the batch is accepted, rejected, or the sender is stopped.
    async fn send_batch(
        &mut self,
        client: &mut TraceServiceClient<Channel>,
        batch: Vec<SpanData>,
        stop: &CancellationToken,
    ) {
        let count = batch.len();
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        let message = ExportTraceServiceRequest { resource_spans };
        let mut failures = 0_u32;
        loop {
            let mut request = Request::new(message.clone());
            *request.metadata_mut() = self.settings.headers.clone();
            let status = match client.export(request).await {
                Ok(response) => {
                    self.record_response(count, response.into_inner());
                    return;
                }
                Err(status) => status,
            };
            let retryable = is_retryable(&status);
            self.record_failure(&status, retryable);
            if !retryable || stop.is_cancelled() {
                self.counts.record_dropped(count);
                return;
            }
            failures = failures.saturating_add(1);
            tokio::select! {
                () = sleep(RETRY_BACKOFF.delay(failures, rand::random())) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// Logs why a batch was not accepted, unless the last one had the same kind of failure.
    fn record_failure(&mut self, status: &tonic::Status, retryable: bool) {
        let failure = if retryable { Failure::Unsent } else { Failure::Rejected };
        if self.failure.replace(failure) == Some(failure) {
            return;
        }
        let (receiver, error) = (&self.settings.receiver.url, describe_status(status));
        if retryable {
            tracing::warn!(
                receiver,
                error,
                "cannot send traces; trying again, and dropping the spans that do not fit into the queue"
            );
        } else {
            tracing::warn!(receiver, error, "the receiver rejects spans; dropping them");
        }
    }

    /// Counts a batch that was accepted, as a whole or in part.
    fn record_response(&mut self, count: usize, response: ExportTraceServiceResponse) {
        let partial = response.partial_success.unwrap_or_default();
        let rejected = usize::try_from(partial.rejected_spans).unwrap_or(0).min(count);
        self.counts.record_sent(count - rejected);
        self.counts.record_dropped(rejected);
        let receiver = &self.settings.receiver.url;
        if rejected > 0 {
            if self.failure.replace(Failure::Rejected) != Some(Failure::Rejected) {
                let error = partial.error_message;
                tracing::warn!(receiver, error, "the receiver rejects spans; dropping them");
            }
        } else if self.failure.take().is_some() {
            tracing::info!(receiver, "the receiver accepts traces again");
        }
    }
}

/// Whether a retry may succeed, according to <https://opentelemetry.io/docs/specs/otlp/#failures>.
fn is_retryable(status: &tonic::Status) -> bool {
    match status.code() {
        // A receiver that can recover says when to retry. Without that, a message is too large for it, and stays so.
        Code::ResourceExhausted => !status.details().is_empty(),
        // The code with which tonic's own servers reject a message that is too large.
        Code::OutOfRange => !status.message().contains("message length too large"),
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::Unavailable
        | Code::DataLoss
        // The client's own code for a broken connection.
        | Code::Unknown => true,
        _ => false,
    }
}

/// A status with its causes, as one line of limited length.
fn describe_status(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    Excerpt::from_start(&text)
        .map_or_else(|| status.code().description().to_owned(), |words| words.to_string())
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTracePartialSuccess;

    use super::*;
    use crate::service::traces::{DROPPED, SENT};

    #[test]
    fn spans_that_the_receiver_rejects_are_counted_as_dropped() {
        let settings = TraceSettings::read(Some("http://127.0.0.1:4317"), |_| None).unwrap().unwrap();
        let (_send, queue) = mpsc::channel(1);
        let mut sender = SpanSender::new(settings, queue, SpanCounts::default());
        let partial = ExportTracePartialSuccess { rejected_spans: 2, error_message: "too old".to_owned() };
        sender.record_response(5, ExportTraceServiceResponse { partial_success: Some(partial) });
        let count = |result| sender.counts.spans.get_or_create(&[("result", result)]).get();
        assert_eq!((count(SENT), count(DROPPED)), (3, 2));
        assert_eq!(sender.failure, Some(Failure::Rejected));
        sender.record_response(5, ExportTraceServiceResponse::default());
        let count = |result| sender.counts.spans.get_or_create(&[("result", result)]).get();
        assert_eq!((count(SENT), count(DROPPED)), (8, 2));
        assert_eq!(sender.failure, None);
    }

    #[test]
    fn batch_that_is_too_large_is_not_retried() {
        let status = tonic::Status::new;
        for (retryable, status) in [
            (true, status(Code::Unavailable, "connection refused")),
            (true, status(Code::OutOfRange, "try another replica")),
            (true, tonic::Status::with_details(Code::ResourceExhausted, "busy", vec![1].into())),
            (
                false,
                status(
                    Code::ResourceExhausted,
                    "grpc: received message larger than max (5000000 vs. 4194304)",
                ),
            ),
            (false, status(Code::OutOfRange, "Error, decoded message length too large: found 5000000 bytes")),
            (false, status(Code::InvalidArgument, "no resource")),
        ] {
            assert_eq!(is_retryable(&status), retryable, "{status}");
        }
    }

    #[test]
    fn rejection_after_an_outage_is_a_failure_of_its_own() {
        let settings = TraceSettings::read(Some("http://127.0.0.1:4317"), |_| None).unwrap().unwrap();
        let (_send, queue) = mpsc::channel(1);
        let mut sender = SpanSender::new(settings, queue, SpanCounts::default());
        sender.record_failure(&tonic::Status::unavailable("connection refused"), true);
        assert_eq!(sender.failure, Some(Failure::Unsent));
        sender.record_failure(&tonic::Status::invalid_argument("no resource"), false);
        assert_eq!(sender.failure, Some(Failure::Rejected));
    }
}
