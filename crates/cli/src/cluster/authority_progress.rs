//! How far the replacement of a cluster's authority is, for `cluster describe` and for `--wait` of
//! `cluster rotate-authority`.

use std::fmt::Write as _;

use crate::cluster::view::{AuthorityRotationView, ClusterMachineView, ClusterView};
use model::cluster::authority_rotation::RotationKind;
use model::humanize::humanize_duration;
use model::time::{Timestamp, between};

/// Nodes that a line of `--wait` names.
const MAX_NAMED_NODES: usize = 3;

/// How far the replacement of a cluster's authority is, in one line without a duration. `None` if none is ordered or under
/// way.
pub(crate) fn describe_progress(cluster: &ClusterView) -> Option<String> {
    let rotation = cluster.authority_rotation.as_ref()?;
    Some(format_progress(rotation, &cluster.machines, &cluster.wait_reasons))
}

fn format_progress(
    rotation: &AuthorityRotationView,
    machines: &[ClusterMachineView],
    wait_reasons: &[String],
) -> String {
    let Some(stage) = &rotation.stage else {
        let mut text = "the replacement has not begun".to_owned();
        for reason in wait_reasons {
            let _ = write!(text, "; {reason}");
        }
        return text;
    };
    let mut text = stage_text(stage).to_owned();
    for (number, wait) in rotation.waits_for.iter().take(MAX_NAMED_NODES).enumerate() {
        let begin = if number == 0 { "; waits for " } else { ", " };
        let _ = write!(text, "{begin}{} ({})", node_name(&wait.node, machines), wait.reason);
    }
    let others = rotation.waits_for.len().saturating_sub(MAX_NAMED_NODES);
    if others > 0 {
        let _ = write!(text, ", and {others} other nodes");
    }
    text
}

/// Lines about the replacement for `cluster describe`: the title and the text of each. A node has a line here unless
/// the line of its machine shows the same.
pub(super) fn authority_lines(cluster: &ClusterView, now: Timestamp) -> Vec<(&'static str, String)> {
    let rotation = cluster.authority_rotation.as_ref();
    rotation.map(|rotation| format_rotation(rotation, &cluster.machines, now)).unwrap_or_default()
}

fn format_rotation(
    rotation: &AuthorityRotationView,
    machines: &[ClusterMachineView],
    now: Timestamp,
) -> Vec<(&'static str, String)> {
    let mut text = match &rotation.stage {
        Some(stage) => format!("being replaced: {}", stage_text(stage)),
        None => "to be replaced".to_owned(),
    };
    if let Some(since) = rotation.since {
        let _ = write!(text, ", for {}", humanize_duration(between(since, now)));
    }
    if let Some(by) = &rotation.ordered_by {
        let _ = write!(text, "; as {by} ordered");
    }
    if rotation.kind.as_deref() == Some(RotationKind::Compromised.as_str()) {
        text.push_str(", because it is compromised");
    }
    let shown = |node: &str, reason: &str| {
        let is_it =
            |machine: &&ClusterMachineView| machine.node.as_deref() == Some(node) || machine.name == node;
        let machine = machines.iter().find(is_it);
        let wait = machine.and_then(|machine| machine.wait_reason.as_ref());
        wait.is_some_and(|wait| wait.contains(reason))
    };
    let nodes = rotation.waits_for.iter().filter(|wait| !shown(&wait.node, &wait.reason));
    let nodes =
        nodes.map(|wait| ("waits for", format!("{}: {}", node_name(&wait.node, machines), wait.reason)));
    [("authority", text)].into_iter().chain(nodes).collect()
}

