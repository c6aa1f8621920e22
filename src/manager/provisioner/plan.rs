//! Provisioning plan: compares a provider's list with known machines.
//!
//! A list is compared as a whole. A mismatch is a *discrepancy*: that machine is quarantined and the others continue.
//! But when too many mismatches occur at once, the list is the likeliest fault. Then nothing is created and nothing is
//! quarantined until it looks right again.
//!
//! What the limit of a provider leaves out is counted in each plan, so that no machine is left out silently.

use std::collections::{BTreeMap, BTreeSet};

use crate::bmdb::fleet::provider::RecordedMachine;
use crate::model::adoption::{NotAdopted, limit_adoption};
use crate::model::ids::{IntentId, MachineId};
use crate::model::policy::ProvisionerBrake;
use crate::model::provider_status::MachineUsage;
use crate::providers::provider::ProviderMachine;

/// Bounds of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProvisionerLimits {
    /// Most machines of this provider; `None` means no limit.
    pub max_machines: Option<usize>,
    /// Most creations in one pass.
    pub chunk: usize,
}

/// The actions of one pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProvisionPlan {
    /// Why nothing is created and nothing is quarantined; `None` if the brake is not engaged.
    pub brake: Option<String>,
    /// Machines made under an intent of ours whose outcome was never written down.
    pub adopt: Vec<(IntentId, ProviderMachine)>,
    /// Capacity to turn into machines: the provider's id of each.
    pub create: Vec<String>,
    /// Machines that the BMDB has and the provider's list lacks, with the reason.
    pub quarantine: Vec<(MachineId, String)>,
    /// Machines that the provider has in use and the BMDB has no record of.
    pub strangers: Vec<ProviderMachine>,
    /// Machines whose discrepancy has ended.
    pub reappeared: Vec<MachineId>,
    /// Retired machines whose listing differs from the record: whether the provider lists them now.
    pub retired_listing_changes: Vec<(MachineId, bool)>,
    /// Listed machines that the limit leaves out; `None` if it leaves out none.
    pub not_adopted: Option<NotAdopted>,
}

/// Prefix of every quarantine reason that a later list can resolve.
const LOST_REASON: &str = "the provider does not list it";

/// Whether the list lacks a machine that should be in it.
#[must_use]
pub fn is_any_missing(listed: &[ProviderMachine], known: &[RecordedMachine]) -> bool {
    let ids: BTreeSet<&str> = listed.iter().map(|machine| machine.id.as_str()).collect();
    let mut missing = known.iter().filter(|machine| !ids.contains(machine.provider_id.as_str()));
    missing.any(|machine| !machine.retiring && machine.quarantine.is_none())
}

/// Marks the machines that are being retired, by records that were read after the list. Reading a list may take long,
/// and a machine that was released meanwhile is not in it: that is no discrepancy. No machine is released that was not
/// being retired before.
pub fn mark_retiring(known: &mut [RecordedMachine], since: &[RecordedMachine]) {
    let leaving: BTreeSet<MachineId> =
        since.iter().filter(|machine| machine.retiring).map(|machine| machine.machine).collect();
    for machine in known {
        machine.retiring |= leaving.contains(&machine.machine);
    }
}

/// Compares a whole list with the recorded machines.
#[must_use]
pub fn plan_provisioning(
    listed: &[ProviderMachine],
    known: &[RecordedMachine],
    open_intents: &BTreeSet<IntentId>,
    brake: &ProvisionerBrake,
    limits: ProvisionerLimits,
) -> ProvisionPlan {
    let by_id: BTreeMap<&str, &ProviderMachine> =
        listed.iter().map(|machine| (machine.id.as_str(), machine)).collect();
    let known_ids: BTreeSet<&str> = known.iter().map(|machine| machine.provider_id.as_str()).collect();
    let ours: Vec<&RecordedMachine> =
        known.iter().filter(|machine| !machine.retiring && !machine.status.is_failed()).collect();

    let mut plan = ProvisionPlan::default();
    let lost: Vec<&RecordedMachine> =
        ours.iter().copied().filter(|machine| !by_id.contains_key(machine.provider_id.as_str())).collect();
    let newly_lost: Vec<&RecordedMachine> =
        lost.iter().copied().filter(|machine| machine.quarantine.is_none()).collect();
    for machine in listed {
        if known_ids.contains(machine.id.as_str()) || machine.status.is_failed() {
            continue;
        }
        match (&machine.usage, machine.intent) {
            (_, Some(intent)) if open_intents.contains(&intent) => plan.adopt.push((intent, machine.clone())),
            (MachineUsage::KnownUsed, _) => plan.strangers.push(machine.clone()),
            (MachineUsage::PossiblyUsed | MachineUsage::KnownUnused { .. }, _) => {
                plan.create.push(machine.id.clone());
            }
        }
    }
    plan.reappeared = ours
        .iter()
        .filter(|machine| by_id.contains_key(machine.provider_id.as_str()))
        .filter(|machine| machine.quarantine.as_deref().is_some_and(|reason| reason.starts_with(LOST_REASON)))
        .map(|machine| machine.machine)
        .collect();

    // Released machines do not count against the limit. Machines that are being retired count until they are released,
    // and strangers as soon as they are recorded.
    let recorded = known.iter().filter(|machine| !machine.retired).count();
    apply_limit(&mut plan, recorded, limits.max_machines);
    plan.brake = evaluate_brake(listed.len(), ours.len(), newly_lost.len(), plan.strangers.len(), brake);
    if plan.brake.is_some() {
        plan.create.clear();
        plan.strangers.clear();
        return plan;
    }
    // Never adopted again, but recorded: they may still be paid for.
    let retired = known.iter().filter(|machine| machine.retired);
    let retired = retired.map(|machine| (machine, by_id.contains_key(machine.provider_id.as_str())));
    let news = retired.filter(|(machine, listed)| machine.listed != *listed);
    plan.retired_listing_changes = news.map(|(machine, listed)| (machine.machine, listed)).collect();
    plan.quarantine = newly_lost
        .iter()
        .map(|machine| (machine.machine, format!("{LOST_REASON} any more, and it was not retired here")))
        .collect();
    plan.create.truncate(limits.chunk.max(1));
    plan
}

