//! A curator of the model: it takes part in the election, and leads with the decisions of the product.
//!
//! What it reads and writes, and in which order, is the same as in `service/`. Each read and write is a step, and
//! between two steps other tasks act, etcd becomes unavailable, or the machine loses its power.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use shepherd::curator::membership::{SyncAction as Disagreement, learner_to_promote, plan_sync};
use shepherd::curator::node_health::HeartbeatTracker;
use shepherd::curator::role_orders::MemberChange;
use shepherd::curator::service::curator_server::{LEADER_TTL, SYNC_INTERVAL};
use shepherd::curator::service::error::ServiceError;
use shepherd::curator::service::node_watch_cache::NodeCache;
use shepherd::curator::service::store::{StoredNodes, Versioned, node_change};
use shepherd::curator_client::node::Node;
use shepherd::curator_client::node_id::NodeId;
use shepherd::etcd::election_view::{CandidateRole, ElectionView, candidate_name, encode_candidate};
use shepherd::etcd::guard::{
    ExpectedRevision, KeyChange, LeaderGuard, explain_failed_write, guarded_read_request,
    guarded_write_request,
};
use shepherd::etcd::key_space::{LEADER, NODES};

use super::sim::Process;
use super::world::{Changing, World};

const LOOK: Duration = Duration::from_millis(400);
/// How often a decision is retried because records changed while it was being made.
const TRIES: u32 = 10;

/// A running curator.
pub(crate) struct Curator {
    pub(crate) process: Process,
    pub(crate) own: NodeId,
    pub(crate) standing: RefCell<CandidateRole>,
    pub(crate) leading: RefCell<Option<Rc<Leading>>>,
}

/// The state of one leadership.
pub(crate) struct Leading {
    pub(crate) world: World,
    pub(crate) machine: usize,
    pub(crate) own: NodeId,
    pub(crate) guard: LeaderGuard,
    pub(crate) since: Duration,
    pub(crate) heartbeats: RefCell<HeartbeatTracker>,
    pub(crate) view: RefCell<NodeCache>,
    membership: Rc<Cell<bool>>,
    /// The revision of etcd that the view shows.
    seen: Cell<i64>,
}

