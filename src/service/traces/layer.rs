//! From spans of this program to spans of a trace.

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

use crate::model::traces::TRACES;
use crate::service::traces::SpanCounts;

/// Name of the spans that begin a trace.
const ROOT: &str = "work";
/// A field that tells how long ago something began, in nanoseconds: before its span did.
const BEGUN_BEFORE: &str = "begun_before_ns";
/// A field that is set where something failed.
const ERROR: &str = "error";

/// Hears of spans, and queues those that end.
#[derive(Debug)]
pub struct TraceLayer {
    queue: mpsc::Sender<Span>,
    counts: SpanCounts,
}

impl TraceLayer {
    /// One that puts spans there.
    #[must_use]
    pub fn new(queue: mpsc::Sender<Span>, counts: SpanCounts) -> Self {
        Self { queue, counts }
    }

    /// Whether this can be of a trace, whatever the log is told.
    #[must_use]
    pub fn wants(metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == TRACES
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for TraceLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let parent = span.parent().and_then(|parent| {
            let extensions = parent.extensions();
            let open = extensions.get::<Open>()?;
            Some((open.span.trace_id.clone(), open.span.span_id.clone()))
        });
        let (trace_id, parent_span_id) = match parent {
            Some(parent) => parent,
            None if span.name() == ROOT => (rand::random::<[u8; 16]>().to_vec(), Vec::new()),
            None => return,
        };
        let kind = if parent_span_id.is_empty() { SpanKind::Internal } else { SpanKind::Client };
        let mut open = Open {
            span: Span {
                trace_id,
                span_id: rand::random::<[u8; 8]>().to_vec(),
                parent_span_id,
                name: span.name().to_owned(),
                kind: kind.into(),
                start_time_unix_nano: nanos(SystemTime::now()),
                ..Span::default()
            },
        };
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            values.record(open);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(Open { mut span }) = span.extensions_mut().remove::<Open>() else { return };
        span.end_time_unix_nano = nanos(SystemTime::now());
        if self.queue.try_send(span).is_err() {
            self.counts.dropped(1);
        }
    }
}

/// A span that has not ended.
struct Open {
    span: Span,
}

impl Open {
    fn attribute(&mut self, field: &Field, value: Value) {
        self.span.attributes.push(attribute(field.name(), value));
    }
}

/// An attribute of a span or of who makes it.
#[must_use]
pub fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

impl Visit for Open {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.attribute(field, Value::IntValue(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == BEGUN_BEFORE {
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
        if field.name() == ERROR {
            self.span.status = Some(Status { code: StatusCode::Error.into(), message: value.to_owned() });
            return;
        }
        self.attribute(field, Value::StringValue(value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

fn nanos(at: SystemTime) -> u64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tracing::field::Empty;
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    fn traced(what: impl FnOnce()) -> Vec<Span> {
        let (send, mut queue) = mpsc::channel(3);
        let layer = TraceLayer::new(send, SpanCounts::default()).with_filter(filter_fn(TraceLayer::wants));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), what);
        let mut spans = Vec::new();
        while let Ok(span) = queue.try_recv() {
            spans.push(span);
        }
        spans
    }

    #[test]
    fn work_begins_a_trace_and_what_is_in_it_belongs_to_it() {
        let spans = traced(|| {
            let call = || tracing::debug_span!(target: TRACES, "provider call").in_scope(|| ());
            tracing::info_span!("work", of = "the log").in_scope(call);
            let work = tracing::debug_span!(
                target: TRACES,
                "work",
                fence = 7_i64,
                begun_before_ns = 5_000_000_000_u64,
                error = Empty,
            );
            let exec =
                || tracing::debug_span!(target: TRACES, "ssh exec", doing = "enrolling").in_scope(|| ());
            work.in_scope(|| tracing::info_span!("work", of = "the log").in_scope(exec));
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
        assert_eq!(exec.attributes, [attribute("doing", Value::StringValue("enrolling".to_owned()))]);
    }

    #[test]
    fn what_has_no_room_is_dropped() {
        let work = |_| tracing::debug_span!(target: TRACES, "work").in_scope(|| ());
        assert_eq!(traced(|| (0..9).for_each(work)).len(), 3);
    }
}
