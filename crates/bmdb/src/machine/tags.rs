//! Facts found by reflection over tables named `machine_…`.
//!
//! A tag is a table whose name begins with `machine_` and whose primary key is `machine_id` alone, so an older program
//! also shows a fact that a newer migration adds. This is the one place that builds a statement at run time: the
//! table's name, quoted, goes into a template.

use std::collections::{BTreeSet, HashMap, HashSet};

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use model::ids::MachineId;

/// A column of a tag table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagColumn {
    /// Name of the column.
    pub name: String,
    /// Type as the database writes it.
    pub kind: String,
}

/// One fact about a machine, found by the shape of its table.
#[derive(Clone, Debug, PartialEq)]
pub struct Tag {
    /// Name of the fact's table.
    pub table: String,
    /// Its columns in order, without the key.
    pub columns: Vec<TagColumn>,
    /// Values of the row by column.
    pub row: serde_json::Map<String, serde_json::Value>,
}

const READ_TAG_ROW: &str = include_str!("../../../../sql/inspect/read_tag_row.sql");
const FILTER_TAGGED: &str = include_str!("../../../../sql/inspect/filter_tagged.sql");
const OPERATION: &str = "reading facts by reflection";

/// Every fact that the BMDB holds about a machine, in the order of table names.
pub async fn list_tags(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<Tag>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_tag_columns.sql")
        .fetch_all(&mut *tx)
        .await
        .context(OPERATION)?;
    let mut tables: Vec<(String, Vec<TagColumn>)> = Vec::new();
    for row in rows {
        if tables.last().is_none_or(|(table, _)| *table != row.table_name) {
            tables.push((row.table_name, Vec::new()));
        }
        if let Some((_, columns)) = tables.last_mut()
            && row.column_name != "machine_id"
        {
            columns.push(TagColumn { name: row.column_name, kind: row.column_type });
        }
    }
    let mut tags = Vec::new();
    for (table, columns) in tables {
        let statement = READ_TAG_ROW.replace("{table}", &quote_identifier(&table));
        let row: Option<serde_json::Value> = sqlx::query_scalar(AssertSqlSafe(statement))
            .bind(machine.0)
            .fetch_optional(&mut *tx)
            .await
            .context(OPERATION)?;
        if let Some(serde_json::Value::Object(row)) = row {
            tags.push(Tag { table, columns, row });
        }
    }
    Ok(tags)
}

/// The tables of facts that a selector names.
#[derive(Debug)]
pub(crate) struct TagTables {
    /// Each fact with the statement that selects the machines that have it.
    statements: Vec<(String, String)>,
}

impl TagTables {
    /// Resolves the tables of these facts, by their names without `machine_`. A fact without a table is left out: of no
    /// machine it is known whether it has that fact.
    pub(crate) async fn resolve(tx: &mut PgConnection, facts: &BTreeSet<&str>) -> Result<Self, BmdbError> {
        if facts.is_empty() {
            return Ok(Self { statements: Vec::new() });
        }
        let rows = sqlx::query_file!("../../sql/inspect/list_tag_columns.sql")
            .fetch_all(tx)
            .await
            .context(OPERATION)?;
        let tables: HashSet<String> = rows.into_iter().map(|row| row.table_name).collect();
        Ok(Self::from_tables(&tables, facts))
    }

    fn from_tables(tables: &HashSet<String>, facts: &BTreeSet<&str>) -> Self {
        let statement_of = |fact: &&str| {
            let table = tables.get(&format!("machine_{fact}"))?;
            Some(((*fact).to_owned(), FILTER_TAGGED.replace("{table}", &quote_identifier(table))))
        };
        Self { statements: facts.iter().filter_map(statement_of).collect() }
    }

    /// The facts that have a table.
    pub(crate) fn facts(&self) -> BTreeSet<String> {
        self.statements.iter().map(|(fact, _)| fact.clone()).collect()
    }

    /// Which of these facts each of `machines` has; one without any is left out.
    pub(crate) async fn read_facts(
        &self,
        tx: &mut PgConnection,
        machines: &[Uuid],
    ) -> Result<HashMap<Uuid, BTreeSet<String>>, BmdbError> {
        let mut facts: HashMap<Uuid, BTreeSet<String>> = HashMap::new();
        for (fact, statement) in self.statements.iter().filter(|_| !machines.is_empty()) {
            let having: Vec<Uuid> = sqlx::query_scalar(AssertSqlSafe(statement.clone()))
                .bind(machines)
                .fetch_all(&mut *tx)
                .await
                .context(OPERATION)?;
            for machine in having {
                facts.entry(machine).or_default().insert(fact.clone());
            }
        }
        Ok(facts)
    }
}

/// A name as an SQL identifier, whatever characters it contains.
fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_cannot_end_its_own_quotes() {
        assert_eq!(quote_identifier("machine_provided"), "\"machine_provided\"");
        assert_eq!(quote_identifier("machine_\"; DROP"), "\"machine_\"\"; DROP\"");
    }

    #[test]
    fn fact_without_a_table_is_unknown() {
        let tables: HashSet<String> = ["machine_hold", "machine_quarantine"].map(str::to_owned).into();
        for (facts, known) in [
            (&[][..], &[][..]),
            (&["hold"], &["hold"]),
            (&["quarantine", "hold"], &["hold", "quarantine"]),
            (&["hold", "no_such_fact"], &["hold"]),
            (&["machine_hold"], &[]),
        ] {
            let tables = TagTables::from_tables(&tables, &facts.iter().copied().collect());
            assert!(tables.facts().iter().map(String::as_str).eq(known.iter().copied()), "{facts:?}");
        }
    }
}
