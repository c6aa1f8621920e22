//! Which machines are chosen for a cluster, and which go first when it has too many.

use std::collections::BTreeMap;

use crate::model::cluster::spec::Part;
use crate::model::cluster::state::{Candidate, Health, Member, Seen};

/// Chooses up to `wanted` machines so that the machines of this part stand at as many places as can be.
///
/// `beside` counts, for each location, the machines of the part that are there already. Of places that have as few, the
/// one with the lowest name comes first, and of its machines the one with the lowest id: the same snapshot is always
/// decided the same. Machines whose place is not known count as standing at one place.
#[must_use]
pub fn spread(
    candidates: &[Candidate],
    mut beside: BTreeMap<Option<String>, u32>,
    wanted: u32,
) -> Vec<Candidate> {
    let mut left: BTreeMap<Option<String>, Vec<&Candidate>> = BTreeMap::new();
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

/// The machines of a part in the order in which they go when it has too many: those that never became nodes first, then
/// those that are not well, then the ones that were chosen last.
#[must_use]
pub fn going_first<'m>(members: &'m [Member], part: Part, seen: Option<&Seen>) -> Vec<&'m Member> {
    let mut order: Vec<&Member> =
        members.iter().filter(|member| member.part == part && member.leaving.is_none()).collect();
    let rank = |member: &Member| {
        let node = member.key().and_then(|key| seen?.node_of(&key));
        match node.map(|node| node.health) {
            None => 0,
            Some(Health::Silent(_) | Health::Unknown) => 1,
            Some(Health::Healthy) => 2,
        }
    };
    order.sort_by_key(|member| (rank(member), std::cmp::Reverse((member.chosen_at, member.machine))));
    order
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::model::ids::MachineId;

    fn candidates(places: &[(&str, usize)]) -> Vec<Candidate> {
        let mut number = 0;
        let mut made = Vec::new();
        for (place, count) in places {
            for _ in 0..*count {
                number += 1;
                let location = (!place.is_empty()).then(|| (*place).to_owned());
                let (machine, name) = (MachineId(Uuid::from_u128(number)), format!("m{number}"));
                made.push(Candidate { machine, name, location });
            }
        }
        made
    }

    fn places(chosen: &[Candidate]) -> String {
        let mut places: Vec<&str> = chosen.iter().map(|one| one.location.as_deref().unwrap_or("?")).collect();
        places.sort_unstable();
        places.join(" ")
    }

    #[test]
    fn machines_are_spread_over_places() {
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
            let chosen = spread(&candidates(there), beside.collect(), wanted);
            assert_eq!(places(&chosen), expected, "{there:?}");
        }
    }

    #[test]
    fn same_snapshot_is_decided_the_same_in_whatever_order_it_comes() {
        let mut all = candidates(&[("a", 3), ("b", 3)]);
        let first = spread(&all, BTreeMap::new(), 3);
        all.reverse();
        assert_eq!(spread(&all, BTreeMap::new(), 3), first);
        assert_eq!(first[0].machine, MachineId(Uuid::from_u128(1)));
    }
}
