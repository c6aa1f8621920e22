//! What can go wrong with a simulated machine and its provider, and when it does
//! unasked.
//!
//! A *named* fault is struck by a person or a test. A *profile* strikes by
//! itself: which fault hits which machine after how long is drawn from the seed,
//! so the same seed breaks the same machines in the same way. Only the moment a
//! machine comes up is not the seed's to choose.

use chrono::TimeDelta;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::simulator::seed::Seed;

/// How much goes wrong unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Nothing.
    None,
    /// Now and then an agent dies or hangs, a boot is slow, an API call fails before doing anything.
    Mild,
    /// Also machines that hang, die, lose power or their SSH server, and API answers that are lost after the deed.
    Harsh,
}

/// A fault of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The agent dies. SSH still answers: starting the agent again is enough.
    Kill,
    /// The agent stays and falls silent. SSH still answers: starting it again is enough.
    AgentHang,
    /// The whole machine hangs: SSH takes connections and never says a word. A reboot revives it.
    Hang,
    /// The machine is gone from the network and ignores a reboot. Only a power cycle revives it.
    Dead,
    /// The machine loses power and its power control fails. Nothing but `heal` revives it.
    PowerFail,
    /// The SSH server stops; the agent goes on. A reboot starts it again.
    SshRefuse,
    /// Boots take ten times as long and SSH commands answer late, until `heal`.
    Slow,
    /// The machine presents another SSH host key, as if it had been reinstalled or intercepted.
    NewHostKey,
    /// Every upload and enrolment fails as on a full disk, until `heal`.
    DiskFull,
    /// Everything that was broken by a fault is whole again, the first host key included.
    Heal,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 10] = [
        Self::Kill,
        Self::AgentHang,
        Self::Hang,
        Self::Dead,
        Self::PowerFail,
        Self::SshRefuse,
        Self::Slow,
        Self::NewHostKey,
        Self::DiskFull,
        Self::Heal,
    ];
}

/// A fault of the provider's API, over all machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ProviderFault {
    /// The list of machines comes back empty, and well-formed.
    ListEmpty,
    /// Asking for the list fails.
    ListError,
    /// The list ends in the middle of its text.
    ListTorn,
    /// The list lacks every third machine.
    ListShort,
    /// Every call takes five seconds.
    ApiSlow,
    /// Every call fails, as if the provider were gone.
    ApiError,
    /// The API is whole again.
    Heal,
}

/// An API call that fails unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFault {
    /// Nothing was done.
    Before,
    /// It was done, and the answer is an error all the same.
    After,
}

impl Profile {
    /// The `turn`-th fault of a machine under this profile, and how long after the machine's agent
    /// came up (or the fault before) it strikes.
    #[must_use]
    pub fn fault(self, seed: Seed, index: u32, turn: u64) -> Option<(TimeDelta, Fault)> {
        let (mean, weights): (_, &[(u64, Fault)]) = match self {
            Self::None => return None,
            Self::Mild => (TimeDelta::minutes(20), &[(700, Fault::Kill), (300, Fault::AgentHang)]),
            Self::Harsh => (
                TimeDelta::minutes(6),
                &[
                    (350, Fault::Kill),
                    (150, Fault::AgentHang),
                    (250, Fault::Hang),
                    (150, Fault::Dead),
                    (70, Fault::SshRefuse),
                    (30, Fault::PowerFail),
                ],
            ),
        };
        let mut point = seed.below(1000, "fault", index, turn);
        for (weight, fault) in weights {
            if point < *weight {
                return Some((seed.around(mean, "fault delay", index, turn), *fault));
            }
            point -= weight;
        }
        None
    }

    /// Whether the `turn`-th boot of a machine is a slow one.
    #[must_use]
    pub fn slow_boot(self, seed: Seed, index: u32, turn: u64) -> bool {
        match self {
            Self::None => false,
            Self::Mild => seed.happens(100, "slow boot", index, turn),
            Self::Harsh => seed.happens(200, "slow boot", index, turn),
        }
    }

    /// What befalls the `turn`-th call of the provider's API.
    #[must_use]
    pub fn api_fault(self, seed: Seed, turn: u64) -> Option<ApiFault> {
        let point = seed.below(1000, "api", 0, turn);
        let (before, after) = match self {
            Self::None => (0, 0),
            Self::Mild => (20, 0),
            Self::Harsh => (50, 20),
        };
        if point < before {
            Some(ApiFault::Before)
        } else if point < before + after {
            Some(ApiFault::After)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_profile_repeats_itself_from_its_seed() {
        for profile in [Profile::Mild, Profile::Harsh] {
            let run = |seed| (0..50).map(|turn| profile.fault(seed, 3, turn)).collect::<Vec<_>>();
            assert_eq!(run(Seed(1)), run(Seed(1)));
            assert_ne!(run(Seed(1)), run(Seed(2)));
            assert!(run(Seed(1)).iter().all(Option::is_some), "the weights add up to a thousand");
        }
    }

    #[test]
    fn nothing_goes_wrong_without_faults() {
        for turn in 0..1000 {
            assert_eq!(Profile::None.fault(Seed(1), 0, turn), None);
            assert!(!Profile::None.slow_boot(Seed(1), 0, turn));
            assert_eq!(Profile::None.api_fault(Seed(1), turn), None);
        }
    }

    #[test]
    fn mild_never_needs_more_than_a_new_agent_and_never_loses_an_answer() {
        let struck: HashSet<_> = (0..1000)
            .filter_map(|turn| Profile::Mild.fault(Seed(1), 0, turn))
            .map(|(_, fault)| fault)
            .collect();
        assert_eq!(struck, HashSet::from([Fault::Kill, Fault::AgentHang]));
        assert!((0..1000).all(|turn| Profile::Mild.api_fault(Seed(1), turn) != Some(ApiFault::After)));
    }

    #[test]
    fn harsh_strikes_with_all_it_has() {
        let struck: HashSet<_> = (0..1000)
            .filter_map(|turn| Profile::Harsh.fault(Seed(1), 0, turn))
            .map(|(_, fault)| fault)
            .collect();
        for fault in [Fault::Kill, Fault::Hang, Fault::Dead, Fault::PowerFail, Fault::SshRefuse] {
            assert!(struck.contains(&fault), "{fault:?}");
        }
        assert!((0..1000).any(|turn| Profile::Harsh.api_fault(Seed(1), turn) == Some(ApiFault::After)));
    }
}
