//! What to do about a provider's list, given what the BMDB knows of its machines.
//!
//! A list is compared as a whole. What does not agree is a *discrepancy*: that
//! machine is quarantined and the others go on. But when too much does not
//! agree at once, it is the list that is believed least: then nothing is
//! created and nobody is quarantined until it looks right again.

use std::collections::{BTreeMap, BTreeSet};

use crate::bmdb::provision::KnownMachine;
use crate::model::ids::{IntentId, MachineId};
use crate::model::policy::ProvisionerBrake;
use crate::model::provider_status::Usage;
use crate::providers::provider::ProviderMachine;

/// Bounds of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most machines of this provider; `None` without limit.
    pub max_machines: Option<usize>,
    /// Most creations in one pass.
    pub chunk: usize,
}

/// What one pass does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProvisionPlan {
    /// Why nothing is created and nobody is quarantined, if so.
    pub brake: Option<String>,
    /// Machines made under an intent of ours whose outcome was never written down.
    pub adopt: Vec<(IntentId, ProviderMachine)>,
    /// Capacity to turn into machines: the provider's id of each.
    pub create: Vec<String>,
    /// Machines that the BMDB has and the provider lost.
    pub quarantine: Vec<(MachineId, String)>,
    /// Machines that the provider has in use and the BMDB never heard of.
    pub strangers: Vec<ProviderMachine>,
    /// Machines whose discrepancy is over.
    pub explained: Vec<MachineId>,
    /// Retired machines of which something else is so now than was written down: whether the provider lists them.
    pub retired: Vec<(MachineId, bool)>,
    /// Why fewer are created than could be, for people.
    pub limited: Option<String>,
}

/// Begins every reason for quarantine that a later list can explain.
const LOST: &str = "the provider does not list it";

/// Whether the list lacks somebody who is to be in it.
#[must_use]
pub fn lacks_any(listed: &[ProviderMachine], known: &[KnownMachine]) -> bool {
    let ids: BTreeSet<&str> = listed.iter().map(|machine| machine.id.as_str()).collect();
    let mut missing = known.iter().filter(|machine| !ids.contains(machine.provider_id.as_str()));
    missing.any(|machine| !machine.retiring && machine.quarantine.is_none())
}

/// Notes who is on the way out by what was read after the list. A list may take long, and who was given back
/// meanwhile is in none: that is no discrepancy. Nobody is given back who was not on the way out before.
pub fn note_leaving(known: &mut [KnownMachine], since: &[KnownMachine]) {
    let leaving: BTreeSet<MachineId> =
        since.iter().filter(|machine| machine.retiring).map(|machine| machine.machine).collect();
    for machine in known {
        machine.retiring |= leaving.contains(&machine.machine);
    }
}

/// Compares a whole list with what is known.
#[must_use]
pub fn plan_provisioning(
    listed: &[ProviderMachine],
    known: &[KnownMachine],
    open_intents: &BTreeSet<IntentId>,
    brake: &ProvisionerBrake,
    limits: Limits,
) -> ProvisionPlan {
    let by_id: BTreeMap<&str, &ProviderMachine> =
        listed.iter().map(|machine| (machine.id.as_str(), machine)).collect();
    let known_ids: BTreeSet<&str> = known.iter().map(|machine| machine.provider_id.as_str()).collect();
    let ours: Vec<&KnownMachine> =
        known.iter().filter(|machine| !machine.retiring && !machine.status.is_failed()).collect();

    let mut plan = ProvisionPlan::default();
    let lost: Vec<&KnownMachine> =
        ours.iter().copied().filter(|machine| !by_id.contains_key(machine.provider_id.as_str())).collect();
    let newly_lost: Vec<&KnownMachine> =
        lost.iter().copied().filter(|machine| machine.quarantine.is_none()).collect();
    for machine in listed {
        if known_ids.contains(machine.id.as_str()) || machine.status.is_failed() {
            continue;
        }
        match (&machine.usage, machine.intent) {
            (_, Some(intent)) if open_intents.contains(&intent) => plan.adopt.push((intent, machine.clone())),
            (Usage::KnownUsed, _) => plan.strangers.push(machine.clone()),
            (Usage::PossiblyUsed | Usage::KnownUnused { .. }, _) => plan.create.push(machine.id.clone()),
        }
    }
    plan.explained = ours
        .iter()
        .filter(|machine| by_id.contains_key(machine.provider_id.as_str()))
        .filter(|machine| machine.quarantine.as_deref().is_some_and(|reason| reason.starts_with(LOST)))
        .map(|machine| machine.machine)
        .collect();

    plan.brake = judge(listed.len(), ours.len(), newly_lost.len(), plan.strangers.len(), brake);
    if plan.brake.is_some() {
        plan.create.clear();
        plan.strangers.clear();
        return plan;
    }
    // Never adopted again, and told: they may still be paid for.
    let retired = known.iter().filter(|machine| machine.retired);
    let retired = retired.map(|machine| (machine, by_id.contains_key(machine.provider_id.as_str())));
    let news = retired.filter(|(machine, listed)| machine.listed != *listed);
    plan.retired = news.map(|(machine, listed)| (machine.machine, listed)).collect();
    plan.quarantine = newly_lost
        .iter()
        .map(|machine| (machine.machine, format!("{LOST} any more, and it was not retired here")))
        .collect();
    // What was given back takes no room; what is on its way out does until then.
    limit(&mut plan, known.iter().filter(|machine| !machine.retired).count(), limits);
    plan
}

