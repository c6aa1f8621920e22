//! Recovery brake: stop recovery when too many machines fall silent at once.
//!
//! A network split, a stopped callback server or a wrong clock looks like many machines dying at the same time.
//! Machines that really die, die one by one. So when much goes wrong at once, we suspect ourselves first. A brake is
//! derived from the facts of the moment, so that it releases itself: nobody has to remember that it is on.

use std::collections::BTreeMap;

use crate::policy::RecoveryBrake;

/// Counts of machines that fell silent lately, of one provider or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SilenceCounts {
    /// Machines whose agent should report.
    pub monitored: u64,
    /// Those that fell silent, or started a ladder, within the brake's window.
    pub recently_silent: u64,
}

/// Why no new ladder may start; `None` when the brake is not engaged. `whose` names the machines in question.
#[must_use]
pub fn recovery_brake_reason(silence: SilenceCounts, brake: &RecoveryBrake, whose: &str) -> Option<String> {
    let SilenceCounts { monitored: watched, recently_silent: lately } = silence;
    if lately < u64::from(brake.at_least.max(1)) {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "fleets are far below 2^52 machines")]
    let share = lately as f64 / watched.max(1) as f64;
    (share > brake.fraction).then(|| {
        format!(
            "brake: {lately} of {watched} machines {whose} fell silent within {}, which is more likely our \
             network or our own outage than theirs; recovery begins when no more of them follow",
            brake.window
        )
    })
}

/// Scope of the brake over all providers.
pub const ALL_PROVIDERS: &str = "*";

/// The brakes that these counts by provider engage, keyed by provider or [`ALL_PROVIDERS`]. Values are the reasons.
#[must_use]
pub fn engaged_brakes(
    watched: &BTreeMap<String, u64>,
    lately: &BTreeMap<String, u64>,
    brake: &RecoveryBrake,
) -> BTreeMap<String, String> {
    let mut verdicts: BTreeMap<String, String> = lately
        .iter()
        .filter_map(|(provider, lately)| {
            // Both counts are read at different times: an older count of monitored machines may be smaller than the
            // silent ones.
            let watched = watched.get(provider).copied().unwrap_or(0).max(*lately);
            let silence = SilenceCounts { monitored: watched, recently_silent: *lately };
            let reason = recovery_brake_reason(silence, brake, &format!("of provider {provider}"))?;
            Some((provider.clone(), reason))
        })
        .collect();
    let total = lately.values().sum();
    let silence =
        SilenceCounts { monitored: watched.values().sum::<u64>().max(total), recently_silent: total };
    if let Some(reason) = recovery_brake_reason(silence, brake, "of all providers") {
        verdicts.insert(ALL_PROVIDERS.to_owned(), reason);
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use crate::time::Span;

    #[test]
    fn brake_engages_by_share_and_never_for_a_few() {
        let brake = RecoveryBrake { window: Span::minutes(10), fraction: 0.2, at_least: 5 };
        for (watched, lately, engaged) in [
            (0, 0, false),
            (4, 4, false),
            (5, 5, true),
            (20, 4, false),
            (25, 5, false),
            (24, 5, true),
            (1000, 200, false),
            (1000, 201, true),
        ] {
            let verdict = recovery_brake_reason(
                SilenceCounts { monitored: watched, recently_silent: lately },
                &brake,
                "of rack-a",
            );
            assert_eq!(verdict.is_some(), engaged, "{lately} of {watched}");
        }
    }

    #[test]
    fn brake_needs_at_least_one_silent_machine() {
        let brake = RecoveryBrake { window: Span::minutes(10), fraction: 0.0, at_least: 0 };
        assert_eq!(
            recovery_brake_reason(SilenceCounts { monitored: 5, recently_silent: 0 }, &brake, "in all"),
            None
        );
    }

    fn counts(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn engaged(watched: &[(&str, u64)], lately: &[(&str, u64)]) -> Vec<String> {
        engaged_brakes(&counts(watched), &counts(lately), &Policy::default().recovery_brake)
            .into_keys()
            .collect()
    }

    #[test]
    fn brake_of_one_provider_does_not_engage_for_others() {
        assert_eq!(engaged(&[("a", 10), ("b", 1000)], &[("a", 6)]), ["a"]);
        assert!(engaged(&[("a", 10), ("b", 1000)], &[("a", 4), ("b", 100)]).is_empty());
    }

    #[test]
    fn brake_over_all_providers_engages_when_all_are_silent() {
        assert_eq!(engaged(&[("a", 10), ("b", 10)], &[("a", 3), ("b", 3)]), ["*"]);
        assert_eq!(engaged(&[("a", 100), ("b", 100)], &[("a", 60), ("b", 60)]), ["*", "a", "b"]);
    }

    #[test]
    fn silence_newer_than_the_fleet_count_still_counts() {
        assert_eq!(engaged(&[], &[("a", 6)]), ["*", "a"]);
    }
}
