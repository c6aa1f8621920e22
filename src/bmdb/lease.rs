//! Leases of named things that are no machines: a provider's provisioner, a cluster.
//!
//! The same guard and the same reaper as for work. The fence grows with every
//! taking, and whoever writes for the thing locks the lease's row in the same
//! commit.

use sqlx::PgConnection;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::session::{Session, guard};
use crate::model::ids::SessionId;

/// A named lease that was held when this was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLease {
    /// What kind of thing: `provisioner`.
    pub kind: String,
    /// Which of them: the provider's name.
    pub name: String,
    /// The session it was taken under.
    pub session: SessionId,
    /// Grows with every taking.
    pub fence: i64,
}

impl Bmdb {
    /// Takes the lease if it is free; `None` when somebody else holds it or the session is over.
    ///
    /// A session that holds it already gets it with a higher fence: the answer to the first taking
    /// may have been lost.
    pub async fn take_lease(
        &self,
        session: &Session,
        kind: &str,
        name: &str,
    ) -> Result<Option<NamedLease>, BmdbError> {
        let id = session.id();
        let (kind, name) = (kind.to_owned(), name.to_owned());
        let key = (kind.clone(), name.clone());
        let fence = self
            .statement("taking a named lease", move |pool| {
                let (kind, name) = key.clone();
                Box::pin(async move {
                    sqlx::query_file_scalar!("sql/named_lease/acquire.sql", id.0, kind, name)
                        .fetch_optional(pool)
                        .await
                })
            })
            .await?;
        Ok(fence.map(|fence| NamedLease { kind, name, session: id, fence }))
    }

    /// Gives a lease back; says whether it was still held.
    pub async fn give_back_lease(&self, lease: &NamedLease) -> Result<bool, BmdbError> {
        let lease = lease.clone();
        let given = self
            .statement("giving back a named lease", move |pool| {
                let lease = lease.clone();
                Box::pin(async move {
                    sqlx::query_file!(
                        "sql/named_lease/release.sql",
                        lease.session.0,
                        lease.kind,
                        lease.name,
                        lease.fence
                    )
                    .fetch_optional(pool)
                    .await
                })
            })
            .await?;
        Ok(given.is_some())
    }
}

/// Takes part in a transaction under a named lease: fails when it is not held any more.
pub(crate) async fn lock_lease(tx: &mut PgConnection, lease: &NamedLease) -> Result<(), BmdbError> {
    guard(tx, lease.session).await?;
    sqlx::query_file!("sql/named_lease/lock.sql", lease.session.0, lease.kind, lease.name, lease.fence)
        .fetch_optional(tx)
        .await
        .doing("checking a named lease")?
        .map(drop)
        .ok_or(BmdbError::LeaseLost)
}
