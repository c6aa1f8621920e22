//! The recovery brakes of this shepherd: asked before each new ladder, and told
//! to the BMDB for people.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::model::brake::{Silence, recovery_brake};
use crate::model::policy::Policy;

/// How long a count of the whole fleet is believed. What fell silent lately is counted anew each
/// time.
const FLEET_COUNT_AGE: Duration = Duration::from_secs(10);

/// Scope of the brake over all providers.
const ALL: &str = "*";

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
        Ok(judge(&watched, &lately, &policy))
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

/// The brakes that these counts engage.
fn judge(
    watched: &BTreeMap<String, u64>,
    lately: &BTreeMap<String, u64>,
    policy: &Policy,
) -> BTreeMap<String, String> {
    let mut verdicts: BTreeMap<String, String> = lately
        .iter()
        .filter_map(|(provider, lately)| {
            // A count that is older than the silence may be the smaller one.
            let watched = watched.get(provider).copied().unwrap_or(0).max(*lately);
            let silence = Silence { watched, lately: *lately };
            let reason = recovery_brake(silence, &policy.recovery_brake, &format!("of provider {provider}"))?;
            Some((provider.clone(), reason))
        })
        .collect();
    let total = lately.values().sum();
    let silence = Silence { watched: watched.values().sum::<u64>().max(total), lately: total };
    if let Some(reason) = recovery_brake(silence, &policy.recovery_brake, "of all providers") {
        verdicts.insert(ALL.to_owned(), reason);
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn engaged(watched: &[(&str, u64)], lately: &[(&str, u64)]) -> Vec<String> {
        judge(&counts(watched), &counts(lately), &Policy::default()).into_keys().collect()
    }

    #[test]
    fn one_provider_in_trouble_does_not_hold_the_others() {
        assert_eq!(engaged(&[("a", 10), ("b", 1000)], &[("a", 6)]), ["a"]);
        assert!(engaged(&[("a", 10), ("b", 1000)], &[("a", 4), ("b", 100)]).is_empty());
    }

    #[test]
    fn trouble_everywhere_holds_all() {
        assert_eq!(engaged(&[("a", 10), ("b", 10)], &[("a", 3), ("b", 3)]), ["*"]);
        assert_eq!(engaged(&[("a", 100), ("b", 100)], &[("a", 60), ("b", 60)]), ["*", "a", "b"]);
    }

    #[test]
    fn silence_newer_than_the_count_of_the_fleet_still_counts() {
        assert_eq!(engaged(&[], &[("a", 6)]), ["*", "a"]);
    }
}
