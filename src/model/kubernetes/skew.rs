//! Which versions of Kubernetes may run beside each other in one cluster, and so which way an upgrade may go.
//!
//! The rules are those of Kubernetes' own policy (<https://kubernetes.io/releases/version-skew-policy/>), as far as they bear
//! on bundles, of which each node runs one as a whole:
//!
//! * API servers of one cluster are of one minor version or of two that follow each other. So no minor is skipped, not even
//!   where there is only one API server: what it stored is converted from one minor to the next.
//! * A kubelet, and the proxy beside it, is never newer than any API server, and at most three minors older.
//! * The controller manager and the scheduler are never newer than an API server that they ask, and at most one minor older.
//!   They ask the one of their own node, which is of the same bundle.
//!
//! Beside it stands a rule of ours: an older version than now is come to by a rollback alone. What a newer API server has
//! stored an older one may not be able to read; that it could be read just before is known only of what ran just before.

use crate::model::kubernetes::version::Version;

/// How many minors a kubelet may be older than an API server.
pub const KUBELET_MINORS: u32 = 3;
/// The first minor of which that is so; before, it was one fewer.
const SINCE: Version = Version::new(1, 28, 0);

/// What a node runs, or is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Its name, for people.
    pub name: String,
    /// Whether it runs an API server.
    pub controller: bool,
    /// Of which version.
    pub version: Version,
}

/// Whether a cluster of which each node runs this, and which is to be of `from`, may become `to`; if not, all that is in the
/// way, sentences.
pub fn may_upgrade(nodes: &[Runs], from: Version, to: Version) -> Result<(), Vec<String>> {
    let mut said = Vec::new();
    if to.major != from.major {
        said.push(format!(
            "{from} and {to} are of two major versions; no policy says that they can follow each other"
        ));
    } else if to < from {
        said.push(format!(
            "{to} is older than {from}, which the cluster runs: an older version may not be able to read what a newer one \
             stored; back to what ran before leads --rollback"
        ));
    } else if to.minor > from.minor + 1 {
        said.push(format!(
            "from {from} to {to} minor versions would be skipped; upgrade to a {}.{} first",
            from.major,
            from.minor + 1
        ));
    }
    if said.is_empty() {
        said.extend(beside(nodes, to));
    }
    if said.is_empty() { Ok(()) } else { Err(said) }
}

/// Whether API servers of `to` may run beside what nodes run; sentences where not. This is asked of a rollback as well.
#[must_use]
pub fn beside(nodes: &[Runs], to: Version) -> Vec<String> {
    nodes
        .iter()
        .filter_map(|node| if node.controller { controller(node, to) } else { worker(node, to) })
        .collect()
}

fn controller(node: &Runs, to: Version) -> Option<String> {
    let (version, name) = (node.version, &node.name);
    (version.major != to.major || version.minor.abs_diff(to.minor) > 1).then(|| {
        format!(
            "{name} runs an API server of {version}, and beside one of {to} it would be more than one minor version apart"
        )
    })
}

fn worker(node: &Runs, to: Version) -> Option<String> {
    let (version, name) = (node.version, &node.name);
    let allowed = if to < SINCE { KUBELET_MINORS - 1 } else { KUBELET_MINORS };
    if version.major != to.major || version.minor > to.minor {
        // Of a rollback: workers go first, so it is told where they have not.
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

    fn version(text: &str) -> Version {
        text.parse().unwrap()
    }

    fn runs(nodes: &[(&str, &str)]) -> Vec<Runs> {
        let node = |(name, runs): &(&str, &str)| Runs {
            name: (*name).to_owned(),
            controller: name.starts_with('c'),
            version: version(runs),
        };
        nodes.iter().map(node).collect()
    }

    #[test]
    fn way_of_an_upgrade_follows_the_policy() {
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
            let said = may_upgrade(&[], version(from), version(to)).err().unwrap_or_default().join("; ");
            assert!(
                said.starts_with(expected) && said.is_empty() == expected.is_empty(),
                "{from} {to}: {said}"
            );
        }
    }

    #[test]
    fn what_nodes_run_may_be_in_the_way() {
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
            // Half-way back: a worker that has not gone yet.
            (
                &[("c1", "1.31.0"), ("w1", "1.31.0")],
                "1.30.1",
                "w1 runs a kubelet of 1.31.0, which would be newer",
            ),
            (&[("c1", "1.31.0"), ("w1", "1.30.1")], "1.30.1", ""),
        ] {
            let said = beside(&runs(nodes), version(to)).join("; ");
            assert!(
                said.starts_with(expected) && said.is_empty() == expected.is_empty(),
                "{nodes:?} {to}: {said}"
            );
        }
        let told =
            may_upgrade(&runs(&[("w1", "1.26.0"), ("w2", "1.25.0")]), version("1.30.1"), version("1.30.2"));
        assert_eq!(told.unwrap_err().len(), 2, "all of them are told");
    }
}
