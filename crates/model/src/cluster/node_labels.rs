//! Node labels given when a machine joins a cluster.
//!
//! They are its location, its part, and the hardware facts that people choose by. Nothing here decides by these labels.
//! In Kubernetes they become labels of the node below `label.shepherd/`.
//!
//! The labels are those of the day on which the machine joined. They do not change when hardware is replaced later.
//!
//! Names of manufacturers and products contain blanks and commas, which a label may not have, here or in Kubernetes.
//! Each run of such characters becomes a dash (`Dell-Inc`, `PowerEdge-R640`).

use crate::cluster::spec::ClusterPart;
use crate::label::{Labels, check_label_value};
use crate::selector::traits::Hardware;

/// The labels of a machine's node. Unknown facts are left out. A location that is no valid label is left out too:
/// nothing depends on the label, and a sanitized location would name another place.
#[must_use]
pub fn node_labels(part: ClusterPart, location: Option<&str>, hardware: &Hardware) -> Labels {
    let name =
        |name: &Option<String>| name.as_deref().map(sanitize_label_value).filter(|name| !name.is_empty());
    let location = location.filter(|location| check_label_value(location).is_ok());
    let all = [
        ("location", location.map(str::to_owned)),
        ("part", Some(part.as_str().to_owned())),
        ("manufacturer", name(&hardware.manufacturer)),
        ("product", name(&hardware.product)),
        ("memory-gib", hardware.memory.map(|bytes| round_to_gibibytes(bytes).to_string())),
        ("cpus", hardware.cpus.map(|threads| threads.to_string())),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// Rounds to the nearest whole number: memory that firmware reserves does not turn 64 into 63.
const fn round_to_gibibytes(bytes: u64) -> u64 {
    bytes.saturating_add(1 << 29) >> 30
}

/// Replaces or drops the characters of a name that a label may not have.
fn sanitize_label_value(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_');
    let words: Vec<&str> = name.split(|c| !fits(c)).filter(|word| !word.is_empty()).collect();
    let outer = |c: char| !c.is_ascii_alphanumeric();
    let text: String = words.join("-").chars().take(63).collect();
    text.trim_matches(outer).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label_pairs(labels: &Labels) -> Vec<(&str, &str)> {
        labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    #[test]
    fn only_known_facts_become_labels() {
        let hardware = Hardware {
            manufacturer: Some("Dell Inc.".to_owned()),
            product: Some("PowerEdge R640".to_owned()),
            memory: Some((64 << 30) - (300 << 20)),
            cpus: Some(32),
        };
        assert_eq!(
            label_pairs(&node_labels(ClusterPart::Worker, Some("ams-1/r7"), &hardware)),
            [
                ("cpus", "32"),
                ("location", "ams-1/r7"),
                ("manufacturer", "Dell-Inc"),
                ("memory-gib", "64"),
                ("part", "worker"),
                ("product", "PowerEdge-R640"),
            ]
        );
        assert_eq!(
            label_pairs(&node_labels(ClusterPart::ControlPlane, Some("hall 3"), &Hardware::default())),
            [("part", "control-plane")]
        );
    }

    #[test]
    fn every_name_becomes_a_valid_label_or_none() {
        for (name, text) in [
            ("QEMU", "QEMU"),
            ("  Standard PC (Q35 + ICH9, 2009) ", "Standard-PC-Q35-ICH9-2009"),
            ("To Be Filled By O.E.M.", "To-Be-Filled-By-O.E.M"),
            ("--_--", ""),
            ("", ""),
            ("机器", ""),
        ] {
            assert_eq!(sanitize_label_value(name), text, "{name:?}");
        }
        let long = sanitize_label_value(&"ab ".repeat(100));
        assert!(long.len() <= 63 && long.ends_with(|c: char| c.is_ascii_alphanumeric()), "{long:?}");
        assert_eq!(check_label_value(&long), Ok(()));
    }
}
