//! The schema: bringing it up to date, or saying why not.
//!
//! Migrations are locked by a row of our own instead of an advisory lock, which
//! not every database has. The row is taken for a bounded time: a shepherd that
//! dies while migrating does not lock the others out for ever.

use std::time::Duration;

use sqlx::Executor;
use sqlx::migrate::Migrator;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::model::policy::{Disturbance, Policy};

/// Every migration of this release.
pub static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

const LOCK_TABLE: &str = include_str!("../../sql/setup/lock_table.sql");
const TAKE_LOCK: &str = include_str!("../../sql/setup/take_lock.sql");
const DROP_LOCK: &str = include_str!("../../sql/setup/drop_lock.sql");
const HAS_SCHEMA: &str = include_str!("../../sql/setup/has_schema.sql");
const APPLIED: &str = include_str!("../../sql/setup/applied.sql");
const TUNING: &str = include_str!("../../sql/tuning/postgres.sql");

/// Newest schema version this release knows.
#[must_use]
pub fn known_version() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

impl Bmdb {
    /// Schema version of the database; 0 when it has none.
    pub async fn schema_version(&self) -> Result<i64, BmdbError> {
        let what = "reading the schema version";
        let has_schema: bool = sqlx::query_scalar(HAS_SCHEMA).fetch_one(self.pool()).await.doing(what)?;
        if !has_schema {
            return Ok(0);
        }
        sqlx::query_scalar(APPLIED).fetch_one(self.pool()).await.doing(what)
    }

    /// Brings the schema up to date and writes the rows that must exist. Safe from several
    /// processes at once.
    pub async fn migrate(&self) -> Result<(), BmdbError> {
        // Before anything is written: what a newer release made is not ours to touch.
        let (found, known) = (self.schema_version().await?, known_version());
        if found > known {
            return Err(BmdbError::NewerSchema { found, known });
        }
        self.pool().execute(LOCK_TABLE).await.or_else(ignore_race).doing("creating the migration lock")?;
        let me = uuid::Uuid::new_v4();
        for attempt in 0.. {
            let taken = sqlx::query(TAKE_LOCK).bind(me).execute(self.pool()).await;
            match taken {
                Ok(done) if done.rows_affected() == 1 => break,
                Ok(_) | Err(sqlx::Error::Database(_)) if attempt < 1200 => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Ok(_) => {
                    return Err(BmdbError::Migrate(
                        "another shepherd has been migrating for two minutes".into(),
                    ));
                }
                Err(error) => {
                    return Err(BmdbError::Statement { what: "taking the migration lock", source: error });
                }
            }
        }
        let result = self.migrate_locked().await;
        sqlx::query(DROP_LOCK).bind(me).execute(self.pool()).await.doing("giving back the migration lock")?;
        result
    }

    async fn migrate_locked(&self) -> Result<(), BmdbError> {
        let found = self.schema_version().await?;
        let known = known_version();
        if found > known {
            return Err(BmdbError::NewerSchema { found, known });
        }
        if found < known {
            let mut migrator = Migrator { migrations: MIGRATIONS.migrations.clone(), ..Migrator::DEFAULT };
            migrator.set_locking(false);
            migrator.run(self.pool()).await.map_err(|error| BmdbError::Migrate(error.to_string()))?;
            if let Err(error) = self.pool().execute(TUNING).await {
                tracing::info!(%error, "the database takes no storage settings; going on without");
            }
        }
        self.write_first_rows().await
    }

    async fn write_first_rows(&self) -> Result<(), BmdbError> {
        self.write_default_policy(&Policy::default()).await?;
        sqlx::query_file!("sql/setup/identity.sql", uuid::Uuid::new_v4())
            .execute(self.pool())
            .await
            .doing("naming the BMDB")?;
        for step in Disturbance::ALL {
            sqlx::query_file!("sql/setup/budget_lease.sql", step.as_str())
                .execute(self.pool())
                .await
                .doing("preparing budgets")?;
        }
        Ok(())
    }

    /// Refuses a schema that is not exactly this release's. For programs that do not migrate.
    pub async fn require_schema(&self) -> Result<(), BmdbError> {
        let (found, known) = (self.schema_version().await?, known_version());
        match found {
            _ if found > known => Err(BmdbError::NewerSchema { found, known }),
            _ if found < known => Err(BmdbError::OlderSchema { found, known }),
            _ => Ok(()),
        }
    }

    /// Which bare metal database this is.
    pub async fn identity(&self) -> Result<uuid::Uuid, BmdbError> {
        let row = sqlx::query_file!("sql/setup/read_identity.sql")
            .fetch_one(self.pool())
            .await
            .doing("reading the BMDB's identity")?;
        Ok(row.bmdb_id)
    }
}

/// Two processes that create the table at once: one of them is told that it exists, in one of
/// four ways: as a table, as the table's type, as a key of the catalogue, as a conflict.
fn ignore_race(error: sqlx::Error) -> Result<sqlx::postgres::PgQueryResult, sqlx::Error> {
    match &error {
        sqlx::Error::Database(database)
            if matches!(database.code().as_deref(), Some("42P07" | "42710" | "23505" | "40001")) =>
        {
            Ok(sqlx::postgres::PgQueryResult::default())
        }
        _ => Err(error),
    }
}
