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
mod tests {
    use super::*;
    use crate::cluster::authority_theft::AuthorityTheft;
    use crate::cluster::kubernetes::tests::kubernetes;
    use crate::cluster::kubernetes::{
        CuratorKubernetes, DesiredKubernetes, ObservedKubernetes, spec_from_settings,
    };
    use crate::cluster::plan::tests::{at, etcd, healthy_cluster, machine, node, observed, order, plan_text};
    use crate::cluster::secret_keys::{SecretsReport, SecretsRotationOrder};
    use crate::cluster::state::{CONSENSUS_MEMBER_ROLE, Cluster, CuratorAnswer, PeerRenewal};

    /// A state after these steps, all of them taken at second 0.
    fn state(steps: &[SecretsStep]) -> SecretKeys {
        let mut state = SecretKeys::new(at(0));
        for step in steps {
            state = state.advance(*step, "f", None, at(0));
        }
        state
    }

    fn settled() -> SecretKeys {
        state(&[SecretsStep::Generate])
    }

    fn reading() -> SecretKeys {
        state(&[SecretsStep::Generate, SecretsStep::Generate])
    }

    /// A cluster of three controllers that know the order. Its Kubernetes is desired, and the curators have not answered
    /// for it, so nothing else is planned.
    fn cluster(state: Option<SecretKeys>, has_controllers: bool) -> Cluster {
        let mut cluster = healthy_cluster(3);
        cluster.kubernetes =
            Some(DesiredKubernetes { spec: kubernetes(), removing: false, pending_rotations: Vec::new() });
        cluster.secret_keys = state;
        for number in 0..3 {
            cluster.members[number].report.as_mut().unwrap().secrets = Some(SecretsReport::default());
            if has_controllers {
                observed(&mut cluster).nodes[number].roles.insert(CONTROLLER_ROLE.to_owned());
            }
        }
        cluster
    }

    /// The same cluster once its curators have the Kubernetes spec, so that nodes become controllers.
    fn with_active_kubernetes(mut cluster: Cluster) -> Cluster {
        let spec = spec_from_settings(kubernetes().to_settings());
        observed(&mut cluster).kubernetes =
            ObservedKubernetes::Present(CuratorKubernetes { spec, ..CuratorKubernetes::default() });
        cluster
    }

    fn secrets(cluster: &mut Cluster, index: usize) -> &mut SecretsReport {
        cluster.members[index].report.as_mut().unwrap().secrets.as_mut().unwrap()
    }

    /// The machine has the present list, and its API server runs with it.
    fn take(cluster: &mut Cluster, index: usize) {
        let state = cluster.secret_keys.clone().unwrap();
        let report = secrets(cluster, index);
        (report.ordered, report.rewrite) = (state.provider_list(), state.stage == SecretsStage::Rewriting);
        report.running = state.provider_list();
    }

    fn sent(number: u8) -> String {
        ClusterPlanStep::SendSecretKeys { machine: machine(number) }.to_string()
    }

    fn step(step: SecretsStep) -> String {
        ClusterPlanStep::AdvanceSecretKeys { step }.to_string()
    }

    #[test]
    fn first_key_of_a_new_cluster_is_made_before_it_has_a_controller() {
        let mut new = cluster(Some(SecretKeys::new(at(0))), false);
        assert!(plan_text(&new, &[]).starts_with(&step(SecretsStep::Generate)), "{}", plan_text(&new, &[]));
        // A controller of an earlier release writes in plain text.
        new.members[1].report.as_mut().unwrap().secrets = None;
        assert_eq!(plan_text(&new, &[]), "");
        observed(&mut new).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
        assert_eq!(plan_text(&new, &[]), step(SecretsStep::Prepare));
    }

    #[test]
    fn running_cluster_gets_a_key_an_hour_after_every_controller_knows_the_order() {
        let mut old = cluster(None, true);
        assert_eq!(plan_text(&old, &[]), step(SecretsStep::Prepare));
        for (second, knows, expected) in [
            (1000 - 3599, true, String::new()),
            (1000 - 3600, true, step(SecretsStep::Generate)),
            (1000 - 3600, false, step(SecretsStep::Prepare)),
            (1000 - 599, false, String::new()),
        ] {
            old.secret_keys = Some(SecretKeys { since: at(second), ..state(&[SecretsStep::Prepare]) });
            old.members[2].report.as_mut().unwrap().secrets = knows.then(SecretsReport::default);
            let text = plan_text(&old, &[]);
            assert_eq!(text.split("; ").next().unwrap(), expected, "{second} {knows}");
        }
        old.secret_keys = None;
        assert_eq!(plan_text(&old, &[]), "", "one of them does not know it");
        old.kubernetes = None;
        old.members[2].report.as_mut().unwrap().secrets = Some(SecretsReport::default());
        assert_eq!(plan_text(&old, &[]), "", "there is nothing to encrypt");
    }

