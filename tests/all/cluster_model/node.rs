//! A role server of the model: what a node does from its start to its end, by the decisions of the product.
//!
//! Each file of its disk is written in one step, and the machine may lose its power after any of them.

use std::rc::Rc;
use std::time::Duration;

use shepherd::curator::node_health::HEARTBEAT_INTERVAL;
use shepherd::curator::node_lifecycle;
use shepherd::curator::service::error::ServiceError;
use shepherd::curator::service::node_watch_cache::NodeEvent;
use shepherd::curator_client::certificate::{RenewalPoint, Serial, decide_renewal};
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::peer_identity::Peer;
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::cluster::certificate_renewal::{self, RenewalAction};
use shepherd::roleserver::cluster::local_curator::CURATOR_PORT;
use shepherd::roleserver::cluster::node_enrolment::{self, EnrolmentState, EnrolmentStep};
use shepherd::roleserver::cluster::node_facts::ControlPlane;
use shepherd::roleserver::cluster::node_status;
use shepherd::roleserver::cluster::roles::{restore_roles, roles_from_event};
use tonic::Code;

use super::curators;
use super::invariants;
use super::service::{Caller, Committed};
use super::sim::Process;
use super::world::{Disk, Facts, StartupOrder, World};

/// One run of a role server.
#[derive(Clone)]
pub(crate) struct NodeLife {
    pub(crate) world: World,
    pub(crate) at: usize,
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

/// Ends the role server of a machine; etcd continues.
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
    /// Restarts what ends, after a pause, as the supervisor does.
    async fn again_and_again(&self, life: impl AsyncFn() -> Result<(), ServiceError>) {
        let mut text = String::new();
        loop {
            if let Err(error) = life().await {
                if error.code() == Code::Internal {
                    self.world.demand(Err(format!("machine {}: {error}", self.at)));
                }
                if error.code() != Code::Unavailable && error.to_string() != text {
                    text = error.to_string();
                    self.world.note(format_args!("machine {}: {text}", self.at));
                }
            }
            self.world.sim.sleep(self.world.sim.between(500, 1500)).await;
        }
    }

    pub(crate) fn disk(&self) -> Disk {
        self.world.look().machines[self.at].disk.clone()
    }

    pub(crate) fn facts(&self) -> Facts {
        self.world.look().machines[self.at].facts.clone()
    }

    /// Writes to the disk. The power may fail before and after it.
    pub(crate) async fn write(&self, write: impl FnOnce(&mut Disk)) {
        self.world.sim.step().await;
        self.world.machine(self.at, |machine| write(&mut machine.disk));
        self.world.sim.step().await;
    }

