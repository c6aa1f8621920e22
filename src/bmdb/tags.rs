//! The facts about a machine, found by reflection.
//!
//! A tag is a table whose name begins with `machine_` and whose primary key is
//! `machine_id` alone, so a fact that a newer migration adds is shown by a
//! program that has never heard of it. This is the one place that builds a
//! statement at run time: the table's name, quoted, goes into a template.

use std::collections::HashSet;

use sqlx::{AssertSqlSafe, PgConnection};
use uuid::Uuid;

use crate::bmdb::connection::Doing;
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::{Tag, TagColumn};
use crate::model::ids::MachineId;

const ROW: &str = include_str!("../../sql/inspect/read_tag_row.sql");
const TAGGED: &str = include_str!("../../sql/inspect/filter_tagged.sql");
const WHAT: &str = "reading facts by reflection";

/// Every fact that the BMDB holds about a machine, in the order of table names.
pub async fn tags(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<Tag>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_tag_columns.sql").fetch_all(&mut *tx).await.doing(WHAT)?;
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
        let statement = ROW.replace("{table}", &quoted(&table));
        let row: Option<serde_json::Value> = sqlx::query_scalar(AssertSqlSafe(statement))
            .bind(machine.0)
            .fetch_optional(&mut *tx)
            .await
            .doing(WHAT)?;
        if let Some(serde_json::Value::Object(row)) = row {
            tags.push(Tag { table, columns, row });
        }
    }
    Ok(tags)
}

/// The tables of facts that machines must all have to be meant.
#[derive(Debug)]
pub(crate) struct TagTables {
    /// One for each fact; each asks which of some machines have it.
    statements: Vec<String>,
}

impl TagTables {
    /// The tables of these facts, by their names without `machine_`; `None` when one has no table, and so no
    /// machine has them all.
    pub(crate) async fn find(tx: &mut PgConnection, tags: &[String]) -> Result<Option<Self>, BmdbError> {
        if tags.is_empty() {
            return Ok(Some(Self { statements: Vec::new() }));
        }
        let rows = sqlx::query_file!("sql/inspect/list_tag_columns.sql").fetch_all(tx).await.doing(WHAT)?;
        let tables: HashSet<String> = rows.into_iter().map(|row| row.table_name).collect();
        Ok(Self::among(&tables, tags))
    }

    fn among(tables: &HashSet<String>, tags: &[String]) -> Option<Self> {
        let statement_of = |tag: &String| {
            let table = tables.get(&format!("machine_{tag}"))?;
            Some(TAGGED.replace("{table}", &quoted(table)))
        };
        tags.iter().map(statement_of).collect::<Option<_>>().map(|statements| Self { statements })
    }

    /// Which of `machines` have all of the facts.
    pub(crate) async fn having(
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
                .doing(WHAT)?;
        }
        Ok(machines.into_iter().collect())
    }
}

/// A name as an identifier, whatever stands in it.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_cannot_end_its_own_quotes() {
        assert_eq!(quoted("machine_provided"), "\"machine_provided\"");
        assert_eq!(quoted("machine_\"; DROP"), "\"machine_\"\"; DROP\"");
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
            let tables = TagTables::among(&tables, &tags);
            assert_eq!(tables.map(|tables| tables.statements.len()), found, "{tags:?}");
        }
    }
}
