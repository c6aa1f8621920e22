//! Recovery brakes of this shepherd, evaluated before each new ladder.
//!
//! They are recorded in the BMDB for people.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::connection::error::BmdbError;
use crate::model::brake::{ALL_PROVIDERS, engaged_brakes};

/// How long a count of the whole fleet is used. The machines that fell silent recently are counted each time.
const FLEET_COUNT_AGE: Duration = Duration::from_secs(10);

/// Evaluates and records the recovery brakes.
pub struct RecoveryBrakes {
    bmdb: Bmdb,
    monitored: Mutex<Option<(Instant, BTreeMap<String, u64>)>>,
}

impl RecoveryBrakes {
    /// The brakes over the fleet of this BMDB.
    #[must_use]
    pub fn new(bmdb: Bmdb) -> Self {
        Self { bmdb, monitored: Mutex::new(None) }
    }

    /// Why new ladders for machines of `provider` are stopped; `None` if no brake is engaged.
    pub async fn brake_reason(&self, provider: &str) -> Result<Option<String>, BmdbError> {
        let verdicts = self.engaged_brakes().await?;
        Ok(verdicts.get(provider).or_else(|| verdicts.get(ALL_PROVIDERS)).cloned())
    }

    /// The reason of every engaged brake, by provider or `*`.
    async fn engaged_brakes(&self) -> Result<BTreeMap<String, String>, BmdbError> {
        let (_, policy) = self.bmdb.policy();
        let watched = self.monitored_counts().await?;
        let lately = self.bmdb.count_recently_silent_machines(policy.recovery_brake.window).await?;
        Ok(engaged_brakes(&watched, &lately, &policy.recovery_brake))
    }

    async fn monitored_counts(&self) -> Result<BTreeMap<String, u64>, BmdbError> {
        let known = self.monitored.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, counts)) = known
            && at.elapsed() < FLEET_COUNT_AGE
        {
            return Ok(counts);
        }
        let counts = self.bmdb.count_watched_machines().await?;
        *self.monitored.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((Instant::now(), counts.clone()));
        Ok(counts)
    }

    /// Records which brakes are engaged, and logs those that were released.
    pub async fn record_brakes(&self) -> Result<(), BmdbError> {
        let verdicts = self.engaged_brakes().await?;
        let providers = self.monitored_counts().await?;
        for scope in providers.keys().map(String::as_str).chain([ALL_PROVIDERS]) {
            let verdict = verdicts.get(scope).map(String::as_str);
            if let Some(reason) = verdict {
                tracing::warn!(scope, reason, "recovery is held");
            }
            if self.bmdb.set_recovery_brake(scope, verdict).await? {
                tracing::info!(scope, "recovery is released");
            }
        }
        Ok(())
    }
}
