//! Calls to the leading curator, and how it handles them: read, let the product decide, write.

use std::rc::Rc;

use shepherd::curator::node_lifecycle::{self, DeleteBypass, NodeRegistration, NodeUpdate};
use shepherd::curator::permissions::{authorize_call, authorize_node};
use shepherd::curator::role_orders::{self, NextStep, RoleOrder, plan_role_change};
use shepherd::curator::service::error::ServiceError;
use shepherd::curator::service::store::{Versioned, node_change, record_change};
use shepherd::curator::tickets::{self, Ticket, TicketSecret};
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::node::{Node, NodeState};
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::node_status::NodeStatus;
use shepherd::curator_client::peer_identity::Peer;
use shepherd::etcd::election_view::CandidateRole;
use shepherd::etcd::guard::{ExpectedRevision, KeyChange};
use shepherd::etcd::key_space::TICKETS;
use shepherd::proto::curator::v1 as wire;
use tonic::Code;

use super::curators::Leading;
use super::sim::OUTSIDE;
use super::world::{MACHINES, World};

/// How long a caller waits for the view.
const VIEW_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// The caller and its location.
#[derive(Clone)]
pub(crate) struct Caller {
    /// `None` is outside of all machines, and reaches each machine that has power.
    pub(crate) machine: Option<usize>,
    pub(crate) peer: Peer,
    /// Validity of the certificate that it shows.
    pub(crate) validity: Option<Validity>,
}

fn unavailable(sentence: &str) -> ServiceError {
    ServiceError::rejected(Code::Unavailable, sentence)
}

impl Caller {
    fn reaches(&self, world: &World, machine: usize) -> bool {
        let state = world.look();
        self.machine.map_or(state.machines[machine].power, |own| state.reaches(own, machine))
    }

    /// The leader that a random curator within reach names. It counts only if it also believes that it leads.
    fn leader(&self, world: &World) -> Option<Rc<Leading>> {
        let curators: Vec<_> = (0..MACHINES)
            .filter(|machine| self.reaches(world, *machine))
            .filter_map(|machine| world.look().machines[machine].curator.clone())
            .collect();
        let requested = curators.get(world.sim.below(curators.len().max(1)))?;
        let named = match &*requested.standing.borrow() {
            CandidateRole::Leader(_) => requested.own.to_string(),
            CandidateRole::Follower(leader) => leader.name.clone(),
            CandidateRole::Unknown => return None,
        };
        let found = curators.iter().find(|curator| curator.own.to_string() == named)?;
        found.leading.borrow().clone()
    }

    /// Makes a call. A failed call may have taken effect, too.
    pub(crate) async fn call<T>(
        &self,
        world: &World,
        method: &str,
        named: Option<NodeId>,
        handle: impl AsyncFnOnce(Rc<Leading>) -> Result<T, ServiceError>,
    ) -> Result<T, ServiceError> {
        world.sim.step().await;
        let leading = self.leader(world).ok_or_else(|| unavailable("nobody leads"))?;
        let shown = world.look().machines[leading.machine].disk.credentials;
        if !shown.is_some_and(|shown| shown.contains(world.time())) {
            return Err(unavailable("the leader's certificate is over"));
        }
        let row = authorize_call(&format!("/shepherd.curator.v1.{method}"), &self.peer, true)?;
        if let Some(named) = named {
            authorize_node(row, &self.peer, named)?;
        }
        self.prove(world, &leading).await?;
        let answer = handle(leading.clone()).await;
        world.sim.step().await;
        let still = {
            let state = world.look();
            let curator = state.machines[leading.machine].curator.as_ref();
            curator.is_some_and(|curator| {
                curator.leading.borrow().as_ref().is_some_and(|now| Rc::ptr_eq(now, &leading))
            })
        };
        if !still || !self.reaches(world, leading.machine) {
            world.count("answers of a leader lost");
            return Err(unavailable("the connection broke"));
        }
        if let Err(failure) = &answer
            && !matches!(failure.code(), Code::Unavailable)
        {
            world.count("calls refused");
        }
        answer
    }

    /// A node's certificate is accepted while it is valid and its record permits it.
    async fn prove(&self, world: &World, leading: &Leading) -> Result<(), ServiceError> {
        let Peer::Node { id, key, .. } = &self.peer else { return Ok(()) };
        let refused = |sentence: String| ServiceError::rejected(Code::Unauthenticated, sentence);
        if !self.validity.is_some_and(|validity| validity.contains(world.time())) {
            return Err(refused("the certificate is over".to_owned()));
        }
        let seen = leading.view.borrow().get(id).cloned();
        if node_lifecycle::check_credentials(seen.as_deref(), *id, key).is_err() {
            let now = leading.node(id).await?.map(|stored| stored.value);
            let holds = node_lifecycle::check_credentials(now.as_ref(), *id, key);
            holds.map_err(|error| refused(error.to_string()))?;
        }
        Ok(())
    }
}

