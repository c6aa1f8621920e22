//! Named leases: exclusive, fenced ownership of a provisioner, a cluster, the roll-outs.
//!
//! They use the same guard and the same reaper as work. The fence grows with every acquisition, and a transaction that
//! writes for the owner locks the lease's row in the same commit: `Bmdb::transact_under_lease` does that first, and so
//! does `Bmdb::execute_under_lease`, which sends a single statement.

use futures::future::BoxFuture;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres};

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::session::{Session, guard_session};
use model::ids::SessionId;

/// A named lease that was held when this value was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLease {
    /// Kind of its subject, such as `provisioner`.
    pub kind: String,
    /// Name of its subject, such as the provider's name.
    pub name: String,
    /// The session it was acquired under.
    pub session: SessionId,
    /// Grows with every acquisition.
    pub fence: i64,
}

impl Bmdb {
    /// Acquires the lease if it is free; `None` when another session holds it or this session is over.
    ///
    /// A session that holds it already gets it with a higher fence: the answer to the first acquisition may have been
    /// lost.
    pub async fn acquire_named_lease(
        &self,
        session: &Session,
        kind: &str,
        name: &str,
    ) -> Result<Option<NamedLease>, BmdbError> {
        let id = session.id();
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let key = (kind.clone(), name.clone());
        let fence = self
            .statement_with("taking a named lease", key, move |pool, (kind, name)| {
                Box::pin(
                    sqlx::query_file_scalar!("../../sql/named_lease/acquire.sql", id.0, kind, name)
                        .fetch_optional(pool),
                )
            })
            .await?;
        Ok(fence.map(|fence| NamedLease { kind, name, session: id, fence }))
    }

    /// Releases a lease; returns whether it was still held.
    pub async fn release_named_lease(&self, lease: &NamedLease) -> Result<bool, BmdbError> {
        let given = self
            .statement_with("giving back a named lease", lease.clone(), move |pool, lease| {
                Box::pin(
                    sqlx::query!(
                        "UPDATE named_lease SET lease_session = NULL
                         WHERE kind = $2 AND name = $3 AND lease_session = $1 AND fence = $4
                         RETURNING name",
                        lease.session.0,
                        lease.kind,
                        lease.name,
                        lease.fence
                    )
                    .fetch_optional(pool),
                )
            })
            .await?;
        Ok(given.is_some())
    }

    /// Runs a transaction that writes for the holder of a named lease: see [`Self::transact_with`]. Without the lease
    /// it fails with [`BmdbError::LeaseLost`].
    pub(crate) async fn transact_under_lease<A, T, F>(
        &self,
        what: &'static str,
        lease: &NamedLease,
        arguments: A,
        body: F,
    ) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        let arguments = (lease.clone(), arguments, body);
        self.transact_with(what, arguments, |tx, (lease, arguments, body)| {
            Box::pin(async move {
                lock_named_lease(tx, lease).await?;
                body(tx, arguments).await
            })
        })
        .await
    }

    /// Executes one statement for the holder of a named lease: see [`Self::transact_under_lease`]. The result of
    /// `statement` has its arguments encoded, so they may come from values that `statement` owns.
    pub(crate) async fn execute_under_lease<F>(
        &self,
        what: &'static str,
        lease: &NamedLease,
        statement: F,
    ) -> Result<(), BmdbError>
    where
        F: Fn() -> Query<'static, Postgres, PgArguments> + Send + Sync + 'static,
    {
        self.transact_under_lease(what, lease, statement, move |tx, statement| {
            Box::pin(async move { statement().execute(tx).await.context(what).map(drop) })
        })
        .await
    }
}

/// Guards a transaction by a named lease: fails when the lease is not held any more.
pub(crate) async fn lock_named_lease(tx: &mut PgConnection, lease: &NamedLease) -> Result<(), BmdbError> {
    guard_session(tx, lease.session).await?;
    sqlx::query!(
        "SELECT fence FROM named_lease
         WHERE kind = $2 AND name = $3 AND lease_session = $1 AND fence = $4
         FOR UPDATE",
        lease.session.0,
        lease.kind,
        lease.name,
        lease.fence
    )
    .fetch_optional(tx)
    .await
    .context("checking a named lease")?
    .map(drop)
    .ok_or(BmdbError::LeaseLost)
}
