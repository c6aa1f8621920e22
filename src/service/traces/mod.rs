//! Traces: what became of each work item, from its claim to its finish, through SSH and calls of providers.
//!
//! The rooms that do the work make spans of [`tracing`] with the target
//! [`TRACES`](crate::model::traces::TRACES), and know nothing of this. [`layer`] hears of them: a `work` span
//! begins a trace, what is inside of it belongs to that, and all else is left alone. What has ended goes into a queue, and
//! [`sender`] hands it on, by OTLP over gRPC
//! (<https://opentelemetry.io/docs/specs/otlp/>), to the receiver that `--otlp_endpoint` names.
//!
//! A receiver that is slow or away costs the service nothing: the queue has an end, what does not fit into it is dropped
//! and counted, and the log says once why. The variables `OTEL_*` mean nothing here; what the service does is said by its
//! flags.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::mpsc;

use crate::bmdb::metric_book::Label;
use crate::bmdb::metrics::Metrics;
use crate::service::failure::Failure;
use crate::service::traces::layer::TraceLayer;
use crate::service::traces::sender::{Receiver, Sending};

pub mod layer;
pub mod sender;

/// Spans that wait to be handed on.
const QUEUE: usize = 4096;
/// What becomes of a span.
const RESULTS: [&str; 2] = [SENT, DROPPED];
const SENT: &str = "sent";
const DROPPED: &str = "dropped";

/// How many spans were handed on, and how many were not.
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
    /// Enters what is counted beside the rest.
    pub fn register(&self, counted: &Metrics) {
        counted.register(|book| {
            book.add(
                "trace_spans",
                "Trace spans that were sent to the receiver at `--otlp_endpoint`, and spans that were dropped",
                &[Label::one_of("result", RESULTS)],
                self.spans.clone(),
            );
        });
    }

    fn sent(&self, count: usize) {
        self.add(SENT, count);
    }

    fn dropped(&self, count: usize) {
        self.add(DROPPED, count);
    }

    fn add(&self, result: &'static str, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        self.spans.get_or_create(&[("result", result)]).inc_by(count);
    }
}

/// What makes traces, what hands them on, and what is counted of both.
#[derive(Default)]
pub struct Traces {
    /// Hears of spans; `None` where no traces are wanted.
    pub layer: Option<TraceLayer>,
    /// Hands them on, once it is run.
    pub sending: Option<Sending>,
    /// Counts of both.
    pub counts: SpanCounts,
}

impl Traces {
    /// Makes ready for the receiver at this URL, if there is one.
    pub fn new(endpoint: Option<&str>) -> Result<Self, Failure> {
        let counts = SpanCounts::default();
        let Some(endpoint) = endpoint else { return Ok(Self { counts, ..Self::default() }) };
        let receiver = Receiver::parse(endpoint).map_err(Failure::usage)?;
        let (send, queue) = mpsc::channel(QUEUE);
        Ok(Self {
            layer: Some(TraceLayer::new(send, counts.clone())),
            sending: Some(Sending::new(receiver, queue, counts.clone())),
            counts,
        })
    }
}
