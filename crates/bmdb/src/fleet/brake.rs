//! The recovery brake: counting recently silent machines, engaging and releasing it, and all brakes that are engaged.

use std::collections::BTreeMap;

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use model::machine_view::EngagedBrake;
use model::time::Span;

const OPERATION: &str = "reading what to show";

impl Bmdb {
    /// Machines whose agent is expected to report, by provider. Reads an index over the whole fleet.
    pub async fn count_watched_machines(&self) -> Result<BTreeMap<String, u64>, BmdbError> {
        let rows = self
            .statement("counting watched machines", |pool| {
                Box::pin(
                    sqlx::query!(
                        r#"SELECT provider, count(*) AS "count!" FROM machine_due WHERE lane = 'access' AND
                           phase_index IN ('AgentStarting', 'Ready', 'Installing', 'Silent', 'Recovering')
                           GROUP BY provider"#
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        Ok(rows.into_iter().map(|row| (row.provider, u64::try_from(row.count).unwrap_or(0))).collect())
    }

    /// Machines that fell silent within `window`, by provider. Reads only those.
    pub async fn count_recently_silent_machines(
        &self,
        window: Span,
    ) -> Result<BTreeMap<String, u64>, BmdbError> {
        let window = window.float_milliseconds();
        let rows = self
            .statement("counting silent machines", move |pool| {
                Box::pin(
                    sqlx::query_file!("../../sql/recovery/count_recently_silent.sql", window).fetch_all(pool),
                )
            })
            .await?;
        Ok(rows.into_iter().map(|row| (row.provider, u64::try_from(row.count).unwrap_or(0))).collect())
    }

    /// Records that recovery is stopped for `scope` (a provider, or `*`), and why, or that it is not. Returns whether a
    /// brake was released.
    pub async fn set_recovery_brake(&self, scope: &str, brake: Option<&str>) -> Result<bool, BmdbError> {
        let (scope, brake) = (scope.to_owned(), brake.map(str::to_owned));
        self.statement_with("recording a brake", (scope, brake), move |pool, (scope, brake)| {
            Box::pin(async move {
                match brake {
                    Some(reason) => {
                        sqlx::query!(
                            "INSERT INTO brake (kind, scope, reason, engaged_at, seen_at) VALUES ('recovery',
                                 $1, $2, clock_timestamp(), clock_timestamp()) ON CONFLICT (kind, scope)
                             DO UPDATE SET reason = EXCLUDED.reason, seen_at = EXCLUDED.seen_at",
                            scope,
                            reason
                        )
                        .execute(pool)
                        .await?;
                        Ok(false)
                    }
                    None => Ok(sqlx::query!(
                        "DELETE FROM brake WHERE kind = 'recovery' AND scope = $1 RETURNING scope",
                        scope
                    )
                    .fetch_optional(pool)
                    .await?
                    .is_some()),
                }
            })
        })
        .await
    }
}

/// Brakes that are engaged.
pub async fn list_brakes(tx: &mut PgConnection) -> Result<Vec<EngagedBrake>, BmdbError> {
    sqlx::query_as!(
        EngagedBrake,
        "SELECT kind, scope, reason, engaged_at, seen_at AS confirmed_at FROM brake ORDER BY kind, scope"
    )
    .fetch_all(tx)
    .await
    .context(OPERATION)
}
