//! The integration tests.

mod roleserver;
