//! Tracing layer that turns work spans into OTLP spans.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{Span, Status};
use tokio::sync::mpsc;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::model::traces::TRACE_TARGET;
use crate::service::traces::SpanCounts;

/// The name of spans that start a trace.
const ROOT_SPAN: &str = "work";
/// A field with the age of the work when its span was created, in nanoseconds: the OTLP span starts that much earlier.
const ELAPSED_FIELD: &str = "elapsed_ns";
/// A field that is set on spans that failed.
const ERROR_FIELD: &str = "error";

/// Observes spans, and queues those that have ended.
#[derive(Debug)]
pub struct TraceLayer {
    queue: mpsc::Sender<Span>,
    counts: SpanCounts,
}

impl TraceLayer {
    /// A layer that sends ended spans to this queue.
    #[must_use]
    pub fn new(queue: mpsc::Sender<Span>, counts: SpanCounts) -> Self {
        Self { queue, counts }
    }

    /// Whether a span belongs to a trace, whatever the log filter is.
    #[must_use]
    pub fn accepts(metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == TRACE_TARGET
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let parent = span.parent().and_then(|parent| {
            let extensions = parent.extensions();
            let open = extensions.get::<OpenSpan>()?;
            Some((open.span.trace_id.clone(), open.span.span_id.clone()))
        });
        let (trace_id, parent_span_id) = match parent {
            Some(parent) => parent,
            None if span.name() == ROOT_SPAN => (rand::random::<[u8; 16]>().to_vec(), Vec::new()),
            None => return,
        };
        let kind = if parent_span_id.is_empty() { SpanKind::Internal } else { SpanKind::Client };
        let mut open = OpenSpan {
            span: Span {
                trace_id,
                span_id: rand::random::<[u8; 8]>().to_vec(),
                parent_span_id,
                name: span.name().to_owned(),
                kind: kind.into(),
                start_time_unix_nano: unix_nanos(SystemTime::now()),
                ..Span::default()
            },
        };
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<OpenSpan>() {
            values.record(open);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(OpenSpan { mut span }) = span.extensions_mut().remove::<OpenSpan>() else { return };
        span.end_time_unix_nano = unix_nanos(SystemTime::now());
        if self.queue.try_send(span).is_err() {
            self.counts.record_dropped(1);
        }
    }
}

/// A span that has not ended yet.
struct OpenSpan {
    span: Span,
}

impl OpenSpan {
    fn attribute(&mut self, field: &Field, value: Value) {
        self.span.attributes.push(attribute(field.name(), value));
    }
}

/// An attribute of a span or of its resource.
#[must_use]
pub fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

impl Visit for OpenSpan {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.attribute(field, Value::IntValue(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == ELAPSED_FIELD {
            let began = &mut self.span.start_time_unix_nano;
            *began = began.saturating_sub(value);
            return;
        }
        match i64::try_from(value) {
            Ok(value) => self.attribute(field, Value::IntValue(value)),
            Err(_) => self.attribute(field, Value::StringValue(value.to_string())),
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.attribute(field, Value::DoubleValue(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.attribute(field, Value::BoolValue(value));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == ERROR_FIELD {
            self.span.status = Some(Status { code: StatusCode::Error.into(), message: value.to_owned() });
            return;
        }
        self.attribute(field, Value::StringValue(value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

fn unix_nanos(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tracing::field::Empty;
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn recorded_spans(what: impl FnOnce()) -> Vec<Span> {
        let (send, mut queue) = mpsc::channel(3);
        let layer = TraceLayer::new(send, SpanCounts::default()).with_filter(filter_fn(TraceLayer::accepts));
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
                elapsed_ns = 5_000_000_000_u64,
                error = Empty,
            );
            let exec = || {
                tracing::debug_span!(target: TRACE_TARGET, "ssh exec", operation = "enrolling")
                    .in_scope(|| ());
            };
            work.in_scope(|| tracing::info_span!("work", source = "the log").in_scope(exec));
            work.record("error", "no route to host");
        });
        let [exec, work] = spans.as_slice() else { panic!("{spans:?}") };
        assert_eq!((exec.name.as_str(), work.name.as_str()), ("ssh exec", "work"));
        assert_eq!((&exec.trace_id, &exec.parent_span_id), (&work.trace_id, &work.span_id));
        assert_eq!((work.trace_id.len(), work.span_id.len(), work.parent_span_id.len()), (16, 8, 0));
        assert!(exec.start_time_unix_nano - work.start_time_unix_nano >= 5_000_000_000);
        let status = work.status.as_ref().unwrap();
        assert_eq!((status.code(), status.message.as_str()), (StatusCode::Error, "no route to host"));
        assert_eq!(work.attributes, [attribute("fence", Value::IntValue(7))]);
        assert_eq!(exec.attributes, [attribute("operation", Value::StringValue("enrolling".to_owned()))]);
    }

    #[test]
    fn spans_beyond_the_queue_are_dropped() {
        let work = |_| tracing::debug_span!(target: TRACE_TARGET, "work").in_scope(|| ());
        assert_eq!(recorded_spans(|| (0..9).for_each(work)).len(), 3);
    }
}
