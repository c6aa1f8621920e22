//! Access: whether a connection leads to a server that takes writes.
//!
//! A server that becomes a reader may leave its connections open: managed databases do at a switch-over, and so does a
//! balancer that cuts nothing. Such a connection answers every test and can do nothing that a shepherd needs. So it is
//! not enough that a connection answers. A program that writes connects with [`Access::ReadWrite`]. Then the pool and
//! the dedicated connections read whether transactions are read-only when they are opened, and again every few seconds.
//! A connection on which a statement was refused for that reason is closed at once, with either access.

use std::io;
use std::time::Duration;

use futures::future::BoxFuture;
use sqlx::PgConnection;

use crate::connection::session_state::SessionState;

/// How long a connection lives before another one replaces it, unless its settings request otherwise.
pub(super) const CONNECTION_LIFETIME: Duration = Duration::from_mins(10);

/// Why a connection to a server that takes no writes is not used.
pub(super) const READ_ONLY: &str = "the server is read-only";

/// What a connection is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Any server will do, also one that refuses writes.
    #[default]
    Any,
    /// Only a server that takes writes.
    ReadWrite,
}

/// Whether a transaction on this connection would be read-only: the server is a standby, or was configured so.
pub(crate) async fn is_read_only(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let setting = sqlx::query_scalar!(r#"SELECT current_setting('transaction_read_only') AS "read_only!""#)
        .fetch_one(connection)
        .await?;
    Ok(setting == "on")
}

/// Fails for a connection that cannot be used with this access.
pub(crate) async fn require_access(connection: &mut PgConnection, access: Access) -> Result<(), sqlx::Error> {
    if access == Access::ReadWrite && is_read_only(connection).await? {
        return Err(io::Error::other(READ_ONLY).into());
    }
    Ok(())
}

/// Accepts a connection with this access, without a prepared statement: it may be to a pooler that gives sessions to others.
pub(super) fn accept_unprepared(
    access: Access,
) -> impl for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<(), sqlx::Error>> + Send + Sync + 'static {
    move |connection| {
        Box::pin(async move {
            if access == Access::ReadWrite && SessionState::read(connection).await?.is_reader {
                return Err(io::Error::other(READ_ONLY).into());
            }
            Ok(())
        })
    }
}

/// Whether the server refused a statement because the transaction is read-only.
pub(crate) fn is_reader_refusal(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("25006"))
}
