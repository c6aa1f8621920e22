//! The control plane of a node of the model: it founds a cluster, runs a membership, and ends both.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use shepherd::curator::node_lifecycle;
use shepherd::curator::service::error::ServiceError;
use shepherd::curator_client::certificate::Validity;
use shepherd::curator_client::node::{ConsensusMember, Node, NodeRoles, NodeState};
use shepherd::curator_client::node_id::{NodeId, PublicKey};
use shepherd::curator_client::node_status::NodeStatus;
use shepherd::curator_client::pki::NODE_LIFETIME;
use shepherd::etcd::guard::{ExpectedRevision, KeyChange, LeaderGuard, guarded_write_request};
use shepherd::proto::curator::v1 as wire;
use shepherd::roleserver::cluster::etcd_data::EtcdDataState;
use shepherd::roleserver::cluster::etcd_member::{first_membership, membership_for_role};
use shepherd::roleserver::cluster::files::EtcdMembership;
use shepherd::roleserver::cluster::startup::{
    self, ControlPlaneInputs, ControlPlaneStartup, EtcdDataAction, decide_etcd_data, matches_running,
    must_restart,
};

use super::curators;
use super::invariants;
use super::node::NodeLife;
use super::world::Program;

const ASK_AGAIN: Duration = Duration::from_millis(500);

impl NodeLife {
    fn decided(&self) -> Option<ControlPlaneStartup> {
        let (facts, fixture) = (self.facts(), self.world.fixture);
        startup::decide_startup(&ControlPlaneInputs {
            founding: facts.to_found.then(|| fixture.to_found.clone()),
            roles: facts.roles,
            connection: facts.connection.then(|| fixture.connection.clone()),
        })
    }

    /// The member that etcd started as, in the data directory of a membership.
    fn begun(&self, membership: &EtcdMembership) -> EtcdDataState {
        self.disk()
            .etcd
            .get(&membership.data)
            .map_or(EtcdDataState::Empty, |member| EtcdDataState::Member(*member))
    }

