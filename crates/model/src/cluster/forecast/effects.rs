//! Effects of a step: what a forecast changes when the step succeeds.

use crate::cluster::authority_theft::{AuthorityStep, TheftStage};
use crate::cluster::forecast::{ForecastInput, ForecastRun, new_node};
use crate::cluster::kubernetes::{CuratorKubernetes, ObservedKubernetes, spec_from_settings};
use crate::cluster::node_address::AssignedAddress;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::secret_keys::{SecretKey, SecretKeys, SecretsReport, SecretsStage, SecretsStep};
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{
    CONSENSUS_MEMBER_ROLE, CandidateMachine, ClusterIdentity, ClusterMember, ClusterNode, CuratorAnswer,
    EtcdMember, LastOrder, MembershipOrder, NodeHealth, NodeState,
};
use crate::cluster::upgrade::{NodeUpgrade, UpgradeEvent};
use crate::ids::MachineId;
use crate::phase::Phase;

impl ForecastRun {
    /// Applies what a step changes when it succeeds.
    pub(super) fn apply_step(&mut self, step: ClusterPlanStep) {
        match step {
            ClusterPlanStep::AddMember { machine, part } => self.apply_member_addition(machine, part),
            ClusterPlanStep::SendOrder { machine, order: what } => self.apply_order(machine, what),
            ClusterPlanStep::RenewPeer { machine } => self.apply_order(machine, MembershipOrder::Join),
            ClusterPlanStep::EndPeerRenewal => self.cluster().peer_renewal = None,
            ClusterPlanStep::CreateAuthority => self.begin_authority_step(AuthorityStep::Accept),
            ClusterPlanStep::SendAuthority { machine, step } => self.apply_authority_order(machine, step),
            ClusterPlanStep::AdvanceAuthority { step } => self.begin_authority_step(step),
            ClusterPlanStep::EndAuthorityTheft => self.cluster().authority_theft = None,
            ClusterPlanStep::RecordFounding { machine } => self.apply_founding(machine),
            ClusterPlanStep::ApproveNode { key, .. } => {
                if let Some(node) = self.node_with_key(key) {
                    node.state = NodeState::Standby;
                }
            }
            ClusterPlanStep::AssignAddress { key, address, .. } => {
                if let Some(node) = self.node_with_key(key) {
                    node.addresses.assigned = AssignedAddress::Address(address);
                }
            }
            ClusterPlanStep::ChangeRoles { node, add: give, remove: take, .. } => {
                self.apply_role_change(&node, &give, &take);
            }
            ClusterPlanStep::DecommissionNode { node } => {
                if let Some(node) = self.node(&node) {
                    node.state = NodeState::Decommissioned;
                    node.roles.clear();
                }
            }
            ClusterPlanStep::DeleteNode { node } => {
                if let Some(seen) = self.observed() {
                    seen.nodes.retain(|one| one.id != node);
                }
            }
            ClusterPlanStep::MarkLeaving { machine, reason: why, .. } => {
                if let Some(member) = self.member(machine) {
                    member.leave_reason = Some(why);
                }
            }
            ClusterPlanStep::RemoveMember { machine, .. } => self.apply_member_removal(machine),
            ClusterPlanStep::DeclareRole { role } => {
                let digest =
                    self.cluster().declared_roles.iter().find(|one| one.role == role).map(|one| one.digest);
                if let (Some(digest), Some(seen)) = (digest, self.observed()) {
                    seen.declared_digests.insert(role, digest);
                }
            }
            ClusterPlanStep::UndeclareRole { role } => {
                if let Some(seen) = self.observed() {
                    seen.declared_digests.remove(&role);
                }
            }
            ClusterPlanStep::DeleteDeclaration { role } => {
                self.cluster().declared_roles.retain(|one| one.role != role);
            }
            ClusterPlanStep::PutKubernetes => {
                let settings = self
                    .cluster()
                    .kubernetes
                    .as_ref()
                    .map(|wanted| spec_from_settings(wanted.spec.to_settings()));
                let before = self.kubernetes_status().cloned().unwrap_or_default();
                if let (Some(settings), Some(seen)) = (settings, self.observed()) {
                    seen.kubernetes =
                        ObservedKubernetes::Present(CuratorKubernetes { spec: settings, ..before });
                }
            }
            ClusterPlanStep::DeleteKubernetes => {
                if let Some(seen) = self.observed() {
                    seen.kubernetes = ObservedKubernetes::Absent;
                }
            }
            ClusterPlanStep::DeleteKubernetesRecord => self.cluster().kubernetes = None,
            ClusterPlanStep::RotateKeys { keys } => {
                if let Some(wanted) = &mut self.cluster().kubernetes {
                    wanted.pending_rotations.retain(|one| *one != keys);
                }
            }
            ClusterPlanStep::AssignBundle { node, bundle, .. } => {
                let at = self.now;
                if let Some(upgrade) = &mut self.cluster().upgrade {
                    upgrade
                        .requested_nodes
                        .insert(node.clone(), NodeUpgrade { requested_at: at, is_done: false });
                }
                if let Some(has) = self.kubernetes_status() {
                    has.assigned_bundles.insert(node, bundle);
                }
            }
            ClusterPlanStep::ClearBundle { node } => {
                if let Some(has) = self.kubernetes_status() {
                    has.assigned_bundles.remove(&node);
                }
            }
            ClusterPlanStep::SendSecretKeys { machine } => self.apply_secret_keys(machine),
            ClusterPlanStep::AdvanceSecretKeys { step } => self.advance_secret_keys(step),
            ClusterPlanStep::RecordUpgrade(turn) => self.apply_upgrade_event(turn),
            ClusterPlanStep::DeleteCluster => {}
        }
    }

