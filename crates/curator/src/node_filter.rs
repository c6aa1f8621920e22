//! Filters for listing nodes.
//!
//! A node is listed if it matches every filter. Filters are parsed before any node is read, so a list is either
//! rejected or correct: a filter that matched nothing because of a misspelt role would look like an empty cluster.

use std::collections::BTreeSet;

use curator_client::node::{Node, NodeState};
use model::ids::MachineId;
use model::label::LabelFilter;
use model::node_role::NodeRole;
use proto::curator::v1 as wire;

use crate::node_health::NodeHealth;

/// The filters of one list; an empty one matches all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct NodeFilter {
    states: BTreeSet<NodeState>,
    roles: BTreeSet<NodeRole>,
    labels: Vec<LabelFilter>,
    health: BTreeSet<wire::node_health::Kind>,
    machine: Option<MachineId>,
}

impl NodeFilter {
    /// Parses the filters of a request; the error names the field.
    pub(crate) fn new(request: &wire::ListNodesRequest) -> Result<Self, String> {
        let states = request.states.iter().map(|state| NodeState::from_wire(*state));
        let states = states.collect::<Result<_, _>>().map_err(|fault| format!("states: {fault}"))?;
        let roles = request.roles.iter().map(|role| role.parse());
        let roles = roles.collect::<Result<_, _>>().map_err(|error| format!("roles: {error}"))?;
        let labels = request.labels.iter().map(|label| LabelFilter::parse(label));
        let labels = labels.collect::<Result<_, _>>().map_err(|fault| format!("labels: {fault}"))?;
        let verdict = |kind: &i32| {
            wire::node_health::Kind::try_from(*kind)
                .ok()
                .filter(|kind| *kind != wire::node_health::Kind::Unspecified)
                .ok_or_else(|| format!("health: {kind} is no verdict"))
        };
        let machine = match request.machine_id.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                let shown: String = text.chars().take(100).collect();
                format!("machine_id: {shown:?} is no UUID")
            })?),
        };
        let health = request.health.iter().map(verdict).collect::<Result<_, _>>()?;
        Ok(Self { states, roles, labels, health, machine })
    }

    /// Whether the node, with this health, is listed.
    #[must_use]
    pub(crate) fn matches(&self, node: &Node, health: NodeHealth) -> bool {
        (self.states.is_empty() || self.states.contains(&node.state))
            && self.roles.is_subset(&node.roles.names())
            && self.labels.iter().all(|wanted| wanted.matches(&node.labels))
            && (self.health.is_empty() || self.health.contains(&health.to_wire().kind()))
            && self.machine.is_none_or(|machine| node.machine == Some(machine))
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::member;
    use model::label::Labels;

    use super::*;

    const MACHINE: &str = "11111111-1111-4111-8111-111111111111";

    fn node() -> Node {
        let mut node = member(1);
        node.roles.kubernetes_worker = true;
        node.labels = Labels::from([("row".to_owned(), "7".to_owned())]);
        node.machine = Some(MACHINE.parse().unwrap());
        node
    }

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn node_matches_when_every_criterion_matches() {
        use wire::NodeState::{Standby, Up};
        use wire::node_health::Kind;
        let any = wire::ListNodesRequest::default;
        let states = |states: &[wire::NodeState]| states.iter().map(|state| (*state).into()).collect();
        let kinds = |kinds: &[Kind]| kinds.iter().map(|kind| (*kind).into()).collect();
        for (request, shows) in [
            (any(), true),
            (wire::ListNodesRequest { states: states(&[Standby, Up]), ..any() }, true),
            (wire::ListNodesRequest { states: states(&[Standby]), ..any() }, false),
            (
                wire::ListNodesRequest { roles: texts(&["consensus-member", "kubernetes-worker"]), ..any() },
                true,
            ),
            (wire::ListNodesRequest { roles: texts(&["consensus-member", "web"]), ..any() }, false),
            (wire::ListNodesRequest { labels: texts(&["row", "row=7"]), ..any() }, true),
            (wire::ListNodesRequest { labels: texts(&["row=7", "rack"]), ..any() }, false),
            (wire::ListNodesRequest { health: kinds(&[Kind::Healthy, Kind::Unknown]), ..any() }, true),
            (wire::ListNodesRequest { health: kinds(&[Kind::HeartbeatTimeout]), ..any() }, false),
            (wire::ListNodesRequest { machine_id: MACHINE.to_owned(), ..any() }, true),
            (wire::ListNodesRequest { machine_id: MACHINE.replace('1', "2"), ..any() }, false),
            (wire::ListNodesRequest { labels: texts(&["row=8"]), states: states(&[Up]), ..any() }, false),
        ] {
            assert_eq!(
                NodeFilter::new(&request).unwrap().matches(&node(), NodeHealth::Unknown),
                shows,
                "{request:?}"
            );
        }
    }

    #[test]
    fn invalid_filter_error_names_its_field() {
        let any = wire::ListNodesRequest::default;
        for (field, request) in [
            ("states", wire::ListNodesRequest { states: vec![0], ..any() }),
            ("states", wire::ListNodesRequest { states: vec![99], ..any() }),
            ("roles", wire::ListNodesRequest { roles: texts(&["Web"]), ..any() }),
            ("labels", wire::ListNodesRequest { labels: texts(&["a b"]), ..any() }),
            ("health", wire::ListNodesRequest { health: vec![0], ..any() }),
            ("machine_id", wire::ListNodesRequest { machine_id: "7".to_owned(), ..any() }),
        ] {
            let error = NodeFilter::new(&request).unwrap_err();
            assert!(error.starts_with(field), "{field}: {error}");
        }
    }
}
