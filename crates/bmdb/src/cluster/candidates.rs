//! Machines that can be chosen for a cluster.
//!
//! Candidates are healthy machines that are in no cluster and that no operator has other plans for.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};
use crate::machine::traits::{hardware_from_columns, parse_labels};
use model::cluster::restore_programs::{EtcdPrograms, check_restore_programs};
use model::cluster::state::CandidateMachine;
use model::ids::MachineId;
use model::selector::Selector;
use model::selector::traits::{MachineTraits, NO_FACTS};

/// Machines that one statement reads.
const PAGE_SIZE: i64 = 1_000;

/// A page of machines that can be chosen.
struct CandidatePage {
    /// Machines that match the selector.
    candidates: Vec<CandidateMachine>,
    /// Id of the last machine of the page; `None` if no more follow.
    next: Option<Uuid>,
}

impl Bmdb {
    /// All machines that can be chosen for a cluster with this selector.
    pub async fn cluster_candidates(&self, selector: &Selector) -> Result<Vec<CandidateMachine>, BmdbError> {
        let (mut found, mut after) = (Vec::new(), Uuid::nil());
        loop {
            let selector = selector.clone();
            let read =
                self.transact_with("looking for machines for a cluster", selector, move |tx, selector| {
                    Box::pin(read_candidate_page(tx, selector, after, PAGE_SIZE))
                });
            let read = read.await?;
            found.extend(read.candidates);
            match read.next {
                Some(last) => after = last,
                None => return Ok(found),
            }
        }
    }
}

/// Looks for a machine that can be chosen and has the programs to restore an image of this version of etcd. Returns what is
/// missing on the first machine that cannot, if there is none: its name and a text that continues a sentence after it.
pub(crate) async fn find_restoring_candidate(
    tx: &mut PgConnection,
    selector: &Selector,
    etcd_version: &str,
) -> Result<Result<(), Option<(String, String)>>, BmdbError> {
    let (mut after, mut missing) = (Uuid::nil(), None);
    loop {
        let page = read_candidate_page(tx, selector, after, PAGE_SIZE).await?;
        for candidate in page.candidates {
            match check_restore_programs(etcd_version, &candidate.programs) {
                Ok(()) => return Ok(Ok(())),
                Err(text) => missing = missing.or(Some((candidate.name, text))),
            }
        }
        match page.next {
            Some(last) => after = last,
            None => return Ok(Err(missing)),
        }
    }
}

/// What this machine lacks to restore an image of this version of etcd, as a text that continues a sentence after its name.
pub(crate) async fn check_restoring_machine(
    tx: &mut PgConnection,
    machine: Uuid,
    etcd_version: &str,
) -> Result<Result<(), String>, BmdbError> {
    let row = sqlx::query!(
        "SELECT etcd_version, etcdutl_version FROM machine_cluster_report WHERE machine_id = $1",
        machine
    )
    .fetch_optional(tx)
    .await
    .context("looking for machines for a cluster")?;
    let programs = row.map(|row| EtcdPrograms { etcd: row.etcd_version, etcdutl: row.etcdutl_version });
    Ok(check_restore_programs(etcd_version, &programs.unwrap_or_default()))
}

/// Whether this machine can be chosen.
pub(crate) async fn is_candidate(
    tx: &mut PgConnection,
    selector: &Selector,
    machine: Uuid,
) -> Result<bool, BmdbError> {
    let before = Uuid::from_u128(machine.as_u128().saturating_sub(1));
    let found = read_candidate_page(tx, selector, before, 1).await?.candidates;
    Ok(found.iter().any(|candidate| candidate.machine.0 == machine))
}

async fn read_candidate_page(
    tx: &mut PgConnection,
    selector: &Selector,
    after: Uuid,
    most: i64,
) -> Result<CandidatePage, BmdbError> {
    let rows = sqlx::query_file!("../../sql/cluster/list_candidates.sql", after, most)
        .fetch_all(tx)
        .await
        .context("looking for machines for a cluster")?;
    let next =
        rows.last().map(|row| row.machine_id).filter(|_| i64::try_from(rows.len()).unwrap_or(most) == most);
    let fits = rows.into_iter().filter_map(|row| {
        let labels = parse_labels(row.labels);
        let hardware =
            hardware_from_columns(row.manufacturer, row.product, row.memory_bytes, row.cpu_threads);
        // A cluster's selector has no terms about what is left out here (`model::cluster::spec::check_cluster_selector`).
        let matches = selector.matches(&MachineTraits {
            provider: Some(&row.provider),
            provider_id: Some(&row.provider_id),
            location: row.location.as_deref(),
            hardware: &hardware,
            labels: &labels,
            phase: None,
            cluster: None,
            facts: &NO_FACTS,
            known_facts: &NO_FACTS,
        });
        let (machine, name) = (MachineId(row.machine_id), row.provider_id);
        let programs = EtcdPrograms { etcd: row.etcd_version, etcdutl: row.etcdutl_version };
        matches.then_some(CandidateMachine { machine, name, location: row.location, programs })
    });
    Ok(CandidatePage { candidates: fits.collect(), next })
}
