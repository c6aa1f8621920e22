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

const ROW: &str = include_str!("../../sql/inspect/tag_row.sql");
const TAGGED: &str = include_str!("../../sql/inspect/tagged.sql");
const WHAT: &str = "reading facts by reflection";

/// Every fact that the BMDB holds about a machine, in the order of table names.
pub async fn tags(tx: &mut PgConnection, machine: MachineId) -> Result<Vec<Tag>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/tags.sql").fetch_all(&mut *tx).await.doing(WHAT)?;
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

/// Which of `machines` have the fact `tag`, the name of its table without `machine_`. None have a fact of
/// which there is no table.
pub async fn tagged(tx: &mut PgConnection, tag: &str, machines: &[Uuid]) -> Result<HashSet<Uuid>, BmdbError> {
    let table = format!("machine_{tag}");
    let rows = sqlx::query_file!("sql/inspect/tags.sql").fetch_all(&mut *tx).await.doing(WHAT)?;
    if !rows.iter().any(|row| row.table_name == table) {
        return Ok(HashSet::new());
    }
    let statement = TAGGED.replace("{table}", &quoted(&table));
    let found: Vec<Uuid> =
        sqlx::query_scalar(AssertSqlSafe(statement)).bind(machines).fetch_all(&mut *tx).await.doing(WHAT)?;
    Ok(found.into_iter().collect())
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
}
