//! Says at once what makes a test fail, past libtest's capture.
//!
//! libtest tells what failed when all tests are done. A run that is cut off, or of which only a part is kept,
//! would tell no more than a name.

use std::cell::Cell;
use std::fmt;
use std::io::Write as _;
use std::panic::Location;
use std::sync::Once;
use std::thread;

thread_local! {
    /// Whether a panic was told on this thread: a test that catches many of them is about panics.
    static TOLD: Cell<bool> = const { Cell::new(false) };
}

/// What a test returns that may end with an error.
pub(crate) type TestResult = Result<(), Told>;

/// An error that ends a test: said aloud when the test is left with it.
pub(crate) struct Told(anyhow::Error);

impl<E: Into<anyhow::Error>> From<E> for Told {
    #[track_caller]
    fn from(error: E) -> Self {
        let error = error.into();
        aloud(&format!("left with an error at {}: {error:?}", Location::caller()));
        Self(error)
    }
}

impl fmt::Debug for Told {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

/// Writes `text` under the name of the test on this thread, to the standard error of the whole run.
pub(crate) fn aloud(text: &str) {
    let thread = thread::current();
    // Nobody is left to be told that it could not be written.
    let _ = writeln!(std::io::stderr().lock(), "-- {}: {text}", thread.name().unwrap_or("a test"));
}

/// From now on an assertion that does not hold is said aloud. Only on the threads of tests: a panic elsewhere
/// may be what a test is about.
pub(crate) fn assertions_aloud() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let of_a_test = thread::current().name().is_some_and(|name| name.contains("::"));
            if of_a_test && !TOLD.replace(true) {
                aloud(&panic.to_string());
            }
            before(panic);
        }));
    });
}