/// While this exists, no other task changes members.
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
    pub(crate) async fn read(&self, key: &str) -> Result<Option<(i64, Vec<u8>)>, ServiceError> {
        let request = guarded_read_request(&self.world.namespace, &self.guard, key)?;
        let done = self.world.transact(self.machine, &request, Some(&self.guard)).await?;
        if !done.succeeded {
            self.world.count("reads refused to a former leader");
            return Err(explain_failed_write(&self.guard, &[], &done.read).into());
        }
        Ok(done.read.into_iter().next().map(|record| (record.mod_revision, record.value)))
    }

    pub(crate) async fn node(&self, id: &NodeId) -> Result<Option<Versioned<Node>>, ServiceError> {
        let key = Node::etcd_key(id)?;
        let read = self.read(&key).await?;
        let stored = read.map(|(revision, value)| {
            Ok::<_, ServiceError>(Versioned { value: Node::decode(&key, &value)?, revision })
        });
        stored.transpose()
    }

    pub(crate) async fn nodes(&self) -> Result<StoredNodes, ServiceError> {
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
    pub(crate) async fn write(&self, changes: &[KeyChange]) -> Result<(), ServiceError> {
        let request = guarded_write_request(&self.world.namespace, &self.guard, changes)?;
        let done = self.world.transact(self.machine, &request, Some(&self.guard)).await?;
        if done.succeeded {
            return Ok(());
        }
        let failure = ServiceError::from(explain_failed_write(&self.guard, changes, &done.read));
        self.world.count(match failure {
            ServiceError::LostLeadership(_) => "writes refused to a former leader",
            _ => "writes refused because a record changed",
        });
        Err(failure)
    }

    /// Reads, decides and writes. Retries all three if a record changed between the read and the write.
    pub(crate) async fn decide<T>(
        &self,
        attempt: impl AsyncFn() -> Result<T, ServiceError>,
    ) -> Result<T, ServiceError> {
        let mut tries = 1;
        loop {
            match attempt().await {
                Err(ServiceError::Conflict(_)) if tries < TRIES => {
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
    async fn agree(&self) -> Result<(), ServiceError> {
        let _alone = self.alone().await;
        let members = self.world.members(self.machine).await?;
        let stored = self.nodes().await?;
        let Ok(tick) = plan_sync(self.own, &members, &stored.nodes, &BTreeSet::new()) else {
            self.world.count("ticks aborted");
            return Ok(());
        };
        if !tick.blocked.is_empty() {
            self.world.count("removals withheld");
        }
        let Some(change) = tick.action else { return Ok(()) };
        self.world.note(format_args!("machine {}: settles {change:?}", self.machine));
        self.world.count("disagreements settled");
        if let Disagreement::RemoveMember { member, .. } = &change {
            self.world.change_members(self.machine, &MemberChange::RemoveMember { member: *member }).await?;
        }
        if let Some(changed) = change.updated_record(&stored.nodes) {
            let revision = stored.revisions.get(&changed.id).copied();
            self.write(&[node_change(&changed, revision)?]).await?;
        }
        Ok(())
    }

    /// Updates the view to etcd's present state.
    fn follow(&self) {
        let state = self.world.look();
        if self.seen.replace(state.etcd.revision) == state.etcd.revision {
            return;
        }
        let nodes = state.nodes();
        let there: BTreeSet<NodeId> = nodes.iter().map(|node| node.id).collect();
        let mut view = self.view.borrow_mut();
        let gone: Vec<NodeId> = view.nodes().map(|node| node.id).filter(|id| !there.contains(id)).collect();
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

/// Starts a curator on a machine, in a process of its own that ends with the process of its caller.
pub(crate) fn start(world: &World, machine: usize, own: NodeId) -> Rc<Curator> {
    let curator = Rc::new(Curator {
        process: world.sim.number(),
        own,
        standing: RefCell::new(CandidateRole::Unknown),
        leading: RefCell::new(None),
    });
    world.sim.spawn(curator.process, {
        let (world, curator) = (world.clone(), curator.clone());
        async move {
            loop {
                let ended = stand(&world, machine, &curator).await;
                *curator.standing.borrow_mut() = CandidateRole::Unknown;
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

/// Gives a learner its vote, if this machine's etcd leads.
async fn promote(world: &World, machine: usize) -> Result<(), ServiceError> {
    let prefix = NODES.range().start;
    let records = world.ask(machine, |etcd, _| etcd.under(&prefix)).await?;
    let nodes = records.iter().map(|record| {
        Node::decode(&record.key, &record.value).map(|node| (node.id, node)).map_err(ServiceError::from)
    });
    let nodes = nodes.collect::<Result<_, _>>()?;
    let (own, leader) = {
        let state = world.look();
        (state.machines[machine].member(), state.etcd.leader)
    };
    let (Some(own), Some(leader)) = (own, leader) else { return Ok(()) };
    let members = world.members(machine).await?;
    if let Some(learner) = learner_to_promote(own, leader, &members, &nodes) {
        world.promote(machine, learner).await?;
    }
    Ok(())
}

/// One round of the election. It ends with its lease.
async fn stand(world: &World, machine: usize, curator: &Rc<Curator>) -> Result<i64, ServiceError> {
    let (election, name) = (election(), curator.own.to_string());
    let prefix = format!("{election}/");
    let left = world
        .ask(machine, |etcd, _| {
            let keys = etcd.under(&prefix);
            let own = keys.into_iter().filter(|key| candidate_name(&key.value).as_deref() == Some(&*name));
            own.filter_map(|key| etcd.pairs.remove(&key.key)).count()
        })
        .await?;
    (0..left).for_each(|_| world.count("keys of a former life removed"));
    let requested_at = world.sim.now();
    let lease = i64::try_from(world.sim.number()).unwrap_or(i64::MAX);
    world.ask(machine, |etcd, now| etcd.grant(lease, LEADER_TTL, now)).await?;
    let own = {
        let key = format!("{election}/{lease:x}");
        let put = KeyChange::Put {
            key: key.clone(),
            value: encode_candidate(&name, LEADER_TTL),
            expected: ExpectedRevision::Absent,
        };
        // Guarded only by its own absence.
        let mut request = guarded_write_request(
            &world.namespace,
            &LeaderGuard { key: key.clone(), create_revision: 0 },
            std::slice::from_ref(&put),
        )?;
        for op in &mut request.success {
            use shepherd::proto::etcdserverpb::request_op::Request;
            if let Some(Request::RequestPut(put)) = &mut op.request {
                put.lease = lease;
            }
        }
        let done = world.transact(machine, &request, None).await?;
        LeaderGuard { key, create_revision: done.revision }
    };
    let mut places = ElectionView::default();
    let (mut confirmed, mut requested_last) = (requested_at, requested_at);
    loop {
        world.sim.sleep(LOOK).await;
        let now = world.sim.now();
        if now >= confirmed + LEADER_TTL {
            world.count("leases that were not confirmed in time");
            return Ok(lease);
        }
        if now >= requested_last + LEADER_TTL / 3 {
            requested_last = now;
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
            places = ElectionView::default();
            for key in keys {
                places.put_key(key.key, &key.value, key.create_revision);
            }
            places.is_complete = true;
        }
        let standing = places.candidate_role(&own, seen);
        let leads = matches!(standing, CandidateRole::Leader(_));
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

fn begin(world: &World, machine: usize, curator: &Curator, guard: &LeaderGuard) {
    world.count("leaderships");
    world.note(format_args!("machine {machine} leads by {}", guard.create_revision));
    let since = world.sim.now();
    let leading = Leading {
        world: world.clone(),
        machine,
        own: curator.own,
        guard: guard.clone(),
        since,
        heartbeats: RefCell::new(HeartbeatTracker::start_at(since)),
        view: RefCell::default(),
        membership: Rc::default(),
        seen: Cell::new(-1),
    };
    leading.follow();
    *curator.leading.borrow_mut() = Some(Rc::new(leading));
}
