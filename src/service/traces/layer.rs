//! Tracing layer that turns work spans into OpenTelemetry spans.
//!
//! The layer is that of `tracing-opentelemetry`, without the attributes that it can add. A filter in front of it
//! selects the spans of traces, and a queue behind it receives those that have ended.

use std::time::{Duration, UNIX_EPOCH};

use opentelemetry::trace::{SpanId, SpanKind, Status, TracerProvider as _};
use opentelemetry::{Context as TelemetryContext, Value};
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span, SpanData, SpanLimits, SpanProcessor};
use tokio::sync::mpsc;
use tracing::Metadata;
use tracing::subscriber::Interest;
use tracing_subscriber::Registry;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::{Context, Layer};

use crate::model::traces::TRACE_TARGET;
use crate::service::traces::SpanCounts;

/// The name of spans that start a trace.
const ROOT_SPAN: &str = "work";
/// A field with the age of the work when its span was created, in nanoseconds: the exported span starts that much
/// earlier.
const ELAPSED_FIELD: &str = "elapsed_ns";
/// A field that is set on spans that failed.
const ERROR_FIELD: &str = "error";

/// A tracer that sends ended spans to this queue.
#[must_use]
pub fn build_tracer(queue: mpsc::Sender<SpanData>, counts: SpanCounts) -> SdkTracer {
    // The builder reads the sampler from the environment, but must not read the limits of a span from there: a span that
    // lost attributes would lose its status and its start.
    let provider = SdkTracerProvider::builder()
        .with_span_limits(SpanLimits::default())
        .with_span_processor(SpanQueue { queue, counts })
        .build();
    provider.tracer("shepherd")
}

/// The layer that observes spans for this tracer, with any log filter.
#[must_use]
pub fn build_layer(tracer: SdkTracer) -> impl Layer<Registry> + Send + Sync {
    let filter = dynamic_filter_fn::<Registry, _>(belongs_to_trace).with_callsite_filter(callsite_interest);
    tracing_opentelemetry::layer::<Registry>()
        .with_tracer(tracer)
        // The parent of a span is the current span of `tracing`, not of another library.
        .with_context_activation(false)
        .with_location(false)
        .with_target(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_filter(filter)
}

/// Whether a span starts a trace or is inside one. The layer gets no events, so log lines are not exported.
fn belongs_to_trace(metadata: &Metadata<'_>, context: &Context<'_, Registry>) -> bool {
    is_trace_span(metadata) && (metadata.name() == ROOT_SPAN || context.lookup_current().is_some())
}

/// Answers once for each place in the code, so that only spans of traces cost a look at the current span.
fn callsite_interest(metadata: &'static Metadata<'static>) -> Interest {
    if is_trace_span(metadata) { Interest::sometimes() } else { Interest::never() }
}

fn is_trace_span(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && metadata.target() == TRACE_TARGET
}

/// Queues ended spans. A span that does not fit is dropped and counted: the code that ends a span never waits.
#[derive(Debug)]
struct SpanQueue {
    queue: mpsc::Sender<SpanData>,
    counts: SpanCounts,
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _span: &mut Span, _context: &TelemetryContext) {}

    fn on_end(&self, mut span: SpanData) {
        translate_fields(&mut span);
        if self.queue.try_send(span).is_err() {
            self.counts.record_dropped(1);
        }
    }

    // The sender empties the queue when the service stops.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Turns the fields with a meaning into parts of the span. Spans inside work are calls of something else.
fn translate_fields(span: &mut SpanData) {
    let (mut elapsed, mut error) = (0, None);
    span.attributes.retain(|attribute| match (attribute.key.as_str(), &attribute.value) {
        (ELAPSED_FIELD, Value::I64(nanoseconds)) => {
            elapsed = u64::try_from(*nanoseconds).unwrap_or(0);
            false
        }
        (ERROR_FIELD, Value::String(sentence)) => {
            error = Some(sentence.as_str().to_owned());
            false
        }
        _ => true,
    });
    span.start_time = span.start_time.checked_sub(Duration::from_nanos(elapsed)).unwrap_or(UNIX_EPOCH);
    if let Some(sentence) = error {
        span.status = Status::error(sentence);
    }
    if span.parent_span_id != SpanId::INVALID {
        span.span_kind = SpanKind::Client;
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::KeyValue;
    use tracing::field::Empty;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn recorded_spans(what: impl FnOnce()) -> Vec<SpanData> {
        let (send, mut queue) = mpsc::channel(3);
        let layer = build_layer(build_tracer(send, SpanCounts::default()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), what);
        let mut spans = Vec::new();
        while let Ok(span) = queue.try_recv() {
            spans.push(span);
        }
        spans
    }

    #[test]
    fn work_begins_a_trace_and_what_is_in_it_belongs_to_it() {
        let spans = recorded_spans(|| {
            let call = || tracing::debug_span!(target: TRACE_TARGET, "provider call").in_scope(|| ());
            tracing::info_span!("work", source = "the log").in_scope(call);
            let work = tracing::debug_span!(
                target: TRACE_TARGET,
                "work",
                fence = 7_i64,
                elapsed_ns = 5_000_000_000_i64,
                error = Empty,
            );
            let exec = || {
                tracing::debug_span!(target: TRACE_TARGET, "ssh exec", operation = "enrolling")
                    .in_scope(|| tracing::error!("a line of the log"));
            };
            work.in_scope(|| tracing::info_span!("work", source = "the log").in_scope(exec));
            work.record("error", "connection reset");
            work.record("error", "no route to host");
        });
        let [exec, work] = spans.as_slice() else { panic!("{spans:?}") };
        assert_eq!((&*exec.name, &*work.name), ("ssh exec", "work"));
        assert_eq!(
            (exec.span_context.trace_id(), exec.parent_span_id),
            (work.span_context.trace_id(), work.span_context.span_id())
        );
        assert!(work.span_context.is_valid() && work.parent_span_id == SpanId::INVALID);
        let earlier = exec.start_time.duration_since(work.start_time).unwrap();
        assert!(earlier >= Duration::from_secs(5));
        assert_eq!(work.status, Status::error("no route to host"));
        assert_eq!(work.attributes, [KeyValue::new("fence", 7_i64)]);
        assert_eq!(exec.attributes, [KeyValue::new("operation", "enrolling")]);
        assert_eq!((&work.span_kind, &exec.span_kind), (&SpanKind::Internal, &SpanKind::Client));
        assert!(exec.events.is_empty() && exec.status == Status::Unset, "{exec:?}");
    }

    #[test]
    fn spans_beyond_the_queue_are_dropped() {
        let work = |_| tracing::debug_span!(target: TRACE_TARGET, "work").in_scope(|| ());
        assert_eq!(recorded_spans(|| (0..9).for_each(work)).len(), 3);
    }
}
