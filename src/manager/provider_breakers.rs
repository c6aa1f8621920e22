//! Circuit breakers and call metrics of providers.
//!
//! [`CircuitBreaker`] decides. This module holds one for each provider, evaluates it before each call, and measures and
//! counts calls. The state of a breaker is local to its shepherd: another shepherd finds out by itself that a provider
//! hangs, and may well have a better route there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use tracing::Instrument as _;
use tracing::field::{Empty, display};

use crate::bmdb::engine::session::boot_time;
use crate::bmdb::metrics::Metrics;
use crate::bmdb::metrics::labels::provider_label;
use crate::bmdb::metrics::registry::Label;
use crate::model::circuit_breaker::{BreakerOpen, CallOutcome, CircuitBreaker};
use crate::model::traces::TRACE_TARGET;
use crate::providers::provider::{ErrorClass, ProviderError};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderLabels {
    provider: String,
}

/// The calls to a provider, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProviderCall {
    /// List all machines and capacity.
    List,
    /// Find one machine by its id.
    FindMachine,
    /// Find the machine that was created under an intent.
    FindByIntent,
    /// Create a machine from capacity.
    Create,
    /// Get the recovery methods of a machine.
    Capabilities,
    /// Reboot one of its machines.
    Reboot,
    /// Switch the power of one machine.
    Power,
    /// Release one machine to the provider.
    Release,
}

