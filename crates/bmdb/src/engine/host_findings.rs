//! Findings of agents about how they run, as a column has them.

use model::host_finding::HostFinding;
use serde_json::Value;

/// The value of a column.
pub(crate) fn store_findings(findings: &[HostFinding]) -> Value {
    serde_json::to_value(findings).unwrap_or_else(|_| Value::Array(Vec::new()))
}

/// Reads such a column. One that cannot be read is written again with the next report.
pub(crate) fn read_findings(stored: Option<Value>) -> Vec<HostFinding> {
    stored.and_then(|stored| serde_json::from_value(stored).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::host_finding::HostFindingKind;

    #[test]
    fn stored_findings_are_read_again_and_damaged_ones_are_none() {
        let finding = HostFinding { kind: HostFindingKind::UnitEdited, message: "m".to_owned() };
        assert_eq!(read_findings(Some(store_findings(std::slice::from_ref(&finding)))), [finding]);
        assert!(read_findings(Some(Value::from("damaged"))).is_empty());
        assert!(read_findings(None).is_empty());
    }
}
