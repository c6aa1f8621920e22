//! Traces: export of work spans by OTLP.
//!
//! # How it works
//!
//! A trace shows a work item from its claim to its finish, through SSH and calls of providers. The modules that do the
//! work create spans of [`tracing`] with the target [`TRACE_TARGET`](crate::model::traces::TRACE_TARGET), and do not
//! depend on this one. [`layer`] observes them: a `work` span starts a trace, spans inside it belong to that trace, and
//! all others are ignored. Ended spans enter a queue, and [`sender`] sends them by OTLP over gRPC
//! (<https://opentelemetry.io/docs/specs/otlp/>) to the [`receiver`].
//!
//! [`settings`] reads `--otlp_endpoint` and the environment variables of OpenTelemetry. The flag takes precedence over
//! the variables.
//!
//! A receiver that is slow or down costs the service nothing: the queue is bounded, spans that do not fit are dropped
//! and counted, and the log states the reason once.
//!
//! # Libraries
//!
//! `tracing-opentelemetry` and `opentelemetry_sdk` make the spans: identities, parents, times, attributes, sampling,
//! and the attributes of the process. `opentelemetry-proto` has the messages and the client. The batches and their
//! sending are our own. `opentelemetry-otlp` 0.33 and the batch processor of `opentelemetry_sdk` 0.33 could do that, at
//! the cost of one more package and of no second version of any. They were not taken, for these reasons:
//!
//! * The exporter gives a batch up after `OTEL_EXPORTER_OTLP_TIMEOUT`, which is 10 seconds unless set. Here a batch
//!   waits until the receiver is back, and the queue takes what ends in the meantime.
//! * The processor keeps its number of dropped spans to itself, and the exporter that of the spans which the receiver
//!   rejected. `shepherd_trace_spans_total` would have to be counted by a second queue in front of the first.
//! * The exporter reports a failure as a text, with the status code inside the text and without the receiver's own
//!   message. No decision to retry and no useful log line can be made of that. While it retries, it reports
//!   nothing.
//! * The processor runs on a thread of its own, and sleeps there between retries without looking at a shutdown. The
//!   shutdown itself blocks the thread that calls it.
//!
//! With a wrapper for each of these, the exporter would only have read the headers and the time limit from the
//! environment.
//!
//! # For the next implementor
//!
//! `tracing-opentelemetry` exports only signed integers as integers. An unsigned one becomes a text. Every reader of
//! traces sees the attributes, so none may contain a secret: a command line, a header, a URL with a query.

use opentelemetry_sdk::trace::SdkTracer;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::mpsc;

use crate::bmdb::metrics::Metrics;
use crate::bmdb::metrics::registry::Label;
use crate::service::failure::ExitFailure;
use crate::service::traces::layer::build_tracer;
use crate::service::traces::sender::SpanSender;
use crate::service::traces::settings::TraceSettings;

pub mod layer;
pub mod receiver;
pub mod sender;
pub mod settings;

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
                "Trace spans that were sent to the receiver of traces, and spans that were dropped",
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

/// The tracer that makes spans, their sender, and the counts of both.
#[derive(Default)]
pub struct Traces {
    /// Makes spans for [`layer::build_layer`]; `None` if traces are not configured.
    pub tracer: Option<SdkTracer>,
    /// Sends the spans once it is run; `None` if traces are not configured.
    pub sender: Option<SpanSender>,
    /// Counts of sent and dropped spans.
    pub counts: SpanCounts,
}

impl Traces {
    /// Prepares tracing for the receiver at this URL, or else at that of the environment. Without one, nothing is
    /// traced.
    pub fn new(endpoint: Option<&str>) -> Result<Self, ExitFailure> {
        let counts = SpanCounts::default();
        let variable = |name: &str| Some(std::env::var_os(name)?.to_string_lossy().into_owned());
        let settings = TraceSettings::read(endpoint, variable).map_err(ExitFailure::usage)?;
        let Some(settings) = settings else { return Ok(Self { counts, ..Self::default() }) };
        let (send, queue) = mpsc::channel(settings.queue_capacity);
        Ok(Self {
            tracer: Some(build_tracer(send, counts.clone())),
            sender: Some(SpanSender::new(settings, queue, counts.clone())),
            counts,
        })
    }
}
