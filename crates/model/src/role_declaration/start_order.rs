//! Start order of services: each after those that it depends on.

use std::collections::{BTreeMap, BTreeSet};

/// The names in an order in which each comes after those that it depends on. The error is a cycle: each name depends on
/// the next one, and the last is the first again.
pub(super) fn start_order(depends_on: &BTreeMap<&str, BTreeSet<&str>>) -> Result<Vec<String>, Vec<String>> {
    let mut placed: Vec<&str> = Vec::new();
    loop {
        let waiting = || depends_on.iter().filter(|(name, _)| !placed.contains(name));
        let ready = waiting().find(|(_, wanted)| wanted.iter().all(|wanted| placed.contains(wanted)));
        let next = ready.map(|(name, _)| *name);
        let Some(next) = next else {
            let Some((first, _)) = waiting().next() else { break };
            return Err(find_cycle(first, &placed, depends_on));
        };
        placed.push(next);
    }
    Ok(placed.into_iter().map(str::to_owned).collect())
}

/// Follows dependencies until a name is repeated.
fn find_cycle(from: &str, placed: &[&str], depends_on: &BTreeMap<&str, BTreeSet<&str>>) -> Vec<String> {
    let mut path = vec![from];
    loop {
        let last = path.last().copied().unwrap_or(from);
        let wanted = depends_on.get(last).into_iter().flatten().find(|wanted| !placed.contains(wanted));
        let Some(wanted) = wanted.copied() else { break };
        path.push(wanted);
        if let Some(begin) = path[..path.len() - 1].iter().position(|name| *name == wanted) {
            path.drain(..begin);
            break;
        }
    }
    path.into_iter().map(str::to_owned).collect()
}
