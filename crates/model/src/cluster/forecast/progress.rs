//! Progress without a step: what happens by itself while a forecast waits.

use std::collections::BTreeSet;

use crate::cluster::forecast::{ForecastRun, new_node};
use crate::cluster::kubernetes::{
    CONTROLLER_ROLE, ComponentStatus, NodeKubernetes, ObservedKubernetes, WORKER_ROLE,
};
use crate::cluster::secret_keys::SecretsReport;
use crate::cluster::state::{EtcdMember, MemberReport, MembershipOrder, NodeHealth, NodeState};
use crate::ids::MachineId;
use crate::phase::Phase;

impl ForecastRun {
    /// Applies what happens by itself; returns whether anything did.
    pub(super) fn advance(&mut self) -> bool {
        let mut passed = self.advance_member_reports();
        let now_epoch = self.input.cluster.epoch;
        let standby: Vec<[u8; 32]> = match self.observed() {
            None => Vec::new(),
            Some(seen) => {
                let mut let_in = Vec::new();
                for node in seen.nodes.iter_mut().filter(|node| node.state == NodeState::Standby) {
                    node.state = NodeState::Up;
                    let_in.push(node.key);
                }
                let messages: BTreeSet<&String> = (seen.nodes.iter())
                    .filter(|node| node.health == NodeHealth::Healthy)
                    .map(|node| &node.id)
                    .collect();
                let is_observed =
                    |member: &EtcdMember| member.node.as_ref().is_some_and(|node| messages.contains(node));
                for member in seen.etcd_members.iter_mut().filter(|member| is_observed(member)) {
                    passed |= member.learner || !member.reachable;
                    (member.learner, member.reachable) = (false, true);
                }
                let_in
            }
        };
        passed |= !standby.is_empty();
        for member in &mut self.cluster().members {
            if let Some(report) =
                member.report.as_mut().filter(|report| report.key.is_some_and(|key| standby.contains(&key)))
            {
                report.ca_certificate = Some(vec![1]);
                report.epoch = now_epoch;
            }
        }
        passed |= self.advance_node_kubernetes();
        if let Some(upgrade) = &mut self.cluster().upgrade
            && upgrade.pause_reason.is_none()
        {
            if let Some(release) = &mut upgrade.release
                && (release.pause_reason.is_none() && release.outcome.is_none())
            {
                release.outcome = Some(("finished".to_owned(), 0));
                passed = true;
            }
            passed |= upgrade.conflicting_roll_out.take().is_some();
        }
        passed
    }

    /// Machines take their last order and report it; returns whether any did.
    fn advance_member_reports(&mut self) -> bool {
        let (mut answered, mut registered) = (false, Vec::new());
        let epoch = self.input.cluster.epoch;
        // A machine that joins runs the release that its cluster needs.
        let has_keys = self.cluster().secret_keys.as_ref().is_some_and(|state| state.stage.has_keys());
        for member in &mut self.cluster().members {
            let received = matches!(member.phase, Phase::Ready | Phase::Installed);
            let Some(order) = member.last_order.filter(|_| received) else { continue };
            let before = member.report.clone().unwrap_or_default();
            if before.generation == order.generation && before.error.is_none() {
                continue;
            }
            answered = true;
            let key = before.key.unwrap_or_else(|| simulated_key(member.machine, order.generation));
            let founds = (order.order == MembershipOrder::Found).then(|| vec![1]);
            member.report = Some(MemberReport {
                generation: order.generation,
                key: (order.order != MembershipOrder::Leave).then_some(key),
                ca_certificate: (order.order != MembershipOrder::Leave)
                    .then_some(before.ca_certificate)
                    .flatten()
                    .or(founds),
                address: Some(before.address.unwrap_or_else(|| member.name.clone())),
                error: None,
                epoch: if order.order == MembershipOrder::Leave { before.epoch } else { epoch },
                next_authority: before.next_authority,
                next_authority_step: before.next_authority_step,
                programs: before.programs,
                secrets: before.secrets.or_else(|| has_keys.then(SecretsReport::default)),
            });
            if order.order == MembershipOrder::Join {
                registered.push((member.machine, key));
            }
        }
        if let Some(seen) = self.observed() {
            for (machine, key) in registered {
                if seen.node_by_key(&key).is_none() {
                    seen.nodes.push(new_node(machine, key));
                }
            }
        }
        answered
    }

    /// Nodes run the Kubernetes that their roles and bundles demand; returns whether any changed.
    fn advance_node_kubernetes(&mut self) -> bool {
        let Some(wanted) = self.input.cluster.kubernetes.clone() else { return false };
        let bundles = self.input.cluster.upgrade.as_ref().and_then(|upgrade| upgrade.bundles.clone());
        let version = |digest: &str| match &bundles {
            Some((from, _)) if from.digest == digest => from.version.clone(),
            Some((_, to)) if to.digest == digest => to.version.clone(),
            _ => wanted.spec.version.clone(),
        };
        let Some(seen) = self.observed() else { return false };
        let ObservedKubernetes::Present(has) = &mut seen.kubernetes else { return false };
        let mut came = !has.rotations.is_empty();
        has.rotations.clear();
        for node in seen.nodes.iter_mut().filter(|node| node.health == NodeHealth::Healthy) {
            let role = [CONTROLLER_ROLE, WORKER_ROLE].into_iter().find(|role| node.roles.contains(*role));
            let bundle = has.bundle_of(&node.id);
            let runs = role.map(|role| NodeKubernetes {
                bundle: bundle.to_owned(),
                version: version(bundle),
                components: vec![healthy_component(role)],
                ..NodeKubernetes::default()
            });
            let already = match (&node.kubernetes, &runs) {
                (Some(is), Some(runs)) => is.bundle == runs.bundle && is.unhealthy_reason().is_none(),
                (None, None) => true,
                (Some(is), None) => is.bundle.is_empty(),
                (None, Some(_)) => false,
            };
            if !already {
                node.kubernetes = runs;
                came = true;
            }
        }
        came
    }
}

fn healthy_component(role: &str) -> ComponentStatus {
    ComponentStatus {
        name: role.to_owned(),
        state: "healthy".to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    }
}

/// A key that no real node has, made from the machine and the generation of its order.
fn simulated_key(machine: MachineId, generation: i64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(machine.0.as_bytes());
    key[16..24].copy_from_slice(&generation.to_be_bytes());
    key
}
