//! Reads how close the database server is to its limits (transaction ids, WAL, replication slots), whether it may lose
//! commits, and its version: another server may have taken over since the connection was made.
//!
//! [`model::database_limits`] has what follows from it. One statement reads everything that every role may read. The size
//! of all WAL files needs a right (`pg_monitor`), so a second statement reads it only where the role has that: PostgreSQL
//! would reject a statement that names the function, even where it is not called. If the second one fails, the limits have
//! its error, and all that the first one read.
//!
//! A database of another kind (CockroachDB) has none of this, and rejects the statement as something undefined.

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use model::byte_size::ByteSize;
use model::database_durability::DurabilityFault;
use model::database_limits::{DatabaseLimits, IdAge, ReplicationSlot, SlotWal};
use model::program_versions::postgres_version;

const OPERATION: &str = "reading the limits of the database server";
const WAL_OPERATION: &str = "listing the WAL files of the database server";

impl Bmdb {
    /// Reads transaction ids, WAL and replication slots of the server, and whether it may lose commits.
    pub async fn read_database_limits(&self) -> Result<DatabaseLimits, BmdbError> {
        let rows = self
            .statement(OPERATION, |connection| {
                Box::pin(sqlx::query_file!("../../sql/database_limits/read_limits.sql").fetch_all(connection))
            })
            .await?;
        let mut limits = DatabaseLimits::default();
        let mut may_list_wal = false;
        for row in rows {
            let ids = |database, age, freeze_age| IdAge {
                database,
                age: as_count(age),
                freeze_age: as_count(freeze_age),
            };
            limits.transactions =
                ids(row.transaction_database, row.transaction_age, row.transaction_freeze_age);
            limits.multixacts = ids(row.multixact_database, row.multixact_age, row.multixact_freeze_age);
            limits.max_wal = ByteSize(as_count(row.max_wal));
            limits.is_archiving_failing = row.is_archiving_failing;
            may_list_wal = row.may_list_wal;
            limits.version = u32::try_from(row.version).ok().map(postgres_version);
            limits.database = ByteSize(as_count(row.database_bytes));
            // A private server that is thrown away at its end has nothing to lose.
            limits.durability_fault =
                DurabilityFault::find(&row.fsync, &row.commit, &row.standbys).filter(|_| !row.is_thrown_away);
            let bytes = |bytes: Option<i64>| bytes.map(|bytes| ByteSize(as_count(bytes)));
            limits.slots.extend(row.slot.map(|name| ReplicationSlot {
                name,
                is_active: row.is_active,
                wal: SlotWal::parse(row.wal_status.as_deref()),
                retained: bytes(row.retained),
                margin: bytes(row.margin),
            }));
        }
        if may_list_wal {
            // Transaction ids and slots count without it.
            match self.measure_wal().await {
                Ok(wal) => limits.wal = wal,
                Err(error) => limits.wal_failure = Some(error.to_string()),
            }
        }
        Ok(limits)
    }

    async fn measure_wal(&self) -> Result<Option<ByteSize>, BmdbError> {
        let bytes = self
            .statement(WAL_OPERATION, |connection| {
                Box::pin(
                    sqlx::query_scalar!(r#"SELECT sum(f.size)::BIGINT AS "bytes?" FROM pg_ls_waldir() f"#)
                        .fetch_one(connection),
                )
            })
            .await?;
        Ok(bytes.map(|bytes| ByteSize(as_count(bytes))))
    }
}

/// A number that the server never reports as negative.
fn as_count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
