//! A curator of the model: it stands for election, and leads with the decisions of the product.
//!
//! What it reads and writes, and in which order, is what `service/` does; each read and write is a step, between which
//! others act, etcd goes away, or the machine loses its power.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use shepherd::curator::health::Heartbeats;
use shepherd::curator::membership::{Change as Disagreement, promotion, sync};
use shepherd::curator::node::Node;
use shepherd::curator::node_id::NodeId;
use shepherd::curator::roles::Step;
use shepherd::curator::service::chronicle::Chronicle;
use shepherd::curator::service::curator::{LEADER_TTL, SYNC_INTERVAL};
use shepherd::curator::service::failure::Failure;
use shepherd::curator::service::store::{Stored, StoredNodes, put_node};
use shepherd::etcd::guard::{Change, Expected, Guard, guarded_read, guarded_write, why_not};
use shepherd::etcd::key_space::{LEADER, NODES};
use shepherd::etcd::places::{Places, Standing, name_in, value_of};

use super::sim::Process;
use super::world::{Changing, World};

const LOOK: Duration = Duration::from_millis(400);
/// How often a decision is made anew, because records changed while it was being made.
const TRIES: u32 = 10;

/// One that runs.
pub(crate) struct Curator {
    pub(crate) process: Process,
    pub(crate) own: NodeId,
    pub(crate) standing: RefCell<Standing>,
    pub(crate) leading: RefCell<Option<Rc<Leading>>>,
}

/// One leadership.
pub(crate) struct Leading {
    pub(crate) world: World,
    pub(crate) machine: usize,
    pub(crate) own: NodeId,
    pub(crate) guard: Guard,
    pub(crate) since: Duration,
    pub(crate) heartbeats: RefCell<Heartbeats>,
    pub(crate) view: RefCell<Chronicle>,
    membership: Rc<Cell<bool>>,
    /// The revision of etcd that the view shows.
    seen: Cell<i64>,
}

