//! The schema: bringing it up to date, or saying why not.
//!
//! Migrations are locked by a row of our own instead of an advisory lock, which
//! not every database has. The row is taken for a bounded time, which is prolonged
//! while a migration runs: a shepherd that dies while migrating does not lock the
//! others out for ever, and one whose tables are large is not taken for dead.

use std::convert::Infallible;
use std::time::Duration;

use sqlx::Executor;
use sqlx::migrate::{MigrateError, Migrator};
use tokio::time::Instant;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::{BmdbError, Remedy, is_lock_not_available, remedy};
use crate::bmdb::retirement::RELEASE;
use crate::model::policy::{Disturbance, Policy};

/// Every migration of this release.
pub static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

const LOCK_TABLE: &str = include_str!("../../sql/schema/create_lock_table.sql");
const TAKE_LOCK: &str = include_str!("../../sql/schema/acquire_lock.sql");
const PROLONG_LOCK: &str = include_str!("../../sql/schema/renew_lock.sql");
const DROP_LOCK: &str = include_str!("../../sql/schema/release_lock.sql");
const HAS_SCHEMA: &str = include_str!("../../sql/schema/has_schema.sql");
const APPLIED: &str = include_str!("../../sql/schema/read_version.sql");
const TUNING: &str = include_str!("../../sql/schema/tune_postgres.sql");

/// Newest schema version this release knows.
#[must_use]
pub fn known_version() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// How long another one's migration is waited for, and how often is asked whether it has ended.
const OTHERS_TURN: Duration = Duration::from_mins(2);
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often the lock is prolonged, by whoever migrates for longer than it is taken for.
const PROLONG_EVERY: Duration = Duration::from_secs(5);
/// How often migrations are begun again that met others at work. With the time for which a statement waits for a
/// lock this comes to two minutes.
const MIGRATION_TRIES: u32 = 20;
/// The pause before they are. While one waits for the lock of a table, whoever uses that table waits behind it.
const MIGRATION_PAUSE: Duration = Duration::from_secs(1);

impl Bmdb {
    /// Schema version of the database; 0 when it has none.
    pub async fn schema_version(&self) -> Result<i64, BmdbError> {
        self.statement("reading the schema version", |connection| {
            Box::pin(async move {
                let has_schema: bool = sqlx::query_scalar(HAS_SCHEMA).fetch_one(&mut *connection).await?;
                if has_schema { sqlx::query_scalar(APPLIED).fetch_one(connection).await } else { Ok(0) }
            })
        })
        .await
    }