fn evaluate_brake(
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

/// Leaves out, and counts, the machines to create for which a provider with so many recorded machines has no room.
fn apply_limit(plan: &mut ProvisionPlan, recorded: usize, max_machines: Option<usize>) {
    let adopted = recorded + plan.adopt.len() + plan.strangers.len();
    plan.not_adopted = limit_adoption(plan.create.len(), adopted, max_machines);
    plan.create.sort();
    plan.create.truncate(plan.create.len() - plan.not_adopted.map_or(0, |surplus| surplus.machines));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::provider_status::ProviderStatus;

    const LIMITS: ProvisionerLimits = ProvisionerLimits { max_machines: None, chunk: 20 };
    const BRAKE: ProvisionerBrake = ProvisionerBrake { discrepancies: 5, lost_fraction: 0.2 };

    fn listed(id: usize, usage: MachineUsage) -> ProviderMachine {
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

    fn list(ids: std::ops::Range<usize>, usage: &MachineUsage) -> Vec<ProviderMachine> {
        ids.map(|id| listed(id, usage.clone())).collect()
    }

    fn recorded_machines(ids: std::ops::Range<usize>) -> Vec<RecordedMachine> {
        ids.map(|id| RecordedMachine {
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

    fn plan(listed: &[ProviderMachine], known: &[RecordedMachine]) -> ProvisionPlan {
        plan_provisioning(listed, known, &BTreeSet::new(), &BRAKE, LIMITS)
    }

    #[test]
    fn matching_list_needs_no_action() {
        assert_eq!(
            plan(&list(0..10, &MachineUsage::PossiblyUsed), &recorded_machines(0..10)),
            ProvisionPlan::default()
        );
    }

    #[test]
    fn unused_capacity_is_taken_in_chunks_up_to_the_limit() {
        let offered = list(0..50, &MachineUsage::PossiblyUsed);
        assert_eq!(plan(&offered, &[]).create.len(), 20);
        let limits = ProvisionerLimits { max_machines: Some(12), chunk: 20 };
        let limited =
            plan_provisioning(&offered, &recorded_machines(0..10), &BTreeSet::new(), &BRAKE, limits);
        assert_eq!(limited.create, ["m010", "m011"]);
        assert_eq!(limited.not_adopted, Some(NotAdopted { machines: 38, limit: 12 }));
    }

    #[test]
    fn number_that_the_limit_leaves_out_is_the_same_in_each_pass() {
        let limits = ProvisionerLimits { max_machines: Some(50), chunk: 20 };
        let expected = Some(NotAdopted { machines: 5, limit: 50 });
        for recorded in [0, 20, 40, 50] {
            let offered = list(0..55, &MachineUsage::PossiblyUsed);
            let ours = recorded_machines(0..recorded);
            let plan = plan_provisioning(&offered, &ours, &BTreeSet::new(), &BRAKE, limits);
            assert_eq!(plan.not_adopted, expected, "{recorded} are recorded");
        }
        // A stranger is recorded whether there is room for it or not, and takes the place of another machine.
        let mut with_stranger = list(0..54, &MachineUsage::PossiblyUsed);
        with_stranger.push(listed(77, MachineUsage::KnownUsed));
        let plan = plan_provisioning(&with_stranger, &[], &BTreeSet::new(), &BRAKE, limits);
        assert_eq!((plan.strangers.len(), plan.not_adopted), (1, expected));
    }

    #[test]
    fn retired_machines_do_not_count_towards_the_limit() {
        let mut ours = recorded_machines(0..10);
        for machine in &mut ours[..4] {
            machine.retiring = true;
        }
        for machine in &mut ours[..3] {
            machine.retired = true;
        }
        let limits = ProvisionerLimits { max_machines: Some(12), chunk: 20 };
        // The provider does not list released machines any more.
        let offered = list(3..50, &MachineUsage::PossiblyUsed);
        let plan = plan_provisioning(&offered, &ours, &BTreeSet::new(), &BRAKE, limits);
        assert_eq!(plan.create, ["m010", "m011", "m012", "m013", "m014"]);
        assert_eq!(plan.not_adopted, Some(NotAdopted { machines: 35, limit: 12 }));
        assert!(plan.quarantine.is_empty());
    }

    #[test]
    fn listed_retired_machine_is_recorded_and_not_adopted() {
        let with = |listed: bool| {
            let mut ours = recorded_machines(0..2);
            (ours[0].retiring, ours[0].retired, ours[0].listed) = (true, true, listed);
            ours
        };
        for usage in [MachineUsage::PossiblyUsed, MachineUsage::KnownUsed] {
            let ours = with(false);
            let provision_plan = plan(&list(0..2, &usage), &ours);
            assert_eq!(
                provision_plan,
                ProvisionPlan {
                    retired_listing_changes: vec![(ours[0].machine, true)],
                    ..Default::default()
                }
            );
        }
        let ours = with(true);
        assert_eq!(
            plan(&list(0..2, &MachineUsage::PossiblyUsed), &ours),
            ProvisionPlan::default(),
            "the change is planned only once"
        );
        let gone = plan(&list(1..2, &MachineUsage::PossiblyUsed), &ours);
        assert_eq!(
            gone,
            ProvisionPlan { retired_listing_changes: vec![(ours[0].machine, false)], ..Default::default() }
        );
    }

    #[test]
    fn machine_released_during_listing_is_no_discrepancy() {
        let mut ours = recorded_machines(0..10);
        let half = list(5..10, &MachineUsage::PossiblyUsed);
        assert!(
            is_any_missing(&half, &ours) && !is_any_missing(&list(0..10, &MachineUsage::PossiblyUsed), &ours)
        );
        let mut since = ours.clone();
        since[..5].iter_mut().for_each(|machine| (machine.retiring, machine.retired) = (true, true));
        mark_retiring(&mut ours, &since);
        assert!(!is_any_missing(&half, &ours));
        assert_eq!(plan(&half, &ours), ProvisionPlan::default());
    }

    #[test]
    fn one_discrepancy_quarantines_only_its_machine() {
        let ours = recorded_machines(0..20);
        let one_lost = plan(&list(1..25, &MachineUsage::PossiblyUsed), &ours);
        assert_eq!(one_lost.brake, None);
        assert_eq!(one_lost.quarantine.len(), 1);
        assert_eq!(one_lost.quarantine[0].0, ours[0].machine);
        assert_eq!(one_lost.create.len(), 5);
        let mut with_stranger = list(0..20, &MachineUsage::KnownUsed);
        with_stranger.push(listed(77, MachineUsage::KnownUsed));
        let plan = plan(&with_stranger, &ours);
        assert_eq!((plan.brake, plan.strangers.len()), (None, 1));
    }

    #[test]
    fn implausible_list_engages_the_brake_and_quarantines_nothing() {
        let ours = recorded_machines(0..20);
        let empty = plan(&[], &ours);
        let mut half = list(0..15, &MachineUsage::PossiblyUsed);
        half.extend(list(30..40, &MachineUsage::PossiblyUsed));
        let half = plan(&half, &ours);
        let mut strangers = list(0..20, &MachineUsage::KnownUsed);
        strangers.extend(list(30..36, &MachineUsage::KnownUsed));
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
        let mut failed = listed(1, MachineUsage::KnownUsed);
        failed.status = ProviderStatus::ProvisioningFailedPermanent;
        assert_eq!(plan(&[failed], &[]), ProvisionPlan::default());
        let mut ours = recorded_machines(0..2);
        ours[0].status = ProviderStatus::ProvisioningFailedPermanent;
        assert_eq!(plan(&list(1..2, &MachineUsage::PossiblyUsed), &ours), ProvisionPlan::default());
    }

    #[test]
    fn machine_made_under_an_open_intent_is_adopted() {
        let intent = IntentId::generate();
        let mut made = listed(3, MachineUsage::KnownUsed);
        made.intent = Some(intent);
        let plan = plan_provisioning(&[made.clone()], &[], &BTreeSet::from([intent]), &BRAKE, LIMITS);
        assert_eq!(plan.adopt, [(intent, made)]);
        assert!(plan.strangers.is_empty());
    }

    #[test]
    fn machine_that_is_listed_again_leaves_quarantine() {
        let mut ours = recorded_machines(0..3);
        ours[0].quarantine = Some(format!("{LOST_REASON} any more, and it was not retired here"));
        ours[1].quarantine = Some("an operator quarantined it".into());
        let plan = plan(&list(0..3, &MachineUsage::PossiblyUsed), &ours);
        assert_eq!(plan.reappeared, [ours[0].machine]);
    }
}
