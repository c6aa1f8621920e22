//! Connection budget: how many connections a process gets, before it needs them.
//!
//! A pool takes what it can get, and the one connection on which everything depends, that for renewals, is then refused:
//! sessions are lost again and again. So the limits of the role, the database and the server are compared at the start
//! with what is wanted. The pool does with fewer where fewer can be had, and a start without the least is refused. The
//! connection for renewals is opened before any work begins, and kept.

use std::fmt;
use std::time::Duration;

use sqlx::Connection as _;

use crate::connection::dialect::Dialect;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};

/// The fewest connections that the pool works with: the loops share them.
const MIN_POOL: u32 = 2;
/// How often the limits are read again when they leave fewer connections than are wanted, and after which pause.
const READ_AGAIN: u32 = 3;
const READ_AGAIN_PAUSE: Duration = Duration::from_millis(200);

/// Connections of a process beside its common pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionsBeside {
    /// How many are wanted.
    pub wanted: u32,
    /// With how many all of it works: one for each pool, and each one that is not of a pool.
    pub least: u32,
}

/// What has a limit of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOwner {
    /// The role of the URL: `CONNECTION LIMIT` of `ALTER ROLE`.
    Role,
    /// The database of the URL: `CONNECTION LIMIT` of `ALTER DATABASE`.
    Database,
    /// The server: `max_connections` without those that are reserved.
    Server,
}

impl LimitOwner {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Role => "its role (CONNECTION LIMIT)",
            Self::Database => "its database (CONNECTION LIMIT)",
            Self::Server => "the server (max_connections without the reserved ones)",
        }
    }
}

/// A limit of connections, with how many there are of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimit {
    owner: LimitOwner,
    limit: u32,
    used: u32,
}

impl ConnectionLimit {
    const fn free(self) -> u32 {
        self.limit.saturating_sub(self.used)
    }
}

/// How a process uses the connections that it can get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionBudget {
    /// Most connections of the common pool.
    pub pool: u32,
    /// The limit that leaves fewer than are wanted, if any does.
    pub shortage: Option<ConnectionShortage>,
}

/// Fewer connections than a process wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionShortage {
    limit: ConnectionLimit,
    /// Wanted for the common pool.
    pool: u32,
    /// Wanted beside the common pool.
    beside: u32,
}

impl fmt::Display for ConnectionShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, pool, beside } = self;
        write!(
            f,
            "{pool} connections for the pool (--bmdb_max_connections) and {beside} beside it are wanted, {} admits {}, and {} \
             are in use: {} are missing; raise that limit, or lower --bmdb_max_connections",
            limit.owner.as_str(),
            limit.limit,
            limit.used,
            (pool + beside).saturating_sub(limit.free())
        )
    }
}

/// The budget under these limits; the error is a shortage with which nothing works.
fn plan_budget(
    pool: u32,
    beside: ConnectionsBeside,
    limits: &[ConnectionLimit],
) -> Result<ConnectionBudget, ConnectionShortage> {
    let Some(limit) = limits.iter().copied().min_by_key(|limit| limit.free()) else {
        return Ok(ConnectionBudget { pool, shortage: None });
    };
    if limit.free() >= pool + beside.wanted {
        return Ok(ConnectionBudget { pool, shortage: None });
    }
    let shortage = ConnectionShortage { limit, pool, beside: beside.wanted };
    if limit.free() < MIN_POOL + beside.least {
        return Err(shortage);
    }
    // The pools beside it share what is left when the smallest pool does not fit beside all that they want.
    let fitting = limit.free().saturating_sub(beside.wanted).clamp(MIN_POOL, pool.max(MIN_POOL));
    Ok(ConnectionBudget { pool: fitting, shortage: Some(shortage) })
}

