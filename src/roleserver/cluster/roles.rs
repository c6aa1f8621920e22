//! What this node is to do: from its disk first, and from the curator then.
//!
//! What stands on the disk lets a node that comes back run its part of the control plane before there is a curator to
//! ask, which is the only way in which a cluster comes back that was off as a whole. It is older than whatever a curator
//! says, and never stands against that. A node that was deleted is told so, and does nothing from then on.

use std::collections::BTreeMap;

use crate::curator::node::{ConsensusMember, Node, Roles};
use crate::curator::node_id::NodeId;
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::node_event::Event;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::{Files, Membership};
use crate::roleserver::cluster::services::kept::write_declarations;
use crate::roleserver::cluster::services::wanted::{About, Declared};
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::outcome::Stop;

/// The runnable. Its child follows the curator, and may fail as often as it likes: roles from the disk are said once in
/// each life of the parent.
#[must_use]
pub fn roles(files: Files, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            if facts.roles.latest().is_none()
                && let Some(roles) = last_known(files.roles(), files.membership().ok().flatten().as_ref())
            {
                tracing::info!(roles = ?roles.names(), "what this node was last to do");
                facts.roles.set(roles);
            }
            starting.start("follow", follow(files, facts))?;
            Err(starting.healthy().scope().cancelled().await.into())
        }
    })
}

/// What the node was last to do. One that has lost the file and carries a membership of etcd goes on with that: where it
/// is the only member, nobody else could ever tell it.
///
/// `roles` and `membership` are what stands on the disk, none also of a file that is damaged.
#[must_use]
pub fn last_known(roles: Option<Roles>, membership: Option<&Membership>) -> Option<Roles> {
    roles.or_else(|| {
        let member = membership?.member?;
        tracing::warn!("what this node is to do is lost; it goes on as the member of etcd that it was");
        let role = ConsensusMember { member, peers: BTreeMap::new() };
        Some(Roles { consensus_member: Some(role), ..Roles::default() })
    })
}

/// What an event of the curator says that the node `own` is to do; none where it says nothing. The error is a sentence.
pub fn ordered(own: NodeId, event: Option<wire::NodeEvent>) -> Result<Option<Roles>, String> {
    match event.and_then(|event| event.event) {
        Some(Event::Present(node)) => {
            let node = Node::from_wire(node, None)?;
            if node.id != own {
                return Err(format!("the curator speaks of {}, which is another node", node.id));
            }
            Ok(Some(node.roles))
        }
        Some(Event::Deleted(id)) if id == own.to_string() => Ok(Some(Roles::default())),
        _ => Ok(None),
    }
}

/// What its record says of a node besides what it is to do.
fn about(node: &wire::Node) -> About {
    About { machine: node.machine_id.clone(), labels: node.labels.clone().into_iter().collect() }
}

fn follow(files: Files, facts: Facts) -> Runnable {
    Runnable::new(move |starting: Starting| {
        let (files, facts) = (files.clone(), facts.clone());
        async move {
            let scope = starting.scope().clone();
            let connection = scope.until_cancelled(facts.connection.watch().next()).await?;
            let mut nodes = NodesClient::new(connection.curators.channel());
            let asked = wire::WatchRequest { node_id: connection.id.to_string() };
            let failed = |status: tonic::Status| {
                Stop::because(format!("following what this node is to do ended: {}", status.message()))
            };
            let mut told = scope.until_cancelled(nodes.watch(asked)).await?.map_err(failed)?.into_inner();
            let _healthy = starting.healthy();
            loop {
                let event = scope.until_cancelled(told.message()).await?.map_err(failed)?;
                let event = event.ok_or_else(|| Stop::because("following what this node is to do ended"))?;
                let event = event.event;
                let (about, deleted) = match &event {
                    Some(wire::NodeEvent { event: Some(Event::Present(node)) }) => (Some(about(node)), false),
                    Some(wire::NodeEvent { event: Some(Event::Deleted(_)) }) => (None, true),
                    _ => (None, false),
                };
                let now = ordered(connection.id, event).map_err(Stop::because)?;
                let Some(now) = now else { continue };
                if let Some(about) = about
                    && facts.about.latest().as_ref() != Some(&about)
                {
                    facts.about.set(about);
                }
                if deleted {
                    tracing::warn!("this node was deleted from its cluster, and does nothing from now on");
                    // Nobody will ever tell it what to run again.
                    write_declarations(&files, &Declared::new())?;
                    facts.declarations.set(Declared::new());
                }
                // The file may be lost, and what followed from the membership instead be just what is said.
                if files.roles().as_ref() != Some(&now) {
                    files.write_roles(&now)?;
                }
                if facts.roles.latest().as_ref() != Some(&now) {
                    tracing::info!(roles = ?now.names(), "what this node is to do has changed");
                    facts.roles.set(now);
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::{member, up};
    use crate::curator::node_id::tests::node_id;

    fn told(event: Event) -> Result<Option<Roles>, String> {
        ordered(node_id(1), Some(wire::NodeEvent { event: Some(event) }))
    }

    #[test]
    fn node_does_what_it_is_told_of_itself_and_nothing_once_it_is_deleted() {
        let own = node_id(1);
        let roles = told(Event::Present(member(1).to_wire())).unwrap();
        assert_eq!(roles, Some(member(1).roles));
        let of_another = told(Event::Present(up(2).to_wire()));
        assert!(of_another.unwrap_err().contains("another node"));
        assert_eq!(told(Event::Deleted(own.to_string())), Ok(Some(Roles::default())));
        assert_eq!(told(Event::Deleted(node_id(2).to_string())), Ok(None));
        assert_eq!(
            ordered(own, None),
            Ok(None),
            "nothing was said, which is not that there is nothing to do"
        );
    }

    #[test]
    fn roles_that_are_lost_are_those_of_the_membership_that_is_carried_out() {
        let carried_out = |member| Membership {
            member,
            data: "x".to_owned(),
            address: "10.0.0.1".parse().unwrap(),
            initial_cluster: String::new(),
            new_cluster: false,
            epoch: 0,
        };
        let number = |roles: Option<Roles>| roles.map(|roles| roles.consensus_member.map(|role| role.member));
        assert_eq!(number(last_known(None, Some(&carried_out(Some(7))))), Some(Some(7)));
        assert_eq!(number(last_known(None, Some(&carried_out(None)))), None);
        assert_eq!(last_known(None, None), None);
        // What is there is what counts, also that it is nothing.
        assert_eq!(number(last_known(Some(Roles::default()), Some(&carried_out(Some(7))))), Some(None));
    }
}
