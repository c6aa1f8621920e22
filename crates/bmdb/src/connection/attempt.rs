//! Attempts at a transaction or statement, without their types, so that what runs them is compiled once.
//!
//! Some three hundred transactions differ in their arguments and results. A task is some hundred functions of the runtime
//! for each type of future, and every package that calls an asynchronous function compiles that function again. So only
//! what differs has types: the body of an attempt, and the boxing of its result. Tasks, repetition and limits work with
//! [`Attempt`] and [`AnyResult`].

use std::any::Any;
use std::marker::PhantomData;

use futures::future::BoxFuture;
use sqlx::PgConnection;

use crate::connection::error::BmdbError;

/// The result of an attempt, of a type that its caller knows.
pub(super) type AnyResult = Box<dyn Any + Send>;

/// What is attempted on a connection; `E` is the error of an attempt.
pub(super) trait Attempt<E>: Send + Sync {
    /// Makes an attempt on `connection`, and boxes its result.
    fn run<'c>(&'c self, connection: &'c mut PgConnection) -> BoxFuture<'c, Result<AnyResult, E>>;
}

/// An attempt that consists of a body and the arguments that each attempt gets by reference.
struct TypedAttempt<A, T, F> {
    arguments: A,
    body: F,
    result: PhantomData<fn() -> T>,
}

impl<A, T, E, F> Attempt<E> for TypedAttempt<A, T, F>
where
    A: Send + Sync,
    T: Send + 'static,
    E: 'static,
    F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, E>> + Send + Sync,
{
    fn run<'c>(&'c self, connection: &'c mut PgConnection) -> BoxFuture<'c, Result<AnyResult, E>> {
        let attempt = (self.body)(connection, &self.arguments);
        Box::pin(async move { attempt.await.map(|result| Box::new(result) as AnyResult) })
    }
}

/// An attempt that calls `body` with `arguments`. Its result is a `T`: see [`result_of`].
pub(super) fn attempt_with<A, T, E, F>(arguments: A, body: F) -> Box<dyn Attempt<E>>
where
    A: Send + Sync + 'static,
    T: Send + 'static,
    E: 'static,
    F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, E>> + Send + Sync + 'static,
{
    Box::new(TypedAttempt { arguments, body, result: PhantomData })
}

/// The result of an attempt of [`attempt_with`] with this `T`.
pub(super) fn result_of<T: 'static>(operation: &'static str, result: AnyResult) -> Result<T, BmdbError> {
    match result.downcast() {
        Ok(result) => Ok(*result),
        Err(_) => Err(BmdbError::TaskFailed { operation, reason: "its result has another type".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_has_the_type_that_its_caller_names() {
        let result: AnyResult = Box::new(7_u32);
        assert_eq!(result_of::<u32>("counting", result).ok(), Some(7));
        let result: AnyResult = Box::new(7_u32);
        let refused = result_of::<u64>("counting", result).map_err(|error| error.to_string());
        assert_eq!(refused, Err("counting was interrupted: its result has another type".to_owned()));
    }
}
