//! Resolving a machine by UUID, UUID prefix or provider id.
//!
//! A text may be a UUID, a prefix of one, a provider id, or `provider/id`. A text that fits several machines is never
//! resolved by preference: a command that stops or restarts work must not hit a neighbour. The answer then lists them,
//! each in a form that fits it alone.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use model::ids::MachineId;
use model::machine_view::MachineName;

const OPERATION: &str = "reading what to show";
/// Shortest prefix of a UUID that is accepted as one.
const SHORTEST_PREFIX: usize = 4;
/// Most machines listed in an error.
const MAX_CANDIDATES: i64 = 5;

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupResult {
    /// Exactly one machine matches.
    One(MachineName),
    /// None matches, or more than one: a sentence that explains it and lists candidates.
    Unresolved(String),
}

/// Finds the one machine that `text` names.
pub async fn find_machine(tx: &mut PgConnection, text: &str) -> Result<LookupResult, BmdbError> {
    let mut found = Vec::new();
    if let Some(range) = uuid_prefix_range(text) {
        found = machines_by_id(tx, range, MAX_CANDIDATES + 1).await?;
    }
    found.extend(machines_by_provider_id(tx, None, text, MAX_CANDIDATES + 1).await?);
    if let Some((provider, id)) = text.split_once('/') {
        found.extend(machines_by_provider_id(tx, Some(provider), id, MAX_CANDIDATES + 1).await?);
    }
    let mut near = Vec::new();
    if found.is_empty() && Uuid::try_parse(text).is_err() {
        let id = text.rsplit('/').next().unwrap_or_default();
        near = suggest_machines(tx, search_prefix(id), MAX_CANDIDATES).await?;
        near.retain(|name| has_prefix(name, search_prefix(id)));
    }
    found.sort_by_cached_key(|name| (name.provider.clone(), name.provider_id.clone(), name.machine));
    found.dedup();
    Ok(match found.len() {
        1 => LookupResult::One(found.remove(0)),
        0 => LookupResult::Unresolved(unknown_machine_message(text, &near)),
        _ => LookupResult::Unresolved(ambiguous_name_message(text, &found)),
    })
}

/// The machine's id with its type.
#[must_use]
pub const fn machine_id(name: &MachineName) -> MachineId {
    MachineId(name.machine)
}

/// The names of a machine, from the columns that have them.
pub(crate) const fn machine_name(
    machine: Uuid,
    provider: Option<String>,
    provider_id: Option<String>,
) -> MachineName {
    MachineName { machine, provider, provider_id }
}

/// First and last UUID that begin with `text`, dashes aside.
pub(crate) fn uuid_prefix_range(text: &str) -> Option<(Uuid, Uuid)> {
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
fn search_prefix(id: &str) -> &str {
    let keep = id.chars().count().saturating_sub(2);
    id.char_indices().nth(keep).map_or("", |(end, _)| &id[..end])
}

/// Machines are read from a position in the order of names on; those without the prefix are no neighbours.
fn has_prefix(name: &MachineName, beginning: &str) -> bool {
    !beginning.is_empty() && name.provider_id.as_ref().is_some_and(|id| id.starts_with(beginning))
}

fn unknown_machine_message(text: &str, near: &[MachineName]) -> String {
    if near.is_empty() {
        return format!(
            "the BMDB knows no machine {text:?}; `shepherdctl get machines` lists those it knows"
        );
    }
    let names: Vec<String> = near.iter().map(MachineName::short_name).collect();
    format!("the BMDB knows no machine {text:?}; near it are {}", names.join(", "))
}

fn ambiguous_name_message(text: &str, found: &[MachineName]) -> String {
    let shown = found.len().min(usize::try_from(MAX_CANDIDATES).unwrap_or(usize::MAX));
    let mut names: Vec<String> = found[..shown]
        .iter()
        .map(|name| match name.provider {
            Some(_) => format!("{} ({})", name.short_name(), name.machine),
            None => name.short_name(),
        })
        .collect();
    if found.len() > shown {
        names.push("…".to_owned());
    }
    format!("{text:?} fits more than one machine; say which: {}", names.join(", "))
}

/// Machines whose id is between two, inclusive.
pub(crate) async fn machines_by_id(
    tx: &mut PgConnection,
    (first, last): (Uuid, Uuid),
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_id.sql", first, last, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows.into_iter().map(|row| machine_name(row.machine_id, row.provider, row.provider_id)).collect())
}

/// Machines with that provider id, at one provider or at any.
async fn machines_by_provider_id(
    tx: &mut PgConnection,
    provider: Option<&str>,
    id: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_provider_id.sql", provider, id, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows.into_iter().map(|row| machine_name(row.machine_id, row.provider, row.provider_id)).collect())
}

/// Machines whose provider id follows a text in the order of names.
async fn suggest_machines(
    tx: &mut PgConnection,
    text: &str,
    limit: i64,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/suggest_ids.sql", text, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows.into_iter().map(|row| machine_name(row.machine_id, row.provider, row.provider_id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_prefix_is_a_range_of_ids() {
        let (first, last) = uuid_prefix_range("3f2A").unwrap();
        assert_eq!(first.to_string(), "3f2a0000-0000-0000-0000-000000000000");
        assert_eq!(last.to_string(), "3f2affff-ffff-ffff-ffff-ffffffffffff");
        let whole = "3f2a0000-1234-4321-8000-00000000000a";
        let (first, last) = uuid_prefix_range(whole).unwrap();
        assert_eq!((first.to_string(), first), (whole.to_owned(), last));
        for text in ["", "3f2", "sim-0007", "3f2a0000-1234-4321-8000-00000000000a0", "3f2é"] {
            assert_eq!(uuid_prefix_range(text), None, "{text}");
        }
    }

    #[test]
    fn search_prefix_drops_the_last_two_characters() {
        for (id, expected) in [("sim-0107", "sim-01"), ("ab", ""), ("", ""), ("é1é", "é")] {
            assert_eq!(search_prefix(id), expected);
        }
    }
}
