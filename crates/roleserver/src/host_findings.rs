//! What the role server finds wrong with how it runs on this machine.
//!
//! Parts of the role server that look at the host put their findings here, each under a source of its own. The release
//! report of heartbeats carries all of them to the shepherd, which shows them in `why` and `issues`. A finding goes
//! when its source no longer has it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use model::host_finding::HostFinding;
use proto::agent::v1 as wire;

/// The findings of all sources. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct HostFindings(Arc<Mutex<BTreeMap<&'static str, Vec<HostFinding>>>>);

impl HostFindings {
    /// Replaces the findings of a source.
    pub fn set(&self, source: &'static str, findings: Vec<HostFinding>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for finding in &findings {
            if !known.get(source).is_some_and(|former| former.contains(finding)) {
                tracing::warn!(kind = finding.kind.as_str(), "{}", finding.message);
            }
        }
        known.insert(source, findings);
    }

    /// All findings, by source.
    #[must_use]
    pub fn collect(&self) -> Vec<HostFinding> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.values().flatten().cloned().collect()
    }

    /// All findings for a release report.
    #[must_use]
    pub fn report(&self) -> Vec<wire::HostFinding> {
        let findings = self.collect().into_iter();
        findings
            .map(|finding| wire::HostFinding {
                kind: finding.kind.as_str().to_owned(),
                message: finding.message,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::host_finding::HostFindingKind;

    #[test]
    fn findings_of_a_source_replace_its_former_ones() {
        let finding =
            |message: &str| HostFinding { kind: HostFindingKind::UnitEdited, message: message.to_owned() };
        let findings = HostFindings::default();
        let shared = findings.clone();
        findings.set("unit", vec![finding("a"), finding("b")]);
        findings.set("placement", vec![finding("c")]);
        assert_eq!(shared.collect(), [finding("c"), finding("a"), finding("b")]);
        assert_eq!(shared.report()[0].kind, "unit-edited");
        findings.set("unit", Vec::new());
        assert_eq!(shared.collect(), [finding("c")]);
    }
}
