//! Which machine is meant by somebody who reaches only some providers' machines.
//!
//! As [`find`](crate::bmdb::find::find), but the machines of others are not there: not to be meant, not to
//! make a name ambiguous, and not to take the place of his own in what is read. What is answered therefore
//! does not depend on them, and there is one sentence for whatever he does not reach.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::Doing as _;
use crate::bmdb::error::BmdbError;
use crate::bmdb::find::{Found, id_range};
use crate::bmdb::inspect::machines_by_id;
use crate::model::access::Scope;
use crate::model::machine_view::MachineName;

const WHAT: &str = "finding a machine";
/// Most machines listed in an answer.
const CANDIDATES: usize = 5;
const LIMIT: i64 = 6;

/// Finds the one machine that `text` names among those of `scope`, which are some providers'.
pub async fn find_reached(tx: &mut PgConnection, text: &str, scope: &Scope) -> Result<Found, BmdbError> {
    let providers = scope.providers();
    let mut found = match id_range(text) {
        None => Vec::new(),
        // Its only candidate, whether its schedule was written already or not.
        Some((first, last)) if first == last => machines_by_id(tx, (first, last), LIMIT).await?,
        Some(range) => by_id(tx, &providers, range).await?,
    };
    found.extend(by_provider_id(tx, &providers, text).await?);
    if let Some((provider, id)) = text.split_once('/') {
        found.extend(by_provider_id(tx, &[provider.to_owned()], id).await?);
    }
    Ok(meant(text, found, scope))
}

/// What is meant, of machines that a text fits.
fn meant(text: &str, mut found: Vec<MachineName>, scope: &Scope) -> Found {
    found.retain(|name| scope.holds(name.provider.as_deref()));
    found.sort_by_cached_key(|name| (name.provider.clone(), name.provider_id.clone(), name.machine));
    found.dedup();
    match found.len() {
        0 => Found::Not(format!(
            "this credential reaches no machine {text:?}; it is for the machines of some providers"
        )),
        1 => Found::One(found.remove(0)),
        _ => {
            let shown = found.iter().take(CANDIDATES);
            let mut names: Vec<String> =
                shown.map(|name| format!("{} ({})", name.short(), name.machine)).collect();
            if found.len() > CANDIDATES {
                names.push("…".to_owned());
            }
            Found::Not(format!("{text:?} fits more than one machine; say which: {}", names.join(", ")))
        }
    }
}

async fn by_id(
    tx: &mut PgConnection,
    providers: &[String],
    (first, last): (Uuid, Uuid),
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_by_id_in_scope.sql", providers, first, last, LIMIT)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows.into_iter().map(|row| name(row.machine_id, row.provider, row.provider_id)).collect())
}

async fn by_provider_id(
    tx: &mut PgConnection,
    providers: &[String],
    id: &str,
) -> Result<Vec<MachineName>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_by_provider_id_in_scope.sql", providers, id, LIMIT)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows.into_iter().map(|row| name(row.machine_id, row.provider, row.provider_id)).collect())
}

fn name(machine: Uuid, provider: String, provider_id: String) -> MachineName {
    MachineName { machine, provider: Some(provider), provider_id: Some(provider_id) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_others_change_no_answer() {
        let scope = Scope::of(["rack".to_owned()]);
        let of = |provider: &str, id: u128| name(Uuid::from_u128(id), provider.to_owned(), format!("m-{id}"));
        let nobodys = MachineName { machine: Uuid::from_u128(9), provider: None, provider_id: None };
        for ours in [vec![], vec![of("rack", 1)], vec![of("rack", 1), of("rack", 2), of("rack", 1)]] {
            let theirs = [of("other", 3), nobodys.clone(), of("other", 4)];
            let all = theirs.into_iter().chain(ours.clone()).collect();
            assert_eq!(meant("m", all, &scope), meant("m", ours, &scope));
        }
        assert_eq!(meant("m", vec![of("other", 3), of("rack", 1)], &scope), Found::One(of("rack", 1)));
        let Found::Not(said) = meant("m", (1..9).map(|id| of("rack", id)).collect(), &scope) else {
            panic!("several are not one")
        };
        assert!(said.contains("rack/m-5") && said.ends_with('…') && !said.contains("rack/m-6"), "{said}");
    }

    #[test]
    fn beginning_of_an_id_is_a_range_of_ids() {
        let (first, last) = id_range("3f2A").unwrap();
        assert_eq!(first.to_string(), "3f2a0000-0000-0000-0000-000000000000");
        assert_eq!(last.to_string(), "3f2affff-ffff-ffff-ffff-ffffffffffff");
        for text in ["", "3f2", "sim-0007", "3f2a0000-1234-4321-8000-00000000000a0"] {
            assert_eq!(id_range(text), None, "{text}");
        }
    }
}
