//! The fleet that all machines of a plan share: budgets that one uses up for the others, and brakes that
//! are engaged by what happens to many.
//!
//! The counts are those that the loops take from the database, by the same words: `sql/intent/count_budget_use.sql`,
//! `sql/recovery/count_recently_silent.sql` and `sql/recovery/count_watched.sql`.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::brake::{ALL, verdicts};
use crate::model::cluster::disturb::InCluster;
use crate::model::disturb::Circumstances;
use crate::model::facts::MachineFacts;
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::plan::{Disturbed, Passing};
use crate::model::policy::{Disturbance, Policy};
use crate::model::time::{Timestamp, before};

/// Every machine, and what was done to them lately.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) machines: Vec<Passing>,
    pub(crate) disturbed: Vec<Disturbed>,
    /// When providers were told to take machines back.
    pub(crate) released: Vec<Timestamp>,
}

impl Fleet {
    /// What the fleet goes through, as far as a step to be taken on a machine at `now` needs it.
    pub(crate) fn circumstances(
        &self,
        machine: usize,
        step: Disturbance,
        policy: &Policy,
        now: Timestamp,
    ) -> Circumstances {
        let window = policy.budgets.get(&step).map(|budget| budget.window).unwrap_or_default();
        let since = before(now, window.0);
        let used = self.disturbed.iter().filter(|done| done.step == step && done.at > since);
        let machine = &self.machines[machine];
        Circumstances {
            begun_in_window: u32::try_from(used.clone().count()).unwrap_or(u32::MAX),
            oldest_in_window: used.map(|done| done.at).min(),
            brake: self.brake(&provider_of(&machine.facts), policy, now),
            newer_fence: machine.newer_fence,
            cluster: self.cluster_of(machine, now),
        }
    }

    /// What its cluster says to disturbing a machine: as its curators said last, and whom the plan disturbs by then.
    fn cluster_of(&self, machine: &Passing, now: Timestamp) -> Option<InCluster> {
        let cluster = machine.cluster.as_ref()?;
        let same = |other: &&Passing| {
            other.facts.machine != machine.facts.machine
                && other.cluster.as_ref().is_some_and(|of| of.name == cluster.name)
                && other.facts.recovery.as_ref().is_some_and(|recovery| recovery.acted.is_some())
        };
        let disturbed = self.machines.iter().find(same).map(|other| {
            let provided = other.facts.provided.as_ref();
            provided.map_or_else(|| other.facts.machine.to_string(), |provided| provided.provider_id.clone())
        });
        let seen_at = if machine.curators_answer { Some(now) } else { cluster.seen_at };
        Some(InCluster { seen_at, disturbed, ..cluster.clone() })
    }

    /// The same for a machine that is to be given back.
    pub(crate) fn releasing(&self, machine: usize, policy: &Policy, now: Timestamp) -> Circumstances {
        let since = before(now, policy.release_budget.window.0);
        let used = self.released.iter().copied().filter(|at| *at > since);
        Circumstances {
            begun_in_window: u32::try_from(used.clone().count()).unwrap_or(u32::MAX),
            oldest_in_window: used.min(),
            brake: None,
            newer_fence: self.machines[machine].newer_fence,
            cluster: None,
        }
    }

    /// Records that a step was begun.
    pub(crate) fn disturb(&mut self, machine: MachineId, provider: &str, step: Disturbance, now: Timestamp) {
        self.disturbed.push(Disturbed { step, machine, provider: provider.to_owned(), at: now });
    }

    /// Why new ladders of a provider's machines are held, if they are.
    fn brake(&self, provider: &str, policy: &Policy, now: Timestamp) -> Option<String> {
        let since = before(now, policy.recovery_brake.window.0);
        let (mut watched, mut lately) = (BTreeMap::new(), BTreeMap::<String, BTreeSet<MachineId>>::new());
        for machine in &self.machines {
            let phase = machine.phase.as_str();
            if !WATCHED.iter().any(|watched| watched.as_str() == phase) {
                continue;
            }
            *watched.entry(provider_of(&machine.facts)).or_default() += 1;
            let fell_silent =
                [Phase::Silent, Phase::Recovering].iter().any(|silent| silent.as_str() == phase);
            let ladder = machine.facts.recovery.as_ref().map(|recovery| recovery.started_at);
            if fell_silent && ladder.unwrap_or(machine.phase_since) > since {
                lately.entry(provider_of(&machine.facts)).or_default().insert(machine.facts.machine);
            }
        }
        for done in self.disturbed.iter().filter(|done| done.at > since) {
            let found = self.machines.binary_search_by_key(&done.machine, |machine| machine.facts.machine);
            let ladder = found.ok().and_then(|found| self.machines[found].facts.recovery.as_ref());
            if ladder.is_none_or(|recovery| recovery.started_at > since) {
                lately.entry(done.provider.clone()).or_default().insert(done.machine);
            }
        }
        let lately =
            lately.into_iter().map(|(provider, machines)| (provider, machines.len() as u64)).collect();
        let mut on = verdicts(&watched, &lately, &policy.recovery_brake);
        on.remove(provider).or_else(|| on.remove(ALL))
    }
}

/// Phases in which an agent is expected to be heard.
const WATCHED: [Phase; 5] =
    [Phase::AgentStarting, Phase::Ready, Phase::Installing, Phase::Silent, Phase::Recovering];

/// Whose a machine is, as the database counts it.
pub(crate) fn provider_of(facts: &MachineFacts) -> String {
    facts.provided.as_ref().map_or_else(String::new, |provided| provided.provider.clone())
}
