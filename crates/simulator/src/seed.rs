//! Deterministic randomness from one seed.
//!
//! A value is drawn by its name: its purpose, the machine, the turn. No generator state is stored, so what happens to
//! one machine does not depend on how the others were scheduled, and a restarted simulator continues where it was
//! without having stored anything but counters.

use chrono::TimeDelta;
use ring::digest;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The number that a fleet is derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seed(pub u64);

impl Seed {
    /// The `turn`-th value for `purpose` of machine `index`.
    #[must_use]
    pub fn bytes(self, purpose: &str, index: u32, turn: u64) -> [u8; 32] {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(&self.0.to_be_bytes());
        context.update(&index.to_be_bytes());
        context.update(&turn.to_be_bytes());
        context.update(purpose.as_bytes());
        let mut bytes = [0; 32];
        bytes.copy_from_slice(context.finish().as_ref());
        bytes
    }

    /// The same as a whole number.
    #[must_use]
    pub fn number(self, purpose: &str, index: u32, turn: u64) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.bytes(purpose, index, turn)[..8]);
        u64::from_be_bytes(head)
    }

    /// A whole number below `limit`; 0 when the limit is 0.
    #[must_use]
    pub fn number_below(self, limit: u64, purpose: &str, index: u32, turn: u64) -> u64 {
        self.number(purpose, index, turn).checked_rem(limit).unwrap_or(0)
    }

    /// Whether an event with a probability of `per_mille` in a thousand occurs.
    #[must_use]
    pub fn chance(self, per_mille: u64, purpose: &str, index: u32, turn: u64) -> bool {
        self.number_below(1000, purpose, index, turn) < per_mille
    }

    /// A duration from half of `mean` to one and a half of it.
    #[must_use]
    pub fn spread(self, mean: TimeDelta, purpose: &str, index: u32, turn: u64) -> TimeDelta {
        let mean = u64::try_from(mean.num_milliseconds()).unwrap_or(0);
        let drawn = mean / 2 + self.number_below(mean.max(1), purpose, index, turn);
        TimeDelta::milliseconds(i64::try_from(drawn).unwrap_or(i64::MAX))
    }

    /// A version 4 UUID.
    #[must_use]
    pub fn uuid(self, purpose: &str, index: u32, turn: u64) -> Uuid {
        let mut half = [0; 16];
        half.copy_from_slice(&self.bytes(purpose, index, turn)[..16]);
        uuid::Builder::from_random_bytes(half).into_uuid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_their_name_alone() {
        let seed = Seed(7);
        assert_eq!(seed.bytes("boot", 3, 1), seed.bytes("boot", 3, 1));
        assert_ne!(seed.bytes("boot", 3, 1), seed.bytes("boot", 3, 2));
        assert_ne!(seed.bytes("boot", 3, 1), seed.bytes("boot", 4, 1));
        assert_ne!(seed.bytes("boot", 3, 1), seed.bytes("fault", 3, 1));
        assert_ne!(seed.bytes("boot", 3, 1), Seed(8).bytes("boot", 3, 1));
    }

    #[test]
    fn chance_matches_its_share_over_many_draws() {
        let hits = (0..10_000).filter(|turn| Seed(1).chance(800, "persists", 0, *turn)).count();
        assert!((7_700..8_300).contains(&hits), "{hits}");
    }

    #[test]
    fn a_duration_stays_around_its_mean() {
        let mean = TimeDelta::seconds(10);
        for turn in 0..1000 {
            let drawn = Seed(2).spread(mean, "boot", 0, turn);
            assert!(drawn >= mean / 2 && drawn <= mean * 3 / 2, "{drawn}");
        }
        assert_eq!(Seed(2).spread(TimeDelta::zero(), "boot", 0, 0), TimeDelta::zero());
    }
}
