//! Transactions: attempts, retries after a conflict, and phase exits that count only after the commit.
//!
//! [`Bmdb::transact`] and [`Bmdb::statement`] run in a task of their own. An attempt that loses against another
//! transaction is made again after a random pause that grows. When the answer to a commit is lost, the caller gets
//! [`BmdbError::UnknownOutcome`].
//!
//! The task outlives a caller that is dropped, so a transaction owns what it works with. It is given its arguments once
//! ([`Bmdb::transact_with`]), and lends them to each attempt. A closure that captures only what can be copied needs no
//! arguments ([`Bmdb::transact`]). The future of an attempt is boxed: the task needs one that is [`Send`], which cannot
//! be required of an async closure. What runs it does not depend on its types ([`attempt`](super::attempt)).
//!
//! Machines that leave a phase are observed in a histogram. A transaction may run several times, and roll back what it
//! did; so it only records the exits, and they are observed after its commit.

use std::cell::RefCell;
use std::time::Duration;

use backoff::ExponentialBackoff;
use futures::future::BoxFuture;
use sqlx::{Executor as _, PgConnection};
use tokio::task::JoinHandle;

use crate::connection::Bmdb;
use crate::connection::access::is_reader_refusal;
use crate::connection::attempt::{AnyResult, Attempt, attempt_with, result_of};
use crate::connection::error::{BmdbError, Remedy, describe_error, is_lock_not_available, remedy_for};
use crate::connection::pool::release_connection;
use crate::metrics::database::BmdbMetrics;
use model::phase::Phase;

/// How often a transaction that loses against others is run before that is an error. Beside six others on small tables
/// a SERIALIZABLE one was observed to lose every second time: with twelve tries a busy host would fail a heartbeat
/// every few thousand.
const MAX_ATTEMPTS: u32 = 24;
/// The longest delays before such a transaction is run again. The delay is drawn from zero on, unlike that of other
/// retries: two transactions that lost against each other are separated by the spread alone, and one that is repeated
/// at once does no harm.
const CONFLICT_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(2), factor: 2.0, max: Duration::from_millis(256) };
/// How long the answer to one statement is waited for: a little longer than `statement_timeout`.
const STATEMENT_LIMIT: Duration = Duration::from_secs(12);
/// How long a transaction may take, its statements and the pauses between them.
const TRANSACTION_LIMIT: Duration = Duration::from_secs(25);
// Not sqlx's own transactions: they roll back what a commit has ended already.
const BEGIN: &str = include_str!("../../../../sql/transaction/begin.sql");
const COMMIT: &str = include_str!("../../../../sql/transaction/commit.sql");
const ROLLBACK: &str = include_str!("../../../../sql/transaction/rollback.sql");

impl Bmdb {
    /// Runs a transaction without arguments, or with those that can be copied: see [`Self::transact_with`].
    pub async fn transact<T, F>(&self, what: &'static str, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        self.transact_with(what, body, |tx, body| body(tx)).await
    }

    /// Runs a transaction in a task of its own, and again whenever it loses against others.
    ///
    /// `body` gets `arguments` by reference. It may run several times and must have no effect but its statements. An
    /// error it returns rolls everything back.
    pub async fn transact_with<A, T, F>(
        &self,
        what: &'static str,
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
        let attempt = attempt_with(arguments, body);
        result_of(what, end_of_task(what, self.spawn_transaction(what, attempt)).await?)
    }

