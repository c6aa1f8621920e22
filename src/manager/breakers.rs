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

use crate::bmdb::metrics::Metrics;
use crate::bmdb::session::boot_time;
use crate::model::breaker::{Breaker, Heard, Open};
use crate::providers::provider::{ErrorClass, ProviderError};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByProvider {
    provider: String,
}

/// What the breakers of a process count, by provider: a name of the configuration.
#[derive(Clone, Debug, Default)]
pub struct BreakerMetrics {
    open: Family<ByProvider, Gauge>,
    hung: Family<ByProvider, Counter>,
}

impl BreakerMetrics {
    /// Shows what is counted beside the rest.
    pub fn register(&self, common: &Metrics) {
        common.register(|registry| {
            registry.register(
                "provider_breaker_open",
                "1 while a provider is left alone because its calls hang",
                self.open.clone(),
            );
            registry.register(
                "provider_calls_hung",
                "Calls of a provider that held a worker and were not answered",
                self.hung.clone(),
            );
        });
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
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure(call, true).await
    }

    /// The same of what may be known without asking the provider: an answer proves nothing then.
    pub async fn look_up<T>(
        &self,
        call: impl Future<Output = Result<T, ProviderError>>,
    ) -> Result<T, ProviderError> {
        self.measure(call, false).await
    }

    async fn measure<T>(
        &self,
        call: impl Future<Output = Result<T, ProviderError>>,
        answer_proves: bool,
    ) -> Result<T, ProviderError> {
        let mut underway = Underway { admission: self, began: Instant::now(), over: false };
        let result = call.await;
        underway.over = true;
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
    began: Instant,
    over: bool,
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let took: Duration = self.began.elapsed();
        if self.over {
            return;
        }
        let sentence = format!("it was given up after {} s without an answer", took.as_secs());
        let heard = Heard::of(took, Some((&self.admission.breaker.provider, &sentence)));
        if heard != Heard::Answered {
            self.admission.tell(heard);
        }
    }
}