/// What a stage means.
fn stage_text(stage: &str) -> &str {
    match stage {
        "trusted" => "the new authority is accepted, the old one signs",
        "signing" => "the new authority signs, the old one is still accepted",
        "dropping" => "the new authority signs, nodes reject the old one, and etcd restarts without it",
        "accepting" => "after a theft: etcd restarts, and accepts certificates of the new authority, too",
        "showing" => "after a theft: members of etcd show certificates of the new authority",
        "rejecting" => "after a theft: etcd restarts, and rejects certificates of the old authority",
        "closing" => "after a theft: the curators stop until the new authority is in etcd",
        "installing" => {
            "after a theft: the control plane puts the new authority into etcd, and trusts it alone"
        }
        "following" => {
            "after a theft: all other machines trust the new authority alone once they have its order"
        }
        other => other,
    }
}

/// The machine of a node, as people know it; the node's id if it is none of the cluster's machines.
fn node_name<'t>(node: &'t str, machines: &'t [ClusterMachineView]) -> &'t str {
    let machine = machines.iter().find(|machine| machine.node.as_deref() == Some(node));
    machine.map_or(node, |machine| machine.name.as_str())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use model::cluster::authority_rotation::AuthorityWait;
    use model::time::after;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + second, 0).unwrap()
    }

    fn machine(name: &str, node: &str, wait_reason: Option<&str>) -> ClusterMachineView {
        ClusterMachineView {
            machine: "1".to_owned(),
            name: name.to_owned(),
            part: "worker".to_owned(),
            location: None,
            phase: "Ready".to_owned(),
            node: Some(node.to_owned()),
            state: None,
            health: None,
            roles: Vec::new(),
            leave_reason: None,
            wait_reason: wait_reason.map(str::to_owned),
            services: Vec::new(),
            kubernetes: None,
        }
    }

    fn rotation(stage: Option<&str>, nodes: &[&str]) -> AuthorityRotationView {
        let wait = |node: &&str| AuthorityWait { node: (*node).to_owned(), reason: "it is slow".to_owned() };
        AuthorityRotationView {
            kind: Some("planned".to_owned()),
            ordered_at: Some(at(0)),
            ordered_by: Some("kim".to_owned()),
            stage: stage.map(str::to_owned),
            since: stage.map(|_| at(60)),
            waits_for: nodes.iter().map(wait).collect(),
        }
    }

    #[test]
    fn progress_names_the_nodes_that_are_waited_for() {
        let machines = [machine("rack-1", "node-1", None)];
        for (rotation, expected) in [
            (rotation(None, &[]), "the replacement has not begun; its curators are silent"),
            (rotation(Some("trusted"), &[]), "the new authority is accepted, the old one signs"),
            (
                rotation(Some("signing"), &["node-1", "node-2"]),
                "the new authority signs, the old one is still accepted; waits for rack-1 (it is slow), \
                 node-2 (it is slow)",
            ),
            (
                rotation(Some("later"), &["a", "b", "c", "d", "e"]),
                "later; waits for a (it is slow), b (it is slow), c (it is slow), and 2 other nodes",
            ),
        ] {
            let text = format_progress(&rotation, &machines, &["its curators are silent".to_owned()]);
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn description_has_one_line_for_each_node() {
        let now = after(at(60), Duration::from_mins(2));
        let machines = [
            machine("rack-1", "node-1", Some("the replacement of the authority waits for it: it is slow")),
            machine("rack-2", "node-2", Some("it learns")),
        ];
        let lines = format_rotation(&rotation(Some("dropping"), &["node-1", "node-2", "x"]), &machines, now);
        let lines: Vec<String> = lines.into_iter().map(|(title, text)| format!("{title}: {text}")).collect();
        assert_eq!(
            lines,
            [
                "authority: being replaced: the new authority signs, nodes reject the old one, and etcd restarts \
                 without it, for 2m; as kim ordered",
                "waits for: rack-2: it is slow",
                "waits for: x: it is slow",
            ]
        );
        let stolen = AuthorityRotationView { kind: Some("compromised".to_owned()), ..rotation(None, &[]) };
        let lines = format_rotation(&stolen, &[], now);
        assert_eq!(lines[0].1, "to be replaced; as kim ordered, because it is compromised");
    }
}