/// Keeps others from changing members meanwhile.
pub(crate) struct Alone(
    Rc<Cell<bool>>,
    #[expect(dead_code, reason = "it is there as long as this is")] Changing,
);

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Leading {
    /// Reads a record as the leader.
    pub(crate) async fn read(&self, key: &str) -> Result<Option<(i64, Vec<u8>)>, Failure> {
        let asked = guarded_read(&self.world.namespace, &self.guard, key)?;
        let done = self.world.transact(self.machine, &asked, Some(&self.guard)).await?;
        if !done.succeeded {
            self.world.count("reads refused to a former leader");
            return Err(why_not(&self.guard, &[], &done.read).into());
        }
        Ok(done.read.into_iter().next().map(|record| (record.mod_revision, record.value)))
    }

    pub(crate) async fn node(&self, id: &NodeId) -> Result<Option<Stored<Node>>, Failure> {
        let key = Node::etcd_key(id)?;
        let read = self.read(&key).await?;
        let stored = read.map(|(revision, value)| {
            Ok::<_, Failure>(Stored { value: Node::decode(&key, &value)?, revision })
        });
        stored.transpose()
    }

    pub(crate) async fn nodes(&self) -> Result<StoredNodes, Failure> {
        let prefix = NODES.range().start;
        let mut nodes = StoredNodes::default();
        for record in self.world.ask(self.machine, |etcd, _| etcd.under(&prefix)).await? {
            let node = Node::decode(&record.key, &record.value)?;
            nodes.revisions.insert(node.id, record.mod_revision);
            nodes.nodes.insert(node.id, node);
        }
        Ok(nodes)
    }

    /// Makes all these changes or none.
    pub(crate) async fn write(&self, changes: &[Change]) -> Result<(), Failure> {
        let asked = guarded_write(&self.world.namespace, &self.guard, changes)?;
        let done = self.world.transact(self.machine, &asked, Some(&self.guard)).await?;
        if done.succeeded {
            return Ok(());
        }
        let failure = Failure::from(why_not(&self.guard, changes, &done.read));
        self.world.count(match failure {
            Failure::Lost(_) => "writes refused to a former leader",
            _ => "writes refused because a record changed",
        });
        Err(failure)
    }

    /// Reads, decides and writes: all of it anew where a record changed between the look at it and the write.
    pub(crate) async fn decide<T>(
        &self,
        attempt: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut tries = 1;
        loop {
            match attempt().await {
                Err(Failure::Changed(_)) if tries < TRIES => {
                    self.world.sim.step().await;
                    tries += 1;
                }
                answer => return answer,
            }
        }
    }

    pub(crate) async fn alone(&self) -> Alone {
        while self.membership.replace(true) {
            self.world.sim.sleep(Duration::from_millis(20)).await;
        }
        Alone(self.membership.clone(), self.world.begin_to_change())
    }

    /// One tick of making members and records agree.
    async fn agree(&self) -> Result<(), Failure> {
        let _alone = self.alone().await;
        let members = self.world.members(self.machine).await?;
        let stored = self.nodes().await?;
        let Ok(tick) = sync(self.own, &members, &stored.nodes) else {
            self.world.count("ticks aborted");
            return Ok(());
        };
        if !tick.withheld.is_empty() {
            self.world.count("removals withheld");
        }
        let Some(change) = tick.change else { return Ok(()) };
        self.world.note(format_args!("machine {}: settles {change:?}", self.machine));
        self.world.count("disagreements settled");
        if let Disagreement::RemoveMember { member, .. } = &change {
            self.world.change_members(self.machine, &Step::Remove { member: *member }).await?;
        }
        if let Some(changed) = change.record(&stored.nodes) {
            let revision = stored.revisions.get(&changed.id).copied();
            self.write(&[put_node(&changed, revision)?]).await?;
        }
        Ok(())
    }

    /// The view as etcd is now.
    fn follow(&self) {
        let state = self.world.look();
        if self.seen.replace(state.etcd.revision) == state.etcd.revision {
            return;
        }
        let nodes = state.nodes();
        let there: BTreeSet<NodeId> = nodes.iter().map(|node| node.id).collect();
        let mut view = self.view.borrow_mut();
        let gone: Vec<NodeId> = view.present().map(|node| node.id).filter(|id| !there.contains(id)).collect();
        for id in gone {
            view.delete(id);
        }
        for node in nodes {
            if view.get(&node.id).is_none_or(|before| **before != node) {
                view.put(node);
            }
        }
    }
}

fn election() -> String {
    LEADER.range().start.trim_end_matches('/').to_owned()
}

/// Starts a curator on a machine, in a process of its own that ends with whoever started it.
pub(crate) fn start(world: &World, machine: usize, own: NodeId) -> Rc<Curator> {
    let curator = Rc::new(Curator {
        process: world.sim.number(),
        own,
        standing: RefCell::new(Standing::Neither),
        leading: RefCell::new(None),
    });
    world.sim.spawn(curator.process, {
        let (world, curator) = (world.clone(), curator.clone());
        async move {
            loop {
                let ended = stand(&world, machine, &curator).await;
                *curator.standing.borrow_mut() = Standing::Neither;
                *curator.leading.borrow_mut() = None;
                if let Ok(lease) = ended {
                    let _ = world.ask(machine, |etcd, _| etcd.revoke(lease)).await;
                }
                world.sim.sleep(world.sim.between(200, 1500)).await;
            }
        }
    });
    world.sim.spawn(curator.process, {
        let (world, curator) = (world.clone(), curator.clone());
        async move {
            loop {
                world.sim.sleep(SYNC_INTERVAL).await;
                let leading = curator.leading.borrow().clone();
                if let Some(leading) = leading {
                    let _ = leading.agree().await;
                }
            }
        }
    });
    world.sim.spawn(curator.process, {
        let world = world.clone();
        async move {
            loop {
                world.sim.sleep(SYNC_INTERVAL).await;
                let _ = promote(&world, machine).await;
            }
        }
    });
    curator
}

