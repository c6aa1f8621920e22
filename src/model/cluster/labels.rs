//! What a machine's node is labelled with when it joins its cluster: where it stands, which part it has, and what of its
//! hardware people choose by. Nothing decides by these labels here; in Kubernetes they are the node's below
//! `label.shepherd/`.
//!
//! They are of the day on which the machine joined, and stay so where hardware is replaced later.
//!
//! What makers call themselves and their products has blanks and commas, which a label may not have, here or in Kubernetes:
//! a dash stands for each run of those (`Dell-Inc`, `PowerEdge-R640`).

use crate::model::cluster::hardware::Hardware;
use crate::model::cluster::spec::Part;
use crate::model::label::{Labels, check_value};

/// The labels of a machine's node; what is not known is left out, and so is a location that cannot be a label: it decides
/// nothing, and said otherwise it would be another place.
#[must_use]
pub fn labels(part: Part, location: Option<&str>, hardware: &Hardware) -> Labels {
    let name = |name: &Option<String>| name.as_deref().map(as_label).filter(|name| !name.is_empty());
    let location = location.filter(|location| check_value(location).is_ok());
    let all = [
        ("location", location.map(str::to_owned)),
        ("part", Some(part.as_str().to_owned())),
        ("manufacturer", name(&hardware.manufacturer)),
        ("product", name(&hardware.product)),
        ("memory-gib", hardware.memory.map(|bytes| gibibytes(bytes).to_string())),
        ("cpus", hardware.cpus.map(|threads| threads.to_string())),
    ];
    all.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

/// The nearest whole number: what firmware keeps for itself does not make 63 of 64.
const fn gibibytes(bytes: u64) -> u64 {
    bytes.saturating_add(1 << 29) >> 30
}

/// What of a name a label can say.
fn as_label(name: &str) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_');
    let words: Vec<&str> = name.split(|c| !fits(c)).filter(|word| !word.is_empty()).collect();
    let outer = |c: char| !c.is_ascii_alphanumeric();
    let said: String = words.join("-").chars().take(63).collect();
    said.trim_matches(outer).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(labels: &Labels) -> Vec<(&str, &str)> {
        labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    #[test]
    fn what_is_known_is_said_and_nothing_else() {
        let hardware = Hardware {
            manufacturer: Some("Dell Inc.".to_owned()),
            product: Some("PowerEdge R640".to_owned()),
            memory: Some((64 << 30) - (300 << 20)),
            cpus: Some(32),
        };
        assert_eq!(
            pairs(&labels(Part::Worker, Some("ams-1/r7"), &hardware)),
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
            pairs(&labels(Part::ControlPlane, Some("hall 3"), &Hardware::default())),
            [("part", "control-plane")]
        );
    }

    #[test]
    fn every_name_becomes_a_label_or_none() {
        for (name, said) in [
            ("QEMU", "QEMU"),
            ("  Standard PC (Q35 + ICH9, 2009) ", "Standard-PC-Q35-ICH9-2009"),
            ("To Be Filled By O.E.M.", "To-Be-Filled-By-O.E.M"),
            ("--_--", ""),
            ("", ""),
            ("机器", ""),
        ] {
            assert_eq!(as_label(name), said, "{name:?}");
        }
        let long = as_label(&"ab ".repeat(100));
        assert!(long.len() <= 63 && long.ends_with(|c: char| c.is_ascii_alphanumeric()), "{long:?}");
        assert_eq!(check_value(&long), Ok(()));
    }
}
