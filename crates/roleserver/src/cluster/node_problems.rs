//! The problems of this node that a person has to know about, by the part of the role server that reports them.
//!
//! Parts run beside each other and fail for reasons of their own. Each one reports its problem under its own name, and
//! clears only that. So no part hides what another one reports, and none has to remember whether a problem is its own.
//! The report to the shepherd has all of them ([`join_problems`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A part of the role server that reports problems. The order is that of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodePart {
    /// Executes the order to found, join or leave a cluster.
    Enrolment,
    /// Starts etcd and the curator.
    ControlPlane,
    /// Chooses the flags of etcd by the version of its program.
    EtcdProgram,
    /// Renews the certificate of etcd.
    PeerCertificate,
    /// Keeps the list of revoked peers of etcd.
    RevocationList,
    /// Makes room in an etcd that is full.
    EtcdSpace,
    /// Restarts etcd in turn.
    PeerRestart,
    /// Executes the steps that need the running etcd, before the curator starts.
    BesideEtcd,
    /// Follows the authorities of the newest statement.
    Authorities,
    /// Reports the status of the node to the curator.
    Status,
}

impl NodePart {
    /// The parts that run only while an etcd of this node is to run.
    pub(super) const OF_ETCD: [Self; 6] = [
        Self::EtcdProgram,
        Self::PeerCertificate,
        Self::RevocationList,
        Self::EtcdSpace,
        Self::PeerRestart,
        Self::BesideEtcd,
    ];
}

/// The problems of a node. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct NodeProblems(Arc<Mutex<BTreeMap<NodePart, String>>>);

impl NodeProblems {
    /// Replaces the problem of a part, and logs it if it is another one; `None` clears it.
    pub fn set(&self, part: NodePart, problem: Option<String>) {
        let mut problems = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(problem) = problem else {
            problems.remove(&part);
            return;
        };
        if problems.get(&part) != Some(&problem) {
            tracing::warn!(?part, "{problem}");
            problems.insert(part, problem);
        }
    }

    /// Clears the problems of these parts, which do not run any more or begin again.
    pub(super) fn clear_parts(&self, parts: &[NodePart]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|part, _| !parts.contains(part));
    }

    /// Clears the problems of all parts.
    pub(super) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// All problems in one sentence; `None` without any.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        join_problems(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The problems in the order of their parts. What two parts report alike is there once.
#[must_use]
pub fn join_problems(problems: &BTreeMap<NodePart, String>) -> Option<String> {
    let mut sentences: Vec<&str> = Vec::new();
    for problem in problems.values() {
        if !sentences.contains(&problem.as_str()) {
            sentences.push(problem);
        }
    }
    (!sentences.is_empty()).then(|| sentences.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_are_joined_in_the_order_of_their_parts() {
        use NodePart::{BesideEtcd, ControlPlane, Enrolment, Status};
        type Row = (&'static [(NodePart, &'static str)], Option<&'static str>);
        let rows: [Row; 5] = [
            (&[], None),
            (&[(Status, "no address")], Some("no address")),
            (&[(Status, "no address"), (Enrolment, "no ticket")], Some("no ticket; no address")),
            (&[(ControlPlane, "no key"), (BesideEtcd, "no key")], Some("no key")),
            (&[(BesideEtcd, "a"), (ControlPlane, "b"), (Status, "a")], Some("b; a")),
        ];
        for (reported, expected) in rows {
            let problems: BTreeMap<NodePart, String> =
                reported.iter().map(|(part, problem)| (*part, (*problem).to_owned())).collect();
            assert_eq!(join_problems(&problems).as_deref(), expected, "{reported:?}");
        }
    }

    #[test]
    fn part_that_recovers_clears_no_problem_of_another_one() {
        let problems = NodeProblems::default();
        let reporting = problems.clone();
        reporting.set(NodePart::PeerRestart, Some("it waits".to_owned()));
        for reason in ["no key", "no leader"] {
            reporting.set(NodePart::PeerCertificate, Some(reason.to_owned()));
            assert_eq!(problems.describe(), Some(format!("{reason}; it waits")));
        }
        // The last one never had a problem.
        for part in [NodePart::PeerCertificate, NodePart::PeerCertificate, NodePart::RevocationList] {
            reporting.set(part, None);
            assert_eq!(problems.describe().as_deref(), Some("it waits"));
        }
        reporting.set(NodePart::Status, Some("no address".to_owned()));
        reporting.clear_parts(&NodePart::OF_ETCD);
        assert_eq!(problems.describe().as_deref(), Some("no address"));
        reporting.clear();
        assert_eq!(problems.describe(), None);
    }
}
