//! What a node may say of Kubernetes on it: bounded, since it is kept and told to everybody.

use crate::model::declaration::sha256;
use crate::model::role::is_name;
use crate::proto::curator::v1 as wire;

/// Most components.
const MOST_COMPONENTS: usize = 32;
/// Most objects that are in the way.
const MOST_CLASHES: usize = 64;
/// Longest text, in bytes.
const LONGEST_TEXT: usize = 1000;

/// Whether a node can say this; the error names the field.
pub fn check(status: &wire::KubernetesStatus) -> Result<(), String> {
    if !status.bundle.is_empty() {
        sha256(&status.bundle).map_err(|error| format!("kubernetes.bundle: {error}"))?;
    }
    text("version", &status.version)?;
    text("waits", &status.waits)?;
    at_most("components", status.components.len(), MOST_COMPONENTS)?;
    at_most("clashes", status.clashes.len(), MOST_CLASHES)?;
    for component in &status.components {
        let name: String = component.name.chars().take(100).collect();
        if !is_name(&component.name) {
            return Err(format!("kubernetes.components has {name:?}, which names no component"));
        }
        if component.kind() == wire::service_status::Kind::Unspecified {
            let kind = component.kind;
            return Err(format!("kubernetes.components has {name:?} in state {kind}, which is none"));
        }
        text(&format!("components.{name}.message"), &component.message)?;
    }
    for clash in &status.clashes {
        for said in [&clash.kind, &clash.name, &clash.message] {
            text("clashes", said)?;
        }
    }
    Ok(())
}

fn text(field: &str, said: &str) -> Result<(), String> {
    if said.len() > LONGEST_TEXT {
        return Err(format!("kubernetes.{field} has {} bytes; {LONGEST_TEXT} are enough", said.len()));
    }
    Ok(())
}

fn at_most(field: &str, count: usize, most: usize) -> Result<(), String> {
    if count > most {
        return Err(format!("kubernetes.{field} has {count} entries; {most} are enough"));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn said() -> wire::KubernetesStatus {
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
            waits: "the reconciler".to_owned(),
            reconciles: true,
            clashes: vec![wire::KubernetesClash {
                kind: "ClusterRole".to_owned(),
                name: "shepherd:owners".to_owned(),
                message: "it is somebody else's".to_owned(),
            }],
        }
    }

    #[test]
    fn what_a_node_says_is_bounded_field_by_field() {
        type Change = fn(&mut wire::KubernetesStatus);
        assert_eq!(check(&said()), Ok(()));
        assert_eq!(check(&wire::KubernetesStatus::default()), Ok(()));
        let cases: [(Change, &str); 10] = [
            (|said| said.bundle = "ab".to_owned(), "kubernetes.bundle"),
            (|said| said.version = "v".repeat(1001), "kubernetes.version"),
            (|said| said.waits = "w".repeat(1001), "kubernetes.waits"),
            (|said| said.components = vec![said.components[0].clone(); 33], "kubernetes.components has 33"),
            (|said| said.components[0].name = "a b".to_owned(), "names no component"),
            (|said| said.components[0].kind = 0, "in state 0"),
            (
                |said| said.components[0].message = "m".repeat(1001),
                "kubernetes.components.kube-apiserver.message",
            ),
            (|said| said.clashes = vec![said.clashes[0].clone(); 65], "kubernetes.clashes has 65"),
            (|said| said.clashes[0].name = "n".repeat(1001), "kubernetes.clashes"),
            (|said| said.clashes[0].message = "m".repeat(1001), "kubernetes.clashes"),
        ];
        for (change, field) in cases {
            let mut said = said();
            change(&mut said);
            let error = check(&said).unwrap_err();
            assert!(error.contains(field), "{field}: {error}");
        }
    }
}
