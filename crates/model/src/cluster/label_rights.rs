//! Who may change a label: an operator, unless a cluster takes its machines by it.
//!
//! A deployer decides which machines become nodes. A node reads all declarations of its cluster, and a machine of the
//! control plane has the cluster. Where a cluster selects machines by a label and admits them automatically, setting
//! that label is the same decision. So the keys that a cluster's selector names need the role that creates clusters.
//!
//! Neither the other terms of the selector nor the kind of approval matters: hardware is reported later, and a person
//! who approves a machine relies on its labels.

use crate::access::AccessRole;
use crate::cluster::selector::Selector;
use crate::label::Labels;

/// Least role that may change such a label.
const REQUIRED: AccessRole = AccessRole::Deployer;

/// A cluster with the selector of its machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterSelector {
    /// Name of the cluster.
    pub cluster: String,
    /// The machines that may be chosen for it.
    pub selector: Selector,
}

/// Checks that a person with this role may replace the labels `present` of a machine by `new`. The error is a sentence.
pub fn check_label_change(
    role: AccessRole,
    present: &Labels,
    new: &Labels,
    clusters: &[ClusterSelector],
) -> Result<(), String> {
    if role >= REQUIRED {
        return Ok(());
    }
    let changed = |one: &ClusterSelector| {
        let key = one.selector.label_keys().find(|&key| present.get(key) != new.get(key));
        key.map(str::to_owned)
    };
    let found = clusters.iter().find_map(|one| changed(one).map(|key| (one, key)));
    found.map_or(Ok(()), |(one, key)| {
        Err(format!(
            "the cluster {} takes machines by the label {key} (its selector is {}), so only a {REQUIRED} may change it; \
             ask one. Nothing was changed",
            one.cluster, one.selector
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn label_that_a_cluster_selects_by_is_the_deployers() {
        use AccessRole::{Admin, Deployer, Operator};
        let clusters: Vec<ClusterSelector> = [
            ("fra", ""),
            ("ams", "location=ams,label.rack=7,label.ready"),
            ("lon", "memory>=64GiB,label.rack=8"),
        ]
        .into_iter()
        .map(|(cluster, text)| ClusterSelector {
            cluster: cluster.to_owned(),
            selector: text.parse().unwrap(),
        })
        .collect();
        let (none, seven) = (&[][..], &[("rack", "7")][..]);
        for (role, present, new, refused) in [
            (Operator, none, &[("owner", "kim")][..], None),
            (Operator, none, seven, Some("ams")),
            (Operator, seven, none, Some("ams")),
            (Operator, seven, &[("rack", "8")], Some("ams")),
            // A value that no selector names takes the machine away from a cluster.
            (Operator, seven, &[("rack", "9")], Some("ams")),
            (Operator, none, &[("ready", "")], Some("ams")),
            (Operator, seven, &[("rack", "7"), ("owner", "kim")], None),
            (Operator, seven, seven, None),
            // Other keys, although they look alike.
            (Operator, none, &[("racks", "7"), ("label.rack", "7"), ("Rack", "7")], None),
            (Deployer, none, seven, None),
            (Deployer, seven, none, None),
            (Admin, none, seven, None),
        ] {
            let checked = check_label_change(role, &labels(present), &labels(new), &clusters);
            assert_eq!(checked.is_err(), refused.is_some(), "{role} {present:?} {new:?}: {checked:?}");
            if let (Err(text), Some(cluster)) = (checked, refused) {
                assert!(
                    text.starts_with(&format!("the cluster {cluster} takes machines by the label ")),
                    "{text}"
                );
                assert!(text.contains("only a deployer may change it"), "{text}");
            }
            assert_eq!(check_label_change(role, &labels(present), &labels(new), &clusters[..1]), Ok(()));
        }
    }
}
