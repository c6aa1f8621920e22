//! Schema migrations, under a lock row, and initial rows.
//!
//! Migrations are locked by a row of our own instead of an advisory lock, which not every database has. The row is
//! locked for a bounded time, which is prolonged while a migration runs: a shepherd that dies while migrating does not
//! lock the others out for ever, and one whose tables are large is not considered dead.

use std::convert::Infallible;
use std::time::Duration;

use sqlx::Executor;
use sqlx::migrate::{MigrateError, Migrator};
use tokio::time::Instant;

use crate::connection::Bmdb;
use crate::connection::error::{BmdbError, Remedy, describe_error, is_lock_not_available, remedy_for};
use crate::engine::intent::RELEASE_KIND;
use model::policy::{DisruptionKind, Policy};

/// Every migration of this release.
pub static MIGRATIONS: Migrator = sqlx::migrate!("../../migrations");

const CREATE_LOCK_TABLE: &str = include_str!("../../../../sql/schema/create_lock_table.sql");
const ACQUIRE_LOCK: &str = include_str!("../../../../sql/schema/acquire_lock.sql");
const RENEW_LOCK: &str = include_str!("../../../../sql/schema/renew_lock.sql");
const RELEASE_LOCK: &str = include_str!("../../../../sql/schema/release_lock.sql");
const HAS_SCHEMA: &str = include_str!("../../../../sql/schema/has_schema.sql");
const READ_VERSION: &str = include_str!("../../../../sql/schema/read_version.sql");
const TUNING: &str = include_str!("../../../../sql/schema/tune_postgres.sql");

/// Newest schema version this release knows.
#[must_use]
pub fn supported_version() -> i64 {
    MIGRATIONS.iter().map(|migration| migration.version).max().unwrap_or(0)
}

/// How long to wait for another shepherd's migration, and how often to check whether it has ended.
const LOCK_WAIT_LIMIT: Duration = Duration::from_mins(2);
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How often the lock is prolonged while a migration takes longer than the lock's term.
const LOCK_RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// How often migrations that were blocked by other transactions are tried. With the time for which a statement waits
/// for a lock this adds up to two minutes.
const MIGRATION_TRIES: u32 = 20;
/// The pause between those tries. While a migration waits for the lock of a table, every transaction that uses the
/// table waits behind it.
const MIGRATION_PAUSE: Duration = Duration::from_secs(1);

impl Bmdb {
    /// Schema version of the database; 0 when it has none.
    pub async fn schema_version(&self) -> Result<i64, BmdbError> {
        self.statement("reading the schema version", |connection| {
            Box::pin(async move {
                let has_schema: bool = sqlx::query_scalar(HAS_SCHEMA).fetch_one(&mut *connection).await?;
                if has_schema { sqlx::query_scalar(READ_VERSION).fetch_one(connection).await } else { Ok(0) }
            })
        })
        .await
    }

    /// Brings the schema up to date and writes the initial rows. Safe from several processes at once.
    pub async fn migrate(&self) -> Result<(), BmdbError> {
        // Before anything is written: a newer release's schema is not ours to change.
        let (found, known) = (self.schema_version().await?, supported_version());
        if found > known {
            return Err(BmdbError::NewerSchema { found, supported: known });
        }
        self.statement("creating the migration lock", |connection| {
            Box::pin(async move {
                connection.execute(CREATE_LOCK_TABLE).await.map(drop).or_else(ignore_already_exists)
            })
        })
        .await?;
        let me = uuid::Uuid::new_v4();
        let began = Instant::now();
        while !self.acquire_migration_lock(me).await? {
            if began.elapsed() > LOCK_WAIT_LIMIT {
                return Err(BmdbError::MigrationFailed(
                    "another shepherd has been migrating for two minutes; start this one again when that is done"
                        .to_owned(),
                ));
            }
            tokio::time::sleep(LOCK_POLL_INTERVAL).await;
        }
        let migrated = tokio::select! {
            migrated = self.migrate_under_lock() => migrated,
            never = self.renew_migration_lock(me) => match never {},
        };
        let given_back = self
            .statement("giving back the migration lock", move |connection| {
                Box::pin(
                    async move { sqlx::query(RELEASE_LOCK).bind(me).execute(connection).await.map(drop) },
                )
            })
            .await;
        migrated.and(given_back)
    }

