//! The breakers of one shepherd's providers, asked before each call.
//!
//! [`Breaker`] decides; this holds one for each provider, measures calls and
//! counts. What a shepherd knows of a provider that hangs is its own: another one
//! finds that out by itself, and may well have a better way there.

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

use crate::bmdb::metric_book::Label;
use crate::bmdb::metrics::{Metrics, provider_label};
use crate::bmdb::session::boot_time;
use crate::model::breaker::{Breaker, Heard, Open};
use crate::model::traces::TRACES;
use crate::providers::provider::{ErrorClass, ProviderError};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByProvider {
    provider: String,
}

/// What a provider is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// Everything it has.
    List,
    /// One machine.
    LookAt,
    /// A machine that was made under an intent.
    FindByIntent,
    /// To hand out a machine.
    Create,
    /// What can be done to a machine.
    Rungs,
    /// To reboot one.
    Reboot,
    /// To switch one's power.
    Power,
    /// To take one back.
    Release,
}

impl Call {
    const ALL: [Self; 8] = [
        Self::List,
        Self::LookAt,
        Self::FindByIntent,
        Self::Create,
        Self::Rungs,
        Self::Reboot,
        Self::Power,
        Self::Release,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::LookAt => "look-at",
            Self::FindByIntent => "find-by-intent",
            Self::Create => "create",
            Self::Rungs => "rungs",
            Self::Reboot => "reboot",
            Self::Power => "power",
            Self::Release => "release",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    provider: String,
    call: &'static str,
    result: &'static str,
}

/// A call that was answered with what was asked for.
const ANSWERED: &str = "answered";
/// A call that was cut off.
const GIVEN_UP: &str = "given_up";
/// How calls end.
const CALL_RESULTS: [&str; 7] = [
    ANSWERED,
    GIVEN_UP,
    ErrorClass::Transient.as_str(),
    ErrorClass::Permanent.as_str(),
    ErrorClass::NotFound.as_str(),
    ErrorClass::Configuration.as_str(),
    ErrorClass::Unreadable.as_str(),
];
/// Upper bounds in seconds: a file on this host to the longest that a call may take.
const CALL_BOUNDS: [f64; 11] = [0.001, 0.005, 0.02, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0];

/// What the breakers of a process count, by provider: a name of the configuration.
#[derive(Clone, Debug)]
pub struct BreakerMetrics {
    open: Family<ByProvider, Gauge>,
    hung: Family<ByProvider, Counter>,
    calls: Family<ByCall, Histogram, fn() -> Histogram>,
}

impl Default for BreakerMetrics {
    fn default() -> Self {
        Self {
            open: Family::default(),
            hung: Family::default(),
            calls: Family::new_with_constructor(|| Histogram::new(CALL_BOUNDS)),
        }
    }
}

impl BreakerMetrics {
    /// Enters what is counted beside the rest.
    pub fn register(&self, common: &Metrics) {
        common.register(|book| {
            book.add(
                "provider_breaker_open",
                "1 while the circuit breaker of a provider is open because its calls time out",
                &[provider_label()],
                self.open.clone(),
            );
            book.add(
                "provider_calls_timed_out",
                "Calls to a provider that blocked a worker and timed out",
                &[provider_label()],
                self.hung.clone(),
            );
            book.add(
                "provider_call_seconds",
                "Duration of calls to a provider",
                &[
                    provider_label(),
                    Label::one_of("call", Call::ALL.map(Call::as_str)),
                    Label::one_of("result", CALL_RESULTS),
                ],
                self.calls.clone(),
            );
        });
    }

    fn begin_at_zero(&self, provider: &str) {
        let label = ByProvider { provider: provider.to_owned() };
        drop(self.open.get_or_create(&label));
        drop(self.hung.get_or_create(&label));
    }