    fn node_with_key(&mut self, key: [u8; 32]) -> Option<&mut ClusterNode> {
        self.observed()?.nodes.iter_mut().find(|node| node.key == key)
    }

    fn apply_order(&mut self, machine: MachineId, what: MembershipOrder) {
        let at = self.now;
        if let Some(member) = self.member(machine) {
            let generation = member.last_order.map_or(0, |order| order.generation) + 1;
            member.last_order = Some(LastOrder { order: what, generation, sent_at: at });
        }
    }

    fn begin_authority_step(&mut self, step: AuthorityStep) {
        let since = self.now;
        let Some(theft) = &mut self.cluster().authority_theft else { return };
        let certificate = theft.stage.take().map_or_else(|| b"next".to_vec(), |stage| stage.certificate);
        if step == AuthorityStep::Follow
            && let Some(founded) = &mut self.cluster().identity
        {
            founded.ca_certificate.clone_from(&certificate);
        }
        if let Some(theft) = &mut self.cluster().authority_theft {
            theft.stage = Some(TheftStage { certificate, step, since });
        }
    }

    /// The machine takes the step at once.
    fn apply_authority_order(&mut self, machine: MachineId, step: AuthorityStep) {
        let theft = self.cluster().authority_theft.as_ref();
        let Some(certificate) = theft.and_then(|theft| Some(theft.stage.as_ref()?.certificate.clone()))
        else {
            return;
        };
        self.apply_order(machine, MembershipOrder::Join);
        let Some(member) = self.member(machine) else { return };
        let generation = member.last_order.map_or(0, |order| order.generation);
        let Some(report) = &mut member.report else { return };
        report.generation = generation;
        match step {
            AuthorityStep::Install | AuthorityStep::Follow => {
                report.ca_certificate = Some(certificate);
                (report.next_authority, report.next_authority_step) = (None, None);
            }
            AuthorityStep::Accept | AuthorityStep::Show | AuthorityStep::Reject | AuthorityStep::Close => {
                (report.next_authority, report.next_authority_step) = (Some(certificate), Some(step));
            }
        }
    }

    fn advance_secret_keys(&mut self, step: SecretsStep) {
        let (now, oldest) = (self.now, self.cluster().oldest_snapshot);
        let state = self.cluster().secret_keys.take().unwrap_or_else(|| SecretKeys::new(now));
        self.cluster().secret_keys = Some(state.advance(step, "next", oldest, now));
    }

    /// The machine has the keys at once, and has written every Secret again if that is due.
    fn apply_secret_keys(&mut self, machine: MachineId) {
        let Some(state) = self.cluster().secret_keys.clone() else { return };
        self.apply_order(machine, MembershipOrder::Join);
        let Some(member) = self.member(machine) else { return };
        let generation = member.last_order.map_or(0, |order| order.generation);
        let Some(report) = &mut member.report else { return };
        let (list, rewrite) = (state.provider_list(), state.stage == SecretsStage::Rewriting);
        let rewritten = state.current_key().filter(|_| rewrite).map(SecretKey::name).unwrap_or_default();
        report.generation = generation;
        report.secrets = Some(SecretsReport { ordered: list.clone(), rewrite, running: list, rewritten });
    }

