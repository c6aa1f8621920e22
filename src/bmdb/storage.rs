//! What a look at the database's own books tells: dead rows, and who keeps them from being removed.
//!
//! Somebody's long transaction, be it a forgotten `psql` or a report, keeps vacuum from removing what was
//! there when it began. Nothing fails then; everything only costs more and more. These numbers say so
//! before anybody feels it, and `docs/database-care.md` says what to do.
//!
//! The books are PostgreSQL's. A database that has none of them (CockroachDB collects its garbage by age,
//! whoever reads) refuses the look as something it does not know, which
//! [`BmdbError::is_unknown_to_the_database`] tells: then there is nothing to be watched.

use std::time::Duration;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::retention::TABLES;

/// What was seen at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StorageSample {
    /// Dead rows by table, of those in [`TABLES`]. An estimate of the server's.
    pub dead_rows: Vec<(&'static str, i64)>,
    /// Since when the oldest transaction of this database has been open, our own included. Zero when
    /// none is.
    pub oldest_transaction: Duration,
    /// The same of the oldest one that keeps a snapshot, and with it every row that was there then.
    pub oldest_snapshot: Duration,
}

impl Bmdb {
    /// Looks at dead rows and old transactions. Of other roles' transactions PostgreSQL tells only who is
    /// a member of `pg_read_all_stats`; they are missing here otherwise.
    pub async fn sample_storage(&self) -> Result<StorageSample, BmdbError> {
        let what = "looking at what is stored";
        let tables = TABLES.map(str::to_owned);
        let rows = self
            .statement(what, move |connection| {
                let tables = tables.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/vacuum_stats/list_dead_rows.sql", &tables)
                        .fetch_all(connection)
                        .await
                })
            })
            .await?;
        let horizon = self
            .statement(what, |connection| {
                Box::pin(async move {
                    sqlx::query_file!("sql/vacuum_stats/read_oldest_transactions.sql")
                        .fetch_one(connection)
                        .await
                })
            })
            .await?;
        let dead_rows = rows
            .into_iter()
            .filter_map(|row| Some((*TABLES.iter().find(|table| **table == row.name)?, row.dead)))
            .collect();
        let span = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        Ok(StorageSample {
            dead_rows,
            oldest_transaction: span(horizon.transaction),
            oldest_snapshot: span(horizon.snapshot),
        })
    }
}