    /// Brings the schema up to date and writes the rows that must exist. Safe from several
    /// processes at once.
    pub async fn migrate(&self) -> Result<(), BmdbError> {
        // Before anything is written: what a newer release made is not ours to touch.
        let (found, known) = (self.schema_version().await?, known_version());
        if found > known {
            return Err(BmdbError::NewerSchema { found, known });
        }
        self.statement("creating the migration lock", |connection| {
            Box::pin(async move { connection.execute(LOCK_TABLE).await.map(drop).or_else(ignore_race) })
        })
        .await?;
        let me = uuid::Uuid::new_v4();
        let began = Instant::now();
        while !self.take_migration_lock(me).await? {
            if began.elapsed() > OTHERS_TURN {
                return Err(BmdbError::Migrate(
                    "another shepherd has been migrating for two minutes; start this one again when that is done"
                        .to_owned(),
                ));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
        let migrated = tokio::select! {
            migrated = self.migrate_locked() => migrated,
            never = self.prolong_migration_lock(me) => match never {},
        };
        let given_back = self
            .statement("giving back the migration lock", move |connection| {
                Box::pin(async move { sqlx::query(DROP_LOCK).bind(me).execute(connection).await.map(drop) })
            })
            .await;
        migrated.and(given_back)
    }

    /// Whether it is ours now.
    async fn take_migration_lock(&self, me: uuid::Uuid) -> Result<bool, BmdbError> {
        let taken = self
            .statement("taking the migration lock", move |connection| {
                Box::pin(async move { sqlx::query(TAKE_LOCK).bind(me).execute(connection).await })
            })
            .await;
        match taken {
            Ok(done) => Ok(done.rows_affected() == 1),
            Err(BmdbError::Conflict { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn prolong_migration_lock(&self, me: uuid::Uuid) -> Infallible {
        loop {
            tokio::time::sleep(PROLONG_EVERY).await;
            let prolonged = self
                .statement("prolonging the migration lock", move |connection| {
                    Box::pin(
                        async move { sqlx::query(PROLONG_LOCK).bind(me).execute(connection).await.map(drop) },
                    )
                })
                .await;
            if let Err(error) = prolonged {
                tracing::warn!(%error, "cannot prolong the migration lock; trying again");
            }
        }
    }

    async fn migrate_locked(&self) -> Result<(), BmdbError> {
        let found = self.schema_version().await?;
        let known = known_version();
        if found > known {
            return Err(BmdbError::NewerSchema { found, known });
        }
        if found < known {
            self.apply_migrations().await?;
            if let Err(error) = self.pool().execute(TUNING).await {
                tracing::info!(%error, "the database takes no storage settings; going on without");
            }
        }
        self.write_first_rows().await
    }

    /// A shepherd of an older release may be at work meanwhile. Each migration is a transaction that also
    /// records it, so one that lost against others, or waited too long for a lock of theirs, is run again.
    async fn apply_migrations(&self) -> Result<(), BmdbError> {
        let mut migrator = Migrator { migrations: MIGRATIONS.migrations.clone(), ..Migrator::DEFAULT };
        migrator.set_locking(false);
        let mut tries = 1;
        while let Err(error) = migrator.run(self.pool()).await {
            if tries >= MIGRATION_TRIES || !met_others(&error) {
                return Err(BmdbError::Migrate(error.to_string()));
            }
            tracing::warn!(%error, tries, "a migration met others at work; trying again");
            tries += 1;
            tokio::time::sleep(MIGRATION_PAUSE).await;
        }
        Ok(())
    }

    async fn write_first_rows(&self) -> Result<(), BmdbError> {
        self.write_default_policy(&Policy::default()).await?;
        let id = uuid::Uuid::new_v4();
        self.statement("naming the BMDB", move |connection| {
            Box::pin(async move {
                sqlx::query_file!("sql/schema/insert_identity.sql", id).execute(connection).await.map(drop)
            })
        })
        .await?;
        for kind in Disturbance::ALL.map(Disturbance::as_str).into_iter().chain([RELEASE]) {
            self.statement("preparing budgets", move |connection| {
                Box::pin(async move {
                    sqlx::query_file!("sql/schema/insert_budget_lease.sql", kind)
                        .execute(connection)
                        .await
                        .map(drop)
                })
            })
            .await?;
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
        self.statement("reading the BMDB's identity", |connection| {
            Box::pin(async move {
                let row = sqlx::query_file!("sql/schema/read_identity.sql").fetch_one(connection).await?;
                Ok(row.bmdb_id)
            })
        })
        .await
    }
}

/// Two processes that create the table at once: one of them is told that it exists, in one of
/// four ways: as a table, as the table's type, as a key of the catalogue, as a conflict.
fn ignore_race(error: sqlx::Error) -> Result<(), sqlx::Error> {
    match &error {
        sqlx::Error::Database(database)
            if matches!(database.code().as_deref(), Some("42P07" | "42710" | "23505" | "40001")) =>
        {
            Ok(())
        }
        _ => Err(error),
    }
}

/// Whether others were in the way of a migration, and may not be the next time.
fn met_others(error: &MigrateError) -> bool {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            matches!(remedy(error, false), Remedy::Again) || is_lock_not_available(error)
        }
        _ => false,
    }
}
