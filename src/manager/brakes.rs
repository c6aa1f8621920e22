//! The recovery brakes of this shepherd: asked before each new ladder, and told
//! to the BMDB for people.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::model::brake::{ALL, verdicts};

/// How long a count of the whole fleet is believed. What fell silent lately is counted anew each
/// time.
const FLEET_COUNT_AGE: Duration = Duration::from_secs(10);

/// See the module.
pub struct Brakes {
    bmdb: Bmdb,
    watched: Mutex<Option<(Instant, BTreeMap<String, u64>)>>,
}

impl Brakes {
    /// Brakes over the fleet of this BMDB.
    #[must_use]
    pub fn new(bmdb: Bmdb) -> Self {
        Self { bmdb, watched: Mutex::new(None) }
    }

    /// Why new ladders for machines of `provider` are held, if they are.
    pub async fn hold(&self, provider: &str) -> Result<Option<String>, BmdbError> {
        let verdicts = self.verdicts().await?;
        Ok(verdicts.get(provider).or_else(|| verdicts.get(ALL)).cloned())
    }

    /// Every brake that is on now, by provider or `*`.
    async fn verdicts(&self) -> Result<BTreeMap<String, String>, BmdbError> {
        let (_, policy) = self.bmdb.policy();
        let watched = self.watched().await?;
        let lately = self.bmdb.lately_silent(policy.recovery_brake.window).await?;
        Ok(verdicts(&watched, &lately, &policy.recovery_brake))
    }

    async fn watched(&self) -> Result<BTreeMap<String, u64>, BmdbError> {
        let known = self.watched.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, counts)) = known
            && at.elapsed() < FLEET_COUNT_AGE
        {
            return Ok(counts);
        }
        let counts = self.bmdb.watched_machines().await?;
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), counts.clone()));
        Ok(counts)
    }

    /// Writes down which brakes are on, and logs those that were released.
    pub async fn tell(&self) -> Result<(), BmdbError> {
        let verdicts = self.verdicts().await?;
        let providers = self.watched().await?;
        for scope in providers.keys().map(String::as_str).chain([ALL]) {
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
