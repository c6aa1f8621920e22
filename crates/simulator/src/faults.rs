//! Fault injection: named faults and random profiles.
//!
//! A person or a test injects a *named* fault. A *profile* injects faults by itself: which fault hits which machine
//! after how long is drawn from the seed, so the same seed breaks the same machines in the same way. The time counts
//! from the start of an agent, and that moment does not depend on the seed alone.

use chrono::TimeDelta;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::seed::Seed;

/// How many faults occur by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FaultProfile {
    /// Nothing goes wrong by itself.
    None,
    /// Now and then an agent dies or hangs, a boot is slow, an API call fails before doing anything.
    Mild,
    /// Also machines that hang, die, lose power or their SSH server, and API responses that are lost after the call was
    /// carried out.
    Harsh,
}

/// A fault of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The agent dies. SSH still answers: starting the agent again is enough.
    Kill,
    /// The agent keeps running and sends nothing. SSH still answers: restarting the agent is enough.
    AgentHang,
    /// The whole machine hangs: SSH accepts connections and sends nothing. A reboot revives it.
    Hang,
    /// The machine is gone from the network and ignores a reboot. Only switching its power off and on revives it.
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
    /// Everything that a fault broke works again, and the first host key is back.
    Heal,
}

impl Fault {
    /// Every fault, in the order of the enumeration.
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
    /// The request for the list fails.
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

/// A random fault of one API call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFault {
    /// The call fails before anything was done.
    Before,
    /// The call is carried out, but its response is an error.
    After,
}

impl FaultProfile {
    /// The `turn`-th fault of a machine under this profile, and the time from the start of its agent (or the fault
    /// before) until it occurs.
    #[must_use]
    pub fn draw_fault(self, seed: Seed, index: u32, turn: u64) -> Option<(TimeDelta, Fault)> {
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
        let mut point = seed.number_below(1000, "fault", index, turn);
        for (weight, fault) in weights {
            if point < *weight {
                return Some((seed.spread(mean, "fault delay", index, turn), *fault));
            }
            point -= weight;
        }
        None
    }

    /// Whether the `turn`-th boot of a machine is a slow one.
    #[must_use]
    pub fn is_slow_boot(self, seed: Seed, index: u32, turn: u64) -> bool {
        match self {
            Self::None => false,
            Self::Mild => seed.chance(100, "slow boot", index, turn),
            Self::Harsh => seed.chance(200, "slow boot", index, turn),
        }
    }

    /// The fault of the `turn`-th call of the provider's API; `None` for most calls.
    #[must_use]
    pub fn draw_api_fault(self, seed: Seed, turn: u64) -> Option<ApiFault> {
        let point = seed.number_below(1000, "api", 0, turn);
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
    fn profile_is_reproducible_from_its_seed() {
        for profile in [FaultProfile::Mild, FaultProfile::Harsh] {
            let run = |seed| (0..50).map(|turn| profile.draw_fault(seed, 3, turn)).collect::<Vec<_>>();
            assert_eq!(run(Seed(1)), run(Seed(1)));
            assert_ne!(run(Seed(1)), run(Seed(2)));
            assert!(run(Seed(1)).iter().all(Option::is_some), "the weights add up to a thousand");
        }
    }

    #[test]
    fn profile_none_draws_no_faults() {
        for turn in 0..1000 {
            assert_eq!(FaultProfile::None.draw_fault(Seed(1), 0, turn), None);
            assert!(!FaultProfile::None.is_slow_boot(Seed(1), 0, turn));
            assert_eq!(FaultProfile::None.draw_api_fault(Seed(1), turn), None);
        }
    }

    #[test]
    fn mild_never_needs_more_than_a_new_agent_and_never_loses_an_answer() {
        let struck: HashSet<_> = (0..1000)
            .filter_map(|turn| FaultProfile::Mild.draw_fault(Seed(1), 0, turn))
            .map(|(_, fault)| fault)
            .collect();
        assert_eq!(struck, HashSet::from([Fault::Kill, Fault::AgentHang]));
        assert!(
            (0..1000).all(|turn| FaultProfile::Mild.draw_api_fault(Seed(1), turn) != Some(ApiFault::After))
        );
    }

    #[test]
    fn profile_harsh_draws_every_fault() {
        let struck: HashSet<_> = (0..1000)
            .filter_map(|turn| FaultProfile::Harsh.draw_fault(Seed(1), 0, turn))
            .map(|(_, fault)| fault)
            .collect();
        for fault in [Fault::Kill, Fault::Hang, Fault::Dead, Fault::PowerFail, Fault::SshRefuse] {
            assert!(struck.contains(&fault), "{fault:?}");
        }
        assert!(
            (0..1000).any(|turn| FaultProfile::Harsh.draw_api_fault(Seed(1), turn) == Some(ApiFault::After))
        );
    }
}
