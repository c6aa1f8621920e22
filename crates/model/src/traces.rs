//! Target name of trace spans.
//!
//! Every module that makes such spans uses this target, and needs to know nothing about their export. An integer field
//! has the type `i64`: the messages of OpenTelemetry have no other integers.

/// Target of the spans that traces are made of. They have the level `debug`, so a log shows them only if it is
/// configured to.
pub const TRACE_TARGET: &str = "traces";
