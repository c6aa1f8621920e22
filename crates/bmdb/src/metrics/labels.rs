//! Labels of metrics, with their possible values.
//!
//! Values are names from our own lists or from the configuration, never a machine or an address: each value is a series
//! of its own, for as long as the process lives.

use prometheus_client::encoding::EncodeLabelSet;

use crate::metrics::registry::Label;
use model::phase::Phase;
use model::process::Process;

/// The label `process`, with the name of every process.
#[must_use]
pub fn process_label() -> Label {
    Label::one_of("process", Process::ALL.map(Process::as_str))
}

/// The label `phase`, with the name of every phase.
#[must_use]
pub fn phase_label() -> Label {
    Label::one_of("phase", Phase::ALL.map(Phase::as_str))
}

/// The label `provider`, with the names in the configuration.
#[must_use]
pub const fn provider_label() -> Label {
    Label::names("provider", "names that the configuration gives providers", 100)
}

/// Label `component`: what a session was started for.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByComponent {
    /// Name of a loop, or of another component such as `callback`.
    pub component: &'static str,
}

/// Label `process`: a kind of work.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByProcess {
    /// Its name in the database.
    pub process: &'static str,
}

/// Labels `process` and `result`: how work ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByProcessAndResult {
    /// The kind of work.
    pub process: &'static str,
    /// `finished`, `failed`, `panicked`, `requeued`, `cancelled` or `lost`.
    pub result: &'static str,
}

/// Label `result`: how something ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByResult {
    /// One of a fixed list for each metric.
    pub result: &'static str,
}

/// Label `table`: a table of the BMDB.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByTable {
    /// Name of the table, from [`TABLES`](crate::fleet::retention::TABLES).
    pub table: &'static str,
}

/// Label `reason`: why something was rejected or ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByReason {
    /// One of a fixed list for each metric.
    pub reason: &'static str,
}

/// Label `listener`: a listener of this process.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByListener {
    /// One of a fixed list.
    pub listener: &'static str,
}

/// Labels `listener` and `reason`: connections that were closed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByListenerAndReason {
    /// One of a fixed list.
    pub listener: &'static str,
    /// One of a fixed list.
    pub reason: &'static str,
}

/// Labels `rpc` and `code`: calls of the API.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByCall {
    /// The call, as `shepherd.fleet.v1.Machines/List`.
    pub rpc: &'static str,
    /// Code of its answer, such as `OK` or `NOT_FOUND`.
    pub code: &'static str,
}

/// Label `rpc`: a call of the API.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByRpc {
    /// The call, as `shepherd.fleet.v1.Machines/List`.
    pub rpc: &'static str,
}
