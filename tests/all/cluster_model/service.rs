//! Calls to whoever leads, and what is done with them: read, decide by the product, write.

use std::rc::Rc;

use shepherd::curator::life_cycle::{self, Bypass, Outcome, Registration};
use shepherd::curator::node::{Node, State, Status};
use shepherd::curator::node_id::{NodeId, PublicKey};
use shepherd::curator::peer::Peer;
use shepherd::curator::permissions::{authorise, may_act_on};
use shepherd::curator::pki::Validity;
use shepherd::curator::roles::{self, Next, Order, evaluate};
use shepherd::curator::service::failure::Failure;
use shepherd::curator::service::store::{Stored, put, put_node};
use shepherd::curator::tickets::{self, Secret, Ticket};
use shepherd::etcd::guard::{Change, Expected};
use shepherd::etcd::key_space::TICKETS;
use shepherd::etcd::places::Standing;
use shepherd::proto::curator::v1 as wire;
use tonic::Code;

use super::curators::Leading;
use super::sim::OUTSIDE;
use super::world::{MACHINES, World};

/// How long a view is waited for.
const VIEW_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// Who calls, from where.
#[derive(Clone)]
pub(crate) struct Caller {
    /// None is outside of all machines, and reaches each that has power.
    pub(crate) machine: Option<usize>,
    pub(crate) peer: Peer,
    /// Until when what it shows is good.
    pub(crate) validity: Option<Validity>,
}

fn unavailable(sentence: &str) -> Failure {
    Failure::refused(Code::Unavailable, sentence)
}

impl Caller {
    fn reaches(&self, world: &World, machine: usize) -> bool {
        let state = world.look();
        self.machine.map_or(state.machines[machine].power, |own| state.reaches(own, machine))
    }

    /// Who leads, as whichever curator answers says; that one only if it says so itself.
    fn leader(&self, world: &World) -> Option<Rc<Leading>> {
        let curators: Vec<_> = (0..MACHINES)
            .filter(|machine| self.reaches(world, *machine))
            .filter_map(|machine| world.look().machines[machine].curator.clone())
            .collect();
        let asked = curators.get(world.sim.below(curators.len().max(1)))?;
        let named = match &*asked.standing.borrow() {
            Standing::Leader(_) => asked.own.to_string(),
            Standing::Follower(leader) => leader.name.clone(),
            Standing::Neither => return None,
        };
        let found = curators.iter().find(|curator| curator.own.to_string() == named)?;
        found.leading.borrow().clone()
    }

