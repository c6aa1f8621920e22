//! The integration tests: one binary, because each further one is linked against everything, and a
//! module per capability.

mod roleserver;
mod sshd;
mod takeover;