    /// One run of the control plane.
    pub(crate) async fn launch(&self) -> Result<(), ServiceError> {
        self.stop_curator();
        self.update_facts(|facts| (facts.control_plane, facts.running, facts.settled) = (false, None, false));
        let first = loop {
            if let Some(first) = self.decided() {
                break first;
            }
            self.world.sim.sleep(Duration::from_millis(400)).await;
        };
        let remove = |last: &EtcdMembership| {
            decide_etcd_data(last, self.begun(last), &first) == EtcdDataAction::Remove
        };
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
            ControlPlaneStartup::Nothing => None,
            ControlPlaneStartup::Founding(_) => Some(self.found_cluster().await?),
            ControlPlaneStartup::Member(role, _) => {
                let running = self.run_member(role, &first).await?;
                if running.is_none() {
                    self.end(None);
                    return Ok(());
                }
                running
            }
        };
        self.update_facts(|facts| (facts.running, facts.settled) = (running, true));
        self.world.count("control planes begun");
        let mut looked = 0;
        loop {
            self.world.sim.sleep(Duration::from_millis(400)).await;
            let value = self.world.look().machines[self.at].facts.update_count;
            if value == looked {
                continue;
            }
            looked = value;
            if let Some(next) = self.decided()
                && !matches_running(running, &next)
            {
                self.world.demand(invariants::restarts_for_a_reason(running, &next, self.at));
                self.end(running);
                return Ok(());
            }
        }
    }

    /// The membership that runs is not the one that should run any more.
    fn end(&self, running: Option<u64>) {
        self.world.note(format_args!("machine {}: ends its control plane {running:?}", self.at));
        self.world.count("control planes ended");
        self.stop_curator();
        self.stop_etcd();
    }

    fn stop_curator(&self) {
        self.update_facts(|facts| facts.control_plane = false);
        let curator = self.world.machine(self.at, |machine| machine.curator.take());
        if let Some(curator) = curator {
            self.world.sim.kill(curator.process);
        }
    }

    fn stop_etcd(&self) {
        self.world.machine(self.at, |machine| machine.etcd = None);
    }

    fn start_etcd(&self, membership: &EtcdMembership) {
        let now = self.world.sim.now();
        self.world.judge(|state| invariants::one_etcd_at_a_time(state, self.at, membership));
        self.world.machine(self.at, |machine| {
            // A running etcd of this membership is kept.
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

    async fn found_cluster(&self) -> Result<u64, ServiceError> {
        let key = self.disk().key.ok_or_else(|| ServiceError::invalid_argument("this node has no key"))?;
        let (own, address) = (NodeId::from_key(&key), self.world.look().machines[self.at].address);
        let membership = if let Some(membership) = self.disk().membership {
            membership
        } else {
            let membership = first_membership(own, address, 0);
            self.write(|disk| disk.membership = Some(membership.clone())).await;
            membership
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
            disk.membership = Some(EtcdMembership { member: Some(member), ..membership.clone() });
        })
        .await;
        let role = ConsensusMember { member_id: member, peers: BTreeMap::new() };
        let roles = NodeRoles { consensus_member: Some(role), ..NodeRoles::default() };
        if self.disk().roles.is_none() {
            let roles = roles.clone();
            self.write(|disk| disk.roles = Some(roles)).await;
        }
        let validity = Validity::starting(self.world.time(), NODE_LIFETIME);
        self.write(|disk| disk.credentials = Some(validity)).await;
        self.write(|disk| disk.authority = false).await;
        self.serve(own);
        self.connect();
        self.update_facts(|facts| (facts.roles, facts.to_found) = (Some(roles), false));
        self.world.note(format_args!("machine {} has founded as {own}", self.at));
        self.world.count("clusters founded");
        Ok(member)
    }

    /// Writes the first records of a cluster, unless they exist.
    async fn first_records(&self, key: &PublicKey, member: u64) -> Result<(), ServiceError> {
        let (own, now) = (NodeId::from_key(key), self.world.time());
        let node_status = wire::NodeStatus {
            external_address: self.world.look().machines[self.at].address.to_string(),
            ..Default::default()
        };
        let status = NodeStatus::from_report(&node_status, now).map_err(ServiceError::invalid_argument)?;
        let role = ConsensusMember { member_id: member, peers: BTreeMap::new() };
        let node = Node {
            status: Some(status),
            roles: NodeRoles { consensus_member: Some(role), ..NodeRoles::default() },
            ..Node::new(*key, NodeState::Up, now)
        };
        let record = KeyChange::Put {
            key: Node::etcd_key(&own)?,
            value: node.encode()?,
            expected: ExpectedRevision::Absent,
        };
        // No curator leads yet: the write is guarded only by its own absence.
        let nobody = LeaderGuard { key: "/nobody".to_owned(), create_revision: 0 };
        let request = guarded_write_request(&self.world.namespace, &nobody, &[record])?;
        self.world.transact(self.at, &request, None).await.map(drop)
    }

    /// Begins a membership. Returns none if another membership should run before this one has responded.
    async fn run_member(
        &self,
        role: &ConsensusMember,
        first: &ControlPlaneStartup,
    ) -> Result<Option<u64>, ServiceError> {
        let (caller, own, key) = self.caller()?;
        let another = || {
            let begun =
                self.disk().membership.map_or(EtcdDataState::Empty, |membership| self.begun(&membership));
            self.decided().is_some_and(|next| must_restart(first, begun, &next))
        };
        let membership = if let Some(membership) = self.disk().membership {
            let of_role = EtcdMembership { member: Some(role.member_id), ..membership.clone() };
            if of_role != membership {
                self.world.count("memberships begun as another");
                self.write(|disk| disk.membership = Some(of_role.clone())).await;
            }
            of_role
        } else {
            let address = self.world.look().machines[self.at].address;
            let membership = membership_for_role(own, address, role, 0);
            self.write(|disk| disk.membership = Some(membership.clone())).await;
            membership
        };
        while !self.disk().proof {
            if another() {
                return Ok(None);
            }
            let issue = async |leading: Rc<curators::Leading>| leading.peer_certificate(key).await;
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
        Ok(Some(role.member_id))
    }

    pub(crate) async fn renew_beside_etcd(&self, key: &PublicKey) -> Result<(), ServiceError> {
        let now = self.world.time();
        let over = |validity: Validity| validity.has_ended(now);
        if !self.disk().credentials.is_none_or(over) {
            return Ok(());
        }
        let id = NodeId::from_key(key);
        let prefix = Node::etcd_key(&id)?;
        let record = self.world.ask(self.at, |etcd, _| etcd.record(&prefix)).await?;
        let node = record.map(|record| Node::decode(&record.key, &record.value)).transpose()?;
        node_lifecycle::check_join(node.as_ref(), key, false)?;
        self.write(|disk| disk.credentials = Some(Validity::starting(now, NODE_LIFETIME))).await;
        self.world.count("certificates renewed beside etcd");
        Ok(())
    }

    fn serve(&self, own: NodeId) {
        self.world.judge(|state| invariants::one_curator_at_a_time(state, self.at));
        let curator = curators::start(&self.world, self.at, own);
        self.world.machine(self.at, |machine| {
            machine.curator = Some(curator);
            machine.facts.control_plane = true;
        });
    }
}
