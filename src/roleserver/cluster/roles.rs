//! What this node is to do: from its disk first, and from the curator then.
//!
//! What stands on the disk lets a node that comes back run its part of the control plane before there is a curator to
//! ask, which is the only way in which a cluster comes back that was off as a whole. It is older than whatever a curator
//! says, and never stands against that. A node that was deleted is told so, and does nothing from then on.

use std::collections::BTreeMap;

use crate::curator::node::{ConsensusMember, Node, Roles};
use crate::proto::curator::v1 as wire;
use crate::proto::curator::v1::node_event::Event;
use crate::proto::curator::v1::nodes_client::NodesClient;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
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
                && let Some(roles) = last_known(&files)
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
fn last_known(files: &Files) -> Option<Roles> {
    files.roles().or_else(|| {
        let member = files.membership().ok().flatten()?.member?;
        tracing::warn!("what this node is to do is lost; it goes on as the member of etcd that it was");
        let role = ConsensusMember { member, peers: BTreeMap::new() };
        Some(Roles { consensus_member: Some(role), ..Roles::default() })
    })
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
                let now = match event.event.and_then(|event| event.event) {
                    Some(Event::Present(node)) => {
                        let node = Node::from_wire(node, None).map_err(Stop::because)?;
                        if node.id != connection.id {
                            return Err(Stop::because(format!(
                                "the curator speaks of {}, which is another node",
                                node.id
                            )));
                        }
                        let machine = node.machine.map(|machine| machine.to_string()).unwrap_or_default();
                        let about = About { machine, labels: node.labels };
                        if facts.about.latest().as_ref() != Some(&about) {
                            facts.about.set(about);
                        }
                        node.roles
                    }
                    Some(Event::Deleted(id)) if id == connection.id.to_string() => {
                        tracing::warn!(
                            "this node was deleted from its cluster, and does nothing from now on"
                        );
                        // Nobody will ever tell it what to run again.
                        write_declarations(&files, &Declared::new())?;
                        facts.declarations.set(Declared::new());
                        Roles::default()
                    }
                    _ => continue,
                };
                if facts.roles.latest().as_ref() != Some(&now) {
                    tracing::info!(roles = ?now.names(), "what this node is to do has changed");
                    files.write_roles(&now)?;
                    facts.roles.set(now);
                }
            }
        }
    })
}