/// Makes a call as an owner, who reaches all machines.
pub(crate) async fn as_owner<T>(
    world: &World,
    method: &str,
    named: Option<NodeId>,
    handle: impl AsyncFnOnce(Rc<Leading>) -> Result<T, ServiceError>,
) -> Result<T, ServiceError> {
    let serial = shepherd::curator_client::certificate::Serial::new([1; 16]);
    let peer = Peer::Owner { name: "kim".to_owned(), key: PublicKey([1; 32]), serial };
    Caller { machine: None, peer, validity: None }.call(world, method, named, handle).await
}

/// Response to a node that commits its registration.
pub(crate) enum Committed {
    Waiting,
    Membership(Validity),
}

impl Leading {
    /// Changes one node by a decision about its record alone.
    async fn alter(
        &self,
        id: NodeId,
        decide: impl Fn(Option<&Node>) -> Result<NodeUpdate, ServiceError>,
    ) -> Result<Node, ServiceError> {
        self.decide(async || {
            let known = self.node(&id).await?;
            let outcome = decide(known.as_ref().map(|known| &known.value))?;
            if let NodeUpdate::Changed(node) = &outcome {
                self.write(&[node_change(node, known.as_ref().map(|known| known.revision))?]).await?;
            }
            Ok(outcome.node().clone())
        })
        .await
    }

    pub(crate) async fn register(
        &self,
        key: PublicKey,
        secret: &TicketSecret,
    ) -> Result<NodeState, ServiceError> {
        let (ticket_key, id) = (TICKETS.key(secret.id())?, NodeId::from_key(&key));
        let registration = NodeRegistration {
            key,
            machine: None,
            labels: std::collections::BTreeMap::new(),
            ticket: secret.id(),
        };
        self.decide(async || {
            let now = self.world.time();
            let (revision, value) = self.read(&ticket_key).await?.ok_or(tickets::TicketError::Unknown)?;
            let ticket = Versioned { value: Ticket::decode(&ticket_key, &value)?, revision };
            let known = self.node(&id).await?;
            let registered =
                known.as_ref().is_some_and(|known| known.value.ticket == Some(registration.ticket));
            let redeemed = ticket.value.redeem(secret, id, registered, now)?;
            let outcome =
                node_lifecycle::register_node(known.as_ref().map(|known| &known.value), &registration, now)?;
            if let NodeUpdate::Changed(node) = &outcome {
                let changes = [
                    node_change(node, known.as_ref().map(|known| known.revision))?,
                    record_change(ticket_key.clone(), redeemed.encode(), Some(&ticket)),
                ];
                self.write(&changes).await?;
            }
            Ok(outcome.node().state)
        })
        .await
    }

    pub(crate) async fn commit(&self, key: PublicKey) -> Result<Committed, ServiceError> {
        let id = NodeId::from_key(&key);
        self.decide(async || {
            let known = self.node(&id).await?;
            let outcome = node_lifecycle::commit_node(
                known.as_ref().map(|known| &known.value),
                &key,
                false,
                self.world.time(),
            )?;
            let Some(outcome) = outcome else { return Ok(Committed::Waiting) };
            if let NodeUpdate::Changed(node) = &outcome {
                self.write(&[node_change(node, known.as_ref().map(|known| known.revision))?]).await?;
            }
            Ok(Committed::Membership(self.certificate()))
        })
        .await
    }

    fn certificate(&self) -> Validity {
        Validity::starting(self.world.time(), shepherd::curator_client::pki::NODE_LIFETIME)
    }

    pub(crate) async fn join(&self, key: PublicKey) -> Result<Validity, ServiceError> {
        let known = self.node(&NodeId::from_key(&key)).await?.map(|stored| stored.value);
        node_lifecycle::check_join(known.as_ref(), &key, false)?;
        Ok(self.certificate())
    }

    pub(crate) async fn peer_certificate(&self, key: PublicKey) -> Result<(), ServiceError> {
        let known = self.node(&NodeId::from_key(&key)).await?.map(|stored| stored.value);
        node_lifecycle::etcd_peer_address(known.as_ref(), &key, false)?;
        Ok(())
    }

