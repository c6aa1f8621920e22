//! Plans the encryption of Kubernetes Secrets: the orders to controllers, and the steps of the cluster.
//!
//! [`secret_keys`](crate::cluster::secret_keys) explains the stages. The plan follows from the stored state and from what
//! machines report over their agent channel.
//!
//! # Who is waited for
//!
//! Each machine of the control plane that is a node, however long it is silent, until its order is to leave: an API
//! server that does not know a key cannot read what others write with it. One that is off holds the stage, gets the
//! order when it reports, or is retired. A controller that runs on no machine of the control plane holds it, too. A
//! machine without the present list becomes no controller.
//!
//! # One at a time
//!
//! A controller restarts its API server for another list, and reports the list once that API server is healthy. Only
//! then is the next controller sent it. A machine without an API server has nothing to restart, and waits for nobody.
//!
//! # What else uses the orders of machines
//!
//! A machine has one order at a time. An order that it has not reported on stays. While certificates for etcd or another
//! authority are sent, no keys are, and a machine that lacks them becomes no controller.
//!
//! # A database that lost a key
//!
//! After a restore of the database from a backup, a controller may write with a key that is not there. Other API servers
//! could not read what it writes. So nothing is sent and no key is made until the database has that key, and no machine
//! becomes a controller.

use std::time::Duration;

use crate::cluster::kubernetes::CONTROLLER_ROLE;
use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::secret_keys::{PLAIN_PROVIDER, SecretKeys, SecretsStage, SecretsStep};
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{ClusterMember, MembershipOrder, NodeState, ObservedCluster, PendingRestore};
use crate::time::{Timestamp, between};

/// How long controllers have to know the order before the first key is made. Until then they can go back to a release
/// that does not know it: its API servers could not read what is encrypted.
pub const ADOPTION_DELAY: Duration = Duration::from_hours(1);
/// How often that time begins again while a controller does not know the order.
const PREPARE_INTERVAL: Duration = Duration::from_mins(10);
/// How long a machine that has rejected the order waits before it gets it again.
const ORDER_RETRY_AFTER: Duration = Duration::from_mins(1);

/// What a controller lacks of the present list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeysDelivery {
    /// Its API server runs with it.
    Done,
    /// It gets the order now, or after the others.
    Due,
    /// It has the order, or cannot get it; the text is what it waits for, without a full stop.
    Waits(String),
}

/// Whether this machine has an API server, or may get one: a machine of the control plane that is a node.
#[must_use]
pub fn is_controller(member: &ClusterMember) -> bool {
    let leaves = member.last_order.is_some_and(|order| order.order == MembershipOrder::Leave);
    let is_node =
        member.report.as_ref().is_some_and(|report| report.key.is_some() && report.ca_certificate.is_some());
    member.part == ClusterPart::ControlPlane && is_node && !leaves
}

/// What this controller lacks. `epoch` is that of the cluster.
#[must_use]
pub fn keys_delivery(member: &ClusterMember, state: &SecretKeys, epoch: u64, now: Timestamp) -> KeysDelivery {
    let waits = |text: &str| KeysDelivery::Waits(text.to_owned());
    let report = member.report.clone().unwrap_or_default();
    let Some(secrets) = &report.secrets else {
        return waits("its role server is of a release that does not encrypt Kubernetes Secrets; update it");
    };
    let (list, rewrites) = (state.provider_list(), state.stage == SecretsStage::Rewriting);
    let has_order = secrets.ordered == list && secrets.rewrite == rewrites;
    if has_order && secrets.running == list {
        return KeysDelivery::Done;
    }
    let Some(order) = member.last_order else { return KeysDelivery::Due };
    if report.generation < order.generation {
        return waits("it has to report on its last order before it gets the keys of Kubernetes Secrets");
    }
    if report.epoch < epoch {
        return waits("it has to follow the restored cluster before it gets the keys of Kubernetes Secrets");
    }
    match &report.error {
        _ if has_order => waits("its API server restarts with the keys of Kubernetes Secrets"),
        Some(error) if order.sent_at > state.since && between(order.sent_at, now) < ORDER_RETRY_AFTER => {
            KeysDelivery::Waits(format!("it has no present keys of Kubernetes Secrets, and reports: {error}"))
        }
        _ => KeysDelivery::Due,
    }
}

/// The key that this machine writes with by its order, if the database does not have it.
fn lost_key<'m>(member: &'m ClusterMember, state: Option<&SecretKeys>) -> Option<&'m str> {
    let list = &member.report.as_ref()?.secrets.as_ref()?.ordered;
    let first = list.split(' ').next().filter(|name| !name.is_empty() && *name != PLAIN_PROVIDER)?;
    state.is_none_or(|state| state.find(first).is_none()).then_some(first)
}

