//! What is counted, for all rooms.
//!
//! The counters stand in this room because the group commit of heartbeats counts
//! here and the callback server counts in `server`: both know this room, and it
//! knows neither. The loops bring counters of their own on the same registry,
//! which is made where everything is put together. `server` shows them all.
//!
//! Labels are bounded: names from our own lists, never a machine or an address.
//! A room with numbers of its own adds them with [`Metrics::register`].

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Label `result`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByResult {
    /// From a fixed list.
    pub result: &'static str,
}

/// Label `reason`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByReason {
    /// From a fixed list.
    pub reason: &'static str,
}

/// What listening counts, on the registry of everything this process counts. Cheap to clone; all clones
/// count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    /// Heartbeats answered.
    pub heartbeats: Family<ByResult, Counter>,
    /// Groups of heartbeats committed, empty ones included.
    pub heartbeat_batches: Counter,
    /// Groups that were refused and sent in halves.
    pub heartbeat_batches_halved: Counter,
    /// Heartbeats in a group.
    pub heartbeat_batch_size: Histogram,
    /// How long a group took to commit, in seconds.
    pub heartbeat_commit_seconds: Histogram,
    /// TLS handshakes that did not end in a connection.
    pub handshake_failures: Family<ByReason, Counter>,
    /// TLS handshakes under way.
    pub handshakes_open: Gauge,
    /// Agents connected.
    pub agent_connections: Gauge,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A registry with everything of ours in it at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Registry::default())
    }

    /// Adds everything of ours, at zero, to a registry that others have added to.
    #[must_use]
    pub fn on(registry: Registry) -> Self {
        let metrics = Self {
            registry: Arc::new(Mutex::new(registry)),
            heartbeats: Family::default(),
            heartbeat_batches: Counter::default(),
            heartbeat_batches_halved: Counter::default(),
            heartbeat_batch_size: Histogram::new(exponential_buckets(1.0, 2.0, 11)),
            heartbeat_commit_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            handshake_failures: Family::default(),
            handshakes_open: Gauge::default(),
            agent_connections: Gauge::default(),
        };
        metrics.register(|registry| metrics.register_own(registry));
        metrics
    }

    fn register_own(&self, registry: &mut Registry) {
        registry.register("shepherd_heartbeats", "Heartbeats answered", self.heartbeats.clone());
        registry.register(
            "shepherd_heartbeat_batches",
            "Groups of heartbeats committed",
            self.heartbeat_batches.clone(),
        );
        registry.register(
            "shepherd_heartbeat_batches_halved",
            "Groups of heartbeats that were refused and sent in halves",
            self.heartbeat_batches_halved.clone(),
        );
        registry.register(
            "shepherd_heartbeat_batch_size",
            "Heartbeats in a group",
            self.heartbeat_batch_size.clone(),
        );
        registry.register(
            "shepherd_heartbeat_commit_seconds",
            "How long a group of heartbeats took to commit",
            self.heartbeat_commit_seconds.clone(),
        );
        registry.register(
            "shepherd_handshake_failures",
            "TLS handshakes of agents that failed",
            self.handshake_failures.clone(),
        );
        registry.register(
            "shepherd_handshakes_open",
            "TLS handshakes under way",
            self.handshakes_open.clone(),
        );
        registry.register("shepherd_agent_connections", "Agents connected", self.agent_connections.clone());
    }

    /// Adds metrics of another room. Their names begin with `shepherd_`.
    pub fn register(&self, add: impl FnOnce(&mut Registry)) {
        add(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All of it in the text format.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_shown_with_what_others_added() {
        let metrics = Metrics::new();
        let more: Counter = Counter::default();
        metrics.register(|registry| registry.register("shepherd_loops", "Loops running", more.clone()));
        metrics.heartbeats.get_or_create(&ByResult { result: "stored" }).inc_by(3);
        more.inc();
        let text = metrics.clone().encode().unwrap();
        for line in [
            "shepherd_heartbeats_total{result=\"stored\"} 3",
            "shepherd_loops_total 1",
            "shepherd_heartbeat_batches_total 0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is missing in\n{text}");
        }
    }
}
