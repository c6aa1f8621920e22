//! Brakes: before we believe that much went wrong at once, we suspect ourselves.
//!
//! A network split, a stopped callback server or a wrong clock looks like many
//! machines dying at the same time. Machines that really die, die one by one.
//! A brake is derived from the facts of the moment, so that it releases itself:
//! nobody has to remember that it is on.

use std::collections::BTreeMap;

use crate::model::policy::RecoveryBrake;

/// What fell silent lately, of a provider or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Silence {
    /// Machines whose agent we expect to hear.
    pub watched: u64,
    /// Those that fell silent, or began a ladder, within the brake's window.
    pub lately: u64,
}

/// Why new ladders are held, if they are. `whose` names the machines in question.
#[must_use]
pub fn recovery_brake(silence: Silence, brake: &RecoveryBrake, whose: &str) -> Option<String> {
    let Silence { watched, lately } = silence;
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
pub const ALL: &str = "*";

/// The brakes that these counts by provider engage, by provider or [`ALL`].
#[must_use]
pub fn verdicts(
    watched: &BTreeMap<String, u64>,
    lately: &BTreeMap<String, u64>,
    brake: &RecoveryBrake,
) -> BTreeMap<String, String> {
    let mut verdicts: BTreeMap<String, String> = lately
        .iter()
        .filter_map(|(provider, lately)| {
            // A count that is older than the silence may be the smaller one.
            let watched = watched.get(provider).copied().unwrap_or(0).max(*lately);
            let silence = Silence { watched, lately: *lately };
            let reason = recovery_brake(silence, brake, &format!("of provider {provider}"))?;
            Some((provider.clone(), reason))
        })
        .collect();
    let total = lately.values().sum();
    let silence = Silence { watched: watched.values().sum::<u64>().max(total), lately: total };
    if let Some(reason) = recovery_brake(silence, brake, "of all providers") {
        verdicts.insert(ALL.to_owned(), reason);
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::policy::Policy;
    use crate::model::time::Span;

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
            let verdict = recovery_brake(Silence { watched, lately }, &brake, "of rack-a");
            assert_eq!(verdict.is_some(), engaged, "{lately} of {watched}");
        }
    }

    #[test]
    fn brake_of_a_careless_policy_still_needs_one_machine() {
        let brake = RecoveryBrake { window: Span::minutes(10), fraction: 0.0, at_least: 0 };
        assert_eq!(recovery_brake(Silence { watched: 5, lately: 0 }, &brake, "in all"), None);
    }

    fn counts(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn engaged(watched: &[(&str, u64)], lately: &[(&str, u64)]) -> Vec<String> {
        verdicts(&counts(watched), &counts(lately), &Policy::default().recovery_brake).into_keys().collect()
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
