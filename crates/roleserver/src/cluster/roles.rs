//! Watch the roles that the curator assigns to this node, starting from the stored ones.
//!
//! With the stored roles, a node that comes back runs its part of the control plane before it can reach a curator. This
//! is the only way for a cluster to come back that was completely off. The stored roles are older than anything from a
//! curator, and never override it. A node that was deleted is notified, and runs nothing from then on.

use std::collections::BTreeMap;

use curator_client::node::{ConsensusMember, Node, NodeRoles};
use curator_client::node_id::NodeId;
use curator_client::status_text::describe_status;
use proto::curator::v1 as wire;
use proto::curator::v1::node_event::Event;
use proto::curator::v1::nodes_client::NodesClient;
use supervisor::context::{Runnable, Starting};
use supervisor::exit_reason::RunnableError;

use crate::cluster::files::{ClusterFiles, ClusterFilesError, EtcdMembership};
use crate::cluster::node_facts::NodeFacts;
use crate::cluster::services::desired::{DeclarationMap, NodeInfo, REFUSED_DECLARATIONS, RetainedRoles};
use crate::cluster::services::persisted::write_declarations;

/// Makes the runnable. Its child watches the curator and may be restarted often; the stored roles are published only
/// once, if there are no others.
#[must_use]
pub fn watch_roles(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            if facts.roles.latest().is_none()
                && let Some(roles) =
                    restore_roles(files.read_roles(), files.read_membership().ok().flatten().as_ref())
            {
                tracing::info!(roles = ?roles.names(), "this node starts with its stored roles");
                facts.roles.set(roles);
            }
            starting.start("follow", follow_roles(files, facts))?;
            Err(starting.mark_healthy().scope().cancelled().await.into())
        }
    })
}

/// The last known roles. A node that lost the file and still has an etcd membership goes on as that member: if it is
/// the only one, no curator could ever tell it its roles.
///
/// `roles` and `membership` are the stored ones; `None` also for a damaged file.
#[must_use]
pub fn restore_roles(roles: Option<NodeRoles>, membership: Option<&EtcdMembership>) -> Option<NodeRoles> {
    roles.or_else(|| {
        let member = membership?.member?;
        tracing::warn!("the stored roles of this node are lost; it continues as the etcd member that it was");
        let role = ConsensusMember { member_id: member, peers: BTreeMap::new() };
        Some(NodeRoles { consensus_member: Some(role), ..NodeRoles::default() })
    })
}

/// The roles of the node `own` in an event of the curator; `None` if the event contains none. The error is a sentence.
pub fn roles_from_event(own: NodeId, event: Option<wire::NodeEvent>) -> Result<Option<NodeRoles>, String> {
    match event.and_then(|event| event.event) {
        Some(Event::Present(node)) => {
            let node = Node::from_wire(node, None)?;
            if node.id != own {
                return Err(format!("the curator sent the record of another node, {}", node.id));
            }
            Ok(Some(node.roles))
        }
        Some(Event::Deleted(id)) if id == own.to_string() => Ok(Some(NodeRoles::default())),
        _ => Ok(None),
    }
}

/// Machine and labels in a node's record.
fn node_info(node: &wire::Node) -> NodeInfo {
    NodeInfo { machine: node.machine_id.clone(), labels: node.labels.clone().into_iter().collect() }
}

/// Forgets the declarations of a node that was deleted, with those that it refused: no curator will send it any again.
fn forget_declarations(files: &ClusterFiles, facts: &NodeFacts) -> Result<(), ClusterFilesError> {
    write_declarations(files, &DeclarationMap::new(), &RetainedRoles::new())?;
    facts.host_findings.set(REFUSED_DECLARATIONS, Vec::new());
    facts.retained_roles.set(RetainedRoles::new());
    facts.declarations.set(DeclarationMap::new());
    Ok(())
}

