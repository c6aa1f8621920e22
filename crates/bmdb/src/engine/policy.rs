//! The stored policy: reading, changing and caching it.
//!
//! All shepherds read it; flags that are given at start, and orders, change it.

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use model::policy::Policy;

const READING: &str = "reading the policy";
const CHANGING: &str = "changing the policy";

/// The row of the policy.
struct PolicyRow {
    version: i64,
    document: serde_json::Value,
}

impl Bmdb {
    /// Writes `policy` unless one is stored already.
    pub(crate) async fn write_default_policy(&self, policy: &Policy) -> Result<(), BmdbError> {
        let arguments = (to_document(policy)?, policy.clone());
        self.statement_with("writing the default policy", arguments, move |connection, (written, policy)| {
            Box::pin(async move {
                sqlx::query_file!(
                    "../../sql/schema/insert_default_policy.sql",
                    written,
                    policy.recovery_first_heartbeat_timeout.milliseconds(),
                    policy.recovery_silence_timeout.milliseconds(),
                    policy.effective_listening_gap().milliseconds(),
                    policy.outward_limit.milliseconds(),
                )
                .execute(connection)
                .await
                .map(drop)
            })
        })
        .await
    }

    /// Reads the policy, caches it, and returns its version.
    pub async fn read_policy(&self) -> Result<i64, BmdbError> {
        let row = self.statement(READING, |connection| Box::pin(select_policy(connection))).await?;
        self.cache_policy(row.version, parse_policy(row.document)?);
        Ok(row.version)
    }

    /// Changes the policy by `change`, and returns whether that made a difference. A new version makes the sweeper of
    /// every shepherd recompute the whole schedule.
    pub async fn change_policy(
        &self,
        by: &str,
        change: impl Fn(&mut Policy) + Send + Sync + 'static,
    ) -> Result<bool, BmdbError> {
        let changed = self
            .transact_with(CHANGING, (by.to_owned(), change), |tx, (by, change)| {
                Box::pin(change_policy_in_tx(tx, by, change))
            })
            .await?;
        self.read_policy().await?;
        Ok(changed)
    }
}

async fn change_policy_in_tx(
    tx: &mut PgConnection,
    by: &str,
    change: &(dyn Fn(&mut Policy) + Send + Sync),
) -> Result<bool, BmdbError> {
    let stored = lock_policy(tx).await?;
    let mut wanted = stored.clone();
    change(&mut wanted);
    if wanted == stored {
        return Ok(false);
    }
    write_policy(tx, &wanted, by).await?;
    Ok(true)
}

async fn select_policy(connection: &mut PgConnection) -> Result<PolicyRow, sqlx::Error> {
    sqlx::query_as!(PolicyRow, "SELECT version, document FROM policy").fetch_one(connection).await
}

/// Reads the policy as it is in this transaction.
pub(crate) async fn read_policy_in_tx(tx: &mut PgConnection) -> Result<Policy, BmdbError> {
    parse_policy(select_policy(tx).await.context(READING)?.document)
}

/// Reads the policy and locks its row, to change it.
pub(crate) async fn lock_policy(tx: &mut PgConnection) -> Result<Policy, BmdbError> {
    let row = sqlx::query!("SELECT version, document FROM policy FOR UPDATE")
        .fetch_one(tx)
        .await
        .context(CHANGING)?;
    parse_policy(row.document)
}

/// Writes the policy. The caller holds its row, and has changed the policy that it read there.
pub(crate) async fn write_policy(tx: &mut PgConnection, wanted: &Policy, by: &str) -> Result<(), BmdbError> {
    sqlx::query_file!(
        "../../sql/policy/write.sql",
        to_document(wanted)?,
        wanted.recovery_first_heartbeat_timeout.milliseconds(),
        wanted.recovery_silence_timeout.milliseconds(),
        wanted.effective_listening_gap().milliseconds(),
        wanted.outward_limit.milliseconds(),
        by,
    )
    .fetch_one(tx)
    .await
    .context(CHANGING)?;
    Ok(())
}

/// Returns the policy at a version: the cached one if it matches, else the one read in this transaction.
pub(crate) async fn policy_at_version(
    bmdb: &Bmdb,
    tx: &mut PgConnection,
    version: i64,
) -> Result<std::sync::Arc<Policy>, BmdbError> {
    let (known, policy) = bmdb.policy();
    if known == version {
        return Ok(policy);
    }
    let row = select_policy(tx).await.context(READING)?;
    let policy = parse_policy(row.document)?;
    bmdb.cache_policy(row.version, policy.clone());
    Ok(std::sync::Arc::new(policy))
}

fn to_document(policy: &Policy) -> Result<serde_json::Value, BmdbError> {
    serde_json::to_value(policy)
        .map_err(|error| BmdbError::Corrupt(format!("a policy that is no JSON: {error}")))
}

fn parse_policy(document: serde_json::Value) -> Result<Policy, BmdbError> {
    serde_json::from_value(document)
        .map_err(|error| BmdbError::Corrupt(format!("a policy that this release cannot read: {error}")))
}
