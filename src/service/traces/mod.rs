//! Traces: export of work spans by OTLP.
//!
//! A trace shows a work item from its claim to its finish, through SSH and calls of providers. The modules that do the
//! work create spans of [`tracing`] with the target [`TRACE_TARGET`](crate::model::traces::TRACE_TARGET), and do not
//! depend on this one. [`layer`] observes them: a `work` span starts a trace, spans inside it belong to that trace, and
//! all others are ignored. Ended spans enter a queue, and [`sender`] sends them by OTLP over gRPC
//! (<https://opentelemetry.io/docs/specs/otlp/>) to the receiver that `--otlp_endpoint` names.
//!
//! A receiver that is slow or down costs the service nothing: the queue is bounded, spans that do not fit are dropped
//! and counted, and the log states the reason once. The variables `OTEL_*` are ignored; the service is configured by
//! its flags.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::mpsc;

use crate::bmdb::metrics::Metrics;
use crate::bmdb::metrics::registry::Label;
use crate::service::failure::ExitFailure;
use crate::service::traces::layer::TraceLayer;
use crate::service::traces::sender::{SpanSender, TraceReceiver};

pub mod layer;
pub mod sender;

/// Most spans that wait to be sent.
const QUEUE_CAPACITY: usize = 4096;
/// Values of the label `result`.
const RESULTS: [&str; 2] = [SENT, DROPPED];
const SENT: &str = "sent";
const DROPPED: &str = "dropped";

/// Counts of spans that were sent, and of those that were dropped.
#[derive(Clone, Debug)]
pub struct SpanCounts {
    spans: Family<[(&'static str, &'static str); 1], Counter>,
}

impl Default for SpanCounts {
    fn default() -> Self {
        let counts = Self { spans: Family::default() };
        for result in RESULTS {
            drop(counts.spans.get_or_create(&[("result", result)]));
        }
        counts
    }
}

impl SpanCounts {
    /// Registers the counts with the other metrics.
    pub fn register(&self, counted: &Metrics) {
        counted.register(|book| {
            book.add_process_metric(
                "trace_spans",
                "Trace spans that were sent to the receiver at `--otlp_endpoint`, and spans that were dropped",
                &[Label::one_of("result", RESULTS)],
                self.spans.clone(),
            );
        });
    }

    fn record_sent(&self, count: usize) {
        self.add(SENT, count);
    }

    fn record_dropped(&self, count: usize) {
        self.add(DROPPED, count);
    }

    fn add(&self, result: &'static str, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.spans.get_or_create(&[("result", result)]).inc_by(count);
    }
}

/// The layer that creates spans, their sender, and the counts of both.
#[derive(Default)]
pub struct Traces {
    /// Observes spans; `None` if traces are not configured.
    pub layer: Option<TraceLayer>,
    /// Sends the spans once it is run; `None` if traces are not configured.
    pub sender: Option<SpanSender>,
    /// Counts of sent and dropped spans.
    pub counts: SpanCounts,
}

impl Traces {
    /// Prepares tracing for the receiver at this URL. Without one, nothing is traced.
    pub fn new(endpoint: Option<&str>) -> Result<Self, ExitFailure> {
        let counts = SpanCounts::default();
        let Some(endpoint) = endpoint else { return Ok(Self { counts, ..Self::default() }) };
        let receiver = TraceReceiver::parse(endpoint).map_err(ExitFailure::usage)?;
        let (send, queue) = mpsc::channel(QUEUE_CAPACITY);
        Ok(Self {
            layer: Some(TraceLayer::new(send, counts.clone())),
            sender: Some(SpanSender::new(receiver, queue, counts.clone())),
            counts,
        })
    }
}