    /// Runs one statement without arguments, or with those that can be copied: see [`Self::statement_with`].
    pub async fn statement<T, F>(&self, what: &'static str, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + Sync + 'static,
    {
        self.statement_with(what, body, |connection, body| body(connection)).await
    }

    /// Runs one statement that commits itself, in a task of its own, and again whenever it loses against others. If the
    /// answer is lost, the error is [`BmdbError::UnknownOutcome`]. `body` gets `arguments` by reference.
    pub async fn statement_with<A, T, F>(
        &self,
        what: &'static str,
        arguments: A,
        body: F,
    ) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, sqlx::Error>>
            + Send
            + Sync
            + 'static,
    {
        let attempt = attempt_with(arguments, body);
        result_of(what, end_of_task(what, self.spawn_statement(what, attempt)).await?)
    }

    /// Starts the task of a transaction. This is no asynchronous function: those are compiled again by every package that
    /// calls one.
    fn spawn_transaction(&self, what: &'static str, attempt: Box<dyn Attempt<BmdbError>>) -> Task {
        let bmdb = self.clone();
        tokio::spawn(async move { bmdb.run_transaction(what, &*attempt).await })
    }

    /// Starts the task of a statement that commits itself: see [`Self::spawn_transaction`].
    fn spawn_statement(&self, what: &'static str, attempt: Box<dyn Attempt<sqlx::Error>>) -> Task {
        let bmdb = self.clone();
        tokio::spawn(async move { bmdb.run_statement(what, &*attempt).await })
    }

    async fn run_transaction(
        &self,
        what: &'static str,
        transaction: &dyn Attempt<BmdbError>,
    ) -> Result<AnyResult, BmdbError> {
        for attempt in 0..MAX_ATTEMPTS {
            let mut connection = self.acquire_connection(what).await?;
            // If the attempt panics, a transaction is open.
            connection.close_on_drop();
            let tried = collect_phase_exits(try_once(what, &mut connection, transaction));
            let Ok(((tried, is_sound), left)) = tokio::time::timeout(TRANSACTION_LIMIT, tried).await else {
                return Err(self.abandon_connection(what, connection, TRANSACTION_LIMIT));
            };
            if is_sound && !tried.shows_reader() {
                release_connection(connection);
            } else {
                drop(connection.detach());
            }
            match tried {
                AttemptOutcome::Finished(result) => {
                    self.metrics().count_transaction(what, result_label(&result));
                    if result.is_ok() {
                        count_phase_exits(self.metrics(), left);
                    }
                    return result;
                }
                AttemptOutcome::Failed { error, committing } => {
                    self.handle_failed_attempt(what, error, committing, attempt).await?;
                }
            }
        }
        self.metrics().count_transaction(what, "failed");
        Err(BmdbError::Conflict { operation: what, tries: MAX_ATTEMPTS })
    }

    async fn run_statement(
        &self,
        what: &'static str,
        statement: &dyn Attempt<sqlx::Error>,
    ) -> Result<AnyResult, BmdbError> {
        for attempt in 0..MAX_ATTEMPTS {
            let mut connection = self.acquire_connection(what).await?;
            let tried = tokio::time::timeout(STATEMENT_LIMIT, statement.run(&mut connection));
            let Ok(tried) = tried.await else {
                return Err(self.abandon_connection(what, connection, STATEMENT_LIMIT));
            };
            if tried.as_ref().is_err_and(is_reader_refusal) {
                // The next connection may lead to the server that took its place.
                drop(connection.detach());
            } else {
                release_connection(connection);
            }
            match tried {
                Ok(value) => {
                    self.metrics().count_transaction(what, "done");
                    return Ok(value);
                }
                Err(error) => self.handle_failed_attempt(what, error, true, attempt).await?,
            }
        }
        self.metrics().count_transaction(what, "failed");
        Err(BmdbError::Conflict { operation: what, tries: MAX_ATTEMPTS })
    }

    /// Decides about a failed attempt: a pause before the next one, or an error.
    async fn handle_failed_attempt(
        &self,
        what: &'static str,
        error: sqlx::Error,
        committing: bool,
        attempt: u32,
    ) -> Result<(), BmdbError> {
        match remedy_for(&error, committing) {
            Remedy::Retry => {
                self.metrics().count_transaction(what, "retried");
                let longest = CONFLICT_BACKOFF.nominal(attempt + 1);
                tokio::time::sleep(longest.mul_f64(rand::random::<f64>())).await;
                Ok(())
            }
            Remedy::ResolveOutcome => {
                self.metrics().count_transaction(what, "unknown");
                Err(BmdbError::UnknownOutcome(describe_error(&error)))
            }
            Remedy::Fail => {
                self.metrics()
                    .count_transaction(what, if is_lock_not_available(&error) { "locked" } else { "failed" });
                Err(BmdbError::Statement { operation: what, source: error })
            }
        }
    }
}

/// A task that runs a transaction or statement until it ends.
type Task = JoinHandle<Result<AnyResult, BmdbError>>;

/// Waits for a task, and returns its result. If it is dropped, the task continues.
async fn end_of_task(what: &'static str, task: Task) -> Result<AnyResult, BmdbError> {
    match task.await {
        Ok(result) => result,
        Err(ended) => Err(BmdbError::TaskFailed { operation: what, reason: ended.to_string() }),
    }
}

/// The label `result` of a transaction that ran to its end.
fn result_label(result: &Result<AnyResult, BmdbError>) -> &'static str {
    match result {
        Ok(_) => "done",
        Err(error) if error.is_lock_not_available() => "locked",
        Err(BmdbError::Statement { .. }) => "failed",
        Err(_) => "refused",
    }
}