impl Bmdb {
    /// Compares the connections of the pool, and those beside it, with what the role, the database and the server
    /// admit. Fails if there are too few to work with.
    pub async fn plan_connections(&self, beside: ConnectionsBeside) -> Result<ConnectionBudget, BmdbError> {
        let pool = self.settings().max_connections;
        // CockroachDB has no such limits.
        if self.dialect() != Dialect::Postgres {
            return Ok(ConnectionBudget { pool, shortage: None });
        }
        let mut planned = plan_budget(pool, beside, &self.read_limits().await?);
        // The server still counts a connection that was closed a moment ago.
        for _ in 0..READ_AGAIN {
            if planned.is_ok_and(|budget| budget.shortage.is_none()) {
                break;
            }
            tokio::time::sleep(READ_AGAIN_PAUSE).await;
            planned = plan_budget(pool, beside, &self.read_limits().await?);
        }
        planned.map_err(|shortage| BmdbError::TooFewConnections {
            address: self.settings().address(),
            shortage: shortage.to_string(),
        })
    }

    /// The limits that there are.
    async fn read_limits(&self) -> Result<Vec<ConnectionLimit>, BmdbError> {
        let mut connection =
            self.open_connection().await.context("connecting to read the limits of connections")?;
        let row = sqlx::query_file!("../../sql/connection/read_limits.sql")
            .fetch_one(&mut connection)
            .await
            .context("reading the limits of connections")?;
        drop(connection.close().await);
        let limits = [
            (LimitOwner::Role, row.role_limit, row.role_used),
            (LimitOwner::Database, row.database_limit, row.database_used),
            (LimitOwner::Server, row.server_limit, row.server_used),
        ];
        let limits = limits.into_iter().filter_map(|(owner, limit, used)| {
            let used = u32::try_from(used).unwrap_or(u32::MAX);
            // A negative number is no limit.
            Some(ConnectionLimit { owner, limit: u32::try_from(limit).ok()?, used })
        });
        Ok(limits.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_does_with_what_the_tightest_limit_leaves() {
        let limit = |owner, limit, used| ConnectionLimit { owner, limit, used };
        let server = limit(LimitOwner::Server, 97, 10);
        let alone = ConnectionsBeside { wanted: 1, least: 1 };
        let api = ConnectionsBeside { wanted: 8, least: 4 };
        for (limits, beside, pool) in [
            (vec![], api, Some((16, false))),
            (vec![server], api, Some((16, false))),
            (vec![server, limit(LimitOwner::Role, 24, 0)], api, Some((16, false))),
            (vec![limit(LimitOwner::Role, 23, 0), server], api, Some((15, true))),
            (vec![limit(LimitOwner::Role, 11, 0)], api, Some((3, true))),
            (vec![limit(LimitOwner::Role, 6, 0)], api, Some((2, true))),
            (vec![limit(LimitOwner::Role, 5, 0)], api, None),
            (vec![server, limit(LimitOwner::Database, 40, 30)], alone, Some((9, true))),
            (vec![limit(LimitOwner::Role, 5, 0)], alone, Some((4, true))),
            (vec![limit(LimitOwner::Role, 5, 2)], alone, Some((2, true))),
            (vec![limit(LimitOwner::Role, 5, 3)], alone, None),
            (vec![limit(LimitOwner::Role, 0, 0)], alone, None),
            (vec![limit(LimitOwner::Server, 10, 20)], alone, None),
        ] {
            let planned = plan_budget(16, beside, &limits).ok();
            let planned = planned.map(|budget| (budget.pool, budget.shortage.is_some()));
            assert_eq!(planned, pool, "{limits:?} {beside:?}");
        }
    }

    #[test]
    fn shortage_names_the_limit_the_flag_and_the_number_that_is_missing() {
        let limits = [ConnectionLimit { owner: LimitOwner::Role, limit: 5, used: 1 }];
        let beside = ConnectionsBeside { wanted: 8, least: 1 };
        let shortage = plan_budget(16, beside, &limits).unwrap().shortage.unwrap();
        assert_eq!(
            shortage.to_string(),
            "16 connections for the pool (--bmdb_max_connections) and 8 beside it are wanted, its role (CONNECTION LIMIT) \
             admits 5, and 1 are in use: 20 are missing; raise that limit, or lower --bmdb_max_connections"
        );
    }
}
