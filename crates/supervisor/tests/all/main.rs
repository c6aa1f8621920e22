//! Trees of tasks, run by a real supervisor.

mod tree;