    pub(crate) async fn report(
        &self,
        id: NodeId,
        node_status: &wire::NodeStatus,
    ) -> Result<(), ServiceError> {
        let status = NodeStatus::from_report(node_status, self.world.time())
            .map_err(ServiceError::invalid_argument)?;
        self.alter(id, |known| Ok(node_lifecycle::apply_status_report(known, id, &status)?)).await.map(drop)
    }

    pub(crate) fn heartbeat(&self, id: NodeId) {
        let now = self.world.sim.now();
        self.heartbeats.borrow_mut().record_heartbeat(id, now);
        self.world.change().last_heartbeats.insert((self.guard.create_revision, id), now);
    }

    pub(crate) async fn approve(&self, key: PublicKey) -> Result<(), ServiceError> {
        let id = NodeId::from_key(&key);
        let now = self.world.time();
        self.alter(id, |known| Ok(node_lifecycle::approve_node(known, &key, now)?)).await.map(drop)
    }

    pub(crate) async fn decommission(&self, id: NodeId) -> Result<(), ServiceError> {
        let now = self.world.time();
        {
            let _alone = self.alone().await;
            self.alter(id, |known| Ok(node_lifecycle::decommission_node(known, id, now)?)).await?;
        }
        self.until_seen(id).await
    }

    pub(crate) async fn update_roles(&self, id: NodeId, order: &RoleOrder) -> Result<(), ServiceError> {
        let _alone = self.alone().await;
        self.decide(async || {
            let mut members = self.world.members(self.machine).await?;
            let stored = self.nodes().await?;
            let node = stored.nodes.get(&id).ok_or(node_lifecycle::LifecycleError::Unknown(id))?;
            let declared = super::operators::declared();
            let plan =
                plan_role_change(node, order, &members, &stored.nodes, &declared).inspect_err(|refusal| {
                    if matches!(refusal, role_orders::RoleOrderError::Quorum { .. }) {
                        self.world.count("removals refused for the quorum");
                    }
                })?;
            let mut made = false;
            let changed = loop {
                match plan.next_step(made, node, &members, &stored.nodes)? {
                    NextStep::ChangeMembers(step) => {
                        self.world.change_members(self.machine, &step).await?;
                        members = self.world.members(self.machine).await?;
                        made = true;
                    }
                    NextStep::WriteRecord(changed) => break *changed,
                }
            };
            if changed != *node {
                self.write(&[node_change(&changed, stored.revisions.get(&id).copied())?]).await?;
                self.world.count("roles changed");
            }
            Ok(())
        })
        .await
    }

    pub(crate) async fn delete(&self, id: NodeId, bypass: DeleteBypass) -> Result<(), ServiceError> {
        {
            let _alone = self.alone().await;
            self.decide(async || {
                let members = self.world.members(self.machine).await?;
                let stored = self.nodes().await?;
                let step = node_lifecycle::plan_node_deletion(
                    stored.nodes.get(&id),
                    id,
                    bypass,
                    &members,
                    &stored.nodes,
                )?;
                if let Some(step) = step {
                    self.world.change_members(self.machine, &step).await?;
                }
                let expected = stored
                    .revisions
                    .get(&id)
                    .map_or(ExpectedRevision::Absent, |at| ExpectedRevision::At(*at));
                self.write(&[KeyChange::Delete { key: Node::etcd_key(&id)?, expected }]).await
            })
            .await?;
        }
        self.world.count("nodes deleted");
        self.until_seen(id).await
    }

    /// Waits until the view shows that a node is no longer part of the cluster.
    async fn until_seen(&self, id: NodeId) -> Result<(), ServiceError> {
        let end = self.world.sim.now() + VIEW_LIMIT;
        while self.view.borrow().get(&id).is_some_and(|node| node.state == NodeState::Up) {
            if self.world.sim.now() > end {
                return Err(unavailable("it is not seen yet"));
            }
            self.world.sim.sleep(std::time::Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Makes a ticket.
    pub(crate) async fn create_ticket(&self, secret: &TicketSecret) -> Result<(), ServiceError> {
        let wanted = tickets::TicketRequest {
            created_by: "kim".to_owned(),
            lifetime: std::time::Duration::from_hours(24),
            uses: None,
            purpose: String::new(),
        };
        let ticket = Ticket::new(secret, wanted, self.world.time())?;
        self.write(&[record_change::<()>(TICKETS.key(secret.id())?, ticket.encode(), None)]).await
    }
}

/// Moves the work of a call into a process of its own, so that it continues when the caller is gone.
pub(crate) fn outside(world: &World, task: impl Future<Output = ()> + 'static) {
    world.sim.spawn(OUTSIDE, task);
}