    fn apply_member_addition(&mut self, machine: MachineId, part: ClusterPart) {
        let (name, chosen_at) = (self.machine_name(machine), self.now);
        let ForecastInput { cluster, candidates, locations: places, .. } = &mut self.input;
        if let Some(found) = candidates.iter().position(|candidate| candidate.machine == machine) {
            places.insert(machine, candidates.remove(found).location);
        }
        cluster.members.push(ClusterMember {
            machine,
            name,
            part,
            chosen_at,
            approved_key: None,
            leave_reason: None,
            last_order: None,
            report: None,
            phase: Phase::Ready,
            retiring: false,
            keep_authority: false,
            // Nothing is known of the addresses of nodes, so no step is about one.
            listed_address: None,
        });
    }

    fn apply_member_removal(&mut self, machine: MachineId) {
        let ForecastInput { cluster, candidates, locations: places, .. } = &mut self.input;
        let Some(found) = cluster.members.iter().position(|member| member.machine == machine) else { return };
        let member = cluster.members.remove(found);
        // A restored cluster may need the machine again. Otherwise no member is missing where members are removed.
        if !member.retiring && matches!(member.phase, Phase::Ready | Phase::Installed) {
            let location = places.get(&machine).cloned().flatten();
            let programs = member.report.map(|report| report.programs).unwrap_or_default();
            candidates.push(CandidateMachine { machine, name: member.name, location, programs });
        }
    }

    /// The cluster has one node now; or it is restored, with the nodes that it had.
    fn apply_founding(&mut self, machine: MachineId) {
        let now = self.now;
        let Some(key) = self.member(machine).and_then(|member| member.key()) else { return };
        let mut seen = std::mem::take(&mut self.input.last_observed);
        for node in &mut seen.nodes {
            // The old control plane is of another epoch and gets no messages of this one.
            if node.roles.remove(CONSENSUS_MEMBER_ROLE) {
                node.health = NodeHealth::Silent(std::time::Duration::ZERO);
            }
        }
        seen.nodes.retain(|node| node.key != key);
        let mut founder = new_node(machine, key);
        founder.state = NodeState::Up;
        founder.roles.insert(CONSENSUS_MEMBER_ROLE.to_owned());
        seen.etcd_members =
            vec![EtcdMember { node: Some(founder.id.clone()), learner: false, reachable: true }];
        seen.nodes.push(founder);
        if self.input.cluster.kubernetes.is_some()
            && matches!(seen.kubernetes, ObservedKubernetes::NotQueried)
        {
            seen.kubernetes = ObservedKubernetes::Absent;
        }
        let cluster = self.cluster();
        cluster.identity =
            Some(ClusterIdentity { ca_certificate: vec![1], curators: Vec::new(), founded_at: now });
        if cluster.restoring.take().is_some() {
            cluster.restored_at = Some(now);
            let epoch = cluster.epoch;
            if let Some(report) = self.member(machine).and_then(|member| member.report.as_mut()) {
                report.epoch = epoch;
            }
        }
        self.cluster().observed = CuratorAnswer::Observed(seen);
    }

    fn apply_role_change(&mut self, id: &str, give: &[String], take: &[String]) {
        let Some(node) = self.node(id) else { return };
        node.roles.extend(give.iter().cloned());
        node.roles.retain(|role| !take.contains(role));
        let member = node.is_etcd_member();
        if let Some(seen) = self.observed() {
            let is = |one: &EtcdMember| one.node.as_deref() == Some(id);
            if !member {
                seen.etcd_members.retain(|one| !is(one));
            } else if !seen.etcd_members.iter().any(is) {
                seen.etcd_members.push(EtcdMember {
                    node: Some(id.to_owned()),
                    learner: true,
                    reachable: true,
                });
            }
        }
    }

    fn apply_upgrade_event(&mut self, turn: UpgradeEvent) {
        let cluster = self.cluster();
        let Some(upgrade) = &mut cluster.upgrade else { return };
        match turn {
            UpgradeEvent::NodeDone { node } => {
                if let Some(node_upgrade) = upgrade.requested_nodes.get_mut(&node) {
                    node_upgrade.is_done = true;
                }
            }
            UpgradeEvent::Pause { reason: why } => upgrade.pause_reason = Some(why),
            UpgradeEvent::ReleaseDone => upgrade.release = None,
            UpgradeEvent::Finish => {
                let target =
                    upgrade.bundles.clone().map(|(from, to)| if upgrade.rolling_back { from } else { to });
                cluster.upgrade = None;
                if let (Some(target), Some(wanted)) = (target, &mut cluster.kubernetes) {
                    wanted.spec.bundle.clone_from(&target.digest);
                    wanted.spec.version = target.version;
                    if let Some(has) = self.kubernetes_status() {
                        has.spec.bundle = target.digest;
                    }
                }
            }
        }
    }
}
