//! A role server of the model: what a node does from its start to its end, by the decisions of the product.
//!
//! Each file of its disk is written in one step, and the machine may lose its power after any of them.

use std::rc::Rc;
use std::time::Duration;

use prost::Message as _;
use shepherd::curator::etcd::guard::Change;
use shepherd::curator::health::INTERVAL;
use shepherd::curator::life_cycle;
use shepherd::curator::node::{ConsensusMember, Node, Roles, State, Status};
use shepherd::curator::node_id::{NodeId, PublicKey};
use shepherd::curator::peer::Peer;
use shepherd::curator::pki::{NODE_LIFETIME, Renewal, Serial, Validity, renewal};
use shepherd::curator::service::chronicle::News;
use shepherd::curator::service::failure::Failure;
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::cluster::certificate::{self, Doing};
use shepherd::roleserver::cluster::control_plane::{
    self, CURATOR_PORT, Inheritance, Known, Startup, begins_anew, inherit, is_as_it_should,
};
use shepherd::roleserver::cluster::enrolment::{self, Kept, Step};
use shepherd::roleserver::cluster::etcd::{Begun, first_membership, membership_of};
use shepherd::roleserver::cluster::facts::ControlPlane;
use shepherd::roleserver::cluster::files::Membership;
use shepherd::roleserver::cluster::roles::{last_known, ordered};
use shepherd::roleserver::cluster::status;
use tonic::Code;

use super::curator;
use super::invariants;
use super::service::{Caller, Committed};
use super::sim::Process;
use super::world::{Asked, Disk, Facts, Program, World};

const ASK_AGAIN: Duration = Duration::from_millis(500);

/// One life of a role server.
#[derive(Clone)]
pub(crate) struct NodeLife {
    world: World,
    at: usize,
}

/// Starts the role server of a machine.
pub(crate) fn start(world: &World, at: usize) -> Process {
    let process = world.sim.number();
    world.machine(at, |machine| {
        machine.role_server = Some(process);
        machine.facts = Facts::default();
    });
    let node = NodeLife { world: world.clone(), at };
    let enrolment = node.clone();
    world
        .sim
        .spawn(process, async move { enrolment.again_and_again(async || enrolment.enrol().await).await });
    let launcher = node.clone();
    world.sim.spawn(process, async move {
        launcher.again_and_again(async || launcher.launch().await).await;
    });
    let follower = node.clone();
    world.sim.spawn(process, async move {
        follower.begin_with_the_disk();
        follower.again_and_again(async || follower.follow().await).await;
    });
    let status = node.clone();
    world.sim.spawn(process, async move { status.again_and_again(async || status.say().await).await });
    let heart = node.clone();
    world.sim.spawn(process, async move { heart.again_and_again(async || heart.beat().await).await });
    world.sim.spawn(process, async move { node.again_and_again(async || node.renew().await).await });
    process
}

/// Ends the role server of a machine; etcd goes on beside it.
pub(crate) fn crash(world: &World, at: usize) {
    let (role_server, curator) = world.machine(at, |machine| {
        machine.facts = Facts::default();
        (machine.role_server.take(), machine.curator.take())
    });
    if let Some(curator) = curator {
        world.sim.kill(curator.process);
    }
    if let Some(role_server) = role_server {
        world.sim.kill(role_server);
    }
}

impl NodeLife {
    /// What ends is begun again after a pause, as its supervisor does.
    async fn again_and_again(&self, life: impl AsyncFn() -> Result<(), Failure>) {
        let mut said = String::new();
        loop {
            if let Err(error) = life().await {
                if error.code() == Code::Internal {
                    self.world.demand(Err(format!("machine {}: {error}", self.at)));
                }
                if error.code() != Code::Unavailable && error.to_string() != said {
                    said = error.to_string();
                    self.world.note(format_args!("machine {}: {said}", self.at));
                }
            }
            self.world.sim.sleep(self.world.sim.between(500, 1500)).await;
        }
    }

    fn disk(&self) -> Disk {
        self.world.look().machines[self.at].disk.clone()
    }

    fn facts(&self) -> Facts {
        self.world.look().machines[self.at].facts.clone()
    }

    /// Makes something durable; the power may go before and after it.
    async fn write(&self, write: impl FnOnce(&mut Disk)) {
        self.world.sim.step().await;
        self.world.machine(self.at, |machine| write(&mut machine.disk));
        self.world.sim.step().await;
    }

