//! Machines that a roll-out may have: all that are neither retiring nor retired, and that its selector matches.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::machine::selector_values::SelectorReads;
use crate::machine::traits::{hardware_from_columns, parse_labels};
use model::label::Labels;
use model::selector::Selector;
use model::selector::traits::{Hardware, MachineTraits, NO_FACTS};

/// Machines that one statement reads.
const PAGE_SIZE: i64 = 1_000;

/// A machine that a roll-out may have, with the values that a selector matches.
struct RollOutCandidate {
    machine: Uuid,
    provider: String,
    provider_id: String,
    location: Option<String>,
    phase: String,
    hardware: Hardware,
    labels: Labels,
}

impl RollOutCandidate {
    /// What a selector sees of the machine, without its facts and its cluster.
    fn traits(&self) -> MachineTraits<'_> {
        MachineTraits {
            provider: Some(&self.provider),
            provider_id: Some(&self.provider_id),
            location: self.location.as_deref(),
            hardware: &self.hardware,
            labels: &self.labels,
            phase: Some(&self.phase),
            cluster: None,
            facts: &NO_FACTS,
            known_facts: &NO_FACTS,
        }
    }
}

/// Machines that a selector matches, by their ids, with their names.
pub(super) async fn list_selected_machines(
    tx: &mut PgConnection,
    selector: &Selector,
) -> Result<Vec<(Uuid, String)>, BmdbError> {
    let reads = SelectorReads::resolve(&mut *tx, selector).await?;
    let (mut found, mut after) = (Vec::new(), Uuid::nil());
    loop {
        let rows = sqlx::query_file!("../../sql/roll_out/list_candidates.sql", after, PAGE_SIZE)
            .fetch_all(&mut *tx)
            .await
            .context("ordering a roll-out")?;
        let last = rows.last().map(|row| row.machine_id);
        let whole = i64::try_from(rows.len()).unwrap_or(PAGE_SIZE) == PAGE_SIZE;
        let candidates = rows.into_iter().map(|row| RollOutCandidate {
            machine: row.machine_id,
            provider: row.provider,
            provider_id: row.provider_id,
            location: row.location,
            phase: row.phase_index,
            hardware: hardware_from_columns(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads),
            labels: parse_labels(row.labels),
        });
        let candidates: Vec<RollOutCandidate> = candidates.collect();
        let machines: Vec<Uuid> = candidates.iter().map(|candidate| candidate.machine).collect();
        let values = reads.read(&mut *tx, &machines).await?;
        let matching = candidates
            .into_iter()
            .filter(|candidate| selector.matches(&values.complete(candidate.machine, candidate.traits())));
        found.extend(matching.map(|candidate| (candidate.machine, candidate.provider_id)));
        match last.filter(|_| whole) {
            Some(last) => after = last,
            None => return Ok(found),
        }
    }
}
