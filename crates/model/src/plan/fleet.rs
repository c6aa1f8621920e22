//! Shared state of a plan: budgets used and brakes engaged.
//!
//! All machines of a plan share it: one machine uses up a budget for the others, and many silent machines engage a
//! brake. The counts are those that the loops take from the database: `sql/intent/count_budget_use.sql`,
//! `sql/recovery/count_recently_silent.sql` and `Bmdb::count_watched_machines`.

use std::collections::{BTreeMap, BTreeSet};

use crate::brake::{ALL_PROVIDERS, engaged_brakes};
use crate::cluster::disruption::ClusterContext;
use crate::disruption::DisruptionContext;
use crate::facts::MachineFacts;
use crate::ids::MachineId;
use crate::phase::Phase;
use crate::plan::{PlanMachine, RecordedDisruption};
use crate::policy::{DisruptionKind, Policy};
use crate::time::{Timestamp, before};

/// Every machine, and the recent disruptions and releases.
#[derive(Debug)]
pub(crate) struct PlanFleet {
    pub(crate) machines: Vec<PlanMachine>,
    pub(crate) recent_disruptions: Vec<RecordedDisruption>,
    /// When releases to providers were ordered.
    pub(crate) recent_releases: Vec<Timestamp>,
}

impl PlanFleet {
    /// The state of the fleet that a step on a machine at `now` is checked against.
    pub(crate) fn disruption_context(
        &self,
        machine: usize,
        step: DisruptionKind,
        policy: &Policy,
        now: Timestamp,
    ) -> DisruptionContext {
        let window = policy.budgets.get(&step).map(|budget| budget.window).unwrap_or_default();
        let since = before(now, window.0);
        let used = self.recent_disruptions.iter().filter(|done| done.step == step && done.at > since);
        let machine = &self.machines[machine];
        DisruptionContext {
            started_in_window: u32::try_from(used.clone().count()).unwrap_or(u32::MAX),
            oldest_in_window: used.map(|done| done.at).min(),
            brake: self.recovery_brake(&provider_name(&machine.facts), policy, now),
            unknown_fence: machine.unknown_fence,
            cluster: self.cluster_context(machine, now),
        }
    }

    /// The cluster's state for the disruption check: as its curators last reported it, and the member that the plan
    /// disrupts by then.
    fn cluster_context(&self, machine: &PlanMachine, now: Timestamp) -> Option<ClusterContext> {
        let cluster = machine.cluster.as_ref()?;
        let same = |other: &&PlanMachine| {
            other.facts.machine != machine.facts.machine
                && other.cluster.as_ref().is_some_and(|of| of.name == cluster.name)
                && other.facts.recovery.as_ref().is_some_and(|recovery| recovery.last_action.is_some())
        };
        let disrupted = self.machines.iter().find(same).map(|other| {
            let provided = other.facts.provider_record.as_ref();
            provided.map_or_else(|| other.facts.machine.to_string(), |provided| provided.provider_id.clone())
        });
        let seen_at = if machine.curators_answer { Some(now) } else { cluster.observed_at };
        Some(ClusterContext { observed_at: seen_at, other_disrupted: disrupted, ..cluster.clone() })
    }

    /// The same for a machine that is being released.
    pub(crate) fn release_context(
        &self,
        machine: usize,
        policy: &Policy,
        now: Timestamp,
    ) -> DisruptionContext {
        let since = before(now, policy.release_budget.window.0);
        let used = self.recent_releases.iter().copied().filter(|at| *at > since);
        DisruptionContext {
            started_in_window: u32::try_from(used.clone().count()).unwrap_or(u32::MAX),
            oldest_in_window: used.min(),
            brake: None,
            unknown_fence: self.machines[machine].unknown_fence,
            cluster: None,
        }
    }

    /// Records that a step was started.
    pub(crate) fn record_disruption(
        &mut self,
        machine: MachineId,
        provider: &str,
        step: DisruptionKind,
        now: Timestamp,
    ) {
        self.recent_disruptions.push(RecordedDisruption {
            step,
            machine,
            provider: provider.to_owned(),
            at: now,
        });
    }

    /// Why a brake holds new ladders of a provider's machines; `None` when none does.
    fn recovery_brake(&self, provider: &str, policy: &Policy, now: Timestamp) -> Option<String> {
        let since = before(now, policy.recovery_brake.window.0);
        let (mut watched, mut lately) = (BTreeMap::new(), BTreeMap::<String, BTreeSet<MachineId>>::new());
        for machine in &self.machines {
            let phase = machine.phase.as_str();
            if !MONITORED_PHASES.iter().any(|watched| watched.as_str() == phase) {
                continue;
            }
            *watched.entry(provider_name(&machine.facts)).or_default() += 1;
            let fell_silent =
                [Phase::Silent, Phase::Recovering].iter().any(|silent| silent.as_str() == phase);
            let ladder = machine.facts.recovery.as_ref().map(|recovery| recovery.started_at);
            if fell_silent && ladder.unwrap_or(machine.phase_since) > since {
                lately.entry(provider_name(&machine.facts)).or_default().insert(machine.facts.machine);
            }
        }
        for done in self.recent_disruptions.iter().filter(|done| done.at > since) {
            let found = self.machines.binary_search_by_key(&done.machine, |machine| machine.facts.machine);
            let ladder = found.ok().and_then(|found| self.machines[found].facts.recovery.as_ref());
            if ladder.is_none_or(|recovery| recovery.started_at > since) {
                lately.entry(done.provider.clone()).or_default().insert(done.machine);
            }
        }
        let lately =
            lately.into_iter().map(|(provider, machines)| (provider, machines.len() as u64)).collect();
        let mut on = engaged_brakes(&watched, &lately, &policy.recovery_brake);
        on.remove(provider).or_else(|| on.remove(ALL_PROVIDERS))
    }
}

/// Phases in which an agent should report.
const MONITORED_PHASES: [Phase; 5] =
    [Phase::AgentStarting, Phase::Ready, Phase::Installing, Phase::Silent, Phase::Recovering];

/// Name of a machine's provider, as the database counts it; empty for none.
pub(crate) fn provider_name(facts: &MachineFacts) -> String {
    facts.provider_record.as_ref().map_or_else(String::new, |provided| provided.provider.clone())
}
