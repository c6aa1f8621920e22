//! Resolving a machine within the providers a credential may see.
//!
//! As [`machine_lookup`](crate::machine::lookup::find_machine), but machines of other providers do not exist: they
//! cannot match, cannot make a name ambiguous, and cannot displace the client's own in what is read. The answer
//! therefore does not depend on them, and it is the same sentence for every machine that the client may not see.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::machine::lookup::{LookupResult, machine_name, machines_by_id, uuid_prefix_range};
use model::access::AccessScope;
use model::machine_view::MachineName;

const OPERATION: &str = "finding a machine";
/// Most machines listed in an answer.
const MAX_CANDIDATES: usize = 5;
const LIMIT: i64 = 6;

/// Finds the one machine that `text` names among those of `scope`, which is a list of providers.
pub async fn find_in_scope(
    tx: &mut PgConnection,
    text: &str,
    scope: &AccessScope,
) -> Result<LookupResult, BmdbError> {
    let providers = scope.providers();
    let mut found = match uuid_prefix_range(text) {
        None => Vec::new(),
        // An exact id has only one candidate, whether its schedule is written already or not.
        Some((first, last)) if first == last => machines_by_id(tx, (first, last), LIMIT).await?,
        Some(range) => find_by_id(tx, &providers, range).await?,
    };
    found.extend(find_by_provider_id(tx, &providers, text).await?);
    if let Some((provider, id)) = text.split_once('/') {
        found.extend(find_by_provider_id(tx, &[provider.to_owned()], id).await?);
    }
    Ok(resolve_matches(text, found, scope))
}

/// Resolves a text among the machines that match it.
fn resolve_matches(text: &str, mut found: Vec<MachineName>, scope: &AccessScope) -> LookupResult {
    found.retain(|name| scope.includes_provider(name.provider.as_deref()));
    found.sort_by_cached_key(|name| (name.provider.clone(), name.provider_id.clone(), name.machine));
    found.dedup();
    match found.len() {
        0 => LookupResult::Unresolved(format!(
            "this credential reaches no machine {text:?}; it is for the machines of some providers"
        )),
        1 => LookupResult::One(found.remove(0)),
        _ => {
            let shown = found.iter().take(MAX_CANDIDATES);
            let mut names: Vec<String> =
                shown.map(|name| format!("{} ({})", name.short_name(), name.machine)).collect();
            if found.len() > MAX_CANDIDATES {
                names.push("…".to_owned());
            }
            LookupResult::Unresolved(format!(
                "{text:?} fits more than one machine; say which: {}",
                names.join(", ")
            ))
        }
    }
}

async fn find_by_id(
    tx: &mut PgConnection,
    providers: &[String],
    (first, last): (Uuid, Uuid),
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_id_in_scope.sql", providers, first, last, LIMIT)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| machine_name(row.machine_id, Some(row.provider), Some(row.provider_id)))
        .collect())
}

async fn find_by_provider_id(
    tx: &mut PgConnection,
    providers: &[String],
    id: &str,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_by_provider_id_in_scope.sql", providers, id, LIMIT)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| machine_name(row.machine_id, Some(row.provider), Some(row.provider_id)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_out_of_scope_do_not_change_the_result() {
        let scope = AccessScope::from_providers(["rack".to_owned()]);
        let of = |provider: &str, id: u128| {
            machine_name(Uuid::from_u128(id), Some(provider.to_owned()), Some(format!("m-{id}")))
        };
        let nobodys = MachineName { machine: Uuid::from_u128(9), provider: None, provider_id: None };
        for ours in [vec![], vec![of("rack", 1)], vec![of("rack", 1), of("rack", 2), of("rack", 1)]] {
            let theirs = [of("other", 3), nobodys.clone(), of("other", 4)];
            let all = theirs.into_iter().chain(ours.clone()).collect();
            assert_eq!(resolve_matches("m", all, &scope), resolve_matches("m", ours, &scope));
        }
        assert_eq!(
            resolve_matches("m", vec![of("other", 3), of("rack", 1)], &scope),
            LookupResult::One(of("rack", 1))
        );
        let LookupResult::Unresolved(text) =
            resolve_matches("m", (1..9).map(|id| of("rack", id)).collect(), &scope)
        else {
            panic!("several are not one")
        };
        assert!(text.contains("rack/m-5") && text.ends_with('…') && !text.contains("rack/m-6"), "{text}");
    }

    #[test]
    fn uuid_prefix_is_a_range_of_ids() {
        let (first, last) = uuid_prefix_range("3f2A").unwrap();
        assert_eq!(first.to_string(), "3f2a0000-0000-0000-0000-000000000000");
        assert_eq!(last.to_string(), "3f2affff-ffff-ffff-ffff-ffffffffffff");
        for text in ["", "3f2", "sim-0007", "3f2a0000-1234-4321-8000-00000000000a0"] {
            assert_eq!(uuid_prefix_range(text), None, "{text}");
        }
    }
}
