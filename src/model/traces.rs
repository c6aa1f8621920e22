//! What the spans of traces have in common: every room that makes some names them so, and knows nothing of what becomes of
//! them.

/// Target of the spans that traces are made of. They are of the level `debug`, so that a log says nothing of them unless it
/// is asked to.
pub const TRACES: &str = "traces";