    #[test]
    fn machine_without_the_present_list_becomes_no_controller() {
        let mut cluster = with_active_kubernetes(cluster(Some(settled()), false));
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(&[1, 2, 3].map(sent).join("; ")), "{text}");
        assert!(!text.contains("+kubernetes-controller"), "{text}");
        take(&mut cluster, 0);
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("node-1 +kubernetes-controller") && !text.contains("node-2 +"), "{text}");
        cluster.members[1].report.as_mut().unwrap().secrets = None;
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("2 waits: its role server is of a release that does not"), "{text}");
    }

    #[test]
    fn controllers_restart_one_at_a_time_and_all_are_waited_for() {
        let next = step(SecretsStep::Write);
        let mut cluster = cluster(Some(reading()), true);
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(&sent(1)) && !text.contains(&sent(2)), "{text}");
        // It has the order, and its API server restarts.
        secrets(&mut cluster, 0).ordered = reading().provider_list();
        let text = plan_text(&cluster, &[]);
        assert!(!text.contains(&sent(2)) && text.contains("1 waits: its API server restarts"), "{text}");
        take(&mut cluster, 0);
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(&sent(2)) && !text.contains(&next), "{text}");
        // The second one is off. It has the order, and holds the third one back, and the stage.
        cluster.members[1].last_order = Some(order(MembershipOrder::Join, 900));
        cluster.members[1].report.as_mut().unwrap().generation = 2;
        let text = plan_text(&cluster, &[]);
        assert!(!text.contains(&sent(3)) && !text.contains(&next), "{text}");
        assert!(text.contains("(reading): 1 of 3 controllers"), "{text}");
        cluster.members[1].report.as_mut().unwrap().generation = 3;
        take(&mut cluster, 1);
        assert!(!plan_text(&cluster, &[]).contains(&next));
        take(&mut cluster, 2);
        assert_eq!(plan_text(&cluster, &[]), next);
        // One that leaves counts until it is ordered to leave.
        secrets(&mut cluster, 2).running.clear();
        cluster.members[2].last_order = Some(order(MembershipOrder::Leave, 5));
        observed(&mut cluster).nodes[2].roles.remove(CONTROLLER_ROLE);
        assert!(plan_text(&cluster, &[]).contains(&next), "{}", plan_text(&cluster, &[]));
    }

    #[test]
    fn controller_without_a_machine_holds_the_stage() {
        let mut cluster = cluster(Some(reading()), true);
        for index in 0..3 {
            take(&mut cluster, index);
        }
        assert_eq!(plan_text(&cluster, &[]), step(SecretsStep::Write));
        observed(&mut cluster).nodes.push(node(7, &[CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE]));
        observed(&mut cluster).etcd_members.push(etcd(7));
        let text = plan_text(&cluster, &[]);
        assert!(
            text.contains("node-7 runs on no machine") && !text.contains(&step(SecretsStep::Write)),
            "{text}"
        );
    }

    #[test]
    fn former_key_is_dropped_after_every_secret_was_written_again() {
        use SecretsStep::{Drop, Generate, Rewrite, Write};
        let mut cluster = cluster(Some(state(&[Generate, Generate, Write, Rewrite])), true);
        let list = cluster.secret_keys.as_ref().unwrap().provider_list();
        for index in 0..3 {
            take(&mut cluster, index);
            secrets(&mut cluster, index).rewrite = false;
        }
        // No API server restarts for it.
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(&[1, 2, 3].map(sent).join("; ")), "{text}");
        for index in 0..3 {
            take(&mut cluster, index);
            secrets(&mut cluster, index).rewritten = "key1-f".to_owned();
        }
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("no API server has written every Secret again yet"), "{text}");
        secrets(&mut cluster, 1).rewritten = "key2-f".to_owned();
        assert_eq!(list, "key2-f key1-f");
        assert_eq!(plan_text(&cluster, &[]), step(Drop));
        // Not while one of them may still write with the former key.
        secrets(&mut cluster, 2).running = "key1-f key2-f".to_owned();
        assert!(!plan_text(&cluster, &[]).contains(&step(Drop)), "{}", plan_text(&cluster, &[]));
    }

    #[test]
    fn another_key_is_made_by_order_and_a_former_one_is_deleted_without_a_snapshot() {
        use SecretsStep::{Drop, Forget, Generate, Rewrite, Write};
        let ordered = SecretsRotationOrder { ordered_at: at(900), ordered_by: "kim".to_owned() };
        let mut cluster = cluster(Some(SecretKeys { rotation: Some(ordered), ..settled() }), true);
        for index in 0..3 {
            take(&mut cluster, index);
        }
        assert_eq!(plan_text(&cluster, &[]), step(Generate));
        cluster.secret_keys = Some(settled());
        assert_eq!(plan_text(&cluster, &[]), "");
        cluster.secret_keys = Some(state(&[Generate, Generate, Write, Rewrite, Drop]));
        for index in 0..3 {
            take(&mut cluster, index);
        }
        cluster.oldest_snapshot = Some(at(-1));
        assert_eq!(plan_text(&cluster, &[]), "", "that snapshot may need it");
        cluster.oldest_snapshot = Some(at(1));
        assert_eq!(plan_text(&cluster, &[]), step(Forget(1)));
    }

    #[test]
    fn key_that_the_database_lost_is_not_replaced() {
        let mut cluster = cluster(Some(settled()), true);
        for index in 0..3 {
            take(&mut cluster, index);
        }
        secrets(&mut cluster, 0).ordered = "key2-other key1-f".to_owned();
        let text = plan_text(&cluster, &[]);
        assert!(
            text.starts_with("1 waits: its API server writes Kubernetes Secrets with key2-other"),
            "{text}"
        );
        // The backup is of a time before the first key. Another first key would leave Secrets unreadable.
        let prepared = SecretKeys { since: at(-3600), ..state(&[SecretsStep::Prepare]) };
        for before in [None, Some(prepared)] {
            cluster.secret_keys = before;
            let text = plan_text(&cluster, &[]);
            assert!(
                text.contains("1 waits: its API server writes Kubernetes Secrets with key2-other"),
                "{text}"
            );
            assert!(!text.contains(&step(SecretsStep::Generate)), "{text}");
        }
    }

    #[test]
    fn machine_becomes_no_controller_while_the_database_lacks_a_key() {
        let mut cluster = with_active_kubernetes(cluster(Some(settled()), false));
        for index in 0..3 {
            take(&mut cluster, index);
        }
        let controller = |number: u8| format!("node-{number} +{CONTROLLER_ROLE}");
        let text = plan_text(&cluster, &[]);
        assert!((1..=3).all(|number| text.contains(&controller(number))), "{text}");
        observed(&mut cluster).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
        secrets(&mut cluster, 0).ordered = "key2-other".to_owned();
        let text = plan_text(&cluster, &[]);
        assert!(!text.contains(&controller(2)) && !text.contains(&sent(2)), "{text}");
        assert!(text.contains("2 waits: it gets no keys of Kubernetes Secrets: m1 writes them"), "{text}");
    }

    #[test]
    fn machine_without_keys_becomes_no_controller_while_none_are_sent() {
        let theft = AuthorityTheft { ordered_by: "kim".to_owned(), stage: None };
        let renewal = PeerRenewal { requested_at: at(900), requested_by: "kim".to_owned() };
        for (theft, renewal) in [(Some(theft), None), (None, Some(renewal))] {
            for state in [settled(), SecretKeys::new(at(0))] {
                let mut cluster = with_active_kubernetes(cluster(Some(state.clone()), false));
                cluster.authority_theft.clone_from(&theft);
                cluster.peer_renewal.clone_from(&renewal);
                let text = plan_text(&cluster, &[]);
                assert!(!text.contains(CONTROLLER_ROLE) && !text.contains(&sent(1)), "{text}");
                if state.stage.has_keys() {
                    take(&mut cluster, 0);
                    let text = plan_text(&cluster, &[]);
                    assert!(text.contains("node-1 +") && !text.contains("node-2 +"), "{text}");
                }
            }
        }
    }

    #[test]
    fn order_that_was_rejected_is_sent_again_after_a_while() {
        let mut cluster = cluster(Some(SecretKeys { since: at(900), ..settled() }), true);
        for index in 1..3 {
            take(&mut cluster, index);
        }
        cluster.members[0].report.as_mut().unwrap().error = Some("the disk is full".to_owned());
        for (ago, is_sent) in [(59, false), (60, true)] {
            cluster.members[0].last_order = Some(order(MembershipOrder::Join, ago));
            let text = plan_text(&cluster, &[]);
            assert_eq!(text.contains(&sent(1)), is_sent, "{ago}: {text}");
        }
    }

    #[test]
    fn keys_wait_for_other_orders_and_come_back_for_a_restore() {
        let mut cluster = cluster(Some(settled()), true);
        cluster.peer_renewal = Some(PeerRenewal { requested_at: at(900), requested_by: "kim".to_owned() });
        assert!(!plan_text(&cluster, &[]).contains(&sent(1)), "{}", plan_text(&cluster, &[]));
        cluster.peer_renewal = None;
        // A machine that has to follow the restored cluster first.
        cluster.epoch = 1;
        assert!(!plan_text(&cluster, &[]).contains(&sent(1)), "{}", plan_text(&cluster, &[]));

        cluster.restoring = Some(PendingRestore {
            requested_at: at(990),
            target_machine: None,
            digest: Some([1; 32]),
            image: None,
        });
        cluster.observed = CuratorAnswer::NotQueried;
        let brought = step(SecretsStep::BringBack(at(990)));
        assert!(plan_text(&cluster, &[]).contains(&brought), "{}", plan_text(&cluster, &[]));
        cluster.secret_keys.as_mut().unwrap().restored_for = Some(at(990));
        assert!(!plan_text(&cluster, &[]).contains(&brought), "{}", plan_text(&cluster, &[]));
    }
}