/// The outcome of an attempt.
enum AttemptOutcome {
    /// It ended, with a result or an error for the caller.
    Finished(Result<AnyResult, BmdbError>),
    /// The database failed it: another attempt may succeed.
    Failed { error: sqlx::Error, committing: bool },
}

impl AttemptOutcome {
    /// Whether the server refused a write, so that its connection is of no use.
    fn shows_reader(&self) -> bool {
        match self {
            Self::Finished(Err(BmdbError::Statement { source: error, .. })) | Self::Failed { error, .. } => {
                is_reader_refusal(error)
            }
            Self::Finished(_) => false,
        }
    }
}

/// Begins a transaction, makes one attempt in it and commits, or rolls back. Also returns whether the connection can be
/// used for another one.
async fn try_once(
    what: &'static str,
    connection: &mut PgConnection,
    transaction: &dyn Attempt<BmdbError>,
) -> (AttemptOutcome, bool) {
    if let Err(source) = connection.execute(BEGIN).await {
        return (AttemptOutcome::Finished(Err(BmdbError::Statement { operation: what, source })), true);
    }
    match transaction.run(connection).await {
        Ok(value) => match connection.execute(COMMIT).await {
            Ok(_) => (AttemptOutcome::Finished(Ok(value)), true),
            // The transaction has ended, one way or the other: a rollback now would make the server warn.
            Err(error) => (AttemptOutcome::Failed { error, committing: true }, true),
        },
        Err(error) => {
            // If the attempt abandoned a statement half-way, this command receives that statement's end, and the transaction
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

/// Phases, and how long a machine had been in each.
type PhaseExits = Vec<(Phase, Duration)>;

tokio::task_local! {
    static PHASE_EXITS: RefCell<PhaseExits>;
}

/// Runs a transaction, and returns its result with the exits it recorded.
async fn collect_phase_exits<T>(transaction: impl Future<Output = T>) -> (T, PhaseExits) {
    let noted = async {
        let result = transaction.await;
        (result, PHASE_EXITS.with(RefCell::take))
    };
    PHASE_EXITS.scope(RefCell::default(), noted).await
}

/// Records that a machine leaves a phase. A phase that only another release knows is ignored.
pub(crate) fn record_phase_exit(phase: &str, after: Duration) {
    if let Ok(phase) = phase.parse() {
        // Outside a transaction nothing is counted.
        let _ = PHASE_EXITS.try_with(|left| left.borrow_mut().push((phase, after)));
    }
}

/// Observes the exits of a committed transaction.
fn count_phase_exits(metrics: &BmdbMetrics, left: PhaseExits) {
    for (phase, after) in left {
        metrics.observe_phase_exit(phase, after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn phase_exits_belong_to_their_transaction() {
        record_phase_exit("Ready", Duration::ZERO);
        let (answer, left) = collect_phase_exits(async {
            record_phase_exit("Ready", Duration::from_secs(7));
            tokio::task::yield_now().await;
            record_phase_exit("Napping", Duration::from_secs(1));
            record_phase_exit("Silent", Duration::from_secs(2));
            5
        })
        .await;
        assert_eq!(answer, 5);
        assert_eq!(left, [(Phase::Ready, Duration::from_secs(7)), (Phase::Silent, Duration::from_secs(2))]);
        assert_eq!(collect_phase_exits(async {}).await.1, []);
    }
}