/// Whether the node of this machine has an API server, or is about to start one.
fn has_api_server(member: &ClusterMember, seen: &ObservedCluster) -> bool {
    let node = member.key().and_then(|key| seen.node_by_key(&key));
    node.is_some_and(|node| node.roles.contains(CONTROLLER_ROLE))
}

impl ClusterPlanner<'_> {
    /// Brings every key back that the snapshot may need, once for each order to restore the cluster.
    pub(super) fn bring_back_secret_keys(&mut self, restoring: &PendingRestore) {
        let ordered_at = restoring.requested_at;
        let state = self.cluster.secret_keys.as_ref().filter(|state| state.stage.has_keys());
        if state.is_some_and(|state| state.restored_for != Some(ordered_at)) {
            self.push_step(ClusterPlanStep::AdvanceSecretKeys { step: SecretsStep::BringBack(ordered_at) });
        }
    }

    /// Plans the orders with keys that are due, or the next step.
    pub(super) fn plan_secret_keys(&mut self, seen: &ObservedCluster) {
        let cluster = self.cluster;
        let is_new = cluster.secret_keys.as_ref().is_some_and(|state| state.stage == SecretsStage::New);
        if is_new && seen.nodes.iter().any(|node| node.roles.contains(CONTROLLER_ROLE)) {
            // From now on, etcd may have Secrets in plain text.
            return self.push_step(ClusterPlanStep::AdvanceSecretKeys { step: SecretsStep::Prepare });
        }
        let is_desired = cluster.kubernetes.as_ref().is_some_and(|wanted| !wanted.removing);
        if !is_desired {
            return;
        }
        let controllers: Vec<&ClusterMember> =
            cluster.members.iter().filter(|member| is_controller(member)).collect();
        if self.wait_for_lost_key(&controllers) {
            return;
        }
        // These use the orders of the same machines.
        if cluster.authority_theft.is_some() || cluster.peer_renewal.is_some() {
            return self.hold_new_controllers(&controllers, seen);
        }
        let Some(state) = cluster.secret_keys.as_ref().filter(|state| state.stage.has_keys()) else {
            let knows = |member: &&ClusterMember| {
                member.report.as_ref().is_some_and(|report| report.secrets.is_some())
            };
            let all_know = !controllers.is_empty() && controllers.iter().all(knows);
            return self.plan_first_key(&controllers, all_know);
        };
        let done = self.send_secret_keys(state, &controllers, seen);
        let stranger = find_stranger(&controllers, seen);
        if let Some(node) = &stranger {
            self.plan.wait_reasons.push(format!(
                "its Kubernetes controller {node} runs on no machine of its control plane, so nobody sends it the keys of \
                 Secrets: take its role {CONTROLLER_ROLE} with Management.UpdateRoles of the curators"
            ));
        }
        let all_done = !controllers.is_empty() && done == controllers.len() && stranger.is_none();
        if let Some(step) = next_step(state, &controllers, all_done, cluster.oldest_snapshot) {
            self.push_step(ClusterPlanStep::AdvanceSecretKeys { step });
        } else if state.stage.is_rotating() {
            let rest = match (state.stage, all_done) {
                (SecretsStage::Rewriting, true) => {
                    "no API server has written every Secret again yet".to_owned()
                }
                _ => format!("{done} of {} controllers have the present keys", controllers.len()),
            };
            self.plan
                .wait_reasons
                .push(format!("the key of its Kubernetes Secrets is introduced ({}): {rest}", state.stage));
        }
    }

    /// Whether a controller writes with a key that the database does not have. Then every machine waits.
    fn wait_for_lost_key(&mut self, controllers: &[&ClusterMember]) -> bool {
        let state = self.cluster.secret_keys.as_ref();
        let Some(writer) = controllers.iter().find(|member| lost_key(member, state).is_some()) else {
            return false;
        };
        for member in controllers {
            let reason = match lost_key(member, state) {
                Some(key) => format!(
                    "its API server writes Kubernetes Secrets with {key}, which this database does not have; if the database \
                     was restored from a backup, restore a later backup"
                ),
                None => format!(
                    "it gets no keys of Kubernetes Secrets: {} writes them with one that this database does not have",
                    writer.name
                ),
            };
            self.push_wait(member, reason);
        }
        true
    }

    /// Lets machines without the present list wait while no keys are sent. Where Secrets are in plain text, a controller
    /// needs none.
    fn hold_new_controllers(&mut self, controllers: &[&ClusterMember], seen: &ObservedCluster) {
        let state = self.cluster.secret_keys.as_ref().filter(|state| state.stage != SecretsStage::Prepared);
        let Some(state) = state else { return };
        for member in controllers.iter().filter(|member| !has_api_server(member, seen)) {
            let delivery = keys_delivery(member, state, self.cluster.epoch, self.now);
            if !state.stage.has_keys() || delivery != KeysDelivery::Done {
                let reason =
                    "it gets the keys of Kubernetes Secrets after other orders about etcd or the authority";
                self.plan.machine_waits.entry(member.machine).or_insert_with(|| reason.to_owned());
            }
        }
    }

    /// Plans the first key, or the time before it.
    fn plan_first_key(&mut self, controllers: &[&ClusterMember], all_know: bool) {
        let state = self.cluster.secret_keys.as_ref();
        let step = match state.map(|state| (state.stage, between(state.since, self.now))) {
            None => all_know.then_some(SecretsStep::Prepare),
            Some((SecretsStage::New, _)) => all_know.then_some(SecretsStep::Generate),
            Some((_, age)) if all_know => (age >= ADOPTION_DELAY).then_some(SecretsStep::Generate),
            Some((_, age)) => (age >= PREPARE_INTERVAL).then_some(SecretsStep::Prepare),
        };
        let Some(step) = step else { return };
        self.push_step(ClusterPlanStep::AdvanceSecretKeys { step });
        if step == SecretsStep::Generate {
            for member in controllers {
                self.push_wait(member, "the key of Kubernetes Secrets is made");
            }
        }
    }

    /// Plans the orders that are due now. Returns how many controllers need none.
    fn send_secret_keys(
        &mut self,
        state: &SecretKeys,
        controllers: &[&ClusterMember],
        seen: &ObservedCluster,
    ) -> usize {
        let list = state.provider_list();
        let runs_with = |member: &ClusterMember| {
            let secrets = member.report.as_ref().and_then(|report| report.secrets.as_ref());
            secrets.is_some_and(|secrets| secrets.running == list)
        };
        let deliveries: Vec<(&ClusterMember, KeysDelivery)> = controllers
            .iter()
            .map(|member| (*member, keys_delivery(member, state, self.cluster.epoch, self.now)))
            .collect();
        let restarts = |(member, delivery): &(&ClusterMember, KeysDelivery)| {
            matches!(delivery, KeysDelivery::Waits(_)) && has_api_server(member, seen) && !runs_with(member)
        };
        let mut is_busy = deliveries.iter().any(restarts);
        let mut done = 0;
        for (member, delivery) in deliveries {
            match delivery {
                KeysDelivery::Done => done += 1,
                KeysDelivery::Waits(reason) => self.push_wait(member, reason),
                KeysDelivery::Due => {
                    let needs_restart = has_api_server(member, seen) && !runs_with(member);
                    if needs_restart && is_busy {
                        self.push_wait(
                            member,
                            "it gets the keys of Kubernetes Secrets after another controller",
                        );
                        continue;
                    }
                    is_busy |= needs_restart;
                    self.push_step(ClusterPlanStep::SendSecretKeys { machine: member.machine });
                    self.push_wait(member, "it is sent the keys of Kubernetes Secrets");
                }
            }
        }
        done
    }
}

