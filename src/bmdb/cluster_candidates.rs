//! Machines that may be chosen for a cluster: those that are well, in none, and that nobody has other plans for.

use serde_json::Value;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::model::cluster::hardware::Hardware;
use crate::model::cluster::selector::{Selector, Traits};
use crate::model::cluster::state::Candidate;
use crate::model::ids::MachineId;

/// Machines that one statement reads.
const PAGE: i64 = 1_000;

/// A page of machines that may be chosen.
struct Candidates {
    /// Those that fit the selector.
    found: Vec<Candidate>,
    /// The last machine that was looked at, if there may be more after it.
    next: Option<Uuid>,
}

impl Bmdb {
    /// Machines that may be chosen for a cluster.
    pub async fn cluster_candidates(&self, selector: &Selector) -> Result<Vec<Candidate>, BmdbError> {
        let (mut found, mut after) = (Vec::new(), Uuid::nil());
        loop {
            let selector = selector.clone();
            let read = self.transact("looking for machines for a cluster", move |tx| {
                let selector = selector.clone();
                Box::pin(async move { candidates(tx, &selector, after, PAGE).await })
            });
            let read = read.await?;
            found.extend(read.found);
            match read.next {
                Some(last) => after = last,
                None => return Ok(found),
            }
        }
    }
}

/// Whether this machine may be chosen.
pub(crate) async fn is_free(
    tx: &mut PgConnection,
    selector: &Selector,
    machine: Uuid,
) -> Result<bool, BmdbError> {
    let before = Uuid::from_u128(machine.as_u128().saturating_sub(1));
    let found = candidates(tx, selector, before, 1).await?.found;
    Ok(found.iter().any(|candidate| candidate.machine.0 == machine))
}

async fn candidates(
    tx: &mut PgConnection,
    selector: &Selector,
    after: Uuid,
    most: i64,
) -> Result<Candidates, BmdbError> {
    let rows = sqlx::query_file!("sql/cluster/list_candidates.sql", after, most)
        .fetch_all(tx)
        .await
        .doing("looking for machines for a cluster")?;
    let next =
        rows.last().map(|row| row.machine_id).filter(|_| i64::try_from(rows.len()).unwrap_or(most) == most);
    let labels = |labels: Option<Value>| labels.and_then(|labels| serde_json::from_value(labels).ok());
    let fits = rows.into_iter().filter_map(|row| {
        let traits = Traits {
            provider: row.provider,
            location: row.location.clone(),
            hardware: hardware(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads),
            labels: labels(row.labels).unwrap_or_default(),
        };
        let (machine, name) = (MachineId(row.machine_id), row.provider_id);
        let candidate = Candidate { machine, name, location: row.location };
        selector.holds(&traits).then_some(candidate)
    });
    Ok(Candidates { found: fits.collect(), next })
}

/// A machine's hardware by the columns of its report.
pub(super) fn hardware(
    manufacturer: Option<String>,
    product: Option<String>,
    memory_bytes: Option<i64>,
    cpu_threads: Option<i64>,
) -> Hardware {
    let count = |number: Option<i64>| number.and_then(|number| u64::try_from(number).ok());
    Hardware { manufacturer, product, memory: count(memory_bytes), cpus: count(cpu_threads) }
}
