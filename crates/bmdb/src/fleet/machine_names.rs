//! Lookup of several machines at once, by the names that an order or a list has.
//!
//! A name means here what it means alone ([`find_machine`]): one that fits several machines is never resolved by
//! preference. Whole UUIDs and provider ids, with and without their provider, are looked up in one statement each for all
//! names. A name that fits no machine then or several, or that is the beginning of a UUID, is looked up alone, which also
//! gives the sentence that explains it.

use std::collections::HashMap;

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::fleet::listing::{Filter, list_machines_by_id};
use crate::machine::lookup::{LookupResult, find_machine, machine_name, uuid_prefix_range};
use crate::machine::scoped_lookup::find_in_scope;
use model::access::AccessScope;
use model::machine_view::MachineName;

const OPERATION: &str = "finding machines";

/// Finds the machine that each of `names` names within the scope, in their order.
pub async fn find_machines(
    tx: &mut PgConnection,
    names: &[String],
    scope: &AccessScope,
) -> Result<Vec<LookupResult>, BmdbError> {
    let candidates = read_candidates(tx, names, scope).await?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        found.push(match (candidates.find_only(name), scope) {
            (Some(machine), _) => LookupResult::One(machine),
            (None, AccessScope::Fleet) => find_machine(tx, name).await?,
            (None, AccessScope::Providers(_)) => find_in_scope(tx, name, scope).await?,
        });
    }
    Ok(found)
}

/// The machines within a scope that some names may mean.
#[derive(Debug, Default)]
struct Candidates {
    by_uuid: HashMap<Uuid, MachineName>,
    by_provider_id: HashMap<String, Vec<MachineName>>,
}

impl Candidates {
    /// The only machine that the name fits; `None` if that is not certain.
    fn find_only(&self, name: &str) -> Option<MachineName> {
        let by_uuid = match uuid_prefix_range(name) {
            None => None,
            Some((first, last)) if first == last => Some(self.by_uuid.get(&first)?),
            Some(_) => return None,
        };
        let mut fitting: Vec<&MachineName> = by_uuid.into_iter().collect();
        fitting.extend(self.by_provider_id.get(name).into_iter().flatten());
        if let Some((provider, id)) = name.split_once('/') {
            let found = self.by_provider_id.get(id).into_iter().flatten();
            fitting.extend(found.filter(|machine| machine.provider.as_deref() == Some(provider)));
        }
        let (first, others) = fitting.split_first()?;
        others.iter().all(|other| other.machine == first.machine).then(|| (*first).clone())
    }
}

async fn read_candidates(
    tx: &mut PgConnection,
    names: &[String],
    scope: &AccessScope,
) -> Result<Candidates, BmdbError> {
    let uuids: Vec<Uuid> = names.iter().filter_map(|name| whole_uuid(name)).collect();
    let listed = list_machines_by_id(tx, &Filter::default(), scope, &uuids).await?;
    let names_of_uuids = listed.into_iter().map(|one| (one.summary.name.machine, one.summary.name));
    let mut candidates = Candidates { by_uuid: names_of_uuids.collect(), ..Candidates::default() };
    let ids: Vec<String> = provider_ids(names).into_iter().map(str::to_owned).collect();
    let rows = sqlx::query_file!("../../sql/inspect/list_by_provider_ids.sql", ids.as_slice())
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    for row in rows {
        if scope.includes_provider(Some(&row.provider)) {
            let name = machine_name(row.machine_id, Some(row.provider), Some(row.provider_id.clone()));
            candidates.by_provider_id.entry(row.provider_id).or_default().push(name);
        }
    }
    Ok(candidates)
}

/// The UUID that the name is, if it is a whole one.
fn whole_uuid(name: &str) -> Option<Uuid> {
    uuid_prefix_range(name).filter(|(first, last)| first == last).map(|(first, _)| first)
}

/// The provider ids that the names may mean, each once: the names themselves, and what is behind a slash in them.
fn provider_ids(names: &[String]) -> Vec<&str> {
    let mut ids: Vec<&str> = Vec::with_capacity(2 * names.len());
    for name in names {
        ids.push(name);
        ids.extend(name.split_once('/').map(|(_, id)| id));
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(number: u128, provider: &str, id: &str) -> MachineName {
        machine_name(Uuid::from_u128(number), Some(provider.to_owned()), Some(id.to_owned()))
    }

    #[test]
    fn name_is_resolved_if_it_fits_one_machine_for_certain() {
        let uuid = Uuid::from_u128(1).to_string();
        let all = [
            machine(1, "sim", "m-1"),
            machine(2, "sim", "7"),
            machine(3, "rack", "7"),
            machine(4, "rack", "sim/m-1"),
            // The id of a machine is the UUID of another one.
            machine(5, "rack", &Uuid::from_u128(2).to_string()),
            machine(6, "rack", "cafe"),
        ];
        let mut candidates = Candidates::default();
        for one in all {
            candidates.by_uuid.insert(one.machine, one.clone());
            let id = one.provider_id.clone().unwrap();
            candidates.by_provider_id.entry(id).or_default().push(one);
        }
        for (name, expected) in [
            (uuid.as_str(), Some(1)),
            (&uuid.replace('-', ""), Some(1)),
            ("m-1", Some(1)),
            ("rack/7", Some(3)),
            ("rack/sim/m-1", Some(4)),
            // Two machines.
            ("7", None),
            ("sim/m-1", None),
            (&Uuid::from_u128(2).to_string(), None),
            // It may be the beginning of a UUID, and a whole UUID that is not listed may exist.
            ("cafe", None),
            (&Uuid::from_u128(9).to_string(), None),
            ("nobody", None),
            ("sim/nobody", None),
        ] {
            let found = candidates.find_only(name).map(|found| found.machine.as_u128());
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn provider_ids_of_names_are_looked_up_once() {
        let names = ["sim/m-1", "m-1", "rack/a/1", "sim/m-1"].map(str::to_owned);
        assert_eq!(provider_ids(&names), ["a/1", "m-1", "rack/a/1", "sim/m-1"]);
    }
}
