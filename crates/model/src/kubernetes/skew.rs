//! Version skew policy: which versions may run together.
//!
//! The rules are Kubernetes' own (<https://kubernetes.io/releases/version-skew-policy/>), as far as they concern
//! bundles, of which each node runs one as a whole:
//!
//! * API servers of one cluster have one minor version, or two consecutive ones. So no minor is skipped, not even with
//!   a single API server: what it stored is converted from one minor to the next.
//! * A kubelet, and the proxy beside it, is never newer than any API server, and at most three minors older.
//! * The controller manager and the scheduler are never newer than their API server, and at most one minor older. They
//!   use the API server of their own node, which is from the same bundle.
//!
//! One more rule is ours: only a rollback leads to an older version. An older API server may be unable to read what a
//! newer one has stored. Only for the version that ran just before is it known that it could read the data just before.

use crate::kubernetes::version::ReleaseVersion;

/// How many minors a kubelet may be older than an API server.
pub const MAX_KUBELET_SKEW: u32 = 3;
/// The first version for which that holds; before it, one minor fewer was allowed.
const WIDE_SKEW_SINCE: ReleaseVersion = ReleaseVersion::new(1, 28, 0);

/// A node and the version that it runs or has to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeVersion {
    /// Name of the node, for people.
    pub name: String,
    /// Whether it runs an API server.
    pub controller: bool,
    /// Version of its bundle.
    pub version: ReleaseVersion,
}

/// Checks that a cluster with these nodes and the desired version `from` may change to `to`; the error lists all
/// objections, one sentence each.
pub fn check_upgrade_path(
    nodes: &[NodeVersion],
    from: ReleaseVersion,
    to: ReleaseVersion,
) -> Result<(), Vec<String>> {
    let mut messages = Vec::new();
    if to.major != from.major {
        messages.push(format!(
            "{from} and {to} are of two major versions; no version policy permits a change between them"
        ));
    } else if to < from {
        messages.push(format!(
            "{to} is older than {from}, which the cluster runs: an older version may not be able to read what a newer one \
             stored; to return to the version that ran before, use --rollback"
        ));
    } else if to.minor > from.minor + 1 {
        messages.push(format!(
            "from {from} to {to} minor versions would be skipped; upgrade to a {}.{} first",
            from.major,
            from.minor + 1
        ));
    }
    if messages.is_empty() {
        messages.extend(skew_violations(nodes, to));
    }
    if messages.is_empty() { Ok(()) } else { Err(messages) }
}

/// Reasons why API servers of `to` may not run beside these nodes, one sentence each. Rollbacks are checked as well.
#[must_use]
pub fn skew_violations(nodes: &[NodeVersion], to: ReleaseVersion) -> Vec<String> {
    nodes
        .iter()
        .filter_map(|node| if node.controller { check_controller(node, to) } else { check_worker(node, to) })
        .collect()
}

fn check_controller(node: &NodeVersion, to: ReleaseVersion) -> Option<String> {
    let (version, name) = (node.version, &node.name);
    (version.major != to.major || version.minor.abs_diff(to.minor) > 1).then(|| {
        format!(
            "{name} runs an API server of {version}, and beside one of {to} it would be more than one minor version apart"
        )
    })
}

fn check_worker(node: &NodeVersion, to: ReleaseVersion) -> Option<String> {
    let (version, name) = (node.version, &node.name);
    let allowed = if to < WIDE_SKEW_SINCE { MAX_KUBELET_SKEW - 1 } else { MAX_KUBELET_SKEW };
    if version.major != to.major || version.minor > to.minor {
        // This happens in a rollback: workers go first, and this one has not gone yet.
        return Some(format!(
            "{name} runs a kubelet of {version}, which would be newer than an API server of {to}"
        ));
    }
    (to.minor - version.minor > allowed).then(|| {
        format!(
            "{name} runs a kubelet of {version}, and an API server of {to} serves those at most {allowed} minor versions older; \
             upgrade the node first"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> ReleaseVersion {
        text.parse().unwrap()
    }

    fn node_versions(nodes: &[(&str, &str)]) -> Vec<NodeVersion> {
        let node = |(name, runs): &(&str, &str)| NodeVersion {
            name: (*name).to_owned(),
            controller: name.starts_with('c'),
            version: version(runs),
        };
        nodes.iter().map(node).collect()
    }

    #[test]
    fn upgrade_path_follows_the_skew_policy() {
        for (from, to, expected) in [
            ("1.30.1", "1.30.1", ""),
            ("1.30.1", "1.30.9", ""),
            ("1.30.1", "1.31.0", ""),
            (
                "1.30.1",
                "1.32.0",
                "from 1.30.1 to 1.32.0 minor versions would be skipped; upgrade to a 1.31 first",
            ),
            ("1.30.1", "2.0.0", "1.30.1 and 2.0.0 are of two major versions"),
            ("1.31.0", "1.30.9", "1.30.9 is older than 1.31.0"),
            ("1.30.2", "1.30.1", "1.30.1 is older than 1.30.2"),
        ] {
            let text =
                check_upgrade_path(&[], version(from), version(to)).err().unwrap_or_default().join("; ");
            assert!(
                text.starts_with(expected) && text.is_empty() == expected.is_empty(),
                "{from} {to}: {text}"
            );
        }
    }

    #[test]
    fn node_versions_can_block_an_upgrade() {
        for (nodes, to, expected) in [
            (&[("c1", "1.30.1"), ("w1", "1.28.0")][..], "1.31.0", ""),
            (
                &[("c1", "1.30.1"), ("w1", "1.27.0")],
                "1.31.0",
                "w1 runs a kubelet of 1.27.0, and an API server of 1.31.0",
            ),
            (&[("w1", "1.24.0")], "1.27.0", "w1 runs a kubelet of 1.24.0"),
            (&[("w1", "1.25.0")], "1.27.0", ""),
            (&[("c1", "1.29.3")], "1.31.0", "c1 runs an API server of 1.29.3"),
            // Half of a rollback: one worker still has to go back.
            (
                &[("c1", "1.31.0"), ("w1", "1.31.0")],
                "1.30.1",
                "w1 runs a kubelet of 1.31.0, which would be newer",
            ),
            (&[("c1", "1.31.0"), ("w1", "1.30.1")], "1.30.1", ""),
        ] {
            let text = skew_violations(&node_versions(nodes), version(to)).join("; ");
            assert!(
                text.starts_with(expected) && text.is_empty() == expected.is_empty(),
                "{nodes:?} {to}: {text}"
            );
        }
        let result = check_upgrade_path(
            &node_versions(&[("w1", "1.26.0"), ("w2", "1.25.0")]),
            version("1.30.1"),
            version("1.30.2"),
        );
        assert_eq!(result.unwrap_err().len(), 2, "the error names all of them");
    }
}