    fn called(&self, provider: &str, call: Call, result: &'static str, took: Duration) {
        let label = ByCall { provider: provider.to_owned(), call: call.as_str(), result };
        self.calls.get_or_create(&label).observe(took.as_secs_f64());
    }
}

/// The breaker of one provider; its clones are the same one.
#[derive(Clone, Debug)]
pub struct ProviderBreaker {
    provider: Arc<str>,
    state: Arc<Mutex<Breaker>>,
    metrics: BreakerMetrics,
}

impl ProviderBreaker {
    /// One that is closed.
    #[must_use]
    pub fn new(provider: &str, metrics: BreakerMetrics) -> Self {
        metrics.begin_at_zero(provider);
        Self { provider: provider.into(), state: Arc::default(), metrics }
    }

    /// Lets one caller in, for as many calls as it keeps what is returned.
    pub fn admit(&self) -> Result<Admission, Open> {
        self.lock().admit(boot_time())?;
        Ok(Admission { breaker: self.clone(), heard: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, Breaker> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self, heard: Heard) {
        let label = || ByProvider { provider: self.provider.to_string() };
        if matches!(heard, Heard::Hung { .. }) {
            self.metrics.hung.get_or_create(&label()).inc();
        }
        let (before, after) = {
            let mut breaker = self.lock();
            let before = breaker.is_open();
            breaker.heard(heard, boot_time());
            (before, breaker.is_open())
        };
        if before != after {
            self.metrics.open.get_or_create(&label()).set(i64::from(after));
            if after {
                tracing::warn!(provider = %self.provider, "its calls hang: it is left alone for a while");
            } else {
                tracing::info!(provider = %self.provider, "it answers again");
            }
        }
    }
}

/// Leave to ask a provider.
#[derive(Debug)]
pub struct Admission {
    breaker: ProviderBreaker,
    heard: AtomicBool,
}

impl Admission {
    /// Makes a call that only the provider can answer, and takes note of whether it does. A call that is
    /// dropped in the middle, as one is that is cut off, was not answered.
    pub async fn ask<T>(
        &self,
        what: Call,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure(what, call, true).await
    }

    /// The same of what may be known without asking the provider: an answer proves nothing then.
    pub async fn look_up<T>(
        &self,
        what: Call,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure(what, call, false).await
    }

    async fn measure<T>(
        &self,
        what: Call,
        call: impl Future<Output = Result<T, ProviderError>>,
        answer_proves: bool,
    ) -> Result<T, ProviderError> {
        let mut underway = Underway { admission: self, what, began: Instant::now(), over: false };
        let provider = &*self.breaker.provider;
        let span = tracing::debug_span!(
            target: TRACES,
            "provider call",
            provider,
            call = what.as_str(),
            error = Empty,
        );
        let result = call.instrument(span.clone()).await;
        if let Err(error) = &result {
            span.record("error", display(error));
        }
        underway.over = true;
        underway.count(result.as_ref().err().map_or(ANSWERED, |error| error.class.as_str()));
        let failure = result.as_ref().err().filter(|error| error.class == ErrorClass::Transient);
        let failure = failure.map(|error| (error.endpoint.as_str(), error.sentence.as_str()));
        let heard = Heard::of(underway.began.elapsed(), failure);
        if answer_proves || heard != Heard::Answered {
            self.tell(heard);
        }
        result
    }

    fn tell(&self, heard: Heard) {
        self.heard.store(true, Ordering::Relaxed);
        self.breaker.heard(heard);
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if !self.heard.load(Ordering::Relaxed) {
            self.breaker.lock().left(boot_time());
        }
    }
}

/// A call on its way.
struct Underway<'a> {
    admission: &'a Admission,
    what: Call,
    began: Instant,
    over: bool,
}

impl Underway<'_> {
    fn count(&self, result: &'static str) {
        let breaker = &self.admission.breaker;
        breaker.metrics.called(&breaker.provider, self.what, result, self.began.elapsed());
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let took: Duration = self.began.elapsed();
        if self.over {
            return;
        }
        self.count(GIVEN_UP);
        let sentence = format!("it was given up after {} s without an answer", took.as_secs());
        let heard = Heard::of(took, Some((&self.admission.breaker.provider, &sentence)));
        if heard != Heard::Answered {
            self.admission.tell(heard);
        }
    }
}