    /// Tries to acquire the lock row; returns whether it is ours now.
    async fn acquire_migration_lock(&self, me: uuid::Uuid) -> Result<bool, BmdbError> {
        let taken = self
            .statement("taking the migration lock", move |connection| {
                Box::pin(sqlx::query(ACQUIRE_LOCK).bind(me).execute(connection))
            })
            .await;
        match taken {
            Ok(done) => Ok(done.rows_affected() == 1),
            Err(BmdbError::Conflict { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn renew_migration_lock(&self, me: uuid::Uuid) -> Infallible {
        loop {
            tokio::time::sleep(LOCK_RENEW_INTERVAL).await;
            let prolonged = self
                .statement("prolonging the migration lock", move |connection| {
                    Box::pin(
                        async move { sqlx::query(RENEW_LOCK).bind(me).execute(connection).await.map(drop) },
                    )
                })
                .await;
            if let Err(error) = prolonged {
                tracing::warn!(%error, "cannot prolong the migration lock; trying again");
            }
        }
    }

    async fn migrate_under_lock(&self) -> Result<(), BmdbError> {
        let found = self.schema_version().await?;
        let known = supported_version();
        if found > known {
            return Err(BmdbError::NewerSchema { found, supported: known });
        }
        if found < known {
            self.apply_migrations().await?;
            if let Err(error) = self.pool().execute(TUNING).await {
                tracing::info!(
                    error = describe_error(&error),
                    "the database takes no storage settings; going on without"
                );
            }
        }
        self.insert_initial_rows().await
    }

    /// A shepherd of an older release may be at work meanwhile. Each migration is a transaction that also records it,
    /// so one that lost against others, or waited too long for a lock of theirs, is run again.
    async fn apply_migrations(&self) -> Result<(), BmdbError> {
        let mut migrator = Migrator { migrations: MIGRATIONS.migrations.clone(), ..Migrator::DEFAULT };
        migrator.set_locking(false);
        let mut tries = 1;
        while let Err(error) = migrator.run(self.pool()).await {
            if tries >= MIGRATION_TRIES || !is_lock_conflict(&error) {
                return Err(BmdbError::MigrationFailed(describe_migration_error(&error)));
            }
            let error = describe_migration_error(&error);
            tracing::warn!(
                error,
                attempts = tries,
                "a migration conflicted with other transactions; trying again"
            );
            tries += 1;
            tokio::time::sleep(MIGRATION_PAUSE).await;
        }
        Ok(())
    }

    async fn insert_initial_rows(&self) -> Result<(), BmdbError> {
        self.write_default_policy(&Policy::default()).await?;
        let id = uuid::Uuid::new_v4();
        self.statement("naming the BMDB", move |connection| {
            Box::pin(async move {
                sqlx::query!(
                    "INSERT INTO bmdb_identity (singleton, bmdb_id, created_at)
                     VALUES (TRUE, $1, clock_timestamp())
                     ON CONFLICT (singleton) DO NOTHING",
                    id
                )
                .execute(connection)
                .await
                .map(drop)
            })
        })
        .await?;
        for kind in DisruptionKind::ALL.map(DisruptionKind::as_str).into_iter().chain([RELEASE_KIND]) {
            self.statement("preparing budgets", move |connection| {
                Box::pin(async move {
                    // The row is locked while a budget is counted and used.
                    sqlx::query!(
                        "INSERT INTO named_lease (kind, name, fence)
                         VALUES ('budget', $1, 0) ON CONFLICT (kind, name) DO NOTHING",
                        kind
                    )
                    .execute(connection)
                    .await
                    .map(drop)
                })
            })
            .await?;
        }
        Ok(())
    }

    /// Rejects a schema that is not exactly this release's. For programs that do not migrate.
    pub async fn require_schema(&self) -> Result<(), BmdbError> {
        let (found, known) = (self.schema_version().await?, supported_version());
        match found {
            _ if found > known => Err(BmdbError::NewerSchema { found, supported: known }),
            _ if found < known => Err(BmdbError::OlderSchema { found, required: known }),
            _ => Ok(()),
        }
    }

    /// Id of this bare metal database.
    pub async fn read_identity(&self) -> Result<uuid::Uuid, BmdbError> {
        self.statement("reading the BMDB's identity", |connection| {
            Box::pin(async move {
                let row = sqlx::query!("SELECT bmdb_id FROM bmdb_identity").fetch_one(connection).await?;
                Ok(row.bmdb_id)
            })
        })
        .await
    }
}

/// Ignores the error of a process that created the table at the same time as another one. The database reports that it
/// exists in one of four ways: as a table, as the table's type, as a key of the catalogue, as a conflict.
fn ignore_already_exists(error: sqlx::Error) -> Result<(), sqlx::Error> {
    match &error {
        sqlx::Error::Database(database)
            if matches!(database.code().as_deref(), Some("42P07" | "42710" | "23505" | "40001")) =>
        {
            Ok(())
        }
        _ => Err(error),
    }
}

/// The reason why a migration failed, with its version if the database refused a statement of it.
fn describe_migration_error(error: &MigrateError) -> String {
    match error {
        MigrateError::Execute(error) => describe_error(error),
        MigrateError::ExecuteMigration(error, version) => {
            format!("migration {version}: {}", describe_error(error))
        }
        other => other.to_string(),
    }
}

/// Whether other transactions blocked a migration, and may not do so the next time.
fn is_lock_conflict(error: &MigrateError) -> bool {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            matches!(remedy_for(error, false), Remedy::Retry) || is_lock_not_available(error)
        }
        _ => false,
    }
}
