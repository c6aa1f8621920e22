//! Who may change a label: an operator, unless a cluster takes its machines by it.
//!
//! A deployer decides which machines become nodes. A node reads all declarations of its cluster, and a machine of the
//! control plane has the cluster. Where a cluster selects machines by a label and admits them automatically, setting
//! that label is the same decision. So the keys that a cluster's selector names need the role that creates clusters.
//!
//! The other terms of the selector and the kind of approval do not matter: hardware is reported later, and a person
//! who approves a machine relies on its labels.
//!
//! A credential for some providers makes no call about clusters. So it changes no such label with any role, and
//! does not learn the cluster and its selector.

use crate::access::{AccessRole, AccessScope};
use crate::label::Labels;
use crate::selector::Selector;

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

/// Checks that a person with this role and scope may replace the labels `present` of a machine by `new`. The error is a
/// sentence.
pub fn check_label_change(
    (role, scope): (AccessRole, &AccessScope),
    present: &Labels,
    new: &Labels,
    clusters: &[ClusterSelector],
) -> Result<(), String> {
    let is_fleet_wide = *scope == AccessScope::Fleet;
    if role >= REQUIRED && is_fleet_wide {
        return Ok(());
    }
    let changed = |one: &ClusterSelector| {
        let key = one.selector.label_keys().find(|&key| present.get(key) != new.get(key));
        key.map(str::to_owned)
    };
    let found = clusters.iter().find_map(|one| changed(one).map(|key| (one, key)));
    found.map_or(Ok(()), |(one, key)| {
        if !is_fleet_wide {
            return Err(format!(
                "a cluster takes machines by the label {key}, so only a {REQUIRED} for the whole fleet may change it; \
                 ask one. Nothing was changed"
            ));
        }
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
            ("par", "label.hall!=a,!label.spare"),
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
            // A term that excludes machines also decides which ones are left.
            (Operator, none, &[("hall", "a")], Some("par")),
            (Operator, &[("spare", "")], none, Some("par")),
            (Operator, seven, &[("rack", "7"), ("owner", "kim")], None),
            (Operator, seven, seven, None),
            // Other keys, although they look alike.
            (Operator, none, &[("racks", "7"), ("label.rack", "7"), ("Rack", "7")], None),
            (Deployer, none, seven, None),
            (Deployer, seven, none, None),
            (Admin, none, seven, None),
        ] {
            let caller = (role, &AccessScope::Fleet);
            let checked = check_label_change(caller, &labels(present), &labels(new), &clusters);
            assert_eq!(checked.is_err(), refused.is_some(), "{role} {present:?} {new:?}: {checked:?}");
            if let (Err(text), Some(cluster)) = (checked, refused) {
                assert!(
                    text.starts_with(&format!("the cluster {cluster} takes machines by the label ")),
                    "{text}"
                );
                assert!(text.contains("only a deployer may change it"), "{text}");
            }
            assert_eq!(check_label_change(caller, &labels(present), &labels(new), &clusters[..1]), Ok(()));
        }
    }

    #[test]
    fn credential_for_some_providers_changes_no_such_label_and_learns_no_cluster() {
        let scope = AccessScope::from_providers(["rack-a".to_owned()]);
        let cluster = ClusterSelector {
            cluster: "ams".to_owned(),
            selector: "location=ams,label.rack=7".parse().unwrap(),
        };
        for role in [AccessRole::Operator, AccessRole::Deployer, AccessRole::Admin] {
            let change = |new: &[(&str, &str)]| {
                check_label_change((role, &scope), &labels(&[]), &labels(new), std::slice::from_ref(&cluster))
            };
            let expected = "a cluster takes machines by the label rack, so only a deployer for the whole fleet may \
                            change it; ask one. Nothing was changed";
            assert_eq!(change(&[("rack", "7")]), Err(expected.to_owned()), "{role}");
            assert_eq!(change(&[("owner", "kim")]), Ok(()), "{role}");
        }
    }
}