/// A controller that runs on none of these machines. It would not be able to read Secrets.
fn find_stranger(controllers: &[&ClusterMember], seen: &ObservedCluster) -> Option<String> {
    let is_ours = |key: &[u8; 32]| controllers.iter().any(|member| member.key() == Some(*key));
    let mut nodes =
        seen.nodes.iter().filter(|node| node.state == NodeState::Up && node.roles.contains(CONTROLLER_ROLE));
    nodes.find(|node| !is_ours(&node.key)).map(|node| node.id.clone())
}

/// The next step once every controller has the present list.
fn next_step(
    state: &SecretKeys,
    controllers: &[&ClusterMember],
    all_done: bool,
    oldest_snapshot: Option<Timestamp>,
) -> Option<SecretsStep> {
    let is_rewritten = || {
        let current = state.current_key()?.name();
        let mut reports = controllers.iter().filter_map(|member| member.report.as_ref()?.secrets.as_ref());
        reports.find(|secrets| secrets.rewritten == current)
    };
    match state.stage {
        _ if !all_done => None,
        SecretsStage::Reading => Some(SecretsStep::Write),
        SecretsStage::Writing => Some(SecretsStep::Rewrite),
        SecretsStage::Rewriting => is_rewritten().map(|_| SecretsStep::Drop),
        SecretsStage::Settled if state.rotation.is_some() => Some(SecretsStep::Generate),
        SecretsStage::Settled => state.find_unneeded(oldest_snapshot).map(SecretsStep::Forget),
        SecretsStage::New | SecretsStage::Prepared => None,
    }
}

#[cfg(test)]
mod tests;
