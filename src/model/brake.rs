//! Brakes: before we believe that much went wrong at once, we suspect ourselves.
//!
//! A network split, a stopped callback server or a wrong clock looks like many
//! machines dying at the same time. Machines that really die, die one by one.
//! A brake is derived from the facts of the moment, so that it releases itself:
//! nobody has to remember that it is on.

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

#[cfg(test)]
mod tests {
    use super::*;
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
}
