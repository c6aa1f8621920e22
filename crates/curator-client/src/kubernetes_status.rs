//! Validates the Kubernetes status that a node reports.
//!
//! Its size is limited, because it is stored and sent to all watchers.

use model::node_role::is_role_name;
use model::role_declaration::parse_sha256;
use proto::curator::v1 as wire;

/// Most components in a status.
const MAX_COMPONENTS: usize = 32;
/// Most conflicting objects in a status.
const MAX_CONFLICTS: usize = 64;
/// Longest text, in bytes.
const MAX_TEXT_BYTES: usize = 1000;

/// Checks the Kubernetes status of a node; the error names the field.
pub fn validate_status(status: &wire::KubernetesStatus) -> Result<(), String> {
    if !status.bundle.is_empty() {
        parse_sha256(&status.bundle).map_err(|error| format!("kubernetes.bundle: {error}"))?;
    }
    check_text("version", &status.version)?;
    check_text("wait_reason", &status.wait_reason)?;
    check_count("components", status.components.len(), MAX_COMPONENTS)?;
    check_count("conflicts", status.conflicts.len(), MAX_CONFLICTS)?;
    for component in &status.components {
        let name: String = component.name.chars().take(100).collect();
        if !is_role_name(&component.name) {
            return Err(format!("kubernetes.components has {name:?}, which names no component"));
        }
        if component.kind() == wire::service_status::Kind::Unspecified {
            let kind = component.kind;
            return Err(format!("kubernetes.components has {name:?} in state {kind}, which does not exist"));
        }
        check_text(&format!("components.{name}.message"), &component.message)?;
    }
    for clash in &status.conflicts {
        for text in [&clash.kind, &clash.name, &clash.message] {
            check_text("conflicts", text)?;
        }
    }
    Ok(())
}

fn check_text(field: &str, text: &str) -> Result<(), String> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(format!("kubernetes.{field} has {} bytes; {MAX_TEXT_BYTES} are enough", text.len()));
    }
    Ok(())
}

fn check_count(field: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        return Err(format!("kubernetes.{field} has {count} entries; {most} are enough"));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn sample_status() -> wire::KubernetesStatus {
        wire::KubernetesStatus {
            bundle: "ab".repeat(32),
            version: "1.34.1".to_owned(),
            generation: 7,
            components: vec![wire::KubernetesComponentStatus {
                name: "kube-apiserver".to_owned(),
                kind: wire::service_status::Kind::Healthy.into(),
                since_ms: 3,
                restarts: 1,
                message: String::new(),
            }],
            wait_reason: "the reconciler".to_owned(),
            is_reconciler: true,
            conflicts: vec![wire::KubernetesObjectConflict {
                kind: "ClusterRole".to_owned(),
                name: "shepherd:owners".to_owned(),
                message: "it is somebody else's".to_owned(),
            }],
        }
    }

    #[test]
    fn status_fields_are_bounded() {
        type Change = fn(&mut wire::KubernetesStatus);
        assert_eq!(validate_status(&sample_status()), Ok(()));
        assert_eq!(validate_status(&wire::KubernetesStatus::default()), Ok(()));
        let cases: [(Change, &str); 10] = [
            (|status| status.bundle = "ab".to_owned(), "kubernetes.bundle"),
            (|status| status.version = "v".repeat(1001), "kubernetes.version"),
            (|status| status.wait_reason = "w".repeat(1001), "kubernetes.wait_reason"),
            (
                |status| status.components = vec![status.components[0].clone(); 33],
                "kubernetes.components has 33",
            ),
            (|status| status.components[0].name = "a b".to_owned(), "names no component"),
            (|status| status.components[0].kind = 0, "in state 0"),
            (
                |status| status.components[0].message = "m".repeat(1001),
                "kubernetes.components.kube-apiserver.message",
            ),
            (
                |status| status.conflicts = vec![status.conflicts[0].clone(); 65],
                "kubernetes.conflicts has 65",
            ),
            (|status| status.conflicts[0].name = "n".repeat(1001), "kubernetes.conflicts"),
            (|status| status.conflicts[0].message = "m".repeat(1001), "kubernetes.conflicts"),
        ];
        for (change, field) in cases {
            let mut status = sample_status();
            change(&mut status);
            let error = validate_status(&status).unwrap_err();
            assert!(error.contains(field), "{field}: {error}");
        }
    }
}
