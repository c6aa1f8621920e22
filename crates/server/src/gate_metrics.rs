//! What the gates of the listeners count, and when they last turned a connection away.

use std::time::SystemTime;

use tokio::sync::watch;

use bmdb::metrics::Metrics;
use bmdb::metrics::labels::{ByListener, ByListenerAndReason};
use model::time::Timestamp;
use transport::gate::limits::{GateLimits, ListenerKind};
use transport::gate::table::CloseReason;
use transport::gate::{Gate, GateEvent};

/// When a gate last turned a connection away, by this host's clock; cheap to clone. A listener publishes it in its
/// session, where `shepherdctl issues` finds it. The metrics listener has no session, and hands it on by
/// [`subscribe`](Self::subscribe).
#[derive(Clone, Debug, Default)]
pub(crate) struct GatePressure(watch::Sender<Option<Timestamp>>);

impl GatePressure {
    /// The time as RFC 3339; `None` if it never happened.
    pub(crate) fn text(&self) -> Option<String> {
        self.0.borrow().map(|at| at.to_rfc3339())
    }

    /// The time, now and after each change; `None` if it never happened.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Option<Timestamp>> {
        self.0.subscribe()
    }

    fn record(&self, event: GateEvent) {
        let turned_away = match event {
            GateEvent::Closed(closed) => matches!(closed.reason, CloseReason::Displaced | CloseReason::Full),
            GateEvent::AcceptFailed => true,
            GateEvent::Counts(_) => false,
        };
        if turned_away {
            self.0.send_replace(Some(Timestamp::from(SystemTime::now())));
        }
    }
}

/// The gate of a listener, which counts in `metrics` and records in `pressure`. `also` is called for each event.
pub(crate) fn open_gate(
    kind: ListenerKind,
    limits: GateLimits,
    metrics: Metrics,
    pressure: GatePressure,
    also: impl Fn(GateEvent) + Send + Sync + 'static,
) -> Gate {
    Gate::new(limits, move |event| {
        count_event(&metrics, kind, event);
        pressure.record(event);
        also(event);
    })
}

fn count_event(metrics: &Metrics, kind: ListenerKind, event: GateEvent) {
    let listener = kind.as_str();
    let count_closed = |reason| {
        metrics.gate_closed.get_or_create(&ByListenerAndReason { listener, reason }).inc();
    };
    match event {
        GateEvent::Counts(counts) => {
            let labels = ByListener { listener };
            metrics.gate_unproven.get_or_create(&labels).set(as_gauge(counts.unproven));
            metrics.gate_proven.get_or_create(&labels).set(as_gauge(counts.proven));
        }
        GateEvent::Closed(closed) => count_closed(closed.reason.as_str()),
        GateEvent::AcceptFailed => count_closed("accept"),
    }
}

/// A number of connections as the value of a gauge.
pub(crate) fn as_gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
