//! Facts found by reflection over tables named `machine_…`.
//!
//! A tag is a table whose name begins with `machine_` and whose primary key is `machine_id` alone, so an older program
//! also shows a fact that a newer migration adds. This is the one place that builds a statement at run time: the
//! table's name, quoted, goes into a template.

use std::collections::HashSet;

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

/// The tables of the facts that matching machines must all have.
#[derive(Debug)]
pub(crate) struct TagTables {
    /// One statement for each fact, which selects the machines that have it.
    statements: Vec<String>,
}

impl TagTables {
    /// Resolves the tables of these facts, by their names without `machine_`; `None` when one has no table, and so no
    /// machine has them all.
    pub(crate) async fn resolve(tx: &mut PgConnection, tags: &[String]) -> Result<Option<Self>, BmdbError> {
        if tags.is_empty() {
            return Ok(Some(Self { statements: Vec::new() }));
        }
        let rows = sqlx::query_file!("../../sql/inspect/list_tag_columns.sql")
            .fetch_all(tx)
            .await
            .context(OPERATION)?;
        let tables: HashSet<String> = rows.into_iter().map(|row| row.table_name).collect();
        Ok(Self::from_tables(&tables, tags))
    }

    fn from_tables(tables: &HashSet<String>, tags: &[String]) -> Option<Self> {
        let statement_of = |tag: &String| {
            let table = tables.get(&format!("machine_{tag}"))?;
            Some(FILTER_TAGGED.replace("{table}", &quote_identifier(table)))
        };
        tags.iter().map(statement_of).collect::<Option<_>>().map(|statements| Self { statements })
    }

    /// Those of `machines` that have all of the facts.
    pub(crate) async fn filter_machines(
        &self,
        tx: &mut PgConnection,
        mut machines: Vec<Uuid>,
    ) -> Result<HashSet<Uuid>, BmdbError> {
        for statement in &self.statements {
            if machines.is_empty() {
                break;
            }
            machines = sqlx::query_scalar(AssertSqlSafe(statement.clone()))
                .bind(machines)
                .fetch_all(&mut *tx)
                .await
                .context(OPERATION)?;
        }
        Ok(machines.into_iter().collect())
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
    fn fact_without_a_table_is_one_that_no_machine_has() {
        let tables: HashSet<String> = ["machine_hold", "machine_quarantine"].map(str::to_owned).into();
        for (tags, found) in [
            (&[][..], Some(0)),
            (&["hold"], Some(1)),
            (&["quarantine", "hold"], Some(2)),
            (&["hold", "no_such_fact"], None),
            (&["machine_hold"], None),
        ] {
            let tags: Vec<String> = tags.iter().map(|&tag| tag.to_owned()).collect();
            let tables = TagTables::from_tables(&tables, &tags);
            assert_eq!(tables.map(|tables| tables.statements.len()), found, "{tags:?}");
        }
    }
}