fn follow_roles(files: ClusterFiles, facts: NodeFacts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut nodes = NodesClient::new(connection.curators.channel());
            let request = wire::WatchRequest { node_id: connection.id.to_string() };
            let failed = |status: tonic::Status| {
                let why = describe_status(&status);
                RunnableError::msg(format!("the watch of this node's roles ended: {why}"))
            };
            let mut streaming =
                scope.until_cancelled(nodes.watch(request)).await?.map_err(failed)?.into_inner();
            let _healthy = starting.mark_healthy();
            loop {
                let event = scope.until_cancelled(streaming.message()).await?.map_err(failed)?;
                let event =
                    event.ok_or_else(|| RunnableError::msg("the watch of this node's roles ended"))?;
                let event = event.event;
                let (about, deleted) = match &event {
                    Some(wire::NodeEvent { event: Some(Event::Present(node)) }) => {
                        (Some(node_info(node)), false)
                    }
                    Some(wire::NodeEvent { event: Some(Event::Deleted(_)) }) => (None, true),
                    _ => (None, false),
                };
                let now = roles_from_event(connection.id, event).map_err(RunnableError::msg)?;
                let Some(now) = now else { continue };
                if let Some(about) = about
                    && facts.node_info.latest().as_ref() != Some(&about)
                {
                    facts.node_info.set(about);
                }
                if deleted {
                    tracing::warn!("this node was deleted from its cluster; it stops what it ran for it");
                    forget_declarations(&files, &facts)?;
                }
                // Compare with the file and not only with the cell: the file may be lost while the restored roles equal
                // the new ones.
                if files.read_roles().as_ref() != Some(&now) {
                    files.write_roles(&now)?;
                }
                if facts.roles.latest().as_ref() != Some(&now) {
                    tracing::info!(roles = ?now.names(), "the roles of this node have changed");
                    facts.roles.set(now);
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{member, node_id, up};
    use model::host_finding::{HostFinding, HostFindingKind};

    use super::*;
    use crate::cluster::files::tests::{files, membership};
    use crate::cluster::services::persisted::read_declarations;

    fn roles_from(event: Event) -> Result<Option<NodeRoles>, String> {
        roles_from_event(node_id(1), Some(wire::NodeEvent { event: Some(event) }))
    }

    #[test]
    fn node_takes_its_own_roles_and_none_once_it_is_deleted() {
        let own = node_id(1);
        let roles = roles_from(Event::Present(member(1).to_wire())).unwrap();
        assert_eq!(roles, Some(member(1).roles));
        let of_another = roles_from(Event::Present(up(2).to_wire()));
        assert!(of_another.unwrap_err().contains("another node"));
        assert_eq!(roles_from(Event::Deleted(own.to_string())), Ok(Some(NodeRoles::default())));
        assert_eq!(roles_from(Event::Deleted(node_id(2).to_string())), Ok(None));
        assert_eq!(
            roles_from_event(own, None),
            Ok(None),
            "an empty event differs from an event without roles"
        );
    }

    #[test]
    fn deleted_node_forgets_its_declarations_and_what_it_refused() {
        let ((_directory, files), facts) = (files(), NodeFacts::default());
        let kind = HostFindingKind::DeclarationRefused;
        facts.host_findings.set(REFUSED_DECLARATIONS, vec![HostFinding { kind, message: "web".to_owned() }]);
        facts.retained_roles.set(RetainedRoles::from(["web".to_owned()]));
        forget_declarations(&files, &facts).unwrap();
        assert_eq!(facts.host_findings.collect(), [], "a role that it does not have is an issue for good");
        let none = (DeclarationMap::new(), RetainedRoles::new());
        assert_eq!(facts.declarations.latest().zip(facts.retained_roles.latest()), Some(none.clone()));
        assert_eq!(read_declarations(&files), Some(none));
    }

    #[test]
    fn lost_roles_are_restored_from_the_etcd_membership() {
        let carried_out = |member| EtcdMembership { member, ..membership() };
        let number =
            |roles: Option<NodeRoles>| roles.map(|roles| roles.consensus_member.map(|role| role.member_id));
        assert_eq!(number(restore_roles(None, Some(&carried_out(Some(7))))), Some(Some(7)));
        assert_eq!(number(restore_roles(None, Some(&carried_out(None)))), None);
        assert_eq!(restore_roles(None, None), None);
        // The stored roles count, even if they are empty.
        assert_eq!(
            number(restore_roles(Some(NodeRoles::default()), Some(&carried_out(Some(7))))),
            Some(None)
        );
    }
}
