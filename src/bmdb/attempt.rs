//! One try of a transaction.

use futures::future::BoxFuture;
use sqlx::{Executor as _, PgConnection};

use crate::bmdb::error::{BmdbError, Remedy, remedy};

// Not sqlx's own transactions: they roll back what a commit has ended already.
const BEGIN: &str = include_str!("../../sql/transaction/begin.sql");
const COMMIT: &str = include_str!("../../sql/transaction/commit.sql");
const ROLLBACK: &str = include_str!("../../sql/transaction/rollback.sql");

/// How a transaction that ran to its end is counted.
pub(crate) fn result_of<T>(result: &Result<T, BmdbError>) -> &'static str {
    match result {
        Ok(_) => "done",
        Err(error) if error.is_lock_not_available() => "locked",
        Err(BmdbError::Statement { .. }) => "failed",
        Err(_) => "refused",
    }
}

/// What became of it.
pub(crate) enum Tried<T> {
    /// It ended, one way or the other.
    Done(Result<T, BmdbError>),
    /// The database failed it: it may be worth another try.
    Failed { error: sqlx::Error, committing: bool },
}

/// Begins a transaction, runs `body` in it and commits, or rolls back; and says whether the connection is good for
/// another one.
pub(crate) async fn try_once<T, F>(
    what: &'static str,
    connection: &mut PgConnection,
    body: &F,
) -> (Tried<T>, bool)
where
    F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Sync,
{
    if let Err(source) = connection.execute(BEGIN).await {
        return (Tried::Done(Err(BmdbError::Statement { what, source })), true);
    }
    match body(connection).await {
        Ok(value) => match connection.execute(COMMIT).await {
            Ok(_) => (Tried::Done(Ok(value)), true),
            // It is over, one way or the other: to roll it back now is what the server warns of.
            Err(error) => (Tried::Failed { error, committing: true }, true),
        },
        Err(error) => {
            // Where `body` gave a statement up half-way, its end is what this hears, and the transaction stays
            // open and aborted on a connection that answers every test.
            let undone = connection.execute(ROLLBACK).await.is_ok();
            let tried = match error {
                BmdbError::Statement { source, .. } if remedy(&source, false) == Remedy::Again => {
                    Tried::Failed { error: source, committing: false }
                }
                other => Tried::Done(Err(other)),
            };
            (tried, undone)
        }
    }
}