fn judge(
    listed: usize,
    ours: usize,
    newly_lost: usize,
    strangers: usize,
    brake: &ProvisionerBrake,
) -> Option<String> {
    if listed == 0 && ours > 0 {
        return Some(format!("brake: its list is empty, and {ours} machines of it are known here"));
    }
    #[expect(clippy::cast_precision_loss, reason = "fleets are far below 2^52 machines")]
    let lost_share = newly_lost as f64 / ours.max(1) as f64;
    // One lost machine is a discrepancy, whatever its share of a small fleet.
    if newly_lost > 1 && lost_share > brake.lost_fraction {
        return Some(format!("brake: its list lost {newly_lost} of {ours} machines at once"));
    }
    let discrepancies = newly_lost + strangers;
    if discrepancies > brake.discrepancies as usize {
        return Some(format!(
            "brake: {discrepancies} discrepancies appeared at once ({newly_lost} machines are not listed any more, \
             {strangers} are in use and unknown here)"
        ));
    }
    None
}

fn limit(plan: &mut ProvisionPlan, known: usize, limits: Limits) {
    plan.create.sort();
    let wanted = plan.create.len();
    let taken = known + plan.adopt.len();
    if let Some(max) = limits.max_machines {
        let room = max.saturating_sub(taken);
        if wanted > room {
            plan.limited =
                Some(format!("{taken} of at most {max} machines are taken; {wanted} more could be had"));
            plan.create.truncate(room);
        }
    }
    plan.create.truncate(limits.chunk.max(1));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::provider_status::ProviderStatus;

    const LIMITS: Limits = Limits { max_machines: None, chunk: 20 };
    const BRAKE: ProvisionerBrake = ProvisionerBrake { discrepancies: 5, lost_fraction: 0.2 };

    fn listed(id: usize, usage: Usage) -> ProviderMachine {
        ProviderMachine {
            id: format!("m{id:03}"),
            usage,
            address: None,
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
            host_keys: Vec::new(),
            intent: None,
        }
    }

    fn list(ids: std::ops::Range<usize>, usage: &Usage) -> Vec<ProviderMachine> {
        ids.map(|id| listed(id, usage.clone())).collect()
    }

    fn known(ids: std::ops::Range<usize>) -> Vec<KnownMachine> {
        ids.map(|id| KnownMachine {
            machine: MachineId::generate(),
            provider_id: format!("m{id:03}"),
            status: ProviderStatus::Running,
            quarantine: None,
            retiring: false,
            retired: false,
            listed: false,
        })
        .collect()
    }

    fn plan(listed: &[ProviderMachine], known: &[KnownMachine]) -> ProvisionPlan {
        plan_provisioning(listed, known, &BTreeSet::new(), &BRAKE, LIMITS)
    }

    #[test]
    fn agreement_asks_for_nothing() {
        assert_eq!(plan(&list(0..10, &Usage::PossiblyUsed), &known(0..10)), ProvisionPlan::default());
    }

    #[test]
    fn unused_capacity_is_taken_in_chunks_up_to_the_limit() {
        let offered = list(0..50, &Usage::PossiblyUsed);
        assert_eq!(plan(&offered, &[]).create.len(), 20);
        let limits = Limits { max_machines: Some(12), chunk: 20 };
        let limited = plan_provisioning(&offered, &known(0..10), &BTreeSet::new(), &BRAKE, limits);
        assert_eq!(limited.create, ["m010", "m011"]);
        assert!(limited.limited.is_some());
    }

    #[test]
    fn retired_machines_take_no_room_and_retiring_ones_do() {
        let mut ours = known(0..10);
        for machine in &mut ours[..4] {
            machine.retiring = true;
        }
        for machine in &mut ours[..3] {
            machine.retired = true;
        }
        let limits = Limits { max_machines: Some(12), chunk: 20 };
        // The provider lists what it took back no more.
        let offered = list(3..50, &Usage::PossiblyUsed);
        let plan = plan_provisioning(&offered, &ours, &BTreeSet::new(), &BRAKE, limits);
        assert_eq!(plan.create, ["m010", "m011", "m012", "m013", "m014"]);
        assert!(plan.quarantine.is_empty());
    }

    #[test]
    fn retired_machine_that_is_listed_is_told_and_never_taken_again() {
        let with = |listed: bool| {
            let mut ours = known(0..2);
            (ours[0].retiring, ours[0].retired, ours[0].listed) = (true, true, listed);
            ours
        };
        for usage in [Usage::PossiblyUsed, Usage::KnownUsed] {
            let ours = with(false);
            let told = plan(&list(0..2, &usage), &ours);
            assert_eq!(told, ProvisionPlan { retired: vec![(ours[0].machine, true)], ..Default::default() });
        }
        let ours = with(true);
        assert_eq!(plan(&list(0..2, &Usage::PossiblyUsed), &ours), ProvisionPlan::default(), "told once");
        let gone = plan(&list(1..2, &Usage::PossiblyUsed), &ours);
        assert_eq!(gone, ProvisionPlan { retired: vec![(ours[0].machine, false)], ..Default::default() });
    }

    #[test]
    fn who_was_given_back_while_the_list_was_read_is_no_discrepancy() {
        let mut ours = known(0..10);
        let half = list(5..10, &Usage::PossiblyUsed);
        assert!(lacks_any(&half, &ours) && !lacks_any(&list(0..10, &Usage::PossiblyUsed), &ours));
        let mut since = ours.clone();
        since[..5].iter_mut().for_each(|machine| (machine.retiring, machine.retired) = (true, true));
        note_leaving(&mut ours, &since);
        assert!(!lacks_any(&half, &ours));
        assert_eq!(plan(&half, &ours), ProvisionPlan::default());
    }

    #[test]
    fn one_discrepancy_quarantines_its_machine_and_the_others_go_on() {
        let ours = known(0..20);
        let one_lost = plan(&list(1..25, &Usage::PossiblyUsed), &ours);
        assert_eq!(one_lost.brake, None);
        assert_eq!(one_lost.quarantine.len(), 1);
        assert_eq!(one_lost.quarantine[0].0, ours[0].machine);
        assert_eq!(one_lost.create.len(), 5);
        let mut with_stranger = list(0..20, &Usage::KnownUsed);
        with_stranger.push(listed(77, Usage::KnownUsed));
        let plan = plan(&with_stranger, &ours);
        assert_eq!((plan.brake, plan.strangers.len()), (None, 1));
    }

    #[test]
    fn list_that_cannot_be_right_stops_creation_and_quarantines_nobody() {
        let ours = known(0..20);
        let empty = plan(&[], &ours);
        let mut half = list(0..15, &Usage::PossiblyUsed);
        half.extend(list(30..40, &Usage::PossiblyUsed));
        let half = plan(&half, &ours);
        let mut strangers = list(0..20, &Usage::KnownUsed);
        strangers.extend(list(30..36, &Usage::KnownUsed));
        let strangers = plan(&strangers, &ours);
        for plan in [empty, half, strangers] {
            assert!(plan.brake.is_some());
            assert!(plan.create.is_empty() && plan.quarantine.is_empty() && plan.strangers.is_empty());
        }
    }

    #[test]
    fn empty_list_of_a_new_provider_is_no_alarm() {
        assert_eq!(plan(&[], &[]), ProvisionPlan::default());
    }

    #[test]
    fn failed_machine_is_ignored_on_both_sides() {
        let mut failed = listed(1, Usage::KnownUsed);
        failed.status = ProviderStatus::ProvisioningFailedPermanent;
        assert_eq!(plan(&[failed], &[]), ProvisionPlan::default());
        let mut ours = known(0..2);
        ours[0].status = ProviderStatus::ProvisioningFailedPermanent;
        assert_eq!(plan(&list(1..2, &Usage::PossiblyUsed), &ours), ProvisionPlan::default());
    }

    #[test]
    fn machine_made_under_an_open_intent_is_adopted() {
        let intent = IntentId::generate();
        let mut made = listed(3, Usage::KnownUsed);
        made.intent = Some(intent);
        let plan = plan_provisioning(&[made.clone()], &[], &BTreeSet::from([intent]), &BRAKE, LIMITS);
        assert_eq!(plan.adopt, [(intent, made)]);
        assert!(plan.strangers.is_empty());
    }

    #[test]
    fn machine_that_is_listed_again_is_explained() {
        let mut ours = known(0..3);
        ours[0].quarantine = Some(format!("{LOST} any more, and it was not retired here"));
        ours[1].quarantine = Some("a person said so".into());
        let plan = plan(&list(0..3, &Usage::PossiblyUsed), &ours);
        assert_eq!(plan.explained, [ours[0].machine]);
    }
}
