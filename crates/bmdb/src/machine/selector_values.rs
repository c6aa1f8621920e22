//! Values that a selector may name besides those in the columns of a list: the facts and the cluster of a machine.
//!
//! They are read for the machines of a page, and only if the selector names them, so that the bound of a page is the bound
//! of these reads, too.

use std::collections::{BTreeSet, HashMap};

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::machine::tags::TagTables;
use model::selector::Selector;
use model::selector::key::SelectorKey;
use model::selector::traits::{MachineTraits, NO_FACTS};

/// Keys of the values that are read here.
pub(crate) const SEPARATE_KEYS: [SelectorKey; 2] = [SelectorKey::Fact, SelectorKey::Cluster];

/// Which of these values a selector names.
#[derive(Debug)]
pub(crate) struct SelectorReads {
    tables: TagTables,
    known_facts: BTreeSet<String>,
    reads_clusters: bool,
}

/// The values of the machines of a page.
#[derive(Debug)]
pub(crate) struct PageValues<'a> {
    known_facts: &'a BTreeSet<String>,
    facts: HashMap<Uuid, BTreeSet<String>>,
    clusters: HashMap<Uuid, String>,
}

impl SelectorReads {
    /// Finds out what the selector names.
    pub(crate) async fn resolve(tx: &mut PgConnection, selector: &Selector) -> Result<Self, BmdbError> {
        let tables = TagTables::resolve(tx, &selector.facts()).await?;
        let known_facts = tables.facts();
        let reads_clusters = selector.keys().any(|key| key == SelectorKey::Cluster);
        Ok(Self { tables, known_facts, reads_clusters })
    }

    /// Reads these values of `machines`.
    pub(crate) async fn read(
        &self,
        tx: &mut PgConnection,
        machines: &[Uuid],
    ) -> Result<PageValues<'_>, BmdbError> {
        let facts = self.tables.read_facts(&mut *tx, machines).await?;
        let mut clusters = HashMap::new();
        if self.reads_clusters && !machines.is_empty() {
            let rows = sqlx::query_file!("../../sql/inspect/list_clusters_of_machines.sql", machines)
                .fetch_all(tx)
                .await
                .context("reading the clusters of machines")?;
            clusters.extend(rows.into_iter().map(|row| (row.machine_id, row.name)));
        }
        Ok(PageValues { known_facts: &self.known_facts, facts, clusters })
    }
}

impl PageValues<'_> {
    /// The values of a machine with those that were read here.
    pub(crate) fn complete<'m>(&'m self, machine: Uuid, traits: MachineTraits<'m>) -> MachineTraits<'m> {
        MachineTraits {
            cluster: self.clusters.get(&machine).map(String::as_str),
            facts: self.facts.get(&machine).unwrap_or(&NO_FACTS),
            known_facts: self.known_facts,
            ..traits
        }
    }
}