    fn tell<T>(&self, tell: impl FnOnce(&mut Facts) -> T) -> T {
        self.world.machine(self.at, |machine| {
            machine.facts.said += 1;
            tell(&mut machine.facts)
        })
    }

    async fn until<T>(&self, found: impl Fn(&Facts) -> Option<T>) -> T {
        loop {
            if let Some(found) = found(&self.facts()) {
                return found;
            }
            self.world.sim.sleep(Duration::from_millis(400)).await;
        }
    }

    fn caller(&self) -> Result<(Caller, NodeId, PublicKey), Failure> {
        let disk = self.disk();
        let key = disk.key.ok_or_else(|| Failure::invalid("this node has no key"))?;
        let id = NodeId::of(&key);
        let peer = Peer::Node { id, key, serial: Serial::new([2; 16]) };
        Ok((Caller { machine: Some(self.at), peer, validity: disk.credentials }, id, key))
    }

    async fn key(&self) -> PublicKey {
        if let Some(key) = self.disk().key {
            return key;
        }
        let key = PublicKey(self.world.sim.bytes());
        self.write(|disk| disk.key = Some(key)).await;
        key
    }

    /// A node that is one, and may ask as one.
    fn connect(&self) {
        self.world.demand(invariants::connection_is_durable(&self.disk(), self.at));
        self.tell(|facts| (facts.address, facts.connection) = (true, true));
    }

    async fn enrol(&self) -> Result<(), Failure> {
        let disk = self.disk();
        let kept = Kept {
            to_found: disk.asked.map(|asked| asked == Asked::Found),
            certificate: disk.credentials.map(|validity| renewal(validity, self.world.time())),
        };
        match enrolment::decide(&kept) {
            Step::Wait => return Ok(()),
            Step::Found => {
                self.key().await;
                self.write(|disk| disk.authority = true).await;
                self.tell(|facts| (facts.address, facts.to_found) = (true, true));
            }
            Step::Join => self.join().await?,
            Step::ComeBack { .. } => self.connect(),
        }
        loop {
            self.world.sim.sleep(Duration::from_mins(10)).await;
        }
    }

