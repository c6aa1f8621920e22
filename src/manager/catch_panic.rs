//! Catches panics: a panic ends one work item, one pass or one round, and never the task that runs it.

use std::any::Any;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;

/// Runs a future to its end. The error is the text of its panic.
///
/// It is no `async fn`, which would hold the future twice.
pub(super) fn catch_panic<T>(future: impl Future<Output = T>) -> impl Future<Output = Result<T, String>> {
    AssertUnwindSafe(future).catch_unwind().map(|ended| ended.map_err(|panic| panic_message(&*panic)))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no text".to_owned())
}