impl ProviderCall {
    const ALL: [Self; 8] = [
        Self::List,
        Self::FindMachine,
        Self::FindByIntent,
        Self::Create,
        Self::Capabilities,
        Self::Reboot,
        Self::Power,
        Self::Release,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::FindMachine => "inspect",
            Self::FindByIntent => "find-by-intent",
            Self::Create => "create",
            Self::Capabilities => "capabilities",
            Self::Reboot => "reboot",
            Self::Power => "power",
            Self::Release => "release",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProviderCallLabels {
    provider: String,
    call: &'static str,
    result: &'static str,
}

/// A call that the provider answered without an error.
const RESULT_OK: &str = "ok";
/// A call that was cut off before its answer.
const RESULT_TIMED_OUT: &str = "timed_out";
/// Values of the result label of calls.
const CALL_RESULTS: [&str; 7] = [
    RESULT_OK,
    RESULT_TIMED_OUT,
    ErrorClass::Transient.as_str(),
    ErrorClass::Permanent.as_str(),
    ErrorClass::NotFound.as_str(),
    ErrorClass::Configuration.as_str(),
    ErrorClass::Unreadable.as_str(),
];
/// Upper bounds in seconds: from a file on this host to the longest time that a call may take.
const CALL_BOUNDS: [f64; 11] = [0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0];

/// Metrics of all breakers of a process. The label `provider` is a name from the configuration.
#[derive(Clone, Debug)]
pub struct BreakerMetrics {
    open: Family<ProviderLabels, Gauge>,
    timeouts: Family<ProviderLabels, Counter>,
    calls: Family<ProviderCallLabels, Histogram, fn() -> Histogram>,
}

impl Default for BreakerMetrics {
    fn default() -> Self {
        Self {
            open: Family::default(),
            timeouts: Family::default(),
            calls: Family::new_with_constructor(|| Histogram::new(CALL_BOUNDS)),
        }
    }
}

impl BreakerMetrics {
    /// Registers these metrics with the others of the process.
    pub fn register(&self, common: &Metrics) {
        common.register(|book| {
            book.add_process_metric(
                "provider_breaker_open",
                "1 while the circuit breaker of a provider is open because its calls time out",
                &[provider_label()],
                self.open.clone(),
            );
            book.add_process_metric(
                "provider_calls_timed_out",
                "Calls to a provider that blocked a worker and timed out",
                &[provider_label()],
                self.timeouts.clone(),
            );
            book.add_process_metric(
                "provider_call_seconds",
                "Duration of calls to a provider",
                &[
                    provider_label(),
                    Label::one_of("call", ProviderCall::ALL.map(ProviderCall::as_str)),
                    Label::one_of("result", CALL_RESULTS),
                ],
                self.calls.clone(),
            );
        });
    }

    fn init_series(&self, provider: &str) {
        let label = ProviderLabels { provider: provider.to_owned() };
        drop(self.open.get_or_create(&label));
        drop(self.timeouts.get_or_create(&label));
    }

    fn observe_call(&self, provider: &str, call: ProviderCall, result: &'static str, took: Duration) {
        let label = ProviderCallLabels { provider: provider.to_owned(), call: call.as_str(), result };
        self.calls.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// The breaker of one provider. Clones share its state.
#[derive(Clone, Debug)]
pub struct ProviderBreaker {
    provider: Arc<str>,
    state: Arc<Mutex<CircuitBreaker>>,
    metrics: BreakerMetrics,
}

impl ProviderBreaker {
    /// A breaker that is closed.
    #[must_use]
    pub fn new(provider: &str, metrics: BreakerMetrics) -> Self {
        metrics.init_series(provider);
        Self { provider: provider.into(), state: Arc::default(), metrics }
    }

    /// Admits one caller, for any number of calls until it drops the returned admission.
    pub fn admit_call(&self) -> Result<Admission, BreakerOpen> {
        self.lock().admit_call(boot_time())?;
        Ok(Admission { breaker: self.clone(), outcome_recorded: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, CircuitBreaker> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_outcome(&self, outcome: CallOutcome) {
        let label = || ProviderLabels { provider: self.provider.to_string() };
        if matches!(outcome, CallOutcome::TimedOut { .. }) {
            self.metrics.timeouts.get_or_create(&label()).inc();
        }
        let (before, after) = {
            let mut breaker = self.lock();
            let before = breaker.is_open();
            breaker.record_outcome(outcome, boot_time());
            (before, breaker.is_open())
        };
        if before != after {
            self.metrics.open.get_or_create(&label()).set(i64::from(after));
            if after {
                tracing::warn!(provider = %self.provider, "its calls time out: its circuit breaker is open, and it is not called for a while");
            } else {
                tracing::info!(provider = %self.provider, "it answers again: its circuit breaker is closed");
            }
        }
    }
}

/// Permission to call a provider.
#[derive(Debug)]
pub struct Admission {
    breaker: ProviderBreaker,
    outcome_recorded: AtomicBool,
}

impl Admission {
    /// Makes a call that only the provider can answer, and records whether it answered. A call that is dropped before
    /// its end, for example because it was cut off, counts as unanswered.
    pub async fn call_provider<T>(
        &self,
        what: ProviderCall,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure_call(what, call, true).await
    }

    /// The same for a call that may be answered without the provider: an answer then proves nothing.
    pub async fn call_maybe_cached<T>(
        &self,
        what: ProviderCall,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure_call(what, call, false).await
    }

    async fn measure_call<T>(
        &self,
        what: ProviderCall,
        call: impl Future<Output = Result<T, ProviderError>>,
        answer_proves: bool,
    ) -> Result<T, ProviderError> {
        let mut underway =
            CallInProgress { admission: self, call: what, began: Instant::now(), is_done: false };
        let provider = &*self.breaker.provider;
        let span = tracing::debug_span!(
            target: TRACE_TARGET,
            "provider call",
            provider,
            call = what.as_str(),
            error = Empty,
        );
        let result = call.instrument(span.clone()).await;
        if let Err(error) = &result {
            span.record("error", display(error));
        }
        underway.is_done = true;
        underway.record_result(result.as_ref().err().map_or(RESULT_OK, |error| error.class.as_str()));
        let failure = result.as_ref().err().filter(|error| error.class == ErrorClass::Transient);
        let failure = failure.map(|error| (error.endpoint.as_str(), error.message.as_str()));
        let outcome = CallOutcome::classify(underway.began.elapsed(), failure);
        if answer_proves || outcome != CallOutcome::Responded {
            self.record_outcome(outcome);
        }
        result
    }

    fn record_outcome(&self, outcome: CallOutcome) {
        self.outcome_recorded.store(true, Ordering::Relaxed);
        self.breaker.record_outcome(outcome);
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if !self.outcome_recorded.load(Ordering::Relaxed) {
            self.breaker.lock().abandon_probe(boot_time());
        }
    }
}

/// A call that is under way.
struct CallInProgress<'a> {
    admission: &'a Admission,
    call: ProviderCall,
    began: Instant,
    is_done: bool,
}

impl CallInProgress<'_> {
    fn record_result(&self, result: &'static str) {
        let breaker = &self.admission.breaker;
        breaker.metrics.observe_call(&breaker.provider, self.call, result, self.began.elapsed());
    }
}

impl Drop for CallInProgress<'_> {
    fn drop(&mut self) {
        let took: Duration = self.began.elapsed();
        if self.is_done {
            return;
        }
        self.record_result(RESULT_TIMED_OUT);
        let sentence = format!("it was given up after {} s without an answer", took.as_secs());
        let outcome = CallOutcome::classify(took, Some((&self.admission.breaker.provider, &sentence)));
        if outcome != CallOutcome::Responded {
            self.admission.record_outcome(outcome);
        }
    }
}
