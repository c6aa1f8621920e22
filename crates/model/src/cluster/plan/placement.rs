//! Placement: spread members over locations, and order of removal.

use std::collections::BTreeMap;

use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{CandidateMachine, ClusterMember, NodeHealth, ObservedCluster};

/// Chooses up to `wanted` machines so that the machines of this part are at as many locations as possible.
///
/// `beside` counts the machines of the part that each location already has. Among locations with equally few, the one
/// with the lowest name comes first, and of its machines the one with the lowest id. So the same snapshot always gives
/// the same choice. Machines of unknown location count as being at one location.
#[must_use]
pub(super) fn spread_over_locations(
    candidates: &[CandidateMachine],
    mut beside: BTreeMap<Option<String>, u32>,
    wanted: u32,
) -> Vec<CandidateMachine> {
    let mut left: BTreeMap<Option<String>, Vec<&CandidateMachine>> = BTreeMap::new();
    for candidate in candidates {
        left.entry(candidate.location.clone()).or_default().push(candidate);
    }
    for there in left.values_mut() {
        there.sort_by_key(|candidate| std::cmp::Reverse(candidate.machine));
    }
    let mut chosen = Vec::new();
    for _ in 0..wanted {
        let place = left
            .iter()
            .filter(|(_, there)| !there.is_empty())
            .min_by_key(|(place, _)| (beside.get(*place).copied().unwrap_or(0), *place))
            .map(|(place, _)| place.clone());
        let Some(place) = place else { break };
        if let Some(candidate) = left.get_mut(&place).and_then(Vec::pop) {
            *beside.entry(place).or_default() += 1;
            chosen.push(candidate.clone());
        }
    }
    chosen
}

/// The machines of a part in the order in which surplus ones are removed: first those that never became nodes, then
/// those that are not healthy, then the ones chosen last.
#[must_use]
pub(super) fn removal_order<'m>(
    members: &'m [ClusterMember],
    part: ClusterPart,
    seen: Option<&ObservedCluster>,
) -> Vec<&'m ClusterMember> {
    let mut order: Vec<&ClusterMember> =
        members.iter().filter(|member| member.part == part && member.leave_reason.is_none()).collect();
    let rank = |member: &ClusterMember| {
        let node = member.key().and_then(|key| seen?.node_by_key(&key));
        match node.map(|node| node.health) {
            None => 0,
            Some(NodeHealth::Silent(_) | NodeHealth::Unknown) => 1,
            Some(NodeHealth::Healthy) => 2,
        }
    };
    order.sort_by_key(|member| (rank(member), std::cmp::Reverse((member.chosen_at, member.machine))));
    order
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::cluster::restore_programs::EtcdPrograms;
    use crate::ids::MachineId;

    fn candidates(places: &[(&str, usize)]) -> Vec<CandidateMachine> {
        let mut number = 0;
        let mut made = Vec::new();
        for (place, count) in places {
            for _ in 0..*count {
                number += 1;
                let location = (!place.is_empty()).then(|| (*place).to_owned());
                let (machine, name) = (MachineId(Uuid::from_u128(number)), format!("m{number}"));
                made.push(CandidateMachine { machine, name, location, programs: EtcdPrograms::default() });
            }
        }
        made
    }

    fn locations_of(chosen: &[CandidateMachine]) -> String {
        let mut places: Vec<&str> = chosen.iter().map(|one| one.location.as_deref().unwrap_or("?")).collect();
        places.sort_unstable();
        places.join(" ")
    }

    #[test]
    fn machines_are_spread_over_locations() {
        for (there, beside, wanted, expected) in [
            (&[("a", 5), ("b", 5), ("c", 5)][..], &[][..], 3, "a b c"),
            (&[("a", 5), ("b", 1)], &[], 4, "a a a b"),
            (&[("a", 5), ("b", 5)], &[("a", 2)], 3, "a b b"),
            (&[("a", 5), ("b", 5)], &[("a", 3)], 3, "b b b"),
            (&[("a", 1), ("", 5)], &[], 3, "? ? a"),
            (&[("a", 1)], &[], 3, "a"),
            (&[], &[], 3, ""),
            (&[("a", 1)], &[], 0, ""),
        ] {
            let beside =
                beside.iter().map(|(place, count): &(&str, u32)| (Some((*place).to_owned()), *count));
            let chosen = spread_over_locations(&candidates(there), beside.collect(), wanted);
            assert_eq!(locations_of(&chosen), expected, "{there:?}");
        }
    }

    #[test]
    fn placement_does_not_depend_on_input_order() {
        let mut all = candidates(&[("a", 3), ("b", 3)]);
        let first = spread_over_locations(&all, BTreeMap::new(), 3);
        all.reverse();
        assert_eq!(spread_over_locations(&all, BTreeMap::new(), 3), first);
        assert_eq!(first[0].machine, MachineId(Uuid::from_u128(1)));
    }
}
