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
    failing: bool,
}

impl SpanSender {
    /// A sender of the spans from this queue.
    #[must_use]
    pub fn new(settings: TraceSettings, queue: mpsc::Receiver<SpanData>, counts: SpanCounts) -> Self {
        let resource = ResourceAttributesWithSchema::from(&settings.resource);
        Self { settings, resource, queue, counts, failing: false }
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
            if !std::mem::replace(&mut self.failing, true) {
                let error = describe_status(&status);
                tracing::warn!(
                    receiver = self.settings.receiver.url,
                    error,
                    "cannot send traces; trying again, and dropping the spans that do not fit into the queue"
                );
            }
            if !is_retryable(status.code()) || stop.is_cancelled() {
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

    /// Counts a batch that was accepted, as a whole or in part.
    fn record_response(&mut self, count: usize, response: ExportTraceServiceResponse) {
        let partial = response.partial_success.unwrap_or_default();
        let rejected = usize::try_from(partial.rejected_spans).unwrap_or(0).min(count);
        self.counts.record_sent(count - rejected);
        self.counts.record_dropped(rejected);
        let receiver = &self.settings.receiver.url;
        if rejected > 0 {
            if !std::mem::replace(&mut self.failing, true) {
                let error = partial.error_message;
                tracing::warn!(receiver, error, "the receiver rejects spans; dropping them");
            }
        } else if std::mem::take(&mut self.failing) {
            tracing::info!(receiver, "the receiver accepts traces again");
        }
    }
}

/// Whether a retry may succeed, according to <https://opentelemetry.io/docs/specs/otlp/#failures>.
fn is_retryable(code: Code) -> bool {
    matches!(
        code,
        Code::Cancelled
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unavailable
            | Code::DataLoss
            // The client's own code for a broken connection.
            | Code::Unknown
    )
}

/// A status with its causes.
fn describe_status(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
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
        assert!(sender.failing);
        sender.record_response(5, ExportTraceServiceResponse::default());
        let count = |result| sender.counts.spans.get_or_create(&[("result", result)]).get();
        assert_eq!((count(SENT), count(DROPPED)), (8, 2));
        assert!(!sender.failing);
    }
}