    async fn patiently<T>(&self, call: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Failure> {
        loop {
            match call().await {
                Err(error) if error.code() == Code::Unavailable => {
                    self.world.sim.sleep(Duration::from_secs(1)).await;
                }
                answer => return answer,
            }
        }
    }

    async fn join(&self) -> Result<(), Failure> {
        let key = self.key().await;
        let caller = Caller { machine: Some(self.at), peer: Peer::Registering { key }, validity: None };
        let secret = loop {
            if let Some(secret) = self.world.look().secrets.last().cloned() {
                break secret;
            }
            self.world.sim.sleep(Duration::from_secs(1)).await;
        };
        self.patiently(async || {
            let register = async |leading: Rc<curator::Leading>| leading.register(key, &secret).await;
            caller.call(&self.world, "Registration/Register", None, register).await
        })
        .await?;
        let validity = loop {
            let commit = async |leading: Rc<curator::Leading>| leading.commit(key).await;
            let committed = self
                .patiently(async || caller.call(&self.world, "Registration/Commit", None, commit).await)
                .await?;
            match committed {
                Committed::Membership(validity) => break validity,
                Committed::Waiting => self.world.sim.sleep(Duration::from_secs(1)).await,
            }
        };
        self.write(|disk| disk.credentials = Some(validity)).await;
        self.world.note(format_args!("machine {} is {}", self.at, NodeId::of(&key)));
        self.world.count("machines that became nodes");
        self.connect();
        Ok(())
    }

    fn begin_with_the_disk(&self) {
        let disk = self.disk();
        if let Some(roles) = last_known(disk.roles, disk.membership.as_ref()) {
            self.tell(|facts| facts.roles = Some(roles));
        }
    }

    /// Follows what the curator says that this node is to do.
    async fn follow(&self) -> Result<(), Failure> {
        self.until(|facts| facts.connection.then_some(())).await;
        let (caller, id, key) = self.caller()?;
        let leading = caller.call(&self.world, "Nodes/Watch", None, async |leading| Ok(leading)).await?;
        let mut told = 0;
        loop {
            let (news, latest) = {
                let view = leading.view.borrow();
                (view.news_of(&id, told), view.latest())
            };
            let event = news.map(|news| match news {
                News::Present(node) => wire::node_event::Event::Present(node.to_wire()),
                News::Deleted(id) => wire::node_event::Event::Deleted(id.to_string()),
            });
            let first = told == 0;
            told = latest;
            if !matches!((&event, first), (Some(wire::node_event::Event::Deleted(_)), true)) {
                let event = event.map(|event| wire::NodeEvent { event: Some(event) });
                if let Some(roles) = ordered(id, event).map_err(Failure::invalid)? {
                    if self.disk().roles.as_ref() != Some(&roles) {
                        self.world.count("roles taken up");
                        self.write(|disk| disk.roles = Some(roles.clone())).await;
                    }
                    if self.facts().roles.as_ref() != Some(&roles) {
                        self.tell(|facts| facts.roles = Some(roles));
                    }
                }
            }
            self.world.sim.sleep(Duration::from_millis(700)).await;
            let open = {
                let state = self.world.look();
                let curator = state.machines[leading.machine].curator.as_ref();
                let leads = |now: &Rc<curator::Leading>| Rc::ptr_eq(now, &leading);
                state.reaches(self.at, leading.machine)
                    && curator.is_some_and(|curator| curator.leading.borrow().as_ref().is_some_and(leads))
            };
            let node = leading.view.borrow().get(&id).cloned();
            if !open || life_cycle::credentials_hold(node.as_deref(), id, &key).is_err() {
                return Ok(());
            }
        }
    }

    async fn say(&self) -> Result<(), Failure> {
        let (mut said, mut looked): (Option<wire::NodeStatus>, _) = (None, 0);
        loop {
            let facts = self.facts();
            if facts.said == looked {
                self.world.sim.sleep(Duration::from_millis(500)).await;
                continue;
            }
            looked = facts.said;
            let known = status::Known {
                connection: facts.connection.then(|| self.world.fixture.connection.clone()),
                address: facts.address.then(|| self.world.look().machines[self.at].address),
                control_plane: facts.control_plane.then_some(ControlPlane { port: CURATOR_PORT }),
            };
            let now = status::decide(&known, "1", "boot");
            if let Some(now) = now.filter(|now| known.connection.is_some() && said.as_ref() != Some(now)) {
                let (caller, id, _) = self.caller()?;
                self.world.judge(|state| invariants::report_is_complete(state, self.at, &now));
                let report = async |leading: Rc<curator::Leading>| leading.report(id, &now).await;
                caller.call(&self.world, "Nodes/UpdateStatus", Some(id), report).await?;
                said = Some(now);
            }
            self.world.sim.sleep(Duration::from_millis(500)).await;
        }
    }

    async fn beat(&self) -> Result<(), Failure> {
        self.until(|facts| facts.connection.then_some(())).await;
        loop {
            let (caller, id, _) = self.caller()?;
            self.world.demand(invariants::connection_is_durable(&self.disk(), self.at));
            let hear = async |leading: Rc<curator::Leading>| {
                leading.heartbeat(id);
                Ok(())
            };
            caller.call(&self.world, "Nodes/Heartbeat", None, hear).await?;
            self.world.sim.sleep(INTERVAL).await;
        }
    }

    /// Another certificate in time.
    async fn renew(&self) -> Result<(), Failure> {
        self.until(|facts| facts.connection.then_some(())).await;
        loop {
            let Some(validity) = self.disk().credentials else { return Ok(()) };
            let (mut caller, id, key) = self.caller()?;
            let control_plane = self.world.look().machines[self.at].facts.control_plane;
            let mut doing = certificate::decide(validity, self.world.time(), control_plane);
            if doing == Doing::BesideEtcd && self.renew_beside_etcd(&key).await.is_err() {
                doing = Doing::AskByKey;
            }
            match doing {
                Doing::Wait(_) | Doing::BesideEtcd => {}
                Doing::Ask => {
                    let join = async |leading: Rc<curator::Leading>| leading.join(key).await;
                    let next = caller.call(&self.world, "Nodes/RenewCertificate", Some(id), join).await?;
                    self.write(|disk| disk.credentials = Some(next)).await;
                    self.world.count("certificates renewed");
                }
                Doing::AskByKey => {
                    caller.peer = Peer::Registering { key };
                    let join = async |leading: Rc<curator::Leading>| leading.join(key).await;
                    let next = caller.call(&self.world, "Registration/Join", None, join).await?;
                    self.write(|disk| disk.credentials = Some(next)).await;
                    self.world.count("nodes that came back by their key alone");
                }
            }
            self.world.sim.sleep(Duration::from_secs(5)).await;
        }
    }

    fn decided(&self) -> Option<Startup> {
        let (facts, fixture) = (self.facts(), self.world.fixture);
        control_plane::decide(&Known {
            to_found: facts.to_found.then(|| fixture.to_found.clone()),
            roles: facts.roles,
            connection: facts.connection.then(|| fixture.connection.clone()),
        })
    }

    /// What etcd has begun as in the data directory of a membership.
    fn begun(&self, membership: &Membership) -> Begun {
        self.disk().etcd.get(&membership.data).map_or(Begun::NotYet, |member| Begun::As(*member))
    }

    /// One life of the control plane.
    async fn launch(&self) -> Result<(), Failure> {
        self.stop_curator();
        self.tell(|facts| (facts.control_plane, facts.running, facts.settled) = (false, None, false));
        let first = loop {
            if let Some(first) = self.decided() {
                break first;
            }
            self.world.sim.sleep(Duration::from_millis(400)).await;
        };
        let remove = |last: &Membership| inherit(last, self.begun(last), &first) == Inheritance::Remove;
        if let Some(last) = self.disk().membership.filter(remove) {
            self.stop_etcd();
            self.world.judge(|state| invariants::only_what_is_over_is_removed(state, self.at, &last));
            self.world.count("data of a membership removed");
            let data = last.data.clone();
            self.write(|disk| {
                disk.etcd.remove(&data);
            })
            .await;
            self.write(|disk| disk.membership = None).await;
        }
        let running = match &first {
            Startup::Nothing => None,
            Startup::Founding(_) => Some(self.found().await?),
            Startup::Member(role, _) => match self.run_member(role, &first).await? {
                Some(running) => Some(running),
                None => {
                    self.end(None);
                    return Ok(());
                }
            },
        };
        self.tell(|facts| (facts.running, facts.settled) = (running, true));
        self.world.count("control planes begun");
        let mut looked = 0;
        loop {
            self.world.sim.sleep(Duration::from_millis(400)).await;
            let said = self.world.look().machines[self.at].facts.said;
            if said == looked {
                continue;
            }
            looked = said;
            if let Some(next) = self.decided()
                && !is_as_it_should(running, &next)
            {
                self.world.demand(invariants::begun_anew_for_a_reason(running, &next, self.at));
                self.end(running);
                return Ok(());
            }
        }
    }

    /// What runs is not what is to run any more.
    fn end(&self, running: Option<u64>) {
        self.world.note(format_args!("machine {}: ends its control plane {running:?}", self.at));
        self.world.count("control planes ended");
        self.stop_curator();
        self.stop_etcd();
    }

    fn stop_curator(&self) {
        self.tell(|facts| facts.control_plane = false);
        let curator = self.world.machine(self.at, |machine| machine.curator.take());
        if let Some(curator) = curator {
            self.world.sim.kill(curator.process);
        }
    }

    fn stop_etcd(&self) {
        self.world.machine(self.at, |machine| machine.etcd = None);
    }

    fn start_etcd(&self, membership: &Membership) {
        let now = self.world.sim.now();
        self.world.judge(|state| invariants::one_etcd_at_a_time(state, self.at, membership));
        self.world.machine(self.at, |machine| {
            // One that runs already, of this membership, is gone on with.
            if machine.etcd.as_ref().is_none_or(|program| program.membership.data != membership.data) {
                let (membership, seen) = (membership.clone(), Vec::new());
                machine.etcd = Some(Program { membership, id: None, since: now, seen });
            }
        });
    }

    fn etcd_answers(&self) -> Option<u64> {
        let state = self.world.look();
        state.machines[self.at].member().filter(|_| state.has_quorum(self.at))
    }

    async fn found(&self) -> Result<u64, Failure> {
        let key = self.disk().key.ok_or_else(|| Failure::invalid("this node has no key"))?;
        let (own, address) = (NodeId::of(&key), self.world.look().machines[self.at].address);
        let membership = match self.disk().membership {
            Some(membership) => membership,
            None => {
                let membership = first_membership(own, address);
                self.write(|disk| disk.membership = Some(membership.clone())).await;
                membership
            }
        };
        self.write(|disk| disk.proof = true).await;
        self.start_etcd(&membership);
        let member = loop {
            if let Some(member) = self.etcd_answers() {
                break member;
            }
            self.world.sim.sleep(ASK_AGAIN).await;
        };
        self.first_records(&key, member).await?;
        self.write(|disk| {
            disk.membership = Some(Membership { member: Some(member), ..membership.clone() });
        })
        .await;
        let role = ConsensusMember { member, peers: std::collections::BTreeMap::new() };
        let roles = Roles { consensus_member: Some(role), ..Roles::default() };
        if self.disk().roles.is_none() {
            let roles = roles.clone();
            self.write(|disk| disk.roles = Some(roles)).await;
        }
        let validity = Validity::starting(self.world.time(), NODE_LIFETIME);
        self.write(|disk| disk.credentials = Some(validity)).await;
        self.write(|disk| disk.authority = false).await;
        self.serve(own);
        self.connect();
        self.tell(|facts| (facts.roles, facts.to_found) = (Some(roles), false));
        self.world.note(format_args!("machine {} has founded as {own}", self.at));
        self.world.count("clusters founded");
        Ok(member)
    }

    /// The first records of a cluster, unless they are there.
    async fn first_records(&self, key: &PublicKey, member: u64) -> Result<(), Failure> {
        let (own, now) = (NodeId::of(key), self.world.time());
        let said = wire::NodeStatus {
            external_address: self.world.look().machines[self.at].address.to_string(),
            ..Default::default()
        };
        let status = Status::from_report(&said, now).map_err(Failure::invalid)?;
        let role = ConsensusMember { member, peers: std::collections::BTreeMap::new() };
        let node = Node {
            status: Some(status),
            roles: Roles { consensus_member: Some(role), ..Roles::default() },
            ..Node::new(*key, State::Up, now)
        };
        let record = Change::Put {
            key: Node::etcd_key(&own)?,
            value: node.encode()?,
            expected: shepherd::curator::etcd::guard::Expected::Absent,
        };
        // Nobody leads yet: it is guarded by its own absence, and by nothing else.
        let nobody = shepherd::curator::etcd::guard::Guard { key: "/nobody".to_owned(), create_revision: 0 };
        let asked = shepherd::curator::etcd::guard::guarded_write(&self.world.namespace, &nobody, &[record])?;
        debug_assert!(asked.encoded_len() > 0);
        self.world.transact(self.at, &asked, None).await.map(drop)
    }

    /// Begins a membership; none when another is to run before this one has come to answer.
    async fn run_member(&self, role: &ConsensusMember, first: &Startup) -> Result<Option<u64>, Failure> {
        let (caller, own, key) = self.caller()?;
        let another = || {
            let begun = self.disk().membership.map_or(Begun::NotYet, |membership| self.begun(&membership));
            self.decided().is_some_and(|next| begins_anew(first, begun, &next))
        };
        let membership = match self.disk().membership {
            Some(membership) => {
                let of_role = Membership { member: Some(role.member), ..membership.clone() };
                if of_role != membership {
                    self.world.count("memberships begun as another");
                    self.write(|disk| disk.membership = Some(of_role.clone())).await;
                }
                of_role
            }
            None => {
                let address = self.world.look().machines[self.at].address;
                let membership = membership_of(own, address, role);
                self.write(|disk| disk.membership = Some(membership.clone())).await;
                membership
            }
        };
        while !self.disk().proof {
            if another() {
                return Ok(None);
            }
            let issue = async |leading: Rc<curator::Leading>| leading.peer_certificate(key).await;
            caller.call(&self.world, "Nodes/IssuePeerCertificate", None, issue).await?;
            self.write(|disk| disk.proof = true).await;
        }
        self.start_etcd(&membership);
        while self.etcd_answers().is_none() {
            if another() {
                return Ok(None);
            }
            self.world.sim.sleep(ASK_AGAIN).await;
        }
        self.renew_beside_etcd(&key).await?;
        self.serve(own);
        Ok(Some(role.member))
    }

    async fn renew_beside_etcd(&self, key: &PublicKey) -> Result<(), Failure> {
        let now = self.world.time();
        let over = |validity| renewal(validity, now) == Renewal::Expired;
        if !self.disk().credentials.is_none_or(over) {
            return Ok(());
        }
        let id = NodeId::of(key);
        let prefix = Node::etcd_key(&id)?;
        let record = self.world.ask(self.at, |etcd, _| etcd.record(&prefix)).await?;
        let node = record.map(|record| Node::decode(&record.key, &record.value)).transpose()?;
        life_cycle::join(node.as_ref(), key, false)?;
        self.write(|disk| disk.credentials = Some(Validity::starting(now, NODE_LIFETIME))).await;
        self.world.count("certificates renewed beside etcd");
        Ok(())
    }

    fn serve(&self, own: NodeId) {
        self.world.judge(|state| invariants::one_curator_at_a_time(state, self.at));
        let curator = curator::start(&self.world, self.at, own);
        self.world.machine(self.at, |machine| {
            machine.curator = Some(curator);
            machine.facts.control_plane = true;
        });
    }
}
