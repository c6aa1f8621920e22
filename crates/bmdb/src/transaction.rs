//! One attempt of a transaction.

use futures::future::BoxFuture;
use sqlx::{Executor as _, PgConnection};

use crate::error::{BmdbError, Remedy, remedy_for};

// Not sqlx's own transactions: they roll back what a commit has ended already.
const BEGIN: &str = include_str!("../../../sql/transaction/begin.sql");
const COMMIT: &str = include_str!("../../../sql/transaction/commit.sql");
const ROLLBACK: &str = include_str!("../../../sql/transaction/rollback.sql");

/// The label `result` of a transaction that ran to its end.
pub(crate) fn result_label<T>(result: &Result<T, BmdbError>) -> &'static str {
    match result {
        Ok(_) => "done",
        Err(error) if error.is_lock_not_available() => "locked",
        Err(BmdbError::Statement { .. }) => "failed",
        Err(_) => "refused",
    }
}

/// The outcome of an attempt.
pub(crate) enum AttemptOutcome<T> {
    /// It ended, with a result or an error for the caller.
    Finished(Result<T, BmdbError>),
    /// The database failed it: another attempt may succeed.
    Failed { error: sqlx::Error, committing: bool },
}

/// Begins a transaction, runs `body` in it and commits, or rolls back. Also returns whether the connection can be used
/// for another one.
pub(crate) async fn try_once<T, F>(
    what: &'static str,
    connection: &mut PgConnection,
    body: &F,
) -> (AttemptOutcome<T>, bool)
where
    F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Sync,
{
    if let Err(source) = connection.execute(BEGIN).await {
        return (AttemptOutcome::Finished(Err(BmdbError::Statement { operation: what, source })), true);
    }
    match body(connection).await {
        Ok(value) => match connection.execute(COMMIT).await {
            Ok(_) => (AttemptOutcome::Finished(Ok(value)), true),
            // The transaction has ended, one way or the other: a rollback now would make the server warn.
            Err(error) => (AttemptOutcome::Failed { error, committing: true }, true),
        },
        Err(error) => {
            // If `body` abandoned a statement half-way, this command receives that statement's end, and the transaction
            // stays open and aborted on a connection that answers every test.
            let undone = connection.execute(ROLLBACK).await.is_ok();
            let tried = match error {
                BmdbError::Statement { source, .. } if remedy_for(&source, false) == Remedy::Retry => {
                    AttemptOutcome::Failed { error: source, committing: false }
                }
                other => AttemptOutcome::Finished(Err(other)),
            };
            (tried, undone)
        }
    }
}