/// Gives a learner its vote, where this machine's etcd leads the others.
async fn promote(world: &World, machine: usize) -> Result<(), Failure> {
    let prefix = NODES.range().start;
    let records = world.ask(machine, |etcd, _| etcd.under(&prefix)).await?;
    let nodes = records.iter().map(|record| {
        Node::decode(&record.key, &record.value).map(|node| (node.id, node)).map_err(Failure::from)
    });
    let nodes = nodes.collect::<Result<_, _>>()?;
    let (own, leader) = {
        let state = world.look();
        (state.machines[machine].member(), state.etcd.leader)
    };
    let (Some(own), Some(leader)) = (own, leader) else { return Ok(()) };
    let members = world.members(machine).await?;
    if let Some(learner) = promotion(own, leader, &members, &nodes) {
        world.promote(machine, learner).await?;
    }
    Ok(())
}

/// One round of the election; ends with the lease that it had.
async fn stand(world: &World, machine: usize, curator: &Rc<Curator>) -> Result<i64, Failure> {
    let (election, name) = (election(), curator.own.to_string());
    let prefix = format!("{election}/");
    let left = world
        .ask(machine, |etcd, _| {
            let keys = etcd.under(&prefix);
            let own = keys.into_iter().filter(|key| name_in(&key.value).as_deref() == Some(&*name));
            own.filter_map(|key| etcd.pairs.remove(&key.key)).count()
        })
        .await?;
    (0..left).for_each(|_| world.count("keys of a former life removed"));
    let asked_at = world.sim.now();
    let lease = i64::try_from(world.sim.number()).unwrap_or(i64::MAX);
    world.ask(machine, |etcd, now| etcd.grant(lease, LEADER_TTL, now)).await?;
    let own = {
        let key = format!("{election}/{lease:x}");
        let put =
            Change::Put { key: key.clone(), value: value_of(&name, LEADER_TTL), expected: Expected::Absent };
        // Guarded by its own absence alone.
        let mut asked = guarded_write(
            &world.namespace,
            &Guard { key: key.clone(), create_revision: 0 },
            std::slice::from_ref(&put),
        )?;
        for op in &mut asked.success {
            use shepherd::proto::etcdserverpb::request_op::Request;
            if let Some(Request::RequestPut(put)) = &mut op.request {
                put.lease = lease;
            }
        }
        let done = world.transact(machine, &asked, None).await?;
        Guard { key, create_revision: done.revision }
    };
    let mut places = Places::default();
    let (mut confirmed, mut asked_last) = (asked_at, asked_at);
    loop {
        world.sim.sleep(LOOK).await;
        let now = world.sim.now();
        if now >= confirmed + LEADER_TTL {
            world.count("leases that were not confirmed in time");
            return Ok(lease);
        }
        if now >= asked_last + LEADER_TTL / 3 {
            asked_last = now;
            match world.ask(machine, |etcd, now| etcd.keep_alive(lease, now)).await {
                Ok(true) => confirmed = now,
                Ok(false) => return Ok(lease),
                Err(_) => continue,
            }
        }
        let seen = world.look().has_quorum(machine);
        if seen {
            world.refresh(machine);
            let keys = world.look().etcd.under(&prefix);
            if !keys.iter().any(|key| key.key == own.key) {
                return Ok(lease);
            }
            places = Places::default();
            for key in keys {
                places.put(key.key, &key.value, key.create_revision);
            }
            places.complete = true;
        }
        let standing = places.standing(&own, seen);
        let leads = matches!(standing, Standing::Leader(_));
        *curator.standing.borrow_mut() = standing;
        let leading = curator.leading.borrow().clone();
        match leading {
            Some(leading) if leads && seen => leading.follow(),
            Some(_) if leads => {}
            None if leads => begin(world, machine, curator, &own),
            _ => *curator.leading.borrow_mut() = None,
        }
    }
}

fn begin(world: &World, machine: usize, curator: &Curator, guard: &Guard) {
    world.count("leaderships");
    world.note(format_args!("machine {machine} leads by {}", guard.create_revision));
    let since = world.sim.now();
    let leading = Leading {
        world: world.clone(),
        machine,
        own: curator.own,
        guard: guard.clone(),
        since,
        heartbeats: RefCell::new(Heartbeats::listening_since(since)),
        view: RefCell::default(),
        membership: Rc::default(),
        seen: Cell::new(-1),
    };
    leading.follow();
    *curator.leading.borrow_mut() = Some(Rc::new(leading));
}
