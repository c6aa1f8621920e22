//! Reports at once what makes a test fail, past libtest's capture.
//!
//! libtest reports failures when all tests are done. A run that is cut off, or of which only a part is stored, would
//! report no more than a name.

use std::cell::Cell;
use std::fmt;
use std::io::Write as _;
use std::panic::Location;
use std::sync::Once;
use std::thread;

thread_local! {
    /// Whether a panic was reported on this thread. Only the first one is: a test that catches many is about panics.
    static PANIC_REPORTED: Cell<bool> = const { Cell::new(false) };
}

/// The result of a test that may end with an error.
pub type TestResult = Result<(), TestFailure>;

/// An error that ends a test: written to standard error when the test returns it.
pub struct TestFailure(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for TestFailure {
    #[track_caller]
    fn from(error: E) -> Self {
        let error = error.into();
        aloud(&format!("left with an error at {}: {error:?}", Location::caller()));
        Self(error)
    }
}

impl fmt::Debug for TestFailure {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// Writes `text` under the name of the test on this thread, to the standard error of the whole run.
pub fn aloud(text: &str) {
    let thread = thread::current();
    // In one call, because other threads write to the same pipe, and `tools/test` reads lines.
    let line = format!("-- {}: {text}\n", thread.name().unwrap_or("a test"));
    // If this write fails, there is nobody left to report it to.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

/// From now on a failed assertion is written to standard error. Only on the threads of tests: a panic elsewhere may
/// be what a test is about.
pub fn assertions_aloud() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let of_a_test = thread::current().name().is_some_and(|name| name.contains("::"));
            if of_a_test && !PANIC_REPORTED.replace(true) {
                aloud(&panic.to_string());
            }
            before(panic);
        }));
    });
}