    /// Makes a call. What fails may have been done all the same.
    pub(crate) async fn call<T>(
        &self,
        world: &World,
        method: &str,
        named: Option<NodeId>,
        handle: impl AsyncFnOnce(Rc<Leading>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        world.sim.step().await;
        let leading = self.leader(world).ok_or_else(|| unavailable("nobody leads"))?;
        let shown = world.look().machines[leading.machine].disk.credentials;
        if !shown.is_some_and(|shown| shown.holds_at(world.time())) {
            return Err(unavailable("the leader's certificate is over"));
        }
        let row = authorise(&format!("/shepherd.curator.v1.{method}"), &self.peer, true)?;
        if let Some(named) = named {
            may_act_on(row, &self.peer, named)?;
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

    /// A node's certificate is good for as long as it says, and as long as its record holds.
    async fn prove(&self, world: &World, leading: &Leading) -> Result<(), Failure> {
        let Peer::Node { id, key, .. } = &self.peer else { return Ok(()) };
        let refused = |sentence: String| Failure::refused(Code::Unauthenticated, sentence);
        if !self.validity.is_some_and(|validity| validity.holds_at(world.time())) {
            return Err(refused("the certificate is over".to_owned()));
        }
        let seen = leading.view.borrow().get(id).cloned();
        if life_cycle::credentials_hold(seen.as_deref(), *id, key).is_err() {
            let now = leading.node(id).await?.map(|stored| stored.value);
            let holds = life_cycle::credentials_hold(now.as_ref(), *id, key);
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
    handle: impl AsyncFnOnce(Rc<Leading>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let serial = shepherd::curator::pki::Serial::new([1; 16]);
    let peer = Peer::Owner { name: "kim".to_owned(), key: PublicKey([1; 32]), serial };
    Caller { machine: None, peer, validity: None }.call(world, method, named, handle).await
}

/// What a node is told when it becomes one.
pub(crate) enum Committed {
    Waiting,
    Membership(Validity),
}

impl Leading {
    /// Changes one node by a decision about its record alone.
    async fn alter(
        &self,
        id: NodeId,
        decide: impl Fn(Option<&Node>) -> Result<Outcome, Failure>,
    ) -> Result<Node, Failure> {
        self.decide(async || {
            let known = self.node(&id).await?;
            let outcome = decide(known.as_ref().map(|known| &known.value))?;
            if let Outcome::Changed(node) = &outcome {
                self.write(&[put_node(node, known.as_ref().map(|known| known.revision))?]).await?;
            }
            Ok(outcome.node().clone())
        })
        .await
    }

    pub(crate) async fn register(&self, key: PublicKey, secret: &Secret) -> Result<State, Failure> {
        let (ticket_key, id) = (TICKETS.key(secret.id())?, NodeId::of(&key));
        let asked = Registration {
            key,
            machine: None,
            labels: std::collections::BTreeMap::new(),
            ticket: secret.id(),
        };
        self.decide(async || {
            let now = self.world.time();
            let (revision, value) = self.read(&ticket_key).await?.ok_or(tickets::Refusal::Unknown)?;
            let ticket = Stored { value: Ticket::decode(&ticket_key, &value)?, revision };
            let known = self.node(&id).await?;
            let registered = known.as_ref().is_some_and(|known| known.value.ticket == Some(asked.ticket));
            let redeemed = ticket.value.redeem(secret, id, registered, now)?;
            let outcome = life_cycle::register(known.as_ref().map(|known| &known.value), &asked, now)?;
            if let Outcome::Changed(node) = &outcome {
                let changes = [
                    put_node(node, known.as_ref().map(|known| known.revision))?,
                    put(ticket_key.clone(), redeemed.encode(), Some(&ticket)),
                ];
                self.write(&changes).await?;
            }
            Ok(outcome.node().state)
        })
        .await
    }

    pub(crate) async fn commit(&self, key: PublicKey) -> Result<Committed, Failure> {
        let id = NodeId::of(&key);
        self.decide(async || {
            let known = self.node(&id).await?;
            let outcome =
                life_cycle::commit(known.as_ref().map(|known| &known.value), &key, false, self.world.time())?;
            let Some(outcome) = outcome else { return Ok(Committed::Waiting) };
            if let Outcome::Changed(node) = &outcome {
                self.write(&[put_node(node, known.as_ref().map(|known| known.revision))?]).await?;
            }
            Ok(Committed::Membership(self.certificate()))
        })
        .await
    }

    fn certificate(&self) -> Validity {
        Validity::starting(self.world.time(), shepherd::curator::pki::NODE_LIFETIME)
    }

    pub(crate) async fn join(&self, key: PublicKey) -> Result<Validity, Failure> {
        let known = self.node(&NodeId::of(&key)).await?.map(|stored| stored.value);
        life_cycle::join(known.as_ref(), &key, false)?;
        Ok(self.certificate())
    }

    pub(crate) async fn peer_certificate(&self, key: PublicKey) -> Result<(), Failure> {
        let known = self.node(&NodeId::of(&key)).await?.map(|stored| stored.value);
        life_cycle::peer(known.as_ref(), &key, false)?;
        Ok(())
    }

    pub(crate) async fn report(&self, id: NodeId, said: &wire::NodeStatus) -> Result<(), Failure> {
        let status = Status::from_report(said, self.world.time()).map_err(Failure::invalid)?;
        self.alter(id, |known| Ok(life_cycle::report(known, id, &status)?)).await.map(drop)
    }

    pub(crate) fn heartbeat(&self, id: NodeId) {
        let now = self.world.sim.now();
        self.heartbeats.borrow_mut().hear(id, now);
        self.world.change().heard.insert((self.guard.create_revision, id), now);
    }

    pub(crate) async fn approve(&self, key: PublicKey) -> Result<(), Failure> {
        let id = NodeId::of(&key);
        let now = self.world.time();
        self.alter(id, |known| Ok(life_cycle::approve(known, &key, now)?)).await.map(drop)
    }

    pub(crate) async fn decommission(&self, id: NodeId) -> Result<(), Failure> {
        let now = self.world.time();
        {
            let _alone = self.alone().await;
            self.alter(id, |known| Ok(life_cycle::decommission(known, id, now)?)).await?;
        }
        self.until_seen(id).await
    }

    pub(crate) async fn update_roles(&self, id: NodeId, order: &Order) -> Result<(), Failure> {
        let _alone = self.alone().await;
        self.decide(async || {
            let mut members = self.world.members(self.machine).await?;
            let stored = self.nodes().await?;
            let node = stored.nodes.get(&id).ok_or(life_cycle::Refusal::Unknown(id))?;
            let declared = super::operators::declared();
            let plan = evaluate(node, order, &members, &stored.nodes, &declared).inspect_err(|refusal| {
                if matches!(refusal, roles::Refusal::Quorum { .. }) {
                    self.world.count("removals refused for the quorum");
                }
            })?;
            let mut made = false;
            let changed = loop {
                match plan.next(made, node, &members, &stored.nodes)? {
                    Next::Membership(step) => {
                        self.world.change_members(self.machine, &step).await?;
                        members = self.world.members(self.machine).await?;
                        made = true;
                    }
                    Next::Record(changed) => break *changed,
                }
            };
            if changed != *node {
                self.write(&[put_node(&changed, stored.revisions.get(&id).copied())?]).await?;
                self.world.count("roles changed");
            }
            Ok(())
        })
        .await
    }

    pub(crate) async fn delete(&self, id: NodeId, bypass: Bypass) -> Result<(), Failure> {
        {
            let _alone = self.alone().await;
            self.decide(async || {
                let members = self.world.members(self.machine).await?;
                let stored = self.nodes().await?;
                let step = life_cycle::delete(stored.nodes.get(&id), id, bypass, &members, &stored.nodes)?;
                if let Some(step) = step {
                    self.world.change_members(self.machine, &step).await?;
                }
                let expected = stored.revisions.get(&id).map_or(Expected::Absent, |at| Expected::At(*at));
                self.write(&[Change::Delete { key: Node::etcd_key(&id)?, expected }]).await
            })
            .await?;
        }
        self.world.count("nodes deleted");
        self.until_seen(id).await
    }

    /// Waits until the view shows that a node is no part of the cluster any more.
    async fn until_seen(&self, id: NodeId) -> Result<(), Failure> {
        let end = self.world.sim.now() + VIEW_LIMIT;
        while self.view.borrow().get(&id).is_some_and(|node| node.state == State::Up) {
            if self.world.sim.now() > end {
                return Err(unavailable("it is not seen yet"));
            }
            self.world.sim.sleep(std::time::Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Makes a ticket.
    pub(crate) async fn create_ticket(&self, secret: &Secret) -> Result<(), Failure> {
        let wanted = tickets::Wanted {
            created_by: "kim".to_owned(),
            lifetime: std::time::Duration::from_hours(24),
            uses: None,
            purpose: String::new(),
        };
        let ticket = Ticket::new(secret, wanted, self.world.time())?;
        self.write(&[put::<()>(TICKETS.key(secret.id())?, ticket.encode(), None)]).await
    }
}

/// Cuts what a call does into a process of nobody, so that it goes on when the caller is gone.
pub(crate) fn outside(world: &World, task: impl Future<Output = ()> + 'static) {
    world.sim.spawn(OUTSIDE, task);
}