    pub(crate) fn update_facts<T>(&self, tell: impl FnOnce(&mut Facts) -> T) -> T {
        self.world.machine(self.at, |machine| {
            machine.facts.update_count += 1;
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

    pub(crate) fn caller(&self) -> Result<(Caller, NodeId, PublicKey), ServiceError> {
        let disk = self.disk();
        let key = disk.key.ok_or_else(|| ServiceError::invalid_argument("this node has no key"))?;
        let id = NodeId::from_key(&key);
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

    /// Publishes the connection of a machine that is a node and may make calls as one.
    pub(crate) fn connect(&self) {
        self.world.demand(invariants::connection_is_durable(&self.disk(), self.at));
        self.update_facts(|facts| (facts.address, facts.connection) = (true, true));
    }

    async fn enrol(&self) -> Result<(), ServiceError> {
        let disk = self.disk();
        let kept = EnrolmentState {
            to_found: disk.order.map(|requested| requested == StartupOrder::Found),
            certificate: disk
                .credentials
                .map(|validity| decide_renewal(validity, RenewalPoint::ThirdLeft, self.world.time())),
        };
        match node_enrolment::decide_step(&kept) {
            EnrolmentStep::Wait => return Ok(()),
            EnrolmentStep::Found => {
                self.key().await;
                self.write(|disk| disk.authority = true).await;
                self.update_facts(|facts| (facts.address, facts.to_found) = (true, true));
            }
            EnrolmentStep::Join => self.join().await?,
            EnrolmentStep::Rejoin { .. } => self.connect(),
        }
        loop {
            self.world.sim.sleep(Duration::from_mins(10)).await;
        }
    }

    async fn patiently<T>(&self, call: impl AsyncFn() -> Result<T, ServiceError>) -> Result<T, ServiceError> {
        loop {
            match call().await {
                Err(error) if error.code() == Code::Unavailable => {
                    self.world.sim.sleep(Duration::from_secs(1)).await;
                }
                answer => return answer,
            }
        }
    }

    async fn join(&self) -> Result<(), ServiceError> {
        let key = self.key().await;
        let caller = Caller { machine: Some(self.at), peer: Peer::Registering { key }, validity: None };
        let secret = loop {
            if let Some(secret) = self.world.look().secrets.last().cloned() {
                break secret;
            }
            self.world.sim.sleep(Duration::from_secs(1)).await;
        };
        self.patiently(async || {
            let register = async |leading: Rc<curators::Leading>| leading.register(key, &secret).await;
            caller.call(&self.world, "Registration/Register", None, register).await
        })
        .await?;
        let validity = loop {
            let commit = async |leading: Rc<curators::Leading>| leading.commit(key).await;
            let committed = self
                .patiently(async || caller.call(&self.world, "Registration/Commit", None, commit).await)
                .await?;
            match committed {
                Committed::Membership(validity) => break validity,
                Committed::Waiting => self.world.sim.sleep(Duration::from_secs(1)).await,
            }
        };
        self.write(|disk| disk.credentials = Some(validity)).await;
        self.world.note(format_args!("machine {} is {}", self.at, NodeId::from_key(&key)));
        self.world.count("machines that became nodes");
        self.connect();
        Ok(())
    }

    fn begin_with_the_disk(&self) {
        let disk = self.disk();
        if let Some(roles) = restore_roles(disk.roles, disk.membership.as_ref()) {
            self.update_facts(|facts| facts.roles = Some(roles));
        }
    }

    /// Watches what the curator assigns to this node.
    async fn follow(&self) -> Result<(), ServiceError> {
        self.until(|facts| facts.connection.then_some(())).await;
        let (caller, id, key) = self.caller()?;
        let leading = caller.call(&self.world, "Nodes/Watch", None, async |leading| Ok(leading)).await?;
        let mut number = 0;
        loop {
            let (news, latest) = {
                let view = leading.view.borrow();
                (view.event_for(&id, number), view.latest_change())
            };
            let event = news.map(|news| match news {
                NodeEvent::Present(node) => wire::node_event::Event::Present(node.to_wire()),
                NodeEvent::Deleted(id) => wire::node_event::Event::Deleted(id.to_string()),
            });
            let first = number == 0;
            number = latest;
            if !matches!((&event, first), (Some(wire::node_event::Event::Deleted(_)), true)) {
                let event = event.map(|event| wire::NodeEvent { event: Some(event) });
                if let Some(roles) = roles_from_event(id, event).map_err(ServiceError::invalid_argument)? {
                    if self.disk().roles.as_ref() != Some(&roles) {
                        self.world.count("roles taken up");
                        self.write(|disk| disk.roles = Some(roles.clone())).await;
                    }
                    if self.facts().roles.as_ref() != Some(&roles) {
                        self.update_facts(|facts| facts.roles = Some(roles));
                    }
                }
            }
            self.world.sim.sleep(Duration::from_millis(700)).await;
            let open = {
                let state = self.world.look();
                let curator = state.machines[leading.machine].curator.as_ref();
                let leads = |now: &Rc<curators::Leading>| Rc::ptr_eq(now, &leading);
                state.reaches(self.at, leading.machine)
                    && curator.is_some_and(|curator| curator.leading.borrow().as_ref().is_some_and(leads))
            };
            let node = leading.view.borrow().get(&id).cloned();
            if !open || node_lifecycle::check_credentials(node.as_deref(), id, &key).is_err() {
                return Ok(());
            }
        }
    }

    async fn say(&self) -> Result<(), ServiceError> {
        let (mut status, mut looked): (Option<wire::NodeStatus>, _) = (None, 0);
        loop {
            let facts = self.facts();
            if facts.update_count == looked {
                self.world.sim.sleep(Duration::from_millis(500)).await;
                continue;
            }
            looked = facts.update_count;
            let known = node_status::StatusInputs {
                connection: facts.connection.then(|| self.world.fixture.connection.clone()),
                address: facts.address.then(|| self.world.look().machines[self.at].address),
                control_plane: facts.control_plane.then_some(ControlPlane { port: CURATOR_PORT }),
                services: Vec::new(),
                kubernetes: None,
                authority: None,
            };
            let now = node_status::build_status(&known, "1", "boot");
            if let Some(now) = now.filter(|now| known.connection.is_some() && status.as_ref() != Some(now)) {
                let (caller, id, _) = self.caller()?;
                self.world.judge(|state| invariants::report_is_complete(state, self.at, &now));
                let report = async |leading: Rc<curators::Leading>| leading.report(id, &now).await;
                caller.call(&self.world, "Nodes/UpdateStatus", Some(id), report).await?;
                status = Some(now);
            }
            self.world.sim.sleep(Duration::from_millis(500)).await;
        }
    }

    async fn beat(&self) -> Result<(), ServiceError> {
        self.until(|facts| facts.connection.then_some(())).await;
        loop {
            let (caller, id, _) = self.caller()?;
            self.world.demand(invariants::connection_is_durable(&self.disk(), self.at));
            let hear = async |leading: Rc<curators::Leading>| {
                leading.heartbeat(id);
                Ok(())
            };
            caller.call(&self.world, "Nodes/Heartbeat", None, hear).await?;
            self.world.sim.sleep(HEARTBEAT_INTERVAL).await;
        }
    }

    /// Renews the certificate in time.
    async fn renew(&self) -> Result<(), ServiceError> {
        self.until(|facts| facts.connection.then_some(())).await;
        loop {
            let Some(validity) = self.disk().credentials else { return Ok(()) };
            let (mut caller, id, key) = self.caller()?;
            let control_plane = self.world.look().machines[self.at].facts.control_plane;
            let mut doing =
                certificate_renewal::decide_renewal_action(validity, id, self.world.time(), control_plane);
            if doing == RenewalAction::IssueFromEtcd && self.renew_beside_etcd(&key).await.is_err() {
                doing = RenewalAction::RequestByKey;
            }
            match doing {
                RenewalAction::Wait(_) | RenewalAction::IssueFromEtcd => {}
                RenewalAction::RequestFromCurator => {
                    let join = async |leading: Rc<curators::Leading>| leading.join(key).await;
                    let next = caller.call(&self.world, "Nodes/RenewCertificate", Some(id), join).await?;
                    self.write(|disk| disk.credentials = Some(next)).await;
                    self.world.count("certificates renewed");
                }
                RenewalAction::RequestByKey => {
                    caller.peer = Peer::Registering { key };
                    let join = async |leading: Rc<curators::Leading>| leading.join(key).await;
                    let next = caller.call(&self.world, "Registration/Join", None, join).await?;
                    self.write(|disk| disk.credentials = Some(next)).await;
                    self.world.count("nodes that came back by their key alone");
                }
            }
            self.world.sim.sleep(Duration::from_secs(5)).await;
        }
    }
}
