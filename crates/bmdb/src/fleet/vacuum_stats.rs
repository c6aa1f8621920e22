//! Dead rows and oldest transactions: what keeps vacuum from removing rows.
//!
//! A long transaction, such as a forgotten `psql` or a report, keeps vacuum from removing the rows that existed when it
//! began. Nothing fails then; everything only costs more and more. These numbers show it before anybody notices, and
//! `docs/database-care.md` describes what to do.
//!
//! The statistics are PostgreSQL's. A database that has none (CockroachDB collects its garbage by age, whatever
//! transactions read) rejects the query as something undefined, which [`BmdbError::is_undefined_object`] detects: then
//! there is nothing to watch.

use std::time::Duration;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::fleet::retention::TABLES;

/// Statistics at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VacuumStats {
    /// Estimated dead rows by table, of those in [`TABLES`].
    pub dead_rows: Vec<(&'static str, i64)>,
    /// How long the oldest transaction of this database has been open, our own included. Zero if none is open.
    pub oldest_transaction: Duration,
    /// How long the oldest snapshot has been held, and with it every row that existed then. Zero if none is held.
    pub oldest_snapshot: Duration,
}

impl Bmdb {
    /// Reads dead rows and old transactions. PostgreSQL shows other roles' transactions only to members of
    /// `pg_read_all_stats`; without that membership they are missing.
    pub async fn read_vacuum_stats(&self) -> Result<VacuumStats, BmdbError> {
        let what = "looking at what is stored";
        let rows = self
            .statement_with(what, TABLES.map(str::to_owned), move |connection, tables| {
                // Dead rows are row versions that no transaction needs any more and that vacuum has not
                // removed yet.
                Box::pin(
                    sqlx::query!(
                        r#"SELECT t.relname::TEXT AS "name!", t.n_dead_tup AS "dead!"
                           FROM pg_stat_user_tables t
                           WHERE t.relname = ANY ($1::TEXT[]) AND pg_table_is_visible(t.relid)"#,
                        tables
                    )
                    .fetch_all(connection),
                )
            })
            .await?;
        let horizon = self
            .statement(what, |connection| {
                Box::pin(
                    sqlx::query_file!("../../sql/vacuum_stats/read_oldest_transactions.sql")
                        .fetch_one(connection),
                )
            })
            .await?;
        let dead_rows = rows
            .into_iter()
            .filter_map(|row| Some((*TABLES.iter().find(|table| **table == row.name)?, row.dead)))
            .collect();
        let span = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Ok(VacuumStats {
            dead_rows,
            oldest_transaction: span(horizon.transaction),
            oldest_snapshot: span(horizon.snapshot),
        })
    }
}
