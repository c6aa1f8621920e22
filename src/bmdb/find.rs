//! Which machine is meant: a UUID, the beginning of one, a provider's id, or
//! `provider/id`.
//!
//! A name that fits several machines is never resolved by taste: a command that
//! stops or restarts work must not hit a neighbour. The answer then lists them,
//! each in a form that fits it alone.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::{machines_by_id, machines_by_provider_id, machines_near};
use crate::model::ids::MachineId;
use crate::model::machine_view::MachineName;

/// Shortest beginning of a UUID that is taken for one.
const SHORTEST_PREFIX: usize = 4;
/// Most machines listed in an error.
const CANDIDATES: i64 = 5;

/// What a text names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// One machine.
    One(MachineName),
    /// None, or more than one: a sentence that says so and lists what may be meant.
    Not(String),
}

/// Finds the one machine that `text` names.
pub async fn find(tx: &mut PgConnection, text: &str) -> Result<Found, BmdbError> {
    let mut found = Vec::new();
    if let Some(range) = id_range(text) {
        found = machines_by_id(tx, range, CANDIDATES + 1).await?;
    }
    found.extend(machines_by_provider_id(tx, None, text, CANDIDATES + 1).await?);
    if let Some((provider, id)) = text.split_once('/') {
        found.extend(machines_by_provider_id(tx, Some(provider), id, CANDIDATES + 1).await?);
    }
    let mut near = Vec::new();
    if found.is_empty() && Uuid::try_parse(text).is_err() {
        let id = text.rsplit('/').next().unwrap_or_default();
        near = machines_near(tx, beginning(id), CANDIDATES).await?;
        near.retain(|name| is_near(name, beginning(id)));
    }
    found.sort_by_cached_key(|name| (name.provider.clone(), name.provider_id.clone(), name.machine));
    found.dedup();
    Ok(match found.len() {
        1 => Found::One(found.remove(0)),
        0 => Found::Not(unknown(text, &near)),
        _ => Found::Not(ambiguous(text, &found)),
    })
}

/// Its id, typed.
#[must_use]
pub const fn id_of(name: &MachineName) -> MachineId {
    MachineId(name.machine)
}

/// First and last UUID that begin with `text`, dashes aside.
pub(crate) fn id_range(text: &str) -> Option<(Uuid, Uuid)> {
    let digits: String = text.chars().filter(|&c| c != '-').collect();
    let fits =
        (SHORTEST_PREFIX..=32).contains(&digits.len()) && digits.chars().all(|c| c.is_ascii_hexdigit());
    if !fits {
        return None;
    }
    let first = Uuid::try_parse(&format!("{digits:0<32}")).ok()?;
    let last = Uuid::try_parse(&format!("{digits:f<32}")).ok()?;
    Some((first, last))
}

/// All but the last two characters, so that a slip at the end still finds the neighbours.
fn beginning(id: &str) -> &str {
    let keep = id.chars().count().saturating_sub(2);
    id.char_indices().nth(keep).map_or("", |(end, _)| &id[..end])
}

/// Machines are read from a place in the order of names on; those that begin otherwise are no neighbours.
fn is_near(name: &MachineName, beginning: &str) -> bool {
    !beginning.is_empty() && name.provider_id.as_ref().is_some_and(|id| id.starts_with(beginning))
}

fn unknown(text: &str, near: &[MachineName]) -> String {
    if near.is_empty() {
        return format!(
            "the BMDB knows no machine {text:?}; `shepherdctl get machines` lists those it knows"
        );
    }
    let names: Vec<String> = near.iter().map(MachineName::short).collect();
    format!("the BMDB knows no machine {text:?}; near it are {}", names.join(", "))
}

fn ambiguous(text: &str, found: &[MachineName]) -> String {
    let shown = found.len().min(usize::try_from(CANDIDATES).unwrap_or(usize::MAX));
    let mut names: Vec<String> = found[..shown]
        .iter()
        .map(|name| match name.provider {
            Some(_) => format!("{} ({})", name.short(), name.machine),
            None => name.short(),
        })
        .collect();
    if found.len() > shown {
        names.push("…".to_owned());
    }
    format!("{text:?} fits more than one machine; say which: {}", names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginning_of_an_id_is_a_range_of_ids() {
        let (first, last) = id_range("3f2A").unwrap();
        assert_eq!(first.to_string(), "3f2a0000-0000-0000-0000-000000000000");
        assert_eq!(last.to_string(), "3f2affff-ffff-ffff-ffff-ffffffffffff");
        let whole = "3f2a0000-1234-4321-8000-00000000000a";
        let (first, last) = id_range(whole).unwrap();
        assert_eq!((first.to_string(), first), (whole.to_owned(), last));
        for text in ["", "3f2", "sim-0007", "3f2a0000-1234-4321-8000-00000000000a0", "3f2é"] {
            assert_eq!(id_range(text), None, "{text}");
        }
    }

    #[test]
    fn neighbours_are_looked_for_from_before_the_slip() {
        for (id, expected) in [("sim-0107", "sim-01"), ("ab", ""), ("", ""), ("é1é", "é")] {
            assert_eq!(beginning(id), expected);
        }
    }
}
